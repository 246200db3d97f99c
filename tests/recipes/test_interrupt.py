"""Signals and threads: who catches them."""

from __future__ import annotations

import signal
import threading

import pytest

from nemo_like._util.log import forget_announcements
from nemo_like.recipes.interrupt import Interrupt


def test_a_signal_is_noted_in_the_main_thread() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Interrupt() as stop:
        signal.raise_signal(signal.SIGTERM)
        assert stop.requested == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before


def test_in_another_thread_none_is_caught_and_it_is_said(caplog: pytest.LogCaptureFixture) -> None:
    forget_announcements()
    before, seen = signal.getsignal(signal.SIGTERM), []

    def work() -> None:
        with Interrupt() as stop:
            seen.extend([stop.requested, signal.getsignal(signal.SIGTERM)])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [0, before]
    assert "outside of the main thread" in caplog.text
