"""Rates of the device at hand: measured, written, read back, used and named."""

from __future__ import annotations

import json

import pytest

from nemo_like.cli import main
from nemo_like.planning.calibration import calibrate
from nemo_like.planning.devices import RATES, cache_folder, calibrated, device_at_hand, rates_file, resolve_device
from nemo_like.planning.fit import fit

pytest.importorskip("transformers")
ASKED = {"gpus": 1, "seq_len": 64, "micro_batch": 1, "ac": "full", "loss": "model", "offload": "none"}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NEMO_LIKE_CACHE", str(tmp_path))
    return tmp_path


def test_what_was_measured_is_what_later_plans_use_and_name(cache, monkeypatch):
    monkeypatch.setattr("nemo_like.planning.calibration.pick_device_type", lambda: "cpu")
    monkeypatch.setattr("nemo_like.planning.devices.pick_device_type", lambda: "cpu")
    before = fit("llama-tiny", gpu="cpu", **ASKED)
    path = calibrate(seconds=0.1)
    assert path == cache / "rates" / "cpu.json"
    rates = json.loads(path.read_text())["rates"]
    assert set(rates) == {name for name in RATES if name not in ("host_link", "nvlink", "network")}
    assert all(rate > 0 for rate in rates.values())
    device = device_at_hand()
    assert device == calibrated(resolve_device("cpu")) and device.matmul_flops["half"] == rates["matmul_half"]
    assert (device.attention_flops["single"], device.bandwidth) == (rates["attention_single"], rates["bandwidth"])
    assert device.host_link == resolve_device("cpu").host_link, "not measured here"
    after = fit("llama-tiny", gpu="cpu", **ASKED)
    assert str(path) in after.question.device.rates and before.question.device.rates == "the table"
    assert after.to_dict()["rates"] == after.question.device.rates
    assert after.best.peak_bytes == before.best.peak_bytes and after.best.step_seconds != before.best.step_seconds


def test_a_damaged_file_is_said_and_not_used(cache, caplog):
    path = rates_file(resolve_device("cpu"))
    path.parent.mkdir()
    for text in ("{", "{}", '{"rates": {"bandwidth": -1}, "measured": "", "torch": ""}'):
        path.write_text(text)
        assert calibrated(resolve_device("cpu")) == resolve_device("cpu")
    assert "is damaged" in caplog.text


def test_the_command_line_names_the_file(cache, capsys, monkeypatch):
    monkeypatch.setattr("nemo_like.planning.calibration.SECONDS", 0.1)
    assert main(["fit", "--calibrate"]) == 0
    said = capsys.readouterr().err
    (path,) = (cache_folder() / "rates").iterdir()
    assert str(path) in said and "matmul_half" in said
    assert main(["fit", "--gpus", "1"]) != 0 and "--model is needed" in capsys.readouterr().err
