"""Weights in 4 bits under FSDP2, which shards their packed bytes: trained on two ranks, with the peak of the plan."""

from pathlib import Path

import pytest
import torch

from nemo_like import parallelize
from nemo_like.models import text_batch
from nemo_like.planning.predictions.rank import peak_of
from tests.planning.test_four_bits import CONFIG, SINGLE, adamw, loaded, query_of, scales_of
from tests_distributed.allocated import step_peak_bytes
from tests_distributed.spawn import run_ranks

transformers = pytest.importorskip("transformers")


def _train(rank: int, world_size: int, folder: Path, strategy: str) -> tuple[int, int, list[float]]:
    """Return the planned and the measured peak of a step, and losses."""
    model, batch = loaded(folder, double=True, quant_storage=torch.float32), text_batch(1, 8)
    torch.manual_seed(0)
    for parameter in filter(lambda p: p.requires_grad, model.parameters()):
        torch.nn.init.normal_(parameter, std=0.1)
    job = SINGLE.change(strategy=strategy, world_size=world_size)
    query, losses = query_of(model, job), list[float]()
    model, kept = parallelize(model, job), []
    optimizer = adamw(model)

    def step() -> None:
        kept[:] = [model(**batch)]
        kept[0].loss.backward()
        losses.append(float(kept[0].loss.detach()))
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    scales = scales_of(module for module in model.modules() if hasattr(module, "quant_state"))
    measured = step_peak_bytes(model, optimizer, step, lambda: [scales, kept])
    return peak_of(query, query.uniform("none")).total, measured, losses[:3]


@pytest.mark.long  # 12 s: three processes load bitsandbytes
def test_two_ranks_train_as_one_does_and_have_the_planned_peak(tmp_path: Path) -> None:
    transformers.AutoModelForCausalLM.from_config(CONFIG).save_pretrained(tmp_path)
    (*_, alone), *ranks = *run_ranks(1, _train, tmp_path, "single"), *run_ranks(2, _train, tmp_path, "fsdp2")
    for planned, measured, losses in ranks:
        assert planned == pytest.approx(measured, abs=256)
        assert losses == pytest.approx(alone, rel=1e-6) and losses[2] < losses[0]
