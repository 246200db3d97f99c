"""Scenarios by role, written anew from the *cases* of NeMo Automodel's tests in `tests/unit_tests/distributed/`:
`test_activation_checkpointing.py`, `test_recompute_replay.py` and `test_parallelizer_utils.py`.

Left out: replay *without* the attention back end of forward (they show what goes wrong; ours always puts it back); the
inner parts of their recorder (binding to a thread, names of channels); compute dtypes that a loaded checkpoint recorded or
a list of module names pins, and copies of a mixed-precision policy (here one policy counts for the whole model).
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.profiler import record_function
from torch.nn.attention import SDPBackend, sdpa_kernel

from nemo_like import SelectivePolicy
from nemo_like.activation_checkpointing import (
    CheckpointWrapper,
    FullPolicy,
    apply_submodule_checkpointing,
    detect_kv_sharing_and_maybe_disable_cache,
    unwrap_checkpoint_wrapper,
)
from nemo_like.activation_checkpointing.ops import default_save_ops
from nemo_like.distributed.units import plan_units
from tests.checks import assert_bitwise
from tests.models.blocks import checkpoint_region, gradients

WIDTH = 8
each_policy = pytest.mark.parametrize("policy", [FullPolicy(), SelectivePolicy()], ids=["full", "selective"])


# --------------------------------------------------------------------------------------------- wrapper and kept operators
def test_unwrapping_gives_the_module_wrapped_or_not() -> None:
    module = nn.Linear(2, 2)
    assert unwrap_checkpoint_wrapper(module) is module
    assert unwrap_checkpoint_wrapper(CheckpointWrapper(module)) is module


KERNELS = ("flash_attn_3", ("fwd", "_flash_attn_forward"))


def test_an_attention_package_is_kept_as_soon_as_it_is_there_and_not_missed_before() -> None:
    package, kernels = KERNELS
    if hasattr(torch.ops, package) and any(hasattr(getattr(torch.ops, package), kernel) for kernel in kernels):
        pytest.skip(f"{package} is installed")
    before = default_save_ops()
    assert isinstance(before, frozenset) and torch.ops.aten.mm.default in before
    library = torch.library.Library(package, "DEF")
    try:
        for kernel in kernels:
            library.define(f"{kernel}(Tensor q, Tensor k, Tensor v) -> Tensor")
        added = default_save_ops() - before
        assert {str(op) for op in added} == {f"{package}.{kernel}.default" for kernel in kernels}
    finally:
        library._destroy()
    assert default_save_ops() == before


# ----------------------------------------------------------------------------- the attention back end around forward only
def backends() -> tuple[bool, ...]:
    """Which kernels of scaled-dot-product attention are allowed: flash, memory-efficient, cuDNN, plain matmuls."""
    allowed = torch.backends.cuda
    return (
        allowed.flash_sdp_enabled(),
        allowed.mem_efficient_sdp_enabled(),
        allowed.cudnn_sdp_enabled(),
        allowed.math_sdp_enabled(),
    )


PLAIN, FUSED = (False, False, False, True), (True, True, False, False)
SEEN: list[tuple[bool, ...]] = []


class Attention(nn.Module):
    """(patches, WIDTH) to the same; notes the kernels that were allowed in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        SEEN.append(backends())
        q, k, v = (part[None, None] for part in self.qkv(x).chunk(3, dim=-1))
        return self.proj(F.scaled_dot_product_attention(q, k, v)[0, 0])


class VisionBlock(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.attn = Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.attn(x))


@each_policy
def test_replay_has_forwards_kernels_and_backward_its_own_again(policy: Any) -> None:
    attention, x = Attention(), torch.randn(4, WIDTH, requires_grad=True)
    SEEN.clear()
    with sdpa_kernel([SDPBackend.MATH]):
        out = checkpoint_region(attention, x, policy=policy)
        assert backends() == PLAIN
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
        out.sum().backward()
        assert backends() == FUSED
    assert SEEN == [PLAIN, PLAIN]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_checkpointed_sub_modules_have_forwards_kernels_and_dropout_in_replay(dropout: float, device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    torch.manual_seed(0)
    bare = VisionBlock(dropout).to(device)
    block, x = copy.deepcopy(bare), torch.randn(64, WIDTH, device=device)
    apply_submodule_checkpointing([block], has_kv_sharing=False)
    assert isinstance(block.attn, CheckpointWrapper) and isinstance(block.mlp, CheckpointWrapper)
    results = []
    for module in (block, bare):
        SEEN.clear()
        torch.manual_seed(1234)
        with sdpa_kernel([SDPBackend.MATH]):
            out = module(x)
        torch.rand(3, device=device)
        out.sum().backward()  # after the context has ended, and after more draws
        results.append([out, *(p.grad for p in module.parameters())])
        assert len(SEEN) == (2 if module is block else 1) and set(SEEN) == {PLAIN}
    assert_bitwise(*results)


def test_a_child_under_several_names_is_wrapped_once_and_keeps_its_names() -> None:
    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Module()
            self.inner.decay = nn.Parameter(torch.ones(WIDTH))
            self.project = nn.Linear(WIDTH, WIDTH, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return (self.project(x) * self.inner.decay).tanh()

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mixer = Mixer()

        mlp = self_attn = property(lambda self: self.mixer)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.self_attn(x)

    layer = Layer()
    bare, x = copy.deepcopy(layer), torch.randn(3, WIDTH)
    apply_submodule_checkpointing([layer], has_kv_sharing=False)
    assert isinstance(layer.mixer, CheckpointWrapper) and type(unwrap_checkpoint_wrapper(layer.mixer)) is Mixer
    assert layer.mlp is layer.self_attn is layer.mixer
    assert [name for name, _ in layer.named_children()] == ["mixer"]
    assert list(layer.state_dict()) == list(bare.state_dict()) == ["mixer.inner.decay", "mixer.project.weight"]
    assert_bitwise(gradients(layer, layer, x), gradients(bare, bare, x))


# ----------------------------------------------------------------------------------------------------- key/value caches
class TextConfig:
    def __init__(self, shared: int = 0) -> None:
        self.num_kv_shared_layers, self.use_cache = shared, True


class VisionConfig:
    depth = 2


class Composite:
    """A config of a model for pictures and text; `declared`: it names its parts, as newer ones do."""

    def __init__(self, shared: int = 0, declared: bool = True) -> None:
        self.text_config, self.vision_config, self.use_cache = TextConfig(shared), VisionConfig(), True
        if declared:
            self.sub_configs = {"text_config": TextConfig, "vision_config": VisionConfig}


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("shared", [0, 2])
def test_the_cache_of_every_config_is_turned_off_unless_layers_share_it(shared: int, declared: bool) -> None:
    model = nn.Module()
    model.config = config = Composite(shared, declared)
    assert detect_kv_sharing_and_maybe_disable_cache(model) is (shared > 0)
    assert config.use_cache is config.text_config.use_cache is (shared > 0)
    assert not hasattr(config.vision_config, "use_cache")


# --------------------------------------------------------------------------------------------- decisions that are replayed
@each_policy
def test_a_profiler_range_in_replay_alone_shifts_nothing(policy: Any) -> None:
    linear, x, calls = nn.Linear(4, 4, bias=False), torch.randn(2, 4), []

    def fn(t: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) > 1:
            with record_function("in replay only"):
                return linear(t).tanh()
        return linear(t).tanh()

    got = gradients(lambda t: checkpoint_region(fn, t, policy=policy), linear, x)
    assert len(calls) == 2
    assert_bitwise(got, gradients(lambda t: linear(t).tanh(), linear, x))


DECIDED: list[float] = []


@torch.library.custom_op("nemo_like_scenarios::decide", mutates_args=())
def decide(x: Tensor) -> Tensor:
    """A decision (a scale) that another call would take otherwise."""
    DECIDED.append(float(len(DECIDED) + 1))
    return x.new_full((), DECIDED[-1])


def test_replay_takes_forwards_decisions_in_order_each_region_its_own() -> None:
    policy = SelectivePolicy(save_ops=("nemo_like_scenarios.decide.default",))

    def fn(t: Tensor) -> Tensor:
        return ((t * decide(t.detach())).sin() * decide(t.detach())).cos()

    def by_hand(t: Tensor, first: float, second: float) -> Tensor:
        return ((t * first).sin() * second).cos()

    DECIDED.clear()
    x = torch.randn(5, requires_grad=True)
    one = checkpoint_region(fn, x, policy=policy)  # decides 1 and 2
    two = checkpoint_region(fn, x, policy=policy)  # decides 3 and 4
    for out, decisions in ((two, (3.0, 4.0)), (one, (1.0, 2.0))):
        wanted = torch.autograd.grad(by_hand(x, *decisions).sum(), x)[0]
        for _ in range(2):  # the log is read from its start again
            assert torch.equal(torch.autograd.grad(out.sum(), x, retain_graph=True)[0], wanted)
    assert DECIDED == [1.0, 2.0, 3.0, 4.0]


# ------------------------------------------------------------------------------------------- units of one storage dtype
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16


class Mixed(nn.Module):
    """Parts `a`, `b.0`, `b.1` and `c` in dtypes of their own; `b` may hold a buffer in yet another one."""

    def __init__(self, a: torch.dtype, b0: torch.dtype, b1: torch.dtype, c: torch.dtype, buffer: bool) -> None:
        super().__init__()
        linear = lambda dtype: nn.Linear(4, 4, bias=False, dtype=dtype)  # noqa: E731
        self.a, self.b, self.c = linear(a), nn.Sequential(linear(b0), linear(b1)), linear(c)
        if buffer:
            self.b.register_buffer("scale", torch.zeros(1, dtype=torch.float64))


@pytest.mark.parametrize("buffer", [False, True])
@pytest.mark.parametrize(
    ("dtypes", "main", "split"),
    [
        ((FP32, FP32, FP32, FP32), FP32, {}),
        ((BF16, BF16, BF16, BF16), BF16, {}),
        ((FP32, FP16, FP16, FP16), FP16, {"layer.a": FP32}),
        ((FP16, FP16, FP32, FP16), FP16, {"layer.b.1": FP32}),
        ((FP32, FP16, FP16, BF16), FP16, {"layer.a": FP32, "layer.c": BF16}),
        ((FP16, FP32, FP32, FP16), FP16, {"layer.b.0+layer.b.1": FP32}),
    ],
)
def test_what_is_stored_in_another_dtype_is_a_unit_of_its_own(
    dtypes: tuple[torch.dtype, ...], main: torch.dtype, split: dict[str, torch.dtype], buffer: bool
) -> None:
    model = nn.Module()
    model.layer = Mixed(*dtypes, buffer=buffer)
    plan = plan_units(model, [model.layer])
    assert {param.dtype for param in plan.layers[0].params} == {main}
    assert {unit.name: unit.params[0].dtype for unit in plan.by_dtype} == split
    for unit in plan.by_dtype:
        assert len({param.dtype for param in unit.params}) == 1
    assert sum(len(unit.params) for unit in plan.units) == 4


def test_a_model_without_parameters_has_nothing_to_shard() -> None:
    model = nn.Sequential(nn.Identity())
    plan = plan_units(model, [model[0]])
    assert [len(unit.params) for unit in plan.units] == [0] * len(plan.units)
