"""What surrounds a region is the same in replay as in forward. Known failures 15, 16, 17 and 20."""

import contextlib
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from nemo_like import torch_compat
from nemo_like.activation_checkpointing.engine import global_state
from nemo_like.activation_checkpointing.engine.global_state import put_back, switches_for
from nemo_like.activation_checkpointing.engine.handles import RegionError
from nemo_like.activation_checkpointing.policy import RECOMPUTE, SAVE, DecisionTable, FullPolicy, SelectivePolicy
from tests.checks import assert_bitwise
from tests.models.blocks import LlamaBlock, Operators, checkpoint_region, gradients, region


def noting(read, seen):
    """A function whose gradient is recomputed, and that notes what it reads of the world around it."""

    def fn(x):
        seen.append(read())
        return x.exp().sin()

    return fn


POLICIES = {"full": FullPolicy(), "selective": SelectivePolicy()}
each_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())


@each_policy
@pytest.mark.parametrize("cache", [True, False])
def test_two_forwards_under_one_autocast(policy, cache):
    # Known failure 17: the second forward finds its weights cast already, the replays don't.
    torch.manual_seed(0)
    block = LlamaBlock(32)
    run = region(block, policy)
    a, b = torch.randn(1, 8, 32), torch.randn(1, 8, 32)

    def both(call):
        def forward(s, t):
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
                return call(s) + call(t)

        return forward

    assert_bitwise(gradients(both(run), block, a, b), gradients(both(block), block, a, b))


@each_policy
def test_autocast_is_off_in_replay_where_it_was_off_in_forward(policy):
    block, x = LlamaBlock(32), torch.randn(1, 8, 32, requires_grad=True)
    plain, y = block(x).sum(), checkpoint_region(block, x, policy=policy).sum()
    with torch.autocast("cpu", torch.bfloat16):  # it casts the matmuls of backward itself, with checkpointing or not
        (wanted,) = torch.autograd.grad(plain, x)
        (got,) = torch.autograd.grad(y, x)
        assert torch.get_autocast_dtype("cpu") == torch.bfloat16 and torch.is_autocast_enabled("cpu")
    assert torch.equal(got, wanted)


def test_a_table_that_tracks_casts_is_not_shifted_by_the_autocast_cache():
    w = nn.Linear(4, 4, bias=False)

    def layer(t):
        return w(t).tanh()

    def twice(call):
        def forward(x):
            with torch.autocast("cpu", torch.bfloat16):
                return call(x) + call(x)

        return forward

    x, ours = torch.randn(2, 4), region(layer, DecisionTable({"aten.mm.default": [SAVE]}))
    assert_bitwise(gradients(twice(ours), w, x), gradients(twice(layer), w, x))


def sdpa_flags() -> list[bool]:
    cuda = torch.backends.cuda
    return [
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
    ]


@each_policy
@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
def test_the_sdpa_backend_of_a_context_that_has_ended(policy, backend):
    # Known failure 15.
    block, x = LlamaBlock(32), torch.randn(1, 8, 32, requires_grad=True)
    with sdpa_kernel(backend):
        (wanted,) = torch.autograd.grad((block(x) ** 2).sum(), x)
        y = (checkpoint_region(block, x, policy=policy) ** 2).sum()
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]), Operators() as used:
        flags = sdpa_flags()
        (got,) = torch.autograd.grad(y, x)
        assert sdpa_flags() == flags
    if policy.keeps_nothing:
        assert any("flash" in str(op) and "backward" not in str(op) for op in used.ops) == (
            backend is SDPBackend.FLASH_ATTENTION
        )
    assert torch.equal(got, wanted)


@each_policy
def test_the_sdpa_priority_order(policy):
    block, x = LlamaBlock(32), torch.randn(1, 8, 32, requires_grad=True)
    seen, before = [], torch_compat.sdp_priority()

    fn = noting(lambda: list(torch_compat.sdp_priority()), seen)
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True):
        y = checkpoint_region(lambda t: fn(block(t)), x, policy=policy)
    y.sum().backward()
    assert seen[0] == seen[1] != before
    assert torch_compat.sdp_priority() == before


@each_policy
def test_a_replaced_sdpa_function_is_replayed_and_taken_away_again(policy, monkeypatch):
    block, x = LlamaBlock(32), torch.randn(1, 8, 32, requires_grad=True)
    original, calls = F.scaled_dot_product_attention, []

    def patched(q, k, v, **kwargs):
        calls.append(1)
        return original(q, k, v, **kwargs) * 3

    with monkeypatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", patched)
        (wanted,) = torch.autograd.grad((block(x) ** 2).sum(), x)
        y = (checkpoint_region(block, x, policy=policy) ** 2).sum()
    assert len(calls) == 2
    (got,) = torch.autograd.grad(y, x)
    assert len(calls) == 3 and torch.equal(got, wanted)
    assert F.scaled_dot_product_attention is original


class Scaling(TorchFunctionMode):
    """Another result of one function for all that runs inside, as a context-parallel dispatcher has another attention."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out * 3 if func is self.function else out


@each_policy
def test_function_modes_that_have_ended(policy):
    block, x = LlamaBlock(32), torch.randn(1, 8, 32, requires_grad=True)
    with Scaling(F.scaled_dot_product_attention):
        (wanted,) = torch.autograd.grad((block(x) ** 2).sum(), x)
        y = (checkpoint_region(block, x, policy=policy) ** 2).sum()
    (got,) = torch.autograd.grad(y, x)
    assert torch.equal(got, wanted)
    assert torch._C._len_torch_function_stack() == 0


def device():
    return torch.zeros(1).device.type


def test_the_default_device_of_a_context_that_has_ended():
    x, seen = torch.randn(3, requires_grad=True), []
    with torch.device("meta"):
        y = checkpoint_region(noting(device, seen), x, policy=FullPolicy())
    y.sum().backward()
    assert seen == ["meta", "meta"] and device() == "cpu"


@pytest.mark.parametrize("how", ["context", "default"])
def test_the_default_device_of_a_context_around_backward_only(how):
    x, seen = torch.randn(3, requires_grad=True), []
    y = checkpoint_region(noting(device, seen), x, policy=FullPolicy()).sum()
    with contextlib.ExitStack() as stack:
        if how == "context":
            stack.enter_context(torch.device("meta"))
        else:
            torch.set_default_device("meta")
            stack.callback(torch.set_default_device, None)
        y.backward(torch.ones((), device="cpu"))
        assert device() == "meta"
    assert seen == ["cpu", "cpu"] and device() == "cpu"


def test_a_function_mode_around_backward_only():
    block, x = nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)
    (wanted,) = torch.autograd.grad(block(x).sin().sum(), x)
    y = checkpoint_region(lambda t: block(t).sin(), x, policy=FullPolicy()).sum()
    with Scaling(F.linear) as mode:
        (got,) = torch.autograd.grad(y, x)
        assert torch_compat.function_modes() == (mode,)
    assert torch.equal(got, wanted)


def _deterministic(on):
    torch.use_deterministic_algorithms(on, warn_only=on)


def _is_deterministic():
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


SWITCHES = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "oneDNN": (
        lambda: torch.backends.mkldnn.enabled, lambda value: setattr(torch.backends.mkldnn, "enabled", value), False
    ),
}  # fmt: skip
NAMED = {
    "float32's precision in matmuls was none in forward, and is tf32": (
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"
    ),
    "torch.use_deterministic_algorithms was False in forward, and is True": (_is_deterministic, _deterministic, True),
}  # fmt: skip


@pytest.mark.parametrize("switch", SWITCHES)
@pytest.mark.parametrize("inside", [True, False], ids=["on in forward", "on in backward"])
def test_a_global_switch(switch, inside):
    read, put, other = SWITCHES[switch]
    x, seen, before = torch.randn(3, requires_grad=True), [], read()
    try:
        if inside:
            put(other)
        in_forward = read()
        y = checkpoint_region(noting(read, seen), x, policy=FullPolicy()).sum()
        put(before) if inside else put(other)
        in_backward = read()
        y.backward()
        assert seen == [in_forward, in_forward] and read() == in_backward != in_forward
    finally:
        put(before)


@pytest.mark.parametrize("message", NAMED)
def test_a_global_switch_that_is_not_put_back_is_named(message):
    read, put, other = NAMED[message]
    before = read()
    y = checkpoint_region(lambda t: t.exp().sin(), torch.randn(3, requires_grad=True), policy=FullPolicy()).sum()
    try:
        put(other)
        with pytest.raises(RegionError, match=message):
            y.backward()
    finally:
        put(before[0] if isinstance(before, tuple) else before)


@pytest.mark.parametrize("name", ["benchmark", "deterministic", "enabled"])
def test_a_switch_of_cudas_libraries(name):
    cudnn = torch.backends.cudnn
    before = getattr(cudnn, name)
    switches = switches_for("cuda")
    then = [read() for read, _ in switches]
    try:
        setattr(cudnn, name, not before)
        with contextlib.ExitStack() as stack:
            put_back(switches, then, stack)
            assert getattr(cudnn, name) == before
        assert getattr(cudnn, name) != before
    finally:
        setattr(cudnn, name, before)


def test_a_registered_state_is_put_back_for_replay():
    state, seen, x = {"gain": 2.0}, [], torch.randn(3, requires_grad=True)

    def capture():
        wanted = state["gain"]

        @contextlib.contextmanager
        def restore():
            present, state["gain"] = state["gain"], wanted
            yield
            state["gain"] = present

        return restore

    global_state.register("gain", capture)
    try:
        with pytest.raises(ValueError, match="'gain' is taken"):
            global_state.register("gain", capture)
        y = checkpoint_region(noting(lambda: state["gain"], seen), x, policy=FullPolicy())
        state["gain"] = 5.0
        y.sum().backward()
    finally:
        del global_state._registered["gain"]
    assert seen == [2.0, 2.0] and state["gain"] == 5.0


def test_transformer_engines_attention_cache_is_that_of_forward(monkeypatch):
    # Known failure 20, second half. A stand-in for the module, with the dict that the real one has.
    module = types.ModuleType("transformer_engine.pytorch.attention")
    module._attention_backends = {"backend": None}
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.attention", module)
    cache, seen, x = module._attention_backends, [], torch.randn(3, requires_grad=True)

    def attention(t):
        seen.append(cache["backend"])
        cache["backend"] = cache["backend"] or "flash"
        return t.exp().sin()

    y = checkpoint_region(attention, x, policy=FullPolicy())
    cache["backend"] = "fused"  # another layer chose otherwise meanwhile
    y.sum().backward()
    assert seen == [None, None] and cache["backend"] == "fused"


class Scaled(nn.Module):
    """Delayed scaling, as FP8 recipes do it: this step's scale comes from the amax of earlier steps."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=False)
        self.register_buffer("amax", torch.ones(3))
        self.register_buffer("fixed", torch.full((8,), 2.0))
        self.updates = 0

    def forward(self, x):
        scale = self.amax.max()
        self.updates += 1
        with torch.no_grad():
            self.amax.copy_(self.amax.roll(1))
            self.amax[0] = x.abs().max()
        return self.linear((x / scale).tanh() * self.fixed).sigmoid()


def assert_train_alike(ours, plain, policy, inputs, before=lambda module, number: None):
    """Steps of a region of `ours` have the gradients, and leave the buffers, of those of `plain`."""
    ours.load_state_dict(plain.state_dict())
    for number, x in enumerate(inputs):
        for module in (ours, plain):
            before(module, number)
        assert_bitwise(gradients(region(ours, policy), ours, x), gradients(plain, plain, x), number)
        assert_bitwise(dict(ours.named_buffers()), dict(plain.named_buffers()), number)


def rows(scale=1):
    return torch.randn(4, 8) * scale


@each_policy
@pytest.mark.parametrize("module", [Scaled, lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh())])
def test_buffers_that_forward_changes_are_not_changed_again_by_replay(policy, module):
    # Known failure 20, first half.
    torch.manual_seed(0)
    assert_train_alike(module(), module(), policy, [rows(), rows(2), rows(3)])


class Late(nn.Module):
    """Starts to change its buffer some forwards later, as quantisation observers and FP8 recipes with a warm-up do."""

    def __init__(self, size):
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=False)
        self.register_buffer("shift", torch.zeros(size, 8))
        self.on = False

    def forward(self, x):
        if self.on:
            self.shift.add_(0.1)
        return (self.linear(x) + self.shift[:4]).tanh() * x


def begin(module, number):
    module.on = number > 0


@each_policy
def test_a_buffer_that_begins_to_change_later_is_not_changed_again_by_replay(policy):
    assert_train_alike(Late(4), Late(4), policy, [rows(), rows(), rows()], begin)


def test_a_large_buffer_that_begins_to_change_later_is_an_error_once():
    plain, ours = Late(4096), Late(4096)
    gradients(region(ours, FullPolicy()), ours, rows())
    plain.on = ours.on = True
    with pytest.raises(RegionError, match=r"Buffer .shift., of 131072 bytes.*Run this step again"):
        gradients(region(ours, FullPolicy()), ours, rows())
    assert_train_alike(ours, plain, FullPolicy(), [rows()])


def test_batch_norm_learned_in_evaluation_mode_first():
    def mode(module, number):
        module.train(number in (1, 2))

    assert_train_alike(nn.BatchNorm1d(8), nn.BatchNorm1d(8), FullPolicy(), [rows(), rows(), rows(), rows()], mode)


@each_policy
@pytest.mark.parametrize("when", ["forward", "replay"])
def test_the_profiler_may_be_on_in_forward_only_or_in_replay_only(policy, when):
    # Known failure 11: profiler ranges were counted as operators.
    block, x = LlamaBlock(32), torch.randn(1, 8, 32, requires_grad=True)

    def fn(t):
        with torch.profiler.record_function("block"):
            return block(t)

    (wanted,) = torch.autograd.grad(fn(x).sum(), x)
    profiler = lambda on: torch.profiler.profile() if on else contextlib.nullcontext()  # noqa: E731
    with profiler(when == "forward"):
        y = checkpoint_region(fn, x, policy=policy).sum()
    with profiler(when == "replay"):
        (got,) = torch.autograd.grad(y, x)
    assert torch.equal(got, wanted)


def test_foreign_operators_in_one_phase_only_shift_no_index():
    # Known failure 11: whatever is not tracked may come and go, also between tracked operators.
    w, calls = nn.Linear(8, 8, bias=False), []

    def fn(x):
        calls.append(1)
        h = w(x)
        if len(calls) > 1:
            torch.zeros(3).add_(1).clone().exp()
            with torch.profiler.record_function("replay only"):
                h.detach().view(-1)
        else:
            torch.empty(5).fill_(2).cos()
        return w(h.tanh()).tanh()

    x = torch.randn(3, 8)
    for policy in (SelectivePolicy(), DecisionTable({"aten.mm.default": [RECOMPUTE, SAVE]})):
        calls.clear()
        got = gradients(region(fn, policy), w, x)
        assert len(calls) == 2
        calls.clear()
        assert_bitwise(got, gradients(fn, w, x))


def test_state_that_is_nobodys_is_noticed():
    counter = []

    def fn(x):
        counter.append(1)
        return (x[: 2 + len(counter)]).exp().sin()

    x = torch.randn(8, requires_grad=True)
    y = checkpoint_region(fn, x, policy=FullPolicy(), name="layers.4")
    with pytest.raises(RegionError, match=r"layers\.4.*shape \(3,\).*has \(4,\)"):
        y.sum().backward()
