"""Each example of docs/examples runs as it stands and says what it should."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

EXAMPLES = Path(__file__).resolve().parent.parent / "docs" / "examples"


def _output(name: str, *arguments: str | Path) -> str:
    """What the example prints. In this process, since a new one takes 4 s to import torch."""
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return printed.getvalue()


def _losses(output: str) -> list[float]:
    return [float(found) for found in re.findall(r"^step \d+: loss ([0-9.]+)", output, re.MULTILINE)]


@pytest.mark.parametrize(("name", "steps"), [("plain_pytorch.py", 5), ("two_ranks.py", 5)])
def test_the_loss_falls(name: str, steps: int) -> None:
    losses = _losses(_output(name))
    assert len(losses) == steps and losses[-1] < losses[0]


def test_a_hugging_face_model_is_trained_saved_and_loaded(tmp_path: Path) -> None:
    output = _output("hugging_face.py", tmp_path)
    losses = _losses(output)
    assert losses[-1] < losses[0]
    assert "layers: model.layers.0, model.layers.1, model.layers.2, model.layers.3" in output
    assert "saved and loaded: equal" in output
    assert (tmp_path / "model.safetensors").is_file()


def test_a_plan_is_saved_loaded_and_trained_with(tmp_path: Path) -> None:
    output = _output("budget_plan.py", tmp_path / "plan.json")
    none, held = map(float, re.search(r"none would hold ([0-9.]+) MB, the plan holds ([0-9.]+) MB", output).groups())
    assert 0 < held <= none / 2
    losses = _losses(output)
    assert len(losses) == 3 and losses[-1] < losses[0]
    assert (tmp_path / "plan.json").is_file()


def test_a_loop_with_accumulation_and_clipping_writes_its_weights(tmp_path: Path) -> None:
    output = _output("training_loop.py", tmp_path / "weights.pt")
    losses = _losses(output)
    assert len(losses) == 3 and losses[-1] < losses[0]
    assert re.search(r"^saved \d+ tensors$", output, re.MULTILINE)
    assert (tmp_path / "weights.pt").is_file()


def test_offloading_moves_bytes_and_changes_no_gradient() -> None:
    output = _output("offload.py")
    together, alone = map(int, re.findall(r"bytes moved: (\d+)", output))
    assert 0 < together < alone  # checkpointing leaves less to move
    assert "gradients: bitwise equal" in output


def test_every_example_is_listed_short_and_run_here() -> None:
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    source = Path(__file__).read_text(encoding="utf-8")
    for path in sorted(EXAMPLES.glob("*.py")):
        assert f"[{path.name}]({path.name})" in page and f'"{path.name}"' in source
        assert len(path.read_text(encoding="utf-8").splitlines()) < 60
