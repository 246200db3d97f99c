"""The training loop: what happens in a step, in which order, and what every rank agrees on."""

from __future__ import annotations

import contextlib
import inspect
import math
import random
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from nemo_like.distributed.accumulate import set_gradient_sync
from nemo_like.distributed.clip import clip_grad_norm_
from nemo_like.distributed.materialize import materialize
from nemo_like.distributed.mesh import build_mesh
from nemo_like.distributed.pipeline import Pipeline
from nemo_like.models import ModelSource, resolve_model
from nemo_like.options import FSDP2, Precision, StepSpec, parse_dtype
from nemo_like.parallelizer import parallelize
from nemo_like.recipes.agree import Ranks
from nemo_like.recipes.data import VOCABULARY, Sampler, TextData, load_text
from nemo_like.recipes.interrupt import Interrupt
from nemo_like.recipes.job_checkpoint import CheckpointStore
from nemo_like.recipes.job_options import Options
from nemo_like.recipes.loss import (
    DivergedError,
    HeldOut,
    LossLog,
    NextByte,
    check_own_loss,
    check_piped,
    count_targets,
    piped_batch,
    planned_loss,
)
from nemo_like.recipes.progress import Progress
from nemo_like.recipes.run_state import about_run, check_same_run, gather_state, make_optimizer
from nemo_like.recipes.schedule import Schedule


class Trainer:
    """One run: built on every rank from the same options, then `run`.

    Raises (every rank alike):
        ValueError: an option does not fit the data, the model or the number of ranks.
        CheckpointError: there are checkpoints to resume from, and none can be read.
    """

    def __init__(self, options: Options, ranks: Ranks):
        _check_ranks(options, ranks)
        self.options = options
        self.ranks = ranks
        with ranks.together("reading the training text"):
            self.text = load_text(options.data)
            self.sampler = Sampler(self.text.train, options.seq_len, options.batch_size, options.seed)
            samples = options.eval_samples
            held_out = self.text.held_out
            self.held_out = HeldOut(held_out, options.seq_len, samples, options.pack) if samples else None
        _check_same_text(self.text, ranks)
        self.schedule = Schedule(options.schedule, options.lr, options.warmup_steps, options.steps, options.lr_floor)
        with ranks.together("building the model"):
            self.source = resolve_model(options.model)
            self.model = _build(self.source, options)
        if options.pack and "position_ids" not in inspect.signature(self.model.forward).parameters:
            raise ValueError(
                f"--pack tells documents apart by position_ids, which {type(self.model).__name__} does not take."
            )
        mesh = _mesh(options, ranks)
        self._loss = NextByte(options.loss == "chunked", mesh)
        if options.pp > 1:  # each rank then has a part of the model
            self.about = about_run(options, self.text.fingerprint, self.model)
        self.trained = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        made = _parallelize(self.model, options, ranks, mesh)
        self.pipeline = made if isinstance(made, Pipeline) else None
        self.model = made.module if isinstance(made, Pipeline) else made
        self.optimizer = make_optimizer(self.model, options)
        if options.pp == 1:
            self.about = about_run(options, self.text.fingerprint, self.model)
        self.step = 0
        """Steps done since step 0 of the first run."""
        self.store: CheckpointStore | None = None
        if options.checkpoint_dir is not None:
            background = not options.sync_save
            self.store = CheckpointStore(options.checkpoint_dir, ranks, keep=options.keep, background=background)
            self._resume(self.store)
        self.first_step = self.step
        self.log = LossLog(ranks, self.first_step)
        self.eval_losses: list[dict[str, float]] = []
        self.unigram_entropy = None if self.held_out is None else self.held_out.entropy()
        self.interrupted = 0
        """The signal that ended the run early, or 0."""
        self._clock = _Clock(options.batch_size * options.seq_len)

    @property
    def strategy(self) -> str:
        """The strategy that took effect: one rank is always ``single``."""
        return self.options.strategy if self.ranks.world_size > 1 else "single"

    @property
    def tokens_per_second(self) -> float:
        """Trained tokens per second over all ranks, without the first step, evaluations and checkpoints."""
        return self._clock.tokens_per_second

    def _resume(self, store: CheckpointStore) -> None:
        options = self.options
        if options.resume == "no":
            newest = self.ranks.largest(max(store.steps(), default=-1))
            if newest >= 0:
                raise ValueError(
                    f"--checkpoint-dir {str(store.folder)!r} has checkpoints up to step {newest} already. Go on from "
                    "them with --resume, or give another folder."
                )
            return
        state = gather_state(self.model, self.optimizer)
        step = store.load(state, lambda about: check_same_run(about, self.about))
        if step is None:
            if options.resume == "must":
                raise ValueError(
                    f"--resume finds no checkpoint in {str(store.folder)!r}. Check --checkpoint-dir, or write "
                    "--resume=auto to start anew where there is none."
                )
            return
        self.step = step

    # ------------------------------------------------------------------------------------------------------ the loop

    def run(self) -> None:
        """Train to the last step, or until a signal asks to stop; then the last checkpoint is complete on disk.

        Raises:
            DivergedError: the loss is not finite; on every rank, after the last sound checkpoint is complete.
        """
        options = self.options
        progress = Progress(self.step, options.steps, self.ranks.device, plain=options.plain)
        with progress, Interrupt() as stop:
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
        self._clock.add(time.perf_counter() - start, first=first)
        if report:
            rate = self.schedule.at(self.step - 1)
            progress.step(self.step, self.log.losses[-1], rate, self.tokens_per_second)
        if self.held_out is not None and evaluate and not self.interrupted:
            size = options.batch_size // (options.passes * self.ranks.data_ranks)
            loss = self.held_out.loss(self.pipeline or self.model, self.ranks, size, self._loss)
            self.eval_losses.append({"step": self.step, "loss": loss})
            progress.say(f"step {self.step}: held-out loss {loss:.4f} nats per byte")
        if self.store is not None and (save or self.interrupted):
            self.store.save(self.step, gather_state(self.model, self.optimizer), self.about)

    def _introduce(self, progress: Progress) -> None:
        options, text = self.options, self.text
        progress.say(
            f"{self.source.name}: {self.trained:,} parameters, {self.strategy} on {self.ranks.world_size} rank(s), "
            f"ac={options.ac}, {options.dtype}"
        )
        progress.say(f"text: {text.name}, {text.train.size:,} bytes to train on, {text.held_out.size:,} held out")
        if self.unigram_entropy is not None:
            progress.say(f"byte-unigram entropy of the held-out samples: {self.unigram_entropy:.4f} nats per byte")
        if self.step:
            left = "" if self.step < options.steps else f"; --steps is {options.steps}, so nothing is left to train"
            progress.say(f"resumed after step {self.step}{left}")

    def _train_step(self, step: int) -> None:
        options, ranks = self.options, self.ranks
        # Seeded per step: the random numbers of a step depend on nothing before it, so no state has to be saved.
        seed_all(options.seed, step + 1, ranks.data_rank)
        for group in self.optimizer.param_groups:
            group["lr"] = self.schedule.at(step)
        total = torch.zeros((), device=ranks.device)
        parts = options.passes * ranks.data_ranks
        documents, counted = None, None
        if options.pack:
            counted = count_targets(self.sampler.documents(step)) / parts
        for micro in range(options.passes):
            part = micro * ranks.data_ranks + ranks.data_rank
            tokens = self.sampler.batch(step, part, parts).to(ranks.device)
            if self.pipeline is not None:
                total = self.pipeline.step(**piped_batch(tokens))
                continue
            if options.pack:
                documents = self.sampler.documents(step, part, parts).to(ranks.device)
            with synced_only_if(self.model, micro == options.grad_accum - 1):
                # Every part has equally many tokens, so the mean of the parts' means is the mean over all tokens;
                # DDP and FSDP2 take the mean over the ranks.
                loss = self._loss(self.model, tokens, documents, counted) / options.grad_accum
                loss.backward()
            total += loss.detach()
        most = options.clip or math.inf
        norm = clip_grad_norm_(self.model, most) if self.pipeline is None else self.pipeline.clip_grad_norm_(most)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.log.add(total, norm)


class _Clock:
    """Tokens per second. The first step allocates and compiles; it is left out unless it is the only one."""

    def __init__(self, tokens_per_step: int):
        self._tokens_per_step = tokens_per_step
        self._steps = 0
        self._seconds = 0.0
        self._only_first = False

    def add(self, seconds: float, *, first: bool) -> None:
        if self._only_first:
            self._steps, self._seconds = 0, 0.0
        self._only_first = first
        self._steps += 1
        self._seconds += seconds

    @property
    def tokens_per_second(self) -> float:
        return self._steps * self._tokens_per_step / self._seconds if self._seconds else 0.0


def _check_ranks(options: Options, ranks: Ranks) -> None:
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


def _check_same_text(text: TextData, ranks: Ranks) -> None:
    if not ranks.same(int(text.fingerprint[:15], 16)):
        raise ValueError(
            f"The ranks see different training texts: {text.name} differs between hosts. Give all of them the same "
            "files with --data."
        )


def _build(source: ModelSource, options: Options) -> nn.Module:
    if source.vocab_size is not None and source.vocab_size < VOCABULARY:
        raise ValueError(
            f"Model {source.name!r} has {source.vocab_size} tokens; bytes need a vocab_size >= {VOCABULARY}."
        )
    # On the CPU, whatever the device: the same seed gives the same weights on each strategy and number of ranks.
    seed_all(options.seed)
    model = source.build("meta" if options.init == "sharded" else "cpu", torch.float32)
    config: Any = getattr(model, "config", None)
    if hasattr(config, "use_cache"):
        config.use_cache = False  # a cache of keys and values is of no use in training
    return model


def _mesh(options: Options, ranks: Ranks) -> DeviceMesh | None:
    """The mesh that the loss cuts its targets over; None where sequences are whole."""
    if options.cp == 1:
        return None
    return build_mesh(dp_replicate=options.dp_replicate, cp=options.cp, tp=options.tp, device_type=ranks.device.type)


def _parallelize(model: nn.Module, options: Options, ranks: Ranks, mesh: DeviceMesh | None) -> nn.Module | Pipeline:
    samples = options.batch_size // (options.grad_accum * ranks.data_ranks)
    if options.loss == "chunked":
        check_own_loss(model)
    if options.pp > 1:
        check_piped(model)
    made: Any = parallelize(
        model,
        FSDP2(cpu_offload=options.cpu_offload) if options.strategy == "fsdp2" else options.strategy,
        options.ac,
        ac_scope=options.scopes,
        loss=options.loss,
        compile=False if options.compile == "none" else options.compile,
        precision=Precision(parse_dtype("--dtype", options.dtype)),
        dp_replicate=options.dp_replicate,
        offload=None if options.offload == "none" else options.offload,
        tp=options.tp,
        cp=options.cp,
        mesh=mesh,
        ep=options.ep,
        pp=options.pipeline if options.pp > 1 else 1,
        sample_input=torch.zeros(samples, options.seq_len, dtype=torch.int64),  # the shapes of a microbatch
        step=StepSpec(
            microbatches=options.grad_accum,
            sync="last",
            keeps_output=False,
            loss_fn=planned_loss if options.loss == "model" else None,
        ),
        device=ranks.device,
    )
    if options.init == "sharded":
        materialize(made, seed=options.seed)
    return made


def seed_all(seed: int, step: int = 0, data_rank: int = 0) -> None:
    """Seed every generator that a model may draw from. Ranks that share a sample (tensor parallel) draw alike."""
    mixed = (seed * 1_000_003 + step) * 1_000_003 + data_rank
    torch.manual_seed(mixed % 2**63)
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
