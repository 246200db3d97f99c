"""Count live bytes: the storages that operators make, on any device, with a log; or those that CUDA's allocator gave
out."""

import gc
import resource
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Self

import torch

from nemo_like._util.device_work import wait_for
from nemo_like._util.tensors import is_wrapped, tensors_in
from nemo_like.torch_compat import DispatchMode, local_part

_LIFT = torch.ops.aten.lift_fresh.default


def storages_of(value: object) -> Iterator[torch.UntypedStorage]:
    """Yield the storages behind every tensor in `value`, and inside tensors made of others (DTensor, quantised types)."""
    for tensor in tensors_in(value):
        if hasattr(tensor, "__tensor_flatten__"):
            names, _ = tensor.__tensor_flatten__()
            yield from storages_of([getattr(tensor, name) for name in names])
        elif tensor.layout is torch.strided:
            yield tensor.untyped_storage()


class LiveBytes(DispatchMode):
    """Counts the bytes of the storages that operators make inside it and that are alive. For real and for fake tensors.

    A storage counts from the op that makes it to the moment its memory would be returned. Memory that a kernel takes
    and gives back within one op is not seen, and neither is code outside of PyTorch's dispatcher (compiled graphs). Of
    a tensor that is made of others (DTensor, torchao's float8), the operators run inside count; of a sparse one,
    nothing. Python's cyclic garbage collector is off inside: it would free cycles at another place in each run.

    >>> with LiveBytes() as counter:
    ...     kept = torch.ones(4)
    ...     _ = torch.ones(1000)
    >>> del _
    >>> counter.live, counter.take_peak()
    (16, 4016)
    """

    def __init__(self, known: Iterable[torch.Tensor] = ()) -> None:
        """Begin with nothing; `known`: tensors from before. Arguments of operators are known as well."""
        super().__init__()
        self.live = 0  # Bytes alive now.
        self.peak = 0  # The most bytes alive at one time since `take_peak`.
        # Storages in the order in which they were made and freed: (its number from 1 on, its bytes; 0: freed).
        self.log: list[tuple[int, int]] = []
        self.sizes: dict[int, int] = {}  # Bytes of live storages, by number.
        self._made = 0
        self.operator: Any = None  # The one that ran last.
        self.numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        for storage in storages_of(list(known)):
            self.numbers[storage] = 0
        self._collects = False

    def __enter__(self) -> Self:
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
        if func.namespace == "prim":  # a question, as for a device, which is half of all calls
            return func(*args, **(kwargs or {}))
        if func is not _LIFT:  # whose argument torch.tensor() has just made
            for tensor in tensors_in((args, kwargs)):
                if tensor.layout is torch.strided:
                    self.numbers.setdefault(tensor.untyped_storage(), 0)  # made outside: not ours to count
        out = func(*args, **(kwargs or {}))
        self.operator = func
        for tensor in tensors_in(out):
            if tensor.layout is torch.strided and not tensor.is_meta:
                self.count(tensor)
        scratch = self.scratch(func, args, kwargs or {}, out)
        if scratch:
            number = self._next()
            self.changed(number, scratch)
            self.changed(number, 0)
        return out

    def scratch(self, func: Any, args: tuple, kwargs: Mapping[str, Any], out: Any) -> int:
        """Return the bytes that an operator takes and gives back: 0 here, where no operator is known."""
        return 0

    def count(self, tensor: torch.Tensor) -> int:
        """Count the storage of `tensor` from now on, unless it is known already; return its number."""
        storage = tensor.untyped_storage()
        number = self.numbers.get(storage)
        if number is None:
            number = self.numbers[storage] = self._next()
            weakref.finalize(storage, self._freed, number).atexit = False
            if storage.nbytes():
                self.changed(number, storage.nbytes())
        return number

    def number(self, tensor: torch.Tensor) -> int:
        """Return the number of the storage of `tensor` in `log`; 0: it was made outside."""
        return max(self.numbers.get(local_part(tensor).untyped_storage(), 0), 0)

    def identify(self, storage: torch.UntypedStorage) -> int:
        """Return a number that no other storage gets, unlike its ``id``; below 0: it was made outside."""
        if not self.numbers.get(storage):
            self.numbers[storage] = -self._next()
        return self.numbers[storage]

    def take_peak(self) -> int:
        """Return the most bytes alive at one time since the last call."""
        peak, self.peak = self.peak, self.live
        return peak

    def changed(self, number: int, size: int) -> None:
        """Note that a storage has so many bytes from now on; 0: it is freed."""
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


class DeviceBytes:
    """Reads `live` and `take_peak` from the caching allocator of one device."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._module = device, torch.get_device_module(device)

    def __enter__(self) -> Self:
        wait_for(self._device)
        self._base = self._module.memory_allocated(self._device)
        self._module.reset_peak_memory_stats(self._device)
        return self

    def __exit__(self, *_: object) -> None:
        wait_for(self._device)

    @property
    def live(self) -> int:
        """Bytes alive now that were not when it was entered."""
        return self._module.memory_allocated(self._device) - self._base

    def take_peak(self) -> int:
        """Return the most bytes alive at one time since the last call."""
        peak = self._module.max_memory_allocated(self._device) - self._base
        self._module.reset_peak_memory_stats(self._device)
        return peak


# Memory of this rank: of its device's allocator, or of the process.


def memory_kind(device: torch.device) -> str:
    """Return the kind of memory that `memory_used` and `memory_peak` count on `device`."""
    if device.type != "cpu":
        return f"bytes of tensors in the {device.type.upper()} caching allocator"
    return "resident bytes of the whole process, interpreter and libraries included"


def memory_used(device: torch.device) -> int:
    """Bytes in use now on this rank; see `memory_kind`. On a system without /proc it is the peak."""
    if device.type != "cpu":
        return torch.get_device_module(device).memory_allocated(device)
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:  # macOS has no /proc
        return memory_peak(device)


def memory_peak(device: torch.device) -> int:
    """The most bytes in use so far on this rank; see `memory_kind`."""
    if device.type != "cpu":
        return torch.get_device_module(device).max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB, macOS in bytes
