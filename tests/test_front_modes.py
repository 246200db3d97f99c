"""The modes of the front door that other rooms carry out: budgets, plans, segments, offloading, profiles."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from nemo_like import CheckpointConfig, CheckpointWrapper, parallelize
from nemo_like._util.log import forget_announcements
from nemo_like.activation_checkpointing.plan import Plan
from nemo_like.planning.planner import plan_for
from tests.checks import assert_bitwise, step
from tests.models.decoders import batch, build

IDS = batch(2)
SAMPLE = {"input_ids": IDS}


def test_a_budget_says_beforehand_what_it_costs(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "nemo_like"):
        parallelize(build("llama"), ac="50%", sample_input=SAMPLE)
    assert "predicted peak" in caplog.text and "of a forward pass" in caplog.text


def test_a_saved_plan_is_a_mode(tmp_path: Path) -> None:
    plan_for(build("llama"), ac="40%", sample_input=SAMPLE, world_size=1).save(tmp_path / "plan.json")
    model = build("llama")
    models = parallelize(model, ac=Plan.load(tmp_path / "plan.json", model)), parallelize(build("llama"), ac="none")
    assert_bitwise(*(step(each, input_ids=IDS, labels=IDS) for each in models))
    with pytest.raises(ValueError, match="plan was made for"):
        parallelize(build("gpt2"), ac=Plan.load(tmp_path / "plan.json"))


def test_a_config_that_profiles_first_checkpoints_only_large_layers() -> None:
    config = CheckpointConfig(enabled=True, strategy="full", memory_threshold_mb=1e3)
    model = parallelize(build("llama"), ac=config, sample_input=SAMPLE)
    assert not any(isinstance(layer, CheckpointWrapper) for layer in model.model.layers)
    config = CheckpointConfig(enabled=True, strategy="full", memory_threshold_mb=1e-3)
    model = parallelize(build("llama"), ac=config, sample_input=SAMPLE)
    assert all(isinstance(layer, CheckpointWrapper) for layer in model.model.layers)


@pytest.mark.parametrize("patterns", [((), ("model.layers.[02]",)), (("model.layers.1",), ("**",))])
def test_patterns_choose_layers_and_those_that_ask_beat_those_that_forbid(
    patterns: tuple[tuple[str, ...], ...],
) -> None:
    include, exclude = patterns
    config = CheckpointConfig(
        True, "full", profile_before_apply=False, include_patterns=include, exclude_patterns=exclude
    )
    model = parallelize(build("llama"), ac=config)
    assert [isinstance(layer, CheckpointWrapper) for layer in model.model.layers] == [False, True, False]


def test_a_meta_model_is_not_measured_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    forget_announcements()
    with torch.device("meta"):
        model = build("llama")
    parallelize(model, ac="sequential", sample_input=SAMPLE)
    assert "is on the meta device and cannot run" in caplog.text
