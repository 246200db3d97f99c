"""A plan says which layers its sample input did not go through."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_like import cli
from nemo_like._util.log import forget_announcements
from nemo_like.planning import plan_for

hf = pytest.importorskip("transformers", reason="needs the extra 'hf'")


def _llava() -> object:
    text = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    vision = {"model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4}
    return hf.LlavaConfig(
        text_config=text | heads, vision_config=vision | heads | {"image_size": 16, "patch_size": 4},
        image_token_id=63, vision_feature_layer=-1,
    )  # fmt: skip


def _qwen() -> object:
    text = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 64,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
    }
    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "depth": 3,
        "num_heads": 4,
        "out_hidden_size": 32,
        "patch_size": 14,
        "window_size": 56,
        "fullatt_block_indexes": [1],
    }
    return hf.Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, image_token_id=63, video_token_id=62, vision_start_token_id=61
    )  # fmt: skip


def _whisper() -> object:
    return hf.WhisperConfig(
        d_model=32, encoder_layers=2, decoder_layers=3, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=48, decoder_ffn_dim=48, vocab_size=64, num_mel_bins=8, max_source_positions=25,
        max_target_positions=16, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip


def _t5() -> object:
    return hf.T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_decoder_layers=3, num_heads=4, vocab_size=64)


def _planned(folder: Path, config: object, *more: str) -> list[str]:
    config.save_pretrained(folder)
    return [
        "plan",
        "--model",
        str(folder),
        "--gpu",
        "cpu",
        "--seq-len",
        "32",
        "--world-size",
        "2",
        "--no-what-if",
        "--budget",
        "50%",
        *more,
    ]


# What goes in, and how many layers there are in all towers.
WHOLE = {
    "llava": (_llava, "1 x 32 tokens, 1 picture(s) of 16 x 16 each (16 of the tokens)", 5),
    "qwen2_5_vl": (_qwen, "1 x 32 tokens, 1 picture(s) of 56 x 56 each (4 of the tokens)", 5),
    "whisper": (_whisper, "1 sound(s) of 0.5 s and 1 x 16 tokens", 5),
    "t5": (_t5, "1 x 32 tokens", 5),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", WHOLE)
def test_the_command_plans_all_towers(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make, said, layers = WHOLE[name]
    size = ("--image-size", "56") if name == "qwen2_5_vl" else ()  # of any size: its config names none
    words = _planned(tmp_path, make(), "--json", "-", *size)
    assert cli.main(words) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["input"] == said
    assert body["not_run"] is None and body["not_made_up"] is None
    assert all(sum(row["layers"].values()) == layers for row in body["rows"])


def test_the_command_names_the_towers_that_its_input_does_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = _planned(tmp_path, _llava(), "--images", "0")
    assert cli.main(words) == 0
    assert "Left out: 3 x CLIPEncoderLayer (vision). 1 x 32 tokens do not run them" in capsys.readouterr().out
    assert cli.main([*words, "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["not_run"] == "3 x CLIPEncoderLayer (vision)"


def test_what_cannot_be_made_up_is_named_with_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = _qwen()
    config.vision_config.out_hidden_size = 16  # its tower does not fit its language model
    words = _planned(tmp_path, config)
    assert cli.main([*words, "--json", "-", "--seq-len", "300"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["input"] == "1 x 300 tokens" and body["not_run"] == "3 x Qwen2_5_VLVisionBlock (vision)"
    assert "pixel_values: The forward pass" in body["not_made_up"]
    assert "Image features and image tokens do not match" in body["not_made_up"]
    assert cli.main([*words, "--image-size", "32"]) == 2  # asked for: an error


@pytest.mark.parametrize(
    ("make", "more", "said"),
    [
        (_llava, ("--images", "2"), "2 picture(s) of 16 x 16 each take 34 tokens of a sequence, which has 32"),
        (_llava, ("--images", "-1"), "--images is -1"),
        (_llava, ("--image-size", "24"), "get_image_features failed"),
        (_whisper, ("--audio-seconds", "2"), "--audio-seconds 2: the model has positions for 0.5 s"),
    ],
)
def test_more_than_a_model_takes_is_refused(
    make: Any, more: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(_planned(tmp_path, make(), *more)) == 2
    assert said in capsys.readouterr().err


def test_a_sample_with_pictures_runs_all_towers(caplog: pytest.LogCaptureFixture) -> None:
    forget_announcements()
    with torch.device("meta"):
        model = hf.LlavaForConditionalGeneration(_llava())
    ids = torch.tensor([[63] * 16 + [1] * 4])
    sample = {"input_ids": ids, "labels": ids, "pixel_values": torch.randn(1, 3, 16, 16)}
    plan = plan_for(model, ac="60%", sample_input=sample, gpu="cpu")
    assert len(plan.layers) == 5 and "did not run" not in caplog.text
    plan_for(model, ac="60%", sample_input={"input_ids": ids[:, 16:], "labels": ids[:, 16:]}, gpu="cpu")
    assert "3 x CLIPEncoderLayer (vision) did not run with the sample input" in caplog.text
