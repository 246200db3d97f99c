"""Which torch the tests run on, and what a release lacks."""

from __future__ import annotations

import pytest
import torch

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])

reduces_what_is_not_there = pytest.mark.skipif(
    TORCH < (2, 12), reason="torch 2.11's FSDP2 reduces only gradients that are there, of one dtype"
)
"""For tests in which a rank has no gradient of some parameter, or gradients of two dtypes."""
