"""How a model calls its layers: one forward pass on fake tensors, each distinct block run once.

Two layers are of one kind when class, parameter shapes, plain settings (numbers, words, flags and tuples of these of every
sub-module, but for its own index) and call are equal. Later layers of a kind are not run: they hand on tensors of the
shape that the first one returned. That is what makes a model of 126 layers as quick to plan as one of two.
"""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from nemo_like.activation_checkpointing.kv_sharing import has_kv_sharing, is_filled_cache
from nemo_like.module_tree import bare
from nemo_like.planning.block_trace import BlockTrace, trace_block
from nemo_like.planning.fake import FakeRun, cache_off, call_flags
from nemo_like.planning.recorded import Record, record_again, recording
from nemo_like.tensors import describe, map_tensors, split_sample, tensors_in
from nemo_like.torch_compat import tree_flatten

_OWN_INDEX = ("idx", "index", "layer_id", "layer_number", "layer_num", "block_id")


Place = tuple[int | str, int]
"""Of a tensor in a call: the position or the name of the argument that it is in, and its number there."""


@dataclass
class Kind:
    """One distinct block, and how it is called."""

    module: nn.Module
    args: tuple
    kwargs: dict[str, Any]
    output: Any
    state: dict[str, torch.Tensor]
    shared: tuple[torch.Tensor, ...] = ()
    records: list[Record] = field(default_factory=list)
    """What recorders inside the block saw."""
    trace: BlockTrace | None = None
    passed: dict[int, Place] = field(default_factory=dict)
    """Which tensors of its output are tensors that it was called with: position among the former → place in the call."""
    grad: bool = True
    """Called with gradients on: a model that repeats its layers may run some passes without."""
    shared_at: frozenset[Place] = frozenset()
    """Where `shared` stand in its call."""

    def output_with(self, make: Callable[[torch.Tensor], Any], args: tuple, kwargs: Mapping[str, Any]) -> Any:
        """Its output in a call of a block like it: what it hands on is handed on, ``make(tensor)`` stands for the rest."""
        given, positions = by_argument(args, kwargs), itertools.count()

        def one(tensor: torch.Tensor) -> Any:
            position = next(positions)
            return given[self.passed[position]] if position in self.passed else make(tensor)

        return map_tensors(one, self.output)


@dataclass(frozen=True)
class TracedCall:
    """One call of one layer, in the order in which they run."""

    fqn: str
    module: nn.Module
    kind: int


@dataclass
class ModelTrace:
    """A model's layers as it calls them, and what is needed to run any of them again."""

    calls: tuple[TracedCall, ...]
    kinds: tuple[Kind, ...]
    shared_bytes: int
    """Storages that several layers are called with (position tables, masks), counted once."""
    run: FakeRun
    state: dict[str, torch.Tensor]
    args: tuple
    kwargs: dict[str, Any]
    dtype: torch.dtype | None

    def traces(self) -> tuple[BlockTrace, ...]:
        """The trace of each kind."""
        return tuple(kind.trace for kind in self.kinds if kind.trace is not None)

    def counts(self) -> tuple[int, ...]:
        """How many calls there are of each kind."""
        return tuple(sum(call.kind == k for call in self.calls) for k in range(len(self.kinds)))


def trace_model(
    model: nn.Module, layers: Sequence[Any], sample_input: Any, *, dtype: torch.dtype | None = None,
    autocast: torch.dtype | None = None, cuda: tuple[int, int] | None = None,
) -> ModelTrace:  # fmt: skip
    """Run `model` on fake tensors and trace each distinct block as the model calls it.

    Args:
        model: bare (not sharded, not compiled, not checkpointed); on any device, `meta` included. It is not changed.
        layers: its layers, as `nemo_like.layers.find_layers` returns them (objects with ``fqn`` and ``module``).
        sample_input: what one step of one rank gives to `model`: keywords, positions or one tensor. Only shapes, dtypes
            and the values of small integer tensors count.
        dtype: dtype of floating-point parameters in forward (FSDP2's ``param_dtype``); default: their own.
        autocast: run forward passes under autocast to this dtype; default: without.
        cuda: trace the operators of a GPU of this compute capability; default: those of the CPU.

    Raises:
        ValueError: no layer was called, or a layer's behaviour cannot be traced without real values.
    """
    watcher = _Watcher(model, layers)
    with cache_off(model), FakeRun(autocast, cuda) as run:
        state = run.state(model, dtype)
        args, kwargs = run.sample(split_sample(sample_input), dtype)
        kwargs = call_flags(model, args, kwargs)
        with watcher.installed(state), run.casting():
            run_forward(model, state, args, kwargs)
        traced = watcher.finish(run, state, args, kwargs, dtype)
    return traced


def run_forward(model: nn.Module, state: Mapping[str, torch.Tensor], args: tuple, kwargs: Mapping[str, Any]) -> Any:
    """Call `model` with `state` in the place of its tensors; raises ValueError where that is not possible."""
    with named_reason(model, describe(args, kwargs)):
        return torch.func.functional_call(model, dict(state), args, dict(kwargs))


@contextmanager
def named_reason(model: nn.Module, given: str) -> Iterator[None]:
    """Errors of a forward pass of `model` without values as ValueErrors that say why, and what to do; `given`: its input."""
    try:
        yield
    except Exception as error:
        if type(error).__name__ in ("DataDependentOutputException", "DynamicOutputShapeException"):
            way_out = (
                "Mixture-of-experts models of transformers can with experts_implementation='grouped_mm', where they have it."
                if _has_experts(model) else "Use a mode instead of a budget, such as 'selective'."
            )  # fmt: skip
            raise ValueError(
                f"{type(model).__name__} cannot be planned: its forward depends on values that a run without weights "
                f"does not have ({error}{_place_of(error)}). {way_out}"
            ) from error
        if isinstance(error, RuntimeError | TypeError | IndexError | AttributeError):
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ValueError(
                f"The forward pass of {type(model).__name__} failed on the sample input ({given}), run on "
                f"tensors without values: {reason}. Give what one step of one rank gives to the "
                "model; if that is what this is, the model cannot be planned: use a mode instead of a budget."
            ) from error
        raise


def _has_experts(model: nn.Module) -> bool:
    return any("expert" in name.rpartition(".")[2].lower() for name, _ in model.named_modules())


def _place_of(error: BaseException) -> str:
    """``", in line 12 of package.module"``: the innermost line of the model's code that `error` came from."""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        module = frame.f_globals.get("__name__", "")
        if module.partition(".")[0] not in ("torch", __name__.partition(".")[0]):
            return f", in line {line} of {module}"
    return ""


@dataclass
class _Watcher:
    model: nn.Module
    layers: Sequence[Any]
    calls: list[TracedCall] = field(default_factory=list)
    kinds: list[Kind] = field(default_factory=list)
    _keys: dict[Any, int] = field(default_factory=dict)
    _uses: dict[int, set[int]] = field(default_factory=dict)
    _held: list[Any] = field(default_factory=list)

    @contextmanager
    def installed(self, state: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Each layer's forward replaced by a watching one, and put back at the end, whatever happens."""
        run_all = has_kv_sharing(self.model)
        names = {id(module): name for name, module in self.model.named_modules(remove_duplicate=False)}
        with replaced_forwards(
            self.layers,
            lambda layer, forward: self._watch(layer, forward, names[id(bare(layer.module))], state, run_all),
        ):
            yield

    def _watch(
        self, layer: Any, forward: Callable, name: str, state: Mapping[str, torch.Tensor], run_all: bool
    ) -> Callable:
        module = bare(layer.module)
        prefix = name + "." if name else ""
        own = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
        settings = _settings(module)

        def watching(*args: Any, **kwargs: Any) -> Any:
            grad = torch.is_grad_enabled()
            self._refuse_cache(layer.fqn, kwargs)
            key = (settings, _call_key(args), _call_key(kwargs), grad)
            for tensor in tensors_in((args, kwargs)):
                storage = tensor.untyped_storage()
                self._held.append(storage)
                self._uses.setdefault(id(storage), set()).add(len(self.calls))
            kind = self._keys.get(key)
            if kind is not None and not run_all:
                self.calls.append(TracedCall(layer.fqn, module, kind))
                record_again(module, map_tensors(_another, self.kinds[kind].records))
                return self.kinds[kind].output_with(_another, args, kwargs)
            position = len(self.calls)
            self.calls.append(TracedCall(layer.fqn, module, -1))
            saved = map_tensors(_leaf, (args, kwargs))
            with recording(module) as records:
                output = forward(*args, **kwargs)
            if kind is None:
                kind = self._keys[key] = len(self.kinds)
                passed = _handed_on(output, args, kwargs)
                self.kinds.append(
                    Kind(module, saved[0], saved[1], output, own, records=records, passed=passed, grad=grad)
                )
            self.calls[position] = TracedCall(layer.fqn, module, kind)
            return output

        return watching

    def _refuse_cache(self, fqn: str, kwargs: Mapping[str, Any]) -> None:
        given = [name for name, value in kwargs.items() if is_filled_cache(value)]
        if given and torch.is_grad_enabled():
            raise ValueError(
                f"{type(self.model).__name__} hands {fqn} a key/value cache ({given[0]}=) that it makes in every forward "
                "and cannot be told not to: a replay would write it a second time, so no plan can be made. Use ac='none', "
                "or layers= that are not handed it."
            )

    def finish(
        self, run: FakeRun, state: dict[str, torch.Tensor], args: tuple, kwargs: dict[str, Any],
        dtype: torch.dtype | None,
    ) -> ModelTrace:  # fmt: skip
        if not self.calls:
            raise ValueError(
                f"The forward pass of {type(self.model).__name__} called none of its {len(self.layers)} layers with "
                "this sample input; give the input that training gives."
            )
        shared = {key for key, users in self._uses.items() if len(users) > 1}
        sizes: dict[int, int] = {}
        for kind in self.kinds:
            given = by_argument(kind.args, kind.kwargs)
            at = {place: tensor for place, tensor in given.items() if id(tensor.untyped_storage()) in shared}
            kind.shared_at, kind.shared = frozenset(at), tuple(at.values())
            sizes |= {id(t.untyped_storage()): t.untyped_storage().nbytes() for t in kind.shared}
            with torch.set_grad_enabled(kind.grad), named_reason(self.model, describe(args, kwargs)):
                kind.trace = trace_block(
                    kind.module,
                    kind.args,
                    kind.kwargs,
                    name=self._name(kind),
                    shared=kind.shared,
                    run=run,
                    state=kind.state,
                )
        return ModelTrace(tuple(self.calls), tuple(self.kinds), sum(sizes.values()), run, state, args, kwargs, dtype)

    def _name(self, kind: Kind) -> str:
        first = next(call.fqn for call in self.calls if call.module is kind.module)
        return f"{first} ({type(kind.module).__name__})"


@contextmanager
def replaced_forwards(layers: Sequence[Any], make: Callable[[Any, Callable], Callable]) -> Iterator[None]:
    """Each layer's ``forward`` replaced by ``make(layer, forward)`` inside the context."""
    before: list[tuple[nn.Module, Any]] = []
    seen: set[int] = set()
    try:
        for layer in layers:
            module = bare(layer.module)
            if id(module) in seen:
                continue
            seen.add(id(module))
            replacement = make(layer, module.forward)
            before.append((module, module.__dict__.get("forward")))
            module.forward = replacement
        yield
    finally:
        for module, forward in before:
            if forward is None:
                del module.forward
            else:
                module.forward = forward


def by_argument(args: tuple, kwargs: Mapping[str, Any]) -> dict[Place, torch.Tensor]:
    """The tensors of a call by their argument and their number in it.

    A number among all of them would not do: layers that are not run leave empty what they fill for one another.
    """
    arguments: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    return {(name, i): tensor for name, value in arguments for i, tensor in enumerate(tensors_in(value))}


def _handed_on(output: Any, args: tuple, kwargs: Mapping[str, Any]) -> dict[int, Place]:
    """Positions of the tensors in `output` that are tensors of the call, with their places there."""
    given = {id(tensor): place for place, tensor in reversed(by_argument(args, kwargs).items())}
    return {i: given[id(tensor)] for i, tensor in enumerate(tensors_in(output)) if id(tensor) in given}


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _another(tensor: torch.Tensor) -> torch.Tensor:
    made = torch.empty_like(tensor)
    # A tensor that is no leaf, as a layer's output is: models may go on in place.
    return made.requires_grad_().clone() if tensor.requires_grad else made


def _settings(module: nn.Module) -> tuple:
    """Everything plain that tells one layer from another: classes, shapes, numbers, words and flags."""
    found: list[Any] = []
    for name, part in module.named_modules():
        plain = tuple(
            (key, value)
            for key, value in sorted(vars(part).items())
            if _plain(value) and not any(word in key for word in _OWN_INDEX)
        )
        found.append((name, type(part), plain))
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        found.append((name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad))
    return tuple(found)


def _plain(value: Any) -> bool:
    """A number, a word, a flag, or a tuple of such: the stride of a convolution is one."""
    if isinstance(value, tuple):
        return all(map(_plain, value))
    return isinstance(value, bool | int | float | str | type(None))


def _call_key(value: Any) -> Any:
    """A hashable stand-in for the arguments of a call: layouts of tensors, plain values, types of anything else."""
    leaves, spec = tree_flatten(value)
    described: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            described.append((tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.requires_grad))
        elif isinstance(leaf, bool | int | float | str | type(None)):
            described.append(leaf)
        else:
            described.append(type(leaf))
    return tuple(described), str(spec)
