"""`python -m tests.tools.surveys`: the pages that it writes, where it goes on, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="needs the extra 'hf'")

from tests.tools.surveys import layers
from tests.tools.surveys.__main__ import main

HEAD = "# Page\n\n"


def test_the_survey_of_layers_writes_a_table_and_fails_where_something_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = layers.survey(["llama", "glm_image_vqmodel", "no_such_type"])
    table = layers.to_markdown(rows)
    assert "| llama | LlamaModel | language: 32 x LlamaDecoderLayer | 100.0% |" in table
    assert f"| glm_image_vqmodel | 0.0% | {layers.EXCEPTIONS['glm_image_vqmodel']} |" in table
    assert "| no_such_type | cannot be built" in table
    assert list(layers.failures(rows)) == []
    monkeypatch.setattr(layers, "EXCEPTIONS", {})
    (failure,) = layers.failures(rows)
    assert failure.startswith("glm_image_vqmodel: No repeated layers were found")
    path = tmp_path / "coverage.md"
    assert main(["--only", "llama", "--processes", "1", "--output", str(path)]) == 0
    assert "LlamaDecoderLayer" in path.read_text()


_REFUSED = {
    "--only nosuch": "'nosuch'",
    "--losses --only LlamaForCausalLLM": "Did you mean 'LlamaForCausalLM'",
    "--plan --only nosuch": "'nosuch'",
    "--plan --resume": "--resume",
    "--processes 0": "--processes is 0",
    "--losses --processes 3": "--processes is 3, and nothing reads it",
    "--losses --plan": "--losses and --plan are two surveys",
    "--output /nonexistent/x.json": "--output names a file in '/nonexistent', which is not an existing",
    "--plan --output /nonexistent/x.json": "--output names a file in '/nonexistent', which is not an existing",
}


@pytest.mark.parametrize(
    "line", [pytest.param(line, marks=[pytest.mark.long] if "LLM" in line else []) for line in _REFUSED]
)
def test_a_survey_refuses_it_before_any_work(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 2
    said = capsys.readouterr()
    assert said.out == "" and len(said.err.splitlines()) == 1 and _REFUSED[line] in said.err
