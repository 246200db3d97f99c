"""What is real in a fake run, and models of which no plan is made, because they look at values."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from nemo_like import Job, StepSpec
from nemo_like.fake.run import FakeRun
from nemo_like.planning.devices import resolve_device
from nemo_like.planning.predictions.rank import peak_of
from nemo_like.planning.query import PlanQuery
from nemo_like.planning.trace import layer_memory as gradient_sums
from nemo_like.planning.trace.block import record
from nemo_like.planning.trace.layer_memory import SumsInPlace, TracedBytes, block_memory
from nemo_like.torch_compat import TorchDispatchMode, is_fake
from tests.allocator_events import cpu_events
from tests.models.blocks import Layer, Stack
from tests.planning.queries import part_of


def test_numbers_made_of_constants_are_real_and_random_ones_are_not() -> None:
    with FakeRun():
        mask = torch.ones(2, 3)
        assert bool((mask == 1).all()) and not is_fake((1.0 - mask[:, None, :]) * -1e9)
        assert bool(torch.rand([]) >= 1.0), "no layer is left out"
        assert is_fake(torch.rand(4)) and is_fake(torch.zeros(2, 3))
        assert is_fake(torch.dropout(mask, 0.5, True))


def test_a_constant_that_something_unknown_is_written_into_is_unknown() -> None:
    with FakeRun() as run:
        total = torch.ones(4)
        total[:2] = run.like(torch.ones(2))
        view = total.view(2, 2)
        assert view.untyped_storage()._cdata == total.untyped_storage()._cdata
        assert is_fake(view * 2) and is_fake(total.sum())


def test_a_view_of_such_a_constant_is_a_view_in_the_trace() -> None:
    run = FakeRun()
    with run:
        weight = run.like(torch.ones(4, requires_grad=True))

        def block() -> torch.Tensor:
            total = torch.ones(4)
            total += weight.detach()
            return total.view(2, 2) * weight.view(2, 2)

        trace = record(block, name="block", params=[weight], inputs={}, shared=[])
    assert [str(op.op) for op in trace.ops if not op.view] == [
        "aten.ones.default",
        "aten.add_.Tensor",
        "aten.mul.Tensor",
    ]


def test_gradients_that_meet_are_summed_in_place() -> None:
    """As autograd does without a dispatch mode: two buffers of 4,096 bytes at a time, not three."""

    def peak() -> int:
        x = torch.empty(1024, requires_grad=True)
        meter = TracedBytes([x])
        with meter, SumsInPlace():
            y = x * 2
            z = torch.cat((y.neg(), y.neg(), y.neg())).sum()
            del y
            z.backward()
        return meter.peak - meter.live

    real = peak()
    with FakeRun():
        assert peak() == real


def test_a_gradient_that_somebody_holds_is_not_summed_into() -> None:
    held: list[torch.Tensor] = []
    x = torch.ones(3, requires_grad=True)
    with SumsInPlace():
        y = x * 1
        u, v = y.neg(), y * 2
        u.register_hook(lambda grad: held.append(grad))
        (u * 3 + v).sum().backward()
    assert torch.equal(held[0], torch.full((3,), 3.0)) and torch.equal(x.grad, torch.full((3,), -1.0))


def test_a_gradient_that_a_hook_of_a_node_keeps_is_not_summed_into() -> None:
    """As between the halves of a pipeline's backward, which keep what the parameters' gradients are made of."""

    def left() -> tuple[int, torch.Tensor]:
        x, kept = torch.empty(1024, requires_grad=True), list[torch.Tensor]()
        meter = TracedBytes([x])
        with meter, SumsInPlace():
            y = x * 1
            z = y.sin()
            z.grad_fn.register_prehook(lambda grads: kept.extend(grads))  # type: ignore[union-attr]
            ((y + z) * 3).backward(torch.ones(1024))
        del y, z
        return meter.live, kept[0]

    size, kept = left()
    assert torch.equal(kept, torch.full((1024,), 3.0)), "and not the sum"
    with FakeRun():
        assert left()[0] == size == 2 * 4096


def test_a_mask_that_is_known_selects_a_known_number() -> None:
    with FakeRun() as run:
        assert run.like(torch.ones(3, 2))[torch.tensor([True, False, True])].shape == (2, 2)


ROWS = torch.arange(8).repeat(8)
BUFFER = 64 * 64 * 4


def _backward_peaks(make: Callable[[torch.Tensor], torch.Tensor]) -> tuple[int, int]:
    """Bytes that a backward of `make` allocates at most, for a tensor of `BUFFER` bytes: really, and in a fake run."""

    def grad(y: torch.Tensor, x: torch.Tensor, given: torch.Tensor) -> None:
        torch.autograd.grad(y, x, given)

    x = torch.rand(64, 64, requires_grad=True)
    y = make(x)
    given = torch.ones_like(y)
    real = max(cpu_events(lambda: grad(y, x, given)))
    with FakeRun() as run:
        x = run.like(x)
        y = make(x)
        given = torch.ones_like(y)
        meter = TracedBytes([x, y, given, ROWS])
        with meter, SumsInPlace():
            grad(y, x, given)
    return real, meter.peak


@pytest.mark.parametrize(
    "pick",
    [
        lambda x: x.gather(1, ROWS[:, None]),
        lambda x: x.topk(2)[0],
        lambda x: x.index_select(0, ROWS),
        lambda x: x[ROWS],
    ],
    ids=["gather", "topk", "index_select", "index"],
)
def test_a_backward_that_fills_zeros_of_its_own_fills_them_in_place(
    pick: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    assert _backward_peaks(pick) == (BUFFER, BUFFER)


def test_rows_that_were_put_into_a_tensor_are_cut_from_a_copy_of_its_gradient() -> None:
    """Alive are the gradient, the copy, and zeros for its rows."""
    real, fake = _backward_peaks(lambda x: x.index_put((ROWS,), torch.zeros(64, 64)) * 2)
    assert real // BUFFER == fake // BUFFER == 3


def test_the_gradient_of_a_layer_norm_is_in_rows_whatever_comes_in() -> None:
    """As kernels make it; what comes next, a convolution, then copies a transposed one first."""
    x, weight = torch.randn(2, 5, 8, requires_grad=True), torch.ones(8)
    grad = torch.randn(2, 8, 5).transpose(1, 2)  # in columns
    real = torch.autograd.grad(torch.layer_norm(x, (8,), weight), x, grad)[0]
    with FakeRun() as run:
        fake = run.like(x)
        made = torch.autograd.grad(torch.layer_norm(fake, (8,), run.like(weight)), fake, run.like(grad))[0]
    assert made.stride() == real.stride() == (40, 8, 1)


def test_parameters_of_a_fake_run_have_the_forms_of_the_modules() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3), nn.Embedding(7, 3), nn.BatchNorm1d(3))
    model[1].weight = nn.Parameter(model[0].weight.detach().t())  # not in rows
    model[2].weight.requires_grad_(False)
    tied = nn.Linear(3, 5, bias=False)
    tied.weight = model[0].weight
    model.append(tied)
    with FakeRun(cuda=(9, 0), model=model) as run:
        state = run.state(model, torch.bfloat16)
    assert list(state) == [
        name for name, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())
    ]
    for name, parameter in model.named_parameters(remove_duplicate=False):
        made = state[name]
        assert is_fake(made) and isinstance(made, nn.Parameter) and made.is_leaf and made.grad is None
        assert (made.shape, made.stride(), made.device.type) == (parameter.shape, parameter.stride(), "cpu")
        assert (made.dtype, made.requires_grad) == (torch.bfloat16, parameter.requires_grad)
        assert made.untyped_storage().nbytes() == 2 * parameter.numel()
    assert state["0.weight"] is state["4.weight"]
    assert len({state[name].untyped_storage()._cdata for name, _ in model.named_parameters()}) == 7
    with run:
        torch.func.functional_call(
            model[0], {"weight": state["0.weight"], "bias": state["0.bias"]}, torch.ones(2, 3, dtype=torch.bfloat16)
        ).sum().backward()
    assert state["0.weight"].grad.shape == (5, 3)


class _Keeping(TorchDispatchMode):
    """Keeps all that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[object] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.kept.append(out := func(*args, **(kwargs or {})))
        return out


def test_who_holds_a_sum_is_counted_alike_inside_of_any_mode() -> None:
    count = gradient_sums._counts_of_the_last_holder
    with _Keeping():
        inside = count()
    assert inside == count() is not None


class _LooksInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad / grad.norm() if grad.abs().max() > 1 else grad


def _query(inside: bool, step: StepSpec | None = None) -> PlanQuery:
    """Of a model that looks at values in backward, `inside` of its layers or behind them."""
    last = _LooksInBackward.apply if inside else nn.Identity()
    layers = (Layer(lambda block, x: last(block.inner(x).relu()), inner=nn.Linear(8, 8)) for _ in range(3))
    model = Stack(layers, head=None if inside else _LooksInBackward.apply)
    setup = Job.of(step=step or StepSpec(loss_fn=torch.sum))
    return PlanQuery.from_model(model, torch.randn(4, 8), setup.change(gpu=resolve_device("cpu")))


@pytest.mark.parametrize("ask", [peak_of, lambda query, choices: part_of(query).proved_all(choices[0])])
def test_a_layer_whose_backward_looks_at_values(ask: Callable[[PlanQuery, Any], Any]) -> None:
    query = _query(inside=True)
    with pytest.raises(
        ValueError, match=r"layers\.0 \(Layer\) cannot be planned: its step depends on values"
    ) as raised:
        ask(query, query.uniform("full"))
    assert f"of {__name__}" in str(raised.value) and "Use a mode instead of a budget" in str(raised.value)


def test_both_halves_of_such_a_backward() -> None:
    query = _query(inside=True)
    kind = part_of(query).live.kinds[-1]  # what it is called with gets a gradient
    with pytest.raises(ValueError, match="cannot be planned: its step depends on values"):
        block_memory(kind, {}, part_of(query).live.run, {0}, accumulate=False, halves=True)


def test_a_model_that_looks_at_values_around_its_layers() -> None:
    query = _query(inside=False)
    with pytest.raises(ValueError, match="Stack cannot be planned: its step around the layers depends") as raised:
        query.stages[0].outside()
    assert f"of {__name__}" in str(raised.value) and "Use a mode instead of a budget" in str(raised.value)


def test_a_loss_that_looks_at_values() -> None:
    query = _query(inside=False, step=StepSpec(loss_fn=lambda out: out.sum() if out.sum() > 0 else -out.sum()))
    with pytest.raises(ValueError, match=r"StepSpec\.loss_fn cannot be planned for: it depends on values"):
        query.stages[0].outside()
