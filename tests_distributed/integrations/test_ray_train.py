"""The training job inside Ray Train, on two CPU workers: one is killed, the job goes on from its checkpoint."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests_distributed.recipes.pretrain_job import LLAMA, run_job

pytest.importorskip("ray.train.torch", reason="the extra 'hosts' is not installed")


def _arguments(folder: Path) -> list[str]:
    (folder / "model.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    (folder / "text.txt").write_text("".join(f"{i * i} is the square of {i}\n" for i in range(400)), encoding="utf-8")
    return [
        "--model", str(folder / "model.json"), "--data", str(folder / "text.txt"), "--seq-len", "32", "--global-batch", "4",
        "--steps", "6", "--device", "cpu", "--ac", "selective",
    ]  # fmt: skip


def _worker(config: dict[str, str]) -> None:
    """What a user writes, and a rank that kills itself once after a checkpoint."""
    import signal

    import ray.train

    import nemo_like.recipes.loop as job
    from nemo_like.recipes.pretrain import main

    killed = Path(config["folder"]) / "killed"
    if ray.train.get_context().get_world_rank() == 1 and not killed.exists():
        before = job.Pretraining._train_step

        def train_step(self: job.Pretraining) -> None:
            if self.step >= 3:
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            before(self)

        job.Pretraining._train_step = train_step
    code = main(json.loads(config["arguments"]))
    if code:
        raise RuntimeError(f"the training job ended with code {code}")


@pytest.mark.long
def test_a_killed_worker_is_started_again_and_goes_on_from_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    expected = run_job(2, _arguments(tmp_path), tmp_path / "expected.json")
    saved, summary = tmp_path / "checkpoints", tmp_path / "summary.json"
    arguments = [
        *_arguments(tmp_path), "--json", str(summary), "--checkpoint-dir", str(saved), "--save-every", "2", "--sync-save",
        "--resume=auto",
    ]  # fmt: skip
    monkeypatch.setenv("RAY_TRAIN_V2_ENABLED", "1")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=os.pathsep)
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)  # its controller takes one, too
    try:
        result = TorchTrainer(
            _worker,
            train_loop_config={"folder": str(tmp_path), "arguments": json.dumps(arguments)},
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path=str(tmp_path / "ray"), failure_config=FailureConfig(max_failures=1)),
        ).fit()
    finally:
        ray.shutdown()
    assert result.error is None and (tmp_path / "killed").exists()
    found = json.loads(summary.read_text(encoding="utf-8"))
    assert found["world_size"] == 2
    assert len(expected["losses"]) == 6
    assert found["losses"] == expected["losses"][2:]  # those since the checkpoint of step 2
