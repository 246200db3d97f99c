"""Snapshots as PyTorch writes them: of the records of real ones beside this file, and made step by step."""

import gzip
import json
from pathlib import Path
from typing import Any

from nemo_like.explaining.snapshot import MemoryTimeline, timeline

RECORDS = Path(__file__).with_name("records")
"""Facts of published snapshots: sizes, order and names. The sources are in each file."""


def real(name: str) -> dict[str, Any]:
    """Return the snapshot that a record was made from."""
    record = json.loads(gzip.decompress((RECORDS / f"{name}.json.gz").read_bytes()))
    stacks = [[frame(*each) for each in stack] for stack in record["stacks"]]
    traces: list[list[dict[str, Any]]] = [[] for _ in range(1 + max(each["device"] for each in record["devices"]))]
    segments = []
    for device in record["devices"]:
        traces[device["device"]] = [
            {"action": action, "addr": at, "size": size, "stream": stream, "frames": stacks[stack], "time_us": time}
            for action, at, size, stream, stack, time in device["events"]
        ]
        for at, total, stream, _, _, blocks in device["segments"]:
            held = [
                {"address": a, "size": size, "requested_size": asked, "state": state, "frames": stacks[stack]}
                for a, size, asked, state, stack in blocks
            ]
            segments.append(
                {"device": device["device"], "address": at, "total_size": total, "stream": stream, "blocks": held}
            )
    return {"segments": segments, "device_traces": traces}


def window(whole: MemoryTimeline, first: int, last: int) -> MemoryTimeline:
    """Return a timeline as if the recording had begun before event `first` and ended after event `last`."""
    segments = [
        {
            "address": segment.address, "total_size": segment.size, "stream": segment.stream,
            "blocks": [
                {"address": b.address, "size": b.size, "requested_size": b.requested, "state": "active_allocated",
                 "frames": list(b.frames)}
                for b in sorted(segment.blocks, key=lambda block: block.address)
            ],
        }
        for segment in whole.segments_at(last)
    ]  # fmt: skip
    return timeline(segments, whole.trace[first : last + 1])


def frame(name: str, filename: str, line: int) -> dict[str, Any]:
    """Return one frame of a stack."""
    return {"name": name, "filename": filename, "line": line}


TORCH = "/venv/lib/python3.11/site-packages/torch"
_AROUND = {
    "build": [frame("_apply", f"{TORCH}/nn/modules/module.py", 900), frame("<module>", "/job/train.py", 5)],
    "forward": [frame("forward", "/job/model.py", 20), frame("<module>", "/job/train.py", 30)],
    "loss": [frame("cross_entropy", f"{TORCH}/nn/functional.py", 3), frame("<module>", "/job/train.py", 31)],
    "backward": [frame("torch::autograd::Engine::thread_main()", "??", 0)],
    "optimizer": [frame("step", f"{TORCH}/optim/adamw.py", 7), frame("<module>", "/job/train.py", 33)],
    "library": [frame("at::cuda::getNewWorkspace()", "??", 0), frame("forward", "/job/model.py", 21)],
    "zero_grad": [frame("zero_grad", f"{TORCH}/optim/optimizer.py", 9), frame("<module>", "/job/train.py", 29)],
    "script": [frame("<module>", "/job/train.py", 40)],
}


def stack(phase: str, line: int = 0) -> list[dict[str, Any]]:
    """Return a stack of `phase`; `line`: of the model's source, in forward."""
    frames = [dict(each) for each in _AROUND[phase]]
    if line:
        frames[0]["line"] = line
    return frames


class Recording:
    """A device's memory, one event after the other; each block has a segment of its own."""

    def __init__(self) -> None:
        self.trace: list[dict[str, Any]] = []
        self.alive: dict[int, tuple[int, list[dict[str, Any]], int]] = {}
        self.cached: dict[int, tuple[int, list[dict[str, Any]], int]] = {}
        self._next = 1 << 30

    def make(
        self,
        size: int,
        phase: str,
        line: int = 0,
        *,
        stream: int = 0,
        recorded: bool = True,
        frames: list[dict[str, Any]] | None = None,
    ) -> int:
        """Allocate; return the address. `frames`: the stack, in place of that of `phase`."""
        at, self._next = self._next, self._next + (1 << 30)
        if frames is None:
            frames = stack(phase, line) if recorded else []
        self.alive[at] = (size, frames, stream)
        if recorded:
            self._event("segment_alloc", at, size, frames, stream)
            self._event("alloc", at, size, frames, stream)
        return at

    def ask(self, at: int, phase: str = "script") -> None:
        """Ask to free what other streams still use."""
        self._event("free_requested", at, self.alive[at][0], stack(phase), self.alive[at][2])

    def free(
        self, *addresses: int, phase: str = "script", frames: list[dict[str, Any]] | None = None, cached: bool = False
    ) -> None:
        """Free blocks, with their segments; `cached`: their segments stay."""
        freed = stack(phase) if frames is None else frames
        for at in addresses:
            size, frames, stream = self.alive.pop(at)
            self._event("free_requested", at, size, freed, stream)
            self._event("free_completed", at, size, freed, stream)
            if cached:
                self.cached[at] = size, frames, stream
            else:
                self._event("segment_free", at, size, frames, stream)

    def _event(self, action: str, at: int, size: int, frames: Any, stream: int) -> None:
        self.trace.append({"action": action, "addr": at, "size": size, "stream": stream, "frames": frames})

    def snapshot(self) -> dict[str, Any]:
        """Return it as PyTorch writes it."""
        segments = [
            {
                "device": 0, "address": at, "total_size": size, "stream": stream,
                "blocks": [{"address": at, "size": size, "requested_size": size, "state": state, "frames": frames}],
            }
            for state, blocks in (("active_allocated", self.alive), ("inactive", self.cached))
            for at, (size, frames, stream) in blocks.items()
        ]  # fmt: skip
        return {"segments": segments, "device_traces": [self.trace]}
