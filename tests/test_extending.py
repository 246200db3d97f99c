"""Twelve changes of the package, made in a copy as docs/reference/how-it-works/extending.md has them."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.extending import DOCS, EDITS, edit

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    """The error of each change's check in a copy of the package that has all of them; 10 s: it plans nine steps."""
    root = tmp_path_factory.mktemp("copy")
    shutil.copytree(ROOT / "nemo_like", root / "nemo_like", ignore=shutil.ignore_patterns("__pycache__"))
    edit(root / "nemo_like")
    run = subprocess.run(
        [sys.executable, "-m", "tests.extending"],
        cwd=root,
        env=os.environ | {"PYTHONPATH": f"{root}:{ROOT}"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout)


@pytest.mark.parametrize("change", EDITS)
def test_a_change_works_with_the_edits_of_the_page(change: str, errors: dict[str, str | None]) -> None:
    assert errors[change] is None


@pytest.mark.parametrize("change", EDITS)
def test_the_page_has_the_files_of_each_change(change: str) -> None:
    row = next(
        line for line in (ROOT / DOCS).read_text(encoding="utf-8").splitlines() if line.startswith(f"| {change} |")
    )
    _, _, count, where, known, _ = row.split("|")
    files = {
        each.file if each.before else f"a new file in `nemo_like/{Path(each.file).parent}/`" for each in EDITS[change]
    }
    assert int(re.findall(r"\d+", count)[0]) == len(files) <= 2
    assert known.strip() == "`tests/test_extending.py`"
    assert all(file in where for file in files)
