"""Regions and what is compiled: regions inside it, layers compiled inside a region, and what Dynamo leaves to eager.

Counted is how often an operator is in the graphs of forward and backward; cases of PyTorch's
`test/dynamo/test_activation_checkpointing.py` are among them. What a frame that Dynamo leaves to eager calls runs under
Dynamo's eye. Up to torch 2.13 the frames of PyTorch's own classes (`nn.Sequential`) are such; frames with a graph break in a
loop are in every release.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy

from nemo_like import SelectivePolicy, parallelize
from nemo_like.activation_checkpointing import DecisionTable, FullPolicy, Policy
from nemo_like.activation_checkpointing.legacy import CheckpointWrapper
from nemo_like.activation_checkpointing.policy import HOST, RECOMPUTE, SAVE, TorchPolicy
from nemo_like.offload import offload_activations
from nemo_like.options import OffloadConfig
from tests.checks import assert_bitwise, gradients_of, seeded
from tests.models.blocks import NotingTransfer, Stack, checkpoint_region, train, under

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

MM, SIGMOID, CAT = "aten.mm", "aten.sigmoid", "aten.cat"


class Graphs:
    """A back end that runs the graphs of forward and backward as they are, and counts the operators in each."""

    def __init__(self) -> None:
        from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
        from torch._dynamo.backends.common import aot_autograd

        self.forward, self.backward = Counter[str](), Counter[str]()
        self.seen = 0

        def counting(counts: Counter[str]) -> Any:
            def compiler(module: Any, inputs: Any) -> Any:
                self.seen += 1
                counts.update(str(node.target).rpartition(".")[0] for node in module.graph.nodes)
                return make_boxed_func(module.forward)

            return compiler

        self.backend = aot_autograd(
            fw_compiler=counting(self.forward),
            bw_compiler=counting(self.backward),
            partition_fn=min_cut_rematerialization_partition,
        )


def slopes(fn: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    torch.manual_seed(0)
    copies = [t.detach().clone().requires_grad_() for t in inputs]
    out = fn(*copies)
    return [out.detach(), *torch.autograd.grad(out.sum(), copies)]


def matrices(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, 4, generator=generator) for _ in range(count)]


def again(fn: Callable[..., Tensor], policy: Policy | None = None, **keywords: Any) -> Callable[..., Tensor]:
    return lambda *args: checkpoint_region(fn, *args, policy=policy or FullPolicy(), **keywords)


def one_matmul(x: Tensor, y: Tensor) -> Tensor:
    return torch.sigmoid(torch.matmul(x, y))


def two_matmuls(x: Tensor, y: Tensor) -> Tensor:
    return torch.sigmoid(torch.matmul(torch.matmul(x, y), y)) * y


def keeping(*names: str) -> SelectivePolicy:
    return SelectivePolicy(every_nth_matmul=None, save_ops=[f"{name}.default" for name in names])


def only_matmuls(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    keep = op is torch.ops.aten.mm.default
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def four_matmuls(x: Tensor, y: Tensor) -> Tensor:
    for _ in range(4):
        x = nn.functional.gelu(x @ y)
    return x


def with_a_keyword(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    def product(a: Tensor, b: Tensor, factor: Tensor | None = None) -> Tensor:
        out = torch.matmul(a, b)
        return out if factor is None else torch.matmul(out, factor)

    return torch.cos(checkpoint_region(product, x, y, policy=FullPolicy(), factor=z))


def with_a_list(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    def parts(a: Tensor, others: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        return a * 1, [torch.cos(other) for other in others]

    first, rest = checkpoint_region(parts, x, [y, z], policy=FullPolicy())
    return first + rest[0] * rest[1]


def inplace(x: Tensor, y: Tensor) -> Tensor:
    return torch.sigmoid(torch.selu_(torch.matmul(torch.matmul(x, y), y))).relu()


# function, arguments, {operator: (times in forward's graph, times in backward's)}
CASES: dict[str, tuple[Callable[..., Tensor], int, dict[str, tuple[int, int]]]] = {
    "one": (lambda x, y: again(one_matmul)(torch.sin(x), y), 2, {MM: (1, 3), SIGMOID: (1, 1)}),
    "two in a row": (lambda x, y: again(one_matmul)(torch.sin(again(one_matmul)(torch.sin(x), y)), y), 2, {MM: (2, 6)}),
    "a keyword": (with_a_keyword, 3, {MM: (2, 6)}),
    "a list among the arguments": (with_a_list, 3, {}),
    "four matmuls kept": (again(four_matmuls, keeping(MM)), 2, {MM: (4, 8)}),
    "every second one of four": (again(four_matmuls, SelectivePolicy()), 2, {MM: (4, 10)}),
    "four matmuls again": (again(four_matmuls), 2, {MM: (4, 12)}),
    "the last matmul kept": (again(two_matmuls, keeping(MM)), 2, {MM: (2, 4), SIGMOID: (1, 1)}),
    "kept by a function": (again(two_matmuls, TorchPolicy(only_matmuls)), 2, {MM: (2, 4)}),
    "kept by number": (again(two_matmuls, DecisionTable({f"{MM}.default": [SAVE, RECOMPUTE]})), 2, {MM: (2, 5)}),
    "in place": (again(inplace, keeping(MM, SIGMOID)), 2, {MM: (2, 4), SIGMOID: (1, 0)}),
    "an operator on a list": (again(lambda x, y: torch.cat([x, y]).sin()), 2, {CAT: (1, 1)}),
}


@pytest.mark.compat
@pytest.mark.parametrize("case", CASES)
def test_operators_in_the_graphs_of_forward_and_backward(case: str) -> None:
    fn, count, expected = CASES[case]
    graphs, inputs = Graphs(), matrices(count)
    assert_bitwise(slopes(torch.compile(fn, backend=graphs.backend, fullgraph=True), *inputs), slopes(fn, *inputs))
    assert graphs.seen == 2
    assert {name: graphs.forward[name] for name in expected} == {name: runs for name, (runs, _) in expected.items()}
    assert {name: graphs.backward[name] for name in expected} == {name: runs for name, (_, runs) in expected.items()}


@pytest.mark.parametrize("preserve_rng_state", [True, False])
def test_a_random_operator_between_two_kept_ones(preserve_rng_state: bool) -> None:
    # A compiled region always replays its draws; an eager one would not without the state.
    def fn(x: Tensor) -> Tensor:
        return torch.sigmoid(torch.dropout(torch.sigmoid(x), 0.5, True))

    graphs, (x,) = Graphs(), matrices(1)
    run = torch.compile(
        again(fn, keeping(SIGMOID), preserve_rng_state=preserve_rng_state), backend=graphs.backend, fullgraph=True
    )
    assert_bitwise(slopes(run, x), slopes(fn, x))
    assert (graphs.forward[SIGMOID], graphs.backward[SIGMOID]) == (2, 0)


def breaking(x: Tensor) -> Tensor:
    out = torch.sin(x)
    torch._dynamo.graph_break()
    return torch.cos(out)


def test_a_break_in_the_region_runs_eagerly_or_is_an_error_as_asked() -> None:
    def fn(x: Tensor) -> Tensor:
        return torch.cos(again(breaking)(torch.sin(x)))

    (x,) = matrices(1)
    assert_bitwise(slopes(torch.compile(fn, backend="aot_eager"), x), slopes(fn, x))
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="graph_break"):
        torch.compile(fn, backend="aot_eager", fullgraph=True)(x)


D = 16
POLICIES: dict[str, Policy] = {"full": FullPolicy(), "selective": SelectivePolicy()}


class Mlp(nn.Module):
    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.up, self.down, self.breaks = nn.Linear(D, 2 * D), nn.Linear(2 * D, D), breaks

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        if self.breaks:
            torch._dynamo.graph_break()
        return x + self.down(h.tanh())


class Looping(nn.Module):
    """Dynamo leaves the whole frame to eager."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(D, D) / 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            torch._dynamo.graph_break()
            x = (x @ weight).tanh()
        return x


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "sequential": lambda: nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.Linear(D, D)),
    "encoder": lambda: nn.TransformerEncoderLayer(D, 2, 2 * D, dropout=0.0, batch_first=True),
    # PyTorch's own class around one of ours: Dynamo compiles the piece inside.
    "mixed": lambda: nn.Sequential(nn.Linear(D, D), Mlp(), nn.Tanh()),
    "breaking": lambda: Mlp(breaks=True),
    "looping": Looping,
}


def stack(make: Callable[[], nn.Module], count: int = 4) -> Stack:
    return under("none", lambda: Stack(make() for _ in range(count)))


def wrapped_compiled(make: Callable[[], nn.Module], policy: str, backend: Any) -> Stack:
    """Each layer compiled by itself, and then checkpointed."""
    model = stack(make)
    for index, layer in enumerate(model.layers):
        layer.compile(backend=backend)
        model.layers[index] = CheckpointWrapper(layer, policy=POLICIES[policy])
    return model


@pytest.mark.few(6)
@pytest.mark.parametrize("ac", ["full", "sequential", "selective"])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_that_dynamo_leaves_to_eager_train_right(name: str, ac: str) -> None:
    expected = train(stack(LAYERS[name]))
    assert_bitwise(train(parallelize(stack(LAYERS[name]), "single", ac, compile="aot_eager")), expected)


@pytest.mark.few(4)
@pytest.mark.parametrize("ac", ["full", "sequential"])
@pytest.mark.parametrize("name", ["sequential", "encoder", "mixed", "looping"])
def test_so_they_do_under_inductor(name: str, ac: str) -> None:
    """With the wrapper outside of what is compiled, each piece is compiled as without it: to the bit the same."""
    expected = train(parallelize(stack(LAYERS[name]), "single", "none", compile="inductor"))
    torch.compiler.reset()
    assert_bitwise(train(parallelize(stack(LAYERS[name]), "single", ac, compile="inductor")), expected)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", LAYERS)
def test_a_wrapper_around_a_module_that_was_compiled_by_itself(name: str, policy: str) -> None:
    assert_bitwise(train(wrapped_compiled(LAYERS[name], policy, "aot_eager")), train(stack(LAYERS[name])))


class CountedGraphs:
    """A backend that compiles nothing and counts what it was asked to compile."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        self.count += 1
        return graph


@pytest.mark.parametrize("policy", POLICIES)
def test_dynamo_compiles_nothing_of_the_engine(policy: str) -> None:
    graphs = CountedGraphs()
    train(wrapped_compiled(Looping, policy, graphs))
    assert graphs.count == 0


def test_nor_of_offloading_which_would_then_move_nothing() -> None:
    graphs, moved = CountedGraphs(), []
    for backend in (None, graphs):
        model = stack(Looping)
        for layer in model.layers:
            if backend is not None:
                layer.compile(backend=backend)
        with offload_activations(OffloadConfig(mode="all", min_bytes=0), model=model) as offloader:
            loss = model(torch.ones(2, 5, D)).sum()
        loss.backward()
        moved.append(offloader.collect().moved_bytes)
    assert graphs.count == 0
    assert moved[0] == moved[1] > 0


class Router(nn.Module):
    """Changes what top-k returned in place, as Mixtral's does; may break the graph, and may count its calls."""

    def __init__(self, breaks: bool, counts: bool = False) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(D, 4), nn.Linear(D, 4 * D), nn.Linear(D, D)
        self.breaks, self.counts, self.calls = breaks, counts, 0

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        weights /= weights.sum(-1, keepdim=True)
        if self.counts:
            self.calls += 1
        if self.breaks:
            torch._dynamo.graph_break()
        experts = self.up(x).unflatten(-1, (4, D)).gather(-2, chosen.unsqueeze(-1).expand(*chosen.shape, D))
        return x + self.down((weights.unsqueeze(-1) * experts).sum(-2)) * self.calls


def routers(**kwargs: bool) -> Stack:
    return stack(lambda: Router(**kwargs), 2)


def wrapped(policy: Policy, transfer: Any = None, **kwargs: bool) -> Stack:
    """Layers that are checkpointed, and then compiled."""
    model = routers(**kwargs)
    for index, layer in enumerate(model.layers):
        model.layers[index] = CheckpointWrapper(layer, policy=policy, transfer=transfer)
        model.layers[index].compile(backend="aot_eager")
    return model


@pytest.mark.few(3)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("ac", ["selective", "submodule", "full"])
def test_what_was_kept_may_be_changed_in_place(ac: str, breaks: bool, backend: str) -> None:
    def make() -> nn.Module:
        return (
            nn.Sequential(routers(breaks=breaks), routers(breaks=breaks))
            if ac == "submodule"
            else routers(breaks=breaks)
        )

    layers = ["0", "1"] if ac == "submodule" else None
    assert_bitwise(train(parallelize(make(), "single", ac, layers=layers, compile=backend)), train(make()))


def test_it_is_said_once_that_a_region_runs_eagerly(logs: pytest.LogCaptureFixture) -> None:
    train(parallelize(routers(breaks=False), "single", "selective", compile="aot_eager"))
    assert "it runs eagerly" not in logs.text
    train(parallelize(routers(breaks=True), "single", "selective", compile="aot_eager"))
    assert logs.text.count("it runs eagerly") == 1
    assert "region 'layers.0' was to be compiled" in logs.text


@pytest.mark.parametrize("policy", [SelectivePolicy(), SelectivePolicy(every_nth_matmul=None)])
def test_the_module_is_as_forward_found_it_in_the_replay(policy: Policy) -> None:
    """PyTorch's own checkpointing, to which Dynamo leaves the region, would count each call twice."""
    model = wrapped(policy, breaks=True, counts=True)
    assert_bitwise(train(model), train(routers(breaks=True, counts=True)))
    assert [layer.calls for layer in model.layers] == [2, 2]


def test_the_policys_decisions_and_the_transfer_are_the_engines() -> None:
    transfer = NotingTransfer()
    table = DecisionTable({"aten.addmm.default": (SAVE, HOST, RECOMPUTE), "aten.topk.default": (SAVE,)})
    assert_bitwise(train(wrapped(table, transfer, breaks=True), steps=1), train(routers(breaks=True), steps=1))
    assert sum(move > 0 for move in transfer.moves) == 2


def test_two_backwards_and_none() -> None:
    models = parallelize(routers(breaks=True), "single", "selective", compile="aot_eager"), routers(breaks=True)
    for model in models:
        x = seeded(torch.randn, 2, 5, D, seed=1)
        model(x)  # never replayed
        loss = model(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert_bitwise(*map(gradients_of, models))


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_mixtures_of_experts_with_the_routers_loss(name: str) -> None:
    """transformers records the router's values by a hook that Dynamo cannot trace.

    Expected are the gradients of eager mode, as the layers run so. The original model is compiled in pieces, which adds up
    gradients in another order: it differs from its own eager run by units in the last place.
    """
    from tests.models.families import FAMILIES

    def gradients(**asked: str) -> dict[str, Tensor]:
        model = FAMILIES[name].build()
        model.config.output_router_logits = True
        model = parallelize(model, "single", **asked) if asked else model
        for _ in range(2):
            model.zero_grad()
            FAMILIES[name].step(model).backward()
        return gradients_of(model)

    assert_bitwise(gradients(ac="selective", compile="aot_eager"), gradients())
