"""Common part of all training jobs: steps, their order, reports, evaluations, checkpoints, and how they end.

A job defines what it trains and on what. It fills the fields below while it is made, calls `_begin`, and overrides
`_train`, `_evaluate` and `_introduce`.
"""

from __future__ import annotations

import contextlib
import math
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from nemo_like._util.log import warn_once
from nemo_like._util.tensors import tensors_in
from nemo_like.distributed.gradients import clip_grad_norm_, set_gradient_sync
from nemo_like.models import check_positions
from nemo_like.parallelizer import parallelize
from nemo_like.planning.devices import device_at_hand
from nemo_like.profiling.first_step import most_elements
from nemo_like.recipes.agree import Ranks
from nemo_like.recipes.fitted import Fitted, choose
from nemo_like.recipes.job_checkpoint import CheckpointStore
from nemo_like.recipes.loss import DivergedError, LossLog
from nemo_like.recipes.memory_advice import PlannedStep, advice_on_memory
from nemo_like.recipes.progress import Progress
from nemo_like.recipes.run_options import LearningRate, RunOptions
from nemo_like.recipes.run_state import check_same_run, gather_state
from nemo_like.recipes.step_flops import Speed, Utilisation


class TrainingJob:
    """One run: built on every rank from the same options, then `run`."""

    options: RunOptions
    model: nn.Module
    optimizer: torch.optim.Optimizer
    width: int
    """Tokens of the longest row."""
    utilisation: Utilisation
    """Facts that MFU is counted with."""
    about: dict[str, Any]
    """The facts that a resumed run must share, see `run_state`."""

    def __init__(self, options: RunOptions, ranks: Ranks):
        if not options.free:
            _check_ranks(options, ranks)
        self.options = options
        self.ranks = ranks
        self.fitted: Fitted | None = None
        """Choice of ``--fit``, which `options` has, too."""
        self.schedule = LearningRate(options.schedule, options.lr, options.warmup, options.steps, options.lr_floor)
        self.step = 0
        """Steps done since step 0 of the first run."""
        self.store: CheckpointStore | None = None
        self.eval_losses: list[dict[str, float]] = []
        self.interrupted = 0
        """The signal that ended the run early, or 0."""
        self._speed = Speed()

    # ------------------------------------------------------------------------------------------- what a job overrides

    def _bare(self, options: RunOptions) -> nn.Module:
        """The model that `options` make, on the meta device, not sharded."""
        raise NotImplementedError

    def _train(self, step: int) -> torch.Tensor:
        """Forward and backward of one step on this rank; its mean loss, 0-dim, whose mean over the ranks is the step's."""
        raise NotImplementedError

    def _evaluate(self) -> float | None:
        """The loss on held-out samples, the same on every rank; None where there are no held-out samples. A collective."""
        raise NotImplementedError

    def _introduce(self, progress: Progress) -> None:
        """Print what is about to run."""
        raise NotImplementedError

    def _step_lengths(self, step: int) -> Sequence[int]:
        """Tokens of each sample, or document of a packed row, that a step trains on, over all ranks."""
        raise NotImplementedError

    def _clip(self, most: float) -> torch.Tensor:
        """Clip the gradients to the norm `most`; the norm before, 0-dim. A collective."""
        return clip_grad_norm_(self.model, most)

    def _after_step(self, progress: Progress, *, report: bool, loss: float | None) -> None:
        """After the step numbered ``self.step - 1`` and its report and evaluation, and before its checkpoint."""

    def save_result(self) -> None:
        """After the last step: write what the job is for. A collective."""

    def _is_worth_saving(self) -> bool:
        """Return whether the evaluation just made requires a checkpoint of this step."""
        return False

    unit = "token"
    """Unit that losses are per."""

    # --------------------------------------------------------------------------------------------------- what is shared

    @property
    def strategy(self) -> str:
        """The strategy that took effect: one rank is always ``single``."""
        return self.options.strategy if self.ranks.world_size > 1 else "single"

    @property
    def tokens_per_second(self) -> float:
        """Trained tokens per second over all ranks, without the first step, evaluations and checkpoints."""
        return self._speed.per_second[0]

    @property
    def mfu(self) -> float | None:
        """Share of the devices' FLOP/s that the model needed, in the time that `tokens_per_second` counts; None where
        `utilisation` has a reason."""
        if self.utilisation.flops is None:
            return None
        return self._speed.per_second[1] / (self.utilisation.peak * self.ranks.world_size)

    def facts(self) -> dict[str, Any]:
        """Return what the summary has of this kind of job in addition to what it has of every one; JSON values."""
        return {}

    def _state(self) -> dict[str, Any]:
        """Return what a checkpoint holds, the tensors themselves."""
        return gather_state(self.model, self.optimizer)

    def _look_at(self, model: nn.Module, width: int) -> None:
        """Count the FLOPs of the bare `model`, and have ``--fit`` choose for it and rows of up to `width` tokens, where it
        was asked for. A collective."""
        check_positions(getattr(model, "config", None), "--seq-len", width)
        self.width = width
        device = device_at_hand(self.ranks.device.type)
        self.utilisation = Utilisation.of(model, device, self.options.job().precision)
        if self.options.free:
            self.options, self.ranks, self.fitted = choose(self.options, self.ranks, model, width)
            _check_ranks(self.options, self.ranks)

    def _advice(self) -> contextlib.AbstractContextManager[None]:
        """Raise `MemoryRanOutError` with what would lower the peak, where memory runs out inside."""
        return advice_on_memory(PlannedStep(self._bare, self.options, self.ranks, self.width))

    def _parallelized(self, model: nn.Module, rows: int, width: int, mesh: DeviceMesh | None = None) -> Any:
        """Return what `parallelize` makes of `model`, for micro-batches of up to `rows` x `width` tokens."""
        fields: dict[str, Any] = {"device": self.ranks.device}
        if self.fitted is not None and (plan := self.fitted.planned) is not None:
            fields["ac"] = plan
        sample = self.options.planned_input(rows, width)
        if self.fitted is not None:
            fields["planned_tokens"] = most_elements(tensors_in(sample))
        return parallelize(model, self.options.job(**fields), sample_input=sample, mesh=mesh)

    def _begin(self) -> None:
        """With everything built: go on from a checkpoint where that was asked for. A collective.

        Raises:
            ValueError: a checkpoint of another run, or one where none was expected, or the other way round.
            CheckpointError: there are checkpoints to resume from, and none can be read.
        """
        options = self.options
        if options.checkpoint_dir is not None:
            background = not options.sync_save
            self.store = CheckpointStore(options.checkpoint_dir, self.ranks, keep=options.keep, background=background)
            self._resume(self.store)
            if self.fitted is not None and self.ranks.rank == 0:
                self.fitted.save(self.store.folder)
        self.first_step = self.step
        self.log = LossLog(self.ranks, self.first_step)

    def _resume(self, store: CheckpointStore) -> None:
        options = self.options
        if options.resume == "no":
            newest = self.ranks.largest(max(store.steps(), default=-1))
            if newest >= 0:
                raise ValueError(
                    f"{str(store.folder)!r} has checkpoints up to step {newest} already. Go on from them with --resume, or "
                    f"give another {options.elsewhere}."
                )
            return
        state = self._state()
        step = store.load(state, self._check_checkpoint)
        if step is None:
            if options.resume == "must":
                raise ValueError(
                    f"--resume finds no checkpoint in {str(store.folder)!r}. Check {options.elsewhere}, or write "
                    "--resume=auto to start anew where there is none."
                )
            return
        self.step = step

    def _check_checkpoint(self, about: Any) -> None:
        way_out = f"Give the same again, or start anew with another {self.options.elsewhere}."
        check_same_run(about, self.about, way_out)

    # ------------------------------------------------------------------------------------------------------ the loop

    def run(self) -> None:
        """Train to the last step, or until a signal to stop; then the last checkpoint is complete on disk.

        Raises:
            DivergedError: the loss is not finite; on every rank, after the last sound checkpoint is complete.
            MemoryRanOutError: a step does not fit; the message has what to change.
        """
        options = self.options
        progress = Progress(self.step, options.steps, self.ranks.device, plain=options.plain)
        with self._advice(), progress, Interrupt() as stop:
            self._introduce(progress)
            progress.say(self.utilisation.words)
            if self.fitted is not None:
                progress.say(self.fitted.words())
            if self.step:
                left = "" if self.step < options.steps else f"; --steps is {options.steps}, so nothing is left to train"
                progress.say(f"resumed after step {self.step}{left}")
            try:
                while self.step < options.steps and not self.interrupted:
                    self._advance(progress, stop)
            except DivergedError:  # raised on every rank, so all of them are here
                if self.store is not None:
                    self.store.wait()
                raise
            if self.store is not None:
                self.store.wait()
            if self.interrupted:
                saved = "" if self.store is None else f"; the checkpoint of step {self.step} is complete"
                progress.say(f"Stopped by {signal.Signals(self.interrupted).name} after step {self.step}{saved}.")

    def _advance(self, progress: Progress, stop: Interrupt) -> None:
        """One step and what follows it: report, evaluation, checkpoint."""
        options = self.options
        start = time.perf_counter()
        self._train_step(self.step)
        self.step += 1
        first, last = self.step == self.first_step + 1, self.step == options.steps
        if not last:
            self.interrupted = self.ranks.largest(stop.requested)  # all ranks stop after the same step
        report = last or self.step % options.log_every == 0
        evaluate = last or (options.eval_every > 0 and self.step % options.eval_every == 0)
        save = last or self.step % options.save_every == 0
        if first or report or save or self.interrupted:
            # After the first step, which is not timed, so that none of its work is left for the second; before a save,
            # because a diverged state must not become the newest checkpoint.
            self.log.read()
        seconds, lengths, counted = (
            time.perf_counter() - start,
            self._step_lengths(self.step - 1),
            self.utilisation.flops,
        )
        self._speed.add(seconds, sum(lengths), 0 if counted is None else counted.of(lengths), first=first)
        if report:
            rate = self.schedule.at(self.step - 1)
            progress.step(self.step, self.log.losses[-1], rate, self.tokens_per_second, self.mfu)
        loss = self._evaluate() if evaluate and not self.interrupted else None
        if loss is not None:
            self.eval_losses.append({"step": self.step, "loss": loss})
            progress.say(f"step {self.step}: held-out loss {loss:.4f} nats per {self.unit}")
            save |= self._is_worth_saving()
        self._after_step(progress, report=report, loss=loss)
        if self.store is not None and (save or self.interrupted):
            self.log.read()
            self.store.save(self.step, self._state(), self.about)

    def _train_step(self, step: int) -> None:
        # Seeded per step: the random numbers of a step depend on nothing before it, so no state has to be saved.
        seed_all(self.options.seed, step + 1, self.ranks.data_rank, self.ranks.tp_group)
        for group in self.optimizer.param_groups:
            group["lr"] = self.schedule.at(step)
        loss = self._train(step)
        norm = self._clip(self.options.clip or math.inf)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.log.add(loss, norm)


def _check_ranks(options: RunOptions, ranks: Ranks) -> None:
    if options.strategy == "single" and ranks.world_size > 1:
        raise ValueError(
            f"--strategy is 'single', and {ranks.world_size} ranks were started, which would train a model each. "
            "Start one process, or use --strategy fsdp2 or ddp."
        )
    if options.batch_size % (options.grad_accum * ranks.data_ranks):
        raise ValueError(
            f"--batch-size is {options.batch_size}, samples per step over all ranks; it must be divisible by "
            f"--grad-accum times the ranks that read different data: {options.grad_accum} * {ranks.data_ranks}."
        )


def seed_all(seed: int, step: int = 0, data_rank: int = 0, tp_group: int = 0) -> None:
    """Seed every generator that a model may draw from.

    Args:
        data_rank: ranks of one number read the same samples, and draw alike from Python and NumPy, of which models make
            choices (what to mask, which layer to leave out).
        tp_group: ranks of one number compute the same, and draw alike from torch. Others have other tokens or layers.
    """
    start = (seed * 1_000_003 + step) * 1_000_003
    torch.manual_seed((start + tp_group) % 2**63)
    mixed = start + data_rank
    random.seed(mixed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(mixed % 2**32)


@contextlib.contextmanager
def synced_only_if(model: nn.Module, sync: bool) -> Iterator[None]:
    """Reduce gradients over ranks in this backward only where `sync`; else add them up locally, unsharded."""
    if isinstance(model, DistributedDataParallel) and not sync:
        with model.no_sync():
            yield
        return
    if isinstance(model, FSDPModule):
        set_gradient_sync(model, sync)
    yield


# Ctrl-C and a scheduler's SIGTERM: finish the step, save a checkpoint, exit.
#
# torchrun gives its ranks 30 s for this and then kills them; the last complete checkpoint is there in any case.

# A launcher passes one Ctrl-C on to ranks that got it from the terminal already, so a second signal within this many
# seconds is the same request; one after it comes from a person who does not want to wait for the step.
_SAME_WISH_SECONDS = 2.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """A context manager in which the first SIGINT or SIGTERM only sets `requested`; a later one acts as usual.

    Outside of the main thread, where Ray Train runs a job and Python handles no signal, none is caught.
    """

    def __init__(self) -> None:
        self.requested: int = 0
        """The signal's number, or 0."""
        self._since = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is not threading.main_thread():
            warn_once(
                "The training job runs outside of the main thread, where Python handles no signal: SIGTERM and Ctrl-C do "
                "as set by whoever started it, and save nothing. The last complete checkpoint stays."
            )
            return self
        for number in _SIGNALS:
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.requested:
            self.requested, self._since = number, now
        elif now - self._since > _SAME_WISH_SECONDS:
            signal.signal(number, self._before[number])
            signal.raise_signal(number)
