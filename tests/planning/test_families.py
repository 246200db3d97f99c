"""Predictions against what runs: one model of each family that was once predicted wrong, and random jobs."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
import torch
from torch import nn

from nemo_like import Job, parallelize
from nemo_like.options import FSDP2, ContextParallel
from tests.tools.benchmarks.random_jobs import Drawn, answer, draw
from tests.tools.surveys.plans import model_types, planned_and_run, survey_one
from tests.tools.surveys.tiny_models import build_tiny

pytest.importorskip("transformers")


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


class _Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (B, S, 32) -> (B, S, 8)
        return self.head(self.encoder(x))


def test_the_peak_of_torchs_own_encoder_is_the_predicted_one() -> None:
    row = planned_and_run("encoder", _Encoder(), {"x": torch.randn(4, 64, 32)})
    assert row.ran, row.problem
    assert abs(row.peak_error) <= 0.01
    assert abs(row.held_error) <= 0.001


class _TwoEnds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True) for _ in range(3))
        self.more = nn.ModuleList(nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32)) for _ in range(4))
        self.head = nn.Linear(32, 512)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # (B, S, 32) -> (B, S, 512), (B, S, 32)
        for layer in self.layers:
            x = layer(x)
        y = x
        for layer in self.more:
            y = layer(y)
        return self.head(x), y


def test_layers_whose_output_is_not_in_the_loss_have_no_backward() -> None:
    """They were taken to run backward in the place of those before them, and their parameters to be trained."""
    row = planned_and_run("two ends", _TwoEnds(), {"x": torch.randn(4, 64, 32)})
    assert row.ran, row.problem
    assert abs(row.peak_error) <= 0.01
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


class _Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        strides = (1, 1, 2, 1)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(16, 16, 3, stride, 1), nn.BatchNorm2d(16), nn.ReLU6()) for stride in strides
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (B, 16, H, W) -> (B,)
        for layer in self.layers:
            x = layer(x)
        return x.mean((1, 2, 3))


def test_layers_that_differ_in_their_stride_alone_are_not_of_one_kind() -> None:
    """The stride is a pair of numbers; the last pictures were taken to be as large as the first ones."""
    row = planned_and_run("convolutions", _Convolutions(), {"x": torch.randn(2, 16, 32, 32)})
    assert row.ran, row.problem
    assert abs(row.peak_error) <= 0.05  # workspaces of convolutions are not counted
    assert abs(row.held_error) <= 0.001


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
