"""Read and write the file of a memory snapshot: nothing that is in it runs, and its bytes are bounded."""

from __future__ import annotations

import gzip
import io
import pickle
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import NoneType
from typing import Any

from nemo_like._util.words import a_or_an
from nemo_like.explaining.snapshot import frames_of
from nemo_like.explaining.stacks import in_package, line_of, text_of

# Bytes that are read at most, of a plain file and out of a gzipped one: a snapshot of 1,000,000 events has some 0.3 GB.
_LARGEST, _LARGEST_UNPACKED = 4 << 30, 1 << 30
# Memory that unpickling may take, and more of it for each byte of a plain and of a gzipped file: 1,000,000 events of 83 MiB,
# gzipped 13 MiB, take 424 MiB.
_MEMORY, _MEMORY_PER_BYTE, _MEMORY_PER_BYTE_PACKED = 1 << 30, 10, 60
# GPUs that torch can be built for: C10_COMPILE_TIME_MAX_GPUS, c10/cuda/CUDAMacros.h.
_DEVICES = 120
_STACK = 10_000  # Frames of a stack: Python's own limit is 1,000, which users raise.
_TOTAL = 1 << 62  # Bytes of all sizes together: they are summed in 64 bits.
# Numbers that a segment or block may have: streams are pointers.
_OPTIONAL = {
    "address": range(1 << 64),
    "requested_size": range(1 << 62),
    "device": range(_DEVICES),
    "stream": range(-(1 << 63), 1 << 64),
}
_CHUNK = 1 << 18
# Errors that a damaged pickle ends in.
_DAMAGED = (
    *(pickle.UnpicklingError, EOFError, zlib.error, gzip.BadGzipFile, ValueError, TypeError, LookupError),
    *(AttributeError, OverflowError, RecursionError),
)
_GIVE = "Give a file of torch.cuda.memory._dump_snapshot, or a log with an out-of-memory message."


class SnapshotError(ValueError):
    """A file is not a memory snapshot, or a damaged one."""


class _PlainValues(pickle.Unpickler):
    """Unpickles dicts, lists, tuples, numbers and text, which takes no name of a module."""

    def find_class(self, module: str, name: str) -> Any:
        raise SnapshotError(
            f"it wants to build {printable(f'{module}.{name}'[:80])}, and a snapshot has plain values alone"
        )


class _Bounded(io.RawIOBase):
    """Count the bytes that are read, and refuse those beyond a limit before there is memory for them."""

    def __init__(self, file: io.BufferedIOBase, limit: int) -> None:
        super().__init__()
        self.file, self.limit, self.count = file, limit, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        read = self.file.readinto(memoryview(buffer)[:_CHUNK])
        self.count += read
        if self.count > self.limit:
            raise SnapshotError(f"it has more than {self.limit:,} bytes, which are read at most")
        return read


def read_snapshot(source: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """Return the dict of a snapshot: of a file, also a gzipped one, or as ``torch.cuda.memory._snapshot()`` returns it.

    Raises:
        SnapshotError: it is not a snapshot, it is damaged, or it has values that are not plain; in a line.
        OSError: the file cannot be read.
    """
    if isinstance(source, Mapping):
        return _checked(dict(source))
    path = Path(source)
    name = printable(path.name)
    try:
        with open(path, "rb") as file:
            packed, size = file.read(2) == b"\x1f\x8b", path.stat().st_size
            file.seek(0)
            bounded = _Bounded(
                gzip.GzipFile(fileobj=file) if packed else file, _LARGEST_UNPACKED if packed else _LARGEST
            )
            with _memory_limit(_MEMORY + (_MEMORY_PER_BYTE_PACKED if packed else _MEMORY_PER_BYTE) * size):
                value = _PlainValues(io.BufferedReader(bounded, _CHUNK)).load()
            return _checked(value, bounded.count)
    except SnapshotError as error:
        raise SnapshotError(f"{name} was not read: {error}.") from None
    except MemoryError:
        raise SnapshotError(f"{name} was not read: no snapshot of {size:,} bytes takes as much memory.") from None
    except _DAMAGED:
        raise SnapshotError(f"{name} was not read: it is cut, damaged or no pickle. {_GIVE}") from None


@contextmanager
def _memory_limit(more: int) -> Iterator[None]:
    """Let the process take at most `more` further bytes: five bytes of a pickle can claim 32 GiB, which no reader sees."""
    pages = Path("/proc/self/statm")
    if not pages.is_file():  # not Linux: the bytes that are read are the only bound
        yield
        return
    import resource

    before, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = int(pages.read_text(encoding="ascii").split()[0]) * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (min([limit, *(each for each in (before, hard) if each >= 0)]), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (before, hard))


def printable(text: str) -> str:
    """Return `text` with escapes in place of characters that a terminal obeys or cannot show."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _checked(value: Any, count: int | None = None) -> dict[str, Any]:
    """Return `value` where it has the form of a snapshot, whatever torch wrote it.

    count: bytes of its file, which has no more events and blocks: lists that contain one list many times are refused.
    """
    if isinstance(value, list):  # torch 2.0: segments alone
        value = {"segments": value}
    if not isinstance(value, dict) or not isinstance(value.get("segments"), list):
        names = ", ".join(key[:40] for key in [*value][:4] if isinstance(key, str)) if isinstance(value, dict) else ""
        kind = a_or_an(value) + (f" of {printable(names)}" if names else "")
        raise SnapshotError(f"it is {kind}, and a snapshot has a list of segments")
    segments, traces = value["segments"], value.setdefault("device_traces", [])
    if not isinstance(traces, list) or not all(isinstance(trace, list) for trace in traces):
        raise SnapshotError("its device_traces are not lists of events")
    if any(traces[_DEVICES:]):
        raise SnapshotError(f"it has events of more than {_DEVICES} devices")
    for segment in segments:
        _numbers(segment, "segment", "address", "total_size")
        if not isinstance(segment.get("blocks"), list):
            raise SnapshotError("a segment has no list of blocks")
    parts = sum(len(segment["blocks"]) for segment in segments) + sum(map(len, traces))
    if count is not None and parts > count:
        raise SnapshotError(f"it has {parts:,} blocks and events in {count:,} bytes")
    stacks: dict[int, list[Any]] = {}
    total = sum(segment["total_size"] for segment in segments)
    for segment in segments:
        for block in segment["blocks"]:
            _numbers(block, "block", "size")
            total += block["size"]
            if not isinstance(block.get("state"), str):
                raise SnapshotError("a block has no state")
            history = block.get("history")
            for holder in (block, *(history[:1] if isinstance(history, list) else ())):
                frames = holder.get("frames") if isinstance(holder, dict) else None
                stacks[id(frames)] = frames if isinstance(frames, list) else []
    for trace in traces:
        for event in trace:  # a million of them: no call for each
            size, frames = (event.get("size"), event.get("frames")) if type(event) is dict else (None, None)
            if type(size) is not int or size < 0 or type(event.get("action")) is not str:
                raise SnapshotError("an event without action and size")
            if (
                type(frames) not in (list, NoneType)
                or not type(event.get("addr", 0))
                is type(event.get("stream", 0))
                is type(event.get("device_free", 0))
                is int
            ):
                raise SnapshotError("addr, stream, device_free or frames of an event is of another type")
            total += size
            stacks[id(frames)] = frames or []
    if total > _TOTAL:
        raise SnapshotError("its sizes are together more than any memory")
    if count is not None:
        _clean(stacks.values())
    return value


def _numbers(part: Any, what: str, *names: str) -> None:
    """Refuse a segment or a block without numbers of these `names`, or with others that are not numbers."""
    if not isinstance(part, dict) or any(type(part.get(name)) is not int or part[name] < 0 for name in names):
        raise SnapshotError(f"a {what} without {' and '.join(names)}")
    for name, allowed in _OPTIONAL.items():
        if type(number := part.get(name, 0)) is not int or number not in allowed:
            raise SnapshotError(f"{name} of a {what} is not a number from {allowed[0]:,} to {allowed[-1]:,}")
    if not isinstance(part.get("frames") or [], list):
        raise SnapshotError(f"the frames of a {what} are not a list")


_LONGEST = {"name": re.compile(r"(?s).{4096}"), "filename": re.compile(r"[^/]{256}")}  # no file system has such a path


def _clean(stacks: Iterable[list[Any]]) -> None:
    """Replace, in place, names that a terminal would obey or that fill it."""
    for frames in stacks:
        if len(frames) > _STACK:
            raise SnapshotError(f"a stack has {len(frames):,} frames, and at most {_STACK:,} are read")
        for frame in frames:
            for key, too_long in _LONGEST.items() if type(frame) is dict else ():
                text = frame.get(key)
                if type(text) is str and (not text.isprintable() or too_long.search(text)):
                    frame[key] = printable(text[:250])


# A snapshot without names that tell whose it is: for sending it to others.

# Numbers that are kept, of segments, blocks and events; all others of a snapshot are left out.
_NUMBERS = (
    *("device", "address", "total_size", "stream", "allocated_size", "active_size", "is_expandable"),
    *("size", "requested_size", "addr", "device_free"),
)
_WORDS = {"segment_type", "state", "action"}
_OF_PYTHON = re.compile(r".*/(python3\.\d+/.*)")


def write_stripped(snapshot: Mapping[str, Any], path: str | Path) -> None:
    """Write a snapshot without paths, names of files outside of packages, and text that users put in.

    Kept are sizes, addresses, streams and order; names of functions and lines; files from the folder of packages on. Other
    files are ``script1.py``, ``script2.py``, in the order in which they occur.

    Args:
        snapshot: the result of `nemo_like.explaining.snapshot_file.read_snapshot`.
        path: the file that is written: a pickle of plain values.
    """
    names: dict[str, str] = {}
    stacks: dict[int, list[dict[str, Any]]] = {}

    def stack_of(part: Mapping[str, Any]) -> list[dict[str, Any]]:
        frames = frames_of(part)
        if id(frames) not in stacks:
            stacks[id(frames)] = [_frame(frame, names) for frame in frames]
        return stacks[id(frames)]

    segments = [
        _kept(segment) | {"blocks": [_kept(block) | {"frames": stack_of(block)} for block in segment["blocks"]]}
        for segment in snapshot["segments"]
    ]
    traces = [[_kept(event) | {"frames": stack_of(event)} for event in trace] for trace in snapshot["device_traces"]]
    with open(path, "wb") as file:
        pickle.dump({"segments": segments, "device_traces": traces}, file, protocol=4)


def _kept(part: Mapping[str, Any]) -> dict[str, Any]:
    words = {name: part[name] for name in _WORDS if isinstance(part.get(name), str) and part[name].isidentifier()}
    return words | {name: part[name] for name in _NUMBERS if isinstance(part.get(name), int)}


def _frame(frame: Any, names: dict[str, str]) -> dict[str, Any]:
    filename = text_of(frame, "filename")
    inside, of_python = in_package(filename), _OF_PYTHON.match(filename.replace("\\", "/"))
    if inside != filename.replace("\\", "/"):
        kept = f"site-packages/{inside}"
    elif of_python is not None:
        kept = of_python[1]
    elif filename.endswith((".py", ".pyx")) or filename.startswith("<"):
        kept = names.setdefault(filename, f"script{len(names) + 1}.py")
    else:
        kept = "??"
    return {"name": text_of(frame, "name"), "filename": kept, "line": line_of(frame)}
