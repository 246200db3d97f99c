"""The numbers of a "CUDA out of memory" message, the causes that they show, and the tensor that was too large."""

import math
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field

from nemo_like._util.words import GIB, MIB, UNITS, write_bytes

_SIZE = r"(\d{1,15}(?:\.\d{1,9})?)(bytes?|[KMGT]iB|[KMGT]B)"  # bounded: a log may have long runs of digits
_UNIT_BYTES = {name: unit for unit, name in UNITS} | {
    "TiB": 1 << 40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
_PREFIX = re.compile(
    r"^(?:[^\S\n]*(?:[>|│]"  # quoted, or in a box
    r"|\d{4}-\d\d-\d\d[T ][\d:.,]+Z?"
    r"|\[?[A-Za-z_]+\d+(?:\|\d+)?\]?:"  # [rank2]: of torch, trainer0|1: of torchrun
    r"|\d+:(?=\s)"  # srun --label
    r"|\(\w+[^()\n]*\bpid=\d+[^()\n]*\)))+",  # Ray
    re.MULTILINE,
)


@dataclass(frozen=True)
class OutOfMemory:
    """The numbers of one message. None: the message does not have that number."""

    # ``"torch 1.0 to 1.3"``, ``"torch 1.4 to 2.0"``, ``"torch 2.1+"``, ``"mps"``, ``"driver"``, ``"nccl"``, or ``"cut
    # off"``: without the number of reserved bytes.
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
        """Bytes of other processes."""
        if self.other_processes:
            return sum(self.other_processes.values())
        if self.total_bytes is None or self.free_bytes is None or self.process_bytes is None:
            return None
        return max(0, self.total_bytes - self.free_bytes - self.process_bytes)


@dataclass(frozen=True)
class Cause:
    """One cause of the error, and a way out."""

    kind: str
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


def read_message(text: str) -> OutOfMemory | None:
    """Return the numbers of the first out-of-memory message in `text`, which may be a whole log; None where it has none."""
    text = _PREFIX.sub("", re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text))
    text = re.sub(r"[\s│]+", "", text)  # a terminal wraps lines within words and numbers, too
    backend = r"(CUDA|HIP|XPU|NPU|MUSA|MLU|HPU|MPS)(?:backend)?outofmemory"
    if start := re.search(backend + r"(?=\.?Triedtoallocate|\(MPSallocated)", text):
        rest = text[start.end() :]
        following = re.search(backend, rest)
        return _numbers(start[1], rest[: following.start()] if following else rest)
    nccl = r"FailedtoCUDA(?:calloc|malloc)(?:async)?(?:(\d+)bytes)?|(?:Cuda|HIP)failure(?:2)?'outofmemory'"
    if start := re.search(nccl, text):
        return OutOfMemory("nccl", asked_bytes=int(start[1]) if start[1] else None)
    driver = r"(CUDA|HIP)error:outofmemory|CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation|CU\w+_STATUS_ALLOC_FAILED"
    if start := re.search(driver, text):
        return OutOfMemory("driver", kind=start[1] or "CUDA")
    bare = re.search(backend + r"(?:\.|$)|OutOfMemoryError:" + backend, text)
    return None if bare is None else OutOfMemory("cut off", kind=bare[1] or bare[2])


def _numbers(kind: str, text: str) -> OutOfMemory:
    """Return the numbers of the text of one message, which has no blanks."""

    def size(*patterns: str) -> int | None:
        matches = (re.search(pattern.replace(" ", "").replace("{}", _SIZE), text) for pattern in patterns)
        return next((_bytes(match[1], match[2]) for match in matches if match), None)

    requested = re.search(f"Triedtoallocate{_SIZE}", text)
    device = re.search(r"(?:GPU|NPU|XPU)(\d+)(?:;|hasatotal)", text)
    allocated = size("allocated memory {} is allocated by", "{} already allocated", "MPS allocated: {}")
    reserved = size("{} reserved in total")
    forms = {
        "torch 2.1+": size("and {} is reserved by PyTorch but"),
        "torch 1.0 to 1.3": size(r"{} cached\)"),  # these have it besides the allocated bytes
        "torch 1.4 to 2.0": None if reserved is None or allocated is None else max(0, reserved - allocated),
    }
    form, unallocated = next(((form, free) for form, free in forms.items() if free is not None), ("cut off", None))
    process = size("his process has {} memory in use")
    others = {
        int(number): _bytes(value, unit)
        for number, value, unit in re.findall(rf"Process(\d+)has{_SIZE}memoryinuse", text)
    }
    if kind == "MPS":
        beside, form = size("other allocations: {}"), "mps"
        process = None if allocated is None or beside is None else allocated + beside
    total, free = size("total capaci?ty of {}", "{} total capacity"), size("of which {} is free", "; {} free")
    if process is None and allocated is not None and unallocated is not None:
        this = _own_process(
            others, allocated + unallocated, None if None in (total, free) else (total or 0) - (free or 0)
        )
        process = others.pop(this) if this is not None else None
    return OutOfMemory(
        form=form,
        kind=kind,
        device=int(device[1]) if device else None,
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
        allowed_bytes=size("max allowed: {}", "{} allowed;"),
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


def causes(message: OutOfMemory) -> list[Cause]:
    """Return the causes that the message shows, the strongest first: those that, removed, free enough come before others."""
    if message.form == "nccl":
        return [Cause("nccl", f"NCCL found no memory for its buffers. {_LEAVE_ROOM} Or set NCCL_MAX_NCHANNELS=8.")]
    if message.form == "driver":
        return [Cause("driver", f"The driver, not torch's allocator, found no memory. {_LEAVE_ROOM}")]
    missing = (message.asked_bytes or 0) - (message.free_bytes or 0)
    certain, sized = list(_certain_causes(message)), list(_sized_causes(message))
    enough = [cause for size, cause in sized if size >= missing]
    partly = [cause for size, cause in sorted(sized, key=lambda pair: -pair[0]) if size < missing]
    return [*certain, *enough, *_live_causes(message, others_known=bool(certain or enough)), *partly]


_LEAVE_ROOM = "Leave it room: torch.cuda.set_per_process_memory_fraction(0.9) before training."


def _certain_causes(message: OutOfMemory) -> Iterator[Cause]:
    """Yield the causes that need no comparison with others."""
    requested, total, free = message.asked_bytes, message.total_bytes, message.free_bytes
    reserved, allowed = message.reserved_bytes, message.allowed_bytes
    if requested is not None and requested > (total or 512 * GIB):
        whose = "the GPU" if total else "any GPU"
        yield Cause(
            "one tensor larger than the GPU",
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
            f"This process may use only {write_bytes(allowed)} of {write_bytes(total)}. Raise the limit of "
            "set_per_process_memory_fraction().",
        )
    elif reserved and total and reserved > 1.02 * total:
        yield Cause(
            "system memory (Windows)",
            f"torch has {write_bytes(reserved)}, more than the GPU: Windows pages to CPU memory. Choose 'Prefer No "
            "Sysmem Fallback' in NVIDIA's settings.",
        )
    elif requested is not None and free is not None and free > requested:
        yield Cause(
            "more was free than asked",
            "More was free than requested, so the memory was taken only for a moment. Look for other processes on this "
            "GPU, then run again.",
        )


def _sized_causes(message: OutOfMemory) -> Iterator[tuple[int, Cause]]:
    """Yield the causes that take bytes away from live tensors, each with these bytes."""
    sizes, elsewhere = sorted(message.other_processes.values()), message.elsewhere_bytes or 0
    reserved, outside = message.reserved_bytes, message.outside_bytes or 0
    used = (message.total_bytes or 0) - (message.free_bytes or 0)
    if len(sizes) > 1 and sizes[0] > 0.95 * sizes[-1] and sizes[-1] < 2.5 * GIB:
        yield (
            elsewhere,
            Cause(
                "other ranks' contexts",
                f"{len(sizes)} other processes have {write_bytes(sizes[0])} each here: contexts of other ranks. Call "
                "torch.cuda.set_device(local_rank) before any CUDA call.",
            ),
        )
    elif elsewhere > 0.3 * GIB:
        yield (
            elsewhere,
            Cause(
                "other processes",
                f"Other processes have {write_bytes(elsewhere)} of this GPU. Find them with nvidia-smi and stop them.",
            ),
        )
    elif message.process_bytes is None and reserved is not None and message.free_bytes is not None:
        unknown = used - reserved
        if unknown > max(1.5 * GIB, 0.07 * (message.total_bytes or 0)):
            yield (
                unknown,
                Cause(
                    "other processes",
                    f"{write_bytes(unknown)} are neither free nor torch's: other processes, the context or NCCL. Find "
                    "them with nvidia-smi.",
                ),
            )
    if outside > 2 * GIB:
        yield (
            outside,
            Cause(
                "outside of the allocator",
                f"This process has {write_bytes(outside)} outside torch's allocator: the context, NCCL, other "
                "libraries. Use fewer process groups, or NCCL_MAX_NCHANNELS=8.",
            ),
        )
    unused = message.unallocated_bytes or 0
    if reserved and unused > 0.1 * reserved:
        yield (
            unused,
            Cause(
                "fragmentation",
                f"Fragmentation: torch reserved {write_bytes(unused)} that no tensor uses. Set "
                "PYTORCH_ALLOC_CONF=expandable_segments:True.",
            ),
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
            f"One tensor of {write_bytes(requested)} takes more than half of the GPU. Shorten or split the batch that it "
            "is made from.",
        )
    elif allocated > 0.7 * room or allocated + requested > room or not others_known:
        yield Cause(
            "live tensors",
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
    """Return the message in at most four lines of 80 columns: the verdict, then the strongest causes with a way out."""
    lines = [_verdict(message)]
    for cause in causes(message):
        wrapped = textwrap.wrap(cause.words, 78, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False)
        if len(lines) + len(wrapped) > 4:
            break
        lines += wrapped
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
