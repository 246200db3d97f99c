"""The engine's plain duties: equal gradients, counted FLOPs, counted bytes."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from nemo_like._util.live_bytes import LiveBytes
from nemo_like.activation_checkpointing import DecisionTable, FullPolicy, SelectivePolicy
from nemo_like.activation_checkpointing.engine import run_region, set_early_stop
from nemo_like.activation_checkpointing.engine.handles import RegionError
from nemo_like.activation_checkpointing.policy import HOST, RECOMPUTE, SAVE, SKIP, PlanMismatchError, TorchPolicy
from tests.checks import assert_bitwise, seeded
from tests.models.blocks import LlamaBlock, NotingTransfer, RouterBlock, checkpoint_region, gradients, region

pytestmark = pytest.mark.compat

POLICIES = {
    "full": FullPolicy(),
    "selective": SelectivePolicy(),
    "all matmuls kept": SelectivePolicy(every_nth_matmul=None),
    "all matmuls recomputed": SelectivePolicy(every_nth_matmul=1),
    "every third": SelectivePolicy(every_nth_matmul=3),
    "table": DecisionTable({"aten.mm.default": [SAVE, RECOMPUTE, HOST, SAVE, RECOMPUTE, HOST, SAVE]}),
}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_bitwise_those_of_no_checkpointing(policy, dtype):
    block = seeded(LlamaBlock, 32).to(dtype)
    x = torch.randn(2, 8, 32, dtype=dtype)
    assert_bitwise(gradients(region(block, policy), block, x), gradients(block, block, x))


@pytest.mark.parametrize("policy", [FullPolicy(), SelectivePolicy()], ids=["full", "selective"])
def test_dropout_draws_the_same_numbers_in_replay(policy):
    torch.manual_seed(0)
    linears = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)
    block = nn.Sequential(linears[0], nn.Dropout(0.5), nn.GELU(), linears[1], nn.Tanh())
    x = torch.randn(4, 16)
    assert_bitwise(gradients(region(block, policy), block, x), gradients(block, block, x))
    # and the numbers after backward go on where forward left off
    drawn = []
    for run in (block, region(block, policy)):
        seeded(run, x, seed=1).sum().backward()
        drawn.append(torch.rand(3))
    assert torch.equal(*drawn)


@pytest.mark.parametrize("decisions", [[SAVE, RECOMPUTE, SAVE], [HOST, HOST, RECOMPUTE], [RECOMPUTE, SAVE, RECOMPUTE]])
def test_a_kept_draw_does_not_shift_the_later_ones(decisions):
    w = nn.Linear(8, 8, bias=False)

    def fn(x):
        for _ in range(3):
            x = (w(x) * torch.rand_like(x)).tanh() * torch.bernoulli(torch.full_like(x, 0.5))
        return x.sin()

    x = torch.randn(4, 8)
    wanted = gradients(fn, w, x)
    for rows in ({"aten.rand_like.default": decisions}, {"aten.bernoulli.default": decisions}):
        assert_bitwise(gradients(region(fn, DecisionTable(rows)), w, x), wanted)


def test_without_preserved_random_state_dropout_differs():
    block = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Tanh())
    x = torch.randn(8, 64)
    changed = region(block, FullPolicy(), preserve_rng_state=False)
    got, wanted = gradients(changed, block, x), gradients(block, block, x)
    assert torch.equal(got[0], wanted[0]) and not torch.equal(got[2], wanted[2])


THREE = (512, 512), (512, 512), (512, 1024)  # in units of one (512, 512) matmul, forward is 1 + 1 + 2


def three_linears():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in THREE))


def table(*decisions):
    return DecisionTable({"aten.mm.default": decisions})


# policy; FLOPs of backward where replay runs to the end, and where it stops early; (512, 512) activations held.
# Backward is twice forward. Replay stops where the last matmul saves its input: full recomputes two units, not four;
# with every second matmul recomputed, the first is kept, the second recomputed and the third is never reached.
SPENT = {
    "none": (None, 8, 8, 2),
    "selective": (SelectivePolicy(), 9, 9, 1),
    "the first again": (table(RECOMPUTE, RECOMPUTE, SAVE), 10, 10, 0),
    "the last again": (table(SAVE, RECOMPUTE, RECOMPUTE), 11, 9, 1),
    "a function's choice": (TorchPolicy(lambda context, op, *args, **kwargs: op is torch.ops.aten.mm.default), 8, 8, 2),
    "full": (FullPolicy(), 12, 10, 0),
}


@pytest.mark.parametrize("early_stop", [False, True])
@pytest.mark.parametrize("case", SPENT)
def test_flops_of_backward_and_bytes_held(case, early_stop):
    policy, to_the_end, stopped, held = SPENT[case]
    block, x = three_linears(), torch.randn(512, 512, requires_grad=True)
    with LiveBytes() as live, set_early_stop(early_stop):
        out = (block(x) if policy is None else checkpoint_region(block, x, policy=policy)).sum()
    assert not early_stop or live.live == held * 512 * 512 * 4 + out.nbytes
    with FlopCounterMode(display=False) as counter:
        out.backward()
    assert counter.get_total_flops() == (stopped if early_stop else to_the_end) * 2 * 512**3


def held_after(forward, block, x):
    """Bytes made in `forward` and still alive after it; its output, `x` and the parameters are not counted."""
    with LiveBytes() as live:
        out = forward()
        size = out.untyped_storage().nbytes()
        return live.live - size


def test_full_holds_nothing_of_its_own():
    block, x = LlamaBlock(32), torch.randn(2, 8, 32, requires_grad=True)
    assert held_after(lambda: checkpoint_region(block, x, policy=FullPolicy()), block, x) == 0
    assert held_after(lambda: block(x), block, x) > 0


def test_the_llama_style_block_of_the_design_holds_13_53_units_where_the_parity_rule_holds_15_53():
    # Units: bytes per token and per D, of 2-byte numbers; counted here with 4-byte numbers and halved.
    # Parity: input 2, q 2, v .5 [mm 1 and 3], attention 2 + log-sum-exp, gate 7 [mm 5], down 2 [mm 7] = 15.5 + lse.
    # Ours: without the last 2, because replay never reaches `down`. The log-sum-exp is 4 bytes per token and head in
    # any dtype: 4 / 128 = .03 units for heads of 128, as in the design's table.
    width, heads, tokens = 512, 4, 16
    block = LlamaBlock(width, heads)
    x = torch.randn(1, tokens, width, requires_grad=True)
    unit = tokens * width  # bytes
    lse = 4 * heads * tokens
    held = held_after(lambda: checkpoint_region(block, x, policy=SelectivePolicy()), block, x)
    activations = (held - lse) / 2  # float32 to 2-byte numbers
    # 2.0: the region's input, alive outside
    assert 2.0 + activations / unit + lse / unit == pytest.approx(13.53, abs=0.005)
    everything = held_after(lambda: run_region(block, (x,), {}, policy=SelectivePolicy(), early_stop=False), block, x)
    assert (everything - held) / 2 / unit == 2.0  # what the parity rule keeps besides


@pytest.mark.few(3)
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
def test_memory_returns_to_the_level_before_without_a_garbage_collection(policy):
    block = LlamaBlock(32)
    x = torch.randn(1, 8, 32, requires_grad=True)
    checkpoint_region(block, x, policy=policy).sum().backward()  # gradients exist from here on
    with LiveBytes() as live:
        checkpoint_region(block, x, policy=policy).sum().backward()
        assert live.live == 0
        checkpoint_region(block, x, policy=policy)  # a graph that is dropped, not run
        assert live.live == 0


def test_a_plan_that_skips_beside_a_routers_choice_leaves_nothing():
    gate, out = nn.Linear(32, 8, bias=False), nn.Linear(8, 32, bias=False)
    x = torch.randn(16, 32, requires_grad=True)

    def route(t):
        weights, _ = gate(t).softmax(-1).topk(2)  # never run twice: kept for a second try, should replay fail
        return out((t.sin() * weights.sum(-1, keepdim=True))[:, :8]).exp()

    table = DecisionTable(
        {"aten.topk.default": [SAVE], "aten._softmax.default": [SAVE], "aten.mm.default": [SKIP, SAVE]}
    )
    wanted = torch.autograd.grad(route(x).sum(), [x, gate.weight, out.weight])
    with LiveBytes() as live:
        y = checkpoint_region(route, x, policy=table)
        found = torch.autograd.grad(y.sum(), [x, gate.weight, out.weight])
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, wanted))
        del found
        assert live.live == y.untyped_storage().nbytes()  # though the graph is there
        del y
        assert live.live == 0


def test_what_is_kept_is_freed_while_backward_consumes_it():
    # Five times tanh(linear) in one region. When a linear's gradient arrives, everything above it has been consumed:
    # its own input and output (one storage each) and those of all below are left, and no more.
    layers = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(5))
    x = torch.randn(64, 32, requires_grad=True)
    size, seen = 64 * 32 * 4, []

    def fn(t):
        for layer in layers:
            t = layer(t).tanh()
            t.register_hook(lambda _: seen.append(live.live))
        return t

    with LiveBytes() as live:
        checkpoint_region(fn, x, policy=FullPolicy()).sum().backward()
    # A hook sees the incoming gradient, and below the top also the weight gradients made so far.
    weights = 32 * 32 * 4
    net = [held - weights * number for number, held in enumerate(seen)]
    assert [above - below for above, below in itertools.pairwise(net[1:])] == [size] * 3, net


def test_a_router_that_normalises_its_weights_in_place_works():
    block, x = seeded(RouterBlock), torch.randn(3, 5, 16)
    for policy in (SelectivePolicy(), SelectivePolicy(every_nth_matmul=None), FullPolicy()):
        assert_bitwise(gradients(region(block, policy), block, x), gradients(block, block, x))


W = nn.Linear(8, 8, bias=False)


def changed_in_place(x):
    h = W(x)
    h += x
    h.view(-1)[:4].mul_(2)
    return (h.tanh() * W(h)).sum(-1)


def written_out(x):
    h, buffer = W(x), torch.empty(3, 8)
    with torch.no_grad():
        torch.mm(h, W.weight, out=buffer)
    return (h * buffer.clone()).tanh() * W(x)


@pytest.mark.parametrize("decisions", [(SAVE, SAVE), (HOST, SAVE), (SAVE, RECOMPUTE), (RECOMPUTE, HOST)])
@pytest.mark.parametrize("fn", [changed_in_place, written_out])
def test_kept_matmuls_beside_writes_within_the_region(fn, decisions):
    x = torch.randn(3, 8)
    assert_bitwise(gradients(region(fn, table(*decisions)), W, x), gradients(fn, W, x))


def test_an_output_and_its_views_are_kept_once():
    # A linear on (B, T, D) is a matmul and a view of its result that the schema does not call one.
    w, x = nn.Linear(16, 16, bias=False), torch.randn(2, 4, 16)
    everything = TorchPolicy(lambda context, op, *args, **kwargs: True)

    def fn(t):
        h = w(t)
        h += t
        return (h.transpose(0, 1).flatten(1).tanh() * 2).sum(-1).exp()

    assert_bitwise(gradients(region(fn, everything), w, x), gradients(fn, w, x))
    x.requires_grad_()
    held = held_after(lambda: checkpoint_region(lambda t: w(t).tanh().exp(), x, policy=everything), w, x)
    assert held == 2 * x.numel() * 4  # matmul and tanh; exp is the output


def two_matmuls(t, a, b):
    h = t @ a
    return h, (h @ b).tanh()


@pytest.mark.parametrize(
    ("what", "policy", "message"),
    [
        ("kept output", SelectivePolicy(every_nth_matmul=None), r"aten\.mm\.default was changed in place"),
        ("input", FullPolicy(), "inputs was changed in place"),
        ("parameter", FullPolicy(), r"changed in place \d+ times in forward, and \d+ by now"),
    ],
)
def test_what_is_changed_in_place_before_backward_is_named(what, policy, message):
    a, b = (torch.randn(8, 8, requires_grad=True) for _ in range(2))
    x = torch.randn(3, 8, requires_grad=True) * 1
    h, y = checkpoint_region(lambda t: two_matmuls(t, a, b), x, policy=policy, name="layers.3")
    with torch.no_grad():
        {"kept output": h, "input": x, "parameter": b}[what].mul_(2)
    with pytest.raises(RegionError, match=rf"layers\.3.*{message}"):
        y.sum().backward()


def test_host_outputs_leave_the_device_bytes_alone_and_come_back():
    # On the CPU both places are CPU memory; the transfer tells what went through it.
    block, x, transfer = three_linears(), torch.randn(4, 512), NotingTransfer()
    policy = table(HOST, HOST, RECOMPUTE)
    assert_bitwise(gradients(region(block, policy, transfer=transfer), block, x), gradients(block, block, x))
    size = 4 * 512 * 4
    assert transfer.moves == [size, size, -size, -size]


def chain(x, w):
    """Keeps what `tanh` gives: q feeds only `h`, and `h` only the kept product."""
    q = x @ w
    h = q.transpose(0, 1).contiguous()
    kept = h @ w
    return kept.tanh().sin()


def test_skip_replays_with_placeholders():
    # q and h are needed by nothing but the matmul whose output is kept... and by that matmul's own backward (h),
    # unless w needs no gradient.
    w = torch.randn(6, 6)
    x = torch.randn(6, 6)
    holder = nn.Module()
    policy = DecisionTable({"aten.mm.default": [SKIP, SAVE]})
    wanted = gradients(lambda t: chain(t, w), holder, x)
    assert_bitwise(gradients(region(lambda t: chain(t, w), policy), holder, x), wanted)
    with FlopCounterMode(display=False) as counter:
        xx = x.clone().requires_grad_()
        checkpoint_region(chain, xx, w, policy=policy).sum().backward()
    assert counter.get_total_flops() == 4 * 2 * 6**3  # two forward, two for the gradient of x; none replayed


@pytest.mark.parametrize(
    "ask",
    [
        lambda x, skipped: x.type_as(skipped),
        lambda x, skipped: x.to(skipped),
        lambda x, skipped: x.to(skipped.device, skipped.dtype),
        lambda x, skipped: x * torch.ones(6, device=skipped.device, dtype=skipped.dtype),
        lambda x, skipped: x * torch.full(skipped.shape, 2.0, dtype=skipped.dtype, device=skipped.device),
        lambda x, skipped: x * (skipped.size(-1) + skipped.stride(0)) if skipped.is_contiguous() else x,
        lambda x, skipped: x + 0 * skipped.to(x.dtype).type_as(x).detach().shape[0],
    ],
)
def test_what_is_skipped_still_tells_its_dtype_and_its_device(ask):
    """As norms do that compute in float32 and go back: ``out.type_as(x)``."""
    w = torch.randn(6, 6)

    def fn(x):
        skipped = (x.detach() @ w).double()
        return ask((x @ w).sin(), skipped).float().tanh().sin()

    x, holder = torch.randn(6, 6), nn.Module()
    policy = DecisionTable({"aten.mm.default": [SKIP, RECOMPUTE]})
    assert_bitwise(gradients(region(fn, policy), holder, x), gradients(fn, holder, x))


def random(x, w):
    return F.dropout(x @ w, 0.5) @ w


def writing(x, w):
    out = torch.zeros(6, 6)
    out.add_((x @ w).detach())
    return (x.tanh() @ w) * out


@pytest.mark.parametrize(
    ("fn", "trains", "message"),
    [
        (chain, True, r"skips.*autograd\s+saved"),
        (random, False, "random numbers"),
        (writing, False, "write into a tensor that exists"),
    ],
)
def test_skipping_what_backward_or_a_random_or_writing_operator_reads_raises_and_names_it(fn, trains, message):
    x, w = torch.randn(6, 6, requires_grad=True), torch.randn(6, 6, requires_grad=trains)
    y = checkpoint_region(lambda t, w: fn(t, w).tanh(), x, w, policy=table(SKIP, SAVE), name="layers.7")
    with pytest.raises(RegionError, match=rf"(?s)layers\.7.*{message}"):
        y.sum().backward()
    assert x.grad is None and w.grad is None


@pytest.mark.parametrize("decisions", [[SAVE], [SAVE] * 3, []], ids=["short", "long", "empty"])
def test_a_table_for_another_block_raises_in_forward(decisions):
    block, x = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)), torch.randn(2, 4)
    with pytest.raises(PlanMismatchError, match=r"layers\.1.*aten\.mm\.default"):
        checkpoint_region(block, x, policy=DecisionTable({"aten.mm.default": decisions}), name="layers.1")


@pytest.mark.parametrize(
    ("first", "again", "message"),
    [
        (torch.mm, lambda x, w: torch.addmm(x, x, w), r"aten\.mm\.default, recomputation runs aten\.addmm\.default"),
        (lambda x, w: torch.mm(x, w).detach() * 0 + x, torch.mul, r"forward had run 1 tracked"),
    ],
    ids=["another operator", "fewer operators"],
)
def test_a_replay_that_runs_other_operators_raises_before_a_number_comes_out(first, again, message):
    x, w, forms = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4), iter([first, again])
    y = checkpoint_region(lambda t: next(forms)(t, w).sin().tanh().sin(), x, policy=SelectivePolicy(), name="layers.2")
    with pytest.raises(RegionError, match=rf"layers\.2.*{message}"):
        y.sum().backward()
    assert x.grad is None


def test_nested_tuples_lists_and_dicts_of_tensors_are_saved_inputs():
    def fn(x, pair, *, options):
        cos, sin = pair
        return (x * cos + x * sin).tanh() * options["scale"][0]

    holder = nn.Module()
    cos, sin, scale = torch.randn(4), torch.randn(4), torch.randn(4)
    call = lambda run: lambda x: run(x, (cos, sin), options={"scale": [scale], "flag": True})  # noqa: E731
    x = torch.randn(3, 4)
    assert_bitwise(gradients(call(region(fn, FullPolicy())), holder, x), gradients(call(fn), holder, x))
    y = call(region(fn, FullPolicy()))(x.clone().requires_grad_())
    cos.add_(1)
    with pytest.raises(RegionError, match="inputs was changed in place"):
        y.sum().backward()


def mixed(first, second, scale, third, then=torch.sin):
    """Tensors and other values in a nest, of which not all need a gradient."""
    a, b = then(first + second * third), first * second + third
    a *= scale
    return scale, a, None, True, {"b": b, "third": third * 2}, "word", first


def test_results_of_every_kind_and_a_backward_from_each():
    first, second, third = torch.rand(10, requires_grad=True), torch.rand(10, requires_grad=True), torch.rand(10)
    results = checkpoint_region(mixed, first, second, 3, third, policy=FullPolicy(), then=torch.cos)
    expected = mixed(first, second, 3, third, then=torch.cos)
    assert_bitwise(list(results), list(expected))
    assert not results[4]["third"].requires_grad
    for ours, theirs in ((results[1], expected[1]), (results[4]["b"], expected[4]["b"])):
        wanted = torch.autograd.grad(theirs.sum(), (first, second), retain_graph=True)
        assert_bitwise(torch.autograd.grad(ours.sum(), (first, second), retain_graph=True), wanted)


@pytest.mark.parametrize("policy", [FullPolicy(), SelectivePolicy()], ids=["full", "selective"])
def test_a_region_without_tensors_or_without_gradients_simply_runs(policy):
    assert checkpoint_region(mixed, 0.5, 0.25, 3, 2.0, policy=policy, then=abs) == mixed(0.5, 0.25, 3, 2.0, then=abs)
    out = checkpoint_region(lambda a, b: a * 1, torch.randn(4), torch.randn(4, requires_grad=True), policy=policy)
    with pytest.raises(RuntimeError, match="does not require grad"):
        out.sum().backward()


# --- Operators of others ------------------------------------------------------------------------------------------------

ORDER = [0]


@torch.library.custom_op("nemo_like_tests::dispatch", mutates_args=())
def dispatch(rows: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Rows in the order in which they arrive, and by how many it differs: another one each time."""
    ORDER[0] += 1
    return rows.roll(ORDER[0], 0), ORDER[0]


dispatch.register_autograd(
    lambda ctx, grad, _: grad.roll(-ctx.order, 0),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "order", output[1]),
)
DISPATCH = "nemo_like_tests.dispatch.default"


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        (FullPolicy(), False),
        (SelectivePolicy(every_nth_matmul=None), False),
        (SelectivePolicy(save_ops=(DISPATCH,)), True),
        (SelectivePolicy(extra=(DISPATCH,)), True),
        (TorchPolicy(lambda context, op, *args, **kwargs: str(op) == DISPATCH), True),
    ],
    ids=["full", "matmuls kept", "kept alone", "kept besides", "by a function"],
)
def test_an_operator_that_must_not_run_twice_is_kept_or_its_replay_is_an_error(policy, kept, monkeypatch):
    monkeypatch.setenv("NEMO_LIKE_VERIFY", "1")
    experts, x = nn.Linear(8, 8, bias=False), torch.randn(6, 8)

    def block(t):
        return experts(dispatch(experts(dispatch(t)[0]).tanh())[0]).tanh()

    def run(form):
        ORDER[0] = 0
        return gradients(form, experts, x)

    ours = region(block, policy)
    if kept:
        assert_bitwise(run(ours), run(block))
        return
    with pytest.raises(RegionError, match="'block'"):
        run(ours)
