"""The numbers of a "CUDA out of memory" message, the causes that they show, and the tensor that was too large."""

import math
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

from nemo_like._util.words import GIB, MIB, UNITS, write_bytes

_SIZE = r"(\d{1,15}(?:\.\d{1,9})?)(bytes?|[KMGT]iB|[KMGT]B)"  # bounded: a log may have long runs of digits
_UNIT_BYTES = {name: unit for unit, name in UNITS} | {
    **{"TiB": 1 << 40, "TB": 1 << 40},
    **{name.replace("iB", "B"): unit for unit, name in UNITS},  # aten/src/ATen/mps/MPSAllocator.mm writes GiB so
}
_UNKNOWN = 1 << 50  # Bytes of no GPU: WSL states 17179869184.00 GiB for each process.
_PREFIX = re.compile(
    r"^(?:[^\S\n]*(?:[>|│]"  # quoted, or in a box
    r"|\d{4}-\d\d-\d\d[T ][\d:.,]+Z?"
    r"|\[?[A-Za-z_]{1,40}\d{1,9}(?:\|\d{1,9})?\]?:"  # [rank2]: of torch, trainer0|1: of torchrun
    r"|\d{1,9}:(?=\s)"  # srun --label
    r"|\(\w{1,80}[^()\n]{0,80}\bpid=\d{1,9}[^()\n]{0,80}\)))+",  # Ray
    re.MULTILINE,
)
# The number of the rank in such a prefix.
_RANK = re.compile(r"\[(?:rank|default)(\d{1,9})\]:|[A-Za-z_]{1,40}\d{1,9}\|(\d{1,9}):|(\d{1,9}):\s")


@dataclass(frozen=True)
class OutOfMemory:
    """The numbers of one message. None: the message does not have that number."""

    # ``"torch 1.0 to 1.3"``, ``"torch 1.4 to 2.0"``, ``"torch 2.1+"``, ``"cudaMallocAsync"``, ``"mps"``, ``"vllm"``, one of
    # `_PLAIN`, or ``"cut off"``: without the number of reserved bytes.
    form: str
    kind: str = "CUDA"  # The backend: ``"CUDA"``, ``"HIP"``, ``"XPU"``, ``"NPU"``, ``"MUSA"``, ``"MPS"``.
    device: int | None = None
    asked_bytes: int | None = None  # The requested segment, which is up to 2 MiB larger than the tensor.
    asked_error: int = 0  # Half of the last printed digit of `asked_bytes`, in bytes.
    total_bytes: int | None = None
    free_bytes: int | None = None
    process_bytes: int | None = None
    other_processes: dict[int, int] = field(default_factory=dict)
    allocated_bytes: int | None = None
    unallocated_bytes: int | None = None  # Bytes that torch reserved and no tensor uses.
    # The part of `allocated_bytes` that is in private pools, such as those of CUDA graphs.
    private_pool_bytes: int | None = None
    allowed_bytes: int | None = None  # The limit of ``set_per_process_memory_fraction``.
    # The rank that failed first, of so many, by the prefixes of a log; and whether steps follow in it.
    rank: int | None = field(default=None, compare=False)
    ranks: int = field(default=0, compare=False)
    went_on: bool = field(default=False, compare=False)

    @property
    def reserved_bytes(self) -> int | None:
        """Bytes that torch's allocator has from the driver."""
        if self.allocated_bytes is None or self.unallocated_bytes is None:
            return None
        return self.allocated_bytes + self.unallocated_bytes

    @property
    def outside_bytes(self) -> int | None:
        """Bytes of this process outside torch's allocator: the context, NCCL, other libraries."""
        if self.process_bytes is None or self.reserved_bytes is None:
            return None
        return max(0, self.process_bytes - self.reserved_bytes)

    @property
    def elsewhere_bytes(self) -> int | None:
        """Bytes of other processes: never more than are neither free nor of this process."""
        if self.total_bytes is None or self.free_bytes is None:
            return sum(self.other_processes.values()) if self.other_processes else None
        at_least = self.process_bytes or self.reserved_bytes or self.allocated_bytes or 0
        room = max(0, self.total_bytes - self.free_bytes - at_least)
        if self.other_processes:
            return min(room, sum(self.other_processes.values()))
        return None if self.process_bytes is None else room


@dataclass(frozen=True)
class Cause:
    """One cause of the error, and a way out."""

    kind: str
    size: int  # Its bytes; 0: the message does not have them.
    words: str


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a transformer that its tensors are made of."""

    vocabulary: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    tokens: int | None = None  # Tokens of one micro-batch, where known.


@dataclass(frozen=True)
class Reading:
    """A tensor that has the requested size."""

    tensor: str
    dtype: str
    tokens: int | None = None
    note: str = ""

    @property
    def words(self) -> str:
        """The tensor in words: ``"float32 logits of 8,192 tokens"``."""
        tokens = "" if self.tokens is None else f" of {self.tokens:,} tokens"
        return f"{self.dtype} {self.tensor}{tokens}{self.note and f' ({self.note})'}"


# Messages without numbers by form: the backend, the text without blanks, the cause, and a way out.
_PLAIN = {
    "nccl": (
        "CUDA",
        r"FailedtoCUDA(?:calloc|malloc)(?:async)?(?:(?P<bytes>\d{1,15})bytes)?|(?:Cuda|HIP)failure(?:2)?'outofmemory'",
        "nccl",
        "NCCL found no memory. Set NCCL_MAX_NCHANNELS=8, or leave it some: "
        "{module}.set_per_process_memory_fraction(0.9) before training.",
    ),
    "vllm wakes up": (
        "CUDA",
        r"CUDAError:outofmemoryat\S{0,200}cumem_allocator",
        "driver",
        "vLLM wakes up, and the trainer still has the memory: offload its state, call {module}.empty_cache(), or lower "
        "gpu_memory_utilization.",
    ),
    "vllm cache": (
        "CUDA",
        r"Noavailablememoryforthecacheblocks",
        "vLLM",
        "vLLM's share is full before its cache is made. Raise gpu_memory_utilization, lower max_model_len, or free the "
        "trainer's memory before.",
    ),
    "driver": (
        "CUDA",
        r"(?P<kind>CUDA|HIP|XPU|NPU)error:outofmemory|CUDA_ERROR_OUT_OF_MEMORY|(?:cuda|hip)Error(?:MemoryAllocation|OutOfMemory)"
        r"|CU[A-Z]+_STATUS_ALLOC_FAILED",
        "driver",
        "The driver, not torch's allocator, found no memory. Leave it some: "
        "{module}.set_per_process_memory_fraction(0.9) before training.",
    ),
    "level zero": (
        "XPU",
        r"(?:UR_RESULT|ZE_RESULT|PI)_ERROR_OUT_OF_(?:DEVICE_MEMORY|HOST_MEMORY|RESOURCES)",
        "driver",
        "Level Zero, not torch's allocator, found no memory. Leave it some: "
        "{module}.set_per_process_memory_fraction(0.9) before training.",
    ),
}
# Text that each message has, if it is not wrapped there.
_ANCHORS = (
    *("out of memory", "OUT_OF_", "MemoryAllocation", "OutOfMemory", "ALLOC_FAILED", "Failed to CUDA"),
    *("Free memory on device", "No available memory for", "would exceed allowed"),
)
_MESSAGE, _MESSAGES, _BETWEEN = 8_000, 1_000, 100_000  # Characters of a message; messages; characters that follow one.
_WRAPPED = 1 << 20  # Characters at the end that are looked through for a wrapped message.
# A line of a run that goes on.
_STEPS = re.compile(r"\b(?:global_)?(?:steps?|epoch|iter|iteration|loss)\b[\s:=\[('\"]{0,12}\d|\d%\|", re.IGNORECASE)


def read_message(text: str) -> OutOfMemory | None:
    """Return the out-of-memory message that ended the run, of all in `text`, which may be a whole log; None: it has none.

    Messages before lines of further steps were caught. Of those after them the one with most numbers counts, of the rank
    that failed first.
    """
    if "\x1b" in text:
        text = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text)
    anchors = (match.start() for anchor in _ANCHORS for match in re.finditer(re.escape(anchor), text))
    lines = sorted({max(text.rfind("\n", max(0, place - 200), place) + 1, place - 200) for place in anchors})[
        -_MESSAGES:
    ]
    found = list[tuple[int, OutOfMemory]]()
    before = 0
    for begin, end in pairwise([*lines, len(text)]):
        before = max(before, begin - 200)
        message = _message(text[min(before, begin) : min(end, begin + _MESSAGE)])
        if message is not None:
            of_rank = _RANK.match(text, begin)
            found.append((begin, replace(message, rank=int(of_rank[of_rank.lastindex or 0]) if of_rank else None)))
            before = end
    if not found:
        return _message(text[-_WRAPPED:])
    first = len(found) - 1
    while first and not _STEPS.search(text, found[first - 1][0], min(found[first][0], found[first - 1][0] + _BETWEEN)):
        first -= 1
    burst = [message for _, message in found[first:]]
    counts = [sum(n is not None for n in (each.asked_bytes, each.total_bytes, each.allocated_bytes)) for each in burst]
    told = [message for message, count in zip(burst, counts, strict=True) if count == max(counts)]
    rank = next((message.rank for message in told if message.rank is not None), None)
    return replace(
        next(message for message in reversed(told) if message.rank == rank),
        ranks=len({message.rank for message in burst} - {None}),
        went_on=_STEPS.search(text, found[-1][0], found[-1][0] + _BETWEEN) is not None,
    )


def _message(text: str) -> OutOfMemory | None:
    """Return the numbers of the first message in a text."""
    text = re.sub(r"[\s│]+", "", _PREFIX.sub("", text))  # a terminal wraps lines within words and numbers, too
    backend = r"(CUDA|HIP|XPU|NPU|MUSA|MLU|HPU|MPS)(?:backend)?outofmemory"
    if start := re.search(
        backend + r"(?=\.?Triedtoallocate|\(MPSallocated)|(?=Allocationondevice\d{1,4}wouldexceed)", text
    ):
        rest = text[start.end() : start.end() + _MESSAGE]
        following = re.search(backend, rest)
        return _numbers(start[1] or "CUDA", rest[: following.start()] if following else rest)
    too_little = r"Freememoryondevice(?:cuda:(\d{1,4}))?\({0}/{0}GiB\)onstartup.{1,60}utilization\({0},{0}GiB\)"
    if start := re.search(too_little.replace("{0}", r"(\d{1,9}\.?\d{0,9})"), text):
        free, total, _, asked = (round(float(number) * GIB) for number in start.groups()[1:])
        device = int(start[1]) if start[1] else None
        return OutOfMemory("vllm", device=device, asked_bytes=asked, total_bytes=total, free_bytes=free)
    for form, (kind, pattern, _, _) in _PLAIN.items():
        if start := re.search(pattern, text):
            named = start.groupdict()
            size = int(named["bytes"]) if named.get("bytes") else None
            return OutOfMemory(form, kind=named.get("kind") or kind, asked_bytes=size)
    bare = re.search(rf"{backend}\.|Error:{backend}", text)
    return None if bare is None else OutOfMemory("cut off", kind=bare[1] or bare[2])


def _numbers(kind: str, text: str) -> OutOfMemory:
    """Return the numbers of the text of one message, which has no blanks."""

    def size(*patterns: str) -> int | None:
        matches = (re.search(pattern.replace(" ", "").replace("{}", _SIZE), text) for pattern in patterns)
        return next((_bytes(match[1], match[2]) for match in matches if match), None)

    requested = re.search(f"(?:Triedtoallocate|Requested:){_SIZE}", text)
    device = re.search(r"(?:GPU|NPU|XPU)(\d{1,4})(?:;|hasatotal)|Allocationondevice(\d{1,4})would", text)
    allocated = size(
        *("allocated memory {} is allocated by", "{} already allocated", "MPS allocated: {}", "Currently allocated: {}")
    )
    reserved = size("{} reserved in total")
    forms = {
        "torch 2.1+": size("and {} is reserved by PyTorch but"),
        "torch 1.0 to 1.3": size(r"{} cached\)"),  # these have it besides the allocated bytes
        "torch 1.4 to 2.0": None if reserved is None or allocated is None else max(0, reserved - allocated),
    }
    form, unallocated = next(((form, free) for form, free in forms.items() if free is not None), ("cut off", None))
    if "Currentlyallocated:" in text:
        form = "cudaMallocAsync"
    process = size("his process has {} memory in use")
    if process is not None and not 0.98 * ((allocated or 0) + (unallocated or 0)) <= process < _UNKNOWN:
        process = None  # in a container, its number is 0 or another's
    listed = re.findall(rf"Process(\d{{1,9}})has{_SIZE}memoryinuse", text)
    others = {int(number): taken for number, *value in listed if (taken := _bytes(*value)) < _UNKNOWN}
    if kind == "MPS":
        beside, form = size("other allocations: {}"), "mps"
        process = None if allocated is None or beside is None else allocated + beside
    total = size("total capaci?ty of {}", "{} total capacity", "Device limit: {}")
    free = size("of which {} is free", "; {} free", r"according to CUDA\): {}")
    if process is None and allocated is not None:
        used = None if None in (total, free) else (total or 0) - (free or 0)
        this = _own_process(others, allocated + (unallocated or 0), used)
        process = others.pop(this) if this is not None else None
    return OutOfMemory(
        form=form,
        kind=kind,
        device=int(device[1] or device[2]) if device else None,
        asked_bytes=_bytes(requested[1], requested[2]) if requested else None,
        # Half of the last digit that is written.
        asked_error=math.ceil(_UNIT_BYTES.get(requested[2], 0) / 10 ** len(requested[1].partition(".")[2]) / 2)
        if requested
        else 0,
        total_bytes=total,
        free_bytes=free,
        process_bytes=process,
        other_processes=others,
        allocated_bytes=allocated,
        unallocated_bytes=unallocated,
        private_pool_bytes=size("with {} allocated in private pools"),
        allowed_bytes=size("max allowed: {}", "{} allowed;", r"memory fraction\): {}"),
    )


def _own_process(processes: dict[int, int], reserved: int, used: int | None) -> int | None:
    """Return the number of this process where it is listed as another one, as in a container, which has its own numbers.

    used: all bytes of the GPU that are not free. Where the listed processes leave enough for torch's reserved bytes,
    this process is not among them.
    """
    if used is not None and used - sum(processes.values()) >= reserved // 2:
        return None
    about = [number for number, size in processes.items() if 0.98 * reserved <= size <= 1.1 * reserved + 4 * GIB]
    return min(about, key=processes.__getitem__, default=None)


def _bytes(number: str, unit: str) -> int:
    return round(float(number) * _UNIT_BYTES.get(unit, 1))


class _Backend(NamedTuple):
    """The names of a backend."""

    tool: str  # It lists the processes.
    module: str
    fragments: str = "Keep the shapes of steps equal."
    groups: str = "Use fewer process groups."
    block: str = ""  # It lifts the limit of one block.


_NCCL = "Use fewer process groups, or NCCL_MAX_NCHANNELS=8."
_EXPANDABLE = "Set PYTORCH{}_ALLOC_CONF=expandable_segments:True."
_BACKENDS = {
    "CUDA": _Backend("nvidia-smi", "torch.cuda", _EXPANDABLE.format(""), _NCCL),
    "HIP": _Backend("rocm-smi --showpids", "torch.cuda", _EXPANDABLE.format("_HIP"), _NCCL),
    # https://www.hiascend.com/document: PYTORCH_NPU_ALLOC_CONF, and HCCL_BUFFSIZE, 200 MiB by default
    "NPU": _Backend(
        "npu-smi info",
        "torch.npu",
        _EXPANDABLE.format("_NPU"),
        "Use fewer process groups, or HCCL_BUFFSIZE=100.",
    ),
    # Variables of the Level Zero adapter, in the documentation of oneAPI's Unified Runtime.
    "XPU": _Backend(
        "xpu-smi ps",
        "torch.xpu",
        _EXPANDABLE.format(""),
        block="Set UR_L0_USE_RELAXED_ALLOCATION_LIMITS=1.",
    ),
    "MUSA": _Backend("mthreads-gmi", "torch.musa", _EXPANDABLE.format("_MUSA")),
    "MLU": _Backend("cnmon", "torch.mlu", _EXPANDABLE.format("_MLU")),
    "HPU": _Backend("hl-smi", "torch.hpu"),
    "MPS": _Backend("Activity Monitor", "torch.mps"),
}
# Memory of 128 GB that a GPU shares with the CPU (DGX Spark, Jetson Thor, Strix Halo, MI300A); no card has as much.
_SHARED = (112 * GIB, 128.5 * GIB)
_LEAST = 0.3 * GIB  # Bytes of others or of private pools that are named.
_OUTSIDE = 2 * GIB  # A context and NCCL take less.
_SEGMENT = 20 * MIB  # kLargeBuffer, c10/core/CachingDeviceAllocator.h: free bytes up to it are a full GPU


def causes(message: OutOfMemory) -> list[Cause]:
    """Return the causes that the message shows: those that, removed, free enough, then live tensors, then the others.

    Causes of a kind are in the order of their bytes, the largest first.
    """
    if message.form in _PLAIN:
        *_, kind, way_out = _PLAIN[message.form]
        return [Cause(kind, message.asked_bytes or 0, way_out.format(module=_BACKENDS[message.kind].module))]
    missing = (message.asked_bytes or 0) - (message.free_bytes or 0)
    certain = list(_certain_causes(message))
    sized = sorted(_sized_causes(message), key=lambda cause: -cause.size)
    graphs = 0.1 * (message.reserved_bytes or 0)  # fewer bytes in pools are a part of the live tensors, not a reason
    enough = [
        each for each in sized if each.size >= (max(missing, graphs) if each.kind == "private pools" else missing)
    ]
    live = _live_causes(message, others_known=bool(certain or enough))
    return [*certain, *enough, *live, *(each for each in sized if each not in enough)]


def _certain_causes(message: OutOfMemory) -> Iterator[Cause]:
    """Yield the causes that need no comparison with others."""
    requested, total, free = message.asked_bytes, message.total_bytes, message.free_bytes
    reserved, allowed = message.reserved_bytes or message.allocated_bytes, message.allowed_bytes
    if free is None and total and reserved is not None and 2 * (reserved + (requested or 0)) < total:
        free = total - reserved  # XPU does not state it
    if message.form == "vllm" and total and free is not None:
        yield Cause(
            "other processes",
            total - free,
            f"vLLM wants {write_bytes(requested or 0)}, and others have {write_bytes(total - free)}. Set "
            f"gpu_memory_utilization={math.floor(100 * free / total) / 100}, or free the trainer's memory before.",
        )
    elif requested is not None and requested > (total or 512 * GIB):
        whose = "the GPU" if total else "any GPU"
        yield Cause(
            "one tensor larger than the GPU",
            requested,
            f"One tensor of {write_bytes(requested)} is larger than {whose}. Look for a wrong length, mask or shape.",
        )
    elif (
        allowed
        and total
        and allowed < 0.99 * total
        and (reserved is None or reserved + (requested or 0) > 0.99 * allowed)
    ):
        yield Cause(
            "limit set by the process",
            total - allowed,
            f"This process may use only {write_bytes(allowed)} of {write_bytes(total)}. Raise the limit of "
            "set_per_process_memory_fraction().",
        )
    elif reserved and total and reserved > 1.02 * total:
        yield Cause(
            "system memory (Windows)",
            reserved - total,
            f"torch has {write_bytes(reserved)}, more than the GPU: Windows pages to CPU memory. Choose 'Prefer No "
            "Sysmem Fallback' in NVIDIA's settings.",
        )
    elif requested is not None and free is not None and free > requested + _SEGMENT:
        backend = _BACKENDS[message.kind]
        yield Cause(
            "more was free than asked",
            free,
            f"{write_bytes(free)} were free, in no block of {write_bytes(requested)} (unified memory, Windows, a driver's "
            f"limit). {backend.block or backend.fragments}",
        )


def _sized_causes(message: OutOfMemory) -> list[Cause]:
    """Return the causes that take bytes away from live tensors."""
    backend, unused, outside = _BACKENDS[message.kind], message.unallocated_bytes or 0, message.outside_bytes or 0
    pools, metal = message.private_pool_bytes or 0, 0
    if message.form == "mps" and message.process_bytes and message.allocated_bytes is not None:
        metal = message.process_bytes - message.allocated_bytes
    sized = (  # of each the least bytes that are named
        (
            *("outside of the allocator", _OUTSIDE, outside),
            f"This process has {write_bytes(outside)} outside torch's allocator: the context, collectives. {backend.groups}",
        ),
        (
            *("outside of the allocator", _OUTSIDE, metal),
            f"{write_bytes(metal)} are torch's free blocks, or Metal's. Call torch.mps.empty_cache(), or lift the limit "
            "by PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0.",
        ),
        (
            *("private pools", _LEAST, pools),
            f"{message.kind} graphs keep {write_bytes(pools)} in private pools. Capture fewer, or let them share a pool.",
        ),
    )
    named = [*_others(message), *(Cause(kind, size, text) for kind, least, size, text in sized if size > least)]
    # Fragments larger than another cause are named with it.
    if unused > max(_SEGMENT, min([0.1 * (message.reserved_bytes or 0), *(cause.size for cause in named)])):
        text = f"Fragmentation: torch reserved {write_bytes(unused)} that no tensor uses. {backend.fragments}"
        named.append(Cause("fragmentation", unused, text))
    return named


def _others(message: OutOfMemory) -> Iterator[Cause]:
    """Yield other processes as a cause, or the bytes that are neither free nor torch's."""
    backend, total, elsewhere = _BACKENDS[message.kind], message.total_bytes or 0, message.elsewhere_bytes or 0
    sizes, taken = sorted(message.other_processes.values()), message.reserved_bytes or message.allocated_bytes
    if len(sizes) > 1 and sizes[0] > 0.95 * sizes[-1] and sizes[-1] < 2.5 * GIB:
        yield Cause(
            "other ranks' contexts",
            elsewhere,
            f"{len(sizes)} other processes have {write_bytes(sizes[0])} each here: contexts of other ranks. Call "
            f"{backend.module}.set_device(local_rank) before any call for a GPU.",
        )
    elif elsewhere > _LEAST and sizes:
        yield Cause(
            "other processes",
            elsewhere,
            f"Other processes have {write_bytes(elsewhere)} of this GPU. Find them with {backend.tool} and stop them.",
        )
    elif message.free_bytes is not None and taken is not None:
        own = message.process_bytes
        unknown = total - message.free_bytes - (taken if own is None else own)
        # a context and NCCL take the latter, of a small GPU less
        if unknown <= (min(max(1.5 * GIB, 0.07 * total), total / 3) if own is None else _LEAST):
            return
        kind, whose = (
            "other processes",
            "other processes, the context, collectives" if own is None else "other processes",
        )
        if message.kind in ("CUDA", "HIP") and _SHARED[0] <= total <= _SHARED[1]:
            kind, whose = "unified memory", "the CPU's, which shares this memory, or other processes'"
        elif own is None and message.unallocated_bytes is None:
            kind, whose = "unknown", "torch's free blocks, the context or other processes"
        yield Cause(
            kind,
            unknown,
            f"{write_bytes(unknown)} are neither free nor of this process: {whose}. Find them with {backend.tool}.",
        )


def _live_causes(message: OutOfMemory, others_known: bool) -> Iterator[Cause]:
    """Yield the tensors themselves as the cause, where they take most of the GPU or nothing else does."""
    requested, allocated = message.asked_bytes or 0, message.allocated_bytes
    room = message.total_bytes or message.allowed_bytes
    if room is None or allocated is None:
        return
    if room / 2 < requested <= room:
        yield Cause(
            "one large tensor",
            requested,
            f"One tensor of {write_bytes(requested)} takes more than half of the GPU. Shorten or split the batch that it "
            "is made from.",
        )
    elif allocated > 0.7 * room or allocated + requested > room or not others_known:
        yield Cause(
            "live tensors",
            allocated,
            f"Live tensors take {write_bytes(allocated)} of {write_bytes(room)}. Recompute activations (ac='full'), shard "
            "more, or use a smaller micro-batch.",
        )


def readings(message: OutOfMemory, sizes: ModelSizes) -> list[Reading]:
    """Return the tensors of the model that have the requested size, at most two, the most likely first.

    A size is a reading only where it is unlikely by chance. The requested segment and the rounding of its number leave a
    window of sizes; a tensor of known size is in it, or one of a number of tokens that a large power of two divides.
    """
    if message.asked_bytes is None:
        return []
    low, high = _window(message.asked_bytes, message.asked_error)
    attention = 2 * sizes.head_dim * (sizes.heads + sizes.kv_heads)
    fixed = {
        "weights or gradients of one layer (FSDP unit)": sizes.hidden * (attention + 3 * sizes.intermediate + 2),
        "embedding or head": sizes.vocabulary * sizes.hidden,
        "MLP weight": sizes.hidden * sizes.intermediate,
        "flat state of one DeepSpeed sub-group (1e9 numbers)": 10**9,
    }
    # Tensors with a row per token: the usual bytes of a number, the name, and the numbers of a row.
    of_tokens = [(4, "logits", sizes.vocabulary), (2, "hidden states", sizes.hidden)]
    if sizes.intermediate != sizes.hidden:
        of_tokens.append((2, "MLP's inner activations", sizes.intermediate))
    scored: list[tuple[float, Reading]] = []
    for width, dtype in ((4, "float32"), (2, "bfloat16")):
        chance = math.log2(high / (high - low))
        scored += [(chance, Reading(name, dtype)) for name, numbers in fixed.items() if low < numbers * width <= high]
        for usual_width, tensor, numbers in of_tokens:
            per_token = numbers * width
            for tokens, step in _token_counts(low / per_token, high / per_token, sizes.tokens):
                known = sizes.tokens or tokens
                times = f"{tokens // known} times" if tokens > known else f"1/{known // tokens} of"
                note = "" if tokens == known else f"{times} the micro-batch"
                doublings = abs(math.log2(tokens / sizes.tokens)) if sizes.tokens else max(0, math.log2(tokens) - 17)
                bits = math.log2(step * per_token / (high - low)) - doublings
                usual = bits >= _LEAST_BITS and width == usual_width
                scored.append((bits + usual, Reading(tensor, dtype, tokens, note)))
        scored += _square_tensors(sizes, low, high, width, dtype)
    likely = sorted((pair for pair in scored if pair[0] >= _LEAST_BITS), key=lambda pair: -pair[0])
    return [reading for _, reading in likely[:2]]


_LEAST_BITS = 5.0  # A reading is returned where one of 32 sizes would match by chance, or fewer.


def _window(requested: int, error: int) -> tuple[int, int]:
    """Return the sizes between which the tensor is: torch requests 2 MiB up to 1 MiB, 20 MiB up to 10, else whole 2 MiB."""
    if requested <= 2 * MIB:
        return 0, MIB
    return (MIB if requested == 20 * MIB else max(0, requested - error - 2 * MIB)), requested + error


def _token_counts(low: float, high: float, known: int | None) -> Iterator[tuple[int, int]]:
    """Yield the token counts in the window that are likely, each with the distance to the next one as likely."""
    if known:
        yield from ((tokens, tokens) for tokens in _powers_of(known) if low < tokens <= high)
        return
    for power in range(max(0, int(high)).bit_length(), 4, -1):  # the roundest number in the window
        if (tokens := int(high) >> power << power) > low:
            yield tokens, 1 << power
            return


def _powers_of(tokens: int) -> list[int]:
    shifts = [tokens >> shift for shift in range(7) if tokens % (1 << shift) == 0]
    return shifts + [tokens << shift for shift in range(1, 7)]


def _square_tensors(sizes: ModelSizes, low: int, high: int, width: int, dtype: str) -> Iterator[tuple[float, Reading]]:
    """Yield attention scores and masks, B x heads x S x S, with how unlikely they are by chance, in bits."""
    for tensor, heads in (("attention scores", sizes.heads), ("attention mask", 1)):
        for batch in (1, 2):  # four times the batch is twice the length
            unit = batch * heads * width
            for length, step in _token_counts(math.sqrt(low / unit), math.sqrt(high / unit), None):
                if length < 512 or (sizes.tokens and batch * length not in _powers_of(sizes.tokens)):
                    continue
                doublings = abs(math.log2(batch * length / sizes.tokens)) if sizes.tokens else 0.0
                bits = math.log2(step / (math.sqrt(high / unit) - math.sqrt(low / unit))) - 3 - doublings + (width == 2)
                yield bits, Reading(f"{tensor} {batch} x {heads} x {length:,} x {length:,}", dtype)


def words(message: OutOfMemory) -> list[str]:
    """Return the message in lines of 80 columns: the verdict, then the causes with their bytes and a way out."""
    lines = [_verdict(message)]
    if message.ranks > 1:
        lines.append(f"Rank {message.rank} failed first, of {message.ranks} ranks with such a message.")
    if message.went_on:
        lines.append("Lines of steps follow in the log, so it may have been caught.")
    for cause in causes(message):
        lines += textwrap.wrap(cause.words, 78, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False)
    return lines


def _verdict(message: OutOfMemory) -> str:
    where = "The GPU" if message.device is None else f"GPU {message.device}"
    request = "memory" if message.asked_bytes is None else write_bytes(message.asked_bytes)
    if message.free_bytes is None or message.total_bytes is None:
        return f"{where} could not give {request}."
    free, total = write_bytes(message.free_bytes), write_bytes(message.total_bytes)
    verdict = f"{where} had {free.removesuffix('GiB')} of {total} free for {request}"
    taken = {
        "tensors": message.allocated_bytes,
        "unused": message.unallocated_bytes,
        "others": message.elsewhere_bytes,
        "outside": message.outside_bytes,
    }
    separator = "; "
    for name, size in sorted(taken.items(), key=lambda item: -(item[1] or 0)):
        part = f"{separator}{name} {write_bytes(size or 0)}"
        if size and size > 0.01 * message.total_bytes and len(verdict + part) < 80:
            verdict, separator = verdict + part, ", "
    return f"{verdict}."
