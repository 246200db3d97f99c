"""What planning measures with: live bytes counted over storages, and op times taken on the device at hand."""

from __future__ import annotations

import gc
import statistics
import time
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, Self

import torch

from nemo_like._util.tensors import is_wrapped, map_tensors, tensors_in
from nemo_like.fake.model_copy import call_with
from nemo_like.fake.run import check_layouts
from nemo_like.planning.block_trace import TraceMismatchError
from nemo_like.planning.kinds import Kind
from nemo_like.planning.scratch import scratch_bytes
from nemo_like.torch_compat import TorchDispatchMode, local_part

_LIFT = torch.ops.aten.lift_fresh.default


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages made inside it that are alive, and their peak. For real and for fake tensors.

    A storage counts from the op that makes it to the moment its memory would be returned. Memory that a kernel takes
    and gives back within one op is not seen; the peak has what `scratch_bytes` says of it. Of a tensor that is made of
    others (DTensor, torchao's float8), what its ops run inside counts.
    """

    def __init__(self, known: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self.log: list[tuple[int, int]] = []
        """Storages in the order in which they were made and freed: (its number from 1 on, its bytes; 0: freed)."""
        self.sizes: dict[int, int] = {}
        """Bytes of what is alive, by number."""
        self._made = 0
        self.numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        for tensor in known:
            self.numbers[local_part(tensor).untyped_storage()] = 0
        self._collects = False

    def __enter__(self) -> Self:
        # Cycles would be freed at another place in each run, and ranks would find other plans.
        self._collects = gc.isenabled()
        gc.disable()
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        if self._collects:
            gc.enable()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if is_wrapped(types):
            return NotImplemented
        if func is not _LIFT:  # which is given what torch.tensor() has just made
            for tensor in tensors_in((args, kwargs)):
                self.numbers.setdefault(tensor.untyped_storage(), 0)  # made outside: not ours to count
        out = func(*args, **(kwargs or {}))
        tensors = tensors_in(out)
        for position, tensor in enumerate(tensors):
            if not tensor.is_meta:
                self.count(tensor, position if len(tensors) > 1 else -1)
        scratch = self.scratch(func, args, kwargs or {}, out)
        if scratch:
            number = self._next()
            self.changed(number, scratch)
            self.changed(number, 0)
        return out

    def scratch(self, func: Any, args: tuple, kwargs: Mapping[str, Any], out: Any) -> int:
        """Bytes that an operator takes and gives back."""
        return scratch_bytes(func, args, kwargs, out)

    def count(self, tensor: torch.Tensor, position: int = -1) -> int:
        """Count the storage of `tensor` from now on, unless it is known already; returns its number. `position`: among what
        an operator returned, where that are several."""
        check_layouts([tensor])
        storage = tensor.untyped_storage()
        number = self.numbers.get(storage)
        if number is None:
            number = self.numbers[storage] = self._next()
            weakref.finalize(storage, self._freed, number).atexit = False
            if storage.nbytes():
                self.changed(number, storage.nbytes())
        return number

    def number(self, tensor: torch.Tensor) -> int:
        """Of the storage of `tensor`, in `log`; 0: it was made outside."""
        return self.numbers.get(local_part(tensor).untyped_storage(), 0)

    def changed(self, number: int, size: int) -> None:
        """A storage has so many bytes from now on; 0: it is freed."""
        self.live += size - self.sizes.get(number, 0)
        if size:
            self.sizes[number] = size
            self.peak = max(self.peak, self.live)
        else:
            del self.sizes[number]
        self.log.append((number, size))

    def _next(self) -> int:
        self._made += 1
        return self._made

    def _freed(self, number: int) -> None:
        if number in self.sizes:
            self.changed(number, 0)


class _OpClock(TorchDispatchMode):
    """Time of each op, in order, with its name."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.times: list[tuple[Any, float]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        self.wait()
        start = time.perf_counter()
        out = func(*args, **(kwargs or {}))
        self.wait()
        self.times.append((func, time.perf_counter() - start))
        return out

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def measured_seconds(
    kind: Kind, device: torch.device | str, runs: int = 5, autocast: torch.dtype | None = None
) -> tuple[float, ...]:
    """Median time of each computing op of a block over `runs` forward passes with random weights, after a warm-up.

    The block's parameters and inputs are allocated on `device`: this needs the memory of one block without
    checkpointing. Times include the launch, so short ops look as expensive as they are in eager mode. `autocast`: the
    dtype of the autocast that the trace was made under.

    Raises:
        TraceMismatchError: the ops that ran are not those of the block's trace.
    """
    device = torch.device(device)
    assert kind.trace is not None
    wanted = [op.op for op in kind.trace.ops if not op.view]

    def real(value: torch.Tensor) -> torch.Tensor:
        if value.is_floating_point():
            made = torch.randn(value.shape, device=device).mul_(0.02).to(value.dtype)
            return made.requires_grad_(value.requires_grad)
        return torch.zeros(value.shape, dtype=value.dtype, device=device)

    args, kwargs, state = map_tensors(real, (kind.args, kind.kwargs, dict(kind.state)))
    samples: list[list[float]] = []
    for run in range(runs + 1):
        casting = torch.autocast(device.type, autocast, enabled=autocast is not None, cache_enabled=False)
        with _OpClock(device) as clock, casting:
            out = call_with(kind.module, state, args, kwargs)
        del out
        times = _computing(clock.times, wanted, kind.trace.name)
        if run:  # the first one warms up
            samples.append(times)
    return tuple(statistics.median(column) for column in zip(*samples))


def _computing(times: list[tuple[Any, float]], wanted: list[Any], name: str) -> list[float]:
    """Times of the ops in `wanted`, which must occur in this order among all that ran."""
    found: list[float] = []
    for op, seconds in times:
        if len(found) < len(wanted) and op is wanted[len(found)]:
            found.append(seconds)
    if len(found) != len(wanted):
        raise TraceMismatchError(
            f"{name}: measuring found {len(found)} of {len(wanted)} traced ops; the next one, {wanted[len(found)]}, did "
            "not run on this device in this order. Plan from the device table instead (leave out --measure)."
        )
    return found
