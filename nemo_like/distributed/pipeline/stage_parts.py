"""Find the parameters used before a model's layers, in them and after them, for a cut into pipeline stages.

One forward pass on fake tensors, in which every operator is looked at. The model's class does not matter. A parameter
belongs to the first stage if an operator before the first layer reads it, to the last if one after the last layer does.
A cut between two layers is right only if nothing but the hidden states crosses it, which is looked at, too.
"""

import copy
import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from nemo_like._util.forwards import Forward
from nemo_like._util.tensors import split_sample, tensors_in
from nemo_like._util.words import a_or_an
from nemo_like.activation_checkpointing.ops import facts
from nemo_like.distributed.pipeline.cut import (
    Received,
    StageEnd,
    StageParts,
    StageSlice,
    TensorForm,
    cut,
    loss_of,
    slices,
)
from nemo_like.fake.model_copy import call_with, model_copy
from nemo_like.fake.reasons import STAGES, place_of
from nemo_like.fake.run import FakeRun, cache_off, call_flags, replaced_forwards, run_forward
from nemo_like.layers import Layer, find_layers
from nemo_like.torch_compat import DispatchMode, answering_calls


def stage_parts(
    model: nn.Module,
    layers: Sequence[Layer],
    sample_input: object,
    *,
    dtype: torch.dtype | None = None,
    autocast: torch.dtype | None = None,
) -> StageParts:
    """Run `model`, which is not changed, on fake tensors and return the parameters that each part uses.

    Args:
        model: bare; on any device, `meta` included.
        layers: those that are to be divided over stages, from `find_layers`.
        sample_input: one micro-batch: the arguments of `model`.
        dtype: dtype of floating-point parameters in forward (FSDP2's ``param_dtype``); default: their own.
        autocast: run the forward under autocast to this dtype.

    Raises:
        ValueError: a model that can't be cut between its layers, with the tensors that go past them.
    """
    model = model_copy(model)
    layers = find_layers(model, [layer.fqn for layer in layers])
    with cache_off(model), FakeRun(autocast, model=model) as run:
        state = run.state(model, dtype)
        args, kwargs = run.sample(split_sample(sample_input), dtype)
        kwargs = call_flags(model, args, kwargs)
        watch = _UseWatch(model, [layer.fqn for layer in layers], state, (args, kwargs))
        with replaced_forwards(layers, watch.watched), run.casting(), watch:
            run_forward(model, state, args, kwargs, STAGES)
    return watch.parts()


def check_stages(
    model: nn.Module,
    parts: StageParts,
    stages: Sequence[StageSlice],
    sample_input: object,
    *,
    dtype: torch.dtype | None = None,
    autocast: torch.dtype | None = None,
) -> None:
    """Run the modules around the layers in each of `stages`, on fake tensors. The other arguments: see `stage_parts`.

    Raises:
        ValueError: a stage that fails without the layers of the others.
    """
    model = model_copy(model)
    args, more = split_sample(sample_input)
    batch = dict(zip(inspect.signature(model.forward).parameters, args)) | more
    rows, tokens = next(tuple(t.shape[:2]) for t in tensors_in(batch) if t.dim() >= 2)
    for stage in stages:
        tree, received = cut(model, parts, stage, torch.device("cpu"), dtype)
        with cache_off(tree), FakeRun(autocast, model=tree) as run, ExitStack() as stack:
            for index in stage.layers:
                stack.enter_context(answering_calls(tree.get_submodule(parts.layers[index]), parts.passing(index)))
            sent = () if stage.is_first else parts.sent(stage.index - 1, batch, rows, tokens)
            received.tensors = tuple(
                run.like(torch.empty(form.shape, dtype=form.dtype, device="meta")) for form in sent
            )
            state, flags = run.state(tree, dtype), call_flags(tree, (), run.sample(batch, dtype))
            stack.enter_context(run.casting())
            try:
                call_with(tree, state, (), flags)
            except StageEnd:
                continue
            except Exception as error:
                raise ValueError(
                    f"pp cannot cut {type(model).__name__} into stages: stage {stage.index} of {stage.count} fails "
                    f"without the layers of the others ({type(error).__name__}: {error}{place_of(error)}). {STAGES.instead}"
                ) from error


class _UseWatch(DispatchMode):
    """Phases: 0 before the first layer, 2 i + 1 in layer i, 2 i + 2 after it."""

    def __init__(self, model: nn.Module, names: list[str], state: Mapping[str, Tensor], sample: object) -> None:
        super().__init__()
        self.model, self.names, self.phase = model, names, 0
        self.flops: Counter[int] = Counter()  # By phase.
        self.held: list[Any] = []  # Storages are told apart by id, so they must live.
        # A tied one under its first name.
        self.parameters = {self.key(state[name]): name for name, _ in model.named_parameters()}
        self.aliases = {
            name: self.parameters[self.key(state[name])] for name, _ in model.named_parameters(remove_duplicate=False)
        }
        self.used: dict[str, set[int]] = {name: set() for name in self.parameters.values()}
        self.made: dict[int, int] = {}  # Phase in which a tensor was made that depends on a parameter.
        self.passed: set[int] = set()  # Tensors of earlier phases that the current one may use: the hidden states.
        self.forms: list[int | None] = []
        self.inputs: list[int | str] = []
        self.hidden: tuple[tuple[int, ...], torch.dtype] | None = None
        self.last_output: Tensor | None = None
        self.rows_and_tokens = next((tuple(t.shape[:2]) for t in tensors_in(sample) if t.dim() >= 2), ())

    def key(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        self.held.append(storage)
        return id(storage)

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        depends = False
        for tensor in tensors_in((args, kwargs or {})):
            key = self.key(tensor)
            if key in self.parameters:
                self.used[self.parameters[key]].add(self.phase)
                depends = True
            elif key in self.made:
                depends = True
                if self.made[key] != self.phase and key not in self.passed and self.phase > 1:
                    self.refuse(f"{func} in {self.where(self.phase)} uses a tensor from {self.where(self.made[key])}")
        out = func(*args, **(kwargs or {}))
        if depends:
            rule = facts(func).flops
            self.flops[self.phase] += rule(func, args, kwargs or {}, out) if rule is not None else 0
            for tensor in tensors_in(out):
                self.made.setdefault(self.key(tensor), self.phase)
        return out

    def watched(self, layer: Layer, forward: Callable[..., Any]) -> Callable[..., Any]:
        """`forward` of a layer, which tells when it begins and ends."""
        index = self.names.index(layer.fqn)

        def watching(*args: object, **kwargs: object) -> Any:
            if self.phase != 2 * index:
                self.refuse(f"{layer.fqn} is called in {self.where(self.phase)}, and not once, in its place")
            inputs = [t for t in tensors_in((args, kwargs)) if self.key(t) in self.made]
            if index and (not inputs or any(t is not self.last_output for t in inputs)):
                self.refuse(f"{layer.fqn} is not called with the output of {self.names[index - 1]}, and nothing else")
            places: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
            self.inputs.append(next((place for place, value in places if inputs and value is inputs[0]), 0))
            self.phase, self.passed = 2 * index + 1, {self.key(t) for t in inputs}
            output = forward(*args, **kwargs)
            self.phase = 2 * index + 2
            self.returned(layer.fqn, output)
            return output

        return watching

    def returned(self, name: str, output: Any) -> None:
        tensors = [t for t in tensors_in(output) if self.key(t) in self.made]
        whole = isinstance(output, Tensor)
        if len(tensors) != 1 or not (whole or (isinstance(output, tuple) and output[0] is tensors[0])):
            self.refuse(f"{name} returns {len(tensors)} tensors in {a_or_an(output)}, and not its hidden states alone")
        hidden = tensors[0]
        form = (tuple(hidden.shape), hidden.dtype)
        if self.hidden is not None and self.hidden != form:
            self.refuse(f"{name} returns hidden states of another shape or dtype ({form}) than the layer before it")
        if form[0][:2] != self.rows_and_tokens:
            rows, tokens = self.rows_and_tokens or ("?", "?")
            raise ValueError(
                f"pp cannot cut {type(self.model).__name__} into stages: {name} returns hidden states of shape {form[0]} "
                f"for a sample of {rows} rows and {tokens} tokens (its first tensor of two or more dimensions). So the "
                "shape of the tensors that a stage sends is not known for other batches. Use strategy='fsdp2' for such "
                "a model (an encoder of pictures or sounds), or define each stage with PipelineParallel(split=...)."
            )
        self.hidden, self.last_output, self.passed = form, hidden, {self.key(hidden)}
        self.forms.append(None if whole else len(output))

    def where(self, phase: int) -> str:
        if phase == 0:
            return "the code before the layers"
        name = self.names[(phase - 1) // 2]
        return name if phase % 2 else f"the code after {name}"

    def refuse(self, reason: str) -> None:
        raise ValueError(
            f"pp cannot cut {type(self.model).__name__} into stages: {reason}, so the hidden states alone do not carry a "
            "stage's result to the next. Use strategy='fsdp2' with tp or cp, or name other layers=."
        )

    def parts(self) -> StageParts:
        """Return the parts that were seen."""
        last = 2 * len(self.names)
        if self.phase != last or self.hidden is None:
            self.refuse(f"the forward pass ends in {self.where(self.phase)}")
        assert self.hidden is not None
        between = [name for name, phases in self.used.items() if any(p % 2 == 0 and 0 < p < last for p in phases)]
        if between:
            self.refuse(f"{between[0]} is used between two layers")
        shared = [name for name, phases in self.used.items() if len(phases) > 1 and any(p % 2 for p in phases)]
        if shared:
            self.refuse(f"{shared[0]} is used in {len(self.used[shared[0]])} places")
        before = {name for name, phases in self.used.items() if 0 in phases or not phases}
        after = {name for name, phases in self.used.items() if last in phases}
        return StageParts(
            layers=tuple(self.names),
            before=frozenset(name for name, alias in self.aliases.items() if alias in before),
            after=frozenset(name for name, alias in self.aliases.items() if alias in after),
            tied=tuple(sorted(before & after)),
            forms=tuple(self.forms),
            inputs=tuple(self.inputs),
            hidden_width=self.hidden[0][2:],
            hidden_dtype=self.hidden[1],
            layer_flops=tuple(float(self.flops[2 * i + 1]) for i in range(len(self.names))),
            flops_before=float(self.flops[0]),
            flops_after=float(self.flops[last]),
        )


# A model in stages that a function of the caller's makes (``PipelineParallel(split=...)``): checked, and run on fake
# tensors to learn the shapes and dtypes of the tensors that stages send each other.

Split = Callable[[nn.Module, int, int], nn.Module]
_ARGUMENT = "PipelineParallel.split"


class SplitCall(Forward):
    """Replacement for the forward of a caller's stage: it is called with a whole micro-batch, by keyword."""

    def __init__(self, stage: nn.Module, received: Received, piece: StageSlice) -> None:
        super().__init__(stage)
        self._received, self._piece = received, piece
        parameters = list(inspect.signature(stage.forward).parameters.values())
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self._names = [p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]

    def __call__(self, **batch: object) -> Any:
        """Return the last stage's output; the others end with `StageEnd`."""
        output = self.run(self._received.tensors, batch)
        if self._piece.is_last:
            return output
        raise StageEnd(output)

    def run(self, inputs: tuple[Tensor, ...], batch: Mapping[str, Any]) -> Any:
        """Run the stage's forward on the tensors from the stage before and the entries of a micro-batch that it names.

        Raises:
            ValueError: a first stage that names nothing of it; a stage whose output can't be sent.
        """
        taken, free = self._names[: len(inputs)], self._names[len(inputs) :]
        arguments = {k: v for k, v in batch.items() if k in free or (self._takes_all and k not in taken)}
        if self._piece.is_first and not arguments:
            raise ValueError(
                f"{_ARGUMENT}: the first stage's forward takes {', '.join(self._names) or 'nothing'}, and a micro-batch has "
                f"{', '.join(batch)}. Name its arguments as the batch does."
            )
        output = self.call(*inputs, **arguments)
        if self._piece.is_last:
            return output
        tensors = output if isinstance(output, tuple) else (output,)
        if not tensors or not all(isinstance(t, Tensor) and t.is_floating_point() for t in tensors):
            kinds = ", ".join(str(t.dtype) if isinstance(t, Tensor) else type(t).__name__ for t in tensors)
            raise ValueError(
                f"{_ARGUMENT}: stage {self._piece.index} returns {kinds or 'nothing'}. A stage sends one floating-point "
                "tensor or a tuple of them, through which gradients come back; the next one takes other inputs by "
                "name from the micro-batch."
            )
        sent = tuple(t.contiguous() for t in tensors)
        return sent if isinstance(output, tuple) else sent[0]


class _OnFakes(SplitCall):
    """The same for a copy of the stage, which is called with the tensors from the stage before, and a micro-batch."""

    __call__ = SplitCall.run  # type: ignore[assignment]


class SplitParts:
    """The stages that ``split=`` made of a model, and the tensors they send each other."""

    sent_by = 1

    def __init__(
        self,
        model: nn.Module,
        split: Split,
        stages: int,
        layers: Sequence[Layer],
        sample_input: object,
        *,
        dtype: torch.dtype | None = None,
        autocast: torch.dtype | None = None,
    ) -> None:
        """Call `split` for every stage, check its results, and run all of them on fake tensors.

        Args:
            model: bare, on any device; not changed.
            split: as in `PipelineParallel`.
            stages: how many.
            layers: of the whole model, from `find_layers`.
            sample_input: one micro-batch: the arguments of `model`.
            dtype, autocast: as for `nemo_like.distributed.pipeline.stage_parts.stage_parts`.

        Raises:
            ValueError: stages that are not this model's, or that do not run.
        """
        self._dtype, self._autocast = dtype, autocast
        trees = self._trees = [_stage_of(model, split, index, stages) for index in range(stages)]
        self.tied, self.aliases = _shared(model, trees)
        dealt = [_layers_in(tree, index, layers) for index, tree in enumerate(trees)]
        self.layers = tuple(chain.from_iterable(dealt))
        self.slices = slices([len(names) for names in dealt])
        self._copies = list(model_copy(nn.ModuleList(trees)).children())
        for copied, piece in zip(self._copies, self.slices):
            _OnFakes(copied, Received(), piece).put()
        self._forms: dict[Any, list[tuple[TensorForm, ...]]] = {}
        args, batch = split_sample(sample_input)
        self.sent(0, dict(zip(inspect.signature(model.forward).parameters, args)) | dict(batch), 0, 0)

    def take(self, index: int) -> tuple[nn.Module, Received]:
        """Return a stage's own tree of modules, and its `Received`."""
        tree, received = self._trees[index], Received()
        SplitCall(tree, received, self.slices[index]).put()
        return tree, received

    def forget_weights(self) -> None:
        """Let go of the stages; the tensors they send are known without their weights."""
        self._trees = []

    def sent(self, stage: int, microbatch: Mapping[str, Any], rows: int, tokens: int) -> tuple[TensorForm, ...]:
        """As `StagesOfModel.sent`; found by running the stages on fake tensors, once for each shape of a micro-batch."""
        key = tuple((name, v.shape, v.dtype) for name, v in microbatch.items() if isinstance(v, Tensor))
        if key not in self._forms:
            self._forms[key] = self._run(microbatch)
        return self._forms[key][stage]

    def passing(self, layer: int) -> None:
        """As `StagesOfModel.passing`: the inputs of layers in a caller's stage are not known."""

    def _run(self, microbatch: Mapping[str, Any]) -> list[tuple[TensorForm, ...]]:
        forms = []
        inputs: tuple[Tensor, ...] = ()
        with FakeRun(self._autocast, model=nn.ModuleList(self._copies)) as run:
            batch = run.sample(dict(microbatch), self._dtype)
            for copied in self._copies:
                with cache_off(copied), run.casting():
                    output = run_forward(copied, run.state(copied, self._dtype), (inputs, batch), {}, STAGES)
                if copied is self._copies[-1]:
                    loss_of(output)
                    break
                inputs = output if isinstance(output, tuple) else (output,)
                forms.append(tuple(TensorForm(tuple(t.shape), t.dtype) for t in inputs))
        return forms


def _stage_of(model: nn.Module, split: Split, index: int, stages: int) -> nn.Module:
    """Return the module of `split` for a stage. All its saved tensors must be the model's own, under their names."""
    tensors = chain(model.parameters(), model.buffers())
    tree = split(copy.deepcopy(model, {id(tensor): tensor for tensor in tensors}), index, stages)
    if not isinstance(tree, nn.Module):
        raise ValueError(f"{_ARGUMENT} returned {tree!r} for stage {index} of {stages}; it must be an nn.Module.")
    whole = model.state_dict(keep_vars=True)
    names = {id(tensor): name for name, tensor in reversed(whole.items())}
    for name, tensor in tree.state_dict(keep_vars=True).items():
        if whole.get(name) is tensor or not isinstance(tensor, Tensor):
            continue
        found = names.get(id(tensor))
        reason = (
            "is none of the model's: give stages the model's own tensors, no copies of them"
            if found is None
            else f"is the model's {found!r}: keep that name, or no checkpoint of the whole model fits. An "
            f"nn.ModuleDict({{'2': layers[2]}}) keeps the numbers of a list"
        )
        raise ValueError(f"{_ARGUMENT}: {name!r} of stage {index} {reason}.")
    return tree


def _shared(model: nn.Module, trees: Sequence[nn.Module]) -> tuple[tuple[str, ...], dict[str, str]]:
    """The parameters that the first and the last stage both have, and the other names that these stages have for them.

    Raises:
        ValueError: a parameter that no stage has, or one that two other stages have.
    """
    holders: dict[int, list[int]] = {id(p): [] for p in model.parameters()}
    for index, tree in enumerate(trees):
        for parameter in tree.parameters():
            holders[id(parameter)].append(index)
    first_names = {id(p): name for name, p in model.named_parameters()}
    for key, stages in holders.items():
        if not stages:
            raise ValueError(
                f"{_ARGUMENT}: no stage has {first_names[key]!r}. Give it to one of the {len(trees)} stages, or delete it "
                "from the model."
            )
        if len(stages) > 1 and stages != [0, len(trees) - 1]:
            raise ValueError(
                f"{_ARGUMENT}: {first_names[key]!r} is in stages {', '.join(map(str, stages))}. A parameter is one "
                f"stage's, or the first and the last one's (0 and {len(trees) - 1}), which add up its gradients."
            )
    tied = {first_names[key] for key, stages in holders.items() if len(stages) > 1}
    aliases: dict[str, str] = {}
    for tree in (trees[0], trees[-1]):
        names = {name: first_names[id(p)] for name, p in tree.named_parameters(remove_duplicate=False)}
        aliases |= {name: first for name, first in names.items() if first in tied and name != first}
    return tuple(sorted(tied)), aliases


def _layers_in(tree: nn.Module, index: int, layers: Sequence[Layer]) -> list[str]:
    names = {name for name, _ in tree.named_modules()}
    fqns = [layer.fqn for layer in layers if layer.fqn in names]
    if not fqns:
        raise ValueError(
            f"{_ARGUMENT}: stage {index} has none of the model's layers ({layers[0].fqn}, ...). Give it one, or name in "
            "layers= the modules to checkpoint and shard as one."
        )
    return fqns
