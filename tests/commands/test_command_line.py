"""What every command shares: its examples, its quiet beginning, and a shell that completes it."""

from __future__ import annotations

import logging
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_like._util.console import start_logging
from nemo_like.cli import command_names, main, make_parser
from nemo_like.recipes.finetune_options import EXAMPLES as FINETUNE
from nemo_like.recipes.finetune_options import parse_finetune_options
from nemo_like.recipes.job_options import EXAMPLES as PRETRAIN
from nemo_like.recipes.job_options import parse_options


def _help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", command_names())
def test_the_help_of_a_command_has_examples_that_it_takes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = _help([name], capsys)
    lines = re.findall(rf"^  nemo-like ({name} .*)$", text.partition("examples:\n")[2], re.MULTILINE)
    assert len(lines) >= 2
    for line in lines:
        words = shlex.split(line.split(" >")[0])
        arguments = make_parser(name).parse_args(words)
        assert arguments.command == name and callable(arguments.run)


def test_the_overview_has_every_command_with_its_purpose(capsys: pytest.CaptureFixture[str]) -> None:
    text = _help([], capsys)
    assert {"fit", "pretrain", "finetune", "completion"} <= set(command_names())
    for name in command_names():
        assert re.search(rf"^    {name}\s+\w", text, re.MULTILINE), name


@pytest.mark.parametrize("job", ["pretrain", "finetune"])
def test_a_job_is_the_same_as_a_command_and_as_a_module(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    parse, examples = (parse_options, PRETRAIN) if job == "pretrain" else (parse_finetune_options, FINETUNE)
    with pytest.raises(SystemExit):
        parse(["--help"])
    alone, command = capsys.readouterr().out, _help([job], capsys)
    options = re.compile(r"^  (?:-\w, )?(--[a-z0-9-]+)", re.MULTILINE)
    assert options.findall(alone) == options.findall(command)
    for example in examples:
        assert f"  nemo-like {job} {example}\n" in command and f" -m nemo_like.recipes.{job} {example}\n" in alone
    with pytest.raises(SystemExit):
        parse(["--steps", "-1", "--model", "m", "--data", "d"])
    said = capsys.readouterr().err
    assert main([job, "--steps", "-1", "--model", "m", "--data", "d"]) == 2
    assert capsys.readouterr().err.partition(": ")[2] == said.partition("error: ")[2] != ""


def test_a_shell_completes_every_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab", reason="the extra 'completion' is not installed")
    for shell in ("bash", "zsh", "fish"):
        assert main(["completion", shell]) == 0
        script = capsys.readouterr().out
        for word in (*command_names(), "--max-seq-len", "--lora-rank"):
            assert word.removeprefix("--") in script, (shell, word)
        (tmp_path / shell).write_text(script)
    asked = (
        f"source {tmp_path / 'bash'}; COMP_WORDS=({{}}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); "
        'COMP_LINE="${COMP_WORDS[*]}"; _shtab_nemo_like; echo "${COMPREPLY[@]}"'
    )

    def completed(line: str) -> list[str]:
        done = subprocess.run(["bash", "-c", asked.replace("{}", line)], capture_output=True, text=True, check=True)
        return done.stdout.split()

    assert completed("nemo-like p") == ["plan", "pretrain", "profile"]
    assert completed("nemo-like plan --seq-") == ["--seq-len"]
    (tmp_path / "some-data.jsonl").write_text("")
    assert completed(f"nemo-like fit --lengths {tmp_path}/some") == [f"{tmp_path}/some-data.jsonl"]


def test_without_its_package_completion_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 2
    assert "pip install 'nemo_like[completion]'" in capsys.readouterr().err


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "line",
    [
        "layers --model llama-tiny --scope vison",
        "trace --model llama-tiny --seq-len 4 --ac full",
        "pretrain --model llama-tiny --seq-len 8 --batch-size 1 --steps 1 --device cpu --strategy single --plain",
    ],
)
def test_a_command_begins_with_a_line_of_its_own(line: str, tmp_path: Path) -> None:
    """Of what is installed and not used (torchao, bitsandbytes' kernels) nothing is said."""
    pytest.importorskip("transformers")
    (tmp_path / "text.txt").write_text("some words " * 100)
    more = [] if not line.startswith("pretrain") else ["--data", str(tmp_path / "text.txt"), "--eval-samples", "0"]
    command = [sys.executable, "-m", "nemo_like", *line.split(), *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    if line.startswith("layers"):
        assert done.returncode == 2 and done.stderr.startswith("nemo-like layers: scope 'vison' is unknown"), (
            done.stderr
        )
        assert len(done.stderr.splitlines()) == 1
    else:
        assert (done.returncode, done.stderr) == (0, "")
        own = "llama-tiny: 853,120 parameters" if more else "model.layers.0"
        assert done.stdout.startswith(own)


def test_only_the_known_noise_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    start_logging()
    noise = logging.getLogger("bitsandbytes.backends.cpu.ops")
    noise.warning("Failed to load CPU gemm_4bit_forward from kernels-community: %s. Please", "no module")
    noise.warning("Something else")
    logging.getLogger("torchao").warning("Failed to load _C.so: no such file")
    logging.getLogger("torchao.float8").warning("Failed to load a state")
    assert [record.getMessage() for record in caplog.records] == ["Something else", "Failed to load a state"]
