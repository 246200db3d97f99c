"""A plan says which layers its sample input did not go through."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from nemo_like import cli
from nemo_like.log import forget_announcements
from nemo_like.planning import plan_for

hf = pytest.importorskip("transformers", reason="needs the extra 'hf'")
pytest.importorskip("scipy", reason="needs the extra 'plan'")


def _llava() -> object:
    text = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    vision = {"model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4}
    return hf.LlavaConfig(
        text_config=text | heads, vision_config=vision | heads | {"image_size": 16, "patch_size": 4},
        image_token_id=63, vision_feature_layer=-1,
    )  # fmt: skip


def test_the_command_names_the_towers_that_its_input_does_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    _llava().save_pretrained(tmp_path)
    words = ["plan", "--model", str(path), "--gpu", "cpu", "--seq-len", "16", "--world-size", "2"]
    assert cli.main(words) == 0
    assert "Left out: 3 x CLIPEncoderLayer (vision). 1 x 16 tokens do not run them" in capsys.readouterr().out
    assert cli.main([*words, "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["not_run"] == "3 x CLIPEncoderLayer (vision)"


def test_a_sample_with_pictures_runs_all_towers(caplog: pytest.LogCaptureFixture) -> None:
    forget_announcements()
    with torch.device("meta"):
        model = hf.LlavaForConditionalGeneration(_llava())
    ids = torch.tensor([[63] * 16 + [1] * 4])
    sample = {"input_ids": ids, "labels": ids, "pixel_values": torch.randn(1, 3, 16, 16)}
    plan = plan_for(model, "60%", sample, device="cpu", fsdp=None)
    assert len(plan.layers) == 5 and "did not run" not in caplog.text
    plan_for(model, "60%", {"input_ids": ids[:, 16:], "labels": ids[:, 16:]}, device="cpu", fsdp=None)
    assert "3 x CLIPEncoderLayer (vision) did not run with the sample input" in caplog.text
