"""The screens in the documents are what the commands print."""

from __future__ import annotations

import json
import re

import pytest

from nemo_like import cli
from tests.tools.screens import DOCS, Screen, screens, without_times

pytest.importorskip("transformers")

SCREENS = list(screens())


def _is_like_another(screen: Screen) -> bool:
    """Whether the default run has another screen like it: of a plan within bytes the widest, of others the narrow one."""
    if "--memory 64MiB" in screen.command:
        return screen.columns == 80
    return screen.columns == 120 and any(one.command == screen.command and one.columns == 80 for one in SCREENS)


def test_there_are_screens_of_every_report() -> None:
    seen = {(screen.command.split()[1], screen.columns) for screen in SCREENS}
    assert seen >= {(command, columns) for command in ("plan", "fit", "layers", "pretrain") for columns in (80, 120)}


@pytest.mark.parametrize(
    "screen",
    [pytest.param(one, marks=[pytest.mark.long] if one.is_long or _is_like_another(one) else []) for one in SCREENS],
    ids=str,
)
def test_a_page_prints_what_the_command_does(screen: Screen) -> None:
    assert screen.text and without_times(screen.now()) == without_times(screen.text)
    assert all(
        len(line) <= screen.columns for line in screen.text.splitlines() if not line.startswith(("Paste: ", "Train: "))
    )


def _keys(heading: str) -> set[str]:
    """The keys in the table of docs/reference/reports.md below `heading`."""
    table = (
        (DOCS / "reference" / "reports.md")
        .read_text(encoding="utf-8")
        .split(f"\n{heading}\n", 1)[1]
        .lstrip("\n")
        .split("\n\n")[0]
    )
    return {key for line in table.splitlines()[2:] for key in re.findall(r"`(\w+)`", line.split("|")[1])}


def test_the_page_has_the_keys_of_the_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = "plan --model llama-tiny --gpu cpu --seq-len 32 --budget 50% --no-what-if --json -"
    assert cli.main(words.split()) == 0
    plan = json.loads(capsys.readouterr().out)
    assert _keys("`nemo-like plan`:") == set(plan) and _keys("A row:") == set(plan["rows"][0])
    asked = "fit --model llama-tiny --gpus 1 --gpu cpu --seq-len 32 --micro-batch 1 --ac full --json -"
    assert cli.main(asked.split()) == 0
    found = json.loads(capsys.readouterr().out)
    assert _keys("`nemo-like fit`:") == set(found) and _keys("A candidate:") == set(found["candidates"][0])
