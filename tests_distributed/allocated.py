"""Bytes that the CPU allocator says a training step peaks at, for a loop written as somebody might write it."""

import gc
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from nemo_like._util.tensors import tensors_in
from nemo_like.distributed.pipeline import Pipeline
from tests.checks import loss_of, update


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages behind `tensors`, each once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in map(local, tensors)}.values())


def state_bytes(model: torch.nn.Module, optimizer: torch.optim.Optimizer, held: Any = ()) -> int:
    """What is alive between two steps: parameters, optimizer state, gradients, DDP's buckets, masks of cp, and `held`."""
    params = list(model.parameters())
    state = [t for entry in optimizer.state.values() for t in entry.values() if isinstance(t, torch.Tensor)]
    grads = [p.grad for p in params if p.grad is not None]
    if isinstance(model, DistributedDataParallel):  # its buckets stay, and a gradient that is there is a view of one
        buckets, grads = bytes_of(p for p in params if p.requires_grad), []
    else:
        buckets = 0
    return bytes_of([*params, *state, *grads, *tensors_in(held)]) + buckets


def step_peak_bytes(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: Callable[[], Any], kept: Callable[[], Any] = tuple
) -> int:
    """The most bytes alive during a `step`, after which gradients are zeroed: what was alive before it, and the running
    sum of the allocator's events. `kept`: what else stays between steps.

    The profiler sees this thread alone. Now and then a thread of gloo is the last to drop a buffer, and that is missing
    from the sum; or Python frees the model of an earlier case within the step, which is too much in it. After a step
    whose events are complete nothing more is left than before it. Steps are taken until each rank has seen such a one.
    """
    gc.collect()  # the models of earlier cases, which FSDP2 leaves in cycles
    found, peaks = None, Counter[int]()
    for _ in range(50):
        before = state_bytes(model, optimizer, kept())
        with _behind_gloo():
            peak, left = allocator_events(step)
        peaks[before + peak] += 1
        if found is None and left == state_bytes(model, optimizer, kept()) - before:
            found = before + peak
        ready = torch.tensor(float(found is not None))
        if dist.is_initialized():
            dist.all_reduce(ready, dist.ReduceOp.MIN)
        if ready and found is not None:
            return found
    if found is None:
        # Some ranks drop an exchange's buffers on gloo's thread in nearly every step; but seldom do so many agree.
        likely, times = peaks.most_common(1)[0]
        found = likely if times >= 15 else None
    if found is not None:
        return found
    raise AssertionError(f"no step's events were complete: {left} bytes are left of the last")


@contextmanager
def _behind_gloo() -> Iterator[None]:
    """Within it, each wait for a collective takes a moment longer, in which gloo's thread drops its buffers: now and then
    it would be the last to do so. A dispatch mode that waits would hold the arguments of operators for longer."""
    wait = dist.Work.wait

    def waited(*args: Any, **kwargs: Any) -> Any:
        out = wait(*args, **kwargs)
        time.sleep(0.002)
        return out

    dist.Work.wait = waited
    try:
        yield
    finally:
        dist.Work.wait = wait


def loop_peak_bytes(model: torch.nn.Module, batch: dict[str, Any], *, microbatches: int = 1, lr: float = 1e-4) -> int:
    """`step_peak_bytes` of the plainest loop with AdamW over `batch`, so many times in a step: what the model returned
    stays until the next forward."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    kept: list[Any] = []

    def step() -> None:
        for _ in range(microbatches):
            out = model(**batch)
            kept[:] = [out]
            loss_of(out).backward()
        del out
        update(optimizer)

    step()
    step()
    return step_peak_bytes(model, optimizer, step, lambda: kept)


def allocator_events(run: Callable[[], Any]) -> tuple[int, int]:
    """The highest running sum of the allocator's events while `run` runs, and the last."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak, live


def _received(pipeline: Pipeline) -> list[torch.Tensor]:
    """The buffers that torch's stages keep between steps."""
    (schedule,) = pipeline._schedules.values()
    stages = getattr(schedule, "_stages", None) or [schedule._stage]
    infos = [
        info
        for stage in stages
        for table in (stage.args_recv_info, stage.grad_recv_info)
        for row in table.values()
        for info in row
    ]
    buffers = [info.buffer for info in infos if getattr(info, "buffer", None) is not None]
    return buffers + [buffer.grad for buffer in buffers if buffer.grad is not None]


def pipeline_peak_bytes(pipeline: Pipeline, batch: dict[str, torch.Tensor]) -> int:
    """The most bytes alive in a step, as `step_peak_bytes` counts them; where no step's events are complete on some rank,
    the least of all of them.

    What gloo's thread is the last to drop is missing from the events: the running sum is too high by that from then on, and
    by all of it in the end, when nothing is left.
    """
    step, before = _pipeline_step(pipeline, batch)
    lowest, highest = 0, sys.maxsize
    for _ in range(30):
        there = before()
        with _behind_gloo():
            peak, left = allocator_events(step)
        lowest, highest = max(lowest, there + peak - max(left, 0)), min(highest, there + peak)
        ready = torch.tensor(float(lowest >= highest))
        dist.all_reduce(ready, dist.ReduceOp.MIN)
        if ready:
            break
    return highest


def _pipeline_step(pipeline: Pipeline, batch: dict[str, torch.Tensor]) -> tuple[Callable[[], None], Callable[[], int]]:
    """A step, after the first two; and the bytes alive between steps. Weights stay, so that routers choose the same."""
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=0.0)

    def step() -> None:
        pipeline.step(**batch)
        optimizer.step()
        pipeline.zero_grad()

    def before() -> int:
        gc.collect()
        state = [t for entry in optimizer.state.values() for t in entry.values() if isinstance(t, torch.Tensor)]
        return bytes_of([*pipeline.parameters(), *state, *_received(pipeline)])

    step()
    step()
    return step, before
