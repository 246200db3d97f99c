"""Each rank keeps some of a layer's experts, and its forward sends tokens to the others and takes theirs."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from nemo_like._util.log import warn_once
from nemo_like._util.module_tree import bare_modules, glob_to_regex
from nemo_like.distributed.expert.exchange import Exchange, group_key
from nemo_like.distributed.expert.expert_mesh import ExpertMesh, check_expert_ranks
from nemo_like.distributed.expert.find_experts import EVERY, Experts, find_experts, refuse_lists
from nemo_like.distributed.expert.grouped import expert_of_rows, fused_mlp, is_understood, zero_rows_stay_zero
from nemo_like.distributed.expert.tensor_ranks import TensorRanks
from nemo_like.distributed.mesh import axis_size
from nemo_like.options import ExpertParallel
from nemo_like.torch_compat import free_last_gather, in_backward, root_mesh


def check_experts(model: nn.Module, mesh: DeviceMesh, parallel: ExpertParallel) -> tuple[Experts, ...]:
    """The experts that `split_experts` would split, or its error. Changes nothing.

    Raises:
        ValueError: no experts are found, or they are lists of modules; their number is not divisible by the ranks; ranks
            that do not divide those of one copy of the model; a module that is neither understood nor called in a known way.
    """
    check_expert_ranks(mesh, parallel.size)
    refuse_lists(model, parallel.size, parallel.plan)
    stage = axis_size(root_mesh(mesh), "pp") > 1  # others may have the layers with experts
    found = () if stage and not has_experts(model, parallel.plan) else find_experts(model, parallel.plan)
    if not found and not stage:
        raise ValueError(
            f"ep is {parallel.size}, and no experts were found in this {type(model).__name__}. Name the modules that hold "
            "them: ExpertParallel(size, plan={'layers.*.experts': 'routed'}), or use ep=1."
        )
    uses = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
    for experts in found:
        if experts.count % parallel.size:
            raise ValueError(
                f"ep is {parallel.size}, which does not divide the {experts.count} experts of {experts.fqn!r}: use a "
                "divisor."
            )
        if any(isinstance(p, DTensor) for p in experts.module.parameters()):
            raise ValueError(
                f"The weights of {experts.fqn!r} are split or sharded already: use ep=1, or a model as built."
            )
        if tied := next((name for name in experts.parameters if uses[id(experts.module._parameters[name])] > 1), None):
            raise ValueError(
                f"ep is {parallel.size}, and {tied!r} of {experts.fqn!r} is a parameter of another module, too, which would "
                "have one of its own then: untie them, or use ep=1."
            )
        if hasattr(experts.module, "parametrizations"):
            raise ValueError(
                f"ep is {parallel.size}, and the weights of {experts.fqn!r} are parametrized, which would be computed for "
                "experts that this rank does not have: remove the parametrization, or use ep=1."
            )
        if axis_size(mesh, "tp") > 1 and adapters_on(model, experts.module):
            raise ValueError(
                f"ep is {parallel.size} with tp, and there are adapters on the weights of {experts.fqn!r}, whose "
                "gradients would be those of one rank of tp. Adapt the linears next to them (target_modules), or use tp=1."
            )
    return found


def has_experts(model: nn.Module, plan: Mapping[str, str] | None = None) -> bool:
    """Return whether `model`, a part of a larger one, has any of the modules that hold experts; `plan`: as
    `ExpertParallel.plan`."""
    if plan is None:
        return bool(find_experts(model))
    regexes = [glob_to_regex(pattern) for pattern in plan]
    return any(regex.fullmatch(name) for name, _ in bare_modules(model) for regex in regexes)


def split_experts(model: nn.Module, found: Sequence[Experts], mesh: ExpertMesh) -> None:
    """Keep this rank's part of each module's weights, and let its forward exchange tokens. In place.

    The weights become DTensors over ``mesh.ep``, cut on the first dim; what is on the meta device stays there.
    """
    tp = TensorRanks.from_mesh(mesh.dense["tp"]) if axis_size(mesh.dense, "tp") > 1 else None
    for experts in found:
        module = experts.module
        for name in experts.parameters:
            whole = module._parameters[name]
            assert whole is not None
            # src_data_rank=None: every rank cuts its own part out of its own copy, and nothing is sent.
            part = distribute_tensor(whole.detach(), mesh.ep, [Shard(0)], src_data_rank=None)
            kept = nn.Parameter(_own_memory(part), requires_grad=whole.requires_grad)
            kept.__dict__.update(whole.__dict__)
            module._parameters[name] = kept
        adapters = adapters_on(model, module)
        pass_through(adapters)
        module.forward = SplitExperts(
            experts,
            ranks=mesh.ep.size(),
            group=group_key(mesh.ep.get_group()),
            tp=tp,
            adapters=adapters,
            rank=mesh.ep.get_local_rank(),
        )


def _own_memory(part: DTensor) -> DTensor:
    """A copy, where the part is a view: it would keep the other ranks' experts alive."""
    local = part.to_local()
    if local.is_meta or local.untyped_storage().nbytes() == local.numel() * local.element_size():
        return part
    return DTensor.from_local(local.clone(), part.device_mesh, part.placements, run_check=False)


class SplitExperts:
    """The forward of a module whose experts are split: exchange, compute, exchange back.

    Takes and gives what the module's own forward does (`Experts.call`), on this rank's tokens. `ranks`: those that share
    the experts; `group`: their process group, by `group_key`; `rank`: this one of it; `tp`: ranks with the same tokens;
    `adapters`: on the weights (`adapters_on`).
    """

    def __init__(
        self,
        experts: Experts,
        *,
        ranks: int,
        group: str,
        rank: int = 0,
        tp: TensorRanks | None = None,
        adapters: Sequence[nn.Module] = (),
    ) -> None:
        self.fqn, self.count, self.call = experts.fqn, experts.count, experts.call
        self.module = experts.module
        self.own = experts.parameters
        self.inside = type(experts.module).forward
        self.tp = tp
        self.local = experts.count // ranks
        self.first = rank * self.local
        self.adapters = adapters
        self.understood = is_understood(experts.module)
        self.sparse = self.understood and zero_rows_stay_zero(experts.module)
        self.exchange = Exchange(self.count, group)

    @torch.compiler.disable
    def __call__(self, hidden: Tensor, *routing: Any, **named: Any) -> Tensor:
        if in_backward():
            # Recomputation: FSDP2 would keep it as in forward, together with backward's own memory.
            free_last_gather(self.module)
        if self.call == EVERY:
            return self.every(hidden)
        chosen, weights = (*routing, *named.values())
        return self.routed(hidden, chosen, weights)

    def routed(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Tokens (N, D), their experts (N, k) and weights (N, k) → (N, D)."""
        tokens = hidden.shape[0]
        if self.tp is not None:
            # The ranks of tp have the same tokens: each sends its part of them, or an expert would see each several times.
            hidden, chosen, weights = (self.tp.own_part(tensor) for tensor in (hidden, chosen, weights))
        out = self.sent_and_back(hidden, chosen, weights)
        return out if self.tp is None else self.tp.all_parts(out, tokens)

    def every(self, hidden: Tensor) -> Tensor:
        """The rows of each expert one after the other, (experts * N, D) → the same."""
        rows = hidden.shape[0]
        parts = hidden if self.tp is None else self.tp.own_part(hidden.view(self.count, -1, hidden.shape[-1]), dim=1)
        shape, parts = parts.shape, parts.reshape(-1, parts.shape[-1])
        each = parts.shape[0] // self.count
        chosen = torch.arange(self.count, device=parts.device).repeat_interleave(each)
        if self.sparse:
            chosen = chosen.masked_fill((parts == 0).all(-1), self.count)
        out = self.sent_and_back(parts, chosen[:, None], None).view(shape)
        return out if self.tp is None else self.tp.all_parts(out, rows // self.count, dim=1).reshape(rows, -1)

    def sent_and_back(self, rows: Tensor, chosen: Tensor, weights: Tensor | None) -> Tensor:
        """Rows (N, D), their experts (N, k) and weights (N, k) → (N, D), through whatever rank has the experts."""
        dtype = rows.dtype
        if self.understood:
            rows = rows.to(self.computes_in(rows))
        taken, sent = self.exchange.send(rows, chosen, weights)
        return self.exchange.bring_back(self.compute(taken, sent.counts, sent.ends), sent).to(dtype)

    def computes_in(self, rows: Tensor) -> torch.dtype:
        """The dtype of products with `rows`: autocast's, which knows no grouped product, or that of the weights."""
        device = rows.device.type
        autocast = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if autocast else self.weight_of("down_proj").dtype
        if rows.is_cuda and dtype != torch.bfloat16:
            warn_once(
                f"Experts compute in {dtype}, one product for each: the grouped product of CUDA takes bfloat16 alone. "
                "Faster: Precision(param_dtype=torch.bfloat16), or torch.autocast with bfloat16."
            )
        return dtype

    def compute(self, rows: Tensor, counts: list[int], ends: Tensor) -> Tensor:
        """Rows (R, D), sorted by expert, `counts` of each of this rank's, the last at `ends` → (R, D)."""
        weights = {name: self.weight_of(name) for name in self.own}
        if self.adapters:
            weights = with_adapters(weights, self.adapters, self.first)
        if self.understood:
            weights = {name: weight.to(rows.dtype) for name, weight in weights.items()}
            return fused_mlp(self.module, weights, rows, counts, ends)
        return self.by_its_own_forward(weights, rows, ends)

    def weight_of(self, name: str) -> Tensor:
        """This rank's part of a weight."""
        return _local(self.module._parameters[name])

    def by_its_own_forward(self, weights: dict[str, Tensor], rows: Tensor, ends: Tensor) -> Tensor:
        """The same through the module's own code, which sees a module of fewer experts: fewer rows in what has one for
        each, weights and buffers; what all experts share is as it is."""
        ids = expert_of_rows(ends, rows.shape[0])[:, None]
        empty = rows.shape[0] == 0
        if empty:  # no code is written for no tokens at all: one of zeros, whose result is dropped
            rows, ids = rows.new_zeros(1, rows.shape[1]) + rows.sum(), ids.new_zeros(1, 1)
        routing = () if self.call == EVERY else (ids, rows.new_ones(ids.shape))
        with self.fewer(weights):
            out = self.inside(self.module, rows, *routing)
        return out[:0] if empty else out

    @contextmanager
    def fewer(self, weights: dict[str, Tensor]) -> Iterator[None]:
        """The module as one of this rank's experts alone, with their `weights`."""
        module, tp = self.module, self.tp
        numbers = {n: v for n, v in vars(module).items() if type(v) is int and v == self.count and "expert" in n}
        here = slice(self.first, self.first + self.local)
        buffers = {n: b for n, b in module._buffers.items() if b is not None and b.dim() and len(b) == self.count}
        registered = [(inner, dict(inner._parameters)) for inner in module.modules()]
        try:
            for inner, parameters in registered:
                kept = weights if inner is module else {}
                shared = {name: _local(p) for name, p in parameters.items() if p is not None and name not in kept}
                if tp is not None:  # each of its ranks has rows of its own here, and so its own term of the gradient
                    inner._parameters.update({name: tp.summed(p) for name, p in shared.items()})  # type: ignore[misc]
            module._parameters.update(weights)  # type: ignore[arg-type]
            module._buffers.update({name: buffer[here] for name, buffer in buffers.items()})
            vars(module).update(dict.fromkeys(numbers, self.local))
            yield
        finally:
            for inner, parameters in registered:
                inner._parameters.update(parameters)
            module._buffers.update(buffers)
            vars(module).update(numbers)


def _local(parameter: Tensor | None) -> Tensor:
    assert parameter is not None
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


# PEFT's adapters on the fused weights of experts (``LoraConfig(target_parameters=...)``), where ep splits the experts.
#
# Such an adapter holds the low-rank factors of all experts. They stay whole, and are sharded with their layer: each rank
# adds to the experts that it has what their part of the factors adds, instead of PEFT's own sum over all experts.


def adapters_in(model: nn.Module) -> dict[int, tuple[nn.Module, ...]]:
    """The wrappers in `model` that adapt a weight of a module, from the outside in, by the id of that module."""
    adapters: dict[int, tuple[nn.Module, ...]] = {}
    for module in model.modules():
        if type(module).__name__ == "ParamWrapper":
            inside = id(module.get_base_layer())  # type: ignore[operator]
            adapters[inside] = (*adapters.get(inside, ()), module)
    return adapters


def adapters_on(model: nn.Module, experts: nn.Module) -> tuple[nn.Module, ...]:
    """The wrappers in `model` that adapt a weight of the module `experts`, from the outside in."""
    return adapters_in(model).get(id(experts), ())


def pass_through(adapters: Iterable[nn.Module]) -> None:
    """Have `adapters` call what they wrap and add nothing: `with_adapters` does, where the weights are used."""
    for adapter in adapters:
        adapter.forward = functools.partial(_inside, adapter)


def _inside(adapter: Any, *args: object, **kwargs: object) -> Any:
    if adapter.merged:
        raise RuntimeError(
            "Adapters on experts that ep splits were merged: a rank has only some of the experts to merge into."
        )
    return adapter.base_layer(*args, **kwargs)


def with_adapters(weights: dict[str, Tensor], adapters: Sequence[Any], first: int) -> dict[str, Tensor]:
    """`weights` (experts here, ..., ...) of the experts from number `first` on, with what `adapters` add to them."""
    weights = dict(weights)
    for adapter in reversed(adapters):
        name = adapter.parameter_name
        for active in [] if adapter.disable_adapters else adapter.active_adapters:
            if active not in adapter.lora_A:
                continue
            lhs, rhs, scaling = adapter.get_delta_factors(active)
            here = slice(first, first + len(weights[name]))
            # The sum that PEFT makes for all experts at once.
            weights[name] = torch.baddbmm(weights[name], lhs[here], rhs[here], alpha=scaling)
    return weights
