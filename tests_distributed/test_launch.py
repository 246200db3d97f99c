"""Joining and leaving a job: clean exits with torchrun, errors instead of hangs, and the documentation's examples."""

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nemo_like.distributed import launch
from tests_distributed.spawn import on_ranks, run_ranks

ROOT = Path(__file__).resolve().parent.parent
JOB = Path(__file__).with_name("launched_job.py")


def _torchrun(job: Path, *arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(job), *map(str, arguments)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)} | variables
    return subprocess.run(command, capture_output=True, text=True, timeout=200, env=env, check=False)


@pytest.mark.long
@pytest.mark.parametrize("ending", ["shuts down", "forgets"])
def test_torchrun_exits_cleanly_20_of_20_times(ending: str) -> None:
    """Without the order in launch.py about one exit in three aborts (its docstring has the cause)."""
    for run in range(20):
        done = _torchrun(JOB, ending)
        assert done.returncode == 0, f"run {run}: {done.stderr}"
        assert "terminate called" not in done.stderr


@pytest.mark.long
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="preloads a shared object into Linux's loader")
@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler, to build what slows gloo's threads")
def test_no_thread_of_gloo_waits_for_the_interpreter_when_it_ends(tmp_path: Path) -> None:
    """A group that a model holds outlives ``destroy_process_group``, and its threads with it: SIGABRT on both ranks."""
    slow = tmp_path / "slow_gloo.so"
    flags = ["-shared", "-fPIC", "-O1", "-ldl", "-Wl,--no-as-needed", "-lstdc++"]
    subprocess.run(["cc", str(JOB.with_name("slow_gloo.c")), "-o", str(slow), *flags], check=True)
    done = _torchrun(JOB, "holds the group", LD_PRELOAD=str(slow))
    assert done.returncode == 0, done.stderr
    assert "terminate called" not in done.stderr


@pytest.mark.long
def test_a_rank_that_fails_ends_the_job() -> None:
    started = time.monotonic()
    done = _torchrun(JOB, "one fails")
    assert done.returncode != 0
    assert "rank 1 has had enough" in done.stderr
    assert time.monotonic() - started < 60  # gloo's own timeout would be 30 minutes


def _join(rank: int, world_size: int) -> tuple[str, str, int, int]:
    device = launch.init_distributed("cpu")
    assert launch.init_distributed("cpu") == device  # a second time changes nothing
    return str(device), dist.get_backend(), launch.rank(), launch.world_size()


def test_joining_from_the_environment() -> None:
    assert run_ranks(2, _join, init_group=False) == [("cpu", "gloo", 0, 2), ("cpu", "gloo", 1, 2)]


@on_ranks(2, init_group=False)
def test_shutdown_twice(rank: int, world_size: int) -> None:
    launch.init_distributed("cpu")
    launch.shutdown()
    assert not dist.is_initialized()
    launch.shutdown()  # harmless


def test_one_rank_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for environment in ({}, {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}):
        for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        assert launch.world_size() == 1 and launch.rank() == 0
        assert str(launch.init_distributed("cpu")) == "cpu"
        assert not dist.is_initialized()
        launch.shutdown()


def test_a_broken_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(RuntimeError, match=r"WORLD_SIZE is 4 but RANK, MASTER_ADDR, MASTER_PORT not set.*torchrun"):
        launch.init_distributed("cpu")
    for value in ("four", "0", "-1", "1.5"):
        monkeypatch.setenv("WORLD_SIZE", value)
        with pytest.raises(ValueError, match=f"WORLD_SIZE is '{value}'"):
            launch.world_size()
    with pytest.raises(ValueError, match="device_type is 'tpu'"):
        launch.local_device("tpu")


def test_the_limit_of_open_files_is_raised_as_far_as_it_goes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    limits: list[tuple[int, int]] = []
    for hard, ranks, soft in ((2**20, 8, None), (2**20, 1024, 4608), (-1, 1024, 4608), (4096, 1024, 4096)):
        limits.clear()
        stand_in = SimpleNamespace(
            RLIMIT_NOFILE=7,
            RLIM_INFINITY=-1,
            getrlimit=lambda kind, hard=hard: (1024, hard),
            setrlimit=lambda kind, changed: limits.append(changed),
        )
        monkeypatch.setattr(launch, "resource", stand_in)
        launch.allow_open_files(ranks)
        assert bool(caplog.text) is (hard == 4096)
        assert limits == ([] if soft is None else [(soft, hard)])
    assert re.search("may open 4,096 files, and .* 1,024 ranks .* about 4,608: .* `ulimit -Hn 4608`", caplog.text)


def test_a_rank_without_a_device_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "99")
    said = (
        r"LOCAL_RANK is 99 but this node has \d+ CUDA device"
        if torch.cuda.is_available()
        else "sees no CUDA device here"
    )
    with pytest.raises(ValueError, match=said):
        launch.local_device("cuda")


DOCUMENT = ROOT / "docs" / "how-to" / "many-hosts.md"
SMALL = {
    "--nnodes 4": "--nnodes 2", "--nproc-per-node 8": "--nproc-per-node 1", "llama3-8b": "llama-tiny",
    "--dp-replicate 4": "--dp-replicate 2", "--save-every 200": "--save-every 1",
}  # fmt: skip


def _two_hosts(line: str) -> list[subprocess.CompletedProcess[str]]:
    """Run `line` of one host twice at once: two agents of torchrun, each with a rank of its own."""
    command = [sys.executable, "-m", "torch.distributed.run", *shlex.split(line)[1:]]
    env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    agents = [subprocess.Popen(command, env=env, **pipes) for _ in range(2)]
    try:
        return [
            subprocess.CompletedProcess(command, a.returncode, text)
            for a in agents
            for text in [a.communicate(timeout=180)[0]]
        ]
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()


@pytest.mark.long
def test_the_command_of_many_hosts_starts_on_a_fresh_folder_and_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    line = DOCUMENT.read_text().split("```bash\n")[1].split("```")[0].replace("\\\n", " ")
    for words, small in SMALL.items():
        assert words in line
        line = line.replace(words, small)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        line = line.replace("host0:29500", f"127.0.0.1:{free.getsockname()[1]}")
    line = line.replace("/shared/my-job", str(tmp_path)).replace("-m nemo_like", "--local-addr 127.0.0.1 -m nemo_like")
    line += " --steps 2 --global-batch 4 --seq-len 16 --eval-samples 0 --device cpu"
    for said in ("step 2", "resumed after step 2"):
        done = _two_hosts(line)
        assert [agent.returncode for agent in done] == [0, 0], done[0].stdout + done[1].stdout
        assert said in done[0].stdout + done[1].stdout


# The ranks share one stdout, and gloo's own lines are written to it in pieces: one of ours may stand behind such a piece.
STEP = re.compile(r"step \d+: loss ([0-9.]+)")


def _output_of_example(name: str, *arguments: Path) -> str:
    done = _torchrun(ROOT / "docs" / "examples" / name, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
def test_two_ranks_hold_half_each_and_learn() -> None:
    output = _output_of_example("two_ranks.py")
    losses = [float(found) for found in STEP.findall(output)]
    assert len(losses) == 5 and losses[-1] < losses[0]
    held = re.findall(r"rank \d of 2 holds (\d+) of (\d+)", output)
    assert len(held) == 2 and sum(int(part) for part, _ in held) == int(held[0][1])


@pytest.mark.long
def test_a_loop_of_ones_own_writes_whole_weights(tmp_path: Path) -> None:
    losses = [float(loss) for loss in STEP.findall(_output_of_example("training_loop.py", tmp_path / "weights.pt"))]
    assert len(losses) == 3 and losses[-1] < losses[0]
    state = torch.load(tmp_path / "weights.pt")
    assert type(state["model.embed_tokens.weight"]) is torch.Tensor
    assert state["model.embed_tokens.weight"].shape == (64, 32)
