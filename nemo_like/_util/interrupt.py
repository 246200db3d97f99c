"""Ctrl-C and a scheduler's SIGTERM: finish the work under way, then stop."""

import signal
import threading
import time
from types import FrameType
from typing import Any, Self

from nemo_like._util.log import warn_once


class Interrupt:
    """A context manager in which the first SIGINT or SIGTERM only sets `requested`; a later one acts as usual.

    The job then finishes the step and saves. torchrun gives its ranks 30 s for that. Outside of the main thread, where Ray
    Train runs a job and Python handles no signal, none is caught.
    """

    def __init__(self) -> None:
        self.requested: int = 0  # The signal's number, or 0.
        self._since = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
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
