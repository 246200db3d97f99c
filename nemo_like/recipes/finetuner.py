"""Fine-tuning: which samples, what trains, and what is left at the end."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nemo_like._util.console import check_picture, flag
from nemo_like._util.extras import require
from nemo_like._util.log import warn_once
from nemo_like._util.words import GIB
from nemo_like.losses.rows import IGNORED
from nemo_like.models import ModelSource, check_positions
from nemo_like.recipes.agree import Ranks
from nemo_like.recipes.encode import Encoder, check_vocabulary, load_tokenizer
from nemo_like.recipes.finetune_options import FinetuneOptions
from nemo_like.recipes.job import TrainingJob, seed_all, synced_only_if
from nemo_like.recipes.job_checkpoint import writing
from nemo_like.recipes.job_options import changed_options, config_text
from nemo_like.recipes.loss import MeanLoss
from nemo_like.recipes.progress import Progress, memory
from nemo_like.recipes.result import merge_adapter, save_adapter, save_model
from nemo_like.recipes.run_options import RunOptions
from nemo_like.recipes.run_state import about_run, gather_state, make_optimizer
from nemo_like.recipes.sample_data import SampleSet, TrainingRows, hold_out, look_through
from nemo_like.recipes.sample_files import open_samples
from nemo_like.recipes.tuned_model import build_on_meta, fill, find_model, folder_fingerprint

_MOST_OPTIONS = 640
"""Characters of options that are printed: eight lines of 80 columns."""


class FineTuner(TrainingJob):
    """One run: built on every rank from the same options, then `run`.

    Raises (every rank alike):
        ValueError: an option does not fit the data, the model or the number of ranks.
        CheckpointError: there are checkpoints to resume from, and none can be read.
        CheckpointUnreadableError: the model's files are damaged.
    """

    options: FinetuneOptions

    def __init__(self, options: FinetuneOptions, ranks: Ranks):
        with ranks.together("looking at the folders"):
            check_output(options, ranks.rank)
            for wanted, name in ((options.tensorboard, "tensorboard"), (options.wandb is not None, "wandb")):
                if wanted and ranks.rank == 0:
                    require(name, name, f"for {flag(name)}")
            if options.plot:
                check_picture("--plot", Path(options.output) / "plot.png")
            self.source = find_model(options)
            self.tokenizer = load_tokenizer(
                options.tokenizer or options.model, trust_remote_code=options.trust_remote_code
            )
            check_vocabulary(self.tokenizer, self.source.vocab_size, options.model)
            if options.sample is not None:
                check_prompt(self.tokenizer, options, self.source)
        self.rows, self.held_out = _samples(options, self.tokenizer, ranks)
        if options.steps == 0:
            steps = math.ceil(options.epochs * self.rows.order.rows_per_epoch / options.batch_size)
            options = dataclasses.replace(options, steps=max(1, steps))
        super().__init__(options, ranks)
        with ranks.together("building the model"):
            self.model = build_on_meta(self.source, options)
        if self.held_out is not None:
            check_positions(self.source.config, "A held-out sample", max(self.held_out.lengths))
        self._look_at(self.model, options.seq_len if options.pack else max(self.rows.samples.lengths))
        options, ranks = self.options, self.ranks
        with self._advice():
            self._build()
            if self.step == 0:  # before training: what a better loss is to be compared with
                self.about["base_eval_loss"] = self._evaluate()
        self._logged = 0
        with ranks.together("opening the log"), writing(options.output):
            self.run_log = RunLog(
                Path(options.output),
                self.step,
                active=ranks.rank == 0,
                tensorboard=options.tensorboard,
                wandb=options.wandb,
                options=dataclasses.asdict(options),
            )
            if ranks.rank == 0:
                (Path(options.output) / "options.yaml").write_text(config_text(options), encoding="utf-8")

    def _bare(self, options: RunOptions) -> nn.Module:
        assert isinstance(options, FinetuneOptions)
        return build_on_meta(self.source, options)

    def _build(self) -> None:
        """Weights, optimizer and what a checkpoint has of them. A collective."""
        options = self.options
        options.check_model_loss(self.model, options.loss)
        counts = [p.numel() for p in self.model.parameters() if p.requires_grad]
        self.trained, self.parameters = sum(counts), sum(p.numel() for p in self.model.parameters())
        self.model = self._sharded(self.model)
        self.optimizer = make_optimizer(self.model, options)
        self.about = about_run(options, self.rows.samples.files.fingerprint, self.model)
        self.about |= {"base": folder_fingerprint(options.model), "trained": self.trained}
        self.about["samples"] = self.rows.fingerprint
        self._loss = MeanLoss(options.loss == "chunked")
        self._begin()
        self._try_largest_step()

    def _sharded(self, model: nn.Module) -> nn.Module:
        options, ranks = self.options, self.ranks
        replicated = options.strategy == "ddp" and ranks.world_size > 1
        if replicated:
            fill(model, options)  # DDP starts from weights
        sharded: nn.Module = self._parallelized(model, options.rows(ranks.data_ranks), self.width)
        if not replicated:
            fill(sharded, options)
        return sharded

    # ------------------------------------------------------------------------------------------------------- the steps

    def _train(self, step: int) -> torch.Tensor:
        options, ranks = self.options, self.ranks
        total = torch.zeros((), device=ranks.device)
        parts = options.passes * ranks.data_ranks
        counted = self.rows.targets(step) / parts
        for micro in range(options.passes):
            batch = self.rows.batch(step, micro * ranks.data_ranks + ranks.data_rank, parts).to(ranks.device)
            with synced_only_if(self.model, micro == options.passes - 1):
                # Divided by the average count of a part, so that every target of the step weighs the same.
                loss = self._loss(self.model, batch, counted) / options.passes
                loss.backward()
            total += loss.detach()
        return total

    def _try_largest_step(self) -> None:
        """Forward and backward of a batch as large as any of the run, so that memory runs out now rather than in hours.

        Weights stay as they are. The optimizer's moments are there already, where checkpoints are written.
        """
        seed_all(self.options.seed)
        batch = self.rows.largest(self.options.rows(self.ranks.data_ranks)).to(self.ranks.device)
        counted = float((batch.targets != IGNORED).sum())
        for micro in range(min(2, self.options.passes)):  # the second one finds gradients of the first
            with synced_only_if(self.model, micro == min(2, self.options.passes) - 1):
                self._loss(self.model, batch, counted).backward()
        self.optimizer.zero_grad(set_to_none=True)
        self.largest_step = tuple(batch.inputs.shape)

    def _step_lengths(self, step: int) -> Sequence[int]:
        return self.rows.lengths(step)

    def _evaluate(self) -> float | None:
        if self.held_out is None:
            return None
        size = self.options.rows(self.ranks.data_ranks)
        return mean_loss(self.model, self.held_out, self.ranks, size, self._loss)

    def _is_worth_saving(self) -> bool:
        best = min(self.eval_losses, key=lambda entry: entry["loss"])
        known = self.about.get("best")
        if best is not self.eval_losses[-1] or (known is not None and known["loss"] <= best["loss"]):
            return False
        self.about["best"] = dict(best)
        if self.store is not None:
            self.store.best = int(best["step"])
        return True

    def _after_step(self, progress: Progress, *, report: bool, loss: float | None) -> None:
        options, step = self.options, self.step
        turn = step == options.steps or (options.sample_every > 0 and step % options.sample_every == 0)
        if loss is not None or (options.sample is not None and turn):
            self.log.read()  # so that records are in the order of their steps
        for number, losses in enumerate(self.log.losses[self._logged :], self.first_step + self._logged + 1):
            self.run_log.add(number, loss=losses, learning_rate=self.schedule.at(number - 1))
        self._logged = len(self.log.losses)
        if report:
            speed = {"tokens_per_second": self.tokens_per_second} | ({} if self.mfu is None else {"mfu": self.mfu})
            self.run_log.add(step, **speed, **memory(self.ranks.device))
        if loss is not None:
            self.run_log.add(step, eval_loss=loss)
        if options.sample is not None and turn and not self.interrupted:
            text = continue_prompt(self.model, self.tokenizer, options.sample, options.sample_tokens, self.ranks.device)
            self.run_log.add(step, sample=text)
            progress.say(f"step {step}: {options.sample!r} -> {text!r}")

    # ----------------------------------------------------------------------------------------- beginning and checkpoints

    def facts(self) -> dict[str, Any]:
        return {
            "trained_parameters": self.trained,
            "parameters": self.parameters,
            "samples": len(self.rows.samples),
            "skipped_samples": self.rows.samples.skipped,
            "largest_step": self.largest_step,
            "base_eval_loss": self.about.get("base_eval_loss"),
            "best": self.about.get("best"),
        }

    def _introduce(self, progress: Progress) -> None:
        options, samples = self.options, self.rows.samples
        progress.say(
            f"{options.model}: {self.trained:,} of {self.parameters:,} parameters train, {self.strategy} on "
            f"{self.ranks.world_size} rank(s), ac={options.ac}, {options.precision}"
        )
        held_out = 0 if self.held_out is None else len(self.held_out)
        packed = f" in {self.rows.order.rows_per_epoch:,} rows" if options.pack else ""
        progress.say(f"data: {len(samples):,} samples to train on{packed}, {held_out} held out; {options.steps} steps")
        rows, width = self.largest_step
        progress.say(f"the largest step of a rank, {rows} x {width} tokens, fits")
        if self.step == 0 and self.held_out is not None:
            progress.say(f"before training: held-out loss {self.about['base_eval_loss']:.4f} nats per token")
        changed = textwrap.shorten(changed_options(options), _MOST_OPTIONS, placeholder=" ...")
        progress.say(f"all options: {options.output}/options.yaml; not the defaults: {changed}")

    def _state(self) -> dict[str, Any]:
        return gather_state(self.model, self.optimizer, frozen=False)

    def _check_checkpoint(self, about: Any) -> None:
        super()._check_checkpoint(about)
        if about.get("base") != self.about["base"] or about.get("trained") != self.about["trained"]:
            raise ValueError(
                "--resume: the checkpoint's run had other weights in --model, or trained other parameters of it. Give the "
                f"same again, or start anew with another {self.options.elsewhere}."
            )
        if about.get("samples") != self.about["samples"]:
            raise ValueError(
                "--resume: --data is what the checkpoint's run read, but it trained on other samples of it, or on other "
                "tokens of them. Give --tokenizer, --eval-samples, --eval-data and --skip-bad as they were, or start anew "
                f"with another {self.options.elsewhere}."
            )
        self.about["base_eval_loss"] = about.get("base_eval_loss")
        if about.get("best") is not None:
            self.about["best"] = dict(about["best"])

    def _resume(self, store: Any) -> None:
        super()._resume(store)
        if self.about.get("best") is not None:
            store.best = int(self.about["best"]["step"])

    # ------------------------------------------------------------------------------------------------------- the result

    def save_result(self) -> None:
        """Write what was trained to ``--output``. A collective."""
        options, ranks = self.options, self.ranks
        output = Path(options.output)
        self.run_log.close()
        best = self.about.get("best")
        if options.export == "best" and best is not None and best["step"] != self.step and self.store is not None:
            self.store.load_step(int(best["step"]), self._state())
        if options.lora:
            save_adapter(self.model, output / "adapter", ranks)
            if options.merge:
                merge_adapter(
                    options.model,
                    output / "adapter",
                    output / "model",
                    ranks,
                    self.tokenizer,
                    trust_remote_code=options.trust_remote_code,
                )
        else:
            stored = getattr(self.source.config, "dtype", None)
            save_model(self.model, output / "model", ranks, self.tokenizer, stored)
        if options.plot:  # last, so that nothing else is lost where it fails
            with ranks.together("plotting"), writing(str(output / "plot.png")):
                if ranks.rank == 0:
                    plot_log(self.run_log.path, output / "plot.png")


def check_output(options: FinetuneOptions, rank: int) -> None:
    """Make the folder ``--output``.

    Raises:
        ValueError: it cannot be written to, or has a result already, which would be lost.
    """
    output = Path(options.output)
    try:
        output.mkdir(parents=True, exist_ok=True)
        probe = output / f".writable-{rank}"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise ValueError(f"--output is {options.output!r}, where nothing can be written: {error}.") from error
    for name in ("adapter", "model"):
        if (output / name).exists() and options.resume == "no":
            raise ValueError(f"--output {options.output!r} has a result already ({name}). Give another folder.")


def mean_loss(model: nn.Module, samples: SampleSet, ranks: Ranks, size: int, mean: MeanLoss) -> float:
    """Mean loss of the samples' answers, nats per token, `size` samples at a time on each rank. A collective."""
    by_length = sorted(range(len(samples)), key=lambda i: (samples.lengths[i], i))
    rounds = math.ceil(len(samples) / (size * ranks.data_ranks))
    total = torch.zeros((), dtype=torch.float64)
    model.eval()
    with torch.no_grad():
        for turn in range(rounds):
            first = (turn * ranks.data_ranks + ranks.data_rank) * size
            mine: Sequence[int] = by_length[first : first + size]
            # A rank without samples left runs the forward too (FSDP2's ranks gather together) and counts nothing.
            batch = samples.batch([[i] for i in mine or by_length[:1]]).to(ranks.device)
            total += mean.total(model, batch, len(mine)).cpu()
    model.train()
    return float(ranks.sum(total)) / sum(samples.targets)


def check_prompt(tokenizer: Any, options: FinetuneOptions, source: ModelSource) -> None:
    """Raise ValueError where ``--sample`` cannot be continued: found now, rather than after the last step."""
    try:
        tokens = len(tokenizer(options.sample)["input_ids"])
    except Exception as error:  # each kind of tokenizer has errors of its own
        raise ValueError(f"--sample is {options.sample!r}, which the tokenizer does not take: {error}.") from error
    if tokens == 0:
        raise ValueError(
            f"--sample is {options.sample!r}, of which the tokenizer makes no token: there is nothing to continue. Give a "
            "prompt, or leave --sample out."
        )
    check_positions(source.config, "--sample with --sample-tokens", tokens + options.sample_tokens)


@torch.no_grad()
def continue_prompt(model: nn.Module, tokenizer: Any, prompt: str, most: int, device: torch.device) -> str:
    """Up to `most` tokens after `prompt`, the likeliest each time. A collective where the model is sharded.

    Without a cache of keys and values, by whole forwards: sharded models have no other way in but their own forward.
    """
    ids = torch.tensor([tokenizer(prompt)["input_ids"]], device=device)
    begin = ids.shape[1]
    model.eval()
    for _ in range(most):
        token = model(ids).logits[:, -1:].argmax(-1)
        if int(token) == tokenizer.eos_token_id:
            break
        ids = torch.cat([ids, token], 1)
    model.train()
    return str(tokenizer.decode(ids[0, begin:], skip_special_tokens=True))


def _samples(options: FinetuneOptions, tokenizer: object, ranks: Ranks) -> tuple[TrainingRows, SampleSet | None]:
    encoder = Encoder(tokenizer, options.seq_len)

    def read(flag: str, data: str) -> SampleSet:
        with ranks.together(f"opening {flag}"):
            files = open_samples(flag, data)
        return look_through(flag, files, encoder, ranks, skip_bad=options.skip_bad)

    samples = read("--data", options.data)
    with ranks.together("holding samples out"):
        if options.eval_data is None:
            samples, held_out = hold_out(samples, options.eval_samples)
    if options.eval_data is not None:
        held_out = read("--eval-data", options.eval_data)
        held_out = held_out.subset(range(min(len(held_out), options.eval_samples))) if options.eval_samples else None
    with ranks.together("ordering the samples"):
        rows = TrainingRows(
            samples, batch_size=options.batch_size, seq_len=options.seq_len, seed=options.seed, packed=options.pack
        )
    return rows, held_out


# What a fine-tuning run records: ``log.jsonl`` always, TensorBoard and Weights & Biases where asked for, and a plot.


class RunLog:
    """Records of one run on rank 0; on other ranks, nothing. A resumed run goes on in the same file.

    Args:
        folder: where ``log.jsonl`` and TensorBoard's files are written; it exists.
        first_step: records of later steps, which a resumed run takes again, are dropped.

    Raises:
        MissingExtraError: something was asked for that is not installed.
    """

    def __init__(
        self,
        folder: Path,
        first_step: int,
        *,
        active: bool,
        tensorboard: bool = False,
        wandb: str | None = None,
        options: dict[str, Any] | None = None,
    ):
        self.path = folder / "log.jsonl"
        self._active = active
        self._incomplete = False
        self._board: Any = None
        self._wandb: Any = None
        if not active:
            return
        kept = [record for record in read_log(self.path) if record["step"] <= first_step] if first_step else []
        self.path.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
        if tensorboard:
            require("tensorboard", "tensorboard", "for --tensorboard")
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step + 1)
        if wandb is not None:
            package = require("wandb", "wandb", "for --wandb")
            self._wandb = package.init(project=wandb, dir=str(folder), config=options)

    def add(self, step: int, **values: object) -> None:
        """Record `values` (numbers or text) after step number `step`."""
        if not self._active:
            return
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step} | values, ensure_ascii=False) + "\n")
        except OSError as error:  # training is worth more than its record
            if not self._incomplete:
                warn_once(
                    f"{self.path} cannot be written ({error}): training goes on, and records are missing from step {step}."
                )
            self._incomplete = True
        for name, value in values.items():
            if self._board is not None:
                if isinstance(value, str):
                    self._board.add_text(name, value, step)
                else:
                    self._board.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(values, step=step)

    def close(self) -> None:
        """Bring everything to disk."""
        if self._board is not None:
            self._board.close()
        if self._wandb is not None:
            self._wandb.finish()


def read_log(path: Path) -> list[dict[str, Any]]:
    """The records in a ``log.jsonl``; a line that a killed run or a full disk left unfinished is left out."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            records.append(json.loads(line))
    return records


def plot_log(path: Path, target: Path) -> None:
    """Draw the loss, in training and on held-out samples, and the memory in a log to the picture `target`.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    require("matplotlib", "plot", "for --plot")
    from matplotlib.figure import Figure

    records = read_log(path)
    figure = Figure(figsize=(8, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    for name, label, style in (("loss", "training", "-"), ("eval_loss", "held out", "o-")):
        points = [(record["step"], record[name]) for record in records if name in record]
        if points:
            above.plot(*zip(*points), style, label=label)
    above.set_ylabel("loss, nats per token")
    above.legend()
    for name, label in (("memory_bytes", "in use"), ("peak_bytes", "peak"), ("reserved_bytes", "reserved")):
        points = [(record["step"], record[name] / GIB) for record in records if name in record]
        if points:
            below.plot(*zip(*points), label=label)
    below.set_ylabel("memory of rank 0, GiB")
    below.set_xlabel("step")
    below.legend()
    figure.savefig(target)
