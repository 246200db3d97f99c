"""Tensor parallelism: each rank of the ``tp`` axis holds a part of every large weight and all of the data."""

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from nemo_like._util.forwards import Forward
from nemo_like._util.log import warn_once
from nemo_like._util.table import grouped
from nemo_like._util.words import a_or_an
from nemo_like.distributed.mesh import axis_size
from nemo_like.distributed.tensor.plan import (
    COLWISE,
    ROWWISE,
    InstalledStyle,
    Rule,
    SummedGradients,
    Untouched,
    known_styles,
    own_outputs,
    resolve_plan,
)
from nemo_like.distributed.tensor.shared_random import SharedRandom
from nemo_like.distributed.weights.tensor_locations import find_slots
from nemo_like.layers import Layer, find_layers
from nemo_like.losses.model_loss import computes_in_chunks
from nemo_like.options.parallel import FSDP2, ranks_between
from nemo_like.precision import cast_of, rowwise_of
from nemo_like.torch_compat import loss_is_parallel

_MARK = "_nemo_like_tensor_parallel"
_EDGES = "_nemo_like_sequence_edges"
# Styles of the linears between which autograd passes DTensors on, and of norms on their outputs.
_OF_LINEARS = COLWISE | ROWWISE | {"replicated_with_grad_allreduce"}


def apply_tensor_parallel(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: Mapping[str, str | ParallelStyle] | None = None,
    *,
    sequence_parallel: bool = False,
    loss_parallel: bool = False,
    whole: Collection[str] = (),
    ends: tuple[bool, bool] = (True, True),
) -> nn.Module:
    """Cut the weights of `model` over the ranks of `mesh`, in place; returns it.

    Call it on the original model, before checkpointing and before FSDP. Every rank must hold the same weights (or the model
    be on the meta device), and see the same data. Weights that the plan does not name stay whole on every rank.

    Args:
        model: any Hugging Face model with a plan of its own, or any model with `plan`.
        mesh: the one-dimensional tensor-parallel mesh, such as ``mesh["tp"]``. With one rank nothing is done.
        plan: FQN pattern (``*`` within one dotted segment) of modules to a `ParallelStyle` of torch or the name of a
            style (`tp_styles.known_styles`); None: the model's ``tp_plan``, else ``config.base_model_tp_plan``.
        sequence_parallel: between attention and MLP, each rank keeps its part of the sequence (dim 1 of (B, S, D)).
            So norms and residuals are neither computed nor saved on every rank. S must be divisible by the ranks.
            After Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022).
        loss_parallel: leave the logits cut by vocabulary, as a DTensor; compute the loss under
            `torch.distributed.tensor.parallel.loss_parallel`.
        whole: names of modules that the plan is not followed in (experts that are split otherwise).
        ends: with `sequence_parallel`, whether the first layer is given whole sequences, and whether the last one returns
            them. Stages of a pipeline hand parts on.

    Raises:
        ValueError: no plan; an unknown style; a pattern that matches nothing; heads or sizes not divisible by the
            ranks; a mesh of more than one axis; a model that is tensor-parallel already; an option the plan does not
            allow. The model is unchanged then.
        TypeError: `mesh` is no `DeviceMesh`, or the plan no mapping of styles.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh is {a_or_an(mesh)}; it must be the tensor-parallel DeviceMesh, such as mesh['tp'].")
    if mesh.ndim != 1:
        raise ValueError(f"mesh has the axes {mesh.mesh_dim_names}; pass the tensor-parallel one, mesh['tp'].")
    if hasattr(model, _MARK) or any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise ValueError("The model is tensor-parallel or sharded already; apply tensor parallelism first, and once.")
    rules = resolve_plan(model, plan, mesh.size(), whole)
    layers = find_layers(model) if sequence_parallel else ()
    if plan is None and all("." not in rule.fqn for rule in rules):
        # Some models bring a plan for their head alone: with it every rank computes every layer, whatever ``tp`` is.
        warn_once(
            f"The tensor-parallel plan that {type(model).__name__} brings cuts {', '.join(rule.fqn for rule in rules)} and "
            "nothing in its layers, which every rank then computes whole. Give a TensorParallel(plan=) that names their "
            "linears."
        )
    places = sequence_places(model, rules, layers) if sequence_parallel else None
    if loss_parallel:
        head, cut = cut_head(model, rules), ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
        rules = [Rule(rule.fqn, cut, rule.style_name, rule.module) if rule is head else rule for rule in rules]
    if mesh.size() == 1:
        return model

    ties = [slot.places for slot in find_slots(model) if slot.is_parameter and len(slot.places) > 1]
    for rule in rules:
        if any(isinstance(value, Tensor) for value in vars(rule.module).values()):
            continue  # a weight that another stage of a pipeline holds: see `nemo_like.distributed.pipeline.cut`
        _apply_rule(rule, mesh, places is not None and places.owners.get(rule.place.rpartition(".")[0], False))
    if places is not None:
        _cut_sequences(model, places, mesh, ends)
    own_outputs(model, [rule.module for rule in rules])
    model.register_forward_hook(_name_mixture, always_call=True)
    _tie_again(ties)
    if loss_parallel:
        model.register_forward_pre_hook(_refuse_own_loss, with_kwargs=True)
    SharedRandom(mesh).put(model)
    setattr(model, _MARK, True)
    return model


def check_packed_weights(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: Mapping[str, str | ParallelStyle] | None,
    whole: Collection[str],
    fsdp: FSDP2,
) -> None:
    """Raise where `plan` packs a matrix that FSDP2 could then shard on dim 0 alone: no placement tells which rows those are.

    Args:
        mesh: with the axes of FSDP2 and ``tp``.
        plan, whole: as for `apply_tensor_parallel`.
        fsdp: the options that will shard it.

    Raises:
        ValueError, TypeError: that, or an error of `apply_tensor_parallel` about the plan.
    """
    ranks = axis_size(mesh, "dp_shard") * axis_size(mesh, "cp")
    rules = resolve_plan(model, plan, mesh["tp"].size(), whole)
    for rule in rules if ranks > 1 else ():
        for name, weight in rule.module._parameters.items() if rule.style_name == "packed_colwise" else ():
            if (
                rule.parameter in (None, name)
                and weight is not None
                and weight.dim() == 2
                and (weight.shape[1] % ranks or ranks_between(fsdp))
            ):
                raise ValueError(
                    f"{rule.fqn!r}, {tuple(weight.shape)}, is packed over tp (packed_colwise), so FSDP2 must shard its "
                    f"dim 1: {ranks} ranks must divide it, and none of them can be left out after forward. Choose "
                    "others, or give it the style 'colwise_gather_output' in TensorParallel(plan=...)."
                )


def _apply_rule(rule: Rule, mesh: DeviceMesh, cut_output: bool) -> None:
    style = rule.style
    if rule.parameter is not None:
        assert isinstance(style, InstalledStyle)
        style.shard(rule.module, rule.parameter, mesh)
        return
    if cut_output and isinstance(style, RowwiseParallel):  # the sum goes out cut along the sequence: reduce-scatter
        rowwise = rowwise_of(rule.module) or RowwiseParallel
        style = rowwise(input_layouts=style.input_layouts[0], output_layouts=Shard(1))
    if cut_output and rule.adapted is not None and isinstance(style, Untouched):
        style = SummedGradients()  # it reads the output of the linear above: this rank's part of the sequence
    # No rank sends its weights: all hold the same, as FSDP2 assumes too.
    parallelize_module(rule.module, mesh, style, src_data_rank=None)
    if isinstance(style, RowwiseParallel) and looks_up_own_rows(rule.module):
        _LookUp(rule.module).put()


# ---------------------------------------------------------------------------------------------------- sequence parallel


@dataclass(frozen=True)
class SequencePlaces:
    """Places where sequence parallelism changes a model, by names of modules."""

    first: tuple[str, ...]  # The first layer of each stack, which is given this rank's part of the sequence.
    last: tuple[str, ...]  # The last ones, whose output is put together.
    # Modules with matrices (attention, MLP), which see the whole sequence; whether cut linears alone read it, and one
    # ends it.
    owners: Mapping[str, bool]
    in_part: tuple[str, ...]  # Modules with parameters that see a part of the sequence.


def sequence_places(model: nn.Module, rules: Sequence[Rule], layers: Sequence[Layer] | None = None) -> SequencePlaces:
    """Return where sequence parallelism would change `model`, whose weights `rules` cut; `layers`: None: they are
    found.

    Raises:
        ValueError: rules under which sequences cannot be cut.
    """
    layers, inside = tuple(find_layers(model) if layers is None else layers), _by_module(rules)
    stacks = grouped((layer.fqn.rpartition(".")[0], layer) for layer in layers)
    cut = [stack for stack in stacks.values() if any(layer.fqn in inside for layer in stack)]
    if not cut:
        raise ValueError(
            f"sequence_parallel=True, but the plan cuts nothing in the layer {layers[0].fqn!r}: no module there would put "
            "sequences together. Give a plan= that names its linears, or leave sequence_parallel off."
        )
    owners: dict[str, bool] = {}
    in_part: list[str] = []
    for layer in (layer for stack in cut for layer in stack):
        for rule in inside.get(layer.fqn, ()):
            if rule.style_name == "sequence_parallel" or rule.style_name not in known_styles():
                raise ValueError(
                    f"sequence_parallel=True and {rule.fqn!r} has the style {rule.style_name!r}, of which it is not known "
                    f"which part of a sequence it reads and returns. Name one of {', '.join(sorted(_OF_LINEARS))} in "
                    "the plan, or leave sequence_parallel off."
                )
        in_layer = _owners(layer, inside)
        owners |= in_layer
        in_part += [
            name
            for name, module in layer.module.named_modules(prefix=layer.fqn)
            if any(parameter is not None for parameter in module._parameters.values())
            and not any(f"{name}.".startswith(f"{owner}.") for owner in in_layer)
        ]
    return SequencePlaces(
        tuple(stack[0].fqn for stack in cut), tuple(stack[-1].fqn for stack in cut), owners, tuple(in_part)
    )


def cuts_sequences(model: nn.Module, ranks: int) -> bool:
    """Return whether `model` allows sequence parallelism under its own plan, over so many `ranks`."""
    try:
        return bool(sequence_places(model, resolve_plan(model, None, ranks)).owners)
    except ValueError:
        return False


def _by_module(rules: Sequence[Rule]) -> dict[str, list[Rule]]:
    """Return the rules inside of each module, by its name."""
    return grouped((name, rule) for rule in rules for name in accumulate(rule.fqn.split("."), "{}.{}".format))


def _owners(layer: Layer, inside: Mapping[str, Sequence[Rule]]) -> dict[str, bool]:
    """Return the modules of `layer` that see the whole sequence, where all else are norms: see `SequencePlaces.owners`.

    They are those with cut weights, and one that the plan leaves whole (a mixer, experts that `ep` splits). Where there is
    more (a linear next to attention, experts that are given single tokens), it is the layer itself.
    """
    blocks = {f"{layer.fqn}.{name}": block for name, block in layer.module.named_children()}
    owners = {name: block for name, block in blocks.items() if name in inside or _has_matrices(block)}
    left_whole = [name for name in owners if name not in inside]
    has_matrices = any(parameter is not None and parameter.dim() > 1 for parameter in layer.module._parameters.values())
    if (
        has_matrices
        or len(left_whole) > 1
        or any(
            isinstance(block, nn.ModuleList | nn.ModuleDict) or not any(map(_has_matrices, block.children()))
            for block in owners.values()
        )
    ):
        return {layer.fqn: False}
    return {name: _is_of_linears(name, block, inside.get(name, ())) for name, block in owners.items()}


def _has_matrices(module: nn.Module) -> bool:
    return any(parameter.dim() > 1 for parameter in module.parameters())


def _is_of_linears(name: str, block: nn.Module, rules: Sequence[Rule]) -> bool:
    """Return whether all parameters of `block` are those of linears that `rules` cut (and of norms on their output), of
    which one alone sums up.

    Not with dropout in front of adapters: on an accelerator, torch gives every rank of a job rank 0's random numbers when a
    DTensor is dropped.
    """
    ruled = {rule.fqn for rule in rules}
    return (
        all((rule.adapted or rule.style_name in _OF_LINEARS) and rule.parameter is None for rule in rules)
        and all(part in ruled for part, module in block.named_modules(prefix=name) if module._parameters)
        and not any(".lora_dropout." in part and isinstance(each, nn.Dropout) for part, each in block.named_modules())
        and [place.rpartition(".")[0] for place in {rule.place for rule in rules if rule.style_name in ROWWISE}]
        == [name]
    )


def _cut_sequences(model: nn.Module, places: SequencePlaces, mesh: DeviceMesh, whole: tuple[bool, bool]) -> None:
    """Cut the residual stream along the sequence where each stack of layers begins, and put it together at its end.

    Inside a layer, its owners (attention, MLP) see the whole sequence. All else sees a part, so the gradients of its
    parameters are summed over the ranks. An owner that is not of cut linears alone computes as without sequence
    parallelism: all ranks have its whole output, of which each keeps its part, and the whole gradient of that.
    """
    for name, of_linears in places.owners.items():
        owner = model.get_submodule(name)
        gather = partial(_whole_of, mesh, keep=of_linears, cast=cast_of(owner) if of_linears else None)
        owner.register_forward_pre_hook(partial(_change_input, gather), with_kwargs=True, prepend=True)
        if not of_linears:
            owner.register_forward_hook(partial(_change_output, partial(_part_of, mesh)), with_kwargs=True)
    for name in places.in_part:
        SummedGradients()._apply(model.get_submodule(name), mesh)
    begins, stops = whole
    ends = _Edges(places.first if begins else (), places.last if stops else (), mesh)
    ends.put(model)
    setattr(model, _EDGES, ends)


class _Edges:
    """The hooks where stacks of layers begin and end.

    Args:
        first, last: names of the layers where stacks begin and end.
    """

    def __init__(self, first: Sequence[str], last: Sequence[str], mesh: DeviceMesh) -> None:
        self.first, self.last, self.mesh = first, last, mesh
        self.handles: list[Any] = []

    def remove(self) -> None:
        while self.handles:
            self.handles.pop().remove()

    def put(self, model: nn.Module) -> None:
        """Register the hooks on the modules that are at these places now."""
        self.remove()
        first, last = map(model.get_submodule, self.first), map(model.get_submodule, self.last)
        cut = partial(_change_input, partial(_part_of, self.mesh))
        gather = partial(_change_output, partial(_whole_of, self.mesh))
        # Around the hooks of a layer that is an owner itself.
        self.handles = [m.register_forward_pre_hook(cut, with_kwargs=True, prepend=True) for m in first]
        self.handles += [m.register_forward_hook(gather, with_kwargs=True) for m in last]


def put_edges(model: nn.Module) -> None:
    """Have the cuts of `sequence_parallel` act where stacks of layers begin and end now. Once layers are checkpointed, that
    moves them out of the first and last region, so that the first one holds a part of the sequence alone."""
    ends = getattr(model, _EDGES, None)
    if ends is not None:
        ends.put(model)


def set_edges_aside(model: nn.Module) -> None:
    """Let the cuts of `sequence_parallel` where stacks of layers begin and end act within `edges` alone: a planner runs
    layers by themselves, too."""
    if hasattr(model, _EDGES):
        getattr(model, _EDGES).remove()


@contextmanager
def edges(model: nn.Module) -> Iterator[None]:
    """Within it, the hooks that `set_edges_aside` took off act, for a run of the whole model."""
    put_edges(model)
    try:
        yield
    finally:
        set_edges_aside(model)


def _part_of(mesh: DeviceMesh, x: Tensor) -> Tensor:
    """This rank's part of a sequence that all ranks hold whole; (B, S, D) to (B, S / ranks, D)."""
    if x.shape[1] % mesh.size():
        raise ValueError(
            f"sequence_parallel=True needs a sequence length divisible by the {mesh.size()} tensor-parallel "
            f"ranks, and got {x.shape[1]}; pad the batch."
        )
    return DTensor.from_local(x, mesh, [Replicate()], run_check=False).redistribute(placements=[Shard(1)]).to_local()


def _whole_of(
    mesh: DeviceMesh, x: Tensor, keep: bool = False, cast: Callable[[DTensor], DTensor] | None = None
) -> Tensor:
    """The whole sequence from every rank's part; (B, S / ranks, D) to (B, S, D).

    `keep` hands it on as a DTensor. Where only cut linears read it, their gradients then stay partial sums until here
    and are reduced once, cut along the sequence; each of them would otherwise reduce its own over the whole sequence.
    `cast` changes a part before it is sent.
    """
    if x.dim() < 3:
        raise ValueError(
            f"sequence_parallel=True, and a module is given hidden states of the shape {tuple(x.shape)}, without a "
            "dimension of the sequence. Leave sequence_parallel off for this model."
        )
    part = DTensor.from_local(x, mesh, [Shard(1)], run_check=False)
    whole = (part if cast is None else cast(part)).redistribute(placements=[Replicate()])
    if keep:
        return whole
    local = whole.to_local()
    # Dynamo takes its view of a collective's result for one that was changed in place, in transformers' experts.
    return local.clone() if torch.compiler.is_compiling() else local


def _change_input(
    change: Callable[[Tensor], Tensor], module: nn.Module, args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict[str, Any]]:
    """A forward pre-hook: `change` of the hidden states, the first tensor among the arguments."""
    for index, value in enumerate(args):
        if isinstance(value, Tensor):
            return (*args[:index], change(value), *args[index + 1 :]), kwargs
    for name, value in kwargs.items():
        if isinstance(value, Tensor):
            return args, kwargs | {name: change(value)}
    raise ValueError(f"sequence_parallel=True, but {type(module).__name__} was called without a tensor.")


def _change_output(
    change: Callable[[Tensor], Tensor], _module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any
) -> Any:
    """A forward hook: `change` of the hidden states, the output or the first of several.

    Where experts return single tokens, (B S, D), they are put back into sequences first.
    """
    hidden = output[0] if isinstance(output, tuple) else output
    if hidden.dim() == 2:
        whole = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        hidden = hidden.unflatten(0, whole.shape[:2])
    return (change(hidden), *output[1:]) if isinstance(output, tuple) else change(hidden)


def _name_mixture(module: nn.Module, _args: object, output: object) -> None:
    """Add to torch's error for a cut weight among plain tensors its source and the way out."""
    error = sys.exc_info()[1]
    if output is None and isinstance(error, RuntimeError) and "mixed torch.Tensor and DTensor" in str(error):
        error.add_note(
            f"tp: the forward of {type(module).__name__.removeprefix('FSDP')} reads a weight that tensor parallelism has "
            "cut (a head's in its loss?) outside of its module's own forward, where it is a DTensor. Call the module "
            "instead, or leave it out of TensorParallel's plan."
        )


# ----------------------------------------------------------------------------------------------- loss and tied weights


def _refuse_own_loss(module: nn.Module, _args: tuple, kwargs: dict[str, Any]) -> None:
    """A model that computes its loss itself needs torch's rules for cut logits, in forward and in backward."""
    if kwargs.get("labels") is not None and not computes_in_chunks(module) and not loss_is_parallel():
        raise RuntimeError(
            f"loss_parallel=True leaves the logits of this {type(module).__name__} split by vocabulary, and it was called "
            "with labels: its own loss works on such logits only within torch's context. Put forward and backward under "
            "it: `with torch.distributed.tensor.parallel.loss_parallel(): model(**batch).loss.backward()`, or train with "
            "parallelize(..., loss='chunked'), which needs none."
        )


def cut_head(model: nn.Module, rules: Sequence[Rule]) -> Rule:
    """The rule of the output head, by which its logits can stay cut by vocabulary.

    Raises:
        ValueError: none of `rules` cuts the head so.
    """
    get_head = getattr(model, "get_output_embeddings", None)
    head = get_head() if callable(get_head) else None
    for rule in rules:
        is_head = rule.module is head or (head is None and "." not in rule.fqn and isinstance(rule.module, nn.Linear))
        if is_head and isinstance(rule.style, ColwiseParallel):
            return rule
        if head is not None and rule.adapted is not None and rule.module is getattr(head, "base_layer", None):
            raise ValueError(
                f"loss_parallel=True, and the output head {rule.adapted!r} has adapters, whose logits would not be cut "
                "with its own. Leave it out of the adapter's targets, or loss_parallel off."
            )
    raise ValueError(
        "loss_parallel=True, but the plan does not cut the output head by vocabulary; add it, such as "
        "{'lm_head': 'colwise_gather_output'}."
    )


def _tie_again(ties: list[list[tuple[nn.Module, str]]]) -> None:
    """Cutting replaces parameters one by one; those that were one object become one again.

    ties: the places of each parameter that is registered more than once.
    """
    for (first, first_name), *others in ties:
        kept = first._parameters[first_name]
        for module, name in others:
            placements = [getattr(parameter, "placements", None) for parameter in (kept, module._parameters[name])]
            if placements[0] != placements[1]:
                raise RuntimeError(f"Tied weights were cut in two ways, {placements}: this is a bug in resolve_plan.")
            module._parameters[name] = kept


# ------------------------------------------------------------------------------ embeddings that are cut by rows
#
# torch's `RowwiseParallel` makes the gradient of the whole table on every rank, of which each then takes its part. Here a
# rank makes that of its own rows.


def looks_up_own_rows(module: nn.Module) -> bool:
    """Return whether `_LookUp` knows the forward of `module`. It must be that of `torch.nn.Embedding` itself, with a dense
    gradient, and without ``max_norm``, which changes rows in forward."""
    plain = isinstance(module, nn.Embedding) and type(module).forward is nn.Embedding.forward
    return plain and not module.sparse and module.max_norm is None


class _LookUp(Forward):
    """The forward of an embedding whose weight is a DTensor cut on dim 0 over a mesh of one axis: it looks up this rank's
    rows, and its output is a partial sum, as torch's. Ids as a DTensor that every rank has whole."""

    def __call__(self, input: Tensor) -> Tensor:
        module: Any = self.module
        ids, weight = input.to_local() if isinstance(input, DTensor) else input, module.weight
        mesh, part = weight.device_mesh, weight.to_local()
        first = mesh.get_local_rank() * part.shape[0]  # the ranks divide the rows
        rows = _OwnRows.apply(part, ids, first, module.padding_idx, module.scale_grad_by_freq)
        return DTensor.from_local(rows, mesh, [Partial()], run_check=False)


class _OwnRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, first: int, padding_idx: int | None, by_count: bool) -> Tensor:
        """The rows of `ids` in a part of a table, and zeros where another part has them.

        Args:
            weight: (rows, D), the part.
            ids: any shape (...), numbers of rows of the whole table.
            first: the number of the part's first row.
            padding_idx: the id that gives no gradient, as in `torch.nn.Embedding`.
            by_count: divide the gradient of a row by how often it is taken (``scale_grad_by_freq``).

        Returns:
            (..., D)
        """
        ctx.save_for_backward(ids)
        ctx.options = first, len(weight), padding_idx, by_count
        places, others = _places(ids, first, len(weight))
        return nn.functional.embedding(places.masked_fill_(others, 0), weight).masked_fill_(others[..., None], 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if not ctx.needs_input_grad[0]:
            return None, None, None, None, None
        (ids,) = ctx.saved_tensors
        first, count, padding_idx, by_count = ctx.options
        places, others = _places(ids, first, count)
        if padding_idx is not None:
            others |= ids == padding_idx
        # Tokens of other ranks have a row of their own, behind this rank's, that nothing is added to.
        places.masked_fill_(others, count)
        grads = torch.ops.aten.embedding_dense_backward(grad, places, count + 1, count, by_count)
        return grads[:count], None, None, None, None


def _places(ids: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Return where the rows of `ids` are in a part, and which of them are not."""
    places = ids - first
    return places, (places < 0) | (places >= count)
