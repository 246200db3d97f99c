"""Verification of the first replay: when it runs, what it looks at, what it lets pass, and that it costs nothing later."""

import contextlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nemo_like.activation_checkpointing.engine import run_region, verification
from nemo_like.activation_checkpointing.engine.handles import RegionError
from nemo_like.activation_checkpointing.policy import FullPolicy, Policy, SelectivePolicy
from nemo_like.activation_checkpointing.timesteps import checkpoint_timesteps
from nemo_like.fake.run import FakeRun
from tests.checks import assert_bitwise, seeded
from tests.models.blocks import Layer, LlamaBlock, Operators, Stack, checkpoint_region, gradients, region, under

FULL = FullPolicy()
WRONG = "gradients would be wrong"

pytestmark = pytest.mark.compat


FACTORS = [1.0]


@pytest.fixture(autouse=True)
def _factor() -> None:
    FACTORS[0] = 1.0


def double() -> None:
    FACTORS[0] *= 2


class Counting(nn.Linear):
    """Multiplies by a number of the program's, which nobody puts back."""

    def forward(self, x: Tensor) -> Tensor:
        return (super().forward(x) * FACTORS[0]).exp().sin()


def step(module: Callable[[Tensor], Tensor], between: Callable[[], Any] = lambda: None, **options: Any) -> Tensor:
    x = torch.ones(2, 4, requires_grad=True)
    loss = checkpoint_region(module, x, policy=FULL, name="counting", **options).sum()
    between()
    loss.backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("variable", [None, "0", "1"])
def test_which_steps_are_verified(variable: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if variable is None:
        monkeypatch.delenv("NEMO_LIKE_VERIFY", raising=False)
    else:
        monkeypatch.setenv("NEMO_LIKE_VERIFY", variable)
    for steps_before in (0, 3):
        module = Counting(4, 4)
        for _ in range(steps_before):
            step(module)
        verified = variable == "1" or (variable is None and steps_before == 0)
        with pytest.raises(RegionError, match=WRONG) if verified else contextlib.nullcontext():
            step(module, double)


def test_a_variable_that_is_none_of_these(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEMO_LIKE_VERIFY", "yes")
    with pytest.raises(ValueError, match=r"'yes'; it must be 1 .*, 0 .*, or unset"):
        step(nn.Linear(4, 4))


def test_the_error_names_region_op_tensor_numbers_and_causes() -> None:
    with pytest.raises(RegionError) as raised:
        step(Counting(4, 4), double)
    message = str(raised.value)
    assert "Region 'counting'" in message and "torch.float32 of shape (2, 4)" in message
    assert "by `return (super().forward(x) * FACTORS[0]).exp().sin()`" in message
    assert __file__ in message and "in Counting.forward" in message
    assert message.count("norm ") == 2 and message.count("signed sums ") == 2 and message.count("\n") == 4
    assert all(word in message for word in ("generator", "context variable", "hooks", "in place", "global state"))


def test_all_forwards_before_the_first_backward_are_verified_and_no_further_one() -> None:
    module, x = Counting(4, 4), torch.ones(2, 4, requires_grad=True)
    losses = [checkpoint_region(module, x, policy=FULL, name="counting") for _ in range(3)]
    losses[0].sum().backward()
    double()
    with pytest.raises(RegionError, match=WRONG):
        losses[1].sum().backward()
    step(module, double)


def test_forwards_without_a_backward_are_looked_at_so_often_and_no_more(looks: list[Tensor]) -> None:
    module, x = nn.Linear(4, 4), torch.ones(2, 4)
    for _ in range(verification.CALLS + 10):
        checkpoint_region(module, x, policy=FULL)
    assert len(looks) == verification.CALLS  # one saved tensor each


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    looks: list[Tensor] = []
    look = verification.summary
    monkeypatch.setattr(verification, "summary", lambda tensor: looks.append(tensor) or look(tensor))
    return looks


def test_a_function_made_anew_in_every_step_is_verified_once(looks: list[Tensor]) -> None:
    counts = []
    for _ in range(3):
        step(lambda x: x.exp().sin())
        counts.append(len(looks))
    assert counts == [4, 4, 4]  # two tensors, in forward and in replay


def operators(run: Callable[[], Any]) -> Counter[str]:
    """All operators that run, those that no dispatch mode sees among them, by name."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    return Counter(event.name for event in profile.events() if event.name.startswith("aten::"))


@pytest.mark.few(1)
@pytest.mark.parametrize("ac", ["full", "selective", "submodule", "sequential"])
def test_it_costs_operators_in_the_first_step_and_not_one_later(ac: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def steps(variable: str) -> list[Counter[str]]:
        monkeypatch.setenv("NEMO_LIKE_VERIFY", variable)
        model = under(ac, lambda: Stack(map(LlamaBlock, (16, 16))))
        x = torch.randn(1, 4, 16, requires_grad=True)
        return [operators(lambda: model(x).sum().backward()) for _ in range(4)]

    first, *later = steps("")
    first_off, *later_off = steps("0")
    assert sum(first.values()) > sum(first_off.values())
    assert later == later_off


def test_no_mode_sees_what_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def seen(variable: str) -> list[str]:
        monkeypatch.setenv("NEMO_LIKE_VERIFY", variable)
        with Operators() as mode, torch.device("cpu"):
            step(Counting(4, 4))
        return list(map(str, mode.ops))

    assert seen("1") == seen("0") != []


# --- What passes ------------------------------------------------------------------------------------------------------


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEMO_LIKE_VERIFY", "1")


class _Saves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *others: Tensor) -> Tensor:
        ctx.save_for_backward(x, *others)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, *[None for _ in ctx.saved_tensors[1:]]


SAVED: dict[str, Callable[[Tensor], Tensor]] = {
    "bool": lambda x: x > 0,
    "int64": lambda x: (x * 100).long(),
    "uint8": lambda x: (x * 100).to(torch.uint8),
    "float64": lambda x: x.double(),
    "bfloat16": lambda x: x.bfloat16(),
    "float8": lambda x: x.to(torch.float8_e4m3fn),
    "complex": lambda x: torch.complex(x, x + 1).conj(),
    "not a number": lambda x: torch.where(x > 0.5, torch.nan, x),
    "infinite": lambda x: torch.where(x > 0.5, torch.inf, -torch.inf),
    "empty": lambda x: x[:0],
    "scalar": lambda x: x.sum(),
    "transposed": lambda x: x.t(),
    "expanded": lambda x: x[:1].expand(50, -1),
    "sparse": lambda x: x.relu().to_sparse(),
    "sparse rows": lambda x: x.relu().to_sparse_csr(),
    "sparse columns": lambda x: x.relu().to_sparse_csc(),
    "vmapped": lambda x: torch.vmap(lambda row: row.exp() * row)(x),
}


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("policy", [FULL, SelectivePolicy()], ids=["full", "selective"])
@pytest.mark.parametrize("kind", SAVED)
def test_a_saved_tensor_of_any_kind_is_compared(kind: str, policy: Any) -> None:
    factor = [1.0]

    def fn(x: Tensor) -> Tensor:
        return _Saves.apply(x, SAVED[kind](x.detach() * factor[0])).exp()

    values = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    for changed in (1.0, 4.0):
        x = values.clone().requires_grad_()
        loss = checkpoint_region(fn, x, policy=policy).sum()
        factor[0] = changed
        passes = changed == 1 or kind in ("empty", "bool")  # nothing to compare, and the same in spite of the change
        with contextlib.nullcontext() if passes else pytest.raises(RegionError, match=f"{WRONG}|had shape"):
            loss.backward()
        factor[0] = 1.0


class _Recurrent(Counting):
    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        state = super().forward(x + state)
        return state, state


def test_unrolled_cells_of_one_name_are_verified_each_by_itself() -> None:
    def unroll(cell: nn.Module) -> Tensor:
        _, last = checkpoint_timesteps(cell, torch.ones(9, 2, 4, requires_grad=True), torch.zeros(2, 4), 2)
        return last.sum()

    cell = _Recurrent(4, 4)
    for _ in range(4):
        unroll(cell).backward()
        loss = unroll(_Recurrent(4, 4))
        double()
        with pytest.raises(RegionError, match=WRONG):
            loss.backward()


def test_a_run_on_fake_tensors_verifies_nothing_and_does_not_count_as_the_first_step() -> None:
    module = Counting(4, 4)
    with FakeRun() as run:
        fakes = run.state(module, None)
        (x,), _ = run.sample(((torch.ones(2, 4, requires_grad=True),), {}), None)
        call = lambda x: torch.func.functional_call(module, fakes, (x,))  # noqa: E731
        run_region(call, (x,), {}, policy=FULL, name="counting", owner=module).sum().backward()
    with pytest.raises(RegionError, match=WRONG):
        step(module, double)


def test_without_the_random_state_numbers_may_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NEMO_LIKE_VERIFY", raising=False)
    dropout = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh())
    step(dropout, preserve_rng_state=False)
    monkeypatch.setenv("NEMO_LIKE_VERIFY", "1")
    with pytest.raises(RegionError, match=WRONG):
        for _ in range(20):
            step(dropout, preserve_rng_state=False)


# --- Nondeterministic kernels -----------------------------------------------------------------------------------------


class _AddsInAnotherOrder:
    """As atomic additions: the second run differs by up to so many units of the last place."""

    def __init__(self, units: int) -> None:
        self.units, self.runs = units, 0

    def __call__(self, x: Tensor) -> Tensor:
        self.runs += 1
        with torch.no_grad():
            y = x.exp()
            if self.runs == 2:
                sign = torch.randint(-self.units, self.units + 1, y.shape, generator=torch.Generator().manual_seed(0))
                y = y + (y.double() * sign * torch.finfo(x.dtype).eps).to(x.dtype)
        return _Saves.apply(x, y, y > 1)


LAST_PLACES = [
    (torch.float32, 400, 100_000),
    (torch.bfloat16, 2, 40),
    (torch.float16, 2, 100),
    (torch.float64, 20_000, 10**9),
]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("units", ["few", "many"])
@pytest.mark.parametrize("places", LAST_PLACES, ids=lambda places: str(places[0]))
def test_last_places_may_differ_unless_the_program_asks_for_determinism(
    places: tuple[torch.dtype, int, int], units: str, strict: bool
) -> None:
    dtype, few, many = places
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    function = _AddsInAnotherOrder(many if units == "many" else few)
    torch.use_deterministic_algorithms(strict)
    try:
        loss = checkpoint_region(function, x, policy=FULL, name=f"{places} {units} {strict}").sum()
        with pytest.raises(RegionError, match=WRONG) if strict or units == "many" else contextlib.nullcontext():
            loss.backward()
    finally:
        torch.use_deterministic_algorithms(False)


# --- Memory that kernels allocate and never write, or write in part: it differs without a consequence ----------------


def _saved(dtype: torch.dtype, *shape: int, device: str = "cuda") -> verification.SavedTensor:
    saved = verification.SavedTensor(torch.empty(shape, dtype=dtype, device="meta"), torch.empty(3))
    saved.device = torch.device(device)
    return saved


def test_outputs_that_kernels_of_accelerators_leave_unwritten_are_not_compared() -> None:
    queries = _saved(torch.bfloat16, 2, 8, 100, 64)
    turned = _saved(torch.bfloat16, 2, 100, 8, 64)
    whole = _saved(torch.bfloat16, 2, 8, 128, 64)
    sums = _saved(torch.float32, 2, 8, 128)
    unwritten = verification.unwritten
    assert unwritten(sums, [queries, sums]) and unwritten(sums, [turned, sums])
    assert not unwritten(sums, [whole, sums]) and not unwritten(sums, [sums])
    assert not unwritten(_saved(torch.float32, 2, 8, 128, device="cpu"), [queries])
    assert not unwritten(_saved(torch.bfloat16, 2, 8, 128), [queries])
    for seed in (_saved(torch.int64), _saved(torch.uint64, 2)):
        assert unwritten(seed, [])
        seed.device = torch.device("cpu")
        assert not unwritten(seed, [])
    assert unwritten(_saved(torch.uint8, 4096), []) and not unwritten(_saved(torch.uint8, 2, 8), [])
    assert not unwritten(_saved(torch.int64, 3), []) and not unwritten(_saved(torch.bool, 2), [])


@pytest.mark.usefixtures("always")
def test_kernels_that_leave_memory_unwritten_are_told_from_others() -> None:
    lengths = torch.tensor([3, 2])

    def paths(x: Tensor) -> Tensor:
        loss = nn.functional.ctc_loss(
            x.log_softmax(-1), torch.tensor([[1, 2], [3, 0]]), torch.tensor([5, 4]), lengths - 1
        )
        return loss + nn.functional.rrelu(x).sum()

    for _ in range(5):
        loss = checkpoint_region(paths, torch.randn(5, 2, 6, requires_grad=True), policy=FULL)
        for numel in (20, 50, 60, 100, 250):
            torch.full((numel,), torch.nan)  # other memory for the replay to find
        loss.backward()


def _random_relu(layer: Any, x: Tensor) -> tuple[Tensor]:
    """End with an operator that writes what it saves after it has saved it; `behind` comes after that, and is dropped."""
    y = nn.functional.rrelu(layer.up(x), training=True)
    if layer.behind:
        (layer.up(y).exp() * y).sum()
    return (y,)


WRITES_LATE: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lambda: nn.LSTM(8, 8, 2, dropout=0.5),
    "GRU": lambda: nn.GRU(8, 8, 2, dropout=0.5),
    "RNN": lambda: nn.RNN(8, 8, 2, dropout=0.5),
    "last": lambda: Layer(_random_relu, up=nn.Linear(8, 8), behind=False),
    "last that is used": lambda: Layer(_random_relu, up=nn.Linear(8, 8), behind=True),
}


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("name", WRITES_LATE)
@pytest.mark.parametrize("policy", [FULL, SelectivePolicy()], ids=["full", "selective"])
def test_an_operator_that_writes_what_it_saved_runs_to_its_end(policy: Policy, name: str) -> None:
    layer, x = seeded(WRITES_LATE[name]), torch.randn(4, 8)
    call = lambda t: layer(t)[0]  # noqa: E731
    for seed in range(3):
        wanted = gradients(call, layer, x, seed=seed)
        torch.full((4, 8), torch.nan)  # in the memory that the recompute is given
        assert_bitwise(gradients(region(call, policy), layer, x, seed=seed), wanted)
