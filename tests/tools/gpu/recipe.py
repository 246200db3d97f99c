"""Check 4: `nemo-like pretrain` for twelve steps, with checkpoints, stopped after the eighth and resumed."""

from __future__ import annotations

import os
import signal
import statistics
import time
from pathlib import Path
from typing import Any

from nemo_like._util.device_work import wait_for
from nemo_like.recipes.options import PretrainOptions
from nemo_like.recipes.pretrain import joined, prepare
from tests.tools.gpu.driver import Run
from tests.tools.gpu.machine import Machine

STEPS, STOP, EVERY = 12, 8, 4


def check(run: Run) -> None:
    """Train, write a checkpoint while training goes on, stop by a signal, resume; all on one device."""
    machine = Machine(run.cpu)
    config, text = run.folder / "config.json", run.folder / "text.txt"
    # The widths of llama3-1b: 0.25 B parameters, and 3 GB in a checkpoint.
    widths = machine.pick({"hidden_size": 2048, "intermediate_size": 8192}, {})
    machine.config(machine.pick(4, 2), vocab_size=512, **widths).to_json_file(config)
    text.write_bytes(b"\n".join(path.read_bytes() for path in sorted(Path("nemo_like").rglob("*.py"))))
    options: dict[str, Any] = {
        "model": str(config),
        "data": str(text),
        "device": machine.device.type,
        "init": "sharded",  # random numbers of the CPU take 10 s
        "seq_len": machine.pick(2048, 32),
        "global_batch": machine.pick(8, 2),
        "steps": STEPS,
        "eval_samples": 0,
        "checkpoint_dir": str(run.folder / "run"),
        "save_every": EVERY,
        "keep": 1,
        "precision": "bfloat16",
        "ac": "selective",
    }
    with run.guarded("stopped after step 8"):
        first = _run(PretrainOptions(**options), stop=STOP)
        run.row("stopped after step 8", STOP, first.job.step, ok=first.job.step == STOP and first.job.interrupted > 0)
        run.row("step", None, 1000 * statistics.median(first.times[1:EVERY]), "ms")
        run.row(
            "slowest step while it saves", None, 1000 * max(first.times[EVERY + 1 : STOP]), "ms", each=str(first.times)
        )
        run.row("call of a save", None, first.saves[0], "s")
        run.row("last save, complete", None, first.last, "s")
        run.row("speed", None, first.job.tokens_per_second, "tokens/s", mfu=first.job.mfu)
    with run.guarded("resumed"):
        begun = time.perf_counter()
        second = _run(PretrainOptions(**options, resume="must"))
        steps, wanted = f"{second.job.log.first_step}, {second.job.step}", f"{STOP}, {STEPS}"
        run.row("resumed: first and last step", wanted, steps, ok=steps == wanted)
        run.row("resumed: all of it", None, time.perf_counter() - begun, "s", load=second.load)
        losses = first.job.log.losses[0], second.job.log.losses[-1]
        run.row("loss of the first and the last step", *losses, ok=losses[1] < losses[0])


class _run:
    """A job that has run; its times are seconds between two waits for the device."""

    def __init__(self, options: PretrainOptions, stop: int | None = None) -> None:
        self.times, self.saves = list[float](), list[float]()
        with joined(options) as ranks:
            begun = time.perf_counter()
            job: Any = prepare(options.on(ranks.device.type), ranks)
            self.job, self.load = job, time.perf_counter() - begun
            step, save = job._train_step, job.store.save
            job._train_step, job.store.save = self._timed(self.times, step, stop), self._timed(self.saves, save)
            job.run()
            self.last = time.perf_counter() - self.began

    def _timed(self, into: list[float], call: Any, stop: int | None = None) -> Any:
        def run(*args: Any) -> None:
            self.began = time.perf_counter()
            if self.job.step + 1 == stop:
                os.kill(os.getpid(), signal.SIGTERM)  # as a cluster does before it takes a node back
            call(*args)
            wait_for(self.job.ranks.device)
            into.append(time.perf_counter() - self.began)

        return run
