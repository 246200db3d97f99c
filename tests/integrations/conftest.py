"""Fixtures of the tests of trainers."""

from collections.abc import Iterator

import pytest


@pytest.fixture
def overrides() -> Iterator[None]:
    """Forget the parameters that a Trainer has told bitsandbytes to keep in 32 bits: it knows them by number."""
    manager = pytest.importorskip("bitsandbytes").optim.GlobalOptimManager.get_instance()
    yield manager.initialize()
    manager.initialize()
