"""Pipelines whose stages take parts of sequences (pp x cp): loss and gradients are those of one process."""

import copy
from typing import Any

import pytest
import torch

from nemo_like import ContextParallel, parallelize
from nemo_like.options import PipelineParallel
from tests.models.nano_gpt import NanoGPT
from tests.models.tiny import llama
from tests_distributed.context.cut_models import batch, build, gradients, off, off_loss, step
from tests_distributed.spawn import on_ranks, run_ranks

ROWS = 4
NAMES = ("qwen3", "gemma3_text", "gpt_oss", "deepseek_v3", "mixtral")


def _wrong(pipeline: Any, inputs: dict[str, Any], loss: float, expected: dict[str, torch.Tensor]) -> list[str]:
    """Of a step, in which this rank has the gradients of its stages."""
    found = pipeline.step(**inputs).item()
    grads = {name: grad for stage in pipeline.stages for name, grad in gradients(stage.module).items()}
    pipeline.zero_grad()
    names = {name for name, _ in pipeline.named_parameters()}
    wrong = [f"gradient of {name}" for name in grads if name not in names]
    return wrong + off((found, grads), (loss, {name: grad for name, grad in expected.items() if name in names}))


def _cases(rank: int, world_size: int, name: str, cases: list[dict[str, Any]]) -> list[str]:
    whole, inputs = build(name), batch(name, rows=ROWS)
    if name == "nanogpt":
        inputs["targets"] = inputs["idx"]
    loss, expected = step(copy.deepcopy(whole), inputs)
    sample = {key: value[:2] for key, value in inputs.items()}
    wrong = []
    stages = PipelineParallel(2, microbatches=2, loss_mean="rows" if name == "nanogpt" else None)
    for options in cases:
        given = {"cp": 2, "pp": stages, "sample_input": sample} | options
        pipeline = parallelize(copy.deepcopy(whole), **given)
        for _ in range(2):
            wrong += [f"{name} {options}: {text}" for text in _wrong(pipeline, inputs, loss, expected)]
        evaluated = off_loss(pipeline.eval_step(**inputs).item(), loss)
        wrong += [f"{name} {options}: evaluated, {text}" for text in evaluated]
    return wrong


OPTIONS: list[dict[str, Any]] = [
    {"loss": "chunked", "ac": "full"},
    {"offload": "saved", "ac": "selective"},
    {"cp": ContextParallel(2, "ulysses"), "ac": "full"},
    {"cp": ContextParallel(2, "ring"), "ac": "none"},
    {"compile": "aot_eager", "ac": "full"},
    {"ac": "40%"},
]
MODES = [{"ac": mode} for mode in ("none", "full", "selective")]


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "cases"), [("llama", OPTIONS), *((name, MODES) for name in ("llama", "nanogpt", *NAMES))]
)
def test_families_and_options(name: str, cases: list[dict[str, Any]]) -> None:
    assert run_ranks(4, _cases, name, cases, timeout=180) == [[]] * 4


@pytest.mark.long
@on_ranks(4, timeout=120)
def test_two_stages_on_a_rank(rank: int, world_size: int) -> None:
    """Two stages on a rank, and a backward that is cut in two."""
    whole, inputs = llama(num_hidden_layers=4).float().train(), batch("llama", rows=ROWS)
    loss, expected = step(copy.deepcopy(whole), inputs)
    sample = {key: value[:1] for key, value in inputs.items()}
    pp = PipelineParallel(2, "zbv", microbatches=4)
    pipeline = parallelize(copy.deepcopy(whole), ac="full", cp=2, pp=pp, sample_input=sample)
    assert [text for _ in range(2) for text in _wrong(pipeline, inputs, loss, expected)] == []


@on_ranks(4)
def test_what_cannot_be_cut_is_refused(rank: int, world_size: int) -> None:
    inputs = batch("llama", rows=ROWS)
    sample = {key: value[:2] for key, value in inputs.items()}
    given: dict[str, Any] = {"pp": PipelineParallel(2, microbatches=2), "sample_input": sample}
    model = build("llama")
    with pytest.raises(ValueError, match="it splits sequences over the ranks of FSDP2"):
        parallelize(model, **given, cp=2, strategy="single")
    with pytest.raises(ValueError, match="Mamba"):
        parallelize(build("mamba2"), ac="none", cp=2, **given)
    plain = NanoGPT()  # counts its positions in a slice of a parameter: seen in the first step
    stages = PipelineParallel(2, microbatches=2, loss_mean="tokens")
    pipeline = parallelize(plain, ac="none", cp=2, **given | {"pp": stages})
    with pytest.raises(ValueError, match="other outputs than whole sequences"):
        pipeline.step(**inputs)
