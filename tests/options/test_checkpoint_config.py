"""CheckpointConfig: what it accepts, and that each refusal names the field."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from nemo_like.options import CheckpointConfig, parse_ac


def test_defaults_are_the_contract():
    config = CheckpointConfig()
    assert dataclasses.asdict(config) == {
        "enabled": False,
        "strategy": "selective",
        "memory_threshold_mb": 50.0,
        "use_reentrant": False,
        "preserve_rng_state": True,
        "snn_timestep_checkpoint": False,
        "snn_chunk_size": 1,
        "sequential_segments": None,
        "profile_before_apply": True,
        "profile_num_runs": 3,
        "exclude_patterns": (),
        "include_patterns": (),
        "layer_classes": None,
        "ops_to_save": None,
        "policy": None,
    }
    assert config.mode == "none"
    assert parse_ac(config) is config


def test_dict_and_dataclass_are_the_same():
    config = CheckpointConfig(
        enabled=True, strategy="Selective", include_patterns=["layers.*"], ops_to_save=["aten.mm"], profile_num_runs=5
    )
    assert config.mode == "selective" and config.include_patterns == ("layers.*",)
    values = json.loads(json.dumps(dataclasses.asdict(config)))
    assert CheckpointConfig.from_dict(values) == config


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
