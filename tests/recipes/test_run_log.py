"""The log of a fine-tuning run: one file that a resumed run goes on in, and what else listens."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from nemo_like._util.log import forget_announcements
from nemo_like.recipes.command_line import changed_options, config_text, parse_options
from nemo_like.recipes.options import FinetuneOptions
from nemo_like.recipes.run_log import RunLog, read_log
from tests.said import said


def _steps(log: RunLog, numbers: range) -> None:
    for step in numbers:
        log.add(step, loss=1.0 / step)
    log.close()


def test_a_resumed_run_goes_on_after_its_first_step(tmp_path: Path) -> None:
    _steps(RunLog(tmp_path, 0, active=True), range(1, 6))
    path = tmp_path / "log.jsonl"
    path.write_text(path.read_text() + '{"step": 6, "lo')  # killed in writing
    assert [record["step"] for record in read_log(path)] == [1, 2, 3, 4, 5]
    _steps(RunLog(tmp_path, 3, active=True), range(4, 6))
    assert [record["step"] for record in read_log(path)] == [1, 2, 3, 4, 5]
    _steps(RunLog(tmp_path / "nowhere", 0, active=False), range(1, 3))  # another rank writes nothing
    _steps(RunLog(tmp_path, 0, active=True), range(1, 2))
    assert read_log(path) == [{"step": 1, "loss": 1.0}]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="writes to a full device (Linux)")
def test_a_full_disk_costs_records_and_not_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    forget_announcements()
    (tmp_path / "log.jsonl").symlink_to("/dev/full")
    log = RunLog(tmp_path, 0, active=True)
    _steps(log, range(3, 5))
    (record,) = said(caplog)
    message = record.getMessage()
    assert "log.jsonl cannot be written" in message and "No space left" in message and "missing from step 3." in message
    (tmp_path / "log.jsonl").unlink()
    (tmp_path / "log.jsonl").write_text('{"step": 1}\n{"step": 2, "lo{"step": 3}\n{"step": 4}\n')
    assert [record["step"] for record in read_log(tmp_path / "log.jsonl")] == [1, 4], "what was cut is left out"


def test_tensorboard_gets_the_same(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = RunLog(tmp_path, 0, active=True, tensorboard=True)
    log.add(1, sample="and so on")
    _steps(log, range(1, 4))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3]


def test_weights_and_biases_gets_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    log = RunLog(tmp_path, 0, active=True, wandb="project", options={"lr": 0.1})
    _steps(log, range(1, 4))
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


def test_what_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, asked in (("tensorboard", {"tensorboard": True}), ("wandb", {"wandb": "project"})):
        monkeypatch.setitem(__import__("sys").modules, name, None)
        with pytest.raises(ImportError, match=rf"pip install {name} "):
            RunLog(tmp_path, 0, active=True, **asked)  # type: ignore[arg-type]


def test_what_differs_from_the_defaults_is_written_as_flags() -> None:
    options = FinetuneOptions(model="m: #1", data="d", lora=True, lr=1e-5, reshard_after_forward=False)
    assert changed_options(options) == "--no-reshard-after-forward --lr 1e-05 --model 'm: #1' --data d --lora"


def test_the_options_in_full_are_read_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("yaml")
    options = FinetuneOptions(model="m: #1", data='a "b"', lora=True, lr=1e-5, wandb=None, sample="so\nit is")
    path = tmp_path / "options.yaml"
    path.write_text(config_text(options))
    assert parse_options("finetune", ["--config", str(path)]) == options
    assert parse_options("finetune", ["--config", str(path), "--lr", "0.5"]) == dataclasses.replace(options, lr=0.5)
    wrong = {
        "lora-ranks: 4": "has 'lora-ranks', which is not an option. Did you mean 'lora_rank'?",
        "steps: many": "steps is 'many'; it must be of type int",
        "steps: 1.5": "steps is 1.5; it must be a whole number",
        "lora: 3": "lora is 3; it must be of type bool",
        "- steps": "must have one 'option: value' a line; it is a list",
        "steps: [": "while parsing",
    }
    for text, reason in wrong.items():
        path.write_text(text)
        with pytest.raises(SystemExit):
            parse_options("finetune", ["--config", str(path)])
        assert reason in capsys.readouterr().err
    path.write_text("model: m\ndata: d\nlr: 1e-4\nmax: 1\n".replace("max: 1\n", ""))
    assert parse_options("finetune", ["--config", str(path)]).lr == 1e-4
