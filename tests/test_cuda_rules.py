"""What CUDA's kernels check at the call, and those of CPUs and of meta tensors do not: every such operator that this
package calls itself, with its rules, on fake tensors.

Judges: the checks of the kernels in PyTorch's source, named beside each rule (``aten/src/ATen/native/...``, 2.13); for
products also torch's own, which run on fake CUDA tensors.
"""

import ast
import inspect
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from nemo_like import torch_compat
from nemo_like.distributed.context import methods, whole_loss
from nemo_like.distributed.expert import exchange
from nemo_like.fake.run import FakeRun
from nemo_like.losses.heads import LinearHead
from nemo_like.precision import float8_linears
from nemo_like.torch_compat import TorchDispatchMode, fake_tensor_types
from tests.test_cut_attention import without_ranks

HALF = (torch.bfloat16, torch.float16)


def _attention(most: int, wants_half: bool = True) -> Callable[..., None]:
    """transformers/cuda/attention.cu, attention_backward.cu; transformers/cuda/sdp_utils.cpp."""

    def check(*args: Any, **_: Any) -> None:
        states = [arg for arg in args if isinstance(arg, Tensor) and arg.ndim == 4 and arg.shape[-1] > 1]
        assert len({tensor.dtype for tensor in states}) == 1, "of one dtype"
        assert not wants_half or states[0].dtype in HALF, "of 16 bits"
        for tensor in states:
            assert tensor.stride(-1) == 1, "neighbours in memory along a head"
            assert tensor.shape[-1] % 8 == 0 and tensor.shape[-1] <= most, "sizes of a head"
            assert tensor.numel(), "no empty sequence"

    return check


def _grouped(rows: Tensor, weights: Tensor, offs: Tensor, *_: Any, **__: Any) -> None:
    """cuda/GroupedBlas.cpp, GroupedMMUtils.h"""
    assert rows.dtype == weights.dtype == torch.bfloat16 and offs.dtype == torch.int32
    for tensor in (rows, weights):
        strides = sorted(tensor.stride()[-2:])
        assert strides[0] == 1 and strides[1] * tensor.element_size() % 16 == 0, "lines of 16 bytes"
        assert torch_compat.is_fake(tensor) or tensor.data_ptr() % 16 == 0


def _bag(
    weight: Tensor, indices: Tensor, offsets: Tensor, scale: bool = False, mode: int = 0, *rest: Any
) -> None:
    """cuda/EmbeddingBag.cu: _embedding_bag_cuda"""
    assert indices.dtype == offsets.dtype and indices.dtype in (torch.int32, torch.int64), "one type of index"
    assert weight.is_contiguous() and weight.ndim == 2
    weights = rest[1] if len(rest) > 1 else None
    if weights is not None:
        assert mode == 0 and weights.dtype == weight.dtype and weights.ndim == 1, "weights of a sum, of its dtype"


def _sums(total: Tensor, left: Tensor, right: Tensor, *_: Any, out: Tensor | None = None, **__: Any) -> None:
    """cuda/Blas.cpp: addmm with out_dtype"""
    assert left.dtype == right.dtype and left.dtype in HALF
    assert total.dtype in (torch.float32, left.dtype) and (out is None or out.dtype == torch.float32)


def _message(condition: Tensor, message: str) -> None:
    """cuda/TensorCompare.cpp: fewer than 255 characters; mps/operations: fewer than 250."""
    assert condition.numel() == 1 and len(message) < 250


RULES: dict[str, Callable[..., None]] = {
    **{f"_scaled_dot_product_flash_attention{way}": _attention(256) for way in ("", "_backward")},
    **{f"_scaled_dot_product_cudnn_attention{way}": _attention(128) for way in ("", "_backward")},
    **{f"_scaled_dot_product_efficient_attention{way}": _attention(2**16, False) for way in ("", "_backward")},
    "_grouped_mm": _grouped,
    "_embedding_bag_forward_only": _bag,
    "addmm.dtype_out": _sums,
    "_assert_async": _message,
}


class Rules(TorchDispatchMode):
    """Checks each call of an operator in `RULES`; `seen`: how often each ran, `shapes`: of products' left sides."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__module__.startswith("torchao") for kind in types):
            return NotImplemented
        if func.overloadpacket.__name__ in ("_grouped_mm", "_scaled_mm"):  # whose fake kernels check for CUDA alone
            tensors = [arg for arg in args if isinstance(arg, Tensor)]
            self.shapes.append(tuple(tensors[0].shape))
            with fake_tensor_types()[1]():
                there = (torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda") for t in tensors)
                func(*there, *args[len(tensors) :], **(kwargs or {}))
        for name in (func.overloadpacket.__name__, func.__name__):
            if name in RULES:
                self.seen[name] += 1
                RULES[name](*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kernel", ["flash", "cudnn", "mem_efficient"])
@pytest.mark.parametrize("method", ["all_gather", "ring"])
@pytest.mark.parametrize("width", [40, 100, 128])
def test_attention_of_a_part(method: str, kernel: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any rank, with heads of any width, chunks of an odd number of tokens, and gradients in no order of memory."""
    without_ranks(monkeypatch, kernel)
    kept: list[Any] = []
    run = methods.causal_attention._init_fn

    def attend(*args: Any) -> Any:
        kept.append((args, run(*args)))
        return kept[-1][1]

    monkeypatch.setattr(methods, "causal_attention", attend)
    for rank in range(3):
        with FakeRun(), Rules() as rules:
            query, key, value = (torch.empty(2, 14, heads, width, dtype=HALF[0]).transpose(1, 2) for heads in (4, 2, 2))
            parts = SimpleNamespace(method=methods.METHODS[method], rank=rank, ranks=3, group="")
            of = {"query": query, "key": key, "value": value, "parts": parts}
            call: Any = SimpleNamespace(**of, arguments={}, causal=True, fused=True)
            out = methods.causal_attention_of(call)
            assert out is not None and out.shape == query.shape
            (padded, made) = kept.pop()
            for grad in (torch.empty((), dtype=HALF[0]).expand(made[0].shape), made[0].transpose(0, 1).transpose(0, 1)):
                methods.causal_attention_backward._init_fn(grad, *padded[:3], *made, *padded[3:])
        assert set(rules.seen) >= {name for name in RULES if kernel.removeprefix("mem_") in name}


def test_rows_of_experts() -> None:
    """Forward, and the gradients of rows and of weights."""
    for width in (64, 36):  # 72 bytes: the loop
        with fake_tensor_types()[1](), Rules() as rules:
            rows = torch.empty(24, width, dtype=torch.bfloat16, requires_grad=True)
            weights = torch.empty(4, width, 32, dtype=torch.bfloat16, requires_grad=True)
            torch_compat.grouped_mm(rows, weights, (6, 6, 6, 6), torch.empty(4, dtype=torch.int32)).square().sum().backward()
        assert rules.seen["_grouped_mm"] == (3 if width == 64 else 0)


def test_sums_of_a_token_s_rows() -> None:
    """In the dtype of the layer, with the numbers that `route` makes."""
    slot = torch.tensor([0, 2, 1], dtype=torch.int32)
    members = exchange.Members(slot, torch.argsort(slot).to(torch.int32), torch.tensor([0, 1], dtype=torch.int32), 2)
    for dtype in (torch.float32, torch.bfloat16):
        rows, weights = torch.randn(3, 8, dtype=dtype).t().contiguous().t(), torch.rand(3, dtype=dtype)
        with Rules() as rules:
            exchange._summed(rows, weights, members)
            exchange._summed(rows, None, members)
        assert rules.seen["_embedding_bag_forward_only"] == 2


@pytest.mark.parametrize("release", [None, "6.4"])
def test_sums_of_a_head_s_gradient(release: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """ROCm's product has no float32 sum of 16 bits (RuntimeError: gemm input type at::BFloat16 and output type float is
    not supported for ROCm): a product of float32 there."""
    monkeypatch.setattr(torch.version, "hip", release)
    with torch.device("meta"), Rules() as rules:
        head = torch.nn.Linear(32, 128, bias=False, dtype=torch.bfloat16)
        gradient, hidden = (torch.empty(10, size, dtype=torch.bfloat16) for size in (128, 32))
        LinearHead(head, list(head.parameters()))._add_outer(torch.empty(128, 32), gradient, hidden)
    assert rules.seen["addmm.dtype_out"] == (release is None)


def test_grouped_products_are_not_for_rocm(monkeypatch: pytest.MonkeyPatch) -> None:
    """An MI300X answers with capability (9, 4)."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 4))
    with fake_tensor_types()[1]():
        rows, weights = (torch.empty(*size, dtype=torch.bfloat16, device="cuda") for size in ((8, 64), (4, 64, 32)))
        assert torch_compat._has_grouped_kernel(rows, weights)
        monkeypatch.setattr(torch.version, "hip", "6.4")
        assert not torch_compat._has_grouped_kernel(rows, weights)


def test_a_message_that_cuda_refuses_at_the_call_is_refused_on_every_device() -> None:
    for device in ("cpu", "meta"):
        with pytest.raises(ValueError, match="message has 250 characters"):
            torch_compat.stop_unless(torch.ones((), dtype=torch.bool, device=device), "x" * 250)
    tree = ast.parse(inspect.getsource(whole_loss))
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "stop_unless"]
    assert len(calls) == 2
    for call in calls:  # a literal by its name
        assert len(getattr(whole_loss, ast.unparse(call.args[1]))) < 250


@pytest.mark.parametrize(
    ("word", "sharded"), [("fp8", False), ("fp8-rowwise", False), ("fp8-gather", False), ("fp8-gather", True)]
)
def test_float8_takes_any_number_of_tokens(word: str, sharded: bool) -> None:
    """The kernel wants a multiple of 16 along the side that is summed over, which is tokens in a weight's gradient."""
    with fake_tensor_types()[1]():
        layer = torch.nn.Sequential(torch.nn.Linear(64, 128, bias=False, dtype=torch.bfloat16))
        float8_linears([layer], word, "cuda", sharded=sharded)
        x = torch.randn(1, 1001, 64, dtype=torch.bfloat16, requires_grad=True)
        with Rules() as rules:
            layer(x).sum().backward()
    assert rules.shapes == [(1001, 64), (1001, 128), (128, 1008)]  # output, gradient of the input, of the weight


def test_float8_under_tp_takes_the_linears_whose_parts_fit() -> None:
    layer = torch.nn.Sequential(torch.nn.Linear(64, 48), torch.nn.Linear(64, 96))
    float8_linears([layer], "fp8", "cuda", tp=2)
    # Parts of 24, which 16 does not divide.
    assert [type(linear).__name__ for linear in layer] == ["Linear", "Float8Linear"]
