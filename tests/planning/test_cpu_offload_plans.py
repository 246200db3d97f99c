"""``nemo-like plan --cpu-offload``: weights, gradients and optimizer state in host memory."""

from __future__ import annotations

import json

import pytest

from nemo_like.cli import main

pytest.importorskip("transformers")

_ASKED = "plan --model tests.planning.queries:Text --world-size 2 --seq-len 64 --no-what-if"


def _plan(path, *more: str) -> dict:
    main([*_ASKED.split(), "--json", str(path), *more])
    return json.loads(path.read_text())


@pytest.mark.long
def test_the_device_keeps_none_of_the_state_and_the_host_all_of_it(tmp_path):
    here, there = _plan(tmp_path / "here.json"), _plan(tmp_path / "there.json", "--cpu-offload")
    for own, other in zip(here["rows"][:3], there["rows"][:3]):
        state = {"parameters", "optimizer state", "gradients"}
        assert own["peak_parts"].keys() >= {"parameters", "optimizer state"} and not state & other["peak_parts"].keys()
        # Parameters, gradients and two moments, float32, padded alike; and for each of 28 parameters a counter of steps.
        assert other["host_bytes"] == 4 * own["peak_parts"]["parameters"] + 4 * 28 and own["host_bytes"] == 0
        assert other["peak_bytes"] < own["peak_bytes"] and other["reserved_bytes"] >= other["peak_bytes"]
        assert other["step_seconds"] > own["step_seconds"]
    assert "cpu_offload=True" in there["call"]
    small = _plan(tmp_path / "small.json", "--cpu-offload", "--host-memory", "1KiB")
    assert not any(row["fits"] for row in small["rows"])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--gpu", "rtx-4090"], "beside rtx-4090 is not known"),
        (["--world-size", "1"], "one rank keeps the model whole"),
        (["--pp", "2"], "--cpu-offload with --pp"),
    ],
)
def test_what_cannot_be_planned_is_refused_by_name(more, message, capsys):
    assert main([*_ASKED.split(), "--cpu-offload", *more]) == 2
    assert message in capsys.readouterr().err


def test_on_the_cpu_host_memory_is_the_devices_own(tmp_path):
    here, there = (
        _plan(tmp_path / f"{n}.json", "--gpu", "cpu", *more) for n, more in enumerate(([], ["--cpu-offload"]))
    )
    assert [row["peak_parts"] for row in here["rows"]] == [row["peak_parts"] for row in there["rows"]]
