"""A folder of transformers from a sharded, checkpointed model: `save_pretrained` with the whole weights handed in."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nemo_like import parallelize
from nemo_like.distributed import get_model_state
from tests.models.decoders import build
from tests_distributed.spawn import run_ranks


def _save(rank: int, world_size: int, folder: str, ac: str) -> None:
    model = parallelize(build("llama"), ac=ac, device="cpu")
    state = get_model_state(model, full=True)  # a collective; whole on rank 0
    if rank == 0:
        model.save_pretrained(folder, state_dict=state)


@pytest.mark.parametrize("ac", ["none", "full"])
def test_the_folder_loads_as_the_bare_model(tmp_path: Path, ac: str) -> None:
    run_ranks(2, _save, str(tmp_path), ac, timeout=100)
    bare = build("llama")
    loaded = type(bare).from_pretrained(tmp_path).state_dict()
    assert loaded.keys() == bare.state_dict().keys()
    assert all(torch.equal(loaded[name], value) for name, value in bare.state_dict().items())
