"""The distinct blocks that a model calls, and the kind of each of its layers.

Two layers are of one kind when their class, parameter shapes, plain settings and call are equal. Plain settings are the
numbers, words, flags and tuples of these of every sub-module, but for its own index.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from nemo_like._util.tensors import Place, by_argument, map_tensors, tensors_in
from nemo_like.fake.model_copy import quant_state
from nemo_like.fake.run import FakeRun
from nemo_like.planning.trace.block import BlockTrace, trace_block
from nemo_like.torch_compat import forward_hooks, local_part, tree_flatten
from nemo_like.transformers_compat import RECORDERS

GIVEN = ""  # Keyword of a call, which no function has, for the attributes that the model has set for it.
_OWN_INDEX = ("idx", "index", "layer_id", "layer_number", "layer_num", "block_id")


@dataclass
class BlockKind:
    """One distinct block, and how it is called."""

    module: nn.Module
    args: tuple
    kwargs: dict[str, Any]
    output: Any
    state: dict[str, torch.Tensor]
    shared: tuple[torch.Tensor, ...] = ()
    records: list[Record] = field(default_factory=list)  # Calls that recorders inside the block saw.
    trace: BlockTrace | None = None
    # Tensors of its output that are tensors of its call: position in the output → place in the call.
    passed: dict[int, Place] = field(default_factory=dict)
    # True where it is called with gradients on: a model that repeats its layers may run some passes without.
    grad: bool = True
    key: Any = None  # Value that is equal for blocks of one kind, also in traces of other parts of a model.
    shared_at: tuple[Place, ...] = ()  # Places of `shared` in its call.
    # Attributes that its forward sets to tensors with a gradient, by module and name, for the model to read.
    left: tuple[tuple[str, str], ...] = ()
    # Attributes that its forward sets or fills, as a run finds them: `left` as before it, others as the next pass
    # does.
    before: dict[tuple[str, str], Any] = field(default_factory=dict)
    # Attributes that the model sets to such tensors, and that it reads. Their values are in `kwargs`, under `GIVEN`.
    given: tuple[tuple[str, str], ...] = ()
    # Dtype of the autocast that it is called in, which may be the model's own; None: in none.
    autocast: torch.dtype | None = None

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Return the block's output, with the tensors that it leaves in `left`, if any: both get gradients."""
        # A recomputation may leave placeholders in attributes, and in lists: each run begins with the same values.
        set_attributes(self.module, copied(self.before | dict(zip(self.given, kwargs.pop(GIVEN, ())))))
        with _autocast_to(self.autocast):
            output = self.module(*args, **kwargs)
        return (output, attributes_of(self.module, self.left)) if self.left else output

    def call_of(self, module: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the keywords of a call of `module`, a block like it, with the attributes that it reads."""
        return kwargs | {GIVEN: attributes_of(module, self.given)} if self.given else kwargs

    def put(self, module: nn.Module, output: Any) -> Any:
        """Set the attributes in `left` of `module`, a block like it that is not run, and return the block's output."""
        if not self.left:
            return output
        set_attributes(module, dict(zip(self.left, output[1])))
        return output[0]

    def output_with(self, make: Callable[[torch.Tensor], Any], args: tuple, kwargs: Mapping[str, Any]) -> Any:
        """Return its output, as of `run`, in a call of a block like it.

        Inputs that it passes on are passed on; ``make(tensor)`` replaces the other tensors.
        """
        inputs, positions = by_argument(args, kwargs), itertools.count()

        def one(tensor: torch.Tensor) -> Any:
            position = next(positions)
            return inputs[self.passed[position]] if position in self.passed else make(tensor)

        return map_tensors(one, self.output)


def trace_kind(kind: BlockKind, run: FakeRun, name: str, regions: Sequence[str] = ()) -> BlockTrace:
    """Trace one call of a block in a fake run in progress; arguments as for `trace_block`."""
    with torch.set_grad_enabled(kind.grad):
        return trace_block(
            kind.module,
            kind.args,
            kind.kwargs,
            name=name,
            shared=kind.shared,
            run=run,
            state=kind.state,
            call=kind.run,
            regions=regions,
        )


def autocast_now() -> torch.dtype | None:
    """Return the dtype of the autocast that runs; None: none does."""
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None


def _autocast_to(dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    if dtype == autocast_now():
        return nullcontext()
    return torch.autocast("cpu", dtype, enabled=dtype is not None, cache_enabled=False)


@dataclass(frozen=True)
class KindFacts:
    """Facts about one distinct block that need no tensors."""

    trace: BlockTrace
    key: Any  # As of `BlockKind`, or a digest of it.
    shared: tuple[Place, ...]  # Places in its call of the tensors that other layers are called with, too.

    def places_of(self, numbers: Collection[int]) -> frozenset[Place]:
        """Return the places of those with these numbers among `shared`."""
        return frozenset(place for number, place in enumerate(self.shared) if number in numbers)

    @property
    def kept_at(self) -> frozenset[Place]:
        """Places of those that autograd saves without checkpointing: a mask of booleans is not saved."""
        return self.places_of(self.trace.kept_shared)


@dataclass(frozen=True)
class ModelFacts:
    """A model's layers as it calls them, without tensors."""

    calls: tuple[TracedCall, ...]
    kinds: tuple[KindFacts, ...]
    # Bytes of the storages that several layers are called with (position tables, masks), counted once.
    shared_bytes: int
    table_bytes: int  # Bytes of results that functions of the model remember from call to call.


@dataclass(frozen=True)
class TracedCall:
    """One call of one layer, in the order in which they run."""

    fqn: str
    module: nn.Module
    kind: int


@dataclass
class ModelTrace:
    """A model's layers as it calls them, and the state required to run any of them again."""

    calls: tuple[TracedCall, ...]
    kinds: tuple[BlockKind, ...]
    shared_bytes: int  # As of `ModelFacts`.
    run: FakeRun
    state: dict[str, torch.Tensor]
    args: tuple
    kwargs: dict[str, Any]


def attributes_of(module: nn.Module, places: Sequence[tuple[str, str]]) -> list[Any]:
    """Return the attributes at `places` of `module`."""
    every = every_attribute(module)
    return [every[place] for place in places]


def set_attributes(module: nn.Module, values: Mapping[tuple[str, str], Any]) -> None:
    """Set attributes of `module` by their places, without code of its own."""
    for (name, attribute), value in values.items():
        part = module.get_submodule(name)
        (part._buffers if attribute in part._buffers else vars(part))[attribute] = value


def every_attribute(module: nn.Module) -> dict[tuple[str, str], Any]:
    """Return buffers, and attributes that are not parameters or modules, by module and attribute."""
    return {
        (name, attribute): value
        for name, part in module.named_modules()
        for attribute, value in {**vars(part), **part._buffers}.items()
        if attribute not in ("_buffers", "_parameters", "_modules")
    }


def copied(value: Any) -> Any:
    """Return `value` with new containers and the same tensors."""
    return map_tensors(lambda tensor: tensor, value)


def contents_of(attributes: Mapping[tuple[str, str], Any]) -> dict[tuple[str, str], list[Any]]:
    """Return each value, and the tensors in it if it is a container."""
    containers = list | dict | tuple | deque
    return {
        place: [value, *(tensors_in(value) if isinstance(value, containers) else ())]
        for place, value in attributes.items()
    }


def changed_since(before: Mapping[tuple[str, str], list[Any]], module: nn.Module) -> dict[tuple[str, str], Any]:
    """Return the attributes of `module` that were set or filled since their `contents_of` were `before`."""
    return {
        place: copied(contents[0])
        for place, contents in contents_of(every_attribute(module)).items()
        if list(map(id, contents)) != list(map(id, before.get(place, ())))
    }


def attributes_with_gradient(module: nn.Module) -> dict[tuple[str, str], Any]:
    """Return those of `every_attribute` that hold a tensor with a history."""
    return {
        place: value
        for place, value in every_attribute(module).items()
        if (isinstance(value, torch.Tensor) or (isinstance(value, list | dict | tuple) and value))
        and any(tensor.grad_fn is not None for tensor in tensors_in(value))
    }


def read_of(output: Any, inputs: Sequence[torch.Tensor], attributes: Mapping[tuple[str, str], Any]) -> tuple:
    """Return the places of those `attributes` that `output`, made of `inputs`, has a gradient with respect to."""
    nodes = {tensor.grad_fn for tensor in inputs if tensor.grad_fn is not None}
    following = [tensor.grad_fn for tensor in tensors_in(output)]
    while following:
        node = following.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            following += [before for before, _ in node.next_functions]
    return tuple(place for place, value in attributes.items() if any(t.grad_fn in nodes for t in tensors_in(value)))


def handed_on(output: Any, args: tuple, kwargs: Mapping[str, Any]) -> dict[int, Place]:
    """Return the positions of the tensors in `output` that are tensors of the call, with their places there."""
    places = {id(tensor): place for place, tensor in reversed(by_argument(args, kwargs).items())}
    return {i: places[id(tensor)] for i, tensor in enumerate(tensors_in(output)) if id(tensor) in places}


def settings_of(module: nn.Module) -> tuple:
    """Return everything plain that tells one layer from another: classes, shapes, numbers, words and flags."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return (
        *((name, type(part), _plain_attributes(part)) for name, part in module.named_modules()),
        *(
            (name, tuple(local_part(t).shape), t.dtype, t.requires_grad, (q := quant_state(t)) and _plain_attributes(q))
            for name, t in tensors
        ),
    )


def _plain_attributes(part: object) -> tuple:
    """Return the plain attributes of a module, or of the state of a weight in 4 bits, by name, but for its own index."""
    attributes = sorted(vars(part).items())
    return tuple((k, v) for k, v in attributes if _plain(v) and not any(word in k for word in _OWN_INDEX))


def _plain(value: Any) -> bool:
    """Return whether a value is a number, a word, a flag, a dtype, or a tuple of such, as the stride of a convolution."""
    if isinstance(value, tuple):
        return all(map(_plain, value))
    return isinstance(value, bool | int | float | str | type(None) | torch.dtype)


def call_key(value: Any) -> Any:
    """Return a hashable stand-in for the arguments of a call: layouts of tensors, plain values, types of anything else."""
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


# The name of a module within its layer, its arguments, and its output.
Record = tuple[str, tuple, Any]


def _hooks(layer: nn.Module) -> Iterator[tuple[str, nn.Module, Callable]]:
    """Yield the recorders below `layer`, by module name; those on the layer itself are called with it."""
    for name, part in layer.named_modules():
        for hook in forward_hooks(part):
            if name and getattr(hook, "__module__", None) == RECORDERS:
                yield name, part, hook


@contextmanager
def recording(layer: nn.Module) -> Iterator[list[Record]]:
    """Note the calls that the recorders below `layer` see within the context, one entry for each module and call."""
    seen: list[Record] = []
    with ExitStack() as stack:
        for name, part in {name: part for name, part, _ in _hooks(layer)}.items():

            def note(module: nn.Module, args: tuple, output: Any, name: str = name) -> None:
                seen.append((name, args, output))

            stack.callback(part.register_forward_hook(note).remove)
        yield seen


def record_again(layer: nn.Module, records: Sequence[Record]) -> None:
    """Give the recorders below `layer`, which is not run, the calls they would have seen."""
    hooks = list(_hooks(layer)) if records else []
    for name, args, output in records:
        for at, part, hook in hooks:
            if at == name:
                hook(part, args, output)
