"""CPU tensors run the operators that CUDA would: for tracing a GPU's operators where there is none.

A few composite operators are other kernels on CUDA than on the CPU: attention, dropout, RMS norm, batch norm, softmax
of float16; and autocast there keeps other operators in float32. `CudaOps` answers those calls with CUDA's operators,
whose shapes and gradients PyTorch knows without a GPU. Everything else is the same on both.
"""

import functools
import types
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from nemo_like._util.log import say_once
from nemo_like._util.tensors import map_tensors, tensors_in
from nemo_like.torch_compat import SDP_KERNELS, SWITCH_READERS, below_autograd, sdp_priority

_HALF = (torch.float16, torch.bfloat16)


class CudaOps(TorchFunctionMode):
    """Enter it around forward passes on fake CPU tensors; `capability` is the compute capability of the GPU."""

    def __init__(self, capability: tuple[int, int] = (8, 0)) -> None:
        super().__init__()
        self.capability = capability

    def __torch_function__(self, func: Any, types_: object, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        name = _NAMES.get(func)
        if name is not None and torch.is_autocast_enabled("cpu"):
            args, kwargs = _in_float32(name, args, kwargs)
        function = _OWN.get(func)
        if function is not None:
            return function(func, *args, **kwargs)
        if func in _OTHER_KERNELS:
            say_once(
                f"torch.{func.__name__} is one cuDNN kernel on CUDA; it is planned as the operators of the CPU, so bytes "
                "and decisions for it are those of the CPU."
            )
        if not types_ and isinstance(func, types.FunctionType) and func.__module__ == F.__name__:
            with self:  # it may call one of these in turn
                return _body(func)(*args, **kwargs)
        return func(*args, **kwargs)

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if torch.is_autocast_enabled("cpu"):
            lower = functools.partial(_cast, dtype=torch.get_autocast_dtype("cpu"))
            query, key, value, attn_mask = map_tensors(lower, (query, key, value, attn_mask))
        call = Call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        with self:  # the unfused form draws dropout
            return attend(call, self.capability)


@functools.cache
def _body(func: types.FunctionType) -> Callable[..., Any]:
    """A function of `torch.nn.functional` that no longer tests whether it is overridden: that was tested already."""
    never = {name: lambda *_: False for name in func.__globals__ if name.startswith("has_torch_function")}
    copied = types.FunctionType(
        func.__code__, {**func.__globals__, **never}, func.__name__, func.__defaults__, func.__closure__
    )
    copied.__kwdefaults__ = func.__kwdefaults__
    return copied


# --- Operators that are another kernel on CUDA ------------------------------------------------------------------------


def _dropout(func: Any, input: Tensor, p: float, train: bool) -> Tensor:
    if train and 0 < p < 1 and input.numel() > 0:
        return torch.ops.aten.native_dropout(input, p, train)[0]
    return func(input, p, train)


def _rms_norm(
    func: object, input: Tensor, normalized_shape: Iterable[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    return _FusedRMSNorm.apply(input, tuple(normalized_shape), weight, eps)[0]


class _FusedRMSNorm(torch.autograd.Function):
    """`aten._fused_rms_norm` keeps its input, its weight, and one number per row (float32 for 16-bit inputs)."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, shape: tuple[int, ...], weight: Tensor | None, eps: float | None) -> Any:
        with below_autograd():
            out, rstd = torch.ops.aten._fused_rms_norm(input, shape, weight, eps)
        ctx.save_for_backward(input, weight, rstd)
        ctx.normalized, ctx.wanted = shape, [input.requires_grad, weight is not None and weight.requires_grad]
        ctx.mark_non_differentiable(rstd)
        ctx.set_materialize_grads(False)
        return out, rstd

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: object) -> Any:
        input, weight, rstd = ctx.saved_tensors
        grads = torch.ops.aten._fused_rms_norm_backward(grad, input, ctx.normalized, rstd, weight, ctx.wanted)
        return grads[0], None, grads[1], None


def _batch_norm(
    func: Any,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    ours = training and cudnn_enabled and input.dim() > 2 and weight is not None and bias is not None
    if not ours or input.dtype not in (torch.float32, torch.float16):
        return func(input, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled)
    return torch.ops.aten.cudnn_batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps)[0]


def _softmax(op: Any, func: Any, input: Tensor, dim: int, dtype: torch.dtype | None = None, **kwargs: Any) -> Tensor:
    if input.dtype == torch.float16 and dtype == torch.float32:
        return op(input, dim, True)
    return func(input, dim, dtype=dtype, **kwargs) if dtype is not None else func(input, dim, **kwargs)


_OWN: dict[Any, Callable[..., Any]] = {
    torch.dropout: _dropout,
    torch.rms_norm: _rms_norm,
    torch.batch_norm: _batch_norm,
    **dict.fromkeys((torch.softmax, Tensor.softmax), functools.partial(_softmax, torch.ops.aten._softmax)),
    **dict.fromkeys((torch.log_softmax, Tensor.log_softmax), functools.partial(_softmax, torch.ops.aten._log_softmax)),
}
_OTHER_KERNELS = frozenset((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu))


# --- Autocast: the lists of ``ATen/autocast_mode.h`` ------------------------------------------------------------------

_FLOAT32 = (
    "acos",
    "asin",
    "cosh",
    "erfinv",
    "exp",
    "expm1",
    "log",
    "log10",
    "log2",
    "log1p",
    "reciprocal",
    "rsqrt",
    "sinh",
    "tan",
    "pow",
    "softplus",
    "layer_norm",
    "native_layer_norm",
    "rms_norm",
    "group_norm",
    "cosine_similarity",
    "dist",
    "cdist",
    "renorm",
    "logsumexp",
    "norm",
    "cross_entropy",
)
_WITH_DTYPE = ("softmax", "log_softmax", "cumsum", "cumprod", "prod", "sum")
_NAMES: dict[Any, str] = {
    function: name
    for name in (*_FLOAT32, *_WITH_DTYPE)
    for owner in (torch, Tensor, F)
    if (function := getattr(owner, name, None)) is not None
} | {Tensor.__pow__: "pow"}


def autocast_of_cuda_on_cpu() -> AbstractContextManager[object]:
    """Let ``torch.autocast("cuda")`` of a model's own code cast the CPU tensors that are in the place of CUDA's.

    Without a GPU torch turns it off, and all that the model casts would be planned in float32.
    """
    before = torch.autocast.__init__

    def init(
        self: torch.autocast, device_type: str, dtype: torch.dtype | None = None, *args: Any, **kwargs: Any
    ) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", torch.get_autocast_dtype("cuda") if dtype is None else dtype
        before(self, device_type, dtype, *args, **kwargs)

    return patch.object(torch.autocast, "__init__", init)


def _in_float32(name: str, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Return the arguments of `name` as CUDA's autocast casts them."""
    if not any(t.dtype in _HALF for t in tensors_in((args, kwargs))):
        return args, kwargs
    if name in _WITH_DTYPE:
        has_dtype = kwargs.get("dtype") is not None or any(isinstance(a, torch.dtype) for a in args)
        return args, kwargs if has_dtype else {**kwargs, "dtype": torch.float32}
    return map_tensors(functools.partial(_cast, dtype=torch.float32), (args, kwargs))


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    eligible = tensor.is_floating_point() and tensor.dtype != torch.float64
    return tensor.to(dtype) if eligible and tensor.dtype != dtype else tensor


# CUDA's kernel for attention, and the operators of `scaled_dot_product_attention` around it, on CPU tensors.
#
# The rules are those of PyTorch's ``sdp_utils.cpp`` (releases 2.13 to 2.15) for dense tensors on NVIDIA GPUs from compute
# capability 8.0 on. Switches (`torch.nn.attention.sdpa_kernel`) count as they are when attention is called.

FLASH, EFFICIENT, MATH, CUDNN = _DEFAULT = tuple(SDP_KERNELS.values())
# From the release of cuDNN after this one on, PyTorch tries it first on Hopper and Blackwell.
_CUDNN_FIRST = 91500
_RELEASE = tuple(int(part) for part in torch.__version__.split(".")[:2])
_EFFICIENT_GROUPS = (2, 15)  # The first release known to give grouped queries to the memory-efficient kernel.


@dataclass(frozen=True)
class Call:
    """One call of `scaled_dot_product_attention`. Query, key, value ``(B, H, S, D)``."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value."""
        return self.query, self.key, self.value

    @property
    def trains(self) -> bool:
        """Return whether a backward will follow."""
        return torch.is_grad_enabled() and any(t.requires_grad for t in self.tensors)


def backend(call: Call, capability: tuple[int, int]) -> str:
    """``"flash"``, ``"mem_efficient"``, ``"cudnn"`` or ``"math"``: the kernel on a GPU of this compute capability."""
    able = {FLASH: _flash, EFFICIENT: _efficient, CUDNN: _cudnn, MATH: lambda *_: True}
    for name in _order(capability):
        if SWITCH_READERS[name]() and able[name](call, capability):
            return name
    raise RuntimeError(
        "No attention kernel that is switched on takes this call on CUDA (see torch.nn.attention.sdpa_kernel); switch on "
        "one more, the math kernel for example."
    )


def attend(call: Call, capability: tuple[int, int]) -> Tensor:
    """The output ``(B, H, S, D_v)``, computed by the operators that CUDA would run."""
    name = backend(call, capability)
    mask = call.mask
    if mask is not None and mask.dtype == torch.bool:
        zero = torch.scalar_tensor(0.0, dtype=call.query.dtype, device=mask.device)
        mask = torch.where(mask.logical_not(), float("-inf"), zero)
    rest = dict(scale=call.scale)
    if name == FLASH:
        padded = [_padded(t) for t in call.tensors]
        rest["scale"] = call.query.shape[-1] ** -0.5 if call.scale is None else call.scale
        out = torch.ops.aten._scaled_dot_product_flash_attention(
            *padded, call.dropout_p, call.is_causal, False, **rest
        )[0]
        return out if out.shape[-1] == call.query.shape[-1] else out[..., : call.query.shape[-1]]
    if name == EFFICIENT:
        if mask is not None:
            mask = _aligned(mask).expand(*call.query.shape[:3], call.key.shape[2])
        return torch.ops.aten._scaled_dot_product_efficient_attention(
            *call.tensors, mask, call.trains, call.dropout_p, call.is_causal, **rest
        )[0]
    if name == CUDNN:
        return torch.ops.aten._scaled_dot_product_cudnn_attention(
            *call.tensors, mask, call.trains, call.dropout_p, call.is_causal, False, **rest
        )[0]
    if call.dropout_p > 0:
        return _unfused(call, mask)
    return torch.ops.aten._scaled_dot_product_attention_math(
        *call.tensors, mask, 0.0, call.is_causal, None, **rest, enable_gqa=call.enable_gqa
    )[0]


def _unfused(call: Call, mask: Tensor | None) -> Tensor:
    """As PyTorch's math kernel; its dropout is to be seen from Python, for on CUDA that is a kernel of its own."""
    dtype = call.query.dtype
    raised = dtype in _HALF and not torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    query, key, value = (t.float() if raised else t for t in call.tensors)
    factor = (query.shape[-1] ** -0.5 if call.scale is None else call.scale) ** 0.5
    if call.is_causal:
        mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        mask = torch.where(mask.logical_not(), float("-inf"), torch.scalar_tensor(0.0, dtype=query.dtype))
    query = query * factor
    if call.enable_gqa and key.shape[-3] != query.shape[-3]:
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    scores = torch.matmul(query, key.transpose(-2, -1) * factor)
    scores = scores if mask is None else scores + mask
    weights = torch.dropout(torch.ops.aten._safe_softmax(scores, -1), call.dropout_p, True)
    return torch.matmul(weights, value).to(dtype)


def _order(capability: tuple[int, int]) -> tuple[str, ...]:
    order = tuple(SDP_KERNELS[number] for number in sdp_priority() if number in SDP_KERNELS)
    version = torch.backends.cudnn.version() if torch.version.cuda is not None else None
    # A torch without CUDA plans for one with it: the wheels bring a cuDNN that is asked first.
    prefers = capability[0] in (9, 10) and (version is None or version > _CUDNN_FIRST)
    return (CUDNN, FLASH, EFFICIENT, MATH) if prefers and order == _DEFAULT else order


def _fits_all(call: Call, *, groups: bool) -> bool:
    """Return whether the call meets the requirements of every fused kernel."""
    query, key, value = call.tensors
    rows = all(t.dim() == 4 and t.shape[2] > 0 and t.stride(-1) == 1 for t in call.tensors)
    if not rows or not query.shape[0] == key.shape[0] == value.shape[0]:
        return False
    if call.enable_gqa and groups:
        return key.shape[1] == value.shape[1] and query.shape[1] % key.shape[1] == 0
    return query.shape[1] == key.shape[1] == value.shape[1]


def _flash(call: Call, capability: tuple[int, int]) -> bool:
    query, key, value = call.tensors
    head = query.shape[-1]
    if call.mask is not None or query.dtype not in _HALF or head > 256 or not head == key.shape[-1] == value.shape[-1]:
        return False
    small = (8, 6) <= capability <= (8, 9) or capability in ((12, 0), (12, 1))
    if small and call.trains and head > 192 and (call.dropout_p > 0 or head <= 224):
        return False
    return (not call.is_causal or query.shape[2] == key.shape[2]) and _fits_all(call, groups=True)


def _efficient(call: Call, capability: tuple[int, int]) -> bool:
    query, key, value = call.tensors
    if query.dtype not in (*_HALF, torch.float32):
        return False
    step = 16 // query.element_size()
    if query.shape[-1] != key.shape[-1] or query.shape[-1] % step or value.shape[-1] % step:
        return False
    return _fits_all(call, groups=_RELEASE >= _EFFICIENT_GROUPS)


def _cudnn(call: Call, capability: tuple[int, int]) -> bool:
    query, _, value = call.tensors
    heads = query.shape[-1], value.shape[-1]
    most = 192 if capability[0] in (9, 10) and heads == (192, 128) else 128
    if query.dtype not in _HALF or max(heads) > most or any(head % 8 for head in heads) or call.key.shape[2] == 1:
        return False
    if call.dropout_p * 16 != int(call.dropout_p * 16) or (call.dropout_p and query.shape[2] == 1):
        return False
    fits = call.mask is None or (not call.mask.requires_grad and call.mask.dim() in (2, 4))
    return fits and _fits_all(call, groups=True)


def _padded(tensor: Tensor) -> Tensor:
    """With the last dim in whole steps of 8, as the flash kernel reads it."""
    short = -tensor.shape[-1] % 8
    return F.pad(tensor, (0, short)) if short else tensor


def _aligned(mask: Tensor) -> Tensor:
    if mask.stride(-1) == 1 and all(stride % 8 == 0 for stride in mask.stride()[:-1]):
        return mask
    return F.pad(mask, (0, 8 - mask.shape[-1] % 8))[..., : mask.shape[-1]]
