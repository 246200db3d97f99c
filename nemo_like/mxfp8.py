"""Linears that multiply in MXFP8, by torchao: 8 bits a value, and one scale for 32 values that are multiplied in a row.

Autograd saves the input and the weight as they are, in bfloat16; each matmul casts both of its operands. The format is that
of the OCP Microscaling Formats (MX) Specification, 2023.

On a GPU a matmul with its casts is one operator here, and so are both matmuls of backward, because their kernels exist only
on GPUs of compute capability 10.0: a plan counts their bytes by rule. The emulation consists of PyTorch's own operators,
which are planned like any others.
"""

import functools
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from nemo_like._util.extras import require
from nemo_like._util.tensors import autocast_dtype
from nemo_like.activation_checkpointing.ops import OpFacts, declare, linear

TORCHAO = "torchao.prototype.moe_training.mxfp8_linear"
BLOCK = 32  # Values with one scale.


def _torchao() -> Any:
    return require(TORCHAO, "fp8", "for precision='mxfp8'")


def _multiply() -> Callable[..., Tensor]:
    """Return torchao's function of rows (R, K) and a weight (N, K), which its public classes call."""
    function: Callable[..., Tensor] = getattr(_torchao(), "_to_mxfp8_then_scaled_mm")  # noqa: B009 - no public name
    return function


def _options(kernels: str) -> dict[str, Any]:
    """Return torchao's options; kernels: ``"auto"``, those of the GPU, or ``"emulated"``. Scales are rounded up, as in its
    recipes ``mxfp8_rceil`` and ``mxfp8_emulated_rceil``."""
    mx = _torchao()
    return {
        "kernel_preference": mx.KernelPreference(kernels),
        "scale_calculation_mode": mx.ScaleCalculationMode.RCEIL,
        "wgrad_with_hp": False,
    }


@torch.library.custom_op("nemo_like::mxfp8_linear", mutates_args=())
def mxfp8_linear(rows: Tensor, weight: Tensor, kernels: str) -> Tensor:
    """Return (R, N) of rows (R, K) and a weight (N, K); 32 divides R, K and N. `kernels`: as for `_options`."""
    return _multiply()(rows, weight, **_options(kernels))


@torch.library.custom_op("nemo_like::mxfp8_linear_backward", mutates_args=())
def mxfp8_linear_backward(grad: Tensor, rows: Tensor, weight: Tensor, kernels: str) -> tuple[Tensor, Tensor]:
    """Return the gradients of the rows (R, K) and of the weight (N, K), by the gradient (R, N) of the output."""
    mx, value = _torchao(), torch.float8_e4m3fn
    context = SimpleNamespace(
        saved_tensors=(rows, weight),
        **dict.fromkeys(("in_elem_dtype", "w_elem_dtype", "grad_elem_dtype"), value),
        block_size=BLOCK,
        mxfp8_dim0_cast_kernel_choice=mx.MXFP8Dim0CastKernelChoice.TRITON,
        mxfp8_dim1_cast_kernel_choice=mx.MXFP8Dim1CastKernelChoice.CUDA,
        **_options(kernels),
    )
    of_rows, of_weight, *_ = mx.mx_mm.backward(context, grad)
    return of_rows, of_weight


@mxfp8_linear.register_fake
def _(rows: Tensor, weight: Tensor, kernels: str) -> Tensor:
    return rows.new_empty((rows.shape[0], weight.shape[0]))


@mxfp8_linear_backward.register_fake
def _(grad: Tensor, rows: Tensor, weight: Tensor, kernels: str) -> tuple[Tensor, Tensor]:
    return torch.empty_like(rows), torch.empty_like(weight)


def _save(ctx: Any, inputs: tuple[Any, ...], output: object) -> None:
    rows, weight, ctx.kernels = inputs
    ctx.save_for_backward(rows, weight)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return *mxfp8_linear_backward(grad.contiguous(), *ctx.saved_tensors, ctx.kernels), None


mxfp8_linear.register_autograd(_backward, setup_context=_save)


def _cast(*operands: Tensor) -> int:
    """Return the bytes of `operands` in MXFP8: one a value, and one for each block's scale."""
    return sum(tensor.numel() + tensor.numel() // BLOCK for tensor in operands)


# A cast reads two bytes and writes one.
declare(
    "nemo_like.mxfp8_linear.default",
    OpFacts(saved=True, alternates=True, flops=linear, scratch=lambda args, out: _cast(args[0], args[1]), casts=1.5),
)
# torchao casts the gradient along both dimensions, and frees all four operands at the end.
declare(
    "nemo_like.mxfp8_linear_backward.default",
    OpFacts(scratch=lambda args, out: _cast(args[0], args[0], args[1], args[2])),
)


class MXFP8Linear(nn.Linear):
    """A linear whose three matmuls are in MXFP8. Rows of its input, tokens, may be any number: zeros are added up to a
    multiple of 32, since the gradient of the weight has its blocks along them, and results of zeros are left out.
    """

    emulate: Callable[[Tensor, Tensor], Tensor] | None
    """torchao's emulation, which takes rows (R, K) and the weight (N, K); None: the operator of a GPU."""

    def forward(self, input: Tensor) -> Tensor:
        """Return (..., N) for an input (..., K), in the input's dtype; under autocast in that of autocast."""
        input, weight = (each.to(autocast_dtype(each)) for each in (input, self.weight))
        multiply = self._split if isinstance(weight, DTensor) else self._multiply
        output = multiply(input, weight)
        return output if self.bias is None else output + self.bias.to(output.dtype)

    def _multiply(self, input: Tensor, weight: Tensor) -> Tensor:
        rows = input.reshape(-1, input.shape[-1]).contiguous()
        count = rows.shape[0]
        if count % BLOCK:
            rows = F.pad(rows, (0, 0, 0, -count % BLOCK))
        output = mxfp8_linear(rows, weight, "auto") if self.emulate is None else self.emulate(rows, weight)
        return output[:count].reshape(*input.shape[:-1], weight.shape[0])

    def _split(self, input: Any, weight: Any) -> Tensor:
        """Multiply this rank's part of `weight`, which tensor parallelism has split, with its part of `input`: blocks do
        not cross ranks, so the values are those of the whole matmul."""
        last, (split,) = Shard(input.ndim - 1), weight.placements
        of_input: Placement = last if split == Shard(1) else Replicate()
        of_grad: Placement = Partial() if split == Shard(0) else of_input
        of_output = last if split == Shard(0) else Partial() if split == Shard(1) else Replicate()
        part = input.redistribute(placements=[of_input]).to_local(grad_placements=[of_grad])
        output = self._multiply(part, weight.to_local())
        return DTensor.from_local(output, weight.device_mesh, [of_output], run_check=False)


def has_sides_of(linear: nn.Linear, size: int) -> bool:
    """Return whether both sides of the weight are multiples of `size`."""
    return linear.in_features % size == linear.out_features % size == 0


def mxfp8_linears(layers: Iterable[nn.Module], *, emulated: bool, ranks: int = 1) -> None:
    """Have the linears in `layers` multiply in MXFP8.

    In place: modules and parameters stay the same objects, and a linear gets another class. A subclass of `nn.Linear`
    stays as it is, and so does a linear with a side that `ranks` parts of whole blocks of 32 do not divide.

    Args:
        emulated: PyTorch's operators in the place of the kernels of a GPU.
        ranks: ranks that tensor parallelism will split a side over.
    """
    emulate = functools.partial(_multiply(), **_options("emulated"))
    for layer in layers:
        for module in layer.modules():
            if type(module) is nn.Linear and has_sides_of(module, BLOCK * ranks):
                module.__class__ = MXFP8Linear
                module.emulate = emulate if emulated else None  # type: ignore[assignment]
