"""The training loop: what happens in a step, in which order, and what every rank agrees on."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import random
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from nemo_like.config import parse_dtype
from nemo_like.distributed.clip import clip_grad_norm_
from nemo_like.distributed.materialize import materialize
from nemo_like.models import ModelSource, resolve_model
from nemo_like.parallelizer import parallelize
from nemo_like.recipes.checkpoint import CheckpointStore
from nemo_like.recipes.data import VOCABULARY, Sampler, held_out_windows, load_text, unigram_entropy
from nemo_like.recipes.interrupt import Interrupt
from nemo_like.recipes.options import Options
from nemo_like.recipes.progress import Progress
from nemo_like.recipes.ranks import Ranks
from nemo_like.recipes.schedule import Schedule
from nemo_like.recipes.state import about_run, check_same_run, gather_state, make_optimizer, put_state


class DivergedError(RuntimeError):
    """The loss or the gradient is no finite number any more."""


class Trainer:
    """One run: built on every rank from the same options, then `run`.

    Raises (every rank alike):
        ValueError: an option does not fit the data, the model or the number of ranks.
        CheckpointError: a checkpoint to resume from is damaged, and no earlier one is left.
    """

    def __init__(self, options: Options, ranks: Ranks):
        self.options = options
        self.ranks = ranks
        if options.strategy == "single" and ranks.world_size > 1:
            raise ValueError(
                f"--strategy is 'single', and {ranks.world_size} ranks were started, which would train a model each. "
                "Start one process, or use --strategy fsdp2 or ddp."
            )
        per_part = options.grad_accum * ranks.data_ranks
        if options.batch_size % per_part:
            raise ValueError(
                f"--batch-size is {options.batch_size}, samples per step over all ranks; it must be divisible by "
                f"--grad-accum times the ranks that read different data: {options.grad_accum} * {ranks.data_ranks}."
            )
        with ranks.together("reading the training text"):
            self.text = load_text(options.data)
            self.sampler = Sampler(self.text.train, options.seq_len, options.batch_size, options.seed)
            self.eval_starts: list[int] = []
            if options.eval_samples:
                self.eval_starts = held_out_windows(self.text.held_out, options.seq_len, options.eval_samples)
        if not ranks.same(int(self.text.fingerprint[:15], 16)):
            raise ValueError(
                f"The ranks see different training texts: {self.text.name} differs between hosts. Give all of them "
                "the same files with --data."
            )
        self.schedule = Schedule(
            options.schedule, options.lr, options.warmup_steps, options.steps, options.lr_floor
        )
        with ranks.together("building the model"):
            self.source = resolve_model(options.model)
            self.model = self._build(self.source)
        tensor_parallel: dict[str, Any] = {"tp": options.tp} if options.tp > 1 else {}
        self.model = parallelize(
            self.model,
            options.strategy,
            options.ac,
            ac_scope=options.scopes,
            compile=False if options.compile == "none" else options.compile,
            param_dtype=parse_dtype("--dtype", options.dtype),
            dp_replicate=options.dp_replicate,
            cpu_offload=options.cpu_offload,
            device=ranks.device,
            **tensor_parallel,
        )
        if options.init == "sharded":
            materialize(self.model, seed=options.seed)
        self.optimizer = make_optimizer(self.model, options)
        self.step = 0
        self.about = about_run(options, self.text.fingerprint)
        self.store: CheckpointStore | None = None
        if options.checkpoint_dir is not None:
            self.store = CheckpointStore(
                options.checkpoint_dir, ranks, keep=options.keep, background=not options.sync_save
            )
            self._resume(self.store)
        self.first_step = self.step
        self.losses: list[float] = []
        self.eval_losses: list[dict[str, float]] = []
        self.interrupted = 0
        self._unread: list[torch.Tensor] = []  # (loss, gradient norm) of the steps since the last report
        self._seconds = 0.0  # spent in timed steps
        self._timed_steps = 0

    def _build(self, source: ModelSource) -> nn.Module:
        if source.vocab_size is not None and source.vocab_size < VOCABULARY:
            raise ValueError(
                f"Model {source.name!r} has {source.vocab_size} tokens; bytes need a vocab_size >= {VOCABULARY}."
            )
        # On the CPU, whatever the device: the same seed gives the same weights on each strategy and number of ranks.
        seed_all(self.options.seed)
        model = source.build("meta" if self.options.init == "sharded" else "cpu", torch.float32)
        config: Any = getattr(model, "config", None)
        if hasattr(config, "use_cache"):
            config.use_cache = False  # a cache of keys and values is of no use in training
        return model

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
        put_state(self.model, state)
        self.step = step

    # ------------------------------------------------------------------------------------------------------ the loop

    def run(self) -> None:
        """Train to the last step, or until a signal asks to stop; then the last checkpoint is complete on disk."""
        options = self.options
        progress = Progress(self.step, options.steps, self.ranks.device, plain=options.plain)
        with progress, Interrupt() as stop:
            self._introduce(progress)
            saved = self.step if self.step > 0 else -1
            while self.step < options.steps:
                start = time.perf_counter()
                self._unread.append(self._train_step(self.step))
                self.step += 1
                first, last = self.step == self.first_step + 1, self.step == options.steps
                report = last or self.step % options.log_every == 0
                save = self.store is not None and (last or self.step % options.save_every == 0)
                signal_seen = self.ranks.largest(stop.requested)
                if first or report or save or signal_seen:
                    # After the first step, which is not timed, so that none of its work is left for the second; before
                    # a save, because a diverged state must not become the newest checkpoint.
                    self._read_losses()
                self._time(start)
                if report:
                    progress.step(self.step, self.losses[-1], self.schedule.at(self.step - 1), self.tokens_per_second)
                if self.eval_starts and not signal_seen and (
                    last or (options.eval_every and self.step % options.eval_every == 0)
                ):
                    self._evaluate(progress)
                if self.store is not None and (save or signal_seen):
                    self._save(self.store)
                    saved = self.step
                if signal_seen:
                    self.interrupted = signal_seen
                    break
            if self.store is not None:
                self.store.wait()
            if self.interrupted:
                where = f"; the checkpoint of step {saved} is complete" if self.store is not None else ""
                progress.say(f"Stopped by {signal.Signals(self.interrupted).name} after step {self.step}{where}.")

    def _introduce(self, progress: Progress) -> None:
        options, text = self.options, self.text
        trained = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        progress.say(
            f"{self.source.name}: {trained:,} parameters, {self.strategy} on {self.ranks.world_size} rank(s), "
            f"ac={options.ac}, {options.dtype}"
        )
        progress.say(f"text: {text.name}, {text.train.size:,} bytes to train on, {text.held_out.size:,} held out")
        if self.eval_starts:
            tokens = torch.stack([text.held_out.read(s, options.seq_len + 1)[1:] for s in self.eval_starts])
            self.unigram_entropy: float | None = unigram_entropy(tokens)
            progress.say(f"byte-unigram entropy of the held-out samples: {self.unigram_entropy:.4f} nats per byte")
        else:
            self.unigram_entropy = None
        if self.step:
            progress.say(f"resumed after step {self.step}")

    def _train_step(self, step: int) -> torch.Tensor:
        """One step; (2,): the mean loss of this rank's samples, and the norm of the whole gradient before clipping."""
        options, ranks = self.options, self.ranks
        # Seeded per step: the random numbers of a step depend on nothing before it, so there is no state to save.
        seed_all(options.seed, step + 1, ranks.data_rank)
        rate = self.schedule.at(step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        total = torch.zeros((), device=ranks.device)
        parts = options.grad_accum * ranks.data_ranks
        for micro in range(options.grad_accum):
            tokens = self.sampler.batch(step, micro * ranks.data_ranks + ranks.data_rank, parts).to(ranks.device)
            with synced_only_if(self.model, micro == options.grad_accum - 1):
                # Every part has equally many tokens, so the mean of the parts' means is the mean over all tokens;
                # DDP and FSDP2 take the mean over the ranks.
                loss = self._loss(tokens) / options.grad_accum
                loss.backward()
            total += loss.detach()
        norm = clip_grad_norm_(self.model, options.clip or math.inf)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return torch.stack([total, norm.to(total.device)])

    def _loss(self, tokens: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
        """Cross entropy of each next byte, nats; tokens: (B, T + 1) int64."""
        output = self.model(tokens[:, :-1])
        logits = output if isinstance(output, torch.Tensor) else output.logits  # (B, T, V)
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten(), reduction=reduction)

    def _read_losses(self) -> None:
        """Bring the last steps' losses from the device, and agree on their mean over ranks."""
        if not self._unread:
            return
        mine = torch.stack(self._unread).double()  # (steps, 2)
        self._unread = []
        means = self.ranks.sum(mine) / self.ranks.world_size
        for loss, norm in means.tolist():
            if not (math.isfinite(loss) and math.isfinite(norm)):
                if self.store is not None:
                    self.store.wait()  # every rank is here: the save before this one may still become complete
                raise DivergedError(
                    f"Step {self.first_step + len(self.losses) + 1}: the loss is {loss}, the gradient's norm {norm}. "
                    "Lower --lr, lengthen --warmup-steps or clip more; checkpoints from before are untouched."
                )
            self.losses.append(loss)

    def _evaluate(self, progress: Progress) -> None:
        options, ranks = self.options, self.ranks
        size = options.batch_size // (options.grad_accum * ranks.data_ranks)
        rounds = math.ceil(len(self.eval_starts) / (size * ranks.data_ranks))
        total = torch.zeros((), dtype=torch.float64)
        self.model.eval()
        with torch.no_grad():
            for turn in range(rounds):
                first = (turn * ranks.data_ranks + ranks.data_rank) * size
                starts = self.eval_starts[first : first + size]
                # A rank without samples left runs the forward too (FSDP2's ranks gather together) and counts nothing.
                padded = starts + self.eval_starts[:1] * (size - len(starts))
                windows = torch.stack([self.text.held_out.read(s, options.seq_len + 1) for s in padded])
                losses = self._loss(windows.to(ranks.device), reduction="none").view(size, -1)
                total += losses[: len(starts)].double().sum().cpu()
        self.model.train()
        mean = float(ranks.sum(total)) / (len(self.eval_starts) * options.seq_len * ranks.tp)
        self.eval_losses.append({"step": self.step, "loss": mean})
        progress.say(f"step {self.step}: held-out loss {mean:.4f} nats per byte")

    def _save(self, store: CheckpointStore) -> None:
        store.save(self.step, gather_state(self.model, self.optimizer), self.about)

    def _time(self, start: float) -> None:
        # The first step allocates and compiles; it is left out unless it is the only one.
        if self.step == self.first_step + 2:
            self._seconds, self._timed_steps = 0.0, 0
        self._seconds += time.perf_counter() - start
        self._timed_steps += 1

    @property
    def strategy(self) -> str:
        """The strategy that took effect: one rank is always ``single``."""
        return self.options.strategy if self.ranks.world_size > 1 else "single"

    @property
    def tokens_per_second(self) -> float:
        """Trained tokens per second over all ranks, without the first step, evaluations and checkpoints."""
        tokens = self._timed_steps * self.options.batch_size * self.options.seq_len
        return tokens / self._seconds if self._seconds else 0.0


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
        model.set_requires_gradient_sync(sync)
    yield


def summarise(trainer: Trainer, peak_bytes: list[int], memory: str, versions: Mapping[str, str]) -> dict[str, Any]:
    """The run as JSON, for ``--json``."""
    options = trainer.options
    return {
        "losses": trainer.losses,
        "first_step": trainer.first_step,
        "eval_losses": trainer.eval_losses,
        "unigram_entropy": trainer.unigram_entropy,
        "peak_bytes": peak_bytes,
        "peak_bytes_are": memory,
        "tokens_per_second": trainer.tokens_per_second,
        "ac": options.ac,
        "strategy": trainer.strategy,
        "world_size": trainer.ranks.world_size,
        "interrupted": bool(trainer.interrupted),
        "options": dataclasses.asdict(options),
        "versions": dict(versions),
    }
