"""The simulated device ``gpusim``: tensors in a part of host memory of their own, streams, and `torch.gpusim`.

Tensors are plain ones with PyTorch's PrivateUse1 key: their memory comes through DLPack, whose deleter tells when a storage
is gone. That is a function in C: one in Python would lose an exception that is on its way meanwhile. Each operator runs on
CPU tensors over the same bytes, so it gives the CPU's bits. An operator on a stream first runs what waits there; copies
that do not block wait themselves. `install` changes this process for good: tests call it in a process of their own
(`tests.gpusim.on_device`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from tests.gpusim import streams
from tests.gpusim.memory import MIB, Access, Accesses, DeviceMemory
from tests.gpusim.streams import host

NAME = "gpusim"
_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_EXTERNAL = 12
"""DLPack's ``kDLExtDev``, which PyTorch takes for PrivateUse1."""


class RaceError(AssertionError):
    """Two accesses to the same bytes that nothing orders."""


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]  # fmt: skip


class _Managed(ctypes.Structure):
    _fields_ = [("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


_STORAGES = 1 << 16
"""Most storages at a time."""
_WORDS = ctypes.sizeof(_Managed) // 8
_DELETER = ctypes.cast(ctypes.CDLL(None).time, ctypes.c_void_p).value
"""C's ``time`` writes the time to where its argument points: over the address of a storage that is gone."""
_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype, _capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class Device:
    """The device: its memory, its generator, and the host memory that is pinned for it."""

    def __init__(self, size: int = 512 * MIB, expandable: bool = False) -> None:
        self.memory = DeviceMemory(size, expandable)
        self.pinned = Accesses()
        self.slabs: dict[int, int] = {}
        """Bytes of pinned host memory, by address."""
        self.counted = 0
        """Operators that ran."""
        self.random = torch.Generator().manual_seed(0).get_state()
        self.libraries: list[torch.library.Library] = []
        """Registered kernels, which last as long as these."""
        self.raised: BaseException | None = None
        """What a hook raised: see `_raising_later`."""
        self._notes = bytearray(_STORAGES * _WORDS * 8)
        self._words = memoryview(self._notes).cast("q")
        self._addresses: list[int] = []
        """Of all storages, by their place in the notes; 0: the place is free."""
        self._places: list[int] = []
        """Those that are free."""

    # --- storages -------------------------------------------------------------------------------------------------

    def storage(self, size: int) -> torch.UntypedStorage:
        """Return a new storage of `size` bytes that the current stream may use."""
        self.settle()
        address = self.memory.allocate(size, host.current)
        one = (ctypes.c_int64 * 1)(size), (ctypes.c_int64 * 1)(1)
        tensor = _DLTensor(address, _EXTERNAL, 0, 1, 1, 8, 1, *one, 0)
        if not self._places:
            self._places.append(len(self._addresses))
            self._addresses.append(0)
        place = self._places.pop()
        managed = _Managed.from_buffer(self._notes, place * _WORDS * 8)
        managed.tensor, managed.deleter = tensor, _DELETER
        self._addresses[place] = address
        made = torch._C._from_dlpack(_capsule(ctypes.addressof(managed), b"dltensor", None)).untyped_storage()
        del one  # PyTorch has copied it
        return made

    def settle(self) -> None:
        """Free what is gone."""
        addresses = self._addresses
        now = self._words[: len(addresses) * _WORDS : _WORDS].tolist()
        if now == addresses:
            return
        for place, (word, address) in enumerate(zip(now, addresses)):
            if word != address:
                self._words[place * _WORDS] = addresses[place] = 0
                self._places.append(place)
                self.memory.free(address)

    def check(self) -> None:
        """Raise RaceError where accesses were not ordered."""
        self.settle()
        races = [*self.memory.accesses.races, *self.pinned.races]
        if races:
            self.memory.accesses.races, self.pinned.races = [], []
            raise RaceError("\n".join(races))

    # --- tensors --------------------------------------------------------------------------------------------------

    def empty(self, size: Iterable[int], stride: Iterable[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of new memory."""
        size, stride = list(size), list(stride)
        reach = 0 if 0 in size else 1 + sum((n - 1) * step for n, step in zip(size, stride))
        return tensor_of(self.storage(reach * dtype.itemsize), 0, size, stride, dtype)

    def twin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the CPU tensor over the same bytes."""
        offset = tensor.untyped_storage().data_ptr() - self.memory.base
        if not tensor.numel():
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        at = offset // tensor.dtype.itemsize + tensor.storage_offset()
        return self.memory.arena.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), at)

    def moved_here(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a device tensor with the numbers of a CPU tensor, which an operator returned."""
        made = self.empty(tensor.shape, tensor.stride(), tensor.dtype)
        self.twin(made).copy_(tensor)
        return made

    def access(self, tensor: torch.Tensor, stream: int, tick: int, *, writes: bool, name: str) -> None:
        """Note that work on `stream` reads or writes a tensor of the device, or one of pinned memory."""
        itemsize = tensor.dtype.itemsize
        if 0 in tensor.shape:
            return
        storage = tensor.untyped_storage().data_ptr()
        lo = storage + tensor.storage_offset() * itemsize
        reach = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride()))
        accesses = self.pinned if tensor.device.type == "cpu" else self.memory.accesses
        accesses.add(storage, Access(lo, lo + reach * itemsize, stream, tick, writes, name), host.clocks[stream])

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Return whether it is in pinned host memory."""
        return tensor.device.type == "cpu" and tensor.untyped_storage().data_ptr() in self.slabs


def tensor_of(storage: Any, offset: int, size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor over a storage of the device."""
    made = torch._C._acc.create_empty_tensor([0], dtype)
    set_ = torch.ops.aten.set_.source_Storage_storage_offset
    return set_.redispatch(_CPU, made, storage, offset, list(size), list(stride))


def is_here(value: Any) -> bool:
    """Return whether `value` is a tensor of the device."""
    return isinstance(value, torch.Tensor) and value.device.type == NAME


_OURS = ("_copy_from", "record_stream", "is_pinned")
"""Operators that the CPU has no kernel of its own for."""
_OTHERS = ("_fused_sdp_choice",)
"""Operators whose CPU kernel names others that take CPU tensors only."""
_RANDOM = (
    "random_",
    "uniform_",
    "normal_",
    "bernoulli",
    "native_dropout",
    "exponential_",
    "multinomial",
    "randperm",
    "rand_like",
)


class Kernels:
    """All operators of the device."""

    def __init__(self, device: Device) -> None:
        self.device = device

    def run(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        """Run any operator."""
        raised, self.device.raised = self.device.raised, None
        if raised is not None:
            raise raised
        if _is_view(op):
            return op.redispatch(_CPU, *args, **kwargs)
        special = getattr(self, op._schema.name.replace("aten::", ""), None)
        if special is not None:
            return special(*args, **kwargs)
        return self.compute(op, args, kwargs)

    def compute(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator on CPU tensors over the same bytes, now."""
        device = self.device
        device.settle()
        device.counted += 1
        twins: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def twin(value: Any) -> Any:
            if not is_here(value):
                return torch.device("cpu") if isinstance(value, torch.device) and value.type == NAME else value
            if id(value) not in twins:
                twins[id(value)] = value, device.twin(value)
            return twins[id(value)][1]

        stream, tick = host.current, host.launch(host.current)
        host.run(stream, tick)
        cpu_args, cpu_kwargs = tree_map(twin, (args, kwargs))
        written = _written(op, args, kwargs)
        for value, _ in twins.values():
            writes = any(value is each for each in written)
            device.access(value, stream, tick, writes=writes, name=str(op))
        device.check()
        with self._randomness(op):
            out = op(*cpu_args, **cpu_kwargs)
        mine = {id(cpu): value for value, cpu in twins.values()}
        for value, cpu in twins.values():
            if cpu.shape != value.shape:  # an empty `out`
                self.resize_(value, cpu.shape)
                device.twin(value).copy_(cpu)

        def back(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if id(value) in mine:
                return mine[id(value)]
            made = device.moved_here(value)
            device.access(made, stream, tick, writes=True, name=str(op))
            return made

        result = tree_map(back, out)
        device.check()
        return result

    @contextmanager
    def _randomness(self, op: Any) -> Any:
        """Let random operators draw from the device's generator."""
        if not any(part in op._schema.name for part in _RANDOM):
            yield
            return
        before = torch.get_rng_state()
        torch.set_rng_state(self.device.random)
        try:
            yield
        finally:
            self.device.random = torch.get_rng_state()
            torch.set_rng_state(before)

    def register(self) -> list[torch.library.Library]:
        """Make these the kernels of all operators that the CPU has one for.

        One kernel as the fallback of all would do, but PyTorch 2.13 looks for a kernel by its operator where a mode is
        active and Python's keys are excluded.
        """
        libraries = {name: torch.library.Library(name, "IMPL") for name in ("aten", "_c10d_functional")}
        has = torch._C._dispatch_has_kernel_for_dispatch_key
        for name in torch._C._dispatch_get_all_op_names():
            space, _, rest = name.partition("::")
            if space == "aten" and rest not in _OTHERS and (has(name, "CPU") or rest in _OURS):
                packet, _, overload = rest.partition(".")
                op = getattr(getattr(torch.ops.aten, packet), overload or "default")
                libraries["aten"].impl(rest, partial(self.run, op), "PrivateUse1")
        return list(libraries.values())

    # --- operators that make, move or lend memory -----------------------------------------------------------------

    def empty(self, size: Any, dtype: Any = None, memory_format: Any = None, **_: Any) -> torch.Tensor:
        like = torch.empty(size, dtype=dtype, device="meta", memory_format=memory_format or torch.contiguous_format)
        return self.device.empty(size, like.stride(), like.dtype)

    def empty_strided(self, size: Any, stride: Any, dtype: Any = None, **_: Any) -> torch.Tensor:
        return self.device.empty(size, stride, dtype or torch.get_default_dtype())

    def set_(self, tensor: torch.Tensor, source: Any = None, *args: Any) -> torch.Tensor:
        overload = (
            "source_Storage_storage_offset"
            if args
            else "source_Storage"
            if isinstance(source, torch.UntypedStorage)
            else "source_Tensor"
        )
        return getattr(torch.ops.aten.set_, overload).redispatch(_CPU, tensor, source, *args)

    def resize_(self, tensor: torch.Tensor, size: Any, memory_format: Any = None) -> torch.Tensor:
        like = torch.empty(size, dtype=tensor.dtype, device="meta")
        if like.nbytes + tensor.storage_offset() * tensor.itemsize > tensor.untyped_storage().nbytes():
            made = self.device.empty(size, like.stride(), tensor.dtype)
            return self.set_(tensor, made.untyped_storage(), 0, list(size), list(like.stride()))
        return self.set_(tensor, tensor.untyped_storage(), tensor.storage_offset(), list(size), list(like.stride()))

    def record_stream(self, tensor: torch.Tensor, stream: torch.Stream) -> None:
        if tensor.untyped_storage().nbytes():
            self.device.memory.lend(tensor.untyped_storage().data_ptr(), stream.stream_id)

    def is_pinned(self, tensor: torch.Tensor, device: Any = None) -> bool:
        return False

    def _local_scalar_dense(self, tensor: torch.Tensor) -> Any:
        self.read_by_host(tensor)
        return self.device.twin(tensor).item()

    def read_by_host(self, tensor: torch.Tensor) -> None:
        """Block the host until the current stream is done, and note that `tensor` is read."""
        tick = host.launch(host.current)
        self.device.access(tensor, host.current, tick, writes=False, name="the host")
        host.synchronize(host.current)
        self.device.check()

    def _copy_from(self, source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        """Copy between the device and the host, or on the device."""
        device, stream = self.device, host.current
        device.settle()
        device.counted += 1
        tick = host.launch(stream)
        name = f"a copy from {source.device.type} to {target.device.type}"
        for tensor, writes in ((source, False), (target, True)):
            if is_here(tensor) or device.is_pinned(tensor):
                device.access(tensor, stream, tick, writes=writes, name=name)
        device.check()
        other = target if is_here(source) else source
        waits = non_blocking and (is_here(other) or device.is_pinned(other))
        # Views over the device's bytes keep no storage alive; host memory stays, as CUDA's allocator has it.
        to, from_ = (device.twin(each) if is_here(each) else each.detach() for each in (target, source))

        def copy() -> None:
            with torch.no_grad():
                to.copy_(from_)

        if waits:
            host.give(stream, tick, copy)
        else:
            host.run(stream, tick)
            copy()
            if not (is_here(source) and is_here(target)):
                host.synchronize(stream)
        return target


def _is_view(op: Any) -> bool:
    """Return whether an operator returns its input, looked at otherwise."""
    returns = op._schema.returns
    aliases = [each.alias_info for each in returns if each.alias_info is not None]
    return bool(aliases) and not any(each.is_write for each in aliases)


def _written(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments that an operator writes."""
    named = zip(op._schema.arguments, [*args, *[kwargs.get(a.name) for a in op._schema.arguments[len(args) :]]])
    found: list[Any] = []
    for argument, value in named:
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += value if isinstance(value, list | tuple) else [value]
    return found


class _Hooks(torch._C._acc.PrivateUse1Hooks):
    def is_available(self) -> bool:
        return True

    def has_primary_context(self, device: int) -> bool:
        return True

    def is_built(self) -> bool:
        return True


class _Guard(torch._C._acc.DeviceGuard):
    def type_(self) -> Any:
        return torch._C._autograd.DeviceType.PrivateUse1


def _module(device: Device) -> Any:
    """Return what `torch.gpusim` is: as much of `torch.cuda` as there is."""

    class module:
        Stream, Event = streams.Stream, streams.Event
        is_initialized = is_available = staticmethod(lambda: True)
        _is_in_bad_fork = staticmethod(lambda: False)
        current_device = staticmethod(lambda: 0)
        device_count = staticmethod(lambda: 1)
        set_device = staticmethod(lambda index: None)
        synchronize = staticmethod(lambda place=None: host.synchronize())
        stream = staticmethod(host.on)
        current_stream = staticmethod(lambda place=None: host.streams[host.current])
        default_stream = staticmethod(lambda place=None: host.streams[0])
        get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16, torch.float16])
        get_rng_state = staticmethod(lambda place=None: device.random.clone())

        @staticmethod
        def set_rng_state(state: torch.Tensor, place: Any = None) -> None:
            device.random = state.clone()

        @staticmethod
        def manual_seed_all(seed: int) -> None:
            device.random = torch.Generator().manual_seed(seed).get_state()

        manual_seed = manual_seed_all

        @staticmethod
        def memory_stats(place: Any = None) -> dict[str, int]:
            device.settle()
            memory = device.memory
            stats = dict(memory.count)
            for name in ("allocated", "reserved", "requested"):
                stats[f"{name}_bytes.all.current"] = memory.now[name]
                stats[f"{name}_bytes.all.peak"] = memory.peak[name]
            return stats

        @staticmethod
        def memory_allocated(place: Any = None) -> int:
            device.settle()
            return device.memory.now["allocated"]

        @staticmethod
        def max_memory_allocated(place: Any = None) -> int:
            return device.memory.peak["allocated"]

        @staticmethod
        def memory_reserved(place: Any = None) -> int:
            return device.memory.now["reserved"]

        @staticmethod
        def max_memory_reserved(place: Any = None) -> int:
            return device.memory.peak["reserved"]

        @staticmethod
        def reset_peak_memory_stats(place: Any = None) -> None:
            device.settle()
            device.memory.peak = device.memory.now.copy()

        @staticmethod
        def empty_cache() -> None:
            device.settle()
            device.memory.empty_cache()

        @staticmethod
        def mem_get_info(place: Any = None) -> tuple[int, int]:
            return device.memory.size - device.memory.now["reserved"], device.memory.size

    return module


def _pinning(device: Device, make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return `make` with a `pin_memory` that notes what it makes; PyTorch asks a part in C++ that is not there."""

    def made(*args: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        tensor = make(*args, **options)
        if pin_memory:
            storage = tensor.untyped_storage()
            device.slabs[storage.data_ptr()] = storage.nbytes()
        return tensor

    return made


def _raising_later(device: Device, push: Callable[..., None]) -> Callable[..., None]:
    """Return what enters saved-tensor hooks: an exception of `unpack` is raised by the operator that gets the result.

    While PyTorch unwinds after a hook's exception, it calls the device guard, which is in Python and fails with it.
    """

    def pushed(pack: Callable[..., Any], unpack: Callable[..., Any]) -> None:
        @wraps(unpack)
        def unpacked(packed: Any) -> Any:
            try:
                return unpack(packed)
            except BaseException as error:  # noqa: BLE001  (all are raised again)
                made = torch.empty(0, device=NAME)
                device.raised = error
                return made

        push(pack, unpacked)

    return pushed


def install(size: int = 512 * MIB, *, expandable: bool = False, seed: int | None = None) -> Device:
    """Make the device this process's accelerator, once. `seed`: lets work run early, in an order that it chooses."""
    import random

    device = Device(size, expandable)
    host.seed = None if seed is None else random.Random(seed)
    _setup_privateuseone_for_python_backend(NAME, _module(device), _Hooks(), _Guard())
    kernels = Kernels(device)
    device.libraries = kernels.register()
    hooks = torch._C._autograd
    hooks._push_saved_tensors_default_hooks = _raising_later(device, hooks._push_saved_tensors_default_hooks)
    for name in ("empty", "zeros", "empty_like", "empty_strided"):
        setattr(torch, name, _pinning(device, getattr(torch, name)))
    torch.Tensor.pin_memory = lambda tensor: torch.empty_like(tensor, pin_memory=True).copy_(tensor)  # type: ignore[assignment]
    torch.Tensor.is_pinned = lambda tensor, *_: device.is_pinned(tensor)  # type: ignore[assignment]
    return device
