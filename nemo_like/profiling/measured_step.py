"""One training step (forward and backward), measured: its loss, seconds, bytes, FLOPs and gradients."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from nemo_like._util.device_work import wait_for
from nemo_like._util.live_bytes import DeviceBytes, LiveBytes
from nemo_like._util.module_tree import bare_name
from nemo_like._util.tensors import split_sample, tensors_in
from nemo_like.distributed.launch import world_size
from nemo_like.torch_compat import local_part

LossFn = Callable[[Any], torch.Tensor]


def step_loss(model: nn.Module, sample: object, loss_fn: LossFn | None = None) -> torch.Tensor:
    """Forward: `loss_fn` of the output; else the output's own ``loss``; else the sum of all of it that has a gradient.

    `sample`: a mapping is passed by keyword, a tuple or list by position, anything else as one argument.
    """
    args, kwargs = split_sample(sample)
    output = model(*args, **kwargs)
    if loss_fn is not None:
        result = loss_fn(output)
        if not isinstance(result, torch.Tensor) or result.numel() != 1 or not result.requires_grad:
            raise ValueError(f"loss_fn returned {result!r}; it must return a tensor of one number that has a gradient.")
        return result
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    parts = [tensor.sum() for tensor in tensors_in(output) if tensor.requires_grad]
    if not parts:
        raise ValueError(
            f"{type(model).__name__} returned nothing that requires a gradient, so no backward can be measured; "
            "let at least one parameter train, or pass loss_fn."
        )
    return sum(parts[1:], parts[0])


def zero_gradients(model: nn.Module) -> None:
    """Gradients that are there before the step, so that their bytes are not counted for any mode."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()
        elif parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)


def clock_for(device: torch.device) -> Callable[[], float]:
    """Seconds: CPU time of this process where it computes on one CPU thread, else wall time."""
    alone = device.type == "cpu" and torch.get_num_threads() == 1 and world_size() == 1
    return time.process_time if alone else time.perf_counter


def measure_seconds(model: nn.Module, sample: object, device: torch.device) -> float:
    """Return the seconds of one step, in the time of `clock_for`."""
    zero_gradients(model)
    clock = clock_for(device)
    wait_for(device)
    start = clock()
    step_loss(model, sample).backward()
    wait_for(device)
    return clock() - start


def spread(values: Sequence[float]) -> float:
    """Return (max - min) / median."""
    return (max(values) - min(values)) / (statistics.median(values) or 1.0)


def counter_of(model: nn.Module, sample: object) -> LiveBytes:
    """Return a counter of the bytes that a step makes beyond the model, its gradients and the sample."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return LiveBytes([*model.parameters(), *model.buffers(), *gradients, *tensors_in(sample)])


def measure_bytes(model: nn.Module, sample: object, device: torch.device) -> tuple[int, int]:
    """Return the bytes alive between forward and backward of a step, and the most at one time.

    They are those beyond parameters, gradients and inputs: of a device by its allocator, of the CPU by the storages that
    operators make.
    """
    zero_gradients(model)
    with counter_of(model, sample) if device.type == "cpu" else DeviceBytes(device) as meter:
        loss = step_loss(model, sample)
        wait_for(device)
        saved = meter.live
        loss.backward()
        return saved, meter.take_peak()


def measure_flops(model: nn.Module, sample: object) -> tuple[int, int]:
    """FLOPs of the forward, and of the whole step with recomputation and backward, as PyTorch's counter counts operators."""
    zero_gradients(model)
    with FlopCounterMode(display=False) as counter:
        loss = step_loss(model, sample)
        forward = counter.get_total_flops()
        loss.backward()
    return forward, counter.get_total_flops()


def gradients_of(model: nn.Module, sample: object, seed: int = 0) -> dict[str, torch.Tensor]:
    """The gradients of one step from a fixed random state, by parameter name."""
    for parameter in model.parameters():
        parameter.grad = None
    torch.manual_seed(seed)
    step_loss(model, sample).backward()
    return {
        bare_name(name).removeprefix("module."): parameter.grad  # "module": DistributedDataParallel's name for it
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def compare_gradients(wanted: Mapping[str, torch.Tensor], got: Mapping[str, torch.Tensor]) -> str:
    """``"bitwise"``, the largest difference relative to the largest gradient, or the missing names."""
    if wanted.keys() != got.keys():
        missing = sorted(wanted.keys() ^ got.keys())
        return f"{len(missing)} missing ({missing[0]})"
    worst = 0.0
    for name, gradient in wanted.items():
        reference, other = local_part(gradient), local_part(got[name])
        if not torch.equal(reference, other):
            scale = reference.abs().max().clamp_min(torch.finfo(reference.dtype).tiny)
            worst = max(worst, ((reference - other).abs().max() / scale).item(), 1e-30)
    return f"{worst:.1e}" if worst else "bitwise"
