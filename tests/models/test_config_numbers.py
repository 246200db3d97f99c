"""A `config.json` with numbers that no model has is refused in one line, before anything is built."""

import json
from pathlib import Path
from typing import Any

import pytest

from nemo_like import fit, predict
from nemo_like.models import PRESETS, read_config, resolve_model

HUGE, NAN, INF = 10**9, float("nan"), float("inf")


def _config(folder: Path, **fields: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(PRESETS["llama-tiny"] | fields))
    return path


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"num_hidden_layers": HUGE}, "num_hidden_layers is 1000000000, above 100,000"),
        ({"model_type": "mixtral", "num_local_experts": HUGE}, "num_local_experts is 1000000000"),
        ({"model_type": "gpt2", "n_layer": HUGE}, "n_layer is 1000000000"),
        ({"model_type": "clip", "vision_config": {"num_hidden_layers": HUGE}}, "num_hidden_layers is 1000000000"),
        ({"num_labels": HUGE}, "num_labels is 1000000000"),  # transformers makes a name for each
        ({"model_type": "swin", "depths": [2, HUGE]}, "depths is 1000000000"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1, and cannot be negative"),
        ({"model_type": "t5", "num_decoder_layers": -3}, "num_decoder_layers is -3"),
        ({"hidden_size": -16}, "hidden_size is -16"),
        ({"hidden_size": 10**12}, "hidden_size is 1000000000000, above 2**31"),
        ({"hidden_size": NAN}, "hidden_size is nan, which is not a finite number"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": NAN}}, "rope_theta is nan"),
        ({"vocab_size": INF}, "vocab_size is inf"),
        ({"time_step_limit": [0.0, NAN]}, "time_step_limit is nan"),
    ],
)
def test_a_number_that_no_model_has_is_refused_by_name(tmp_path: Path, fields: dict[str, Any], named: str):
    path = _config(tmp_path, **fields)
    with pytest.raises(ValueError) as info:
        resolve_model(str(path))
    assert str(info.value).startswith(f"{path}: {named}") and "\n" not in str(info.value)


@pytest.mark.parametrize("fields", [{"num_attention_heads": 0}, {"num_key_value_heads": 0}, {"hidden_size": 0}])
def test_a_size_of_zero_is_an_error_that_names_the_model(tmp_path: Path, fields: dict[str, Any]):
    path = _config(tmp_path, **fields)
    with pytest.raises(ValueError, match=str(path)):
        resolve_model(str(path)).build("meta")


@pytest.mark.parametrize("text", ["[" * 100_000, '{"model_type": "llama", "hidden_size": ' + "9" * 5000 + "}"])
def test_json_that_python_does_not_read_is_an_error(tmp_path: Path, text: str):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="is not valid JSON"):
        read_config(path)


@pytest.mark.parametrize(
    "fields",
    [
        {"time_step_limit": [0.0, INF]},  # as the files of Mamba-2 have it
        {"vision_feature_layer": -2, "vision_feature_layers": [-2, -1], "max_relative_positions": -1},
        {"cross_attention_layers": [-1], "num_nextn_predict_layers": 0, "pad_token_id": -1},
    ],
)
def test_numbers_of_published_configs_are_read(tmp_path: Path, fields: dict[str, Any]):
    assert read_config(_config(tmp_path, **fields))["hidden_size"] == 128


def test_a_deep_model_is_built(tmp_path: Path):
    assert len(resolve_model(str(_config(tmp_path, num_hidden_layers=60))).build("meta").model.layers) == 60


def test_code_of_a_models_own_is_named_with_the_way_out(tmp_path: Path, logs: pytest.LogCaptureFixture) -> None:
    """The judge is transformers: `auto_map` is what its ``trust_remote_code`` reads."""
    path = _config(tmp_path, auto_map={"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"})
    for _ in range(2):
        resolve_model(str(path))
    assert logs.text.count("has auto_map") == 1 and "--model module:function" in logs.text
    report = predict(str(path), seq_len=32, rows=["50%"])
    assert "as transformers' LlamaForCausalLM without the code of its auto_map" in report.about
    found = fit(str(path), gpus=1, seq_len=32, gpu="cpu", ac="none", micro_batch=1, loss="model")
    assert "as transformers' LlamaForCausalLM without the code of its auto_map" in found.about()
    assert "auto_map" not in predict("llama-tiny", seq_len=32, rows=["50%"]).about
