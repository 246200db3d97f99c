"""A block that `torch.compile` takes in several graphs, since experts on several ranks run eagerly between them.

Dynamo ends a graph where a module that contains such experts is entered or left. The block is traced whole, and its joint
graph is split there: every tensor that goes from one piece to another passes an operator, which is in the graph, forward
and backward. AOTAutograd's partitioner divides each piece. The block can then be called: a piece allocates and frees as its
graphs do, the experts' own code runs, and autograd adds gradients between them.
"""

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from nemo_like._util.tensors import Place, by_argument, is_wrapped, map_tensors, tensors_in
from nemo_like.activation_checkpointing.ops import facts
from nemo_like.fake.model_copy import leaves_of, with_state
from nemo_like.fake.run import FakeRun
from nemo_like.planning.trace.compiled_memory import Graph, NotCompiledError, joint_graph
from nemo_like.planning.trace.kinds import BlockKind
from nemo_like.planning.trace.layer_memory import needing_no_values
from nemo_like.torch_compat import (
    OpOverload,
    answering_calls,
    tree_leaves,
    tree_map,
    two_graphs,
)

# A value that goes from piece to piece: ``("state", name)``, ``("input", place)``, or ``("made", number of its border)``.
Value = tuple[str, Any]
ALLOCATES = torch.ops.aten.empty_strided.default  # Operator by which a piece allocates a storage.


@torch.library.custom_op("nemo_like::border", mutates_args=())
def border(tensor: Tensor, number: int) -> Tensor:
    """Pass `tensor` over a border of a piece; the gradient comes back over ``~number``."""
    return tensor.clone()


@border.register_fake
def _(tensor: Tensor, number: int) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.number = inputs[1]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return _BORDER(grad, ~ctx.number), None


border.register_autograd(_backward, setup_context=_setup)
_BORDER: Any = torch.ops.nemo_like.border.default


@torch.library.custom_op("nemo_like::made_apart", mutates_args=())
def made_apart(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a tensor of `shape` that eager code makes of `tensor`."""
    return tensor.new_zeros(shape)


@made_apart.register_fake
def _(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    return torch.empty(shape, dtype=tensor.dtype)


class Crossing(NamedTuple):
    """One passage of a value over a border."""

    enters: bool  # Into the piece; else out of it.
    piece: int
    value: Value


class _Borders(TorchFunctionMode):
    """Number of the piece that runs, and borders around the tensors of others that it reads."""

    def __init__(self, given: Mapping[int, Value]) -> None:
        """given: values of the block's weights and inputs, by the ids of their tensors."""
        super().__init__()
        self.piece, self.crossings = 0, list[Crossing]()
        self.values = dict(given)
        self.origins: dict[int, int] = {}
        self.over: dict[tuple[bool, int, int], Tensor] = {}  # Tensors behind a border.
        self.alive: list[Tensor] = []  # An id is only good while its tensor lives.

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _BORDER:
            return func(*args)
        args, kwargs = map_tensors(self.enter, (args, kwargs or {}))
        out = func(*args, **kwargs)
        self.made_here(out)
        return out

    def next(self, *_: object) -> None:
        """Begin the next piece: a hook of a module."""
        self.piece += 1

    def made_here(self, out: object) -> None:
        """Note the tensors in `out` as those of the piece that runs."""
        for tensor in tensors_in(out):
            if id(tensor) not in self.values:
                self.origins.setdefault(id(tensor), self.piece)
                self.alive.append(tensor)

    def enter(self, tensor: Tensor) -> Tensor:
        """Return a tensor as the piece that runs reads it."""
        is_known = id(tensor) in self.values or id(tensor) in self.origins
        if not is_known or self.origins.get(id(tensor)) == self.piece:
            return tensor
        value, outside = self.leave(tensor)
        return self._passed(outside, Crossing(True, self.piece, value), id(tensor))

    def leave(self, tensor: Tensor) -> tuple[Value, Tensor]:
        """Return the value of a tensor outside of its piece, and the tensor itself there."""
        if id(tensor) in self.values:
            return self.values[id(tensor)], self.over.get((False, -1, id(tensor)), tensor)
        if id(tensor) not in self.origins:
            raise NotCompiledError("it returns a tensor that it did not make")
        value = ("made", len(self.crossings))
        outside = self._passed(tensor, Crossing(False, self.origins[id(tensor)], value), id(tensor))
        self.values[id(tensor)], self.over[False, -1, id(tensor)] = value, outside
        return value, outside

    def _passed(self, tensor: Tensor, crossing: Crossing, key: int) -> Tensor:
        place = (crossing.enters, crossing.piece, key)
        if place not in self.over:
            self.crossings.append(crossing)
            self.over[place] = _BORDER(tensor, len(self.crossings) - 1)
            self.origins[id(self.over[place])] = crossing.piece
        return self.over[place]


class _Apart(torch.autograd.Function):
    """Experts' call in the trace of a block: a result like their first input, made of nothing."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, *routing: Tensor) -> Tensor:
        ctx.like = [(t.shape, t.is_floating_point()) for t in (hidden, *routing)]
        return cast("Tensor", made_apart(hidden, hidden.shape))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return tuple(made_apart(grads[0], shape) if trains else None for shape, trains in ctx.like)


class ExpertsCall(NamedTuple):
    """An eager call of experts between two pieces."""

    module: nn.Module
    args: Any  # Arguments and keywords, with values in the places of tensors.
    result: Value


class Piece:
    """One graph of a block, forward and backward, and the storages that it allocates and frees."""

    def __init__(
        self,
        inputs: Sequence[Value],
        outputs: Mapping[Value, bool],
        forward: fx.Graph,
        backward: fx.Graph | None,
        fuses: bool,
    ) -> None:
        """Read both graphs.

        Args:
            inputs: values that it reads.
            outputs: values that it makes, and whether they get a gradient.
            forward, backward: the graphs; no backward: nothing that it makes gets a gradient.
            fuses: of `CompiledBlock`.
        """
        self.inputs, self.outputs, self.backward = inputs, outputs, None
        self.forward = forward_graph = Graph(forward, fuses)
        self.log, number = forward_graph.log({}, itertools.count(1))
        self.makers = {n: node for node, n in number.items()}
        results = list(forward_graph.output.args[0])
        self.results = cast("list[fx.Node]", results[: len(outputs)])
        self.saved = [node for node in results[len(outputs) :] if isinstance(node, fx.Node)]
        self.places = {node: i for i, node in enumerate(n for n in forward_graph.nodes if n.op == "placeholder")}
        if backward is None:
            return
        self.backward = graph = Graph(backward, fuses)
        roots = list(dict.fromkeys(forward_graph.root[node] for node in self.saved))
        at = {node.name: roots.index(forward_graph.root[node]) + 1 for node in self.saved}
        numbers = {node: at[node.name] for node in graph.given if node.name in at}
        numbers |= {node: len(roots) + 1 + i for i, node in enumerate(graph.tangents)}
        self.back_log, back = graph.log(numbers, itertools.count(len(numbers) + len(roots) + 1))
        self.back_makers = {n: node for node, n in back.items() if node not in numbers}
        self.grads, self.back_numbers = list(graph.output.args[0]), back

    @property
    def kept_inputs(self) -> list[Value]:
        """Values among `inputs` that it saves for backward."""
        roots = [self.forward.root[node] for node in self.saved]
        return [self.inputs[self.places[root]] for root in roots if root in self.places]


class _RunPiece(torch.autograd.Function):
    """A call of a compiled piece: its storages are allocated and freed in the order of its graphs."""

    @staticmethod
    def forward(ctx: Any, piece: Piece, *inputs: Tensor) -> tuple[Tensor, ...]:
        graph, ctx.piece = piece.forward, piece
        storages = _allocated(piece.log, piece.makers, {})
        number_of = {node: number for number, node in piece.makers.items()}

        def value(node: fx.Node) -> Tensor:
            root = graph.root[node]
            return inputs[piece.places[root]] if root in piece.places else storages[number_of[root]]

        roots = {graph.root[node]: node for node in reversed(piece.saved)}
        ctx.save_for_backward(*(value(roots[root]) for root in dict.fromkeys(graph.root[node] for node in piece.saved)))
        results = tuple(_view(value(node), node) for node in piece.results)
        ctx.mark_non_differentiable(*(t for t, trains in zip(results, piece.outputs.values()) if not trains))
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        piece, saved = ctx.piece, list(ctx.saved_tensors)
        ctx.maybe_clear_saved_tensors()
        with_gradient = [grad for grad, trains in zip(grads, piece.outputs.values()) if trains]
        storages = dict(enumerate([*saved, *with_gradient], 1))
        del saved, with_gradient, grads
        storages = _allocated(piece.back_log, piece.back_makers, storages)
        graph = piece.backward

        def value(node: Any) -> Tensor | None:
            if not isinstance(node, fx.Node):
                return None
            return _view(storages[piece.back_numbers[graph.root[node]]], node)

        return None, *map(value, piece.grads)


def _allocated(
    log: Sequence[tuple[int, int]], makers: Mapping[int, fx.Node], storages: dict[int, Tensor]
) -> dict[int, Tensor]:
    """Return the tensors of the storages that are alive after a log, by number; `storages`: those from before."""
    for number, size in log:
        if size:
            value = makers[number].meta["val"]
            dtype = value.dtype if value.is_floating_point() else _FAKED[value.element_size()]
            storages[number] = torch.empty_strided(value.shape, value.stride(), dtype=dtype)
        else:
            storages.pop(number, None)
    return storages


# Dtypes of the storages of integers, by their bytes: a run on fake tensors keeps small integers real, with values.
_FAKED = {1: torch.float8_e4m3fn, 2: torch.float16, 4: torch.float32, 8: torch.float64}


def _view(storage: Tensor, node: fx.Node) -> Tensor:
    """Return the tensor of a node, which is a view of `storage`."""
    value = node.meta["val"]
    layout = value.shape, value.stride(), value.storage_offset()
    if (storage.shape, storage.stride(), storage.storage_offset(), storage.dtype) == (*layout, value.dtype):
        return storage
    return (
        storage.view(value.dtype).as_strided(*layout) if storage.dtype != value.dtype else storage.as_strided(*layout)
    )


@dataclass
class Pieces:
    """A block in several graphs, which is called as the block's module is."""

    module: nn.Module
    steps: Sequence[Piece | ExpertsCall]
    output: Any  # The block's output, with values in the places of tensors.

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the pieces, and the experts' own forward between them; a value lives till its last use."""
        inputs = by_argument(args, kwargs)
        last = {value: at for at, step in enumerate(self.steps) for value in _read(step)}
        results: dict[Value, Tensor] = {}

        def tensor(value: Value) -> Tensor:
            origin, place = value
            if origin == "input":
                return inputs[place]
            return results[value] if origin == "made" else _state(self.module, place)

        ends = set(_values_in(self.output))
        for at, step in enumerate(self.steps):
            if isinstance(step, Piece):
                results |= zip(step.outputs, _RunPiece.apply(step, *map(tensor, step.inputs)))
            else:
                call_args, call_kwargs = _with_tensors(step.args, tensor)
                results[step.result] = step.module(*call_args, **call_kwargs)
                del call_args, call_kwargs
            for value in [value for value in results if last.get(value, -1) <= at and value not in ends]:
                del results[value]
        return _with_tensors(self.output, tensor)

    @property
    def kept_inputs(self) -> frozenset[Place]:
        """Places of the block's inputs that its pieces save for backward."""
        values = (value for step in self.steps if isinstance(step, Piece) for value in step.kept_inputs)
        return frozenset(place for origin, place in values if origin == "input")


class _Of(NamedTuple):
    """The place of a tensor in a structure."""

    value: Value


def _values_in(structure: Any) -> Iterator[Value]:
    for leaf in tree_leaves(structure, is_leaf=lambda leaf: isinstance(leaf, _Of)):
        if isinstance(leaf, _Of):
            yield leaf.value


def _with_tensors(structure: Any, tensor: Any) -> Any:
    return tree_map(
        lambda leaf: tensor(leaf.value) if isinstance(leaf, _Of) else leaf,
        structure,
        is_leaf=lambda leaf: isinstance(leaf, _Of),
    )


def _read(step: Piece | ExpertsCall) -> Iterator[Value]:
    return iter(step.inputs) if isinstance(step, Piece) else _values_in(step.args)


def _state(module: nn.Module, name: str) -> Tensor:
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    return cast("Tensor", (owner._parameters if leaf in owner._parameters else owner._buffers)[leaf])


def traced_pieces(
    kind: BlockKind, run: FakeRun, used: Collection[int], apart: Collection[nn.Module], *, fuses: bool
) -> Pieces:
    """Trace a block forward and backward, and return it in pieces around the modules of `apart`.

    Args:
        kind, run, used: as for `block_memory`.
        apart: modules that run eagerly.
        fuses: of `CompiledBlock`.

    Raises:
        NotCompiledError: the block's graph cannot be split there.
    """
    if not kind.grad or (kind.trace is not None and kind.trace.draws):
        raise NotCompiledError("it runs without gradients, or draws random numbers")
    if kind.left or kind.given:
        raise NotCompiledError("it leaves tensors in attributes, or reads such")
    experts = {name: module for name, module in kind.module.named_modules() if module in apart}
    around = [m for m in kind.module.modules() if m is not kind.module and m not in apart and {*m.modules()} & {*apart}]
    state = leaves_of(kind.state)
    mine = {name: t for name, t in state.items() if not name.startswith(tuple(f"{path}." for path in experts))}
    if any(isinstance(t, DTensor) or is_wrapped([type(t)]) for t in mine.values()):
        raise NotCompiledError("its weights are split by tp, too, or stored in a format of their own")
    replaced: dict[int, Tensor] = {}

    def stand_in(value: Tensor) -> Tensor:
        return replaced.setdefault(id(value), value.detach().requires_grad_(value.requires_grad))

    args, kwargs = map_tensors(stand_in, (kind.args, kind.kwargs))
    places = {id(tensor): place for place, tensor in reversed(by_argument(args, kwargs).items())}
    values: dict[int, Value] = {id(tensor): ("state", name) for name, tensor in reversed(mine.items())}
    values |= {key: ("input", place) for key, place in places.items()}
    tensors = list({id(t): t for t in (*mine.values(), *replaced.values())}.values())
    calls: list[tuple[int, ExpertsCall]] = []
    output: Any = None
    at: list[int] = []
    borders = _Borders({})

    def joint(primals: list[Tensor], tangents: list[Tensor]) -> Any:
        nonlocal borders, output
        leaves = [p.detach().requires_grad_(t.requires_grad) for p, t in zip(primals, tensors)]
        by_id = {id(old): new for old, new in zip(tensors, leaves)}
        borders = _Borders({id(new): values[old] for old, new in by_id.items() if old in values})

        def swap(tensor: Tensor) -> Tensor:
            return by_id.get(id(tensor), tensor)

        with torch.enable_grad(), ExitStack() as stack:
            for module in around:
                stack.callback(module.register_forward_pre_hook(borders.next).remove)
                stack.callback(module.register_forward_hook(borders.next).remove)
            for module in experts.values():
                stack.enter_context(answering_calls(module, _answer(module, borders, calls)))
            call_args, call_kwargs = map_tensors(swap, (args, kwargs))
            stack.enter_context(with_state(kind.module, {name: swap(tensor) for name, tensor in state.items()}))
            stack.enter_context(run.casting())
            stack.enter_context(borders)
            out = kind.run(*call_args, **call_kwargs)
        with torch.enable_grad():
            results = [borders.leave(t) for t in tensors_in(out)]
            in_turn = iter(results)
            output = map_tensors(lambda _: _Of(next(in_turn)[0]), out)
            if not tangents:
                return [tensor for _, tensor in results]
            roots = [results[i][1] for i in at]
            needing = [leaf for leaf in leaves if leaf.requires_grad]
            grads = torch.autograd.grad(roots, needing, tangents, allow_unused=True)
        return [*borders.over.values()], grads

    with needing_no_values(kind), run:
        shapes = joint(tensors, [])
        at += [i for i, t in enumerate(shapes) if t.requires_grad and i not in kind.passed and i in used]
        if not at:
            raise NotCompiledError("its outputs need no gradient")
        tangents = [torch.empty_like(shapes[i]) for i in at]
        del shapes
        calls.clear()
        module = joint_graph(joint, tensors, tangents, fuses=fuses)
        graph = module.graph
        graph.eliminate_dead_code()
        steps: dict[int, Piece | ExpertsCall] = dict(calls)
        home = _homes(graph, borders.crossings)
        for number in range(borders.piece + 1):
            piece = None if number in steps else _piece(module, home, borders.crossings, number, run, fuses)
            steps |= {} if piece is None else {number: piece}
    return Pieces(kind.module, [steps[number] for number in sorted(steps)], output)


def _answer(module: nn.Module, borders: _Borders, calls: list[tuple[int, ExpertsCall]]) -> Any:
    """Return a function that notes a call of experts, and returns a result like theirs."""

    def answer(*args: Any, **kwargs: Any) -> Tensor:
        borders.next()
        structure = map_tensors(lambda t: _Of(borders.leave(t)[0]), (args, kwargs))
        out = _Apart.apply(*map(borders.enter, tensors_in((args, kwargs))))
        borders.made_here(out)
        calls.append((borders.piece, ExpertsCall(module, structure, borders.leave(out)[0])))
        borders.next()
        return cast("Tensor", out)

    return answer


_OUTSIDE = -1  # Home of nodes between pieces: inputs, and sums of gradients that autograd makes.


def _homes(graph: fx.Graph, crossings: Sequence[Crossing]) -> dict[fx.Node, int | None]:
    """Return the piece of each node; None: it reads nothing, and is of the pieces that read it."""
    home: dict[fx.Node, int | None] = {}
    for node in graph.nodes:
        if node.target is _BORDER:
            number = node.args[1]
            crossing = crossings[number if number >= 0 else ~number]
            home[node] = crossing.piece if crossing.enters == (number >= 0) else _OUTSIDE
            continue
        operands = {home[read] for read in node.all_input_nodes} - {None}
        if len(operands) > 1 and node.op != "output":
            raise NotCompiledError("it reads a tensor of another piece in an autograd.Function of its own")
        if isinstance(node.target, OpOverload) and facts(node.target).mutating:
            raise NotCompiledError(f"it changes a tensor that is not its own in place ({node.target.name()})")
        home[node] = _OUTSIDE if node.op in ("placeholder", "output") else next(iter(operands), None)
    return home


def _piece(
    module: fx.GraphModule,
    home: Mapping[fx.Node, int | None],
    crossings: Sequence[Crossing],
    number: int,
    run: FakeRun,
    fuses: bool,
) -> Piece | None:
    """Return one piece of a joint graph; None: nothing comes out of it."""
    borders = {node.args[1]: node for node in home if node.target is _BORDER}
    mine = [(i, crossing) for i, crossing in enumerate(crossings) if crossing.piece == number]
    enters = [(i, crossing.value) for i, crossing in mine if crossing.enters]
    leaves = [(i, crossing.value) for i, crossing in mine if not crossing.enters]
    if not leaves:
        return None
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()

    def place(node: fx.Node, name: str) -> None:
        copies[node] = graph.placeholder(name)
        copies[node].meta = dict(node.meta)

    for at, (i, _) in enumerate(enters):
        place(borders[i], f"primals_{at + 1}")
    tangents = [borders[~i] for i, _ in leaves if ~i in borders]
    for at, node in enumerate(tangents):
        place(node, f"tangents_{at + 1}")
    for node, piece in home.items():
        if piece in (number, None) and node not in copies and node.op in ("call_function", "get_attr"):
            copies[node] = graph.node_copy(node, copies.__getitem__)

    def passed(i: int) -> fx.Node:
        return copies[borders[i].all_input_nodes[0]]

    results = [passed(i) for i, _ in leaves]
    grads = [passed(~i) if ~i in borders else None for i, _ in enters]
    values = [value for _, value in enters], {value: ~i in borders for i, value in leaves}
    if not tangents:
        graph.output(tuple(results))
        graph.eliminate_dead_code()
        return Piece(*values, graph, None, fuses)
    graph.output((tuple(results), tuple(grads)))
    graph.eliminate_dead_code()
    forward, backward = two_graphs(fx.GraphModule(module, graph), len(results), run.fake)
    return Piece(*values, forward.graph, backward.graph, fuses)
