"""What every command shares: its examples, its quiet beginning, and a shell that completes it."""

import importlib
import logging
import pkgutil
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from nemo_like import commands
from nemo_like._util.console import start_logging
from nemo_like._util.option_fields import parse_options
from nemo_like.cli import main, make_parser
from nemo_like.commands import COMMANDS
from nemo_like.job import Job
from nemo_like.options import ChunkedLoss, MemoryBudget
from nemo_like.recipes.options import FinetuneOptions, PretrainOptions


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_has_examples_that_it_takes(name: str, ending: Any) -> None:
    text = ending(main, [name, "--help"], code=0).out
    lines = re.findall(rf"^  nemo-like ({name} .*)$", text.partition("examples:\n")[2], re.MULTILINE)
    assert len(lines) >= 2 or name in ("gpus", "models"), "these take no options"
    for line in lines:
        arguments = make_parser(name).parse_args(shlex.split(line.split(" >")[0]))
        assert arguments.command == name and callable(arguments.run)


def test_the_overview_has_every_command_with_its_purpose(ending: Any) -> None:
    text = ending(main, ["--help"], code=0).out
    assert {"fit", "pretrain", "finetune"} <= set(COMMANDS)
    words = " ".join(text.split())
    assert not [name for name, purpose in COMMANDS.items() if f" {name} {purpose}" not in words]
    modules = {module.name for module in pkgutil.iter_modules(commands.__path__) if module.name.endswith("_command")}
    assert modules == {f"{name}_command" for name in COMMANDS}


@pytest.mark.parametrize("kind", [PretrainOptions, FinetuneOptions])
def test_a_job_is_the_same_as_a_command_and_as_a_module(kind: Any, ending: Any, program: Any) -> None:
    job = kind.job_name
    alone, command = ending(parse_options, kind, ["--help"], code=0).out, ending(main, [job, "--help"], code=0).out
    options = re.compile(r"^  (?:-\w, )?(--[a-z0-9-]+)", re.MULTILINE)
    assert options.findall(alone) == options.findall(command)
    for example in kind.examples:
        assert f"  nemo-like {job} {example}\n" in command and f" -m nemo_like.recipes.{job} {example}\n" in alone
    wrong = ["--steps", "-1", "--model", "m", "--data", "d"]
    said = ending(parse_options, kind, wrong).err.partition("error: ")[2]
    assert program([job, *wrong], 2).err.partition(": ")[2] == said != ""


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "line",
    [
        "layers --model llama-tiny --scope vison",
        "pretrain --model llama-tiny --seq-len 8 --global-batch 1 --steps 1 --device cpu --strategy single",
    ],
)
def test_a_command_begins_with_a_line_of_its_own(line: str, tmp_path: Path) -> None:
    """Of what is installed and not used (torchao, bitsandbytes' kernels) nothing is said."""
    (tmp_path / "text.txt").write_text("some words " * 100)
    more = [] if not line.startswith("pretrain") else ["--data", str(tmp_path / "text.txt"), "--eval-samples", "0"]
    command = [sys.executable, "-m", "nemo_like", *line.split(), *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    if line.startswith("layers"):
        first, refused = done.stderr.splitlines()
        assert done.returncode == 2 and first == "Building llama-tiny without weights ..."
        assert refused.startswith("nemo-like layers: scope 'vison' is unknown")
    else:
        first = f"Pretraining llama-tiny on {tmp_path / 'text.txt'} ...\n"
        assert (done.returncode, done.stderr) == (0, first if more else "Tracing llama-tiny ...\n")
        assert done.stdout.startswith("llama-tiny: 853,120 parameters" if more else "model.layers.0")


def test_only_the_known_noise_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    start_logging()
    noise = logging.getLogger("bitsandbytes.backends.cpu.ops")
    noise.warning("Failed to load CPU gemm_4bit_forward from kernels-community: %s. Please", "no module")
    noise.warning("Something else")
    logging.getLogger("torchao").warning("Failed to load _C.so: no such file")
    logging.getLogger("torchao.float8").warning("Failed to load a state")
    assert [record.getMessage() for record in caplog.records] == ["Something else", "Failed to load a state"]


# Without torch.


def _run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=200)


def test_help_version_and_a_misspelt_word_import_no_torch() -> None:
    done = _run(
        """
        import sys
        from nemo_like.cli import main
        from nemo_like.commands import COMMANDS

        lines = [["--version"], ["--help"], [], ["plam"], ["plan"], *([name, "--help"] for name in COMMANDS)]
        for line in lines:
            try:
                main(line)
            except SystemExit as ended:
                assert ended.code == (0 if line[-1].startswith("--") else 2), line
            else:
                assert not line, line
            found = {"torch", "transformers"} & set(sys.modules)
            assert not found, (line, found)
        """
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("plan --model m --gpus 8 --json -", "Planning m on 8 x h100-80gb ..."),
        ("plan --model m --gpus min", "Planning m on the fewest h100-80gb ..."),
        ("fit --model m --gpus 8", "Searching for the fastest configuration of m on 8 x h100-80gb ..."),
        ("fit --calibrate", "Measuring this device ..."),
        ("layers --model m", "Building m without weights ..."),
        ("profile --model m", "Measuring m ..."),
        ("pretrain", "Pretraining llama-tiny on the standard library ..."),
    ],
)
def test_a_long_command_says_at_once_what_it_does(line: str, said: str) -> None:
    arguments = make_parser(line.split()[0]).parse_args(line.split())
    if line == "pretrain":
        arguments.refuse(arguments)
    assert arguments.first_line(arguments) == said


def test_one_rank_of_many_says_what_it_does(
    monkeypatch: pytest.MonkeyPatch, program: Any
) -> None:
    for rank, said in (("0", "Measuring llama-tiny ...\n"), ("1", "")):
        monkeypatch.setenv("RANK", rank)
        assert program("profile --model llama-tiny --budget much", 2).err.partition("nemo-like profile: ")[0] == said


def test_a_program_finds_modules_in_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: Any
) -> None:
    (tmp_path / "mymod.py").write_text(
        "from torch import nn\n\ndef build():\n    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder not in ("", str(tmp_path))])
    assert program("layers --model mymod:build --layers *").out.startswith("Sequential: 216 parameters")


@pytest.mark.parametrize("while_importing", [False, True])
def test_an_interrupted_command_ends_with_130_and_a_line(
    while_importing: bool, monkeypatch: pytest.MonkeyPatch, program: Any
) -> None:
    def interrupted(*anything: object) -> Any:
        raise KeyboardInterrupt

    where = "importlib.import_module" if while_importing else "nemo_like.commands.layers_command.run"
    importlib.import_module("nemo_like.commands.layers_command")
    monkeypatch.setattr(where, interrupted)
    assert program("layers --model llama-tiny", 130).err.splitlines()[-1] == "nemo-like layers: interrupted."


def test_a_reader_that_has_enough_gets_no_error() -> None:
    ran = subprocess.Popen([sys.executable, "-m", "nemo_like", "gpus"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert ran.stdout is not None
    ran.stdout.close()
    assert (ran.communicate()[1], ran.returncode) == (b"", 141)


def test_a_budget_is_written_as_short_as_it_is_read_back() -> None:
    words = {
        65068754534: "60.6GiB",
        40 << 30: "40GiB",
        3 << 29: "1.5GiB",
        512 << 20: "512MiB",
        65068754535: "65068754535B",
        (1 << 60) + 1: "1152921504606846977B",
    }
    for size, word in words.items():
        assert MemoryBudget(peak_bytes=size).words == word
        if size < 1 << 53:
            assert MemoryBudget.parse(word).peak_bytes == size and f"ac='{word}'" in Job.of(ac=word).as_call()
    assert MemoryBudget(peak_bytes=0.5).words is None  # no whole number of bytes
    assert Job.of(ac=MemoryBudget(peak_bytes=float("inf"))).as_call()


def test_a_number_of_bytes_needs_a_unit_in_a_string_alone() -> None:
    for text in ("40", " 40 ", "4.5", ".5"):
        with pytest.raises(ValueError, match=f"^ac is '{text}', without a unit. Write '{text.strip()}GiB' or "):
            MemoryBudget.parse(text)
    with pytest.raises(ValueError, match=r"^chunk_bytes is '256', without a unit\. Write '256GiB'\.$"):
        ChunkedLoss(chunk_bytes="256")
    assert MemoryBudget(peak_bytes=40).peak_bytes == ChunkedLoss(chunk_bytes=40).bytes == 40
