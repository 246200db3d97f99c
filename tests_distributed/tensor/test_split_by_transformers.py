"""Models that transformers has split and sharded by a `DistributedConfig`, checkpointed afterwards: the same gradients."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nemo_like import apply_activation_checkpointing, plan_for
from nemo_like.activation_checkpointing import is_checkpointed
from tests.checks import assert_bitwise, assert_near, gradients_of
from tests.models.decoders import batch, build
from tests_distributed.spawn import run_ranks

pytest.importorskip("transformers.distributed", reason="transformers before 5.23 shards no models")

MODES = ("full", "selective", "submodule", "sequential")
SIZES = {"fsdp": dict(fsdp_size=2), "tp": dict(tp_size=2), "ep": dict(fsdp_size=2, ep_size=2)}


def _compare(rank: int, world_size: int, folder: str, name: str, sizes: dict[str, int], modes: tuple[str, ...]) -> None:
    import transformers
    from transformers.distributed import DistributedConfig

    ids = batch(2, 12, seed=0 if "tp_size" in sizes else rank)

    def loaded() -> Any:
        kind = transformers.AutoModelForCausalLM
        return kind.from_pretrained(folder, distributed_config=DistributedConfig(**sizes), dtype=torch.float32).train()

    def step(model: nn.Module) -> dict[str, Tensor]:
        for _ in range(2):  # the second step has gathered and freed its shards before
            model.zero_grad()
            torch.manual_seed(3)
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        return gradients_of(model)

    wanted = step(loaded())
    assert len(wanted) > 20
    plan = plan_for(build(name), ac="50%", sample_input={"input_ids": ids, "labels": ids}, gpu="cpu", world_size=1)
    for ac in (*modes, plan):
        model = loaded()
        kept = dict(model.named_parameters())
        apply_activation_checkpointing(model, ac)
        assert {key: id(p) for key, p in model.named_parameters()} == {key: id(p) for key, p in kept.items()}
        assert any(is_checkpointed(module) for module in model.modules())
        assert_bitwise(step(model), wanted, ac)
    chunked = loaded()
    apply_activation_checkpointing(chunked, "full", loss="chunked")
    assert_near(step(chunked), wanted, least=1e-4)


@pytest.mark.few(1)
@pytest.mark.parametrize("modes", [("selective",), MODES])
@pytest.mark.parametrize(("name", "split"), [("qwen3", "fsdp"), ("qwen3", "tp"), ("mixtral", "ep")])
def test_every_mode_and_a_plan(tmp_path: Path, name: str, split: str, modes: tuple[str, ...]) -> None:
    build(name).save_pretrained(tmp_path)
    run_ranks(2, _compare, str(tmp_path), name, SIZES[split], modes, timeout=120)
