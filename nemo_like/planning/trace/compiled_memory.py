"""Memory of a block that `torch.compile` takes, from AOTAutograd's partition of its forward and backward.

The joint graph is traced on fake tensors once, with Inductor's decompositions. A copy of it gets the tags of a policy, and
AOTAutograd's own partitioner cuts that. Inductor does not run. It fuses pointwise operators, reductions and casts: their
results are taken to exist only where a matmul, attention, a collective, the other graph or the caller reads them, and to be
written into a tensor of their size that they read last.
"""

import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, cast

import torch
import torch.fx.traceback
from torch import Tensor, fx
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext, create_selective_checkpoint_contexts

from nemo_like._util.table import grouped
from nemo_like._util.tensors import by_argument, is_wrapped, map_tensors, storages, tensors_in
from nemo_like.activation_checkpointing.engine.compiled import torch_policy_fn
from nemo_like.activation_checkpointing.ops import facts
from nemo_like.activation_checkpointing.policy import PlanMismatchError, Policy
from nemo_like.fake.model_copy import leaves_of, packed_as, with_state
from nemo_like.fake.run import FakeRun
from nemo_like.options.optimizers import TrainedParameter, UpdateInBackward
from nemo_like.planning.trace.kinds import BlockKind
from nemo_like.planning.trace.layer_memory import needing_no_values
from nemo_like.planning.trace.records import BlockEvents
from nemo_like.torch_compat import (
    HigherOrderOperator,
    OpOverload,
    decompositions_of_inductor,
    local_part,
    traced_graph,
    two_graphs,
)

# Operators of ATen that have a kernel of their own in Inductor, besides attention's.
_APART = {
    *("mm", "bmm", "addmm", "baddbmm", "_scaled_mm", "_grouped_mm", "convolution", "convolution_backward"),
    *("sort", "topk", "scatter", "scatter_add", "index_put", "_unsafe_index_put", "embedding_dense_backward"),
}
# Context in which forward asks torch's policy functions.
_CONTEXT = SelectiveCheckpointContext(is_recompute=False)


class NotCompiledError(ValueError):
    """The block's graph is not one that this can read; the message says why."""


@dataclass(frozen=True)
class CompiledBlock:
    """Both graphs of a block, and their inputs."""

    forward: fx.Graph
    backward: fx.Graph
    # Number of the tensors that it returns; the forward graph returns the saved ones behind them.
    outputs: int
    with_gradient: tuple[int, ...]  # Positions of those among these that get a gradient.
    # For each gradient that the backward graph returns, ``("param", name)``, ``("input", place)`` or ``("", None)``.
    wanted: tuple[tuple[str, Any], ...]
    places: Mapping[str, Any]  # Place in the call of each placeholder of the forward graph that is an input.
    fuses: bool  # Inductor compiles it; else each operator of the graphs runs by itself (``aot_eager``).


def traced_block(
    kind: BlockKind, run: FakeRun, used: Collection[int], *, fuses: bool
) -> Callable[[Policy | None], CompiledBlock]:
    """Trace a block forward and backward, and return a function that cuts the graph, once for each policy.

    Its policy chooses the tensors that the block's region saves, by operators and their numbers alone; None: it has no
    region, or one around it. It raises `NotCompiledError` where the block changes tensors in place.

    Args:
        kind, run, used: as for `block_memory`.
        fuses: of `CompiledBlock`.

    Raises:
        NotCompiledError: it draws random numbers, or has weights that are no plain tensors.
    """
    state = leaves_of(kind.state)
    if not kind.grad or (kind.trace is not None and kind.trace.draws):
        raise NotCompiledError("it runs without gradients, or draws random numbers")
    if is_wrapped(type(tensor) for tensor in state.values() if not isinstance(tensor, DTensor)):
        raise NotCompiledError("its weights are stored in a format of their own")
    replaced: dict[int, Tensor] = {}

    def stand_in(value: Tensor) -> Tensor:
        return replaced.setdefault(id(value), value.detach().requires_grad_(value.requires_grad))

    args, kwargs = map_tensors(stand_in, (kind.args, kind.kwargs))
    weights = {id(tensor): tensor for tensor in state.values()}
    given = [*weights.values(), *replaced.values()]
    inputs = [local_part(tensor).detach().requires_grad_(tensor.requires_grad) for tensor in given]
    at: list[int] = []
    counted = 0
    ops: list[Any] = []  # Operators of forward, each by its label.

    def forward(primals: Iterable[Tensor]) -> list[Tensor]:
        by_id = {id(tensor): packed_as(_like(tensor, primal), tensor) for tensor, primal in zip(given, primals)}

        def swap(tensor: Tensor) -> Tensor:
            return by_id.get(id(tensor), tensor)

        call_args, call_kwargs = map_tensors(swap, (args, kwargs))
        with with_state(kind.module, {name: swap(tensor) for name, tensor in state.items()}), run.casting():
            return tensors_in(kind.run(*call_args, **call_kwargs))

    def label(context: Any, op: Any, *args: object, **kwargs: object) -> Any:
        ops.append(op)
        return len(ops) - 1  # which torch puts where the answer of a policy goes: on the nodes that it adds

    def joint(primals: list[Tensor], tangents: list[Tensor]) -> Any:
        nonlocal counted
        leaves = [p.detach().requires_grad_(t.requires_grad) for p, t in zip(primals, inputs)]
        with torch.enable_grad():
            with create_selective_checkpoint_contexts(label)[0]:
                out = forward(leaves)
            roots = [out[i] for i in at]
            needing = [leaf for leaf in leaves if leaf.requires_grad]
            grads = torch.autograd.grad(roots, needing, tangents, allow_unused=True)
        counted = len(out)
        return out, grads

    with needing_no_values(kind), run:
        with torch.enable_grad():
            shapes = forward(inputs)
        at += [i for i, t in enumerate(shapes) if t.requires_grad and i not in kind.passed and i in used]
        if not at:
            raise NotCompiledError("its outputs need no gradient")
        tangents = [torch.empty_like(shapes[i]) for i in at]
        del shapes
        with fx.traceback.preserve_node_meta():  # tags go into a global dictionary, which it puts back
            module = joint_graph(joint, inputs, tangents, fuses=fuses)
    in_place = [
        op.name() for node in module.graph.nodes if isinstance(op := node.target, OpOverload) and facts(op).mutating
    ]
    module.graph.eliminate_dead_code()
    names = {id(tensor): name for name, tensor in reversed(state.items())}  # a tied one by its first
    place_of = {
        id(replaced[id(tensor)]): place for place, tensor in reversed(by_argument(kind.args, kind.kwargs).items())
    }
    wanted = [("param", names[id(t)]) if id(t) in names else ("input", place_of.get(id(t))) for t in given]
    nodes = [node for node in module.graph.nodes if node.op == "placeholder"]
    with_grad = tuple(each for each, tensor in zip(wanted, given) if tensor.requires_grad)
    places = {node.name: place for node, (what, place) in zip(nodes, wanted) if what == "input"}

    @cache
    def cut(policy: Policy | None) -> CompiledBlock:
        if in_place:
            raise NotCompiledError(f"it changes a tensor in place ({in_place[0]})")
        graph = deepcopy(module.graph)  # the partitioner changes it
        try:
            answers = None if policy is None else dict(enumerate(map(partial(torch_policy_fn(policy), _CONTEXT), ops)))
        except PlanMismatchError as error:  # a dropout of probability 0 copies in a graph only
            raise NotCompiledError("its graph has operators that its eager forward does not have") from error
        _tag(graph, answers)
        with run:
            forward, backward = two_graphs(fx.GraphModule(module, graph), counted, run.fake)
        return CompiledBlock(forward.graph, backward.graph, counted, tuple(at), with_grad, places, fuses)

    return cast("Callable[[Policy | None], CompiledBlock]", cut)


def joint_graph(
    joint: Callable[..., Any], inputs: list[Tensor], tangents: list[Tensor], *, fuses: bool
) -> fx.GraphModule:
    """Return the graph of `joint`, with functions in the place of operators that write, as AOTAutograd has it; these have
    the tags of the operators."""
    module = traced_graph(joint, decompositions_of_inductor() if fuses else {})(inputs, tangents)
    if not any(isinstance(op := node.target, OpOverload) and facts(op).mutating for node in module.graph.nodes):
        return module
    functional = torch.func.functionalize(fx.Interpreter(module).run, remove="mutations")

    def again(primals: list[Tensor], tangents: list[Tensor]) -> Any:
        return functional(primals, tangents)

    return traced_graph(again, {})(inputs, tangents)


def _like(tensor: Tensor, part: Tensor) -> Tensor:
    """Return this rank's `part` of a tensor as that tensor is."""
    if not isinstance(tensor, DTensor):
        return part
    layout: dict[str, Any] = {"shape": tensor.shape, "stride": tensor.stride()}
    made: Tensor = DTensor.from_local(part, tensor.device_mesh, tensor.placements, run_check=False, **layout)
    return made


def _tag(graph: fx.Graph, answers: Mapping[Any, CheckpointPolicy] | None) -> None:
    """Put a policy's answers in the place of labels, and have the partitioner recompute the nodes that it did not decide
    on: views, and those without a tag. None: there is no region, and no node gets a tag."""
    late: set[fx.Node] = set()
    for node in graph.nodes:
        if answers and (tag := node.meta.get("recompute")) in answers:
            node.meta["recompute"] = answers[tag]
        begins = answers is None or (node.op == "placeholder" and "tangents" in str(node.target))
        if begins or any(operand in late for operand in node.all_input_nodes):
            late.add(node)
        elif node.op == "call_function":
            if node.target is operator.getitem:
                node.meta["recompute"] = node.args[0].meta.get("recompute", CheckpointPolicy.PREFER_RECOMPUTE)
            node.meta.setdefault("recompute", CheckpointPolicy.PREFER_RECOMPUTE)
            node.meta["ac_graph_id"] = 0
    for node in late.union(node for node in graph.nodes if node.op != "call_function"):
        for tag in ("recompute", "ac_graph_id"):
            node.meta.pop(tag, None)


def compiled_memory(
    block: CompiledBlock, *, around: bool, accumulate: bool | UpdateInBackward, received: bool = False
) -> BlockEvents:
    """Return the allocations of a compiled block in forward and backward, as `block_memory` does of an eager one.

    Args:
        block: both graphs.
        around: a region around the compiled block runs it again in backward.
        accumulate, received: as for `block_memory`.
    """
    numbers = iter(range(1, 1 << 40))
    made = Graph(block.forward, block.fuses)
    forward, number = made.log({}, numbers)
    results = list(made.output.args[0])
    outputs = tuple(number.get(made.root[n], 0) if isinstance(n, fx.Node) else 0 for n in results[: block.outputs])
    saved = [n for n in results[block.outputs :] if isinstance(n, fx.Node)]
    kept = {n.name: number.get(made.root[n], 0) for n in saved}
    sizes = {storage: size for storage, size in forward if size}
    going = dict.fromkeys(outputs if not around else (*kept.values(), *outputs))
    ends = [(n, 0) for n in going if n and (around or n not in kept.values())]
    backward: list[tuple[int, int]] = []
    mine = Graph(block.backward, block.fuses)
    given: dict[fx.Node, int] = {}
    output_grads: dict[int, int] = {}
    for node, position in zip(mine.tangents, block.with_gradient):
        output_grads[position] = next(numbers)
        backward.append((output_grads[position], size_of(node)))
        if not received:
            given[node] = output_grads[position]
    if around:
        again = {storage: next(numbers) for storage in sizes}
        backward += [(again[storage], size) for storage, size in forward]
        backward += [(again[n], 0) for n in dict.fromkeys(outputs) if n and n not in kept.values()]
        kept = {name: again.get(storage, 0) for name, storage in kept.items()}
    given |= {node: kept[node.name] for node in mine.given if kept.get(node.name)}
    log, number = mine.log(given, numbers)
    backward += log
    input_grads, param_grads = dict[Any, int](), dict[str, int]()
    for (what, which), node in zip(block.wanted, mine.output.args[0]):
        if isinstance(node, fx.Node) and (grad := number.get(mine.root[node], 0)):
            if what == "param":
                param_grads[which] = grad
            elif which is not None:
                input_grads[which] = grad
    if accumulate:  # the graph has made all of them before autograd adds the first
        made_of = dict(entry for entry in backward if entry[1])
        for grad in dict.fromkeys(param_grads.values()):
            if isinstance(accumulate, UpdateInBackward) and (size := made_of.get(grad, 0)):
                temporary = next(numbers)
                step = accumulate.temporaries(TrainedParameter((size,), size, 1))
                backward += [(temporary, step), (temporary, 0)] if step else []
            backward.append((grad, 0))
        param_grads = {}
    inputs = (block.places.get(made.root[n].name) for n in saved)
    places = frozenset(place for place in inputs if place is not None)
    return BlockEvents(
        (*forward, *ends),
        tuple(backward),
        outputs,
        output_grads,
        input_grads,
        param_grads,
        apart_end=len(backward),
        kept_inputs=None if around else places,
    )


def size_of(node: fx.Node) -> int:
    """Return the bytes of the storage that a node returns; 0: it returns no tensor."""
    value = node.meta.get("val")
    return value.untyped_storage().nbytes() if isinstance(value, Tensor) else 0


class Graph:
    """A graph as it runs: which nodes make a storage, and when each goes."""

    def __init__(self, graph: fx.Graph, fuses: bool) -> None:
        self.nodes = list(graph.nodes)
        self.output = next(node for node in self.nodes if node.op == "output")
        placeholders = [node for node in self.nodes if node.op == "placeholder"]
        self.tangents = [node for node in placeholders if "tangents" in str(node.target)]
        self.given = [node for node in placeholders if "tangents" not in str(node.target)]
        self.root: dict[fx.Node, fx.Node] = {}
        for node in self.nodes:
            self.root[node] = self._root(node)
        self.left = {self.root[node] for node in self.output.all_input_nodes}
        apart = [node for node in self.nodes if _apart(node)]
        self.real = {node for node in self.nodes if node.target is operator.getitem}.union(
            placeholders, apart, self.left
        )
        self.real |= {self.root[read] for node in apart for read in node.all_input_nodes}
        self.fuses = fuses
        if not fuses:
            self.real = {node for node in self.nodes if self.root[node] is node}
        # Storages that the kernel of a node reads, through the nodes fused into it. Not sets, which would order them, and so
        # the frees in the log, by their addresses.
        self.reads: dict[fx.Node, dict[fx.Node, None]] = {}
        for node in self.nodes:
            bases = map(self.root.__getitem__, node.all_input_nodes)
            self.reads[node] = dict.fromkeys(
                r for base in bases for r in ([base] if base in self.real else self.reads[base])
            )

    def _root(self, node: fx.Node) -> fx.Node:
        """Return the node whose storage a view is of; itself, where it makes one."""
        value = node.meta.get("val")
        if node.target is torch.ops._c10d_functional.wait_tensor.default:  # which returns its input
            return self.root[node.all_input_nodes[0]]
        if node.op == "call_function" and isinstance(value, Tensor):
            source = node.args[0] if node.target is operator.getitem else node  # such as a part of a split tensor
            for read in cast("fx.Node", source).all_input_nodes:
                other = read.meta.get("val")
                if isinstance(other, Tensor) and storages(other) == storages(value):
                    return self.root[read]
        return node

    def log(
        self, given: Mapping[fx.Node, int], numbers: Iterator[int]
    ) -> tuple[list[tuple[int, int]], dict[fx.Node, int]]:
        """Return the log of allocations and frees, and the number of each storage.

        given: the numbers of placeholders that end with their last use; several may be views of one storage.
        """
        steps = [n for n in self.nodes if n.op == "call_function" and self.root[n] is n and n in self.real]
        last: dict[fx.Node, int] = {}
        for at, node in enumerate(steps):
            for read in self.reads[node]:
                last[read] = at
        number, log = dict(given), list[tuple[int, int]]()
        alive = {node: size_of(node) for node in given}

        def drop(node: fx.Node) -> None:
            if alive.pop(node, None) is not None and number[node] not in map(number.get, alive):
                log.append((number[node], 0))

        def make(node: fx.Node) -> None:
            if size_of(node) and node not in number:
                number[node] = next(numbers)
                log.append((number[node], size_of(node)))
                alive[node] = size_of(node)

        for node in given:
            if node not in last and node not in self.left:
                drop(node)
        ending = grouped((at, node) for node, at in last.items())
        for at, node in enumerate(steps):
            ends = [read for read in ending.get(at, ()) if read in alive and read not in self.left]
            if self.fuses and not _apart(node) and node.target is not operator.getitem:
                written = next((read for read in ends if alive[read] == size_of(node)), None)
                if written is not None:  # in place
                    drop(written)
            # Items of a split tensor are views of it, and no storages of their own.
            items = [user for user in node.users if user.target is operator.getitem and self.root[user] is user]
            for each in items or [node]:
                make(each)
            for read in ends:
                drop(read)
            for each in items or [node]:
                if each not in last and each not in self.left:
                    drop(each)
        return log, number


def _apart(node: fx.Node) -> bool:
    """Return whether a node is a kernel that nothing is fused into."""
    if node.op != "call_function" or isinstance(node.target, HigherOrderOperator):
        return node.op == "call_function"  # such as one that keeps a generator's state beside its operator
    if not isinstance(node.target, OpOverload):
        return False
    name = node.target.overloadpacket.__name__
    return node.target.namespace not in ("aten", "prims") or name in _APART or "attention" in name
