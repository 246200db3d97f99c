"""Layers are found in every model type of the installed transformers that builds here, in chunks."""

from __future__ import annotations

import pytest

transformers = pytest.importorskip("transformers")

from tests.surveys import layers as coverage  # noqa: E402

CHUNKS = 24
RELEASE = tuple(int(part) for part in transformers.__version__.split(".")[:2])
OLDER = {"yolos: only 84.1% of the non-embedding parameters lie inside its layers"} if RELEASE < (5, 23) else set()
"""Failures with transformers 5.17; the package's list of exceptions is that of 5.23."""


@pytest.mark.few(1)
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_layers_of_every_model_type(chunk: int) -> None:
    rows = coverage.survey(coverage.model_types()[chunk::CHUNKS])
    assert [line for line in coverage.failures(rows) if line not in OLDER] == []
    # 553 of 605 build on a bare install; a survey that builds next to nothing would show nothing.
    assert sum(row.built for row in rows) >= (0.85 if RELEASE >= (5, 23) else 0.8) * len(rows)
    for row in rows:
        if row.model_type in coverage.EXCEPTIONS and row.built:
            assert row.share < coverage.LEAST_SHARE, f"{row.model_type} is no exception any more; take it off the list"


def test_few_exceptions_each_with_a_reason() -> None:
    assert len(coverage.EXCEPTIONS) <= 15
    if RELEASE >= (5, 23):  # an older release does not know them all
        assert set(coverage.EXCEPTIONS) <= set(coverage.model_types())
    assert all(len(reason) > 20 for reason in coverage.EXCEPTIONS.values())


# Models whose lookup loses a tower elsewhere. (group, layer class) -> how many, at their default sizes.
TOWERS = {
    "t5": {("language", "T5Block"): 12},
    "bart": {("language", "BartEncoderLayer"): 12, ("language", "BartDecoderLayer"): 12},
    "clip": {("language", "CLIPEncoderLayer"): 12, ("vision", "CLIPEncoderLayer"): 12},
    "whisper": {("audio", "WhisperEncoderLayer"): 4, ("language", "WhisperDecoderLayer"): 4},
    "qwen3_vl": {
        ("vision", "Qwen3VLVisionBlock"): 27,
        ("vision", "Qwen3VLVisionPatchMerger"): 3,
        ("language", "Qwen3VLTextDecoderLayer"): 32,
    },
    "internvl": {("vision", "InternVLVisionLayer"): 24, ("language", "Qwen2DecoderLayer"): 32},
    "paligemma": {("vision", "SiglipEncoderLayer"): 27, ("language", "GemmaDecoderLayer"): 18},
    "idefics3": {("vision", "Idefics3EncoderLayer"): 12, ("language", "LlamaDecoderLayer"): 32},
    "qwen2_audio": {("audio", "Qwen2AudioEncoderLayer"): 32, ("language", "Qwen2DecoderLayer"): 32},
    "qwen2_5_omni_thinker": {
        ("audio", "Qwen2_5OmniAudioEncoderLayer"): 32,
        ("vision", "Qwen2_5OmniVisionBlock"): 32,
        ("language", "Qwen2_5OmniDecoderLayer"): 28,
    },
    # Hybrids whose linear attention a lookup by name missed.
    "qwen3_next": {("language", "Qwen3NextDecoderLayer"): 48},
    "olmo_hybrid": {
        ("language", "OlmoHybridLinearAttentionDecoderLayer"): 24,
        ("language", "OlmoHybridAttentionDecoderLayer"): 8,
    },
}


@pytest.mark.parametrize("model_type", TOWERS)
def test_every_tower_of_models_that_lost_one_elsewhere(model_type: str) -> None:
    row = coverage.survey_one(model_type)
    if not row.built:
        pytest.skip(f"this transformers cannot build {model_type}: {row.problem}")
    assert {(group, name): count for group, name, count in row.groups} == TOWERS[model_type]
