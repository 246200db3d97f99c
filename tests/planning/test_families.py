"""Predictions against what runs: one model of each family that was once predicted wrong, and random jobs."""

from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
from torch import nn

from nemo_like import Job, parallelize
from nemo_like.options import FSDP2, ContextParallel
from tests.models.blocks import Layer, Stack, in_turn
from tests.tools.benchmarks.random_jobs import Drawn, answer, draw
from tests.tools.surveys.plans import model_types, planned_and_run, survey_one
from tests.tools.surveys.tiny_models import build_tiny


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param("mamba", marks=pytest.mark.long),  # many gradients meet in one tensor: autograd sums them in place
        "bloom",  # its layers return attention weights that nobody uses
        "bart",  # parameters that never get a gradient
        pytest.param("jamba", marks=pytest.mark.long),
        "roformer",  # its model holds the input of the first layer too
        "doge",  # attention without a fused kernel
        "inkling_text",  # a backward formula that writes in place
        "qwen2_audio_encoder",  # a gradient whose rows are columns, which the last layer copies
        "altclip",  # a trainable scalar, which only FSDP refuses
        "codegen",  # a region copies a small position table while forward runs, to see whether it changes
        "xmod",  # it picks rows by the values of a constant
        "resnet",  # a region keeps the running statistics as they were
    ],
)
def test_the_peak_of_a_step_is_the_predicted_one(model_type: str) -> None:
    row = survey_one(model_type, model_types()[model_type])
    assert row.ran, row.problem
    assert model_type == "altclip" or abs(row.peak_error) <= 0.01  # whose convolutions' workspaces are not counted
    assert abs(row.held_error) <= 0.001


@pytest.mark.long
@pytest.mark.parametrize("model_type", ["bart", "roformer", "m2m_100", "led"])
def test_a_mask_of_floats_takes_the_branch_that_it_takes_in_training(
    model_type: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its default is ``torch.ones``; m2m_100 also draws a number for each layer, to leave some out."""
    row = survey_one(model_type, model_types()[model_type])
    assert row.ran, row.problem
    assert abs(row.held_error) <= 0.001
    assert not [record for record in caplog.records if "other operators" in record.getMessage()]


def _torch_layers() -> list[nn.Module]:
    return [nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True) for _ in range(3)]


OWN: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], float]] = {
    "torch's own encoder": (
        lambda: Stack(
            (),
            start=nn.TransformerEncoder(_torch_layers()[0], 3, enable_nested_tensor=False),
            head=nn.Linear(32, 8),
        ),
        (4, 64, 32),
        0.01,
    ),
    # Layers whose output is not in the loss have no backward: they were taken to run backward in the place of those
    # before them, and their parameters to be trained.
    "two ends": (
        lambda: Stack(
            _torch_layers(),
            head=Layer(
                lambda head, x: (head.out(x), in_turn(head.more, x)),  # (B, S, 512), (B, S, 32)
                more=nn.ModuleList(nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32)) for _ in range(4)),
                out=nn.Linear(32, 512),
            ),
        ),
        (4, 64, 32),
        0.01,
    ),
    # Layers that differ in their stride alone, a pair of numbers, are not of one kind: the last pictures were taken to be
    # as large as the first ones. Workspaces of convolutions are not counted.
    "convolutions": (
        lambda: Stack(
            (
                nn.Sequential(nn.Conv2d(16, 16, 3, stride, 1), nn.BatchNorm2d(16), nn.ReLU6())
                for stride in (1, 1, 2, 1)
            ),
            head=lambda x: x.mean((1, 2, 3)),
        ),
        (2, 16, 32, 32),
        0.05,
    ),
}  # fmt: skip
"""A model, the shape that it is called with, and how far the peak may be from the plan's."""


@pytest.mark.parametrize("name", OWN)
def test_the_peak_of_a_step_of_ones_own_model_is_the_predicted_one(name: str) -> None:
    make, shape, tolerance = OWN[name]
    row = planned_and_run(name, make(), {"x": torch.randn(shape)})
    assert row.ran, row.problem
    assert abs(row.peak_error) <= tolerance
    assert abs(row.held_error) <= 0.001


@pytest.mark.parametrize("model_type", ["flaubert"])
def test_a_cache_that_a_model_makes_in_every_forward_is_refused_by_name(model_type: str) -> None:
    """A replay would fill it a second time: attention then goes over twice the tokens."""
    row = survey_one(model_type, model_types()[model_type])
    assert row.trains and not row.ran and "hands transformer.attentions.0 a key/value cache (cache=)" in row.problem
    model = build_tiny(row.model_class)
    parallelize(model, "single", "full")
    with pytest.raises(RuntimeError, match="was called with cache= while gradients are on"):
        model(torch.ones(2, 8, dtype=torch.long))


SEEDS = (1007, 1043, 2017, 3319, 3420, 3659, 3853, 4279)
SHORT = (3420, 3659)
"""Those of the default run."""


def _named(seeds: Collection[int], short: Collection[int]) -> list[Any]:
    return [
        pytest.param(seed, id=f"{seed}: {draw(seed)[0].words}", marks=[] if seed in short else [pytest.mark.long])
        for seed in seeds
    ]


@pytest.mark.parametrize("seed", _named(SEEDS, SHORT))
def test_a_plan_and_fit_say_the_same(seed: int) -> None:
    drawn, _ = draw(seed)
    found = answer(drawn, rank=False)
    assert found.plan and found.fit and not found.problems, (drawn.words, found)


@pytest.mark.parametrize("seed", _named([seed for seed in SEEDS if seed != 2017], ()))  # which has most micro-batches
def test_a_fake_rank_says_the_same(seed: int) -> None:
    drawn, _ = draw(seed)
    found = answer(drawn)
    assert found.rank is not None and not found.problems, (drawn.words, found)


def test_ulysses_names_the_heads_that_tp_leaves() -> None:
    job = Job.of(ac="none", tp=2, cp=ContextParallel(4, "ulysses"), world_size=8, gpu="cpu")
    found = answer(Drawn("llama", job, 1, 32), rank=False)
    assert "this attention has 2 heads, 1 of keys on each rank of tp" in found.refused["plan"]


@pytest.mark.parametrize(("ranks", "divisors"), [(3, "no number between does"), (8, "2, 4")])
def test_a_job_reshards_over_a_divisor_of_its_shards(ranks: int, divisors: str) -> None:
    with pytest.raises(ValueError, match=rf"shard axis of {ranks} ranks \({divisors}\)"):
        Job.of(FSDP2(reshard_after_forward=3 if ranks == 8 else 2), world_size=ranks)
