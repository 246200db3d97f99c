"""`apply_offloading` on decoders: every mode, checkpointed and compiled; its errors; what it counts."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from nemo_like._util.forwards import step_of
from nemo_like.activation_checkpointing.legacy import CheckpointWrapper
from nemo_like.activation_checkpointing.policy import SelectivePolicy
from nemo_like.compile import compile_layers
from nemo_like.layers import find_layers
from nemo_like.offload import Offloading, apply_offloading, offload_activations, offloader_of
from nemo_like.offload.backends import Backend
from nemo_like.parallelizer import apply_activation_checkpointing
from tests.checks import assert_bitwise, refused_unchanged
from tests.models import decoders
from tests.models.blocks import Layer
from tests.offload.cases import Stack, config, gradients, stack_of, trained


def _layers(model: nn.Module) -> list[nn.Module]:
    return [layer.module for layer in find_layers(model)]


def _gradients(model: nn.Module) -> dict[str, Any]:
    torch.manual_seed(3)  # for dropout
    decoders.loss_of(model, decoders.batch()).backward()
    return gradients(model)


@pytest.mark.few(10)
@pytest.mark.parametrize("name", ["llama", "gemma3", "mixtral", "gpt2"])
@pytest.mark.parametrize(
    ("ac", "mode"),
    [("none", "boundary"), ("none", "all"), ("full", "saved"), ("selective", "saved"), ("submodule", "saved")],
)
def test_decoders_are_bitwise(name: str, ac: str, mode: str) -> None:
    reference = decoders.build(name)
    apply_activation_checkpointing(reference, ac)
    expected = _gradients(reference)
    model = decoders.build(name)
    apply_activation_checkpointing(model, ac)
    names = [key for key, _ in model.named_parameters()]
    offloader = apply_offloading(model, _layers(model), config(mode, max_inflight_bytes=1), backend=Backend())
    assert [key for key, _ in model.named_parameters()] == names == list(expected)
    for _ in range(2):
        assert_bitwise(_gradients(model), expected)
    assert offloader.stats.moved_bytes > 0 and offloader.collect().host_live_bytes == 0


@pytest.mark.parametrize(
    ("ac", "mode", "copies"),
    # For two of three layers. What a compiled graph saves inside is the compiler's choice: at least four tensors each.
    [("none", "all", None), ("full", "boundary", 2), ("selective", "boundary", 2), ("selective", "saved", None)],
)
def test_compiled_layers(ac: str, mode: str, copies: int | None) -> None:
    def compiled() -> nn.Module:
        model = decoders.build("plain")
        for block in model.blocks:
            block.dropout.p = 0.0
        apply_activation_checkpointing(model, ac, compile=True)
        compile_layers(model, "aot_eager", _layers(model))
        return model

    torch._dynamo.reset()
    expected, model = _gradients(compiled()), compiled()
    offloader = apply_offloading(model, _layers(model), config(mode), backend=Backend())
    assert_bitwise(_gradients(model), expected)
    assert offloader.stats.copies == copies if copies is not None else offloader.stats.copies >= 2 + 2 * 4
    assert offloader.stats.kept_bytes["a parameter, or a view of one"] > 0 or ac == "full"


def test_bytes_moved_are_at_most_the_storages_autograd_keeps() -> None:
    model = decoders.build("llama").eval()  # no dropout, and gradients all the same
    block = _layers(model)[0]
    inputs: dict[str, Any] = {}
    block.register_forward_pre_hook(lambda m, args, kwargs: inputs.update(args=args, kwargs=kwargs), with_kwargs=True)
    model(decoders.batch())
    block._forward_pre_hooks.clear()
    args = tuple(a.detach().requires_grad_() if a.is_floating_point() else a for a in inputs["args"])
    weights = {p.untyped_storage()._cdata for p in block.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            kept[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        block(*args, **inputs["kwargs"])
    keeps = sum(storage.nbytes() for storage in kept.values())
    with offload_activations(config(), model=model, backend=Backend()) as offloader:
        block(*args, **inputs["kwargs"])
    stays = sum(count for reason, count in offloader.stats.kept_bytes.items() if "parameter" not in reason)
    assert 0 < offloader.stats.moved_bytes <= keeps
    assert offloader.stats.moved_bytes + stays >= keeps * 0.9  # and nearly all of it was moved


def test_the_boundary_of_full_checkpointing_is_one_input_per_layer() -> None:
    model = stack_of(lambda x, scale: (x * scale).exp(), count=5)
    apply_activation_checkpointing(model, "full", layers=["layers.*"])
    offloader = apply_offloading(model, list(model.layers), config("boundary"), backend=Backend())
    x = torch.randn(4, 16, requires_grad=True)
    model(x * 1).sum().backward()
    assert (offloader.stats.copies, offloader.stats.moved_bytes) == (4, 4 * 4 * 16 * 4)
    model(x).sum().backward()  # a leaf that is trained is the caller's, and stays
    assert (offloader.stats.copies, offloader.stats.moved_bytes) == (7, 7 * 4 * 16 * 4)


@pytest.mark.parametrize(
    ("function", "copies"),
    [
        # Two of three layers: the input, and the output of the linear layer.
        (lambda x, scale: (x * scale).exp(), 4),
        # The last matmul of a block is kept when it runs, and dropped when the block ends: no replay gets that far.
        (lambda x, scale: x, 2),
    ],
    ids=["kept", "dropped"],
)
def test_saved_moves_the_inputs_and_what_a_policy_keeps_to_the_end(function: Any, copies: int) -> None:
    model = stack_of(function, count=3)
    apply_activation_checkpointing(model, SelectivePolicy(every_nth_matmul=None), layers=["layers.*"])
    offloader = apply_offloading(model, list(model.layers), config("saved"), backend=Backend())
    loss = model(torch.randn(4, 16, requires_grad=True) * 1).sum()
    assert (offloader.stats.copies, offloader.stats.moved_bytes) == (copies, copies * 4 * 16 * 4)
    loss.backward()


def test_host_decisions_survive_changes_in_place() -> None:
    # Mixture-of-experts routers normalise their top-k weights in place, after the policy has kept them.
    def function(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        weights, index = (x * scale).softmax(-1).topk(4)
        weights /= weights.sum(-1, keepdim=True)
        return x.scatter(1, index, weights) + x.gather(1, index).sum(1, keepdim=True).exp()

    for fields in ({}, {"min_bytes": 1 << 20}):
        plain = stack_of(function, count=3)
        inputs = torch.randn(4, 16)
        expected = trained(plain, inputs)
        apply_activation_checkpointing(plain, "selective", layers=["layers.*"])
        apply_offloading(plain, list(plain.layers), config("saved", **fields), backend=Backend())
        loss = plain(inputs).pow(2).sum()
        for retain in (True, False):
            loss.backward(retain_graph=retain)
            assert_bitwise(gradients(plain), expected)


@pytest.mark.parametrize("moved", [True, False])
def test_changing_a_kept_output_after_its_region_raises(moved: bool) -> None:
    def last(layer: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = layer.linear(x)
        return y, y.exp()

    layer = Layer(last, linear=nn.Linear(16, 16))
    region = CheckpointWrapper(layer, policy=SelectivePolicy(every_nth_matmul=None))
    model = Stack([region, nn.Identity()])
    apply_offloading(model, [region, model.layers[1]], config("saved", min_bytes=0 if moved else 1 << 20), backend=Backend())
    y, z = model.layers[0](torch.randn(4, 16, requires_grad=True))
    y.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


# -------------------------------------------------------------------------------------------- order, errors, copies


@pytest.mark.parametrize("how", ["ours", "torch's wrapper", "torch's function", "context"])
def test_checkpointing_around_offloading_is_refused(how: str) -> None:
    model = stack_of(lambda x, scale: (x * scale).exp(), count=2)
    apply_offloading(model, list(model.layers), config(), backend=Backend())
    x = torch.randn(4, 16, requires_grad=True)
    calls = {
        "ours": lambda: CheckpointWrapper(model)(x),
        "torch's wrapper": lambda: checkpoint_wrapper(model)(x),
        "torch's function": lambda: checkpoint(model, x, use_reentrant=False),
        "context": lambda: checkpoint(_inside, x, use_reentrant=False),
    }

    def _inside(x: torch.Tensor) -> torch.Tensor:
        with offload_activations("all"):
            return x.exp()

    with pytest.raises(RuntimeError, match=r"offload\(checkpoint\(module\)\), not checkpoint\(offload\(module\)\)"):
        calls[how]()
    model(x).sum().backward()  # nothing is left behind


@pytest.mark.parametrize(
    ("layers", "mode", "message"),
    [
        (lambda m: [nn.Linear(2, 2)], "all", r"layers\[0\], a Linear, is not a sub-module of the Stack"),
        (lambda m: [], "all", "was given no layers"),
        (lambda m: list(m.layers), "saved", "no layer is checkpointed"),
        (lambda m: list(m.layers), "savd", "mode is 'savd'"),
        (lambda m: list(m.layers), 7, "offload is 7, an int"),
    ],
)
def test_bad_arguments_change_nothing(layers: Any, mode: Any, message: str) -> None:
    model = stack_of(lambda x, scale: x * scale, count=2)
    with refused_unchanged(model, message, (ValueError, TypeError)):
        apply_offloading(model, layers(model), mode)
    assert offloader_of(model) is None


def test_twice_is_refused_and_none_is_nothing() -> None:
    model = stack_of(lambda x, scale: x * scale, count=2)
    assert apply_offloading(model, list(model.layers), "none").config.mode == "none"
    assert not any("forward" in vars(m) for m in model.modules())
    assert apply_offloading(model, list(model.layers), "all") is offloader_of(model)
    with pytest.raises(ValueError, match="has offloading already"):
        apply_offloading(model, list(model.layers), "all")


def test_the_wrapper_adds_no_names_and_copies_get_host_memory_of_their_own() -> None:
    model = stack_of(torch.mul, count=3)
    names = [name for name, _ in model.named_modules()], list(model.state_dict())
    layers = list(model.layers)
    offloader = apply_offloading(model, layers, "all", backend=Backend())
    assert [step_of(layer, Offloading) is not None for layer in layers] == [True, True, False]
    assert (list(dict(model.named_modules())), list(model.state_dict())) == names
    assert model.layers[0].linear.in_features == 16  # attributes of the layer
    model(torch.randn(2, 16)).sum()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        mine = offloader_of(other)
        assert mine is not None and mine is not offloader and mine.config == offloader.config
        assert other.layers[0].forward.offloader is other.layers[1].forward.offloader


def test_a_looped_layer_is_wrapped_once() -> None:
    shared = stack_of(lambda x, scale: (x * scale).sin(), count=1).layers[0]
    model = Stack([shared, nn.Tanh(), shared, nn.Sigmoid()])
    apply_offloading(model, [shared, model.layers[1], shared, model.layers[3]], config(), backend=Backend())
    assert model.layers[0] is model.layers[2] and step_of(model.layers[0], Offloading)
    x = torch.randn(4, 16)
    assert_bitwise(trained(model, x), trained(Stack([shared, nn.Tanh(), shared, nn.Sigmoid()]), x))


def test_budgets_and_refusals_keep_tensors_on_the_device(caplog: pytest.LogCaptureFixture) -> None:
    from nemo_like._util.log import forget_announcements

    plain = stack_of(lambda x, scale: (x * scale).exp(), count=4)
    x = torch.randn(64, 16)

    class NoPinning(Backend):
        def host_memory(self, nbytes: int) -> torch.Tensor:
            raise RuntimeError("cannot pin memory")

    for backend, budget in ((Backend(), 16384), (NoPinning(), None)):
        forget_announcements()
        caplog.clear()
        model = copy.deepcopy(plain)
        offloader = apply_offloading(model, list(model.layers), config(host_budget_bytes=budget), backend=backend)
        for _ in range(3):
            assert_bitwise(trained(model, x), trained(plain, x))
        warnings = [r.message for r in caplog.records if "keeps tensors on the device" in r.message]
        assert len(warnings) == 1
        assert ("16384 bytes" in warnings[0]) if budget else ("cannot pin memory" in warnings[0])
        assert (offloader.stats.copies > 0) == (budget is not None)
        assert sum(n for reason, n in offloader.stats.kept_bytes.items() if "refused" in reason) > 0


def test_unsupported_tensors_stay_or_raise() -> None:
    sparse = torch.eye(8).to_sparse()
    dense = torch.randn(8, 8, requires_grad=True)
    expected = torch.autograd.grad((sparse @ dense).sum(), dense)[0]
    with offload_activations(config(), backend=Backend()) as offloader:
        loss = (sparse @ dense).sum()
    assert torch.equal(torch.autograd.grad(loss, dense)[0], expected)
    assert offloader.stats.kept_count["unsupported: its layout is torch.sparse_coo"] == 1


def test_prefetch_brings_the_previous_layers_back_before_they_are_asked_for() -> None:
    stalls = {}
    for prefetch in (0, 1):
        model = stack_of(lambda x, scale: (x * scale).sin(), count=6)
        offloader = apply_offloading(model, list(model.layers), config(prefetch=prefetch), backend=Backend())
        model(torch.randn(4, 16, requires_grad=True)).sum().backward()
        stalls[prefetch] = offloader.stats.reloads - offloader.stats.prefetched
        assert offloader.stats.reloads >= 5 * 3 - 3
    assert stalls[1] <= 2 < stalls[0]


def test_saved_moves_what_checkpointing_in_pieces_keeps() -> None:
    counts = {}
    for mode in ("boundary", "saved", "all"):
        model = decoders.build("llama")
        apply_activation_checkpointing(model, "submodule")
        offloader = apply_offloading(model, _layers(model), config(mode), backend=Backend())
        _gradients(model)
        counts[mode] = offloader.stats.copies
    assert 0 < counts["boundary"] < counts["saved"] == counts["all"]


def test_no_byte_comes_back_twice_where_layers_share_an_argument() -> None:
    # Rotary tables belong to the first layer's group: reading them switches between groups all the time.
    model = decoders.build("llama")
    apply_activation_checkpointing(model, "selective")
    offloader = apply_offloading(model, _layers(model), config("saved"), backend=Backend())
    _gradients(model)
    assert offloader.stats.reloaded_bytes <= offloader.stats.moved_bytes
    assert offloader.stats.reloads - offloader.stats.prefetched <= 2
