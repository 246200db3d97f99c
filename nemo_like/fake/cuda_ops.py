"""CPU tensors run the operators that CUDA would: for tracing what a GPU will do where there is none.

A few composite operators are other kernels on CUDA than on the CPU: attention, dropout, RMS norm, batch norm, softmax
of float16; and autocast there keeps other operators in float32. `CudaOps` answers those calls with CUDA's operators,
whose shapes and gradients PyTorch knows without a GPU. Everything else is the same on both.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from nemo_like._util.log import say_once
from nemo_like._util.tensors import map_tensors, tensors_in
from nemo_like.fake.cuda_attention import Call, attend
from nemo_like.torch_compat import below_autograd

_HALF = (torch.float16, torch.bfloat16)


class CudaOps(TorchFunctionMode):
    """Enter it around forward passes on fake CPU tensors; `capability` is the compute capability of the GPU."""

    def __init__(self, capability: tuple[int, int] = (8, 0)) -> None:
        super().__init__()
        self.capability = capability

    def __torch_function__(self, func: Any, types_: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        name = _NAMES.get(func)
        if name is not None and _autocast_is_on():
            args, kwargs = _in_float32(name, args, kwargs)
        own = _OWN.get(func)
        if own is not None:
            return own(func, *args, **kwargs)
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
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        if _autocast_is_on():
            lower = functools.partial(_cast, dtype=torch.get_autocast_dtype("cpu"))
            query, key, value, attn_mask = map_tensors(lower, (query, key, value, attn_mask))
        call = Call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        with self:  # the unfused form draws dropout
            return attend(call, self.capability)


@functools.cache
def _body(func: types.FunctionType) -> Callable[..., Any]:
    """A function of `torch.nn.functional` that no longer asks whether somebody overrides it: that was asked already."""
    never = {name: _never for name in func.__globals__ if name.startswith("has_torch_function")}
    copied = types.FunctionType(
        func.__code__, {**func.__globals__, **never}, func.__name__, func.__defaults__, func.__closure__
    )
    copied.__kwdefaults__ = func.__kwdefaults__
    return copied


def _never(*_: Any) -> bool:
    return False


# --- Operators that are another kernel on CUDA ------------------------------------------------------------------------


def _dropout(func: Any, input: Tensor, p: float, train: bool) -> Tensor:
    if train and 0 < p < 1 and input.numel() > 0:
        return torch.ops.aten.native_dropout(input, p, train)[0]
    return func(input, p, train)


def _rms_norm(
    func: Any, input: Tensor, normalized_shape: Iterable[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    shape = tuple(normalized_shape)
    return _FusedRMSNorm.apply(input, shape, weight, eps)[0]


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
    def backward(ctx: Any, grad: Tensor, _: Any) -> Any:
        input, weight, rstd = ctx.saved_tensors
        grads = torch.ops.aten._fused_rms_norm_backward(grad, input, ctx.normalized, rstd, weight, ctx.wanted)
        return grads[0], None, grads[1], None


def _batch_norm(
    func: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None,
    running_var: Tensor | None, training: bool, momentum: float, eps: float, cudnn_enabled: bool,
) -> Tensor:  # fmt: skip
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
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh",
    "tan", "pow", "softplus", "layer_norm", "native_layer_norm", "rms_norm", "group_norm", "cosine_similarity", "dist",
    "cdist", "renorm", "logsumexp", "norm", "cross_entropy",
)  # fmt: skip
_WITH_DTYPE = ("softmax", "log_softmax", "cumsum", "cumprod", "prod", "sum")
_NAMES: dict[Any, str] = {
    found: name
    for name in (*_FLOAT32, *_WITH_DTYPE)
    for owner in (torch, Tensor, F)
    if (found := getattr(owner, name, None)) is not None
} | {Tensor.__pow__: "pow"}


def _autocast_is_on() -> bool:
    return torch.is_autocast_enabled("cpu")


def _in_float32(name: str, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """What CUDA's autocast makes of the arguments of `name`."""
    lower = any(t.dtype in _HALF for t in tensors_in((args, kwargs)))
    if not lower:
        return args, kwargs
    if name in _WITH_DTYPE:
        given = kwargs.get("dtype") is not None or any(isinstance(a, torch.dtype) for a in args)
        return args, kwargs if given else {**kwargs, "dtype": torch.float32}
    raised: tuple[tuple, dict[str, Any]] = map_tensors(functools.partial(_cast, dtype=torch.float32), (args, kwargs))
    return raised


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    eligible = tensor.is_floating_point() and tensor.dtype != torch.float64
    return tensor.to(dtype) if eligible and tensor.dtype != dtype else tensor
