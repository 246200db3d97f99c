"""Ctrl-C and a scheduler's SIGTERM: finish the step, save a checkpoint, exit.

torchrun gives its ranks 30 s for this and then kills them; the last complete checkpoint is there in any case.
"""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

from nemo_like._util.log import warn_once

# A launcher passes one Ctrl-C on to ranks that got it from the terminal already, so a second signal within this many
# seconds is the same request; one after it comes from a person who does not want to wait for the step.
_SAME_WISH_SECONDS = 2.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """A context manager in which the first SIGINT or SIGTERM only sets `requested`; a later one acts as usual.

    Outside of the main thread, where Ray Train runs a job and Python handles no signal, none is caught.
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
        for number in _SIGNALS:
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.requested:
            self.requested, self._since = number, now
        elif now - self._since > _SAME_WISH_SECONDS:
            signal.signal(number, self._before[number])
            signal.raise_signal(number)
