"""One process that stands for one rank of a large job: torch's ``fake`` back end, whose collectives do nothing."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def fake_rank(rank: int, world_size: int) -> Iterator[None]:
    """This process is `rank` of `world_size` inside."""
    with mock.patch.dict(os.environ, RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK="0"):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        try:
            yield
        finally:
            dist.destroy_process_group()
