"""The command and Python ask one question: same defaults, so same bytes, seconds and verdict. The judge is the page.

`docs/reference/reports.md` has a row for each question, "Three questions", with the command beside the call.
"""

import inspect
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nemo_like import Job, cli, fit, predict
from nemo_like._util.help_parser import HelpParser
from nemo_like.commands import fit_command, plan_command
from nemo_like.flags import FLAGS
from nemo_like.planning.account import setting
from tests.models.fit_models import llama

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "reports.md"
ROWS = re.findall(r"^\| .+\? \| `(.+)` \| `(predict\(.+\)|fit\(.+\))` \|$", PAGE.read_text(encoding="utf-8"), re.M)


def _tiny(text: str) -> str:
    """The row about a model that a laptop traces at once."""
    return text.replace("llama3-8b", "llama-tiny").replace("llama3-70b", "llama-tiny")


def _answers(report: dict[str, Any]) -> dict[str, Any]:
    """What a report says, without the time that it took."""
    return {name: value for name, value in report.items() if name not in ("model", "input", "searched")}


# 6 to 10 s: the first row plans twice, by the command and by the call, since it is the question that is asked most.
@pytest.mark.parametrize("number", [0, *(pytest.param(number, marks=pytest.mark.long) for number in range(1, 5))])
def test_each_row_of_the_page_is_one_question(number: int, tmp_path: Path) -> None:
    assert len(ROWS) == 5
    command, call = map(_tiny, ROWS[number])
    first = _tiny(ROWS[0][0])
    words = shlex.split(command.replace("...", first.replace(" --gpus 8", "") if "--gpus" in command else first))[1:]
    path = tmp_path / "report.json"
    cli.main([*words, "--json", str(path), *(["--no-what-if"] if words[0] == "plan" else [])])
    written = json.loads(path.read_text(encoding="utf-8"))
    asked = json.loads(json.dumps(eval(call, {"predict": predict, "fit": fit}).to_dict()))
    assert _answers(asked) == {name: written[name] for name in _answers(asked)}


@pytest.mark.parametrize(("command", "function"), [(plan_command, predict), (fit_command, fit)])
def test_both_doors_have_the_same_defaults(command: Any, function: Any) -> None:
    parser = HelpParser()
    parser.add_options(command.OPTIONS)
    defaults = {name: value.default for name, value in inspect.signature(function).parameters.items()}
    shared = [name for name in ("seq_len", "batch_size", "count", "memory", "lora", "minutes") if name in defaults]
    assert len(shared) >= 3
    for name in shared:
        assert parser.get_default(name) == defaults[name], name
    assert parser.get_default("gpu") == FLAGS["gpu"].default


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return llama()


# 4 to 7 s: a plan and a search, whose screens are made by different code.
def test_the_first_line_has_the_device_and_the_precision(model: nn.Module) -> None:
    small: dict[str, Any] = {"gpus": 1, "seq_len": 64}
    on = setting("h100-80gb", Job.of(precision="fp8"), torch.float32)
    assert on == "On h100-80gb in fp8." and setting("cpu", Job.of(), torch.float32) == "On cpu in fp32."
    assert predict(model, **small, rows=["50%"]).text().splitlines()[0].endswith(" On h100-80gb in bf16.")
    report = fit(model, **small, count=1, ac="none", loss="model", offload="none", compile="none", micro_batch=1)
    assert report.text().splitlines()[0].endswith(" On h100-80gb in bf16.")


def test_a_stored_dtype_is_not_a_cast(model: nn.Module) -> None:
    assert "precision" not in predict(llama().bfloat16(), gpus=1, seq_len=64, rows=["50%"]).call()


@pytest.mark.parametrize("function", [predict, fit])
def test_a_misspelt_keyword_gets_the_nearest(function: Any) -> None:
    with pytest.raises(TypeError, match=rf"{function.__name__}\(\) has no keyword 'seqlen'. Did you mean 'seq_len'\?"):
        function("llama-tiny", gpus=2, seqlen=64)


def test_a_plan_reports_every_mode_whatever_is_asked_for() -> None:
    with pytest.raises(TypeError, match=r"predict\(\) has no keyword 'ac'. A plan reports every ac; rows="):
        predict("llama-tiny", ac="full")
    rows = predict("llama-tiny", gpus=1, seq_len=64, rows=["full", "50%"]).rows
    assert [row.ac for row in rows] == ["none", "full", "selective", "50%"]
