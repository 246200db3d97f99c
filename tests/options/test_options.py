"""Options: words and defaults, what they mean together, and that each refusal names its field."""

import dataclasses
import json
from typing import Any

import pytest
import torch

from nemo_like import StepSpec
from nemo_like.distributed.pipeline.schedules import stages_of
from nemo_like.options import OPTIMIZERS, SCHEDULES, CheckpointConfig, ChunkedLoss, PipelineParallel, parse_ac


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        (ChunkedLoss, dict(chunk_tokens=0), "chunk_tokens is 0"),
        (ChunkedLoss, dict(chunk_tokens=True), "chunk_tokens is True"),
        (ChunkedLoss, dict(chunk_bytes="1 parsec"), "chunk_bytes is '1 parsec', which is not a number of bytes"),
        (ChunkedLoss, dict(chunk_bytes=0), "at least one byte"),
        (ChunkedLoss, dict(chunk_bytes=1.5), "chunk_bytes is 1.5"),
        (ChunkedLoss, dict(grads_in_float32=1), "grads_in_float32 is 1"),
        (PipelineParallel, {"size": 0}, "pp is 0; it must be a whole number of ranks >= 1"),
        (PipelineParallel, {"size": True}, "pp is True"),
        (
            PipelineParallel,
            {"size": 2, "schedule": "1f1c"},
            "schedule is '1f1c'; it must be one of .* Did you mean '1f1b'",
        ),
        (PipelineParallel, {"size": 2, "schedule": None}, "schedule is None"),
        (PipelineParallel, {"size": 2, "microbatches": 0}, "microbatches is 0"),
        (PipelineParallel, {"size": 2, "microbatches": 1}, "fewer micro-batches than stages"),
        (PipelineParallel, {"size": 2, "stages_per_rank": 2}, "'1f1b' has 1 on each rank.*use 'interleaved_1f1b'"),
        (PipelineParallel, {"size": 2, "schedule": "zbv", "stages_per_rank": 3}, "'zbv' has 2 on each rank"),
        (
            PipelineParallel,
            {"size": 2, "schedule": "interleaved_1f1b", "microbatches": 5},
            "rounds of equal length: use 4 or 6",
        ),
        (
            PipelineParallel,
            {"size": 2, "schedule": "dualpipev", "microbatches": 3},
            "as many as there are stages: use 4",
        ),
        (
            PipelineParallel,
            {"size": 2, "balance": "even"},
            "balance is 'even'; it must be 'time', 'memory' or how many",
        ),
        (PipelineParallel, {"size": 2, "balance": [2, 0]}, "balance is .2, 0."),
        (PipelineParallel, {"size": 2, "balance": [2, 2, 2]}, "balance has 3 numbers and there are 2 stages"),
        (StepSpec, dict(microbatches=0), "microbatches is 0"),
        (StepSpec, dict(microbatches=True), "microbatches is True"),
        (StepSpec, dict(sync="first"), "sync is 'first'; it must be one of every, last"),
        (StepSpec, dict(keeps_output=1), "keeps_output is 1"),
        (StepSpec, dict(zero_grad=False), "zero_grad is False"),
        (StepSpec, dict(zero_grad="zeros"), "Did you mean 'zero'"),
        (StepSpec, dict(optimizer="adamm"), "optimizer is 'adamm'; it must be one of adamw, .* Did you mean 'adamw'"),
        (StepSpec, dict(loss_fn="mean"), "loss_fn is 'mean'"),
    ],
)
def test_a_wrong_option_is_named(kind: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        kind(**arguments)


def test_words_of_a_loss() -> None:
    assert ChunkedLoss.of("chunked") == ChunkedLoss() == ChunkedLoss.of("Chunked")
    assert ChunkedLoss.of("model") is None
    assert ChunkedLoss.of(ChunkedLoss(7)) == ChunkedLoss(7)
    for loss in ("chunky", 3):
        with pytest.raises((ValueError, TypeError), match="loss is"):
            ChunkedLoss.of(loss)


def test_tokens_of_a_chunk() -> None:
    assert ChunkedLoss().tokens(128 * 1024 * 4) == 512
    assert ChunkedLoss(chunk_tokens=100).tokens(1) == 100
    assert ChunkedLoss(chunk_bytes=1000).tokens(300) == 3
    assert ChunkedLoss(chunk_bytes=1).tokens(300) == 1


def test_stages_of_a_pipeline() -> None:
    options = PipelineParallel.of(4)
    assert (options.size, options.schedule, options.microbatches, options.stages) == (4, "1f1b", 8, 4)
    assert PipelineParallel.of(options) is options
    assert [PipelineParallel(2, schedule=name).stages for name in SCHEDULES] == [2, 2, 4, 4, 4, 4]
    assert stages_of(PipelineParallel(2, schedule="ZBV"), 0) == [0, 3]


def test_the_defaults_of_a_step_are_the_plainest_loop() -> None:
    step = StepSpec.of(None)
    assert step == StepSpec(1, "every", True, "free", "adamw", None)
    assert not step.accumulates and step.changed == {}
    assert StepSpec(microbatches=2).accumulates and StepSpec(zero_grad="zero").accumulates
    with pytest.raises(TypeError, match="step is 4"):
        StepSpec.of(4)


def test_the_optimizer_is_said_once() -> None:
    assert [StepSpec(optimizer=word).optimizer for word in OPTIMIZERS] == list(OPTIMIZERS)
    assert StepSpec.of(None, "sgd").optimizer == "sgd"
    assert StepSpec.of(StepSpec(microbatches=2), "sgd") == StepSpec(microbatches=2, optimizer="sgd")
    assert StepSpec.of(StepSpec(optimizer="sgd"), "sgd").optimizer == "sgd"
    with pytest.raises(ValueError, match="optimizer is 'adamw-fused' and step has 'sgd'"):
        StepSpec.of(StepSpec(optimizer="sgd"), "adamw-fused")


def test_a_config_is_off_by_default_and_the_same_as_a_dict() -> None:
    assert CheckpointConfig().mode == "none" and parse_ac(config := CheckpointConfig()) is config
    config = CheckpointConfig(
        enabled=True, strategy="Selective", include_patterns=["layers.*"], ops_to_save=["aten.mm"], profile_num_runs=5
    )
    assert config.mode == "selective" and config.include_patterns == ("layers.*",)
    assert CheckpointConfig.from_dict(json.loads(json.dumps(dataclasses.asdict(config)))) == config


@pytest.mark.parametrize(
    ("values", "error", "says"),
    [
        ({"strateggy": "full"}, ValueError, "strateggy.*Did you mean 'strategy'"),
        ({"strategy": "selektive"}, ValueError, "strategy.*Did you mean 'selective'"),
        ({"strategy": None}, ValueError, "strategy is None"),
        ({"enabled": "yes"}, TypeError, "enabled is 'yes'"),
        ({"enabled": 1}, TypeError, "enabled is 1"),
        ({"memory_threshold_mb": -1}, ValueError, "memory_threshold_mb is -1"),
        ({"memory_threshold_mb": float("nan")}, ValueError, "memory_threshold_mb is nan"),
        ({"memory_threshold_mb": "50"}, TypeError, "memory_threshold_mb is '50'"),
        ({"snn_chunk_size": 0, "snn_timestep_checkpoint": True}, ValueError, "snn_chunk_size is 0"),
        ({"snn_chunk_size": None}, ValueError, "snn_chunk_size is None"),
        ({"profile_num_runs": True}, ValueError, "profile_num_runs is True"),
        ({"strategy": "sequential", "sequential_segments": 2.5}, ValueError, "sequential_segments is 2.5"),
        ({"exclude_patterns": "layers.*"}, TypeError, "exclude_patterns is 'layers"),
        ({"exclude_patterns": [" "]}, ValueError, "exclude_patterns.*empty"),
        ({"layer_classes": [torch.nn.Linear]}, TypeError, "layer_classes"),
        ({"ops_to_save": ["aten.mmm"]}, ValueError, "ops_to_save.*aten.mmm.*Did you mean.*aten.mm"),
        ({"ops_to_save": ["__import__('os').system('true')"]}, ValueError, "ops_to_save.*Write it as"),
        ({"ops_to_save": ["torch.ops.aten.mm.defalt"]}, ValueError, "has the overloads default"),
        # contradictions
        ({"enabled": True, "strategy": "none"}, ValueError, "enabled is True, but strategy is 'none'"),
        ({"strategy": "full", "ops_to_save": ["aten.mm"]}, ValueError, "ops_to_save.*'full'"),
        ({"strategy": "full", "sequential_segments": 2}, ValueError, "sequential_segments is 2.*'full'"),
        ({"use_reentrant": True}, ValueError, "use_reentrant is True.*'selective'"),
        ({"use_reentrant": True, "strategy": "sequential"}, ValueError, "use_reentrant is True.*'sequential'"),
        ({"snn_chunk_size": 4}, ValueError, "snn_chunk_size is 4.*snn_timestep_checkpoint"),
        ({"include_patterns": ["a"], "exclude_patterns": ["a"]}, ValueError, "exclude_patterns.*include_patterns"),
    ],
)
def test_a_wrong_config_names_its_field(values, error, says):
    with pytest.raises(error, match=says):
        CheckpointConfig.from_dict(values)


def test_reentrant_is_accepted_where_torch_supports_it():
    assert CheckpointConfig(enabled=True, strategy="full", use_reentrant=True).use_reentrant
    assert CheckpointConfig(enabled=True, strategy="submodule", use_reentrant=True).use_reentrant
