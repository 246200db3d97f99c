"""Per-layer compilation: the same gradients, the same names, and the partitioner keeps what the policy says."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from nemo_like import parallelize
from nemo_like.activation_checkpointing import SelectivePolicy, apply_full_layer_checkpointing_to_layers
from nemo_like.activation_checkpointing.contexts import make_selective_checkpoint_context_fn
from nemo_like.activation_checkpointing.engine import RegionError
from nemo_like.compile import compile_layers, parse_compile
from tests.checks import assert_bitwise, gradients_of, seeded
from tests.models.blocks import Layer, Operators
from tests.models.decoders import LAYERS, PlainDecoder, batch, build, loss_of
from tests.models.families import FAMILIES
from tests.models.kv_shared import build as build_kv_shared
from tests.models.tiny import Block

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    loss_of(model, batch(2)).backward()
    return gradients_of(model)


@pytest.mark.long
def test_a_compiled_deepseek_trains_twelve_steps_without_a_false_change_in_place() -> None:
    """It used to raise a false "changed in place" in most runs."""
    steps = []
    for ac in ("none", "full"):
        model = parallelize(FAMILIES["deepseek_v3"].build(), "single", ac, compile="aot_eager")
        steps.append([])
        for _ in range(12):
            model.zero_grad()
            FAMILIES["deepseek_v3"].step(model).backward()
            steps[-1].append(gradients_of(model))
            torch.optim.SGD(model.parameters(), lr=0.05).step()
        torch.compiler.reset()
    assert_bitwise(steps[1], steps[0])


@pytest.mark.few(2)
@pytest.mark.parametrize("ac", ["full", "selective", "submodule"])
@pytest.mark.parametrize("family", ["gemma4", "gemma3n"])
def test_kv_shared_models_with_compile_train_right_in_every_mode(
    family: str, ac: str, logs: pytest.LogCaptureFixture
) -> None:
    # Known failure 23: compile + full + shared keys and values crashed. Traced regions lose the shared states' gradient.
    expected = gradients(parallelize(build_kv_shared(family), "single", "none"))
    actual = gradients(parallelize(build_kv_shared(family), "single", ac, compile="aot_eager"))
    assert ("these layers run eagerly" in logs.text) == (ac != "full")
    if ac != "full":
        assert_bitwise(actual, expected)
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        # The shared states are an output of one compiled layer and inputs of others: their gradients meet in another
        # order than in one eager graph, hence a tolerance of a few units in the last place.
        assert torch.allclose(actual[name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.few(1)
@pytest.mark.parametrize("ac", ["none", "full", "selective", "submodule"])
def test_no_name_changes(ac: str) -> None:
    bare = PlainDecoder()
    model = parallelize(PlainDecoder(), "single", ac, compile="aot_eager")
    gradients(model)
    assert list(model.state_dict()) == list(bare.state_dict())
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in bare.named_parameters()]


MATMULS = ("aten::mm", "aten::addmm")


def matmuls_in_backward(model: nn.Module, compiled: bool) -> int:
    """How many matrix products the second step's backward runs."""
    gradients(model)
    loss = loss_of(model, batch(2))
    if not compiled:
        with Operators() as ran:
            loss.backward()
        return sum(op.name() in MATMULS for op in ran.ops)
    # A dispatch mode would switch compiled code off; the profiler sees the kernels that it calls.
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        loss.backward()
    return sum(event.count for event in recorded.key_averages() if event.key in MATMULS)


@pytest.mark.few(1)
@pytest.mark.parametrize("backend", [False, "aot_eager", "inductor"])
def test_the_replay_computes_the_matmuls_that_the_policy_drops_and_no_other(backend: str | bool) -> None:
    # A Llama layer has seven bias-free matmuls: q k v o gate up down; the head has one. Backward of each: two.
    none = matmuls_in_backward(parallelize(build("llama"), "single", "none", compile=backend), bool(backend))
    assert none == 2 * (7 * LAYERS + 1)
    # Every second one again: k, o and up. The last one of the block (down) is read by nobody: neither kept nor replayed.
    selective = parallelize(build("llama"), "single", "selective", compile=backend)
    assert matmuls_in_backward(selective, bool(backend)) - none == 3 * LAYERS
    # Everything kept: nothing again.
    keep_all = parallelize(build("llama"), "single", SelectivePolicy(every_nth_matmul=None), compile=backend)
    assert matmuls_in_backward(keep_all, bool(backend)) - none == 0
    # Whole layers: all but the last (eager stops before it); a compiled layer is replayed as one piece, to its end.
    full = parallelize(build("llama"), "single", "full", compile=backend)
    assert matmuls_in_backward(full, bool(backend)) - none == (7 if backend else 6) * LAYERS


def dropping_out() -> Block:
    return Block(8, 8, norm=False, act=torch.tanh, dropout=0.5)


@pytest.mark.few(1)
@pytest.mark.parametrize("ac", ["full", "selective"])
def test_gradients_under_inductor_are_those_of_the_masks_that_forward_drew(ac: str) -> None:
    """By central differences in float64, with the seed set before each forward: no reference masks are needed."""
    torch.manual_seed(0)
    bare = nn.Sequential(dropping_out(), dropping_out()).double()
    model = parallelize(bare, "single", ac, layers=["0", "1"], compile="inductor")
    x, step = torch.randn(4, 8, dtype=torch.float64, requires_grad=True), 1e-6
    direction = torch.randn_like(x)

    def loss(at: torch.Tensor) -> torch.Tensor:
        return seeded(model, at, seed=1).square().sum()

    (grad,) = torch.autograd.grad(loss(x), x)
    ahead, behind = (loss((x + s * direction).detach().requires_grad_()).item() for s in (step, -step))
    assert (grad * direction).sum().item() == pytest.approx((ahead - behind) / (2 * step), rel=1e-6)


@pytest.mark.few(3)
@pytest.mark.parametrize("ac", ["none", "full", "selective", "submodule", "sequential", "50%"])
def test_the_eager_backend_draws_the_same_dropout_masks_in_every_mode(ac: str) -> None:
    sample = {"input_ids": batch(2), "labels": batch(2)} if ac == "50%" else None
    model = parallelize(build("llama"), "single", ac, compile="eager", sample_input=sample)
    assert_bitwise(gradients(model), gradients(build("llama")))


def normed() -> nn.Module:
    """Has running statistics, too."""
    return nn.Sequential(nn.BatchNorm1d(8), dropping_out())


def test_inside_of_the_eager_backend_the_policy_keeps_what_it_keeps() -> None:
    counts = [
        matmuls_in_backward(parallelize(build("llama"), "single", ac, compile="eager"), compiled=False)
        for ac in ("none", SelectivePolicy(every_nth_matmul=None), "selective", "full")
    ]
    assert [count - counts[0] for count in counts] == [0, 0, 3 * LAYERS, 6 * LAYERS]


def test_running_statistics_move_once_under_the_eager_backend() -> None:
    models = []
    for asked in ({"ac": "none"}, {"ac": "selective", "compile": "eager"}):
        torch.manual_seed(0)
        model = parallelize(nn.Sequential(normed(), normed()), "single", layers=["0", "1"], **asked)
        for _ in range(2):
            model(torch.randn(4, 8)).square().sum().backward()
        models.append(model)
    assert_bitwise(*({**gradients_of(model), **dict(model.named_buffers())} for model in models))


def take_off_the_mean(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """Takes a running mean off, which it has written into a buffer, an attribute or a frozen parameter before."""
    if layer.writes:
        with torch.no_grad():
            layer.mean.lerp_(x.mean(0), 0.1)
    return x + layer.up(torch.tanh(layer.norm(x) - layer.mean))


def centred(kind: str) -> nn.Module:
    mean, norm = torch.zeros(8), nn.BatchNorm1d(8) if kind == "norm" else nn.Identity()
    places = {"buffer": nn.Buffer(mean), "parameter": nn.Parameter(mean, requires_grad=False)}
    return Layer(take_off_the_mean, up=nn.Linear(8, 8), norm=norm, mean=places.get(kind, mean), writes=kind != "norm")


@pytest.mark.parametrize("kind", ["buffer", "attribute", "parameter", "norm"])
def test_what_a_traced_region_writes_and_recomputes_from_is_refused(kind: str) -> None:
    # torch alone gives other gradients without a word. Statistics of torch's norms are not read in training.
    results = []
    for asked in ({"ac": "none"}, {"ac": "selective", "compile": "aot_eager"}):
        torch.manual_seed(0)
        model = parallelize(nn.Sequential(centred(kind), centred(kind)), "single", layers=["0", "1"], **asked)
        if kind != "norm" and "compile" in asked:
            with pytest.raises(RuntimeError, match=r"writes into its own 'mean', .* Use ac='full'"):
                model(torch.randn(4, 8))
            return
        model(torch.randn(4, 8)).square().sum().backward()
        results.append({**gradients_of(model), **dict(model.named_buffers())})
    assert_bitwise(*results)


@pytest.mark.few(1)
@pytest.mark.parametrize("backend", ["eager", lambda graph, inputs: graph.forward], ids=["eager", "a function"])
@pytest.mark.parametrize("ac", ["full", "selective", "submodule"])
def test_a_model_that_others_compile_without_a_partitioner_is_refused(ac: str, backend: Any) -> None:
    """As `torch_compile_backend="eager"` in a Trainer does; PyTorch's own checkpoint draws other masks there, silently."""
    model = parallelize(build("plain"), "single", ac)
    with pytest.raises(RegionError, match="a backend that runs the graph as it is"):
        gradients(torch.compile(model, backend=backend))


@pytest.mark.parametrize("backend", ["aot_eager", "aot_eager_default_partitioner"])
def test_a_model_that_others_compile_with_a_partitioner_is_right(backend: str) -> None:
    model = parallelize(build("plain"), "single", "selective")
    gradients(torch.compile(model, backend=backend))
    assert_bitwise(gradients_of(model), gradients(build("plain")))


def test_our_contexts_for_pytorchs_checkpoint_draw_the_same_masks_without_a_partitioner() -> None:
    layer, x = seeded(dropping_out), torch.randn(4, 8, requires_grad=True)
    contexts = make_selective_checkpoint_context_fn()

    def loss(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(layer, x, use_reentrant=False, context_fn=contexts).square().sum()

    found = []
    for function in (lambda x: layer(x).square().sum(), torch.compile(loss, backend="eager")):
        torch.manual_seed(1)
        # And the numbers that come after.
        found.append([*torch.autograd.grad(function(x), (x, *layer.parameters())), torch.rand(2)])
    assert_bitwise(*found)


def test_several_microbatches_of_several_shapes() -> None:
    """Dynamo makes a second, dynamic graph; each region's replay must use the graph of its own forward."""
    reference, model = build("plain"), parallelize(build("plain"), "single", "selective", compile="aot_eager")
    for m in (reference.eval(), model.eval()):
        first, second, third = (batch(2, length=n, seed=n) for n in (8, 12, 16))
        losses = [loss_of(m, ids) for ids in (first, second, third)]
        for loss in losses:
            loss.backward()
    assert_bitwise(gradients_of(model), gradients_of(reference))


def test_compile_layers_alone_and_after_full_checkpointing() -> None:
    expected = gradients(build("plain"))
    model = build("plain")
    apply_full_layer_checkpointing_to_layers(model, list(model.blocks))
    compile_layers(model, "aot_eager")
    assert_bitwise(gradients(model), expected)


def test_backends_are_checked() -> None:
    assert [parse_compile(x) for x in (False, None, True, "Inductor", "aot-eager")] == [
        None, None, "inductor", "inductor", "aot_eager",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="compile is 'triton'"):
        compile_layers(PlainDecoder(), "triton")
    with pytest.raises(TypeError, match="compile is 3"):
        parse_compile(3)
