"""One stage of a model: the same modules under the same names, without the parts of other stages.

The stage runs the model's own forward. Layers before its own return the hidden states that were received; the first layer
after them ends the forward. Taken out are the layers of other stages, and the parameters outside of layers that this
stage does not have. In the place of such a parameter is a tensor of zeros in one element of memory. The code in front
of the layers runs on every stage (it makes masks and positions), and results made of such weights are dropped.

Below are the facts that a cut must know of a model, the cut of batches, and the stages of one rank together.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from nemo_like._util.forwards import Forward
from nemo_like._util.module_tree import bare, join, registered
from nemo_like._util.tensors import map_tensors
from nemo_like._util.words import a_or_an
from nemo_like.distributed.consistency_checks import mesh_groups
from nemo_like.distributed.context.parts import MARK, Parts
from nemo_like.distributed.context.sequence_ops import find_group
from nemo_like.distributed.context.verify_cut import compare, first_tokens, losses_of, wanted
from nemo_like.distributed.documents import PackedCalls
from nemo_like.losses.model_loss import LossHooks
from nemo_like.options import ChunkedLoss, PipelineParallel
from nemo_like.torch_compat import answering_calls

STAGE_MARK = "_nemo_like_pipeline_stage"  # Attribute of a stage's tree.


class StageEnd(Exception):
    """The forward came to the first layer of the next stage: the end of this one. No error."""

    def __init__(self, sent: Any) -> None:
        super().__init__("end of a pipeline stage (a signal; please don't catch it)")
        self.sent = sent  # Hidden states, or the tensors that a stage of a caller's own sends.


class Received:
    """Tensors that the stage was sent for the micro-batch that runs."""

    tensors: tuple[Tensor, ...] = ()


def ends_of(model: nn.Module) -> tuple[bool, bool]:
    """Return whether `model` begins with its first layer and ends with its last one: a stage in the middle does neither.

    A stage that its caller cut is whole.
    """
    stage = getattr(model, STAGE_MARK, None)
    return (stage.is_first, stage.is_last) if isinstance(stage, StageSlice) else (True, True)


class AbsentLayer(nn.Module):
    """In the place of another stage's layer.

    Attributes that a model's loop reads of its layers (which mask to give to it, whether batches come first) are those of
    `layer`, a copy without weights.
    """

    def __init__(self, layer: nn.Module, received: Received, form: int | None, place: int | str, ends: bool) -> None:
        super().__init__()
        self._received, self._form, self._place, self._ends = received, form, place, ends
        self.__dict__["_layer"] = layer  # no child: its tensors are not state of this stage

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__.get("_layer"), name)

    def forward(self, *args: Any, **kwargs: object) -> Any:
        """Return the received hidden states as the layer would return them; or raise the stage's end."""
        if self._ends:
            raise StageEnd(args[self._place] if isinstance(self._place, int) else kwargs[self._place])
        (hidden,) = self._received.tensors
        return _returned(hidden, self._form)


def _returned(hidden: Tensor, form: int | None) -> Any:
    """`hidden` as a layer of that form (`StageParts.forms`) would return it."""
    return hidden if form is None else (hidden, *[None] * (form - 1))


def cut(
    model: nn.Module, parts: StageParts, stage: StageSlice, device: torch.device, dtype: torch.dtype | None = None
) -> tuple[nn.Module, Received]:
    """Return the stage's own tree of modules, and its `Received`. `model` itself is not changed.

    The stage's layers are `model`'s; all modules around them are new ones with the same tensors. `dtype`: of floating-point
    parameters in forward (FSDP2's ``param_dtype``), which those have that the stage does not have; None: their own.
    """
    received = Received()
    names = {parts.layers[index] for index in stage.layers}
    absent = {name: index for index, name in enumerate(parts.layers) if name not in names}
    modules: dict[int, nn.Module] = {}

    def belongs(name: str) -> bool:
        return (stage.is_first and name in parts.before) or (stage.is_last and name in parts.after)

    def copied(module: nn.Module, name: str) -> nn.Module:
        if name in names:
            return module
        if name in absent:
            index = absent.pop(name)
            layer = copied(module, name)
            return AbsentLayer(layer, received, parts.forms[index], parts.inputs[index], index >= stage.layers.stop)
        if id(module) in modules:
            return modules[id(module)]
        part = modules[id(module)] = object.__new__(type(module))
        part.__dict__ = {
            key: value.copy() if type(value) in (dict, OrderedDict, set) else value
            for key, value in vars(module).items()
        }
        for key, child in module._modules.items():
            if child is not None:
                part._modules[key] = copied(child, join(name, key))
        for key, parameter in module._parameters.items():
            if parameter is not None and not belongs(join(name, key)):
                del part._parameters[key]
                kind = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
                zero = torch.zeros((), dtype=kind, device=device)
                part.__dict__[key] = zero.expand(parameter.shape)  # a plain attribute: no parameter of this stage
        return part

    return copied(model, ""), received


def merged(trees: Sequence[nn.Module]) -> nn.Module:
    """One tree with all layers and parameters of several stages of a model; `trees[0]` itself where there is one."""
    present = [tree for tree in trees if not isinstance(tree, AbsentLayer)]
    if len(present) <= 1 or all(tree is present[0] for tree in present):
        return (present or list(trees))[0]
    present = list(map(bare, present))
    merged_module = nn.Module()
    for tree in present:
        for table in ("_parameters", "_buffers"):
            merged_module.__dict__[table] |= {
                key: value for key, value in vars(tree)[table].items() if value is not None
            }
        merged_module._non_persistent_buffers_set |= tree._non_persistent_buffers_set
    for name in dict.fromkeys(name for tree in present for name in tree._modules):
        children = [child for tree in present if (child := tree._modules.get(name)) is not None]
        if children:
            merged_module._modules[name] = merged(children)
    return merged_module


# The attribute of a stage's tree that has its `MicrobatchCall`; no child of the tree.
_CALL = "_nemo_like_microbatch_call"


class MicrobatchCall(nn.Module):
    """The model's own forward in a stage, as a module: hooks that a whole model would have see the micro-batch here."""

    def __init__(self, tree: nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = forward
        tree.__dict__[_CALL] = self


def call_of(model: nn.Module) -> nn.Module:
    """Return the module whose hooks see the model's inputs: `model`, or the `MicrobatchCall` of a stage's tree."""
    return vars(model).get(_CALL, model)


class StageForward(Forward):
    """The forward of a stage's tree: the model's own, from received tensors to those that are sent, or the loss.

    Hooks of the tree see the inputs of the stage, and not the micro-batch: those that want that are put on `whole`.

    Args:
        packed: keeps documents apart in the whole model.
    """

    def __init__(
        self,
        model: nn.Module,
        received: Received,
        stage: StageSlice,
        packed: PackedCalls | None,
        in_chunks: ChunkedLoss | None,
    ) -> None:
        super().__init__(model)
        self.whole = MicrobatchCall(model, model.forward)
        self._received, self._stage, self._packed = received, stage, packed
        self._in_chunks = (
            None if in_chunks is None or not stage.is_last else LossHooks(model, in_chunks, in_evaluation=True)
        )
        self.microbatches: Sequence[Mapping[str, Any]] = ()
        self.shares: Sequence[float] = ()  # Each one's share of the loss of the whole batch.

    def __call__(self, *inputs: Tensor, microbatch: Tensor | None = None, **more: object) -> Any:
        """`given`: the number of the micro-batch on the first stage; on others the tensors that the one before sent, as
        a rule the hidden states (rows, tokens, width)."""
        number = int(inputs[0] if microbatch is None else microbatch)
        self._received.tensors = () if self._stage.is_first else inputs
        if torch.is_grad_enabled():
            for tensor in self._received.tensors:
                # torch may detach a sent tensor in place: the buffer itself, where it is passed on as it came.
                tensor.requires_grad_()
        batch, output, sent = {**self.microbatches[number], **more}, None, None
        try:
            changed = None if self._packed is None else self._packed(self.module, (), batch)
            output = self._output(batch if changed is None else changed[1])
        except StageEnd as end:
            sent = end.sent
        finally:
            self._received.tensors = ()
            if self._packed is not None:
                self._packed.after(self.module, (), sent if output is None else output)
        if output is None:
            return map_tensors(Tensor.contiguous, sent)  # or torch could not send it
        loss = loss_of(output).reshape(())
        share = self.shares[number]
        return torch.stack([loss * share if share else loss.nan_to_num() * 0.0])  # a mean over nothing is not a number

    def _output(self, batch: dict[str, Any]) -> Any:
        if self._in_chunks is None:
            return self.whole(**batch)
        output = None
        self._in_chunks.before(self.module, (), batch)
        try:
            output = self.whole(**batch)
        finally:
            changed = self._in_chunks.after(self.module, (), output)
        return output if changed is None else changed

    def whole_batch(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """`batch` before it is cut: the labels of packed documents' first tokens count for nothing."""
        return batch if self._packed is None else self._packed.whole_batch(self.module, dict(batch))


def loss_of(output: object) -> Tensor:
    """Return the loss in the model's output.

    Raises:
        ValueError: there is none.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    if isinstance(output, Tensor) and output.numel() == 1:
        return output
    items = output if isinstance(output, tuple) else ()
    scalars = [item for item in items if isinstance(item, Tensor) and item.dim() == 0]
    if len(scalars) == 1:
        return scalars[0]
    raise ValueError(
        f"The last stage's model returned {a_or_an(output)} without a loss: give labels= to step(), to a model that "
        "returns a loss then (as .loss or ['loss'], as the one scalar of a tuple, or alone)."
    )


# The facts that a cut into stages must know of a model, and the division of its layers over stages.


class TensorForm(NamedTuple):
    """As much of a tensor as its receiver must know before."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class StagesOfModel(Protocol):
    """The facts that a `Pipeline` must know of the whole model."""

    @property
    def layers(self) -> tuple[str, ...]:
        """Names in the original model, from the first stage's to the last one's."""

    @property
    def tied(self) -> tuple[str, ...]:
        """Parameters that the first and the last stage hold each a copy of."""

    @property
    def aliases(self) -> Mapping[str, str]:
        """From another name, under which one of these stages may hold it, to that in `tied`."""

    @property
    def sent_by(self) -> int:
        """Ranks each of which sends its part of a sequence."""

    def sent(self, stage: int, microbatch: Mapping[str, Any], rows: int, tokens: int) -> tuple[TensorForm, ...]:
        """Return the forms of the tensors that `stage` sends to the next one for such a micro-batch.

        Args:
            stage: not the last one.
            microbatch: the arguments of the model.
            rows, tokens: of it, on one rank of ``cp``.
        """

    def passing(self, layer: int) -> Callable[..., Any] | None:
        """Return a function that may replace a call of `layer`, and passes on its hidden states; None: not known."""


@dataclass(frozen=True)
class StageParts:
    """Parameters that run before, in and after the layers; all names are the original model's."""

    aliases: ClassVar[Mapping[str, str]] = {}  # Both stages hold a tied parameter under the name in `tied`.

    layers: tuple[str, ...]  # In the order in which they run.
    # Parameters of the first stage: those used before the first layer, and those that are not used at all.
    before: frozenset[str]
    after: frozenset[str]  # Parameters of the last stage.
    # Parameters that are used before and after (a tied embedding): both stages hold them, and add up their gradients.
    tied: tuple[str, ...]
    # Form of each layer's output: None for its hidden states, a number for a tuple of that length that begins with
    # them.
    forms: tuple[int | None, ...]
    inputs: tuple[int | str, ...]  # Position or name of the argument in which each layer is given the hidden states.
    hidden_width: tuple[int, ...]  # Shape of the hidden states behind rows and tokens.
    hidden_dtype: torch.dtype
    layer_flops: tuple[float, ...]  # FLOPs of one forward of each layer, on the sample.
    flops_before: float
    flops_after: float
    sent_by: int = 1  # Ranks each of which sends its part of a sequence.

    def sent(self, stage: int, microbatch: Mapping[str, Any], rows: int, tokens: int) -> tuple[TensorForm, ...]:
        """As `StagesOfModel.sent`: the hidden states, whatever the stage."""
        return (TensorForm((rows, tokens // self.sent_by, *self.hidden_width), self.hidden_dtype),)

    def passing(self, layer: int) -> Callable[..., Any]:
        """As `StagesOfModel.passing`."""
        place = self.inputs[layer]
        return lambda *args, **kwargs: _returned(
            args[place] if isinstance(place, int) else kwargs[place], self.forms[layer]
        )


@dataclass(frozen=True)
class StageSlice:
    """One stage of all."""

    index: int
    count: int
    layers: range  # Range of the model's layers.

    @property
    def is_first(self) -> bool:
        """Holds the embedding."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Holds norm, head and loss."""
        return self.index == self.count - 1


@functools.lru_cache(maxsize=64)  # a search uses the same ones again and again
def deal(costs: tuple[float, ...], stages: int, first: float = 0.0, last: float = 0.0) -> tuple[int, ...]:
    """Return how many consecutive layers each stage gets, so that the dearest stage costs least; ties go to earlier
    stages.

    Every stage gets at least one layer. `first` and `last` are further costs of the first and the last stage.

    >>> deal((1.0,) * 8, 2), deal((1.0,) * 8, 4, last=2.0)
    ((4, 4), (3, 2, 2, 1))
    """
    count = len(costs)
    if stages > count:
        raise ValueError(f"{count} layers cannot be divided over {stages} stages: each requires one. Use fewer stages.")
    sums = [0.0, *itertools.accumulate(costs)]

    # The best cut of the first n layers into the stages so far, by n: its dearest stage, the sum of squares of its stages,
    # and their layers as negative numbers, so that the least of these gives most to the earlier ones.
    best: dict[int, tuple[float, float, list[int]]] = {0: (0.0, 0.0, [])}

    def longer(begin: int, end: int, more: float) -> tuple[float, float, list[int]]:
        dearest, squares, cuts = best[begin]
        cost = sums[end] - sums[begin] + more
        return round(max(dearest, cost), 9), round(squares + cost * cost, 9), [*cuts, begin - end]

    for stage in range(stages):
        more = (first if stage == 0 else 0.0) + (last if stage == stages - 1 else 0.0)
        ends = range(stage + 1, count - (stages - stage - 1) + 1)
        best = {end: min(longer(begin, end, more) for begin in best if begin < end) for end in ends}
    return tuple(-layers for layers in best[count][2])


def counts_of(parts: StageParts, pp: PipelineParallel) -> list[int]:
    """Return how many layers each stage gets, by `PipelineParallel.balance`.

    Raises:
        ValueError: counts that are not the model's, or more stages than layers.
    """
    if isinstance(pp.balance, tuple):
        if sum(pp.balance) != len(parts.layers):
            raise ValueError(
                f"PipelineParallel.balance is {list(pp.balance)}, {sum(pp.balance)} layers, and the model has "
                f"{len(parts.layers)}."
            )
        return list(pp.balance)
    try:
        return list(deal(parts.layer_flops, pp.stages, parts.flops_before, parts.flops_after))
    except ValueError as error:
        raise ValueError(f"pp is {pp.size} with {pp.stages_per_rank} stage(s) on each rank: {error}") from error


def slices(counts: Sequence[int]) -> list[StageSlice]:
    """The stages for so many layers each."""
    ends = [0, *itertools.accumulate(counts)]
    return [StageSlice(index, len(counts), range(ends[index], ends[index + 1])) for index in range(len(counts))]


# A batch cut into micro-batches.


def size_of(batch: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and tokens of `batch`.

    Raises:
        ValueError: no tensor of shape (rows, tokens, ...).
    """
    first = next((value for value in batch.values() if isinstance(value, Tensor) and value.dim() >= 2), None)
    if first is None:
        raise ValueError(
            f"A pipeline's batch has no tensor of shape (rows, tokens); it has {', '.join(batch) or 'nothing'}. Give "
            "the model's arguments by keyword: pipeline.step(input_ids=..., labels=...)."
        )
    return first.shape[0], first.shape[1]


def cut_batch(batch: Mapping[str, Any], count: int, fill: Mapping[str, int] | None = None) -> list[dict[str, Any]]:
    """`count` micro-batches of equal size.

    Rows that are missing for that are copies of the last one, with the numbers of `fill` in the tensors that it names.

    Raises:
        ValueError: no tensor of shape (rows, tokens, ...), or rows that are missing where there is no `fill`.
    """
    rows, _ = size_of(batch)
    missing = -rows % count
    if missing and fill is None:
        raise ValueError(
            f"The batch has {rows} rows and the pipeline {count} micro-batches: give a multiple of {count} rows. Rows that "
            "count for nothing are added where loss_mean='tokens' and labels are classes, and here they are not."
        )
    size = (rows + missing) // count
    parts: list[dict[str, Any]] = [{**batch} for _ in range(count)]
    for name, value in by_row(batch).items():
        if missing and fill is not None:
            added = value[-1:].expand(missing, *value.shape[1:])
            value = torch.cat([value, torch.full_like(added, fill[name]) if name in fill else added])
        for part, chunk in zip(parts, value.split(size)):
            part[name] = chunk
    return parts


def repeated(microbatch: Mapping[str, Any], count: int) -> dict[str, Any]:
    """A batch of `count` times the same micro-batch."""
    return {**microbatch} | {name: torch.cat([value] * count) for name, value in by_row(microbatch).items()}


def joined(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Two micro-batches of one batch as one of twice the rows."""
    return {**first} | {name: torch.cat([value, second[name]]) for name, value in by_row(first).items()}


def by_row(batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of `batch` that have an entry for each row."""
    rows, _ = size_of(batch)
    return {
        name: value for name, value in batch.items() if isinstance(value, Tensor) and value.dim() and len(value) == rows
    }


# The stages of a pipeline that one rank holds, and the ranks that it shares them with.


@dataclass
class HeldStage:
    """One stage that this rank holds."""

    slice: StageSlice
    module: nn.Module  # Its tree, under the names of the original model; sharded, checkpointed and compiled.
    forward: StageForward


class StagesOfRank:
    """The stages of one rank.

    Args:
        stages: of this rank, in order.
        parts: the layers and tied parameters of all stages, and the forms of the tensors they send.
        options: of the pipeline.
        mesh: all ranks of the job.
        device: where the stages are.
    """

    def __init__(
        self,
        stages: Sequence[HeldStage],
        parts: StagesOfModel,
        options: PipelineParallel,
        mesh: DeviceMesh,
        device: torch.device,
    ) -> None:
        self.stages, self.parts, self.options, self.device = list(stages), parts, options, device
        self.group = mesh["pp"].get_group()
        self.groups = mesh_groups(mesh)  # Groups of all axes: along them, every rank is heard.
        self.groups_of_stage = [mesh[name].get_group() for name in mesh.mesh_dim_names or () if name != "pp"]

    def sequence_parts(self) -> list[Parts]:
        """Return how each stage cuts sequences; empty without ``cp``."""
        found = (
            next((getattr(module, MARK) for module in stage.module.modules() if hasattr(module, MARK)), None)
            for stage in self.stages
        )
        return [parts for parts in found if parts is not None]

    @contextlib.contextmanager
    def without_layers(self, stage: HeldStage) -> Iterator[None]:
        """Within it, calls of the layers of `stage` pass hidden states on, where it is known how."""
        with contextlib.ExitStack() as stack:
            for index in stage.slice.layers:
                if (passing := self.parts.passing(index)) is not None:
                    stack.enter_context(answering_calls(registered(stage.module, self.parts.layers[index]), passing))
            yield


# Context parallelism in a pipeline compared with whole sequences: every stage's hidden states, and the loss.


def verify_stages(
    held: StagesOfRank,
    batch: Mapping[str, Any],
    put_in: Callable[[Mapping[str, Any]], Any],
    forward: Callable[[Mapping[str, Any], list[Tensor]], Any],
) -> None:
    """Raise ValueError, on every rank, where the stages answer otherwise on parts than on whole sequences.

    Compared are the tokens of `nemo_like.distributed.context.verify_cut.wanted`: the first ones, and with
    ``NEMO_LIKE_VERIFY=1`` the whole batch.

    Args:
        held: the stages of this rank.
        batch: whole.
        put_in: gives the stages a batch's micro-batches.
        forward: runs all stages on a batch, and adds their outputs to a list.
    """
    cut = held.sequence_parts()
    length = next(value.shape[1] for value in batch.values() if isinstance(value, Tensor) and value.ndim > 1)
    tokens = wanted(length, cut[0].ranks) if cut else None
    if tokens is None:
        return
    models = [stage.module for stage in held.stages]
    inputs = first_tokens(batch, length, tokens, cut[0].ranks)
    put_in(inputs)  # its calls of the last stage are none of the answers

    def answers() -> list[Tensor]:
        """Return the outputs of this rank's stages: hidden states, and of the last one the losses."""
        seen: list[Tensor] = []
        with contextlib.ExitStack() as stack:
            for stage in (stage for stage in held.stages if stage.slice.is_last):
                hook = stage.forward.whole.register_forward_hook(lambda _, args, output: seen.extend(losses_of(output)))
                stack.callback(hook.remove)
            forward(inputs, seen)
        return seen

    compare(models, cut, answers, [find_group(cut[0].group), held.group], held.device)
