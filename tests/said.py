"""What the library logged, without what the packages it imports say of themselves while they are imported."""

import logging

import pytest


def said(caplog: pytest.LogCaptureFixture, level: int = logging.WARNING) -> list[logging.LogRecord]:
    """Return the records of our logger from `level` on, whatever level a neighbour has set it to."""
    return [record for record in caplog.records if record.name == "nemo_like" and record.levelno >= level]


@pytest.fixture
def logs(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """What our logger says from WARNING on; nothing was announced before."""
    from nemo_like._util.log import forget_announcements

    forget_announcements()
    caplog.set_level("WARNING", "nemo_like")
    return caplog
