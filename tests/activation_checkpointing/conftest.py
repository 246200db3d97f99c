"""What several files of these tests start from."""

from collections.abc import Iterator

import pytest
import torch

from nemo_like._util.log import forget_announcements


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Nothing compiled, and nothing said, before and after."""
    torch.compiler.reset()
    forget_announcements()
    yield
    torch.compiler.reset()
