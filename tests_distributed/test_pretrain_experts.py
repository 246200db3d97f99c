"""The training job with experts on several ranks: the losses of one, resumed with experts split otherwise, killed."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
import torch

from tests_distributed.test_pretrain import _newest, _ranks_of, _run, _torchrun, _wait_for


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options of a small job with the preset that has experts."""
    folder = tmp_path_factory.mktemp("job")
    text = "".join(f"{i} bottles of beer on the wall, {i} bottles of beer.\n" for i in range(400, 0, -1))
    (folder / "text.txt").write_text(text)
    line = "--seq-len 16 --batch-size 8 --grad-accum 2 --steps 6 --save-every 2 --keep 9 --log-every 3 --eval-samples 8"
    line += f" --eval-every 0 --warmup-steps 2 --data {folder / 'text.txt'} --model mixtral-tiny --device cpu --plain"
    return line.split()


def _assert_same(found: list[float], wanted: list[float]) -> None:
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=1e-4, atol=0)


def test_losses_are_those_without_ep_and_resuming_takes_another_ep(base: list[str], tmp_path: Path) -> None:
    drawn = [*base, "--init", "sharded"]
    whole = _run(2, drawn, tmp_path / "whole")["losses"]
    assert len(whole) == 6 and whole[-1] < whole[0]
    _assert_same(_run(2, [*drawn, "--ep", "2"], tmp_path / "split")["losses"], whole)
    constant = [*base, "--schedule", "constant"]
    whole = _run(2, constant, tmp_path / "constant")["losses"]
    run = tmp_path / "run"
    split = _run(2, [*constant, "--ep", "2", "--steps", "4", "--checkpoint-dir", str(run)], tmp_path / "first")
    assert split["options"]["ep"] == 2
    _assert_same(split["losses"], whole[:4])
    for ranks, ep in ((2, 1), (4, 4)):
        copied = shutil.copytree(run, tmp_path / f"run{ranks}")
        more = ["--ep", str(ep), "--grad-accum", "1", "--checkpoint-dir", str(copied), "--resume"]
        resumed = _run(ranks, [*constant, *more], tmp_path / f"second{ranks}")
        assert resumed["first_step"] == 4
        _assert_same(resumed["losses"], whole[4:])


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="finds the ranks' processes in /proc (Linux)")
def test_a_killed_rank_ends_the_job(base: list[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    with _torchrun([*base, "--ep", "2", "--steps", "500", "--checkpoint-dir", str(run)]) as killed:
        _wait_for(lambda: _newest(run) >= 2, killed)
        os.kill(_ranks_of(killed)[1], signal.SIGKILL)
        output, _ = killed.communicate(timeout=60)
    assert killed.returncode != 0, output
