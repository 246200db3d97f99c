"""A snapshot without what tells whose it is: for sending it to others."""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_like.explaining.stacks import in_package, line_of, text_of

_SEGMENT = ("device", "address", "total_size", "stream", "allocated_size", "active_size", "is_expandable")
_BLOCK = ("address", "size", "requested_size")
# Numbers that are kept; what else a snapshot has is left out.
_EVENT = ("addr", "size", "stream", "device_free")
_WORDS = {"segment_type", "state", "action"}
_OF_PYTHON = re.compile(r".*/(python3\.\d+/.*)")


def write_stripped(snapshot: Mapping[str, Any], path: str | Path) -> None:
    """Write a snapshot without paths, names of files outside of packages, and text that users put in.

    Kept are sizes, addresses, streams and order; names of functions and lines; files from the folder of packages on. Other
    files are ``script1.py``, ``script2.py``, in the order in which they occur.

    Args:
        snapshot: what `nemo_like.explaining.snapshot.read_snapshot` returned.
        path: the file that is written: a pickle of plain values.
    """
    names: dict[str, str] = {}
    stacks: dict[int, list[dict[str, Any]]] = {}

    def stack_of(part: Mapping[str, Any]) -> list[dict[str, Any]]:
        frames = part.get("frames") or []
        if id(frames) not in stacks:
            stacks[id(frames)] = [_frame(frame, names) for frame in frames]
        return stacks[id(frames)]

    def block_of(block: Mapping[str, Any]) -> dict[str, Any]:
        history = block.get("history")
        frames = block if "frames" in block or not history else history[0]
        return _kept(block, _BLOCK) | {"frames": stack_of(frames)}

    segments = [
        _kept(segment, _SEGMENT) | {"blocks": list(map(block_of, segment["blocks"]))}
        for segment in snapshot["segments"]
    ]
    traces = [
        [_kept(event, _EVENT) | {"frames": stack_of(event)} for event in trace] for trace in snapshot["device_traces"]
    ]
    with open(path, "wb") as file:
        pickle.dump({"segments": segments, "device_traces": traces}, file, protocol=4)


def _kept(part: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    words = {name: part[name] for name in _WORDS if isinstance(part.get(name), str) and part[name].isidentifier()}
    return words | {name: part[name] for name in names if isinstance(part.get(name), int)}


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
