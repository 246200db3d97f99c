"""Which parts of a model run before its layers, in them and after them: what a cut into pipeline stages must know.

One forward pass on fake tensors, every operator looked at. Nothing is asked of the model's class: a parameter belongs to
the first stage if an operator before the first layer reads it, to the last if one after the last layer does. And a cut
between two layers is right only if nothing but the hidden states goes from one side to the other, which is looked at, too.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from nemo_like._util.tensors import split_sample, tensors_in
from nemo_like._util.words import a_or_an
from nemo_like.activation_checkpointing.ops import facts
from nemo_like.distributed.pipeline.cut import StageEnd, cut
from nemo_like.distributed.pipeline.dealing import StageParts, StageSlice
from nemo_like.fake.model_copy import call_with, model_copy
from nemo_like.fake.reasons import STAGES, place_of
from nemo_like.fake.run import FakeRun, cache_off, call_flags, replaced_forwards, run_forward
from nemo_like.layers import Layer, find_layers
from nemo_like.torch_compat import TorchDispatchMode, answering_calls


def stage_parts(
    model: nn.Module, layers: Sequence[Layer], sample_input: Any, *, dtype: torch.dtype | None = None,
    autocast: torch.dtype | None = None,
) -> StageParts:  # fmt: skip
    """Run `model`, which is not changed, on fake tensors and say who uses what.

    Args:
        model: bare; on any device, `meta` included.
        layers: those that are to be dealt out, from `find_layers`.
        sample_input: one microbatch: what `model` is called with.
        dtype: dtype of floating-point parameters in forward (FSDP2's ``param_dtype``); default: their own.
        autocast: run the forward under autocast to this dtype.

    Raises:
        ValueError: a model that can't be cut between its layers, with what goes past them.
    """
    model = model_copy(model)
    layers = find_layers(model, [layer.fqn for layer in layers])
    with cache_off(model), FakeRun(autocast, model=model) as run:
        state = run.state(model, dtype)
        args, kwargs = run.sample(split_sample(sample_input), dtype)
        kwargs = call_flags(model, args, kwargs)
        watch = _UseWatch(model, [layer.fqn for layer in layers], state, (args, kwargs))
        with watch.installed(layers), run.casting(), watch:
            run_forward(model, state, args, kwargs, STAGES)
    return watch.parts()


def check_stages(
    model: nn.Module, parts: StageParts, stages: Sequence[StageSlice], sample_input: Any, *,
    dtype: torch.dtype | None = None, autocast: torch.dtype | None = None,
) -> None:  # fmt: skip
    """Run what each of `stages` of `model` has around its layers, on fake tensors. The other arguments: see `stage_parts`.

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
            state, given = run.state(tree, dtype), call_flags(tree, (), run.sample(batch, dtype))
            stack.enter_context(run.casting())
            try:
                call_with(tree, state, (), given)
            except StageEnd:
                continue
            except Exception as error:
                raise ValueError(
                    f"pp cannot cut {type(model).__name__} into stages: stage {stage.index} of {stage.count} fails "
                    f"without the layers of the others ({type(error).__name__}: {error}{place_of(error)}). {STAGES.instead}"
                ) from error


class _UseWatch(TorchDispatchMode):
    """Phases: 0 before the first layer, 2 i + 1 in layer i, 2 i + 2 after it."""

    def __init__(self, model: nn.Module, names: list[str], state: Mapping[str, Tensor], sample: Any) -> None:
        super().__init__()
        self.model, self.names, self.phase = model, names, 0
        self.flops: Counter[int] = Counter()
        """By phase."""
        self.held: list[Any] = []
        """Storages are told apart by id, so they must live."""
        self.parameters: dict[int, str] = {}
        for name, _ in model.named_parameters():  # a tied one under its first name
            self.parameters[self.key(state[name])] = name
        self.aliases = {
            name: self.parameters[self.key(state[name])] for name, _ in model.named_parameters(remove_duplicate=False)
        }
        self.used: dict[str, set[int]] = {name: set() for name in self.parameters.values()}
        self.made: dict[int, int] = {}
        """Phase in which a tensor was made that depends on a parameter."""
        self.passed: set[int] = set()
        """What the current phase may use of those of earlier ones: the hidden states."""
        self.forms: list[int | None] = []
        self.inputs: list[int | str] = []
        self.hidden: tuple[tuple[int, ...], torch.dtype] | None = None
        self.last_output: Tensor | None = None
        self.rows_and_tokens = next((tuple(t.shape[:2]) for t in tensors_in(sample) if t.dim() >= 2), ())

    def key(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        self.held.append(storage)
        return id(storage)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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

    @contextmanager
    def installed(self, layers: Sequence[Layer]) -> Iterator[None]:
        """Each layer's forward tells when it begins and ends."""
        with replaced_forwards(layers, self.watched):
            yield

    def watched(self, layer: Layer, forward: Callable[..., Any]) -> Callable[..., Any]:
        index = self.names.index(layer.fqn)

        def watching(*args: Any, **kwargs: Any) -> Any:
            if self.phase != 2 * index:
                self.refuse(f"{layer.fqn} is called in {self.where(self.phase)}, and not once, in its place")
            given = [t for t in tensors_in((args, kwargs)) if self.key(t) in self.made]
            if index and (not given or any(t is not self.last_output for t in given)):
                self.refuse(f"{layer.fqn} is not called with what {self.names[index - 1]} returned, and nothing else")
            places: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
            self.inputs.append(next((place for place, value in places if given and value is given[0]), 0))
            self.phase, self.passed = 2 * index + 1, {self.key(t) for t in given}
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
                f"for a sample of {rows} rows and {tokens} tokens (its first tensor of two or more dimensions), so the "
                "shape of what a stage sends is not known for other batches. Use strategy='fsdp2' for such a model (a tower "
                "of pictures or sounds), or say with PipelineParallel(split=...) what each stage is."
            )
        self.hidden, self.last_output, self.passed = form, hidden, {self.key(hidden)}
        self.forms.append(None if whole else len(output))

    def where(self, phase: int) -> str:
        if phase == 0:
            return "what runs before the layers"
        name = self.names[(phase - 1) // 2]
        return name if phase % 2 else f"what runs after {name}"

    def refuse(self, reason: str) -> None:
        raise ValueError(
            f"pp cannot cut {type(self.model).__name__} into stages: {reason}, so the hidden states alone do not carry a "
            "stage's result to the next. Use strategy='fsdp2' with tp or cp, or name other layers=."
        )

    def parts(self) -> StageParts:
        """What was seen."""
        last = 2 * len(self.names)
        if self.phase != last or self.hidden is None:
            self.refuse(f"the forward pass ends in {self.where(self.phase)}")
        assert self.hidden is not None
        between = [name for name, phases in self.used.items() if any(p % 2 == 0 and 0 < p < last for p in phases)]
        if between:
            self.refuse(f"{between[0]} is used between two layers")
        inside = {name for name, phases in self.used.items() if any(p % 2 for p in phases)}
        shared = [name for name in inside if len(self.used[name]) > 1]
        if shared:
            self.refuse(f"{shared[0]} is used in {len(self.used[shared[0]])} places")
        before = {name for name, phases in self.used.items() if 0 in phases}
        after = {name for name, phases in self.used.items() if last in phases}
        unused = {name for name, phases in self.used.items() if not phases}
        every = [(name, alias) for name, alias in self.aliases.items()]
        return StageParts(
            layers=tuple(self.names),
            before=frozenset(name for name, alias in every if alias in before or alias in unused),
            after=frozenset(name for name, alias in every if alias in after),
            tied=tuple(sorted(before & after)),
            forms=tuple(self.forms),
            inputs=tuple(self.inputs),
            hidden_width=self.hidden[0][2:],
            hidden_dtype=self.hidden[1],
            layer_flops=tuple(float(self.flops[2 * i + 1]) for i in range(len(self.names))),
            flops_before=float(self.flops[0]),
            flops_after=float(self.flops[last]),
        )
