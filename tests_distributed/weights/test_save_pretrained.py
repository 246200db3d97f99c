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
    for arguments in ((folder,), (folder, rank == 0, None)):
        with pytest.raises(
            RuntimeError, match=r"of LlamaForCausalLM\. Gather them .*get_model_state\(model, full=True\)"
        ):
            model.save_pretrained(*arguments)
    assert not list(Path(folder).iterdir())  # nothing was written
    state = get_model_state(model, full=True)  # a collective; whole on rank 0
    if rank == 0:
        model.save_pretrained(folder, state_dict=state)


@pytest.mark.compat
@pytest.mark.parametrize("ac", ["none", "full"])
def test_the_folder_loads_as_the_bare_model(tmp_path: Path, ac: str) -> None:
    run_ranks(2, _save, str(tmp_path), ac, timeout=100)
    bare = build("llama")
    loaded = type(bare).from_pretrained(tmp_path).state_dict()
    assert loaded.keys() == bare.state_dict().keys()
    assert all(torch.equal(loaded[name], value) for name, value in bare.state_dict().items())


def _adapters(rank: int, world_size: int, folder: str) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    model = parallelize(peft.get_peft_model(build("llama"), config), ac="full", device="cpu")
    with pytest.raises(RuntimeError, match=r"of PeftModelForCausalLM\..*state_dict=state"):
        model.save_pretrained(folder)
    state = get_model_state(model, full=True)
    if rank == 0:
        model.save_pretrained(folder, state_dict=state)


def test_adapters_are_saved_from_whole_weights(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    run_ranks(2, _adapters, str(tmp_path), timeout=100)
    loaded = peft.PeftModel.from_pretrained(build("llama"), tmp_path)
    assert any(name.endswith("lora_B.default.weight") and p.abs().sum() > 0 for name, p in loaded.named_parameters())
