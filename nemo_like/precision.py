"""Mixed precision where FSDP2 is not there to cast: autocast."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import RowwiseParallel

from nemo_like._util.extras import require
from nemo_like._util.forwards import Forward, Place
from nemo_like._util.log import say_once
from nemo_like.job import Job
from nemo_like.mxfp8 import TORCHAO, has_sides_of, mxfp8_linears
from nemo_like.options.parallel import MXFP8, Precision


def check_autocast(model: nn.Module, param_dtype: torch.dtype | None) -> None:
    """Raise ValueError where autocast cannot make `model` compute in `param_dtype`, as FSDP2's cast could.

    Autocast lowers to bfloat16 or float16 and nothing else; it would leave the model as it is, silently.
    """
    if param_dtype in (None, torch.bfloat16, torch.float16):
        return
    stored = {p.dtype for p in model.parameters() if p.is_floating_point()} - {param_dtype}
    if param_dtype is not torch.float32 or stored:
        raise ValueError(
            f"param_dtype is {param_dtype}, and without FSDP2 the model computes under autocast, which lowers float32 to "
            f"bfloat16 or float16 only; parameters are {', '.join(sorted(map(str, stored))) or param_dtype}. Leave "
            f"param_dtype out and convert the model first: model.to({param_dtype})."
        )


def check_four_bits(model: nn.Module, job: Job) -> None:
    """Raise ValueError where `job` would read the bytes of weights in 4 bits (bitsandbytes) as numbers of a matrix."""
    packed = {name: p for name, p in model.named_parameters() if hasattr(p, "quant_state")}
    dtype = None if job.fsdp is None else job.param_dtype
    cast = [name for name, p in packed.items() if p.is_floating_point() and dtype not in (None, p.dtype)]
    matmuls = job.precision.matmuls
    for refused, names, why in (
        (job.tp.size > 1, packed, f"tp={job.tp.size} would split its packed bytes. Use dp_shard, cp or pp."),
        (matmuls is not None, packed, f"precision={matmuls!r} would cast its packed bytes. Use precision='bf16'."),
        (True, cast, f"FSDP2 would cast its packed bytes. Load the model with bnb_4bit_quant_storage={dtype}."),
    ):
        if refused and names:
            raise ValueError(f"{next(iter(names))!r} has 4 bits (bitsandbytes), and {why}")


class Autocast(Forward):
    """A model whose forward runs under autocast to `compute`, and whose floating-point outputs are cast to `output`.

    Parameters keep their dtype. Ops that autocast keeps in float32 (softmax, losses, most norms) stay there: this is more
    precise than FSDP2's cast of everything. Does nothing where both dtypes are None.
    """

    place, word = Place.AUTOCAST, "autocast"

    def __init__(
        self, module: nn.Module, device_type: str, compute: torch.dtype | None, output: torch.dtype | None
    ) -> None:
        super().__init__(module)
        lowers = compute is not None and compute is not torch.float32
        self.context: dict[str, Any] = dict(device_type=device_type, dtype=compute if lowers else None, enabled=lowers)
        self.output = output

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward under autocast."""
        with torch.autocast(**self.context):
            output = self.call(*args, **kwargs)
        return output if self.output is None else _cast(output, self.output)

    def put(self) -> Self:
        """Put it in place, if it does something."""
        return super().put() if self.context["enabled"] or self.output is not None else self


def _cast(output: object, dtype: torch.dtype) -> Any:
    """`output` with every floating-point tensor in it as `dtype`; dictionaries (ModelOutput too) are changed in place."""
    if isinstance(output, torch.Tensor):
        return output.to(dtype) if output.is_floating_point() else output
    if isinstance(output, dict):
        for key in list(output):
            output[key] = _cast(output[key], dtype)
        return output
    if isinstance(output, tuple | list):
        items = [_cast(item, dtype) for item in output]
        return type(output)(*items) if hasattr(output, "_fields") else type(output)(items)
    return output


# Matmuls of the layers' linears in float8, by torchao: ``precision="fp8"`` adds them to bfloat16, ``"mxfp8"`` in MXFP8.

_RECIPES = {"fp8": "tensorwise", "fp8-rowwise": "rowwise", "fp8-gather": "tensorwise"}


# Compute capability of the first GPUs that multiply in a format; float8 and MXFP8 can be emulated elsewhere.
_LEAST = {"mxfp8": (10, 0), "mxfp8-emulated": (0, 0)}


def check_float8(matmuls: str | None) -> None:
    """Raise MissingExtraError where they are asked for and torchao is not installed."""
    if matmuls is not None:
        require(TORCHAO if matmuls in MXFP8 else "torchao.float8", "fp8", f"for precision={matmuls!r}")


def check_capability(matmuls: str | None, name: str, capability: tuple[int, int] | None) -> None:
    """Raise ValueError where a device does not multiply in the format, and it is not emulated there.

    Args:
        matmuls: as `nemo_like.options.Precision.matmuls`.
        name: of the device.
        capability: compute capability; None: no GPU, so that ``"fp8"`` is emulated, and ``"mxfp8"`` is refused.
    """
    least = _LEAST.get(matmuls or "", (8, 9))
    if matmuls is None or (capability is None and matmuls != "mxfp8") or (capability or (0, 0)) >= least:
        return
    has = f"compute capability {capability[0]}.{capability[1]}" if capability else "no kernels for it"
    other = " or, for its numbers and not for its speed, precision='mxfp8-emulated'" if matmuls == "mxfp8" else ""
    raise ValueError(
        f"precision is {matmuls!r}, and {name} has {has}; products in {'MXFP8' if other else 'float8'} need "
        f"{least[0]}.{least[1]}. Use precision='bf16'{other}."
    )


def check_capability_of(place: torch.device, matmuls: str | None) -> None:
    """Raise ValueError where this machine's device at `place` does not multiply in MXFP8, and it is requested."""
    if matmuls == "mxfp8":
        capability = torch.cuda.get_device_capability(place) if place.type == "cuda" else None
        check_capability(matmuls, place.type, capability)


def effective_matmuls(precision: Precision, *, sharded: bool) -> str | None:
    """`precision.matmuls`, or ``"fp8"`` for ``"fp8-gather"`` where FSDP2 shards nothing, so that nothing is gathered."""
    return "fp8" if precision.matmuls == "fp8-gather" and not sharded else precision.matmuls


def float8_linears(
    layers: Sequence[nn.Module], matmuls: str, device_type: str, *, sharded: bool = False, tp: int = 1
) -> None:
    """Replace the linears in `layers` by torchao's, which multiply in float8 with scales of each call's own.

    In place: parameters keep their names, and stay the same unless they are to be gathered in float8. Linears with a side
    that is not a multiple of 16 on each of `tp` ranks, which the kernels need, stay as they are. Tokens may be any number:
    they are padded.

    Args:
        layers: the repeated layers; embedding and head are left alone.
        matmuls: ``"fp8"``, one scale per tensor, ``"fp8-rowwise"``, one per row, or ``"fp8-gather"``, as ``"fp8"`` with
            weights that FSDP2 gathers in float8; ``"mxfp8"`` and ``"mxfp8-emulated"``: as `mxfp8_linears`.
        device_type: where the model will run. Without a GPU float8 is emulated: the numbers, not the speed.
        sharded: FSDP2 will shard the layers; elsewhere nothing is gathered, and ``"fp8-gather"`` is ``"fp8"``.
        tp: ranks that will split the weights of a layer.
    """
    if matmuls in MXFP8:
        return mxfp8_linears(layers, emulated=matmuls != "mxfp8", ranks=tp)
    float8: Any = require("torchao.float8", "fp8", f"for precision={matmuls!r}")
    config = float8.Float8LinearConfig.from_recipe_name(_RECIPES[matmuls])
    if device_type != "cuda":
        config = dataclasses.replace(config, emulate=True)
    if matmuls == "fp8-gather" and sharded:
        config = dataclasses.replace(config, enable_fsdp_float8_all_gather=True)
    elif matmuls == "fp8-gather":
        say_once("precision='fp8-gather' was asked for; nothing is sharded, so nothing is gathered: as 'fp8'.")

    for layer in layers:
        float8.convert_to_float8_training(
            layer, config=config, module_filter_fn=lambda linear, _: has_sides_of(linear, 16 * tp)
        )
        for module in layer.modules():
            if type(module).__name__ == "Float8Linear":
                _pad_tokens(module)


def _pad_tokens(linear: Any) -> None:
    """Have the matmul of the weight's gradient, (N, tokens) x (tokens, K), pad its inner side with zeros to a multiple of
    16, which `torch._scaled_mm` requires. The inner sides of the other two matmuls are sides of the weight, and fit."""
    config = linear.linear_mm_config
    linear.linear_mm_config = config._replace(grad_weight=config.grad_weight._replace(pad_inner_dim=True))


def rowwise_of(linear: nn.Module) -> type[RowwiseParallel] | None:
    """Return torchao's style of a linear that gathers gradients of its output in float8; None where `linear` does not
    multiply in float8 with one scale per tensor, or emulates it: gloo sends no float8."""
    if not _sends_float8(linear):
        return None
    parallel: Any = require("torchao.float8.float8_tensor_parallel", "fp8", "for precision='fp8'")
    return parallel.Float8RowwiseParallel


def cast_of(block: nn.Module) -> Callable[[DTensor], DTensor] | None:
    """Return a function that casts the input of the linears of `block` to float8, one scale for all ranks' parts, so
    that half as many bytes are gathered; the values are those of a later cast. None where one of them does not multiply
    so."""
    linears = [module for module in block.modules() if isinstance(module, nn.Linear)]
    if not linears or not all(map(_sends_float8, linears)):
        return None
    scaling: Any = require("torchao.float8.float8_scaling_utils", "fp8", "for precision='fp8'")
    how: Any = linears[0]
    return functools.partial(
        scaling.hp_tensor_to_float8_dynamic,
        float8_dtype=how.config.cast_config_input.target_dtype,
        linear_mm_config=how.linear_mm_config,
    )


def _sends_float8(module: nn.Module) -> bool:
    if type(module).__name__ != "Float8Linear":
        return False
    config: Any = module.config
    return not config.emulate and config.cast_config_input.scaling_granularity.name == "TENSORWISE"


def scale_before_forward(model: nn.Module) -> None:
    """Have `model`, sharded, compute the scales of all weights that are gathered in float8 at the start of each forward,
    in one collective; else each gather would be one more. A backward gathers with its forward's scales."""
    fsdp: Any = require("torchao.float8", "fp8", "for precision='fp8-gather'")
    model.register_forward_pre_hook(
        lambda module, _: fsdp.precompute_float8_dynamic_scale_for_fsdp(module), prepend=True
    )


def without_float8(tensor: Tensor) -> Tensor:
    """A shard as it is stored, without the class that has FSDP2 gather it in float8; the same memory."""
    local: Any = tensor.to_local() if isinstance(tensor, DTensor) else None
    if not isinstance(tensor, DTensor) or not type(local).__module__.startswith("torchao.float8"):
        return tensor
    stored = getattr(local, local.__tensor_flatten__()[0][0])  # the weight; with it there may be its scale
    return DTensor.from_local(
        stored, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
