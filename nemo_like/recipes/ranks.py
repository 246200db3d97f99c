"""The ranks of a job: who failed, who was interrupted, and the mean of what each computed."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from nemo_like._util.log import say_once, warn_once
from nemo_like.flags import ALLOCATOR_VARIABLES


class OtherRankError(RuntimeError):
    """Another rank raised, not this one: that rank's message has the reason."""


@dataclass(frozen=True)
class Ranks:
    """This process's place in the job. Every method is a collective: all ranks call it in the same order."""

    rank: int
    """From 0 to `world_size` - 1."""
    world_size: int
    device: torch.device
    """Device that this rank computes on."""
    tp: int = 1
    """Ranks that share each layer's matmuls, and so read the same samples; neighbours in rank."""
    cp: int = 1
    """Groups of `tp` that share each sequence, and so read the same samples, too."""
    pp: int = 1
    """Ranks that hold a pipeline's stages, and so read the same samples; furthest apart in rank."""
    control: dist.ProcessGroup | None = None
    """A group of all ranks over CPU tensors, so that agreeing never waits for the accelerator; None with one rank."""

    @property
    def data_rank(self) -> int:
        """Return the number of the share of each batch that this rank reads."""
        return self.rank % (self.world_size // self.pp) // (self.tp * self.cp)

    @property
    def tp_group(self) -> int:
        """Return the number of this rank's group of `tp`: ranks of one group compute the same, and drop the same."""
        return self.rank // self.tp

    @property
    def data_ranks(self) -> int:
        """Return the number of shares that a batch is cut into."""
        return self.world_size // (self.tp * self.cp * self.pp)

    @contextmanager
    def together(self, doing: str) -> Iterator[None]:
        """Run the block on every rank; where it raises on any rank, raise on all of them, so that none waits forever.

        The block itself must not call a collective that could hang because another rank raised before it.

        Raises:
            OtherRankError: the block raised on another rank; on the rank itself its own error goes on.
        """
        try:
            yield
        except Exception:
            self.any(True)
            raise
        if self.any(False):
            raise OtherRankError(f"Another rank failed while {doing}; its own message has the reason.")

    def any(self, flag: bool) -> bool:
        """Return whether `flag` is true on any rank."""
        return self.largest(int(flag)) > 0

    def largest(self, value: int) -> int:
        """The largest of the ranks' values."""
        if self.control is None:
            return value
        tensor = torch.tensor(value)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.control)
        return int(tensor)

    def from_first(self, value: Any) -> Any:
        """Rank 0's value: a number or text."""
        values = [value]
        if self.control is not None:
            dist.broadcast_object_list(values, 0, group=self.control)
        return values[0]

    def gather(self, value: int) -> list[int]:
        """Every rank's value, in order."""
        tensor = torch.zeros(self.world_size, dtype=torch.int64)
        tensor[self.rank] = value
        return self.sum(tensor).tolist()

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, on the CPU, same shape and dtype."""
        values = values.detach().cpu()
        if self.control is not None:
            dist.all_reduce(values, group=self.control)
        return values


class Interrupt:
    """A context manager in which the first SIGINT or SIGTERM only sets `requested`; a later one acts as usual.

    The job then finishes the step and saves. torchrun gives its ranks 30 s for that. Outside of the main thread, where Ray
    Train runs a job and Python handles no signal, none is caught.
    """

    def __init__(self) -> None:
        self.requested: int = 0
        """The signal's number, or 0."""
        self._since = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is not threading.main_thread():
            warn_once(
                "The training job runs outside of the main thread, where Python handles no signal: SIGTERM and Ctrl-C do "
                "as set by whoever started it, and save nothing. The last complete checkpoint stays."
            )
            return self
        self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.requested:
            self.requested, self._since = number, now
        # A launcher passes one Ctrl-C on to ranks that got it from the terminal already: within two seconds it is one wish.
        elif now - self._since > 2:
            signal.signal(number, self._before[number])
            signal.raise_signal(number)


def let_segments_grow(device_type: str) -> None:
    """Set ``PYTORCH_ALLOC_CONF`` for a CUDA device where it is unset, before the first allocation reads it."""
    if device_type == "cuda" and not os.environ.keys() & {*ALLOCATOR_VARIABLES}:
        os.environ[ALLOCATOR_VARIABLES[0]] = "expandable_segments:True"
        say_once(
            "PYTORCH_ALLOC_CONF is unset, so this job sets expandable_segments:True, with which less memory is lost between "
            "blocks. To keep PyTorch's default, set PYTORCH_ALLOC_CONF=expandable_segments:False."
        )
