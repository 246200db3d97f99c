"""``--fit`` in the training job: chosen once, the same on every rank, kept by a resumed run, and as predicted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_like._util.option_fields import parse_options
from nemo_like.distributed.ranks import Ranks
from nemo_like.distributed.weights.tensor_locations import CPU_OFFLOAD_MARK
from nemo_like.models import resolve_model
from nemo_like.planning.devices import Device, resolve_device
from nemo_like.recipes import auto, pretrain
from nemo_like.recipes.auto import FILE
from nemo_like.recipes.loop import Pretraining
from nemo_like.recipes.options import PretrainOptions
from nemo_like.recipes.pretrain import joined, prepare
from tests_distributed.allocated import step_peak_bytes
from tests_distributed.recipes.pretrain_job import LLAMA
from tests_distributed.spawn import run_ranks

pytest.importorskip("transformers")
ALONE = Ranks(0, 1, torch.device("cpu"))
FREE = "ac"


def _peak(job: Pretraining) -> int:
    """Bytes that the allocator says a step peaks at."""

    def step() -> None:
        job._forward_and_backward()
        job.optimizer.step()
        job.optimizer.zero_grad(set_to_none=True)

    step()
    return step_peak_bytes(job.model, job.optimizer, step)


UNSAVED: dict[str, Any] = {"checkpoint_dir": None, "save_every": 100, "sync_save": False}


def _job(folder: Path) -> dict[str, Any]:
    (folder / "config.json").write_text(json.dumps(LLAMA))
    (folder / "text.txt").write_text("a text that is learned, " * 400)
    return {
        "model": str(folder / "config.json"), "data": str(folder / "text.txt"), "seq_len": 64, "global_batch": 8, "steps": 4,
        "eval_samples": 0, "device": "cpu", "save_every": 2, "sync_save": True, "log_every": 1,
        "schedule": "constant", "warmup_steps": 2,  # the same rates, however many steps there are
        "checkpoint_dir": str(folder / "checkpoints"),
    }  # fmt: skip


def _run(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    asked = _job(Path(folder)) | {"fit": FREE, "fit_memory": "2MiB"}
    with joined(PretrainOptions(**asked)) as ranks:
        job = prepare(PretrainOptions(**asked), ranks)
        found["first"] = vars(job.fitted), job.options
        job.run()
        found["losses"], found["peak"] = job.log.losses, _peak(job)
        again = PretrainOptions(**asked | {"steps": 6, "resume": "must"})
        resumed = prepare(again, ranks)
        resumed.run()
        found["kept"], found["resumed"] = vars(resumed.fitted), (resumed.first_step, resumed.log.losses)
        other = prepare(
            PretrainOptions(**asked | {"steps": 6, "resume": "must", "fit": "ac", "fit_memory": "1GiB"}), ranks
        )
        found["other"] = vars(other.fitted)
        own = asked | {"fit": "no", "fit_memory": None, "steps": 6} | UNSAVED
        plain = prepare(PretrainOptions(**own), ranks)
        plain.run()
        found["plain"] = plain.log.losses
    return found


def test_ranks_agree_on_what_fits_and_a_resumed_run_keeps_it(tmp_path: Path) -> None:
    one, two = run_ranks(2, _run, str(tmp_path), init_group=False, timeout=280)
    for name in ("first", "kept", "other"):
        assert one[name] == two[name], "both ranks have the same"
    chosen, options = one["first"]
    assert set(chosen["options"]) == set(FREE.split(","))
    assert all(getattr(options, name) == value for name, value in chosen["options"].items())
    assert chosen["predicted"]["peak_bytes"] <= chosen["predicted"]["limit_bytes"] == 2 << 20
    for found in (one, two):
        assert found["peak"] == pytest.approx(chosen["predicted"]["peak_bytes"], rel=0.01)
    assert one["kept"] == chosen | {"kept": True}
    assert one["resumed"][0] == 4 and len(one["resumed"][1]) == 2
    torch.testing.assert_close(
        torch.tensor(one["losses"] + one["resumed"][1]), torch.tensor(one["plain"]), rtol=1e-5, atol=0
    )
    assert not one["other"]["kept"] and one["other"]["predicted"]["limit_bytes"] == 1 << 30


def _small_gpu(kind: str) -> Device:
    """A GPU whose name alone is at hand, in which nothing takes a while: what decides is what its allocator reserves."""
    return replace(resolve_device("h100-80gb"), launch_seconds=0.0, hop_seconds=0.0)


WIDE = {"intermediate_size": 16_384}
"""Layers whose state on the device takes more than the allocator's segments differ by."""


def _run_on_host(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    free = {"fit": "ac,cpu_offload", "fit_memory": "200MiB", "grad_accum": 2}
    asked = _job(Path(folder)) | free
    (Path(folder) / "config.json").write_text(json.dumps(LLAMA | WIDE))
    own = asked | {"fit": "no", "fit_memory": None, "steps": 6} | UNSAVED
    with joined(PretrainOptions(**asked)) as ranks, pytest.MonkeyPatch.context() as patch:
        patch.setattr(auto, "device_at_hand", _small_gpu)
        job = prepare(PretrainOptions(**asked), ranks)
        found["first"], found["words"] = vars(job.fitted), job.fitted.words()
        job.run()
        found["on"] = {str(p.to_local().device) for p in job.model.parameters()}, hasattr(job.model, CPU_OFFLOAD_MARK)
        resumed = prepare(PretrainOptions(**asked | {"steps": 6, "resume": "must"}), ranks)
        resumed.run()
        found["kept"], found["losses"] = vars(resumed.fitted), job.log.losses + resumed.log.losses
        more = prepare(PretrainOptions(**asked | {"steps": 6, "resume": "must", "fit_memory": "1GiB"}), ranks)
        found["more"] = vars(more.fitted)
        patch.setattr(auto, "host_bytes", lambda ranks: 1 << (9 if rank else 40))
        found["refused"] = []
        for changed in (UNSAVED, {"resume": "must"}):
            with pytest.raises(ValueError) as refused:
                prepare(PretrainOptions(**asked | changed), ranks)
            found["refused"].append(str(refused.value))
        enough = prepare(PretrainOptions(**asked | {"fit_host_memory": "1GiB"} | UNSAVED), ranks)
        found["enough"] = vars(enough.fitted)
        plain = prepare(PretrainOptions(**own), ranks)
        plain.run()
        found["plain"] = plain.log.losses
        patch.undo()
        pinned = asked | {"fit": "ac", "cpu_offload": True, "fit_memory": "128MiB"} | UNSAVED
        here = prepare(PretrainOptions(**pinned), ranks)
        here.run()
        found["pinned"] = vars(here.fitted), here.log.losses, _peak(here)
    return found


@pytest.mark.long
def test_state_goes_to_the_host_where_that_alone_fits_and_trains_the_same(tmp_path: Path) -> None:
    one, two = run_ranks(2, _run_on_host, str(tmp_path), init_group=False, timeout=280)
    assert one == two, "both ranks have the same"
    chosen = one["first"]
    assert chosen["options"]["cpu_offload"] is True and set(chosen["options"]) == {"ac", "cpu_offload"}
    assert one["words"].startswith("--fit chose --ac ") and " --cpu-offload: predicted peak " in one["words"]
    assert one["on"] == ({"cpu"}, True)
    assert one["kept"] == chosen | {"kept": True}
    assert len(one["losses"]) == 6 and one["losses"] == one["plain"]
    # With more memory on the device it stays there; what the host has counts, on the rank with the least.
    assert one["more"]["options"]["cpu_offload"] is False and not one["more"]["kept"]
    assert all("Nothing fits in 200.00MiB" in words for words in one["refused"]) and len(one["refused"]) == 2
    assert one["enough"]["options"] == chosen["options"] and one["enough"]["conditions"]["fit_host_memory"] == "1GiB"
    there, losses, peak = one["pinned"]
    assert "cpu_offload" not in there["options"] and losses == one["plain"][:4]
    assert peak == pytest.approx(there["predicted"]["peak_bytes"], rel=0.01) and peak < 128 << 20


def test_what_is_given_is_left_alone_and_what_cannot_fit_ends_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = _job(tmp_path)
    line = [f"--{name.replace('_', '-')}={value}" for name, value in job.items() if not isinstance(value, bool)]
    options = parse_options(PretrainOptions, [*line, "--fit", "--ac", "full", "--tp", "1"])
    assert set(options.free) == set(PretrainOptions().searched) - {"ac", "tp"} and "cpu_offload" in options.free
    for said in ("--cpu-offload", "--no-cpu-offload"):
        given = parse_options(PretrainOptions, [*line, "--fit", said])
        assert "cpu_offload" not in given.free and given.cpu_offload is (said == "--cpu-offload")
    assert pretrain.main([*line, "--fit=grad_accum", "--fit-memory", "200KiB", "--ac", "full"]) == 2
    said = capsys.readouterr().err
    assert "--fit: Nothing fits in 200.00KiB" in said and "bound by memory: parameters and optimizer" in said
    assert not (tmp_path / "checkpoints" / FILE).exists()


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"fit": "acc"}, "Did you mean 'ac'"),
        ({"fit": "all", "strategy": "ddp"}, "--strategy is 'ddp', with which --fit predicts nothing"),
        ({"fit": "loss", "ac": "submodule"}, "--ac is 'submodule', with which --fit"),
        ({"fit": "loss", "ac": "50%"}, "--ac is '50%', with which --fit"),
        ({"fit_memory": "1GiB"}, "without --fit nothing reads it"),
        ({"fit": "all", "fit_memory": "much"}, "much"),
        ({"fit_host_memory": "1GiB"}, "--fit-host-memory is '1GiB', and without --fit nothing reads it"),
        ({"fit": "all", "fit_host_memory": "-1"}, "-1"),
    ],
)
def test_what_fit_cannot_do_is_refused(asked: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PretrainOptions(**asked)


@pytest.mark.parametrize(
    ("world_size", "device", "message"),
    [
        (
            1,
            "h100-80gb",
            "--fit: cpu_offload is FSDP2's, gpus is 1, and one rank keeps the model whole.*or leave it out",
        ),
        (
            2,
            "rtx-4090",
            "--fit: cpu_offload runs the optimizer in CPU memory.*beside rtx-4090 is not known.*or leave it out",
        ),
    ],
)
def test_state_on_the_host_is_refused_where_it_cannot_be_or_nobody_knows_its_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_size: int, device: str, message: str
) -> None:
    monkeypatch.setattr(auto, "device_at_hand", lambda kind: resolve_device(device))
    options = PretrainOptions(**_job(tmp_path) | {"fit": "ac", "cpu_offload": True})
    model = resolve_model(options.model).build("meta")
    with pytest.raises(ValueError, match=message):
        auto.choose(options, replace(ALONE, world_size=world_size), model)
