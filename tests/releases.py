"""Which torch the tests run on, and what a release lacks."""

from __future__ import annotations

import pytest
import torch

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])

reduces_what_is_not_there = pytest.mark.skipif(
    TORCH < (2, 12), reason="torch 2.11's FSDP2 reduces only gradients that are there, of one dtype"
)
"""For tests in which a rank has no gradient of some parameter, or gradients of two dtypes."""

grouped_products_differ = TORCH < (2, 12)
"""`grouped_mm`, which transformers calls in eager mode, has other last bits than the products of single experts, which
it calls under a compiler (float32 on the CPU). From 2.13 on the bits are the same."""

compiles_experts_alike = pytest.mark.skipif(
    TORCH < (2, 12),
    reason="compiled by torch 2.11, a layer of DeepSeek-V3 saves other tensors in a replay, which raises",
)
