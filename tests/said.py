"""What the library logged, without what the packages it imports say of themselves while they are imported."""

from __future__ import annotations

import logging

import pytest


def said(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == "nemo_like"]
