"""`nemo-like coverage --plan`: the page that it writes, and where it goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="needs the extra 'hf'")
pytest.importorskip("scipy", reason="needs the extra 'plan'")

from nemo_like.cli import main
from nemo_like.commands import plan_survey
from nemo_like.commands.code_version import code_version
from nemo_like.commands.plan_page import markdown, surveyed
from nemo_like.commands.plan_survey import SurveyedPlan

HEAD = "# Page\n\n"


def test_a_survey_goes_on_where_it_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "coverage.md"
    rows = [
        SurveyedPlan("gpt2", "GPT2LMHeadModel", "35%", True, peak_error=0.0012, code="abc1234"),
        SurveyedPlan("bark", trains=False, problem="no", code="abc1234"),
    ]
    page.write_text(HEAD + markdown(rows))
    known = plan_survey.model_types()
    monkeypatch.setattr(plan_survey, "model_types", lambda: {name: known[name] for name in ("bark", "gpt2", "opt")})
    assert main(["coverage", "--plan", "--resume", "--output", str(page)]) == 0
    text = page.read_text()
    assert surveyed(text) == {"bark", "gpt2", "opt"}
    assert text.startswith(HEAD) and "| gpt2 | GPT2LMHeadModel | 35% | yes | +0.12% | +0.00% | abc1234 |  |" in text
    assert f"2 rows with abc1234, 1 rows with {code_version()}." in text
    assert "| bark | no | abc1234 |" in text and "| opt | OPTForCausalLM | 35% | yes |" in text
    assert "3 were tried, and 2 of these train here" in text and "2 were planned and ran; of 2 the peak is" in text


def test_each_row_is_on_the_page_before_the_next_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "coverage.md"

    def stopped(names: object) -> object:
        yield SurveyedPlan("gpt2", "GPT2LMHeadModel", "35%", True)
        raise KeyboardInterrupt

    monkeypatch.setattr(plan_survey, "survey", stopped)
    assert main(["coverage", "--plan", "--output", str(page)]) == 130
    assert surveyed(page.read_text()) == {"gpt2"}
