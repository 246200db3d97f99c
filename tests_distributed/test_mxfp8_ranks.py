"""``precision="mxfp8-emulated"`` on two gloo ranks: torchao's own gradients under FSDP2, and close ones with ``tp``."""

from typing import Any

import torch

from nemo_like import FSDP2, parallelize
from nemo_like.options import TensorParallel
from tests.checks import assert_bitwise, assert_near, step
from tests.models.mxfp8 import converted, wide_llama
from tests_distributed.spawn import on_ranks


@on_ranks(2)
def test_gradients_are_those_of_torchao(rank: int, world_size: int) -> None:
    """Five models in PyTorch's own operators, three of them on both ranks, which take over 2 s."""
    batches = torch.randint(64, (2, 1, 32), generator=torch.Generator().manual_seed(0))
    whole = [step(converted(), input_ids=ids, labels=ids) for ids in batches]
    how: dict[str, Any] = {"precision": "mxfp8-emulated", "device": "cpu"}
    found = step(parallelize(wide_llama(), FSDP2(), ac="full", **how), input_ids=batches[rank], labels=batches[rank])
    mean = {name: (grad.float() + whole[1][name].float()) / 2 for name, grad in whole[0].items()}  # as FSDP2 adds
    assert_bitwise(found, mean | {"loss": whole[rank]["loss"]})
    for sequence_parallel in (False, True):
        how["tp"] = TensorParallel(2, sequence_parallel=sequence_parallel)
        split = parallelize(wide_llama(), ac="selective", **how)
        found = step(split, input_ids=batches[0], labels=batches[0])
        assert [type(module).__name__ for module in split.modules()].count("MXFP8Linear") == 2 * 7
        # Sums over the ranks round otherwise, and a last bit moves a value by a step of float8, an eighth of it.
        assert_near(found, whole[0], 0.125)
