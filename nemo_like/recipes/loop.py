"""The training loop of pretraining: model setup, steps, reports, evaluations, checkpoints."""

import contextlib
import dataclasses
import math
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from nemo_like._util.interrupt import Interrupt
from nemo_like._util.live_bytes import memory_kind
from nemo_like._util.log import say_once
from nemo_like._util.rng import seed_all
from nemo_like.distributed import set_optimizer_state
from nemo_like.distributed.gradients import clip_grad_norm_, set_gradient_sync
from nemo_like.distributed.mesh import build_mesh
from nemo_like.distributed.pipeline import Pipeline
from nemo_like.distributed.ranks import Ranks
from nemo_like.distributed.tensor.apply import cuts_sequences
from nemo_like.distributed.weights.checkpoints import CheckpointStore
from nemo_like.distributed.weights.materialize import materialize
from nemo_like.models import ModelSource, check_positions
from nemo_like.parallelizer import parallelize
from nemo_like.planning.devices import device_at_hand
from nemo_like.planning.utilisation import Utilisation
from nemo_like.recipes.auto import AdvisedStep, advice_on_memory
from nemo_like.recipes.checkpoint import about_run, check_same_run, gather_state
from nemo_like.recipes.data import Batch, HeldOutText, TextData, TextRows
from nemo_like.recipes.log import DivergedError, LossLog, Progress, versions
from nemo_like.recipes.loss import MeanLoss, check_own_loss, evaluate
from nemo_like.recipes.options import PretrainOptions


class Pretraining:
    """One run: built on every rank from the same options, then `run`. Every method is a collective.

    Raises (every rank alike):
        ValueError: an option does not fit the text, the model or the number of ranks.
        CheckpointError: there are checkpoints to resume from, and none can be read.
    """

    def __init__(
        self,
        options: PretrainOptions,
        ranks: Ranks,
        text: TextData,
        source: ModelSource,
        model: nn.Module,
        tokenizer: str = "",
    ) -> None:
        """`model`: of `source`, with weights or on the meta device. `tokenizer`: its JSON; empty: bytes."""
        _check_ranks(options, ranks)
        self.options, self.ranks, self.text, self.source, self.tokenizer = options, ranks, text, source, tokenizer
        self.unit = "token" if tokenizer else "byte"  # which losses are per
        self.step = 0  # steps done, those of earlier runs included
        self.eval_losses: list[dict[str, float]] = []
        self.interrupted = 0  # or the signal that ended the run early
        self.store: CheckpointStore | None = None
        self._seconds: list[float] = []
        self._ahead: Future[Batch] | None = None
        self._asked: Callable[[], int] = lambda: 0  # The largest number of a signal that a rank had a step before.
        with ranks.together("cutting the text into samples"):
            self.rows = TextRows(text.train, options.seq_len, options.global_batch, options.seed)
            samples = options.eval_samples
            self.held_out = HeldOutText(text.held_out, options.seq_len, samples) if samples else None
        check_positions(getattr(model, "config", None), "--seq-len", options.seq_len)
        device = device_at_hand(ranks.device.type)
        self.utilisation = Utilisation.for_model(model, device, options.job().precision)
        self.limit = 0 if device.kind == "cpu" else device.memory_bytes  # a CPU's is shared with all other processes
        self.options = options = with_sync(options, model, device.memory_bytes)
        with self._advice():
            self._make_ready(model)
            self._resume()
        self.log = LossLog(ranks, self.step)

    # --- from options to the first step -------------------------------------------------------------------------------

    def _make_ready(self, model: nn.Module) -> None:
        """Cut, shard and checkpoint the model, and make its optimizer."""
        self.options = options = with_sequences(self.options, model)
        if options.pp > 1:
            check_own_loss(model, f"--pp is {options.pp}", "Train without --pp.")
        elif options.loss == "chunked":
            check_own_loss(model, "--loss is 'chunked'", "Use --loss model.")
        self.parameters = sum(p.numel() for p in model.parameters())
        # For a loss that cuts its targets: where sequences are cut, and no stage has the loss.
        mesh: DeviceMesh | None = None
        if options.cp > 1 and options.pp == 1:
            mesh = build_mesh(
                dp_replicate=options.dp_replicate,
                cp=options.cp,
                tp=options.tp,
                device_type=self.ranks.device.type,
            )
        rows = options.rows(self.ranks.data_ranks)
        if options.pp > 1:  # which cuts its batch by itself
            rows = -(-rows // (options.job().pp.microbatches or 1))
        job, sample = options.job(device=self.ranks.device), options.planned_input(rows)
        ready: Any = parallelize(model, job, sample_input=sample, mesh=mesh)
        if options.init == "sharded":
            materialize(ready, seed=options.seed)
        self.pipeline = ready if isinstance(ready, Pipeline) else None
        self.model: nn.Module = ready.module if isinstance(ready, Pipeline) else ready
        self.optimizer = make_optimizer(self.model, options)
        # Facts that a resumed run must share: of the whole model, not of one rank's stages.
        self.about = about_run(options, self.text.fingerprint, self.model if self.pipeline is None else model)
        self._loss = MeanLoss(options.loss == "chunked", mesh)

    def _advice(self) -> contextlib.AbstractContextManager[None]:
        return advice_on_memory(AdvisedStep(self.source, self.options, self.ranks))

    def _resume(self) -> None:
        """Open the folder of checkpoints, if any; with ``--resume`` fill weights and optimizer from the newest one.

        Raises:
            ValueError: a checkpoint of another run, or one where none was expected, or the other way round.
            CheckpointError: there are checkpoints to resume from, and none can be read.
        """
        options = self.options
        if options.checkpoint_dir is None:
            return
        self.store = store = CheckpointStore(
            options.checkpoint_dir, self.ranks, keep=options.keep, background=not options.sync_save
        )
        folder = str(store.folder)
        if options.resume == "no":
            newest = self.ranks.largest(max(store.steps(), default=-1))
            if newest >= 0:
                raise ValueError(
                    f"{folder!r} has checkpoints up to step {newest} already. Go on from them with --resume, or give "
                    "another --checkpoint-dir."
                )
            return
        state, moments = gather_state(self.model, self.optimizer)
        step = store.load(
            state,
            lambda about: check_same_run(
                about, self.about, "Give the same again, or start again with another --checkpoint-dir."
            ),
        )
        if step is None and options.resume == "must":
            raise ValueError(
                f"--resume finds no checkpoint in {folder!r}. Check --checkpoint-dir, or write --resume=auto to start again "
                "where there is none."
            )
        set_optimizer_state(self.model, self.optimizer, moments)
        self.step = step or 0

    # --- the loop -----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Train to the last step, or until a signal to stop; then the last checkpoint is complete on disk.

        Raises:
            DivergedError: the loss is not finite; on every rank, after the last sound checkpoint is complete.
            MemoryRanOutError: a step does not fit; the message has changes that help.
        """
        options = self.options
        progress = Progress(options.steps, self.ranks.device, self.limit)
        with self._advice(), Interrupt() as stop:
            self._introduce(progress)
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

    def _introduce(self, progress: Progress) -> None:
        options, text = self.options, self.text
        progress.say(
            f"{self.source.name}: {self.parameters:,} parameters, {self.strategy} on {self.ranks.world_size} rank(s), "
            f"ac={options.ac}, {options.precision}"
        )
        progress.say(
            f"text: {text.name}, {text.train.size:,} {self.unit}s to train on, {text.held_out.size:,} held out"
        )
        if self.held_out is not None:
            entropy = f"{self.held_out.entropy:.4f} nats per {self.unit}"
            progress.say(f"{self.unit}-unigram entropy of the held-out samples: {entropy}")
        progress.say(self.utilisation.words)
        if self.step:
            left = "" if self.step < options.steps else f"; --steps is {options.steps}, so nothing is left to train"
            progress.say(f"resumed after step {self.step}{left}")

    def _advance(self, progress: Progress, stop: Interrupt) -> None:
        """Run one step, then its report, evaluation and checkpoint, where due."""
        options = self.options
        start = time.perf_counter()
        self._train_step()
        self.step += 1
        first, last = self.step == self.log.first_step + 1, self.step == options.steps
        if not last:
            # All ranks stop after the same step. No rank waits: others' signals are known a step later.
            asked, self._asked = self._asked, self.ranks.largest_later(stop.requested)
            self.interrupted = (asked if self.ranks.world_size > 1 else self._asked)()
        report = last or self.step % options.log_every == 0
        evaluates = last or (options.eval_every > 0 and self.step % options.eval_every == 0)
        save = last or self.step % options.save_every == 0
        if first or report or save or self.interrupted:
            # After the first step, which is not timed, so that none of its work is left for the second; before a save,
            # because a diverged state must not become the newest checkpoint.
            self.log.read()
        self._seconds.append(time.perf_counter() - start)
        if report:
            rate = learning_rate(options, self.step - 1)
            speed, tokens = self.tokens_per_second, options.global_batch * options.seq_len
            progress.step(self.step, self.log.losses[-1], rate, speed, self.mfu, tokens / speed)
        if self.held_out is not None and evaluates and not self.interrupted:
            rows = options.rows(self.ranks.data_ranks)
            loss = evaluate(self.pipeline or self.model, self.held_out, self.ranks, rows, self._loss)
            self.eval_losses.append({"step": self.step, "loss": loss})
            progress.say(f"step {self.step}: held-out loss {loss:.4f} nats per {self.unit}")
        if self.store is not None and (save or self.interrupted):
            self.store.save(self.step, gather_state(self.model, self.optimizer)[0], self.about)

    def _train_step(self) -> None:
        # Seeded per step: the random numbers of a step depend on nothing before it, so no state has to be saved.
        seed_all(self.options.seed, self.step + 1, self.ranks.data_rank, self.ranks.tp_group)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.options, self.step)
        loss = self._forward_and_backward()
        most = self.options.clip or math.inf
        norm = clip_grad_norm_(self.model if self.pipeline is None else self.pipeline, most)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.log.add(loss, norm)

    def _forward_and_backward(self) -> torch.Tensor:
        """All micro-batches of this rank; their mean loss, 0-dim, whose mean over the ranks is the step's."""
        ranks, passes = self.ranks, self.options.passes
        total = torch.zeros((), device=ranks.device)
        for micro, batch in enumerate(self._batches()):
            if self.pipeline is not None:
                total = self.pipeline.step(**batch.with_labels())
                continue
            set_gradient_sync(self.model, self.options.sync == "every" or micro == passes - 1)
            loss = self._loss(self.model, batch) / passes  # DDP and FSDP2 take the mean over the ranks
            loss.backward()
            total += loss.detach()
        return total

    def _batches(self) -> Iterator[Batch]:
        """This rank's micro-batches of a step; each is made and sent while the device computes the one before it."""
        passes = self.options.passes
        for number in range(self.step * passes, (self.step + 1) * passes):
            yield (self._ahead or self._batch(number)).result()
            # The CPU is here once the kernels of the backward wait on the device, and does not wait for them.
            self._ahead = self._batch(number + 1) if number + 1 < self.options.steps * passes else None

    def _batch(self, number: int) -> Future[Batch]:
        """The micro-batch of that number in the run, on its way to the device, or the error of its step."""
        ranks, passes = self.ranks, self.options.passes
        step, micro = divmod(number, passes)
        batch: Future[Batch] = Future()
        try:
            part = micro * ranks.data_ranks + ranks.data_rank
            made = self.rows.batch(step, part, passes * ranks.data_ranks)
            # A pipeline counts labels on the host, and sends micro-batches itself.
            batch.set_result(made if self.options.pp > 1 else made.to(ranks.device))
        except Exception as error:  # noqa: BLE001  (the step that trains on the batch raises it)
            batch.set_exception(error)
        return batch

    # --- facts about a run --------------------------------------------------------------------------------------------

    @property
    def strategy(self) -> str:
        """The strategy that took effect: one rank is always ``single``."""
        return str(self.options.strategy) if self.ranks.world_size > 1 else "single"

    @property
    def tokens_per_second(self) -> float:
        """Over all ranks; without evaluations, checkpoints and the first step, which allocates and compiles."""
        timed = self._seconds[1:] or self._seconds
        return len(timed) * self.options.global_batch * self.options.seq_len / (sum(timed) or math.inf)

    @property
    def mfu(self) -> float | None:
        """Share of the devices' FLOP/s that the model needed; None where `utilisation` has a reason."""
        if self.utilisation.flops is None:
            return None
        per_token = self.utilisation.flops.of(self.options.seq_len) / self.options.seq_len
        return self.tokens_per_second * per_token / (self.utilisation.peak * self.ranks.world_size)

    def summary(self, peak_bytes: list[int]) -> dict[str, Any]:
        """The run as JSON values. Losses are nats per token (or byte); `peak_bytes` has one number per rank."""
        return {
            "losses": self.log.losses,
            "first_step": self.log.first_step,
            "eval_losses": self.eval_losses,
            "unigram_entropy": None if self.held_out is None else self.held_out.entropy,
            "peak_bytes": peak_bytes,
            "peak_bytes_are": memory_kind(self.ranks.device),
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.mfu,
            "mfu_is": self.utilisation.words,
            "ac": self.options.ac,
            "strategy": self.strategy,
            "world_size": self.ranks.world_size,
            "interrupted": bool(self.interrupted),
            "options": dataclasses.asdict(self.options),
            "versions": versions(),
        }


def _check_ranks(options: PretrainOptions, ranks: Ranks) -> None:
    if options.strategy == "single" and ranks.world_size > 1:
        raise ValueError(
            f"--strategy is 'single', and {ranks.world_size} ranks were started, which would train a model each. Start one "
            "process, or use --strategy fsdp2 or ddp."
        )
    if options.global_batch % (options.grad_accum * ranks.data_ranks):
        raise ValueError(
            f"--global-batch is {options.global_batch}, samples per step over all ranks; it must be divisible by "
            f"--grad-accum times the ranks that read different data: {options.grad_accum} * {ranks.data_ranks}."
        )


def with_sync(options: PretrainOptions, model: nn.Module, memory_bytes: int) -> PretrainOptions:
    """Return the options with the micro-batches that reduce gradients, on devices of so many bytes.

    Where only the last does, FSDP2 keeps each rank's whole gradients till then, of its own stage or columns.
    """
    if options.sync != "auto" or options.strategy != "fsdp2" or options.grad_accum == 1:
        return options
    counted = sum(p.numel() for p in model.parameters() if p.requires_grad) // (options.tp * options.pp)
    dtype = options.job().precision.reduce_dtype
    whole = counted * (dtype.itemsize if isinstance(dtype, torch.dtype) else 4)
    return dataclasses.replace(options, sync="last" if 4 * whole <= memory_bytes else "every")


def with_sequences(options: PretrainOptions, model: nn.Module) -> PretrainOptions:
    """Return the options with sequence parallelism, which is on where it can be: all batches have one length here."""
    if options.tp == 1 or options.sequence_parallel is not None:
        return options
    can = (options.seq_len // options.cp) % options.tp == 0 and cuts_sequences(model, options.tp)
    say_once(f"Sequence parallelism is {'on' if can else 'off: this model, or --seq-len, does not allow it'}.")
    return dataclasses.replace(options, sequence_parallel=can)


def make_optimizer(model: nn.Module, options: PretrainOptions) -> torch.optim.AdamW:
    """Return AdamW over the trained parameters; weight decay on matrices only, not on norms and biases."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise ValueError("The model has no parameter that trains: every requires_grad is False.")
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": options.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    forms = {"adamw-loop": {"foreach": False}, "adamw-foreach": {"foreach": True}, "adamw-fused": {"fused": True}}
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=options.lr,
        betas=(options.beta1, options.beta2),
        **forms.get(options.optimizer, {}),
    )


def learning_rate(options: PretrainOptions, step: int) -> float:
    """The learning rate of the step numbered `step`, from 0: linear warm-up, then down to ``lr_floor * lr`` by the last.

    A pure function of the step, so that no schedule state has to be saved.

    >>> options = PretrainOptions(schedule="linear", lr=1.0, warmup_steps=2, steps=4, lr_floor=0.5)
    >>> [learning_rate(options, step) for step in range(4)]
    [0.5, 1.0, 0.75, 0.5]
    """
    if step < options.warmup:
        return options.lr * (step + 1) / options.warmup
    if options.schedule == "constant":
        return options.lr
    done = min(1.0, (step - options.warmup + 1) / max(1, options.steps - options.warmup))
    shape = 0.5 * (1 + math.cos(math.pi * done)) if options.schedule == "cosine" else 1 - done
    return options.lr * (options.lr_floor + (1 - options.lr_floor) * shape)
