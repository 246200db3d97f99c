"""Experts found, checked, split and sharded: each rank keeps some of a layer's experts, and its forward sends tokens to the
others and takes theirs."""

import dataclasses
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from nemo_like._util.forwards import Forward
from nemo_like._util.log import warn_once
from nemo_like._util.module_tree import bare_children, bare_modules, glob_to_regex
from nemo_like._util.words import a_or_an
from nemo_like.distributed.context.sequence_ops import name_group
from nemo_like.distributed.expert.exchange import Exchange, TensorRanks
from nemo_like.distributed.mesh import axis_size
from nemo_like.distributed.shard import shard_unit
from nemo_like.layers.structure import is_list_of_experts
from nemo_like.options.parallel import FSDP2, ExpertParallel, unit_reshards
from nemo_like.torch_compat import free_last_gather, grouped_mm, in_backward, root_mesh, uncompiled
from nemo_like.transformers_compat import GATE, text_config

# The modules of a model that hold experts, and the way in which they are called.


ROUTED, EVERY = "routed", "every"
_DISPATCHED = "ep_dispatch_experts"  # name in plans of transformers of a module that is called with the routing


@dataclass(frozen=True, eq=False)
class Experts:
    """One module that holds all experts of a layer in fused weights, (experts, ..., ...) each."""

    fqn: str
    module: nn.Module
    count: int  # Experts in all.
    # ``routed``: called with tokens (N, D), chosen experts (N, k) and their weights (N, k), returns (N, D). ``every``:
    # called with the rows of every expert one after the other, (experts * N, D), returns as many (Llama 4).
    call: str

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the weights that each expert has its own part of: the first dim is the expert's number."""
        parameters = self.module._parameters.items()
        return tuple(name for name, p in parameters if p is not None and p.dim() and p.shape[0] == self.count)

    @property
    def weights(self) -> list[nn.Parameter]:
        """The parameters called `parameters`."""
        return [self.module.get_parameter(name) for name in self.parameters]

    @property
    def shared(self) -> dict[str, nn.Parameter]:
        """Parameters inside of no single expert, such as a norm of each one's output: every rank has them."""
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
        named = _named(model, [*patterns, *(f"**.{pattern}" for pattern in patterns)])
        rows = [(name, module, _fused_rows(module)) for name, module in named]
        experts = tuple(Experts(name, module, count, ROUTED) for name, module, count in rows if count is not None)
        if experts:
            return experts
    return tuple(_by_structure(model))


def _named(model: nn.Module, patterns: Iterable[str]) -> list[tuple[str, nn.Module]]:
    """Return the modules whose bare names one of `patterns` matches, in the model's order."""
    regexes = [glob_to_regex(pattern) for pattern in patterns]
    return [(name, module) for name, module in bare_modules(model) if any(r.fullmatch(name) for r in regexes)]


def refuse_lists(model: nn.Module, size: int, plan: Mapping[str, str] | None = None) -> None:
    """Raise ValueError where experts of `model` that ``ep=size`` would divide are a list of modules.

    Looks at lists in the place of the modules that `find_experts` looks for: named by `plan`, which is as
    `ExpertParallel.plan`, or called ``experts``.
    """
    if plan is None and any(experts.call == ROUTED for experts in find_experts(model) if _config_plan(model)):
        return
    for name, experts in bare_modules(model) if plan is None else _named(model, plan):
        if not isinstance(experts, nn.ModuleList | nn.ModuleDict) or not len(experts):
            continue
        if plan is not None or is_list_of_experts(name, experts):
            _, first = next(bare_children(experts))
            kind = type(first).__name__
            raise ValueError(
                f"ep is {size}, and the experts {name!r} are {a_or_an(experts)} of {len(experts)} modules {kind}. A rank "
                "receives all rows of its experts at once, and the block calls a list one expert at a time. Convert it to "
                "fused experts: from_pretrained() of transformers 5 or newer reads such a checkpoint into fused weights "
                "(MixtralExperts and the like); in a model of your own, write them as one module with weights "
                "(experts, ..., ...) each. Or use ep=1."
            )


def experts_per_token(model: nn.Module) -> int | None:
    """Experts that a token goes to, by the model's config; None: it is not there."""
    chosen = getattr(text_config(getattr(model, "config", None)), "num_experts_per_tok", None)
    return int(chosen) if chosen else None


def _planned(model: nn.Module, plan: Mapping[str, str]) -> Iterator[Experts]:
    for pattern, call in plan.items():
        named = _named(model, [pattern])
        if not named:
            raise ValueError(
                f"ExpertParallel.plan has {pattern!r}, which matches no module of this {type(model).__name__}."
            )
        for name, module in named:
            count = _fused_rows(module)
            if count is None:
                raise ValueError(
                    f"ExpertParallel.plan names {name!r}, {a_or_an(module)}, whose own parameters are not fused "
                    "weights: it must have some of three dims, with the experts as the first, as many in all of them."
                )
            yield Experts(name, module, count, call)


def _by_structure(model: nn.Module) -> Iterator[Experts]:
    for name, module in bare_modules(model):
        parameters = [p for p in module._parameters.values() if p is not None]
        count, several = _fused_rows(module), sum(p.dim() == 3 for p in parameters) > 1
        if (
            count is not None
            and several
            and all(p.dim() and p.shape[0] == count for p in parameters)
            and (call := _call_of(module)) is not None
        ):
            yield Experts(name, module, count, call)


def _fused_rows(module: nn.Module) -> int | None:
    """The first dim that all of `module`'s own weights of three dims have; None: there are none, or they differ."""
    rows = {p.shape[0] for p in module._parameters.values() if p is not None and p.dim() == 3}
    return rows.pop() if len(rows) == 1 else None


def _call_of(module: nn.Module) -> str | None:
    """Return the way in which `module` is called, by the number of arguments of its forward; None: in neither of the
    known ways."""
    try:
        parameters = inspect.signature(type(module).forward).parameters
    except (TypeError, ValueError):
        return None
    positional = [p for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return {2: EVERY, 4: ROUTED}.get(len(positional))  # with self


def _config_plan(model: nn.Module) -> list[str]:
    """The patterns of modules that the plan of the model's config, or of its text config, sends tokens to."""
    config: Any = getattr(model, "config", None)
    for source in (config, text_config(config)):
        plan = getattr(source, "base_model_ep_plan", None)
        if isinstance(plan, Mapping):
            return [pattern for pattern, style in plan.items() if style == _DISPATCHED]
    return []


# The mesh of the experts: the same ranks as the dense mesh, cut in another way.


@dataclass(frozen=True)
class ExpertMesh:
    """The meshes on which experts live. For 8 ranks with ``tp=2, ep=4``: ``dense`` is (dp_shard 4, tp 2), ``whole`` is
    (efsdp 2, ep 4)."""

    # Axes ``dp_replicate`` (where there are replicas), ``efsdp`` and ``ep``, whose ranks hold other experts each and send
    # tokens to one another.
    whole: DeviceMesh
    dense: DeviceMesh  # The mesh of all other parameters.

    @property
    def fsdp(self) -> DeviceMesh:
        """Return the mesh that FSDP2 shards over: the ranks that hold the same experts, ``(efsdp,)`` or
        ``(dp_replicate, efsdp)``."""
        if "dp_replicate" in (self.whole.mesh_dim_names or ()):
            return self.whole["dp_replicate", "efsdp"]
        return self.whole["efsdp"]

    @property
    def data_ranks(self) -> int:
        """Ranks with tokens of their own, by which the sum of an expert's gradients is divided, as elsewhere."""
        return axis_size(self.dense, "dp_replicate") * axis_size(self.dense, "dp_shard") * axis_size(self.dense, "cp")


def check_expert_ranks(mesh: DeviceMesh, size: int) -> None:
    """Raise ValueError unless `size` divides the ranks that hold one copy of the model between them."""
    inside = axis_size(mesh, "dp_shard") * axis_size(mesh, "cp") * axis_size(mesh, "tp")
    if inside % size:
        raise ValueError(
            f"ep is {size}, and dp_shard x cp x tp is {inside} ranks, which it does not divide: experts are split within "
            f"one copy of the model. Use a divisor of {inside}."
        )


def make_expert_mesh(mesh: DeviceMesh, size: int) -> ExpertMesh:
    """Cut the ranks of `mesh` for experts that are split over `size` of them. A collective: it makes process groups.

    ``ep`` is the innermost axis, so that tokens travel between neighbours, over the fastest network.

    Raises:
        ValueError: as `check_expert_ranks`.
    """
    check_expert_ranks(mesh, size)
    root = root_mesh(mesh)
    # Every rank of the job takes part in making process groups, so the other stages of a pipeline are in here, too.
    outer = [axis for axis in ("pp", "dp_replicate") if axis_size(root, axis) > 1]
    ranks = root.mesh.reshape([*(axis_size(root, axis) for axis in outer), -1, size])
    return ExpertMesh(DeviceMesh(root.device_type, ranks, mesh_dim_names=(*outer, "efsdp", "ep")), mesh)


# FSDP2 over the ranks that hold the same experts.


def shard_experts(
    found: Sequence[Experts],
    mesh: ExpertMesh,
    *,
    mp_policy: MixedPrecisionPolicy | None,
    options: FSDP2 | None,
) -> None:
    """Make the weights of each module's split experts a unit of FSDP2 on ``mesh.fsdp``. Call it after `shard_layers`, which
    leaves them out (``apart=``) and takes their parameters of all experts (`Experts.shared`): FSDP2 does not look
    into units for parameters of a larger one.

    The gradient of an expert is the sum over all ranks that sent it tokens. As that of any other parameter, it is divided
    by the number of ranks with data of their own. FSDP2 alone would divide by the ranks that hold the same experts.
    """
    options = FSDP2() if options is None else options
    policy = dataclasses.replace(mp_policy or MixedPrecisionPolicy(), output_dtype=None, cast_forward_inputs=False)
    shards = mesh.whole["efsdp"].size()
    for experts in found:
        shard_unit(
            [experts.module],
            mesh.fsdp,
            options,
            policy=policy,
            reshard=unit_reshards(options, "experts"),
            placement=lambda parameter: Shard(expert_shard_dim(parameter, shards)),
            ignored_params=set(experts.shared.values()),
        )
        assert isinstance(experts.module, FSDPModule)
        experts.module.set_gradient_divide_factor(float(mesh.data_ranks))
        if shards > 1:
            # Gloo has no sum that scales. With one rank there is nothing to sum, and torch would then divide twice.
            experts.module.set_force_sum_reduction_for_comms(True)


def expert_shard_dim(parameter: nn.Parameter, ranks: int) -> int:
    """The dim that this rank's experts are cut on for `ranks` ranks: whole experts, where there are enough of them."""
    shape = parameter.to_local().shape if hasattr(parameter, "to_local") else parameter.shape
    if shape[0] % ranks == 0:
        return 0
    return next((dim for dim in range(1, len(shape)) if shape[dim] % ranks == 0), 0)


# The computation of experts, on rows that are sorted by expert and counted on the host.


# Rows (R, D), sorted by expert, and how many each expert has → (R, D).
Compute = Callable[[Tensor, Sequence[int]], Tensor]

_KNOWN = frozenset(("gate_up_proj", "gate_up_proj_bias", "up_proj", "up_proj_bias", "down_proj", "down_proj_bias"))


def is_understood(module: nn.Module) -> bool:
    """Return whether `module` is made as transformers makes experts, so that `fused_mlp` computes the same as its own
    forward."""
    names = {name for name, parameter in module._parameters.items() if parameter is not None}
    if (
        _has_more_inside(module)
        or not names <= _KNOWN
        or "down_proj" not in names
        or ("gate_up_proj" in names) == ("up_proj" in names)
    ):
        return False
    return hasattr(module, "is_transposed") or zero_rows_stay_zero(module)


def zero_rows_stay_zero(module: nn.Module) -> bool:
    """Return whether `module` is a gated MLP without biases as in transformers' Llama 4, which gives 0 for a row of
    zeros.

    Such a module is called with a row for every expert and token, most of them zero, and needs none of these.
    """
    names = {name for name, parameter in module._parameters.items() if parameter is not None}
    activation = getattr(module, "act_fn", None)
    if names != {"gate_up_proj", "down_proj"} or not callable(activation) or hasattr(module, "is_transposed"):
        return False
    if _has_more_inside(module) or not type(module).forward.__module__.startswith("transformers."):
        return False  # the names tell little about the forward of an unknown module
    up, down = (module.get_parameter(name).shape for name in ("gate_up_proj", "down_proj"))
    return up[1:] == (down[2], 2 * down[1]) and float(activation(torch.zeros(1))) == 0.0


def _has_more_inside(module: nn.Module) -> bool:
    """Return whether there is more in `module` than weights of its own and an activation, such as a norm or dropout."""
    return (
        any(name != "act_fn" for name, _ in module.named_children())
        or any("." in name for name, _ in module.named_parameters())
        or any(buffer is not None for buffer in module._buffers.values())
    )


def expert_of_rows(ends: Tensor, rows: int) -> Tensor:
    """(R,) the expert of each row, from where the rows of each end; waits for nothing."""
    return torch.bucketize(torch.arange(rows, device=ends.device, dtype=ends.dtype), ends, right=True)


def fused_mlp(
    module: nn.Module, weights: Mapping[str, Tensor], rows: Tensor, counts: Sequence[int], ends: Tensor
) -> Tensor:
    """The experts' MLPs: (R, D) → (R, D), every row by its expert.

    Args:
        module: for which `is_understood` holds.
        weights: its parameters, of this rank's experts.
        rows: sorted by expert. counts: rows of each expert, on the host; ends: where they end, int32 on the device.
    """
    transposed = getattr(module, "is_transposed", True)
    up = "gate_up_proj" if "gate_up_proj" in weights else "up_proj"
    # (experts, in, out), as a matmul of rows with it needs
    matrix: Callable[[str], Tensor] = lambda name: weights[name] if transposed else weights[name].transpose(1, 2)  # noqa: E731
    hidden = _plus_bias(grouped_mm(rows, matrix(up), counts, ends), weights.get(f"{up}_bias"), ends)
    gated: Any = getattr(module, GATE, None)  # a method that transformers lets a family override
    activation: Any = getattr(module, "act_fn", None)  # gpt-oss has a gate, and no activation
    if up == "up_proj":
        hidden = activation(hidden)
    elif gated is not None:
        hidden = gated(hidden)
    else:
        gate, linear = hidden.chunk(2, dim=-1)
        hidden = linear * activation(gate)
    return _plus_bias(grouped_mm(hidden, matrix("down_proj"), counts, ends), weights.get("down_proj_bias"), ends)


def _plus_bias(
    rows: Tensor,  # (R, D)
    bias: Tensor | None,  # (experts here, D)
    ends: Tensor,  # (experts here,)
) -> Tensor:
    return rows if bias is None else rows + bias[expert_of_rows(ends, rows.shape[0])]


# The split: each rank keeps its part of the weights, and exchanges tokens.


def experts_to_split(model: nn.Module, parallel: ExpertParallel, *, may_lack: bool = False) -> tuple[Experts, ...]:
    """The experts that `parallel` means; `may_lack`: others have the layers with experts, or some of them.

    Raises:
        ValueError: there are none, or they are lists of modules.
    """
    refuse_lists(model, parallel.size, parallel.plan)
    found = () if may_lack and not has_experts(model, parallel.plan) else find_experts(model, parallel.plan)
    if not found and not may_lack:
        raise ValueError(
            f"ep is {parallel.size}, and no experts were found in this {type(model).__name__}. Name the modules that hold "
            "them: ExpertParallel(size, plan={'layers.*.experts': 'routed'}), or use ep=1."
        )
    return found


def check_experts(
    model: nn.Module, mesh: DeviceMesh, parallel: ExpertParallel, *, may_lack: bool = True
) -> tuple[Experts, ...]:
    """The experts that `split_experts` would split, or its error. Changes nothing.

    `may_lack`: in a mesh with pipeline stages, `model` is one of them, and others may have the layers with experts.

    Raises:
        ValueError: no experts are found, or they are lists of modules; their number is not divisible by the ranks; ranks
            that do not divide those of one copy of the model; a module that is neither understood nor called in a known way.
    """
    check_expert_ranks(mesh, parallel.size)
    found = experts_to_split(model, parallel, may_lack=may_lack and axis_size(root_mesh(mesh), "pp") > 1)
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
    return bool(find_experts(model) if plan is None else _named(model, plan))


def split_experts(model: nn.Module, found: Sequence[Experts], mesh: ExpertMesh) -> None:
    """Keep this rank's part of each module's weights, and let its forward exchange tokens. In place.

    The weights become DTensors over the axis ``ep``, cut on the first dim; weights on the meta device stay there.
    """
    ep, tp = mesh.whole["ep"], None
    if axis_size(mesh.dense, "tp") > 1:
        of_tp = mesh.dense["tp"]
        tp = TensorRanks(of_tp.size(), of_tp.get_local_rank(), name_group(of_tp.get_group()))
    for experts in found:
        module = experts.module
        for name in experts.parameters:
            whole = module.get_parameter(name)
            # src_data_rank=None: every rank cuts its own part out of its own copy, and nothing is sent.
            part = distribute_tensor(whole.detach(), ep, [Shard(0)], src_data_rank=None)
            parameter = nn.Parameter(_own_memory(part), requires_grad=whole.requires_grad)
            parameter.__dict__.update(whole.__dict__)
            module._parameters[name] = parameter
        adapters = adapters_on(model, module)
        # An adapter calls the module it wraps and adds nothing: `with_adapters` does, where the weights are used.
        for adapter in adapters:
            _InsideAdapter(adapter).put()
        SplitExperts(
            experts,
            ranks=ep.size(),
            group=name_group(ep.get_group()),
            tp=tp,
            adapters=adapters,
            rank=ep.get_local_rank(),
        ).put()


def _own_memory(part: DTensor) -> DTensor:
    """A copy, where the part is a view: it would keep the other ranks' experts alive."""
    local = part.to_local()
    if local.is_meta or local.untyped_storage().nbytes() == local.numel() * local.element_size():
        return part
    return DTensor.from_local(local.clone(), part.device_mesh, part.placements, run_check=False)


class SplitExperts(Forward):
    """The forward of a module whose experts are split: exchange, compute, exchange back.

    It takes and returns the same as the module's own forward (`Experts.call`), on this rank's tokens. `ranks`: those
    that share the experts; `group`: their process group, by `name_group`; `rank`: this one of it; `tp`: ranks with the
    same tokens; `adapters`: on the weights (`adapters_on`).
    """

    def __init__(
        self,
        experts: Experts,
        *,
        ranks: int,
        group: str,
        rank: int,
        tp: TensorRanks | None,
        adapters: Sequence[nn.Module],
    ) -> None:
        super().__init__(experts.module)
        self.count, self.calls = experts.count, experts.call
        self.own, self.tp, self.adapters = experts.parameters, tp, adapters
        self.local = experts.count // ranks
        self.first = rank * self.local
        self.understood = is_understood(experts.module)
        self.sparse = self.understood and zero_rows_stay_zero(experts.module)
        self.exchange = Exchange(self.count, group)

    @uncompiled
    def __call__(self, hidden: Tensor, *routing: Any, **named: Any) -> Tensor:
        if in_backward():
            # Recomputation: FSDP2 would keep it as in forward, together with backward's own memory.
            free_last_gather(self.module)
        if self.calls == EVERY:
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
        chosen = torch.arange(self.count, device=parts.device).repeat_interleave(parts.shape[0] // self.count)
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
        dtype = torch.get_autocast_dtype(device) if autocast else _local(self.module._parameters["down_proj"]).dtype
        if rows.is_cuda and dtype != torch.bfloat16:
            warn_once(
                f"Experts compute in {dtype}, one product for each: the grouped product of CUDA takes bfloat16 alone. "
                "Faster: Precision(param_dtype=torch.bfloat16), or torch.autocast with bfloat16."
            )
        return dtype

    def compute(self, rows: Tensor, counts: list[int], ends: Tensor) -> Tensor:
        """Rows (R, D), sorted by expert, `counts` of each of this rank's, the last at `ends` → (R, D)."""
        weights = {name: _local(self.module._parameters[name]) for name in self.own}
        if self.adapters:
            weights = with_adapters(weights, self.adapters, self.first)
        if self.understood:
            weights = {name: weight.to(rows.dtype) for name, weight in weights.items()}
            return fused_mlp(self.module, weights, rows, counts, ends)
        return self.by_its_own_forward(weights, rows, ends)

    def by_its_own_forward(
        self,
        weights: dict[str, Tensor],  # (experts here, ...)
        rows: Tensor,  # (R, D)
        ends: Tensor,  # (experts here,)
    ) -> Tensor:
        """The same through the module's own code, which sees a module of fewer experts: fewer rows in
        tensors that have one for each, weights and buffers; those that all experts share are unchanged."""
        ids = expert_of_rows(ends, rows.shape[0])[:, None]
        empty = rows.shape[0] == 0
        if empty:  # no code is written for no tokens at all: one of zeros, whose result is dropped
            rows, ids = rows.new_zeros(1, rows.shape[1]) + rows.sum(), ids.new_zeros(1, 1)
        routing = () if self.calls == EVERY else (ids, rows.new_ones(ids.shape))
        with self.fewer(weights):
            out = self.call(rows, *routing)
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
    """This rank's part of a weight."""
    assert parameter is not None
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


# PEFT's adapters on the fused weights of experts (``LoraConfig(target_parameters=...)``), where ep splits the experts.
#
# Such an adapter holds the low-rank factors of all experts. They stay whole, and are sharded with their layer: each rank
# adds the product of their part of the factors to its own experts, instead of PEFT's own sum over all experts.


def adapters_on(model: nn.Module, experts: nn.Module) -> tuple[nn.Module, ...]:
    """The wrappers in `model` that adapt a weight of the module `experts`, from the outside in."""
    wrappers: list[Any] = [module for module in model.modules() if type(module).__name__ == "ParamWrapper"]
    return tuple(wrapper for wrapper in wrappers if wrapper.get_base_layer() is experts)


class _InsideAdapter(Forward):
    """The forward of an adapter: that of the module which it adapts."""

    def __call__(self, *args: object, **kwargs: object) -> Any:
        adapter: Any = self.module
        if adapter.merged:
            raise RuntimeError(
                "Adapters on experts that ep splits were merged: a rank has only some of the experts to merge into."
            )
        return adapter.base_layer(*args, **kwargs)


def with_adapters(weights: dict[str, Tensor], adapters: Sequence[Any], first: int) -> dict[str, Tensor]:
    """`weights` (experts here, ..., ...) of the experts from number `first` on, plus the updates of `adapters`."""
    weights = dict(weights)
    for adapter in reversed(adapters):
        name = adapter.parameter_name
        active_adapters = [] if adapter.disable_adapters else adapter.active_adapters
        for active in (active for active in active_adapters if active in adapter.lora_A):
            lhs, rhs, scaling = adapter.get_delta_factors(active)
            here = slice(first, first + len(weights[name]))
            # The sum that PEFT makes for all experts at once.
            weights[name] = torch.baddbmm(weights[name], lhs[here], rhs[here], alpha=scaling)
    return weights
