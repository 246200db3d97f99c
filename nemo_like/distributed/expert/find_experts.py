"""Find the modules of a model that hold experts, and the way in which they are called. Changes nothing."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from nemo_like._util.module_tree import bare, bare_modules, glob_to_regex
from nemo_like._util.words import a_or_an
from nemo_like.layers.structure import is_list_of_experts
from nemo_like.transformers_compat import text_config

ROUTED, EVERY = "routed", "every"
_DISPATCHED = "ep_dispatch_experts"  # what plans of transformers call a module that is called with the routing


@dataclass(frozen=True, eq=False)
class Experts:
    """One module that holds all experts of a layer in fused weights, (experts, ..., ...) each."""

    fqn: str
    module: nn.Module
    count: int
    """Experts in all."""
    call: str
    """``routed``: called with tokens (N, D), chosen experts (N, k) and their weights (N, k), returns (N, D). ``every``:
    called with the rows of every expert one after the other, (experts * N, D), returns as many (Llama 4)."""

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the weights that each expert has its own part of: the first dim is the expert's number."""
        rows = _fused_rows(self.module)
        parameters = self.module._parameters.items()
        return tuple(name for name, p in parameters if p is not None and p.dim() and p.shape[0] == rows)

    @property
    def weights(self) -> list[nn.Parameter]:
        """The parameters called `parameters`."""
        return [self.module.get_parameter(name) for name in self.parameters]

    @property
    def shared(self) -> dict[str, nn.Parameter]:
        """Parameters inside that belong to no single expert, such as a norm of what each gives: every rank has them."""
        parameters = set(self.parameters)
        return {name: p for name, p in self.module.named_parameters() if name not in parameters}


def find_experts(model: nn.Module, plan: Mapping[str, str] | None = None) -> tuple[Experts, ...]:
    """The modules that hold experts, in the model's order.

    Args:
        model: with or without wrappers; on any device.
        plan: name pattern (``*`` within one dotted segment) of modules to how they are called (`Experts.call`). None:
            the expert plan of the model's transformers config; without one, modules are found by structure: fused weights
            of three dimensions, and no weight of their own that is not fused.
            Of a module that is named, weights with another first dim than those of three dims are `Experts.shared`.

    Raises:
        ValueError: a pattern of the caller's that matches nothing, or a module without fused weights.
    """
    if plan is not None:
        return tuple(_planned(model, plan))
    patterns = _config_plan(model)
    if patterns:
        # The plan names modules below the base model, which may itself be below a head or a multimodal model.
        regexes = [glob_to_regex(f"**.{pattern}") for pattern in patterns] + [glob_to_regex(p) for p in patterns]
        named = [(n, m) for n, m in bare_modules(model) if any(r.fullmatch(n) for r in regexes)]
        experts = tuple(_experts(name, m, ROUTED) for name, m in named if _fused_rows(m) is not None)
        if experts:
            return experts
    return tuple(_by_structure(model))


def refuse_lists(model: nn.Module, size: int, plan: Mapping[str, str] | None = None) -> None:
    """Raise ValueError where experts of `model` that ``ep=size`` would divide are a list of modules. `plan`: as
    `ExpertParallel.plan`."""
    listed = next(_lists(model, plan), None)
    if listed is None:
        return
    name, experts = listed
    kind = type(bare(next(iter(experts.children())))).__name__
    raise ValueError(
        f"ep is {size}, and the experts {name!r} are {a_or_an(experts)} of {len(experts)} modules {kind}. A rank receives "
        "all rows of its experts at once, and the block calls a list one expert at a time. Convert it to fused experts: "
        "from_pretrained() of transformers 5 or newer reads such a checkpoint into fused weights (MixtralExperts and the "
        "like); in a model of your own, write them as one module with weights (experts, ..., ...) each. Or use ep=1."
    )


def _lists(model: nn.Module, plan: Mapping[str, str] | None) -> Iterator[tuple[str, nn.ModuleList | nn.ModuleDict]]:
    """Lists of modules in the place of what `find_experts` looks for: named by `plan`, or called ``experts``."""
    if plan is None and any(experts.call == ROUTED for experts in find_experts(model) if _config_plan(model)):
        return
    regexes = None if plan is None else [glob_to_regex(pattern) for pattern in plan]
    for name, module in bare_modules(model):
        if not isinstance(module, nn.ModuleList | nn.ModuleDict) or not len(module):
            continue
        if is_list_of_experts(name, module) if regexes is None else any(regex.fullmatch(name) for regex in regexes):
            yield name, module


def experts_per_token(model: nn.Module) -> int | None:
    """Experts that a token goes to, by the model's config; None: it is not there."""
    config: Any = getattr(model, "config", None)
    text = text_config(config)
    chosen = getattr(text, "num_experts_per_tok", None)
    return int(chosen) if chosen else None


def _planned(model: nn.Module, plan: Mapping[str, str]) -> Iterator[Experts]:
    for pattern, call in plan.items():
        regex = glob_to_regex(pattern)
        named = [(name, module) for name, module in bare_modules(model) if regex.fullmatch(name)]
        if not named:
            raise ValueError(
                f"ExpertParallel.plan has {pattern!r}, which matches no module of this {type(model).__name__}."
            )
        for name, module in named:
            if _fused_rows(module) is None:
                raise ValueError(
                    f"ExpertParallel.plan names {name!r}, {a_or_an(module)}, whose own parameters are not fused "
                    "weights: it must have some of three dims, with the experts as the first, as many in all of them."
                )
            yield _experts(name, module, call)


def _by_structure(model: nn.Module) -> Iterator[Experts]:
    for name, module in bare_modules(model):
        weights = [p for p in module._parameters.values() if p is not None and p.dim() == 3]
        if _all_fused(module) and len(weights) > 1 and (call := _call_of(module)) is not None:
            yield _experts(name, module, call)


def _fused_rows(module: nn.Module) -> int | None:
    """The first dim that all of `module`'s own weights of three dims have; None: there are none, or they differ."""
    rows = {p.shape[0] for p in module._parameters.values() if p is not None and p.dim() == 3}
    return rows.pop() if len(rows) == 1 else None


def _all_fused(module: nn.Module) -> bool:
    """Return whether all of `module`'s own parameters have the first dim of its fused weights."""
    rows = _fused_rows(module)
    parameters = [p for p in module._parameters.values() if p is not None]
    return rows is not None and all(p.dim() and p.shape[0] == rows for p in parameters)


def _call_of(module: nn.Module) -> str | None:
    """Return the way in which `module` is called, by the number of arguments of its forward; None: in neither of the
    known ways."""
    try:
        parameters = inspect.signature(type(module).forward).parameters
    except (TypeError, ValueError):
        return None
    positional = [p for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return {2: EVERY, 4: ROUTED}.get(len(positional))  # with self


def _experts(name: str, module: nn.Module, call: str) -> Experts:
    count = _fused_rows(module)
    assert count is not None
    return Experts(name, module, count, call)


def _config_plan(model: nn.Module) -> list[str]:
    """The patterns of modules that the plan of the model's config, or of its text config, sends tokens to."""
    config: Any = getattr(model, "config", None)
    text = getattr(config, "get_text_config", None)
    for source in (config, text() if callable(text) else None):
        plan = getattr(source, "base_model_ep_plan", None)
        if isinstance(plan, Mapping):
            return [pattern for pattern, style in plan.items() if style == _DISPATCHED]
    return []
