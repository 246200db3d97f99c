"""The model as one rank has it under tensor parallelism: weights cut by the plan's rules, collectives on fake tensors."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nemo_like._util.log import warn_once
from nemo_like.distributed.expert.find_experts import find_experts
from nemo_like.distributed.tensor.apply import SequencePlaces, cut_head, sequence_places
from nemo_like.distributed.tensor.plan import Rule, resolve_plan
from nemo_like.distributed.tensor.row_lookup import looks_up_own_rows, own_rows
from nemo_like.job import Job
from nemo_like.planning.planned_collectives import gathered, summed
from nemo_like.planning.sequence_twin import PlannedCutSum, cut_sequences

_CUT = {
    "colwise": 0,
    "colwise_gather_output": 0,
    "colwise_rep": 0,
    "embedding_rowwise": 0,
    "rowwise": 1,
    "rowwise_split_input": 1,
    "rowwise_rep": 1,
    "embedding_colwise": 1,
}
"""By style: the dimension of a weight (out, in), or of an embedding (vocabulary, width), that is cut."""
_EXPERTS = {"packed_colwise": -2, "rowwise": -1}
"""The same of experts' fused weights, (experts, out, in)."""
_EXPERTS_CALL, _LATENT = "moe_tp_experts", "mla_kv_a_proj"
"""What transformers calls the styles of a module of such experts, and of a projection to latent keys and values."""
_WHOLE = ("replicate", "replicated_with_grad_allreduce")
"""Styles that leave weights whole. What the second one sends are gradients of norms, which are small."""
_DIVIDED = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size")
"""What a config says of all ranks, by the names of its attributes."""


class PartOfWeight(nn.Parameter):
    """One rank's part of a weight, which is a DTensor in a real job: FSDP2 cuts such a one on dim 0 and pads it."""


class UnknownStyleError(ValueError):
    """A plan with styles of which the bytes of one rank are not known."""


def rank_twin(
    model: nn.Module,
    tp: int,
    plan: Mapping[str, Any] | None = None,
    whole: Collection[str] = (),
    *,
    sequence_parallel: bool = False,
    loss_parallel: bool = False,
) -> nn.Module:
    """`model` as one of `tp` ranks has it: `tensor_twin`, or with one warning `local_twin` where a style is not known.

    The other arguments are those of `tensor_twin`; with one of them, a style that is not known raises UnknownStyleError.
    """
    if tp == 1:
        return model
    try:
        return tensor_twin(model, tp, plan, whole, sequence_parallel=sequence_parallel, loss_parallel=loss_parallel)
    except UnknownStyleError as error:
        if whole or sequence_parallel or loss_parallel:
            raise
        warn_once(
            f"{error} Planned with the heads and widths of its config divided by {tp} instead: collectives are not counted, "
            "and embedding and head stay whole."
        )
        return local_twin(model, tp)


def local_twin(model: nn.Module, tp: int) -> nn.Module:
    """A twin of a Hugging Face decoder on the meta device, with the parameters that one of `tp` ranks holds.

    Attention heads and FFN width are divided, which is what the column- and row-wise styles of a tensor-parallel plan
    do; norms, embedding and head stay whole, and so do the logits, which such plans gather. Sequence parallelism is
    not modelled.

    Raises:
        ValueError: the model has no config that says these sizes, or one of them is not a multiple of `tp`.
    """
    if tp == 1:
        return model
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        raise ValueError(
            f"tp={tp}: {type(model).__name__} has no transformers config to read heads and widths from, so the share "
            "of one rank is unknown. Plan it with tp=1 and the model of one rank."
        )
    local = copy.deepcopy(config)
    text: Any = local.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    if heads and not getattr(text, "head_dim", None):
        text.head_dim = text.hidden_size // heads
    for name in _DIVIDED:
        value = getattr(text, name, None)
        if value is None:
            continue
        if value % tp:
            raise ValueError(f"tp={tp} does not divide {name}={value} of {type(model).__name__}; use a divisor of it.")
        setattr(text, name, value // tp)
    with torch.device("meta"):
        twin = type(model)(local)
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
    return (twin if dtype is None else twin.to(dtype)).train(model.training)


def tensor_twin(
    model: nn.Module,
    tp: int,
    plan: Mapping[str, Any] | None = None,
    whole: Collection[str] = (),
    *,
    sequence_parallel: bool = False,
    loss_parallel: bool = False,
) -> nn.Module:
    """A twin of `model` with the weights that one of `tp` ranks holds, on the meta device.

    Modules that `plan` (default: the model's own) cuts run with their part, and their inputs and outputs go through the
    collectives that `torch.distributed.tensor.parallel` sends for them, of which nothing is sent. Buffers are the model's.
    `whole`: names of modules that the plan is not followed in, such as experts that `ep` splits. `sequence_parallel`,
    `loss_parallel`: as in `nemo_like.options.TensorParallel`.

    Raises:
        UnknownStyleError: (a ValueError) a style whose bytes are not known, such as those of packed or expert weights.
        ValueError: as `nemo_like.distributed.apply_tensor_parallel`.
    """
    rules = known_rules(model, tp, plan, whole, exact=False)
    twin = with_parts(model, rules, tp)
    every = resolve_plan(model, plan, tp, whole) if sequence_parallel or loss_parallel else []
    places = sequence_places(model, every) if sequence_parallel else None
    head = cut_head(model, every).fqn if loss_parallel else None
    for rule in rules:
        if rule.parameter is not None or rule.style_name == _EXPERTS_CALL:
            continue  # sums over ranks, in place
        module = twin.get_submodule(rule.fqn)
        if rule.style_name == _LATENT:
            module.register_forward_hook(lambda _module, _args, out: out.clone())
            continue
        module.forward = _forward(module, "colwise" if rule.fqn == head else rule.style_name, tp, places, rule.fqn)
    if places is not None:
        cut_sequences(twin, places, tp)
    return twin


def with_parts(model: nn.Module, rules: Sequence[Rule], tp: int) -> nn.Module:
    """A twin of `model` on the meta device with one rank's part of the weights that `rules` cut, and nothing sent."""
    cut = {(id(rule.module), rule.parameter): rule for rule in rules}
    memo: dict[int, Any] = {id(buffer): buffer for buffer in model.buffers()}
    for module in model.modules():  # a tied weight has the same rule in both places, see `resolve_plan`
        for name, parameter in module._parameters.items():
            rule = cut.get((id(module), name)) or cut.get((id(module), None))
            if parameter is not None and (id(parameter) not in memo or rule is not None):
                memo[id(parameter)] = _part(parameter, rule, tp)
    return copy.deepcopy(model, memo)


def check_tensor_budget(model: nn.Module, job: Job) -> None:
    """Raise ValueError where no plan can be made for the job's budget on weights that its ``tp`` splits."""
    if job.tp.size == 1:
        return
    split = find_experts(model, job.ep.plan) if job.ep.size > 1 else ()
    try:
        known_rules(model, job.tp.size, job.tp.plan, [experts.fqn for experts in split])
    except UnknownStyleError as error:
        raise ValueError(f"ac is {job.ac}, and {error} Use a mode: ac='selective'.") from error


def has_known_rules(
    model: nn.Module, tp: int, plan: Mapping[str, Any] | None = None, whole: Collection[str] = (), *, exact: bool = True
) -> bool:
    """Whether `known_rules` knows all rules: with `exact` a plan can be made, without it `tensor_twin`."""
    try:
        known_rules(model, tp, plan, whole, exact=exact)
    except UnknownStyleError:
        return False
    return True


def known_rules(
    model: nn.Module, tp: int, plan: Mapping[str, Any] | None = None, whole: Collection[str] = (), *, exact: bool = True
) -> list[Rule]:
    """The rules by which `model` is cut; raises UnknownStyleError for one of which the bytes of a rank are not known, or
    with `exact` the operators: no plan is made then."""
    # Without those that have no weight: another stage of a pipeline holds it, see `nemo_like.distributed.pipeline.cut`.
    rules = [
        r for r in resolve_plan(model, plan, tp, whole) if any(p is not None for p in r.module._parameters.values())
    ]
    rules = [rule for rule in rules if rule.style_name not in _WHOLE]
    for rule in rules:
        known = rule.style_name in _CUT and rule.parameter is None and type(rule.module) in (nn.Linear, nn.Embedding)
        if not known and (exact or not _is_known_to_transformers(rule)):
            lacking = "no plan is made" if _is_known_to_transformers(rule) else "the bytes of one rank are not known"
            raise UnknownStyleError(
                f"tp={tp}: the plan of {type(model).__name__} gives {rule.fqn!r} the style {rule.style_name!r}, of which "
                f"{lacking}."
            )
    return rules


def _is_known_to_transformers(rule: Rule) -> bool:
    """Whether its bytes are known, but not all operators that it runs: its sums over ranks are in place."""
    if rule.parameter is not None:
        weight = rule.module._parameters[rule.parameter]
        return rule.style_name in _EXPERTS and weight is not None and weight.dim() == 3
    return rule.style_name == _EXPERTS_CALL or (rule.style_name == _LATENT and type(rule.module) is nn.Linear)


def _part(parameter: nn.Parameter, rule: Rule | None, tp: int) -> nn.Parameter:
    shape = list(parameter.shape)
    at = None if rule is None else _cut_at(rule, len(shape))
    if at is not None and at < len(shape):  # the bias of a rowwise linear stays whole
        shape[at] = -(-shape[at] // tp)  # the first rank has what is left over
    form = nn.Parameter if at is None else PartOfWeight
    return form(torch.empty(shape, dtype=parameter.dtype, device="meta"), parameter.requires_grad)


def _cut_at(rule: Rule, dims: int) -> int | None:
    if rule.parameter is not None:
        return _EXPERTS[rule.style_name] + dims
    return _CUT.get(rule.style_name)


def _forward(
    module: nn.Module, style: str, tp: int, places: SequencePlaces | None, fqn: str
) -> Callable[[Tensor], Tensor]:
    inner: Callable[[Tensor], Tensor] = module.forward
    if "rowwise" in style and looks_up_own_rows(module):
        inner = functools.partial(_rows_of_the_first, module)
    inside = {} if places is None else {o: keep for o, keep in places.owners.items() if fqn.startswith(o + ".")}
    summed_later = any(inside.values())

    def forward(x: Tensor) -> Tensor:
        if style.startswith("colwise") and not summed_later:
            x = _PlannedGradientSum.apply(x)
        elif style in ("rowwise_split_input", "rowwise_rep"):
            x = _PlannedSplit.apply(x, tp)
        out = inner(x)
        if inside and style == "rowwise":
            return PlannedCutSum.apply(out, tp)
        if "rowwise" in style:
            return _PlannedSum.apply(out)
        return out if style == "colwise" else _PlannedGather.apply(out, tp)

    return forward


def _rows_of_the_first(module: nn.Module, ids: Tensor) -> Tensor:
    """What the first rank looks up."""
    assert isinstance(module, nn.Embedding)
    return own_rows(module.weight, ids, 0, module.padding_idx, module.scale_grad_by_freq)


class _PlannedGradientSum(torch.autograd.Function):
    """What every rank has the same; each has its own term of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return summed(grad)


class _PlannedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return summed(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class _PlannedGather(torch.autograd.Function):
    """Parts of the last dimension, put together."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return gathered(x, ranks, -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.chunk(ctx.ranks, -1)[0].contiguous(), None


class _PlannedSplit(torch.autograd.Function):
    """The first part of the last dimension, of its own memory, as DTensor makes it; its gradient is gathered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return x.chunk(ranks, -1)[0].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return gathered(grad, ctx.ranks, -1), None
