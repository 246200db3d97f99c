"""What the library logged, without what the packages it imports say of themselves while they are imported."""

import logging

import pytest


def said(caplog: pytest.LogCaptureFixture, level: int = logging.WARNING) -> list[logging.LogRecord]:
    """Return the records of our logger from `level` on, whatever level a neighbour has set it to."""
    return [record for record in caplog.records if record.name == "nemo_like" and record.levelno >= level]
