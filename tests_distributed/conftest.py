"""One thread per process, and the server of `tests_distributed.spawn` ended with the session."""

import logging
import os
from collections.abc import Iterator

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")  # ranks share the machine's cores; a pool per rank would only make them wait
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["NEMO_LIKE_CACHE"] = "off"  # no rates that somebody measured here, no traces of another test

import pytest  # noqa: E402
import torch  # noqa: E402

from tests.said import logs  # noqa: E402, F401
from tests.selection import pytest_collection_modifyitems  # noqa: E402, F401
from tests_distributed.spawn import close_server  # noqa: E402

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _the_level_of_before() -> Iterator[None]:
    """A training job that runs in this process lets our logger say more."""
    logger = logging.getLogger("nemo_like")
    before = logger.level
    yield
    logger.setLevel(before)


def pytest_sessionfinish(session: pytest.Session) -> None:
    close_server()
