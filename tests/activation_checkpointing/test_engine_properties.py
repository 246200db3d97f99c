"""Random blocks under random decision tables, random loops on small models: the original model to the bit, or an error.

The short profile runs with the suite. The long one (2,000 examples and more) is run by hand and recorded in
docs/evidence/engine-property-tests.md:

    pytest tests/activation_checkpointing/test_engine_properties.py -m long
"""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from nemo_like import apply_activation_checkpointing
from nemo_like.activation_checkpointing import DecisionTable, FullPolicy, SelectivePolicy
from nemo_like.activation_checkpointing import ops as table
from nemo_like.activation_checkpointing.engine import run_region
from nemo_like.activation_checkpointing.engine.handles import RegionError
from nemo_like.activation_checkpointing.policy import HOST, RECOMPUTE, SAVE, SKIP, PlanMismatchError
from tests.checks import assert_bitwise, seeded
from tests.models.blocks import MODES, Operators, checkpoint_region, gradients
from tests.models.loops import Action, LoopModel, differences, loops, models, run_loop

WIDTH, ROWS = 8, 6
STEPS = (
    "linear", "biased", "shared", "layer_norm", "rms_norm", "gelu", "silu", "tanh", "exp", "softmax", "attention",
    "branch", "residual", "dropout", "add_inplace", "mul_inplace", "relu_inplace", "view_inplace", "slice_inplace",
    "transpose", "strided", "split", "cat", "gather", "moe", "max", "detached", "no_grad", "checkpoint_again",
    "out_variant", "nan_free_div", "expand", "cumsum", "einsum", "conv", "item",
    "noise", "coin",
)  # fmt: skip


class RandomBlock(nn.Module):
    """A chain of steps on (ROWS, WIDTH); earlier results stay reachable through residuals."""

    def __init__(self, steps):
        super().__init__()
        self.steps = steps
        self.shared = nn.Linear(WIDTH, WIDTH, bias=False)
        self.own = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=name == "biased") for name in steps)
        self.norm = nn.LayerNorm(WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.kernel = nn.Parameter(torch.randn(1, 1, 3))

    def forward(self, x):
        first = previous = x
        x = x * 1
        for name, own in zip(self.steps, self.own):
            x, previous = self.step(name, own, x, previous, first), x
        return x

    def step(self, name, own, x, previous, first):
        if name in _POINTWISE:
            return _POINTWISE[name](x)
        if name in _INPLACE:
            return _INPLACE[name](x * self.scale, first)
        if name == "residual":
            return x + own(previous)
        return _WITH_WEIGHTS[name](self, own, x) if name in _WITH_WEIGHTS else getattr(self, name)(own, x)

    def attention(self, own, x):
        q = x.view(1, ROWS, 2, 4).transpose(1, 2)
        k = own(x).view(1, ROWS, 2, 4).transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, k, is_causal=True).transpose(1, 2).reshape(ROWS, WIDTH)

    def moe(self, own, x):
        weights, chosen = torch.topk(own(x)[:, :3].softmax(-1), 2, dim=-1)
        weights /= weights.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for number, expert in enumerate((self.shared, own)):
            token, slot = torch.where(chosen == number)
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        return out + x

    def no_grad(self, own, x):
        with torch.no_grad():
            gate = own(x).sigmoid()
        return x * gate

    def out_variant(self, own, x):
        buffer = torch.empty(ROWS, WIDTH)
        with torch.no_grad():
            torch.mm(x, own.weight, out=buffer)
        return x + own(buffer)


_WITH_WEIGHTS = {
    "linear": lambda block, own, x: own(x),
    "biased": lambda block, own, x: own(x),
    "shared": lambda block, own, x: block.shared(x),
    "layer_norm": lambda block, own, x: block.norm(x),
    "rms_norm": lambda block, own, x: F.rms_norm(x, (WIDTH,), block.scale),
    "branch": lambda block, own, x: own(x).tanh() * block.shared(x).sigmoid(),
    "strided": lambda block, own, x: own(x)[:, ::2].repeat(1, 2),
    "split": lambda block, own, x: torch.cat(own(x).split(4, dim=1)[::-1], 1),
    "gather": lambda block, own, x: own(x[x.detach().sum(-1).argsort(stable=True)]),
    "max": lambda block, own, x: own(x) / (x.abs().max() + 1),
    "checkpoint_again": lambda block, own, x: checkpoint_region(
        lambda t: own(t).tanh(), x, policy=SelectivePolicy(every_nth_matmul=None)
    ),
    "einsum": lambda block, own, x: torch.einsum("ij,kj->ik", x, own.weight),
    "conv": lambda block, own, x: F.conv1d(x.unsqueeze(1), block.kernel, padding=1).squeeze(1),
    "item": lambda block, own, x: own(x) if x.detach().sum().item() > 0 else own(x) * 2,
}
_POINTWISE = {
    "gelu": F.gelu,
    "silu": F.silu,
    "tanh": torch.tanh,
    "exp": lambda x: (x * 0.1).exp(),
    "softmax": lambda x: x.softmax(-1),
    "dropout": lambda x: F.dropout(x, 0.3),
    "noise": lambda x: x * torch.rand_like(x.detach()),
    "coin": lambda x: x * torch.bernoulli(torch.full_like(x.detach(), 0.5)),
    "transpose": lambda x: x.t().contiguous().t(),
    "cat": lambda x: torch.cat([x[1:], x[:1]]),
    "detached": lambda x: x + x.detach().tanh(),
    "nan_free_div": lambda x: x / (x.detach().abs() + 1),
    "expand": lambda x: x * x[:1].expand(ROWS, WIDTH),
    "cumsum": lambda x: x.cumsum(0),
}
_INPLACE = {
    "add_inplace": lambda x, first: x.add_(first),
    "mul_inplace": lambda x, first: x.mul_(0.5),
    "relu_inplace": lambda x, first: F.relu(x, inplace=True),
    "view_inplace": lambda x, first: _changed_through_a_view(x),
    "slice_inplace": lambda x, first: _written_slice(x, first),
}


def _changed_through_a_view(x):
    x.t()[::3].add_(1)
    return x


def _written_slice(x, first):
    x[:, 0] = first[:, 1]
    return x


def make(steps, seed):
    return seeded(RandomBlock, steps, seed=seed), torch.randn(ROWS, WIDTH)


def calls_of(block, x):
    """Every call of a trackable operator, in order, as the engine's forward sees them."""
    torch.manual_seed(0)
    x = x.clone().requires_grad_() * 1
    with Operators() as seen:
        block(x)
    return [op for op in seen.ops if table.facts(op).tracked]


def allowed(op, skip):
    choices = [SAVE, HOST] if table.facts(op).pinned else [SAVE, RECOMPUTE, HOST]
    if op is torch.ops.aten._local_scalar_dense.default:
        choices = [SAVE]  # a number has no place to be moved to
    if skip and not table.facts(op).pinned and not table.facts(op).random:
        choices.append(SKIP)
    return choices


def draw_table(data, calls, skip=False):
    tracked = data.draw(st.sets(st.sampled_from(sorted(set(calls), key=str)))) if calls else set()
    rows = {}
    for op in calls:
        if op in tracked:
            rows.setdefault(op, []).append(data.draw(st.sampled_from(allowed(op, skip))))
    return DecisionTable(rows)


blocks = st.tuples(st.lists(st.sampled_from(STEPS), min_size=1, max_size=7).map(tuple), st.integers(0, 1000))


def valid_tables(case, data):
    block, x = make(*case)
    table = draw_table(data, calls_of(block, x))
    early_stop = data.draw(st.booleans())
    run = lambda t: run_region(block, (t,), {}, policy=table, name="block", early_stop=early_stop)  # noqa: E731
    wanted = gradients(block, block, x)
    assert_bitwise(gradients(run, block, x), wanted)
    for policy in (FullPolicy(), SelectivePolicy()):
        assert_bitwise(gradients(lambda t: checkpoint_region(block, t, policy=policy), block, x), wanted)  # noqa: B023


def retained(case, data):
    block, x = make(*case)
    table = draw_table(data, calls_of(block, x))
    x = x.requires_grad_()
    torch.manual_seed(0)
    wanted = torch.autograd.grad((block(x * 1) ** 2).sum(), x)
    torch.manual_seed(0)
    loss = (checkpoint_region(block, x * 1, policy=table) ** 2).sum()
    for retain in (True, True, False):
        assert torch.equal(torch.autograd.grad(loss, x, retain_graph=retain)[0], wanted[0])


def tables_with_skips(case, data):
    """A table with SKIPs is right or an error; there is no third outcome."""
    block, x = make(*case)
    table = draw_table(data, calls_of(block, x), skip=True)
    wanted = gradients(block, block, x)
    try:
        got = gradients(lambda t: checkpoint_region(block, t, policy=table, name="block"), block, x)
    except RegionError as error:
        assert "'block'" in str(error)
        assert any(SKIP in row for row in table.decisions.values())
        return
    assert_bitwise(got, wanted)


def tables_for_another_block(case, data):
    block, x = make(*case)
    calls = calls_of(block, x)
    rows = {op: list(row) for op, row in draw_table(data, calls).decisions.items()}
    op = data.draw(st.sampled_from(sorted({*calls, torch.ops.aten.mm.default, torch.ops.aten.bmm.default}, key=str)))
    row = rows.setdefault(op, [SAVE] * calls.count(op))
    if row and data.draw(st.booleans()):
        row.pop()
    else:
        row.append(SAVE)
    with pytest.raises(PlanMismatchError, match="'block'"):
        gradients(lambda t: checkpoint_region(block, t, policy=DecisionTable(rows), name="block"), block, x)


PROPERTIES = {valid_tables: 2000, tables_with_skips: 2000, tables_for_another_block: 500, retained: 500}
"""Each with its number of examples in the long profile: 5,000 in all."""
quiet = {"deadline": None, "suppress_health_check": list(HealthCheck), "database": None}


@pytest.mark.parametrize("check", PROPERTIES, ids=lambda check: check.__name__)
def test_short(check):
    settings(max_examples=30, derandomize=True, **quiet)(given(case=blocks, data=st.data())(check))()


@pytest.mark.long
@pytest.mark.parametrize("check", PROPERTIES, ids=lambda check: check.__name__)
@pytest.mark.timeout(3000)
def test_long(check):
    settings(max_examples=PROPERTIES[check], **quiet)(given(case=blocks, data=st.data())(check))()




def outcome_of(kinds: tuple[str, ...], actions: list[Action], mode: str) -> str:
    """``same``, ``error`` (of the checkpointed model alone) or ``both`` raise; anything else fails."""
    bare = seeded(LoopModel, kinds, seed=1)
    wrapped = LoopModel(kinds)
    wrapped.load_state_dict(bare.state_dict())
    apply_activation_checkpointing(wrapped, mode)
    expected, actual = run_loop(bare, actions), run_loop(wrapped, actions)
    assert differences(expected, actual) == [], (kinds, actions, mode, actual.error)
    if expected.error is not None:
        assert actual.error is not None, f"the original model raised {expected.error!r}, and {mode} trained on"
        return "both"
    return "same" if actual.error is None else "error"


@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(models, loops, st.sampled_from(MODES))
def test_a_random_loop_trains_the_bare_model_or_raises(
    kinds: tuple[str, ...], actions: list[Action], mode: str
) -> None:
    outcome_of(kinds, actions, mode)


@pytest.mark.long
@settings(max_examples=5000, deadline=None, suppress_health_check=list(HealthCheck))
@given(models, loops, st.sampled_from(MODES))
def test_many_random_loops(kinds: tuple[str, ...], actions: list[Action], mode: str) -> None:
    outcome_of(kinds, actions, mode)
