"""The training loop of both jobs, from options to an exit code: steps, reports, evaluations, checkpoints, and how runs end.

`run_on_ranks` is where a process begins. A job gives data, a model and its weights, and what is left at the end:
`nemo_like.recipes.pretrain` and `nemo_like.recipes.finetune`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import platform
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from nemo_like import __version__
from nemo_like._util.console import start_logging
from nemo_like._util.extras import MissingExtraError
from nemo_like._util.json_file import write_json
from nemo_like._util.log import say_once
from nemo_like._util.tensors import tensors_in
from nemo_like.distributed import launch
from nemo_like.distributed.gradients import clip_grad_norm_, set_gradient_sync
from nemo_like.distributed.mesh import build_mesh
from nemo_like.distributed.pipeline import Pipeline
from nemo_like.distributed.tensor.apply import cuts_sequences
from nemo_like.distributed.weights.sources import CheckpointUnreadableError
from nemo_like.flags import ALLOCATOR_VARIABLES
from nemo_like.models import check_positions
from nemo_like.parallelizer import parallelize
from nemo_like.planning.devices import device_at_hand
from nemo_like.profiling.larger_batch import most_elements
from nemo_like.recipes.agree import OtherRankError, Ranks
from nemo_like.recipes.auto import Fitted, MemoryRanOutError, PlannedStep, advice_on_memory, choose
from nemo_like.recipes.interrupt import Interrupt
from nemo_like.recipes.job_checkpoint import CheckpointError, CheckpointStore, writing
from nemo_like.recipes.loss import DivergedError, LossLog, MeanLoss, evaluate
from nemo_like.recipes.options import RunOptions
from nemo_like.recipes.progress import Progress, memory_kind, memory_peak
from nemo_like.recipes.rows import Batch, HeldOut, Rows
from nemo_like.recipes.run_state import about_run, check_same_run, gather_state, make_optimizer
from nemo_like.recipes.step_flops import Speed, Utilisation

BAD_INPUT = 2
"""Exit code for options, data or checkpoints that cannot be used, for a loss that is no longer finite, and where
memory runs out."""

_REPORTED = (
    ValueError,
    MissingExtraError,
    CheckpointError,
    CheckpointUnreadableError,
    DivergedError,
    OtherRankError,
    MemoryRanOutError,
)


def run_on_ranks(options: RunOptions, make: Callable[[Any, Ranks], TrainingJob]) -> int:
    """Run the job that `make` builds on every rank; the process's exit code: 0, `BAD_INPUT`, or 128 + the signal that
    stopped it."""
    start_logging()
    try:
        # An error leaves through `joined`, which then waits for no other rank, and is reported outside of it.
        with joined(options) as ranks:
            return run_job(make(options.on(ranks.device.type), ranks))
    except _REPORTED as error:
        print(f"[rank {launch.rank()}] error: {error}", file=sys.stderr, flush=True)
        return BAD_INPUT
    except KeyboardInterrupt:
        print(f"[rank {launch.rank()}] interrupted outside of training", file=sys.stderr, flush=True)
        return 128 + signal.SIGINT


@contextlib.contextmanager
def joined(options: RunOptions) -> Iterator[Ranks]:
    """This process's `Ranks`, with the process group where a launcher started more than one rank."""
    let_segments_grow(launch.pick_device_type() if options.device == "auto" else options.device)
    device = launch.init_distributed(None if options.device == "auto" else options.device)
    world_size, rank = launch.world_size(), launch.rank()
    axes = options.axes
    try:
        sizes = {f"--{axis}": size for axis, size in axes.items()}
        sizes["--pp times --cp times --tp"] = math.prod(axes.values())
        for name, size in sizes.items():
            if world_size % size:
                raise ValueError(f"{name} is {size}, which does not divide the {world_size} rank(s).")
        control = dist.new_group(backend="gloo") if world_size > 1 else None
        yield Ranks(rank, world_size, device, axes["tp"], axes["cp"], axes["pp"], control)
    finally:
        launch.shutdown()


def let_segments_grow(device_type: str) -> None:
    """Set ``PYTORCH_ALLOC_CONF`` for a CUDA device where it is unset, before the first allocation reads it.

    No plan is made yet, so this does not depend on one. Later plans read the variable: they predict growing segments, and
    advise them no more.
    """
    if device_type == "cuda" and not os.environ.keys() & {*ALLOCATOR_VARIABLES}:
        os.environ[ALLOCATOR_VARIABLES[0]] = "expandable_segments:True"
        say_once(
            "PYTORCH_ALLOC_CONF is unset, so this job sets expandable_segments:True, with which less memory is lost between "
            "blocks. To keep PyTorch's default, set PYTORCH_ALLOC_CONF=expandable_segments:False."
        )


def run_job(job: TrainingJob) -> int:
    """Train, and write the result, unless a signal stopped the run, and the summary; the exit code. A collective."""
    options, ranks = job.options, job.ranks
    job.run()
    peaks = ranks.gather(memory_peak(ranks.device))
    if not job.interrupted:
        job.save_result()
    if options.json is not None:
        with ranks.together("writing the summary"), writing(options.json):
            if ranks.rank == 0:
                write_json(options.json, job.summary(peaks))
    return 128 + job.interrupted if job.interrupted else 0


class TrainingJob:
    """One run: built on every rank from the same options, then `run`. Every method is a collective.

    Raises (every rank alike):
        ValueError: an option does not fit the data, the model or the number of ranks.
        CheckpointError: there are checkpoints to resume from, and none can be read.
    """

    options: Any
    """A `RunOptions`; with what ``--fit`` chose, once the model is known."""

    # --- what a job gives ---------------------------------------------------------------------------------------------

    rows: Rows
    held_out: HeldOut | None

    def read(self) -> int:
        """Read the data into `rows` and `held_out`; the tokens of the longest row."""
        raise NotImplementedError

    def bare(self, options: Any) -> nn.Module:
        """The model that `options` make, on the meta device, not sharded."""
        raise NotImplementedError

    def build(self) -> nn.Module:
        """The model to train, before it is made ready: with weights, or on the meta device."""
        return self.bare(self.options)

    def made_ready(self, model: nn.Module, make_ready: Callable[[nn.Module], Any]) -> Any:
        """Return what `make_ready` makes of `model`, with its weights."""
        return make_ready(model)

    def identity(self, model: nn.Module) -> dict[str, Any]:
        """Return the facts that a resumed run must share; JSON values."""
        return about_run(self.options, self.rows.fingerprint, model)

    def ready(self) -> None:
        """Act before the first step, with weights and optimizer of the step to go on from."""

    def introduce(self, progress: Progress) -> None:
        """Print what is about to run."""
        raise NotImplementedError

    def after_step(self, progress: Progress, *, report: bool, loss: float | None) -> bool:
        """Act after the step numbered ``self.step - 1``, its report and its evaluation; whether it needs a checkpoint."""
        return False

    def save_result(self) -> None:
        """Write what the job is for, after the last step."""

    def facts(self) -> dict[str, Any]:
        """Return what the summary has of this kind of job in addition to what it has of every one; JSON values."""
        return {}

    saves_frozen = True
    """Checkpoints have the weights that do not train, too."""
    unit = "token"
    """Unit that losses are per."""

    # --- from options to the first step -------------------------------------------------------------------------------

    def __init__(self, options: RunOptions, ranks: Ranks):
        if not options.free:
            _check_ranks(options, ranks)
        self.options, self.ranks = options, ranks
        self.step = 0
        """Steps done since step 0 of the first run."""
        self.eval_losses: list[dict[str, float]] = []
        self.interrupted = 0
        """The signal that ended the run early, or 0."""
        self.store: CheckpointStore | None = None
        self.fitted: Fitted | None = None
        """Choice of ``--fit``, which `options` has, too."""
        self._speed = Speed()
        self._ahead: Future[Batch] | None = None
        self._width = self.read()
        with ranks.together("building the model"):
            model = self.build()
        check_positions(getattr(model, "config", None), "--seq-len", self._width)
        self.options = self._with_sync(model)
        self.utilisation = Utilisation.of(model, device_at_hand(ranks.device.type), self.options.job().precision)
        if self.options.free:
            self.options, self.ranks, self.fitted = choose(self.options, ranks, model, self._width)
            _check_ranks(self.options, self.ranks)
        options = self.options
        self.schedule = LearningRate(options.schedule, options.lr, options.warmup, options.steps, options.lr_floor)
        with self._advice():
            self._make_ready(model)
            self._begin()
            self.ready()

    def _with_sync(self, model: nn.Module) -> RunOptions:
        """The options with the micro-batches that reduce gradients.

        Where only the last does, FSDP2 keeps each rank's whole gradients till then, of its own stage or columns.
        """
        options = self.options
        if options.sync != "auto" or options.strategy != "fsdp2" or not options.accumulates:
            return options
        counted = sum(p.numel() for p in model.parameters() if p.requires_grad) // (
            options.axes["tp"] * options.axes["pp"]
        )
        whole = counted * (options.job().precision.reduce_dtype or torch.float32).itemsize
        fits = 4 * whole <= device_at_hand(self.ranks.device.type).memory_bytes
        return dataclasses.replace(options, sync="last" if fits else "every")

    def _with_sequences(self, model: nn.Module) -> RunOptions:
        """The options with sequence parallelism, which is on where it can be: all batches have one length here."""
        options, (tp, cp) = self.options, (self.options.axes["tp"], self.options.axes["cp"])
        if tp == 1 or getattr(options, "sequence_parallel") is not None:  # noqa: B009 - jobs with tp have it
            return options
        can = (self._width // cp) % tp == 0 and cuts_sequences(model, tp)
        say_once(f"Sequence parallelism is {'on' if can else 'off: this model, or --seq-len, does not allow it'}.")
        return dataclasses.replace(options, **{"sequence_parallel": can})

    def _make_ready(self, model: nn.Module) -> None:
        """Cut, shard and checkpoint the model, and make its optimizer."""
        self.options = options = self._with_sequences(model)
        options.check_model_loss(model, options.loss)
        counts = [(p.numel(), p.requires_grad) for p in model.parameters()]
        self.parameters, self.trained = sum(n for n, _ in counts), sum(n for n, trains in counts if trains)
        mesh = self._sequence_mesh()
        ready = self.made_ready(model, lambda model: self._parallelized(model, mesh))
        self.pipeline = ready if isinstance(ready, Pipeline) else None
        self.model: nn.Module = ready.module if isinstance(ready, Pipeline) else ready
        self.optimizer = make_optimizer(self.model, options)
        self.about = self.identity(self.model if self.pipeline is None else model)  # not of one rank's stages
        """Facts that a resumed run must share."""
        self._loss = MeanLoss(options.loss == "chunked", mesh)

    def _sequence_mesh(self) -> DeviceMesh | None:
        """The mesh that the loss cuts its targets over; None where sequences are whole, or the last stage has the loss."""
        options, axes = self.options, self.options.axes
        if axes["cp"] == 1 or axes["pp"] > 1:
            return None
        sizes = {"dp_replicate": options.dp_replicate, "cp": axes["cp"], "tp": axes["tp"]}
        return build_mesh(**sizes, device_type=self.ranks.device.type)

    def _parallelized(self, model: nn.Module, mesh: DeviceMesh | None) -> Any:
        options = self.options
        rows = options.rows(self.ranks.data_ranks)
        if options.axes["pp"] > 1:  # which cuts its batch by itself
            rows = -(-rows // (options.job().pp.microbatches or 1))
        sample = options.planned_input(rows, self._width)
        fields: dict[str, Any] = {"device": self.ranks.device}
        if self.fitted is not None:
            fields["planned_tokens"] = most_elements(tensors_in(sample))
            if (plan := self.fitted.planned) is not None:
                fields["ac"] = plan
        return parallelize(model, options.job(**fields), sample_input=sample, mesh=mesh)

    def _advice(self) -> contextlib.AbstractContextManager[None]:
        """Raise `MemoryRanOutError` with what would lower the peak, where memory runs out inside."""
        return advice_on_memory(PlannedStep(self.bare, self.options, self.ranks, self._width))

    def _begin(self) -> None:
        """Go on from a checkpoint, where ``--resume`` is given.

        Raises:
            ValueError: a checkpoint of another run, or one where none was expected, or the other way round.
            CheckpointError: there are checkpoints to resume from, and none can be read.
        """
        options = self.options
        if options.checkpoint_dir is not None:
            background = not options.sync_save
            self.store = CheckpointStore(options.checkpoint_dir, self.ranks, keep=options.keep, background=background)
            self.resume(self.store)
            if self.fitted is not None and self.ranks.rank == 0:
                self.fitted.save(self.store.folder)
        self.first_step = self.step
        self.log = LossLog(self.ranks, self.first_step)

    def resume(self, store: CheckpointStore) -> None:
        """Fill weights and optimizer from the newest checkpoint in `store`, as far as ``--resume`` has it."""
        options = self.options
        if options.resume == "no":
            newest = self.ranks.largest(max(store.steps(), default=-1))
            if newest >= 0:
                raise ValueError(
                    f"{str(store.folder)!r} has checkpoints up to step {newest} already. Go on from them with --resume, or "
                    f"give another {options.elsewhere}."
                )
            return
        step = store.load(self.state(), self.check_checkpoint)
        if step is None and options.resume == "must":
            raise ValueError(
                f"--resume finds no checkpoint in {str(store.folder)!r}. Check {options.elsewhere}, or write "
                "--resume=auto to start anew where there is none."
            )
        self.step = step or 0

    def check_checkpoint(self, about: Any) -> None:
        """Raise ValueError where a checkpoint with these facts belongs to another run."""
        way_out = f"Give the same again, or start anew with another {self.options.elsewhere}."
        check_same_run(about, self.about, way_out)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds, the tensors themselves."""
        return gather_state(self.model, self.optimizer, frozen=self.saves_frozen)

    # --- the loop -----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Train to the last step, or until a signal to stop; then the last checkpoint is complete on disk.

        Raises:
            DivergedError: the loss is not finite; on every rank, after the last sound checkpoint is complete.
            MemoryRanOutError: a step does not fit; the message has what to change.
        """
        options = self.options
        progress = Progress(options.steps, self.ranks.device)
        with self._advice(), Interrupt() as stop:
            self.introduce(progress)
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
        self._train_step()
        self.step += 1
        first, last = self.step == self.first_step + 1, self.step == options.steps
        if not last:
            self.interrupted = self.ranks.largest(stop.requested)  # all ranks stop after the same step
        report = last or self.step % options.log_every == 0
        evaluates = last or (options.eval_every > 0 and self.step % options.eval_every == 0)
        save = last or self.step % options.save_every == 0
        if first or report or save or self.interrupted:
            # After the first step, which is not timed, so that none of its work is left for the second; before a save,
            # because a diverged state must not become the newest checkpoint.
            self.log.read()
        self._speed.add(
            time.perf_counter() - start, self.rows.lengths(self.step - 1), self.utilisation.flops, first=first
        )
        if report:
            rate = self.schedule.at(self.step - 1)
            progress.step(self.step, self.log.losses[-1], rate, self.tokens_per_second, self.mfu)
        loss = self.evaluate() if evaluates and not self.interrupted else None
        if loss is not None:
            self.eval_losses.append({"step": self.step, "loss": loss})
            progress.say(f"step {self.step}: held-out loss {loss:.4f} nats per {self.unit}")
        save |= self.after_step(progress, report=report, loss=loss)
        if self.store is not None and (save or self.interrupted):
            self.log.read()
            self.store.save(self.step, self.state(), self.about)

    def _train_step(self) -> None:
        # Seeded per step: the random numbers of a step depend on nothing before it, so no state has to be saved.
        seed_all(self.options.seed, self.step + 1, self.ranks.data_rank, self.ranks.tp_group)
        for group in self.optimizer.param_groups:
            group["lr"] = self.schedule.at(self.step)
        loss = self._forward_and_backward()
        most = self.options.clip or math.inf
        norm = clip_grad_norm_(self.model, most) if self.pipeline is None else self.pipeline.clip_grad_norm_(most)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.log.add(loss, norm)

    def _forward_and_backward(self) -> torch.Tensor:
        """All micro-batches of this rank; their mean loss, 0-dim, whose mean over the ranks is the step's."""
        ranks, passes = self.ranks, self.options.passes
        total = torch.zeros((), device=ranks.device)
        parts = passes * ranks.data_ranks
        targets = self.rows.targets(self.step)
        for micro, batch in enumerate(self._batches()):
            if self.pipeline is not None:
                total = self.pipeline.step(**batch.with_labels())
                continue
            with synced_only_if(self.model, self.options.sync == "every" or micro == passes - 1):
                # Divided by the average count of a part, so that every target of the step weighs the same; DDP and FSDP2
                # take the mean over the ranks.
                loss = self._loss(self.model, batch, None if targets is None else targets / parts) / passes
                loss.backward()
            total += loss.detach()
        return total

    def _batches(self) -> Iterator[Batch]:
        """This rank's micro-batches of a step; each is made and sent while the device computes the one before it."""
        passes = self.options.passes
        for number in range(self.step * passes, (self.step + 1) * passes):
            yield (self._ahead or self._batch(number)).result()
            # The host is here once the kernels of the backward wait on the device, and does not wait for them.
            self._ahead = self._batch(number + 1) if number + 1 < self.options.steps * passes else None

    def _batch(self, number: int) -> Future[Batch]:
        """The micro-batch of that number in the run, on its way to the device; or the error that the step raises which
        trains on it."""
        ranks, passes = self.ranks, self.options.passes
        step, micro = divmod(number, passes)
        batch: Future[Batch] = Future()
        try:
            part = micro * ranks.data_ranks + ranks.data_rank
            batch.set_result(self.rows.batch(step, part, passes * ranks.data_ranks).to(ranks.device))
        except Exception as error:  # noqa: BLE001  (the step that trains on the batch raises it)
            batch.set_exception(error)
        return batch

    def evaluate(self) -> float | None:
        """The loss on held-out samples, the same on every rank; None where there are no held-out samples."""
        if self.held_out is None:
            return None
        size = self.options.rows(self.ranks.data_ranks)
        return evaluate(self.pipeline or self.model, self.held_out, self.ranks, size, self._loss)

    # --- what is told of a run ----------------------------------------------------------------------------------------

    @property
    def strategy(self) -> str:
        """The strategy that took effect: one rank is always ``single``."""
        return str(self.options.strategy) if self.ranks.world_size > 1 else "single"

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

    def summary(self, peak_bytes: list[int]) -> dict[str, Any]:
        """The run as JSON values. Losses are nats per token (or byte); `peak_bytes` has one number per rank."""
        return {
            "losses": self.log.losses,
            "first_step": self.first_step,
            "eval_losses": self.eval_losses,
            **self.facts(),
            "peak_bytes": peak_bytes,
            "peak_bytes_are": memory_kind(self.ranks.device),
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.mfu,
            "mfu_is": self.utilisation.words,
            "ac": self.options.ac,
            "fit": None if self.fitted is None else {"options": self.fitted.options, **self.fitted.predicted},
            "strategy": self.strategy,
            "world_size": self.ranks.world_size,
            "interrupted": bool(self.interrupted),
            "options": dataclasses.asdict(self.options),
            "versions": versions(),
        }


def versions() -> dict[str, str]:
    """Return the versions of what the run ran on."""
    installed = {"nemo_like": __version__, "python": platform.python_version()}
    installed |= {"torch": torch.__version__, "cuda": str(torch.version.cuda)}
    for name in ("transformers", "tokenizers", "peft", "numpy"):
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            installed[name] = "not installed"
    return installed


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
        seed, step: of the run, and the number of the step plus one; 0: before training.
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


# The learning rate is a pure function of the step, so that no schedule state has to be saved.


@dataclass(frozen=True)
class LearningRate:
    """Linear warm-up from 0 to `peak`, then down to ``floor * peak`` by the last step.

    >>> schedule = LearningRate("linear", peak=1.0, warmup=2, steps=4, floor=0.5)
    >>> [schedule.at(step) for step in range(4)]
    [0.5, 1.0, 0.75, 0.5]
    """

    kind: str
    """``cosine`` (half a period) | ``linear`` | ``constant`` (stays at `peak`)."""
    peak: float
    """Learning rate at the end of the warm-up."""
    warmup: int
    """Steps of warm-up; the first of them already moves the weights."""
    steps: int
    """Steps of the whole run."""
    floor: float = 0.1
    """Rate at the last step, as a share of `peak`."""

    def at(self, step: int) -> float:
        """The learning rate of the step numbered `step`, from 0; steps past the last one stay at the floor."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        if self.kind == "constant":
            return self.peak
        done = min(1.0, (step - self.warmup + 1) / max(1, self.steps - self.warmup))
        shape = 0.5 * (1 + math.cos(math.pi * done)) if self.kind == "cosine" else 1 - done
        return self.peak * (self.floor + (1 - self.floor) * shape)
