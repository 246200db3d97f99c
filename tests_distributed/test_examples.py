"""The examples that are for many ranks, as a reader starts them: torchrun with two."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parent.parent


# The ranks share one stdout, and gloo's own lines are written to it in pieces: one of ours may stand behind such a piece.
STEP = re.compile(r"step \d+: loss ([0-9.]+)")


def _output(name: str, *arguments: str | Path) -> str:
    env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(ROOT / "docs" / "examples" / name), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=env, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
def test_two_ranks_hold_half_each_and_learn() -> None:
    output = _output("two_ranks.py")
    losses = [float(found) for found in STEP.findall(output)]
    assert len(losses) == 5 and losses[-1] < losses[0]
    held = re.findall(r"rank \d of 2 holds (\d+) of (\d+)", output)
    assert len(held) == 2 and sum(int(part) for part, _ in held) == int(held[0][1])


@pytest.mark.long
def test_a_loop_of_ones_own_writes_whole_weights(tmp_path: Path) -> None:
    output = _output("training_loop.py", tmp_path / "weights.pt")
    losses = [float(found) for found in STEP.findall(output)]
    assert len(losses) == 3 and losses[-1] < losses[0]
    state = torch.load(tmp_path / "weights.pt")
    assert type(state["model.embed_tokens.weight"]) is torch.Tensor
    assert state["model.embed_tokens.weight"].shape == (64, 32)
