"""The simulated device ``gpusim``: tensors in a part of CPU memory of their own, streams, and `torch.gpusim`.

Tensors are plain ones with PyTorch's PrivateUse1 key: their memory comes through DLPack, whose deleter tells when a storage
is gone. Each operator runs on CPU tensors over the same bytes, so it gives the CPU's bits. An operator on a stream first
runs what waits there; copies that do not block wait themselves. `install` changes this process for good: tests call it in a
process of their own (`tests.gpusim.on_device`).
"""

from __future__ import annotations

import contextlib
import ctypes
import types
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, wraps
from typing import Any

import numpy as np
import torch
from torch.utils._device import _device_constructors
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


_SLOTS = 1 << 16
"""Most storages at a time."""
_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype, _capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class _Storages:
    """DLPack's structures of all storages, one in a row of words, and which of them PyTorch has let go of.

    PyTorch calls a structure's deleter at any time, also while a Python error is set, when no Python may run. So that is
    ``sigemptyset`` of the C library, which puts zeros there: the first word is the address.
    """

    def __init__(self) -> None:
        self.words = np.zeros((_SLOTS, 16), np.uint64)
        self.sizes = np.ones((_SLOTS, 2), np.int64)
        self.addresses = np.zeros(_SLOTS, np.uint64)
        self.free = list(range(_SLOTS - 1, -1, -1))
        self.deleter = ctypes.cast(ctypes.CDLL(None).sigemptyset, ctypes.c_void_p).value
        self.used = 0

    def make(self, address: int, size: int) -> torch.UntypedStorage:
        """Return a storage of the bytes at `address`."""
        slot = self.free.pop()
        self.used = max(self.used, slot + 1)
        self.addresses[slot], self.sizes[slot, 0] = address, size
        sizes = self.sizes.ctypes.data + 16 * slot
        a_byte = 1 | 1 << 32 | 8 << 40 | 1 << 48  # one dimension; unsigned, 8 bits, one lane
        self.words[slot, :8] = address, _EXTERNAL, a_byte, sizes, sizes + 8, 0, 0, self.deleter
        structure = self.words.ctypes.data + 128 * slot
        return torch._C._from_dlpack(_capsule(structure, b"dltensor", None)).untyped_storage()

    def gone(self) -> list[int]:
        """Return the addresses of storages that are gone, once each."""
        slots = np.flatnonzero((self.words[: self.used, 0] == 0) & (self.addresses[: self.used] != 0))
        addresses = self.addresses[slots].tolist()
        self.addresses[slots] = 0
        self.free += slots.tolist()
        return addresses


class PinnedMemory:
    """CPU memory that is pinned, as PyTorch's ``CachingHostAllocator`` hands it out.

    A block is a power of two. It is free for the next tensor when the copies that were noted for it have ended, as far as
    the host knows; it is NaN then.
    """

    def __init__(self) -> None:
        self.accesses = Accesses()
        self.streams: dict[int, set[int]] = {}
        """By the address of each block: those with copies from it or to it."""
        self.free: list[tuple[np.ndarray, list[streams.Event]]] = []
        """Blocks that no tensor has, and when they are done."""

    def tensor(self, like: torch.Tensor) -> torch.Tensor:
        """Return a tensor with the numbers and strides of `like`."""
        nbytes = like.untyped_storage().nbytes()
        size = 1 << (nbytes - 1).bit_length()
        done = (pair for pair in self.free if pair[0].nbytes == size and all(event.query() for event in pair[1]))
        pair = next(done, None)
        if pair is not None:
            self.free = [each for each in self.free if each is not pair]
        block = np.empty(size, np.uint8) if pair is None else pair[0]
        block.fill(0xFF)
        self.streams[block.ctypes.data] = set()
        part = block[:nbytes]
        weakref.finalize(part, self._gone, block).atexit = False
        storage = torch.from_numpy(part).untyped_storage()
        return torch.empty(0, dtype=like.dtype).set_(storage, 0, like.shape, like.stride()).copy_(like)

    def _gone(self, block: np.ndarray) -> None:
        self.free.append((block, [host.record(stream) for stream in self.streams[block.ctypes.data]]))


class Device:
    """The device: its memory, its generator, and the CPU memory that is pinned for it."""

    def __init__(self, size: int = 512 * MIB, expandable: bool = False) -> None:
        self.memory = DeviceMemory(size, expandable)
        self.pinned = PinnedMemory()
        self.storages = _Storages()
        self.counted = 0
        """Operators that ran."""
        self.random = torch.Generator().manual_seed(0).get_state()
        self.libraries: list[torch.library.Library] = []
        """Registered kernels, which last as long as these."""
        self.raised: BaseException | None = None
        """What a hook raised: see `_raising_later`."""

    # --- storages -------------------------------------------------------------------------------------------------

    def storage(self, size: int) -> torch.UntypedStorage:
        """Return a new storage of `size` bytes that the current stream may use."""
        self.settle()
        return self.storages.make(self.memory.allocate(size, host.current), size)

    def settle(self) -> None:
        """Free what is gone."""
        for address in self.storages.gone():
            self.memory.free(address)

    def check(self) -> None:
        """Raise RaceError where accesses were not ordered."""
        self.settle()
        races = [*self.memory.accesses.races, *self.pinned.accesses.races]
        if races:
            self.memory.accesses.races, self.pinned.accesses.races = [], []
            raise RaceError("\n".join(races))

    def reuse(self) -> None:
        """Write to all free bytes of the first stream, as its next work may; then `check`."""
        self.settle()
        free = [b for s in self.memory.segments if s.stream == 0 for b in s.blocks if b.lo not in self.memory.blocks]
        made = [self.empty([block.size], [1], torch.uint8) for block in sorted(free, key=lambda block: -block.size)]
        for each in made:
            each.zero_()
        self.check()

    # --- tensors --------------------------------------------------------------------------------------------------

    def empty(self, size: Iterable[int], stride: Iterable[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of new memory."""
        size, stride = list(size), list(stride)
        return tensor_of(self.storage(_reach(size, stride) * dtype.itemsize), 0, size, stride, dtype)

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
        host.run(host.current, host.ticks[host.current])
        self.twin(made).copy_(tensor)
        return made

    def access(self, tensor: torch.Tensor, stream: int, tick: int, *, writes: bool, name: str) -> None:
        """Note that work on `stream` reads or writes a tensor of the device, or one of pinned memory."""
        if 0 in tensor.shape:
            return
        storage = tensor.untyped_storage().data_ptr()
        lo = storage + tensor.storage_offset() * tensor.itemsize
        hi = lo + _reach(tensor.shape, tensor.stride()) * tensor.itemsize
        accesses = self.pinned.accesses if tensor.device.type == "cpu" else self.memory.accesses
        accesses.add(storage, Access(lo, hi, stream, tick, writes, name), host.clocks[stream])

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Return whether it is in pinned CPU memory."""
        return tensor.device.type == "cpu" and tensor.untyped_storage().data_ptr() in self.pinned.streams


def _reach(size: Sequence[int], stride: Sequence[int]) -> int:
    """Return how many elements lie between the first and the last, with both."""
    return 0 if 0 in size else 1 + sum((n - 1) * step for n, step in zip(size, stride))


def tensor_of(storage: Any, offset: int, size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor over a storage of the device."""
    made = torch._C._acc.create_empty_tensor([0], dtype)
    set_ = torch.ops.aten.set_.source_Storage_storage_offset
    return set_.redispatch(_CPU, made, storage, offset, list(size), list(stride))


def is_here(value: Any) -> bool:
    """Return whether `value` is a tensor of the device."""
    return isinstance(value, torch.Tensor) and value.device.type == NAME


_OURS = ("_copy_from", "_to_copy", "record_stream", "is_pinned")
"""Operators that the CPU has no kernel of its own for."""
_COLLECTIVES = (
    "c10d::_allgather_base_", "c10d::_reduce_scatter_base_", "c10d::allreduce_", "c10d::broadcast_",
    "_c10d_functional::all_gather_into_tensor", "_c10d_functional::reduce_scatter_tensor", "_c10d_functional::all_reduce",
    "_c10d_functional::wait_tensor",
)  # fmt: skip
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


_LOWERED = ("linear", "matmul", "mm", "addmm", "bmm", "baddbmm", "scaled_dot_product_attention")
_RAISED = ("softmax.int", "log_softmax.int", "layer_norm", "cross_entropy_loss", "nll_loss", "pow.Tensor_Scalar")
"""Operators that autocast runs in its dtype, and in float32: a few of those that CUDA has."""


def _autocast(op: Any, lowers: bool, *args: Any, **kwargs: Any) -> Any:
    """Run an operator under autocast."""
    dtype = torch.get_autocast_dtype(NAME) if lowers else torch.float32

    def cast(value: Any) -> Any:
        return value.to(dtype) if is_here(value) and value.is_floating_point() else value

    key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
    with torch._C._ExcludeDispatchKeyGuard(key):
        args, kwargs = tree_map(cast, (args, kwargs))
        return op(*args, **kwargs)


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

    def compute(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Any = None) -> Any:
        """Run an operator, or `run` in its place, on CPU tensors over the same bytes, now."""
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
            device.access(value, stream, tick, writes=any(value is each for each in written), name=str(op))
        device.check()
        with self._randomness(op):
            out = (run or op)(*cpu_args, **cpu_kwargs)
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

    def collective(self, op: Any, *args: Any) -> Any:
        """Run a collective on the CPU's tensors, in its place on the current stream; it has ended when this returns."""

        def ended(*cpu_args: Any) -> Any:
            result = op(*cpu_args)
            if isinstance(result, torch.Tensor):
                return torch.ops._c10d_functional.wait_tensor(result)
            result[-1].wait()
            return result

        return args[0] if "wait" in str(op) else self.compute(op, args, {}, run=ended)

    @contextlib.contextmanager
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
                libraries["aten"].impl(rest, partial(self.run, _operator("aten", rest)), "PrivateUse1")
        libraries["c10d"] = torch.library.Library("c10d", "IMPL")
        for space, rest in (name.split("::") for name in _COLLECTIVES):
            kernel = partial(self.collective, _operator(space, rest))
            libraries[space].impl(rest, kernel, "PrivateUse1", allow_override=True)
        autocast = torch.library.Library("_", "IMPL")
        autocast.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
        for names, lowers in ((_LOWERED, True), (_RAISED, False)):
            for rest in names:
                kernel = partial(_autocast, _operator("aten", rest), lowers)
                libraries["aten"].impl(rest, kernel, "AutocastPrivateUse1")
        return [*libraries.values(), autocast]

    # --- operators that make, move or lend memory -----------------------------------------------------------------

    def empty(self, size: Any, dtype: Any = None, memory_format: Any = None, **_: Any) -> torch.Tensor:
        like = torch.empty(size, dtype=dtype, device="meta", memory_format=memory_format or torch.contiguous_format)
        return self.device.empty(size, like.stride(), like.dtype)

    def empty_strided(self, size: Any, stride: Any, dtype: Any = None, **_: Any) -> torch.Tensor:
        return self.device.empty(size, stride, dtype or torch.get_default_dtype())

    def _to_copy(self, tensor: torch.Tensor, **options: Any) -> torch.Tensor:
        """Copy to another device or type; what does not block goes to pinned memory, as on CUDA."""
        like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        like = torch.empty_like(like, dtype=options.get("dtype"), memory_format=options.get("memory_format"))
        place, waits = options.get("device") or tensor.device, bool(options.get("non_blocking"))
        pinned = waits and torch.device(place).type == "cpu"
        made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=place, pin_memory=pinned)
        return made.copy_(tensor, waits)

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
        # Views over the device's bytes keep no storage alive; CPU memory stays, as CUDA's allocator has it.
        to, from_ = (device.twin(each) if is_here(each) else each.detach() for each in (target, source))

        def copy() -> None:
            with torch.no_grad():
                to.copy_(from_)

        if waits:
            if not is_here(other):
                device.pinned.streams[other.untyped_storage().data_ptr()].add(stream)
            host.give(stream, tick, copy)
        else:
            host.run(stream, tick)
            copy()
            if not (is_here(source) and is_here(target)):
                host.synchronize(stream)
        return target


def _operator(space: str, name: str) -> Any:
    """Return the operator of that name, with or without an overload."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(getattr(torch.ops, space), packet), overload or "default")


def _is_view(op: Any) -> bool:
    """Return whether an operator returns its input, looked at otherwise."""
    aliases = [each.alias_info for each in op._schema.returns if each.alias_info is not None]
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
    """The device, as PyTorch asks for it in C++."""

    def type_(self) -> Any:
        return torch._C._autograd.DeviceType.PrivateUse1


def _module(device: Device) -> Any:
    """Return what `torch.gpusim` is: as much of `torch.cuda` as there is."""

    def set_rng_state(state: torch.Tensor, place: Any = None) -> None:
        device.random = state.clone()

    def manual_seed(seed: int) -> None:
        device.random = torch.Generator().manual_seed(seed).get_state()

    def memory_stats(place: Any = None) -> dict[str, int]:
        device.settle()
        memory = device.memory
        stats = dict(memory.count)
        for name in ("allocated", "reserved", "requested"):
            stats[f"{name}_bytes.all.current"] = memory.now[name]
            stats[f"{name}_bytes.all.peak"] = memory.peak[name]
        return stats

    def memory_allocated(place: Any = None) -> int:
        device.settle()
        return device.memory.now["allocated"]

    def reset_peak_memory_stats(place: Any = None) -> None:
        device.settle()
        device.memory.peak = device.memory.now.copy()

    def empty_cache() -> None:
        device.settle()
        device.memory.empty_cache()

    module = types.ModuleType(f"torch.{NAME}")
    vars(module).update(
        Stream=streams.Stream,
        Event=streams.Event,
        is_initialized=lambda: True,
        is_available=lambda: True,
        _is_in_bad_fork=lambda: False,
        current_device=lambda: 0,
        device_count=lambda: 1,
        reuse=lambda: device.reuse(),
        get_device_name=lambda place=None: "a simulated device",
        set_device=lambda index: None,
        device=lambda place: contextlib.nullcontext(),
        synchronize=lambda place=None: host.synchronize(),
        stream=host.on,
        current_stream=lambda place=None: host.streams[host.current],
        default_stream=lambda place=None: host.streams[0],
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
        get_rng_state=lambda place=None: device.random.clone(),
        set_rng_state=set_rng_state,
        manual_seed=manual_seed,
        manual_seed_all=manual_seed,
        memory_stats=memory_stats,
        memory_allocated=memory_allocated,
        max_memory_allocated=lambda place=None: device.memory.peak["allocated"],
        memory_reserved=lambda place=None: device.memory.now["reserved"],
        max_memory_reserved=lambda place=None: device.memory.peak["reserved"],
        mem_get_info=lambda place=None: (device.memory.size - device.memory.now["reserved"], device.memory.size),
        reset_peak_memory_stats=reset_peak_memory_stats,
        empty_cache=empty_cache,
        get_device_properties=lambda place=None: types.SimpleNamespace(
            name="a simulated device", total_memory=device.memory.size, major=9, minor=0
        ),
    )
    return module


def _pinning(device: Device, make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return `make` with a `pin_memory`, for which PyTorch needs a part in C++ that is not there."""

    def made(*args: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        tensor = make(*args, **options)
        return device.pinned.tensor(tensor) if pin_memory and tensor.numel() else tensor

    return made


def _cloning(device: Device, clone: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `clone` of storages, as deepcopy needs it: PyTorch has no allocator of the device to ask."""

    def cloned(storage: torch.UntypedStorage) -> torch.UntypedStorage:
        if storage.device.type != NAME:
            return clone(storage)
        size = storage.nbytes()
        made = device.storage(size)
        tensor_of(made, 0, [size], [1], torch.uint8).copy_(tensor_of(storage, 0, [size], [1], torch.uint8))
        return made

    return cloned


def _resizing(device: Device, resize: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `resize_` of storages, as FSDP2 frees gathered parameters by it.

    What is freed becomes NaN, and its memory stays: PyTorch 2.13 lets no Python change a storage of a private device.
    """

    def resized(storage: torch.UntypedStorage, size: int) -> Any:
        if storage.device.type != NAME:
            return resize(storage, size)
        device.settle()
        if not size:
            device.memory.blank(storage.data_ptr(), host.current)
        elif size > storage.nbytes():
            raise NotImplementedError("A storage of the simulated device does not grow.")
        return storage

    return resized


def _moving(apply: Callable[..., Any]) -> Callable[..., Any]:
    """Return an `_apply` of modules that keeps tied parameters tied; PyTorch makes new ones for a private device."""

    def applied(module: torch.nn.Module, *args: Any, **options: Any) -> torch.nn.Module:
        owners: dict[int, list[tuple[torch.nn.Module, str]]] = {}
        for each in module.modules():
            for name, parameter in each._parameters.items():
                owners.setdefault(id(parameter), []).append((each, name))
        result = apply(module, *args, **options)
        for (first, its_name), *others in owners.values():
            for each, name in others:
                each._parameters[name] = first._parameters[its_name]
        return result

    return applied


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
    """Make the device this process's accelerator, once.

    Args:
        size: bytes of its memory.
        expandable: whether its allocator's segments grow.
        seed: lets work run early, in an order that it chooses; None: work runs when somebody waits for it.
    """
    import random

    device = Device(size, expandable)
    host.seed = None if seed is None else random.Random(seed)
    _setup_privateuseone_for_python_backend(NAME, _module(device), _Hooks(), _Guard())
    device.libraries = Kernels(device).register()
    hooks = torch._C._autograd
    hooks._push_saved_tensors_default_hooks = _raising_later(device, hooks._push_saved_tensors_default_hooks)
    torch.nn.Module._apply = _moving(torch.nn.Module._apply)  # type: ignore[method-assign]
    _device_constructors()  # before the next lines put others in the place of some
    for name in ("empty", "zeros", "empty_like", "empty_strided"):
        setattr(torch, name, _pinning(device, getattr(torch, name)))
    torch.UntypedStorage.resize_ = _resizing(device, torch.UntypedStorage.resize_)  # type: ignore[method-assign]
    torch.UntypedStorage.clone = _cloning(device, torch.UntypedStorage.clone)  # type: ignore[method-assign]
    torch.Tensor.pin_memory = lambda tensor: torch.empty_like(tensor, pin_memory=True).copy_(tensor)  # type: ignore[assignment]
    torch.Tensor.is_pinned = lambda tensor, *_: device.is_pinned(tensor)  # type: ignore[assignment]
    return device
