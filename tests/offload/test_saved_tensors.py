"""Offloaded saved tensors are bit for bit what was saved, in every mode, and raise where autograd would."""

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

from nemo_like.offload import offload_activations
from nemo_like.offload.backends import Backend
from nemo_like.offload.offloader import LAST_LAYER, PART
from tests.checks import assert_bitwise
from tests.models.blocks import without_collector
from tests.offload.cases import MODES, Stack, config, gradients, offloaded, stack_of, trained

WIDTH = 16


def _use(view: torch.Tensor, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Something whose gradient reads `view`, of x's shape."""
    product = view * view.cos()
    return x + scale * (product.real if product.is_complex() else product).sum().tanh()


VIEWS = {
    "square transpose": lambda x: x.t(),
    "offset slice": lambda x: x[3:, 2:9],
    "strided slice": lambda x: x[::2, 1::3],
    "expand": lambda x: x[:, :1].expand(-1, WIDTH),
    "broadcast row": lambda x: x[5].unsqueeze(0).expand(7, -1),
    "diagonal": lambda x: x.diagonal(1),
    "overlapping windows": lambda x: x.unfold(1, 5, 2),
    "as_strided": lambda x: x.as_strided((4, 3, 2), (32, 5, 1), 7),
    "complex from real": lambda x: torch.view_as_complex(x.unflatten(1, (-1, 2))),
    "conjugate": lambda x: torch.view_as_complex(x.unflatten(1, (-1, 2))).conj(),
    "permuted": lambda x: x.unflatten(1, (4, 4)).permute(2, 0, 1),
    "chunk": lambda x: x.chunk(3, dim=1)[1],
}


@pytest.mark.parametrize("mode", ["boundary", "saved", "context-all"])
@pytest.mark.parametrize("kind", VIEWS)
def test_views_come_back_exactly(kind: str, mode: str) -> None:
    plain = stack_of(lambda x, scale: _use(VIEWS[kind](x), x, scale))
    inputs = torch.randn(WIDTH, WIDTH)
    model, offloader, context = offloaded(plain, list(plain.layers), mode)
    with context:
        out = model(inputs)
    assert torch.equal(out, plain(inputs))
    out.pow(2).sum().backward()
    assert_bitwise(gradients(model), trained(plain, inputs))
    assert offloader.stats.moved_bytes > 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("prefetch", "inflight"), [(0, 1 << 30), (1, 1), (3, 4096)])
def test_any_limit_gives_the_same_gradients(mode: str, prefetch: int, inflight: int) -> None:
    plain = stack_of(lambda x, scale: nn.functional.gelu(x) * scale + x.chunk(2, 1)[0].exp().sum().tanh(), count=5)
    inputs = torch.randn(WIDTH, WIDTH)
    limits = {"prefetch": prefetch, "max_inflight_bytes": inflight}
    model, offloader, context = offloaded(plain, list(plain.layers), mode, **limits)
    for _ in range(2):
        assert_bitwise(trained(model, inputs, context), trained(plain, inputs))
    assert offloader.stats.reloads > 0
    if prefetch == 0 and not mode.endswith("saved"):  # the engine asks for a whole region's tensors at once
        assert offloader.stats.prefetched == 0
    assert offloader.collect().host_live_bytes == 0


def test_one_copy_for_each_storage() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    offloader = offload_activations(config(), backend=Backend())
    with offloader:
        y = x * 2  # y: 16384 bytes, saved below by four operators and through three views
        loss = y.sin().sum() + (y.t() @ y).sum() + y[:, 3].exp().sum()
    # exp and the sums save their own results: 64 floats.
    assert offloader.stats.moved_bytes == 64 * 64 * 4 + 64 * 4
    assert offloader.stats.copies == 2
    del y
    loss.backward()
    assert offloader.stats.reloaded_bytes == 64 * 64 * 4 + 64 * 4


@pytest.mark.parametrize("rows", [511, 512])
def test_a_part_moves_its_whole_storage_from_half_of_it_on(rows: int) -> None:
    x = torch.randn(1024, 8, requires_grad=True)
    expected = torch.autograd.grad((x * 2)[:rows].sin().sum(), x)[0]
    with offload_activations(config(), backend=Backend()) as offloader:
        loss = (x * 2)[:rows].sin().sum()
    stays = rows == 511
    assert offloader.stats.moved_bytes == (0 if stays else 1024 * 8 * 4)
    assert offloader.stats.kept_bytes[PART] == (1024 * 8 * 4 if stays else 0)
    assert torch.equal(torch.autograd.grad(loss, x)[0], expected)


def test_a_small_part_moves_with_a_storage_that_is_on_the_host() -> None:
    x = torch.randn(1024, requires_grad=True)

    def function() -> torch.Tensor:
        y = x * 2
        return y.sin().sum() + y[5:9].exp().sum() + y[7:11].cos().sum()

    expected = torch.autograd.grad(function(), x)[0]
    with offload_activations(config(), backend=Backend()) as offloader:
        loss = function()
    assert (offloader.stats.moved_bytes, offloader.stats.copies) == (1024 * 4 + 4 * 4, 2)  # y, and what exp saves
    assert torch.equal(torch.autograd.grad(loss, x)[0], expected)
    assert offloader.stats.reloaded_bytes == offloader.stats.moved_bytes


def test_version_counters_come_back_as_they_were() -> None:
    y = torch.ones(8, requires_grad=True) * 1
    y.add_(1).mul_(2)
    offloader = offload_activations(config(), backend=Backend())
    handle = offloader.pack(y)
    assert (handle.get()._version, offloader.stats.reloads) == (y._version, 0)
    version = y._version
    del y
    assert (handle.get()._version, offloader.stats.reloads) == (version, 1)


def test_a_view_in_another_dtype_comes_back_as_it_was() -> None:
    offloader = offload_activations(config(), backend=Backend())
    saved = torch.randn(32).view(torch.int32)[5:25].view(torch.int16)
    expected = saved.clone()
    handle = offloader.pack(saved)
    del saved
    assert offloader.stats.copies == 1
    assert torch.equal(handle.get(), expected) and handle.get().dtype == torch.int16


# -------------------------------------------------------------------------------- in-place changes


Of = Callable[[torch.Tensor], torch.Tensor]
# How y is made of x, and read before a change; the change; how y is read behind it, where the first reading's graph is
# dropped before the change; whether backward raises.
IN_PLACE: dict[str, tuple[Of, Of, Of, Of | None, bool]] = {
    "a result that is saved": (torch.exp, lambda y: y, lambda y: y.add_(1), None, True),
    "a view of one": (torch.exp, lambda y: y, lambda y: y[1:3].mul_(2), None, True),
    "an input that is saved": (torch.clone, torch.sin, lambda y: y.mul_(2), None, True),
    "the base of a view that is saved": (torch.clone, lambda y: y[2:6].sin(), lambda y: y[7].mul_(2), None, True),
    "an input, detached": (torch.clone, torch.sin, lambda y: y.detach().zero_(), None, True),
    "nothing that is saved": (lambda x: x + 1, lambda y: y, lambda y: y.mul_(3), torch.sin, False),
    "before it is saved": (torch.clone, lambda y: y, lambda y: y.add_(1), torch.sin, False),
    "after a graph that is dropped": (torch.clone, torch.sin, lambda y: y.add_(1), lambda y: y.cos() * y, False),
}


@pytest.mark.parametrize("case", IN_PLACE)
@pytest.mark.parametrize("min_bytes", [0, 1 << 20], ids=["moved", "kept"])
def test_in_place_changes_raise_exactly_where_autograd_does(case: str, min_bytes: int) -> None:
    make, before, change, behind, raises = IN_PLACE[case]

    def function(x: torch.Tensor) -> torch.Tensor:
        y = make(x)
        read = before(y)
        if behind is None:
            change(y)
            return read
        del read
        change(y)
        return behind(y)

    x = torch.randn(8, 8, requires_grad=True)
    with offload_activations(config(min_bytes=min_bytes), backend=Backend()) as offloader:
        loss = function(x).sum()
    assert (offloader.stats.moved_bytes > 0) == (min_bytes == 0)
    plain = function(x).sum()
    if not raises:
        assert torch.equal(*(torch.autograd.grad(each, x)[0] for each in (loss, plain)))
        return
    for each in (loss, plain):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            each.backward()


def test_a_write_into_what_backward_was_given_does_not_reach_other_readers() -> None:
    class Greedy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            ctx.save_for_backward(x)
            return x.sum()

        @staticmethod
        def backward(ctx, grad):  # type: ignore[no-untyped-def]
            (x,) = ctx.saved_tensors
            return x.zero_().add_(1) * grad  # writes into its own saved tensor, as some fused losses do

    x = torch.randn(8, 8, requires_grad=True)
    with offload_activations(config(), backend=Backend()):
        y = x * 1
        loss = y.sin().sum() + Greedy.apply(y)  # the later one runs first in backward
    expected = (x.detach() * 1).cos() + 1
    del y
    loss.backward()
    assert torch.equal(x.grad, expected)


# -------------------------------------------------------------------------------- graphs, lifetimes


@pytest.mark.parametrize("mode", MODES)
def test_retained_graph_walks_twice(mode: str) -> None:
    plain, inputs = stack_of(lambda x, scale: (x * scale).sin()), torch.randn(4, WIDTH)
    model, _, context = offloaded(plain, list(plain.layers), mode)
    with context:
        loss = model(inputs).pow(2).sum()
    for retain in (True, False):
        loss.backward(retain_graph=retain)
        assert_bitwise(gradients(model), trained(plain, inputs))


@pytest.mark.parametrize("mode", ["boundary", "all", "context-all", "context-boundary"])
def test_double_backward(mode: str) -> None:
    plain = stack_of(lambda x, scale: (x * scale).sin())
    inputs = torch.randn(4, WIDTH, requires_grad=True)

    def penalty(model: nn.Module, context) -> dict[str, torch.Tensor | None]:  # type: ignore[no-untyped-def]
        with context:
            (grad,) = torch.autograd.grad(model(inputs).pow(2).sum(), inputs, create_graph=True)
            loss = grad.pow(2).sum()
        loss.backward()
        inputs.grad = None
        return gradients(model)

    expected = penalty(plain, offload_activations("none"))
    model, _, context = offloaded(plain, list(plain.layers), mode)
    assert_bitwise(penalty(model, context), expected)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("first", [0, 1])
def test_two_forwards_before_a_backward(mode: str, first: int) -> None:
    plain = stack_of(lambda x, scale: (x * scale).sin())
    batches = [torch.randn(4, WIDTH), torch.randn(4, WIDTH)]
    model, _, context = offloaded(plain, list(plain.layers), mode)
    losses = []
    for batch in batches:
        with context:
            losses.append(model(batch).pow(2).sum())
    for index in (first, 1 - first):
        losses[index].backward()
        assert_bitwise(gradients(model), trained(plain, batches[index]))


@pytest.mark.parametrize("mode", MODES)
def test_a_dropped_graph_frees_its_host_memory(mode: str) -> None:
    plain = stack_of(lambda x, scale: (x * scale).exp())
    model, offloader, context = offloaded(plain, list(plain.layers), mode)
    with context:
        loss = model(torch.randn(4, WIDTH)).sum()
    assert offloader.stats.host_live_bytes > 0
    del loss
    assert offloader.collect().host_live_bytes == 0  # without the garbage collector: there is no cycle


@pytest.mark.parametrize("mode", ["all", "context-all"])
def test_an_exception_in_forward_leaves_no_trace(mode: str) -> None:
    fail = [True]

    def function(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        if fail[0]:
            raise KeyError("the data loader's fault")
        return (x * scale).sin()

    plain = stack_of(function)
    plain.layers[0].function = lambda x, scale: x * scale.cos()
    inputs = torch.randn(4, WIDTH)
    model, offloader, context = offloaded(plain, list(plain.layers), mode)
    with pytest.raises(KeyError), context:
        model(inputs)
    gc.collect()
    assert offloader.collect().host_live_bytes == 0
    moved = offloader.stats.moved_bytes
    (torch.randn(8, requires_grad=True) * 2).sin().sum().backward()  # outside: the hooks are gone
    assert offloader.stats.moved_bytes == moved
    fail[0] = False
    assert_bitwise(trained(model, inputs, context), trained(plain, inputs))


def test_no_grad_moves_nothing() -> None:
    model = stack_of(lambda x, scale: (x * scale).sin())
    with torch.no_grad(), offload_activations(config(), backend=Backend()) as offloader:
        out = model(torch.randn(4, WIDTH))
    assert not out.requires_grad and offloader.stats.moved_bytes == 0 and not offloader.stats.kept_count


def test_what_is_kept_forms_no_reference_cycle() -> None:
    x = torch.randn(8, requires_grad=True)
    with offload_activations(config(min_bytes=1 << 20), backend=Backend()):
        y = x.exp()  # saves its own result
    gone = weakref.ref(y)
    with without_collector():
        del y
        assert gone() is None


def test_the_tail_is_read_where_it_still_lies() -> None:
    x = torch.randn(64, requires_grad=True)
    with offload_activations(config(), backend=Backend()) as offloader:
        y = x * 2
        loss = y.sin().sum()
    loss.backward()  # y is still alive here
    assert (offloader.stats.copies, offloader.stats.reloads) == (1, 0)


def test_the_last_layer_is_left_alone() -> None:
    plain = Stack(list(stack_of(lambda x, scale: (x * scale).sin()).layers))
    model, offloader, context = offloaded(plain, list(plain.layers), "context-all")
    with context:
        model(torch.randn(4, WIDTH)).pow(2).sum()
    # The last layer saves x for sin, linear's input and weight, both factors, sin's argument; pow saves the output.
    assert offloader.stats.kept_count[LAST_LAYER] == 7
    # x, x.sin(), linear's output and the product of each other layer; the model's input needs no gradient.
    assert offloader.stats.copies == 3 * 4 - 1
