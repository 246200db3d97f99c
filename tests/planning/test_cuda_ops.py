"""What is traced for a CUDA device without one: CUDA's operators and what they keep. On a GPU, the same as really runs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nemo_like import Job, plan_for
from nemo_like.fake.cuda_ops import CUDNN, EFFICIENT, FLASH, MATH, Call, backend
from nemo_like.fake.run import FakeRun
from nemo_like.layers import find_layers
from nemo_like.options import MemoryBudget, Precision
from nemo_like.planning import Plan, apply_plan
from nemo_like.planning.devices import device_at_hand, resolve_device
from nemo_like.planning.model.capture import trace_model
from nemo_like.planning.predictions.rank import peak_of
from nemo_like.planning.query import PlanQuery
from nemo_like.planning.trace.block import record
from tests.checks import assert_bitwise, seeded, step
from tests.models.blocks import Layer, Operators, Stack
from tests.models.tiny import labelled, made
from tests.planning.queries import computing, part_of, plan_of, saved

BF16 = torch.bfloat16
A100, H100 = (8, 0), (9, 0)
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def _traced(
    call: Callable[..., Any], *inputs: tuple[tuple[int, ...], torch.dtype], cuda: tuple[int, int] | None = A100,
    autocast: torch.dtype | None = None,
) -> tuple[list[str], list[tuple[tuple[int, ...], torch.dtype]]]:  # fmt: skip
    """The operators of `call`, and what autograd keeps, forward and backward run."""
    kept: list[tuple[tuple[int, ...], torch.dtype]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append((tuple(tensor.shape), tensor.dtype))
        return tensor

    with FakeRun(autocast, cuda) as run:
        tensors = [run.like(torch.empty(shape, dtype=dtype, device="meta")).requires_grad_() for shape, dtype in inputs]
        with Operators() as ran, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), run.casting():
            out = call(*tensors)
        out.float().sum().backward()
        assert all(t.grad is not None and t.grad.shape == t.shape and t.grad.dtype == t.dtype for t in tensors)
    return [op.__name__.partition(".")[0] for op in ran.ops if op.namespace == "aten"], kept


QKV = [((2, 4, 96, 64), BF16)] * 3
MASK = torch.ones(96, 96, dtype=torch.bool).tril()


def test_attention_without_a_mask_is_one_flash_kernel() -> None:
    ops, kept = _traced(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), *QKV)
    assert ops == ["_scaled_dot_product_flash_attention"]
    assert kept[:5] == [*QKV, ((2, 4, 96), torch.float32), ((2, 4, 96, 64), BF16)]  # and two numbers of a generator
    assert [shape for shape, _ in kept[5:]] == [(2,), ()]


def test_attention_with_a_mask_is_fused_too() -> None:
    ops, kept = _traced(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=MASK), *QKV)
    assert ops[-2:] == ["expand", "_scaled_dot_product_efficient_attention"] and "bmm" not in ops
    assert ((2, 4, 96, 96), BF16) in kept and ((2, 4, 96), torch.float32) in kept
    ragged = torch.ones(90, 90, dtype=torch.bool)
    ops, _ = _traced(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=ragged), *[((2, 4, 90, 64), BF16)] * 3
    )
    assert ops[-4:] == ["constant_pad_nd", "slice", "expand", "_scaled_dot_product_efficient_attention"]


def test_heads_of_two_widths_are_fused() -> None:
    wide, narrow = ((1, 8, 128, 192), BF16), ((1, 8, 128, 128), BF16)
    call = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)  # noqa: E731
    assert _traced(call, wide, wide, narrow)[0] == ["_scaled_dot_product_efficient_attention"]
    assert "bmm" in _traced(call, wide, wide, narrow, cuda=None)[0]  # the CPU has no such kernel


def test_a_head_that_is_no_multiple_of_eight_is_padded_for_the_flash_kernel() -> None:
    shape = ((2, 4, 96, 60), BF16)
    ops, kept = _traced(F.scaled_dot_product_attention, shape, shape, shape)
    assert ops == [*["constant_pad_nd"] * 3, "_scaled_dot_product_flash_attention", "slice"]
    assert kept[:3] == [((2, 4, 96, 64), BF16)] * 3


@pytest.mark.parametrize("train", [True, False])
def test_dropout_is_one_kernel_that_keeps_a_byte_per_element(train: bool) -> None:
    ops, kept = _traced(lambda x: F.dropout(x, 0.1, train) * 2, ((4, 8), BF16))
    assert (ops[0], kept) == (("native_dropout", [((4, 8), torch.bool)]) if train else ("mul", []))


def test_dropout_in_unfused_attention_is_that_kernel() -> None:
    shape = ((2, 4, 96, 60), BF16)
    ops, _ = _traced(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, MASK, 0.1), shape, shape, shape)
    assert ops.count("bmm") == 2 and ops.count("native_dropout") == 1 and "bernoulli_" not in ops


def test_rms_norm_keeps_its_input_and_one_number_a_row() -> None:
    ops, kept = _traced(lambda x, w: F.rms_norm(x, (64,), w), ((2, 10, 64), BF16), ((64,), BF16))
    assert ops == ["_fused_rms_norm"]
    assert kept == [((2, 10, 64), BF16), ((64,), BF16), ((2, 10, 1), torch.float32)]
    assert len(_traced(lambda x: F.rms_norm(x, (64,)), ((2, 10, 64), BF16), cuda=None)[0]) > 3


def test_layer_norm_keeps_its_statistics_in_float32() -> None:
    wanted = ((2, 10, 64), BF16), ((64,), BF16), ((64,), BF16)
    call = lambda x, w, b: F.layer_norm(x, (64,), w, b)  # noqa: E731
    for cuda, dtype in ((A100, torch.float32), (None, BF16)):
        ops, kept = _traced(call, *wanted, cuda=cuda)
        assert ops == ["native_layer_norm"] and kept[-2:] == [((2, 10, 1), dtype)] * 2


def test_functions_of_torch_that_call_others_run_the_kernels_too() -> None:
    attention = nn.MultiheadAttention(64, 4, dropout=0.1, batch_first=True, dtype=BF16)

    def call(x: torch.Tensor, *params: torch.Tensor) -> torch.Tensor:
        names = [name for name, _ in attention.named_parameters()]
        out: torch.Tensor = torch.func.functional_call(
            attention, dict(zip(names, params)), (x, x, x), {"need_weights": False}
        )[0]
        return out

    ops, _ = _traced(call, ((2, 16, 64), BF16), *[(tuple(p.shape), BF16) for p in attention.parameters()])
    assert ops.count("_scaled_dot_product_flash_attention") == 1 and "bmm" not in ops


def test_batch_norm_and_softmax_of_float16() -> None:
    weight = ((8,), torch.float32)
    ops, _ = _traced(
        lambda x, w, b: F.batch_norm(x, None, None, w, b, True), ((2, 8, 4, 4), torch.float32), weight, weight
    )
    assert ops == ["cudnn_batch_norm"]
    assert _traced(lambda x: x.softmax(-1, dtype=torch.float32), ((2, 8), torch.float16))[0] == ["_softmax"]
    assert _traced(lambda x: F.softmax(x, -1, dtype=torch.float32), ((2, 8), BF16))[0] == ["_to_copy", "_softmax"]


def test_autocast_keeps_in_float32_what_cudas_does() -> None:
    ops, kept = _traced(lambda x: F.layer_norm(x.to(BF16), (8,)), ((2, 8), torch.float32), autocast=BF16)
    assert ops == ["_to_copy", "_to_copy", "native_layer_norm"] and kept[0] == ((2, 8), torch.float32)
    ops, kept = _traced(lambda x: x.to(BF16).softmax(-1), ((2, 8), torch.float32), autocast=BF16)
    assert kept == [((2, 8), torch.float32)]
    shape = ((2, 4, 16, 64), torch.float32)
    ops, _ = _traced(F.scaled_dot_product_attention, shape, shape, shape, autocast=BF16)
    assert ops == [*["_to_copy"] * 3, "_scaled_dot_product_flash_attention"]


def _call(
    head: int = 64, value_head: int | None = None, dtype: torch.dtype = BF16, keys: int = 96,
    heads: tuple[int, int] = (4, 4), **options: Any,
) -> Call:  # fmt: skip
    query = torch.empty(2, heads[0], 96, head, dtype=dtype)
    key = torch.empty(2, heads[1], keys, head, dtype=dtype)
    return Call(query, key, torch.empty(2, heads[1], keys, value_head or head, dtype=dtype), **options)


CALLS: dict[str, tuple[Call, str, str]] = {
    "plain": (_call(), FLASH, CUDNN),
    "causal": (_call(is_causal=True), FLASH, CUDNN),
    "masked": (_call(mask=MASK), EFFICIENT, CUDNN),
    "float32": (_call(dtype=torch.float32), EFFICIENT, EFFICIENT),
    "float64": (_call(dtype=torch.float64), MATH, MATH),
    "wide": (_call(256), FLASH, FLASH),
    "too wide": (_call(512), EFFICIENT, EFFICIENT),
    "odd": (_call(60), FLASH, FLASH),
    "odd, masked": (_call(60, mask=MASK), MATH, MATH),
    "two widths": (_call(192, 128), EFFICIENT, CUDNN),
    "grouped": (_call(heads=(4, 2), enable_gqa=True), FLASH, CUDNN),
    "causal, more keys": (_call(keys=128, is_causal=True), EFFICIENT, CUDNN),
    "dropout of a tenth": (_call(dropout_p=0.1), FLASH, FLASH),
}
"""A call, and the kernel that an A100 and an H100 take."""


@pytest.mark.parametrize("name", CALLS)
def test_the_kernel_that_takes_a_call(name: str) -> None:
    call, *wanted = CALLS[name]
    assert [backend(call, A100), backend(call, H100)] == wanted


def test_switches_and_their_order_count() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH):
        assert backend(_call(), H100) == MATH
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        assert backend(_call(), H100) == EFFICIENT
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), pytest.raises(RuntimeError, match="switched on"):
        backend(_call(dtype=torch.float64), A100)


def _attention(block: Any, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:  # (B, S, 64)
    """All that CUDA runs otherwise: norm, masked attention with heads of two widths, dropout."""
    h = block.norm(x)
    q, k = block.qk(h).unflatten(-1, (2, 4, 24)).permute(2, 0, 3, 1, 4)
    v = block.v(h).unflatten(-1, (4, 16)).transpose(1, 2)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
    return x + block.drop(block.out(out.transpose(1, 2).flatten(2)))


def _masked(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
    for i, layer in enumerate(layers):
        x = layer(x, mask if i % 2 else None)
    return x


def _model() -> Any:
    sizes = {"qk": 2 * 4 * 24, "v": 4 * 16, "out": 64}
    parts = ({name: nn.Linear(64, size) for name, size in sizes.items()} for _ in range(4))
    layers = (Layer(_attention, norm=nn.RMSNorm(64), drop=nn.Dropout(0.1), **linears) for linears in parts)
    return Stack(layers, run=_masked, head=lambda x: x.float().square().mean())


def test_a_block_of_all_that_differs_is_planned_and_proved() -> None:
    """The table is run by the engine on fake tensors, so that one which did not fit would be refused."""
    model, x = _model().to(BF16), torch.randn(2, 32, 64, dtype=BF16)
    query = PlanQuery.from_model(model, x, Job.of(gpu=resolve_device("a100-80gb")))
    for problem in part_of(query).problems:
        ops = [str(record.op).split(".")[1] for record in problem.records]
        assert ops.count("_fused_rms_norm") == ops.count("native_dropout") == 1
        assert (
            ops.count("_scaled_dot_product_efficient_attention") == 1 and "bmm" not in ops and "bernoulli_" not in ops
        )
    least, most = (saved(query, query.uniform(mode)) for mode in ("full", "none"))
    assert plan_of(query, MemoryBudget(fraction=(least + most) / 2 / most)).traced_for == "cuda"
    peak_of(query, query.uniform("selective"))


def test_deepseek_v3_holds_a_quarter_of_what_unfused_attention_would() -> None:
    model, sample = made("DeepseekV3", device="meta"), labelled(torch.zeros(1, 4096, dtype=torch.long))
    setup = Job.of(world_size=2048, precision=Precision("bf16"))
    for device, held in (("h100-80gb", 176.10), ("cpu", 679.23)):
        query = PlanQuery.from_model(model, sample, setup.change(gpu=resolve_device(device)))
        assert saved(query, query.uniform("none")) / 2**30 == pytest.approx(held, abs=0.01)


def test_a_plan_says_what_it_was_traced_for(tmp_path: Path, logs: pytest.LogCaptureFixture) -> None:
    model, x = seeded(_model), torch.randn(2, 32, 64)
    plan = plan_for(model, ac="60%", sample_input=x, gpu="a100-80gb")
    plan.save(tmp_path / "plan.json")
    assert json.loads((tmp_path / "plan.json").read_text())["traced_for"] == "cuda"
    loaded = Plan.load(tmp_path / "plan.json", model)
    assert loaded == plan and plan_for(model, ac="60%", sample_input=x, gpu="cpu").traced_for == "cpu"
    expected = step(model, x)
    apply_plan(model, loaded, device_type="cpu")
    assert "traced for cuda (a100-80gb), and the model runs on cpu" in logs.text
    assert_bitwise(step(model, x), expected)


# --- On a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("name", CALLS)
def test_the_gpu_takes_the_kernel_that_is_traced_for_it(name: str) -> None:
    call = CALLS[name][0]
    q, k, v = (t.cuda().requires_grad_() for t in call.tensors)
    mask = None if call.mask is None else call.mask.cuda()
    real = torch._fused_sdp_choice(
        q, k, v, attn_mask=mask, dropout_p=call.dropout_p, is_causal=call.is_causal, enable_gqa=call.enable_gqa
    )
    assert {MATH: 0, FLASH: 1, EFFICIENT: 2, CUDNN: 3}[backend(call, torch.cuda.get_device_capability())] == real


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_the_gpu_runs_what_was_traced_and_keeps_as_much(dtype: torch.dtype) -> None:
    model, x = _model().to(dtype), torch.randn(2, 32, 64, dtype=dtype)
    traced = trace_model(model, find_layers(model), x, cuda=torch.cuda.get_device_capability())
    mask = torch.ones(32, 32, dtype=torch.bool, device="cuda").tril()
    for trace, given, grad in zip(
        [kind.trace for kind in traced.kinds], (None, mask, None), (False, True, True), strict=True
    ):
        block, real_x = model.layers[0].cuda(), x.cuda().requires_grad_(grad)
        real = record(
            lambda: block(real_x, given),  # noqa: B023
            name="real",
            params=[*block.parameters()],
            inputs={(0, 0): real_x},
            shared=[] if given is None else [given],
        )
        assert computing(trace) == computing(real)
        assert trace.none_bytes == real.none_bytes


@pytest.mark.cuda
@needs_cuda
def test_a_plan_for_the_gpu_at_hand_fits_its_first_forward(logs: pytest.LogCaptureFixture) -> None:
    model, x = seeded(_model).cuda().to(BF16), torch.randn(2, 32, 64, device="cuda", dtype=BF16)
    plan = plan_for(model, ac="60%", sample_input=x, gpu=device_at_hand())
    expected = step(model, x)
    apply_plan(model, plan)
    assert_bitwise(step(model, x), expected)
    assert "runs other operators" not in logs.text and "traced for" not in logs.text
