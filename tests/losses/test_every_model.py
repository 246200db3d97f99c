"""Every language model of the installed transformers that runs tiny has the same loss and gradients in chunks."""

from __future__ import annotations

import pytest

transformers = pytest.importorskip("transformers")

from tests.tools.surveys import losses as loss_survey  # noqa: E402
from tests.tools.surveys.tiny_causes import CAUSES  # noqa: E402

PARTS = 20
KNOWN = tuple(int(part) for part in transformers.__version__.split(".")[:2]) >= (5, 23)
"""Whether this release is the one that the list below was made with, or a later one."""
PLAIN = {
    "BlipForConditionalGeneration": "no output head",
    "ChameleonForConditionalGeneration": "'__setitem__'",
    "CsmDepthDecoderForCausalLM": "no output head",
    "FSMTForConditionalGeneration": "does not call its head",
    "MusicgenForCausalLM": "no output head",
    "MusicgenMelodyForCausalLM": "no output head",
    "ProphetNetForCausalLM": "'transpose'",
    "ProphetNetForConditionalGeneration": "'transpose'",
}
"""Classes that keep whole logits, and why."""


@pytest.mark.few(1)
@pytest.mark.parametrize("part", range(PARTS))
def test_the_loss_of_every_language_model(part: int) -> None:
    rows = list(loss_survey.survey(loss_survey.language_models()[part::PARTS]))
    assert [row for row in rows if row.wrong] == []
    # 277 of 325 run; a survey that runs next to nothing would show nothing.
    assert sum(row.ran for row in rows) >= 0.3 * len(rows)
    for row in rows if KNOWN else ():
        if not row.ran:
            assert row.model_class in CAUSES, row
        if row.ran and not row.chunked:
            assert PLAIN.get(row.model_class, "not listed") in row.reason, row
        if row.model_class in PLAIN:
            assert not row.chunked, f"{row.model_class} is chunked now; take it off the list"
