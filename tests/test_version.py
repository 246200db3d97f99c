"""The version: one source, the same from a source tree and from an installed package."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import nemo_like
from nemo_like import cli

ROOT = Path(__file__).resolve().parent.parent


def test_the_version_stands_in_one_place() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+|rc\d+)?", nemo_like.__version__)
    assert "version" not in project["project"] and project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "nemo_like.__version__"}


def test_packaging_reads_it_without_importing_torch() -> None:
    """A build environment has no torch: setuptools has to find the word in the source itself."""
    script = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "from setuptools.config.expand import read_attr\n"
        "print(read_attr('nemo_like.__version__'))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == nemo_like.__version__


def test_the_command_says_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.split() == ["nemo-like", nemo_like.__version__]


def test_summaries_of_runs_name_it() -> None:
    from nemo_like.recipes.loop import versions

    assert versions()["nemo_like"] == nemo_like.__version__
