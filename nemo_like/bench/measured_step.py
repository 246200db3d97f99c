"""Measurements of one training step (forward and backward): bytes, FLOPs, time, gradients."""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from nemo_like._util.device_work import wait_for
from nemo_like._util.live_bytes import DeviceBytes
from nemo_like._util.module_tree import bare_name
from nemo_like._util.tensors import tensors_in
from nemo_like.distributed.launch import world_size
from nemo_like.profiling.layer_trace import counter_of, run_model


def step_loss(model: nn.Module, sample: object) -> torch.Tensor:
    """Forward: the model's own loss, or the mean of squares of its output."""
    output = run_model(model, sample)
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    return torch.stack([out.float().square().mean() for out in tensors_in(output) if out.requires_grad]).sum()


def zero_gradients(model: nn.Module) -> None:
    """Gradients that are there before the step, so that their bytes are not counted for any mode."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()
        elif parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)


def measure_bytes(model: nn.Module, sample: object, device: torch.device) -> tuple[int, int]:
    """Return the bytes alive between forward and backward of a step, and the most at one time.

    They are those beyond parameters, gradients and inputs: of a device by its allocator, of the CPU by the storages that
    operators make.
    """
    zero_gradients(model)
    with counter_of(model, sample) if device.type == "cpu" else DeviceBytes(device) as meter:
        loss = step_loss(model, sample)
        wait_for(device)
        held = meter.live
        loss.backward()
        return held, meter.take_peak()


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
    for name, reference in wanted.items():
        reference, other = _local(reference), _local(got[name])
        if not torch.equal(reference, other):
            scale = reference.abs().max().clamp_min(torch.finfo(reference.dtype).tiny)
            worst = max(worst, ((reference - other).abs().max() / scale).item(), 1e-30)
    return f"{worst:.1e}" if worst else "bitwise"


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def time_steps(
    models: Sequence[nn.Module], sample: object, device: torch.device, repeats: int, warmup: int
) -> list[list[float]]:
    """Milliseconds of each step of each model; the models take turns."""

    def step_of(model: nn.Module) -> Callable[[], None]:
        return lambda: step_loss(model, sample).backward()

    return take_turns(list(map(step_of, models)), device, repeats, warmup, lambda index: zero_gradients(models[index]))


@contextlib.contextmanager
def cpu_threads(count: int | None) -> Iterator[None]:
    """Within it, operators run on `count` CPU threads; None: on as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def take_turns(
    steps: Sequence[Callable[[], Any]],
    device: torch.device,
    repeats: int,
    warmup: int = 0,
    before: Callable[[int], Any] = lambda index: None,
) -> list[list[float]]:
    """Milliseconds of each run of each step. They take turns: a drift of the machine's speed affects all.

    On one CPU thread it is the process's own CPU time, which other jobs on the machine do not lengthen.

    Args:
        before: called with a step's index before it runs; its time does not count.
    """
    clock = clock_for(device)
    times: list[list[float]] = [[] for _ in steps]
    for turn in range(warmup + repeats):
        for index, step in enumerate(steps):
            before(index)
            wait_for(device)
            start = clock()
            step()
            wait_for(device)
            if turn >= warmup:
                times[index].append((clock() - start) * 1000)
    return times


def clock_for(device: torch.device) -> Callable[[], float]:
    """Seconds: CPU time of this process where it computes on one CPU thread, else wall time."""
    alone = device.type == "cpu" and torch.get_num_threads() == 1 and world_size() == 1
    return time.process_time if alone else time.perf_counter


def summarize(times: Sequence[float], reference: Sequence[float]) -> dict[str, float]:
    """Median, spread ((max - min) / median), and the median of the turn-by-turn ratios to `reference`."""
    middle = statistics.median(times)
    return {
        "step_ms": middle,
        "spread": (max(times) - min(times)) / middle,
        "ratio": statistics.median(mine / other for mine, other in zip(times, reference)),
    }
