"""Measured steps of jobs: read from logs, kept, fitted by two factors of a device's rates, and named in reports."""

from __future__ import annotations

import functools
import json
from dataclasses import replace

import pytest

from nemo_like.cli import main, make_parser
from nemo_like.commands.plan_command import _calibrate_from, _read_again, _traced, asked_job
from nemo_like.planning.calibration import _kept_steps
from nemo_like.planning.devices import at_factors, calibrated, factors_of, rates_file, resolve_device
from nemo_like.planning.measured_steps import Speed, add_step, fit_factors, read_speed

pytest.importorskip("transformers")

TITAN = (
    "\x1b[31mstep: {:2}  \x1b[32mloss: 8.1  \x1b[33mmemory: 9GiB(10%)  \x1b[34mtps: {:,}  tflops: 2  mfu: 37.1%\x1b[39m"
)
TRAINER = "{'loss': 2.0, 'epoch': 1.0}\n{'train_runtime': 50.0, 'train_steps_per_second': 0.5, 'epoch': 1.0}\n"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NEMO_LIKE_CACHE", str(tmp_path))


@pytest.fixture(scope="module")
def gpu(tmp_path_factory):
    """The file of a GPU without launches, whose network is slow."""
    entry = {
        **{"memory_gb": 80, "bf16_tflops": 100, "fp32_tflops": 50, "memory_gbps": 1000, "host_link_gbps": 20},
        **{"matmul": 0.5, "attention": 0.4, "bandwidth": 0.8},
        **{"nvlink_gbps": 4, "network_gbps": 1, "gpus_per_host": 2, "hop_us": 0.1},
    }
    path = tmp_path_factory.mktemp("device") / "slow-net.json"
    path.write_text(json.dumps(entry))
    return path


def words(gpu, gpus, *more):
    flags = ["--seq-len", "64", "--gpus", str(gpus), "--ran-with", "full"]
    return ["--model", "llama-tiny", "--gpu", str(gpu), *flags, *more]


@functools.cache
def step_of(gpu, gpus, *more):
    """The step of a job that took what the planner predicts at 0.8 of the rates of computing, 0.5 of those of sending."""
    flags = words(gpu, gpus, *more)
    other = at_factors(resolve_device(gpu), 0.8, 0.5)
    seconds = _traced(_read_again(flags), other, lambda *_: 1.0)[0].predicted()
    return replace(_traced(_read_again(flags), resolve_device(gpu), lambda *_: seconds)[0], words=flags)


def plan(gpu, gpus, log):
    return main(["plan", *words(gpu, gpus), "--no-what-if", "--budget", "50%", "--calibrate-from", str(log)])


@pytest.mark.parametrize(
    ("text", "speed"),
    [
        (
            "\n".join(TITAN.format(n, tps) for n, tps in enumerate((10, 9, 6120, 6000, 6300))),
            (6120, "per GPU"),
        ),
        (TITAN.format(1, 10) + "\n" + TITAN.format(10, 6120), (6120, "per GPU")),
        # Of four steps the first two are left out, of three the first.
        ("\n".join(TITAN.format(n, tps) for n, tps in enumerate((10, 900, 6100, 6300))), (6200, "per GPU")),
        ("\n".join(TITAN.format(n, tps) for n, tps in enumerate((10, 900, 6100))), (3500, "per GPU")),
        (
            "".join(
                json.dumps({"step": n, "tokens_per_second": t}) + "\n" for n, t in enumerate((1, 2, 800, 900, 1000))
            ),
            (900, "of all"),
        ),
        (TRAINER, (2.0, "seconds")),
        ("{'train_runtime': 50.0, 'train_tokens_per_second': 700.0}", (700.0, "of all")),
        (
            json.dumps({"log_history": [{"step": 1, "loss": 2.0}, {"step": 20, "train_runtime": 50.0}]}, indent=2),
            (2.5, "seconds"),
        ),
    ],
)
def test_each_form_of_a_log_is_read(tmp_path, text, speed):
    (tmp_path / "log").write_text(text)
    assert read_speed(str(tmp_path / "log")) == Speed(*speed)


def test_a_number_with_its_unit_is_read():
    assert read_speed("1.83s") == Speed(1.83, "seconds") and read_speed("950ms") == Speed(0.95, "seconds")
    assert read_speed("6,120tok/s") == Speed(6120, "per GPU")


@pytest.mark.parametrize(
    ("text", "words"), [("nothing", "log has no speed of a step"), (TITAN.format(1, 9), "one step only")]
)
def test_a_log_without_a_speed_is_refused(tmp_path, text, words):
    (tmp_path / "log").write_text(text)
    with pytest.raises(ValueError, match=words):
        read_speed(str(tmp_path / "log"))
    with pytest.raises(ValueError, match="neither a number with a unit nor a file"):
        read_speed("1.83")
    with pytest.raises(ValueError, match="positive"):
        read_speed("0s")


def test_tokens_per_second_are_of_one_gpu_or_of_all(gpu):
    query = step_of(gpu, 8).query
    assert Speed(32.0, "per GPU").seconds(64, query) == Speed(256.0, "of all").seconds(64, query) == 2.0
    with pytest.raises(ValueError, match="takes no text"):
        Speed(32.0, "per GPU").seconds(None, query)


def test_seconds_at_other_rates_are_those_of_another_trace(gpu):
    for more in ((), ("--pp", "2", "--grad-accum", "4"), ("--tp", "2", "--compile", "inductor")):
        step = step_of(gpu, 8, *more)
        assert step.predicted(0.8, 0.5) == pytest.approx(step.seconds, rel=1e-9) and step.predicted() < step.seconds


def test_two_jobs_tell_both_factors_and_one_tells_computing(gpu):
    steps = [step_of(gpu, gpus) for gpus in (1, 8)]
    assert fit_factors(steps) == pytest.approx({"computing": 0.8, "sending": 0.5}, rel=0.02)
    assert fit_factors(steps[:1]) == pytest.approx({"computing": 0.8}, rel=0.02)
    fast = replace(steps[0], seconds=steps[0].predicted() / 2)
    slow = replace(steps[1], seconds=3.999 * steps[1].predicted())
    path = rates_file(resolve_device(gpu))
    path.parent.mkdir()
    path.write_text(json.dumps({"steps": [{"job": ["x"], "seconds": 1}], "factors": {"computing": 1, "steps": 1}}))
    assert "At its limit is sending" in add_step(slow, lambda *_: fast)
    assert fit_factors([steps[0], steps[0]]).keys() == {"computing"}, "one rank sends nothing"


def test_a_plan_keeps_steps_fits_them_and_names_the_factors(gpu, capsys):
    path = rates_file(resolve_device(gpu))
    steps = {gpus: f"{step_of(gpu, gpus).seconds:.9f}s" for gpus in (1, 8)}
    for gpus in (1, 8):
        args = make_parser("plan").parse_args(["plan", *words(gpu, gpus), "--calibrate-from", steps[gpus]])
        assert f"by {1 + gpus // 8} measured step" in _calibrate_from(args, asked_job(args))
    assert plan(gpu, 1, steps[1]) == 0  # replaces the first
    assert "Measured " in (shown := " ".join(capsys.readouterr().out.split())) and "after calibration" in shown
    said = json.loads(path.read_text())
    assert len(said["steps"]) == 2 and factors_of(said) == pytest.approx((0.8, 0.5), rel=0.02)
    assert "computing at 0.80 and sending at 0.50 of the table's rates, by 2 measured steps" in shown
    device, table = calibrated(resolve_device(gpu)), resolve_device(gpu)
    assert device.bandwidth == pytest.approx(0.8 * table.bandwidth, rel=0.02)
    assert device.network == pytest.approx(0.5 * table.network, rel=0.02)
    assert calibrated(table, factors=False) == table and _kept_steps(path) == {"steps": said["steps"]}
    rates = {"measured": "2026-01-02", "torch": "2", "rates": {"bandwidth": 1e12}}
    path.write_text(json.dumps(said | rates))
    device = calibrated(table)
    assert device.bandwidth == pytest.approx(0.8e12, rel=0.02) and "of the rates of a calibration on" in device.rates


def test_a_log_of_another_job_leaves_the_file_as_it_is(gpu, capsys):
    path = rates_file(resolve_device(gpu))
    path.parent.mkdir()
    path.write_text('{"measured": "2026-01-02", "torch": "2", "rates": {"bandwidth": 8e11}}')
    before = path.read_bytes()
    assert plan(gpu, 1, "100s") == 2 and "more than 4x apart" in capsys.readouterr().err
    assert plan(gpu, 1, gpu) == 2 and "has no speed of a step" in capsys.readouterr().err
    assert main(["plan", *words(gpu, 1)]) == 2 and "--ran-with" in capsys.readouterr().err
    assert path.read_bytes() == before


def test_damaged_factors_are_said_and_not_used(gpu, caplog):
    table = resolve_device(gpu)
    path = rates_file(table)
    path.parent.mkdir()
    for text in ('{"steps": [], "factors": {"computing": -1}}', '{"steps": [{}], "factors": {"computing": 1}}', "[]"):
        path.write_text(text)
        assert calibrated(table) == table
    assert "is damaged" in caplog.text
