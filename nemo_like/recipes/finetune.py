"""Fine-tune a Hugging Face model: ``python -m nemo_like.recipes.finetune``, or the same under torchrun.

    torchrun --nproc-per-node 2 -m nemo_like.recipes.finetune --model DIR --data FILE.jsonl --lora

The same options give the same run on any number of ranks, up to the order of sums. docs/how-to/fine-tune.md tells the whole.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record

from nemo_like._util.console import flag
from nemo_like._util.extras import require
from nemo_like.losses.rows import IGNORED
from nemo_like.models import ModelSource, check_positions
from nemo_like.recipes.command_line import changed_options, config_text, parse_options
from nemo_like.recipes.encode import Encoder, check_vocabulary, load_tokenizer
from nemo_like.recipes.job_checkpoint import CheckpointStore, writing
from nemo_like.recipes.loop import TrainingJob, run_on_ranks, seed_all, synced_only_if
from nemo_like.recipes.options import FinetuneOptions
from nemo_like.recipes.progress import Progress, memory
from nemo_like.recipes.result import merge_adapter, save_adapter, save_model
from nemo_like.recipes.run_log import RunLog
from nemo_like.recipes.sample_files import open_samples
from nemo_like.recipes.sample_rows import HeldOutSamples, SampleRows, SampleSet, hold_out, look_through
from nemo_like.recipes.tuned_model import build_on_meta, fill, find_model, folder_fingerprint

_MOST_OPTIONS = 640
"""Characters of options that are printed: eight lines of 80 columns."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the job; the process's exit code, see `run_on_ranks`."""
    return run_on_ranks(parse_options("finetune", arguments), FineTuning)


class FineTuning(TrainingJob):
    """A model of a folder, or adapters on it, trained on samples.

    Raises (every rank alike):
        ValueError: an option does not fit the data, the model or the number of ranks.
        CheckpointError: there are checkpoints to resume from, and none can be read.
        CheckpointUnreadableError: the model's files are damaged.
    """

    options: FinetuneOptions
    rows: SampleRows
    saves_frozen = False

    def read(self) -> int:
        options, ranks = self.options, self.ranks
        with ranks.together("looking at the folders"):
            check_output(options, ranks.rank)
            for wanted, name in ((options.tensorboard, "tensorboard"), (options.wandb is not None, "wandb")):
                if wanted and ranks.rank == 0:
                    require(name, name, f"for {flag(name)}")
            self.source = find_model(options)
            folder = options.tokenizer or options.model
            self.tokenizer = load_tokenizer(folder, trust_remote_code=options.trust_remote_code)
            check_vocabulary(self.tokenizer, self.source.vocab_size, options.model)
            if options.sample is not None:
                check_prompt(self.tokenizer, options, self.source)
        samples = self._samples("--data", options.data)
        held_out = None
        with ranks.together("holding samples out"):
            if options.eval_data is None:
                samples, held_out = hold_out(samples, options.eval_samples)
        if options.eval_data is not None:
            every = self._samples("--eval-data", options.eval_data)
            held_out = every.subset(range(min(len(every), options.eval_samples)))
        self.held_out = None if held_out is None else HeldOutSamples(held_out)
        with ranks.together("ordering the samples"):
            width = options.seq_len if options.pack else None
            self.rows = SampleRows(samples, options.batch_size, options.seed, width)
        if options.steps == 0:
            steps = math.ceil(options.epochs * self.rows.rows_per_epoch / options.batch_size)
            self.options = dataclasses.replace(options, steps=max(1, steps))
        if held_out is not None:
            check_positions(self.source.config, "A held-out sample", max(held_out.lengths))
        return width or max(samples.lengths)

    def _samples(self, flag: str, data: str) -> SampleSet:
        with self.ranks.together(f"opening {flag}"):
            files = open_samples(flag, data)
        encoder = Encoder(self.tokenizer, self.options.seq_len)
        return look_through(flag, files, encoder, self.ranks, skip_bad=self.options.skip_bad)

    def bare(self, options: FinetuneOptions) -> nn.Module:
        return build_on_meta(self.source, options)

    def made_ready(self, model: nn.Module, make_ready: Callable[[nn.Module], Any]) -> Any:
        replicated = self.options.strategy == "ddp" and self.ranks.world_size > 1
        if replicated:
            fill(model, self.options)  # DDP starts from weights
        ready = make_ready(model)
        if not replicated:
            fill(ready, self.options)
        return ready

    def identity(self, model: nn.Module) -> dict[str, Any]:
        return super().identity(model) | {
            "base": folder_fingerprint(self.options.model),
            "trained": self.trained,
            "samples": self.rows.samples_fingerprint,
        }

    def check_checkpoint(self, about: Any) -> None:
        super().check_checkpoint(about)
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

    def resume(self, store: CheckpointStore) -> None:
        super().resume(store)
        if self.about.get("best") is not None:
            store.best = int(self.about["best"]["step"])

    def ready(self) -> None:
        options, ranks = self.options, self.ranks
        self._try_largest_step()
        if self.step == 0:  # before training: what a better loss is to be compared with
            self.about["base_eval_loss"] = self.evaluate()
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

    def _try_largest_step(self) -> None:
        """Forward and backward of a batch as large as any of the run, so that memory runs out now rather than in hours.

        Weights stay as they are. The optimizer's moments are there already, where checkpoints are written.
        """
        seed_all(self.options.seed)
        batch = self.rows.largest(self.options.rows(self.ranks.data_ranks)).to(self.ranks.device)
        counted = float((batch.targets != IGNORED).sum())
        passes = min(2, self.options.passes)  # the second one finds gradients of the first
        for micro in range(passes):
            with synced_only_if(self.model, self.options.sync == "every" or micro == passes - 1):
                self._loss(self.model, batch, counted).backward()
        self.optimizer.zero_grad(set_to_none=True)
        self.largest_step = tuple(batch.inputs.shape)

    def introduce(self, progress: Progress) -> None:
        options, samples = self.options, self.rows.samples
        progress.say(
            f"{options.model}: {self.trained:,} of {self.parameters:,} parameters train, {self.strategy} on "
            f"{self.ranks.world_size} rank(s), ac={options.ac}, {options.precision}"
        )
        held_out = 0 if self.held_out is None else len(self.held_out)
        packed = f" in {self.rows.rows_per_epoch:,} rows" if options.pack else ""
        progress.say(f"data: {len(samples):,} samples to train on{packed}, {held_out} held out; {options.steps} steps")
        rows, width = self.largest_step
        progress.say(f"the largest step of a rank, {rows} x {width} tokens, fits")
        if self.step == 0 and self.held_out is not None:
            progress.say(f"before training: held-out loss {self.about['base_eval_loss']:.4f} nats per token")
        changed = textwrap.shorten(changed_options(options), _MOST_OPTIONS, placeholder=" ...")
        progress.say(f"all options: {options.output}/options.yaml; not the defaults: {changed}")

    def after_step(self, progress: Progress, *, report: bool, loss: float | None) -> bool:
        options, step = self.options, self.step
        turn = step == options.steps or (options.sample_every > 0 and step % options.sample_every == 0)
        samples = options.sample is not None and turn
        if loss is not None or samples:
            self.log.read()  # so that records are in the order of their steps
        for number, losses in enumerate(self.log.losses[self._logged :], self.first_step + self._logged + 1):
            self.run_log.add(number, loss=losses, learning_rate=self.schedule.at(number - 1))
        self._logged = len(self.log.losses)
        if report:
            speed = {"tokens_per_second": self.tokens_per_second} | ({} if self.mfu is None else {"mfu": self.mfu})
            self.run_log.add(step, **speed, **memory(self.ranks.device))
        if loss is not None:
            self.run_log.add(step, eval_loss=loss)
        if options.sample is not None and samples and not self.interrupted:
            text = continue_prompt(self.model, self.tokenizer, options.sample, options.sample_tokens, self.ranks.device)
            self.run_log.add(step, sample=text)
            progress.say(f"step {step}: {options.sample!r} -> {text!r}")
        return loss is not None and self._is_best(loss)

    def _is_best(self, loss: float) -> bool:
        """Return whether no evaluation before had such a `loss`, and keep the checkpoint of this step if so."""
        before = [entry["loss"] for entry in self.eval_losses[:-1]]
        if (known := self.about.get("best")) is not None:
            before.append(known["loss"])
        if before and min(before) <= loss:
            return False
        self.about["best"] = dict(self.eval_losses[-1])
        if self.store is not None:
            self.store.best = self.step
        return True

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

    def save_result(self) -> None:
        """Write what was trained to ``--output``."""
        options, ranks, output = self.options, self.ranks, Path(self.options.output)
        self.run_log.close()
        best = self.about.get("best")
        if options.export == "best" and best is not None and best["step"] != self.step and self.store is not None:
            self.store.load_step(int(best["step"]), self.state())
        if options.lora:
            save_adapter(self.model, output / "adapter", ranks)
            if options.merge:
                trusted = options.trust_remote_code
                paths = (output / "adapter", output / "model")
                merge_adapter(options.model, *paths, ranks, self.tokenizer, trust_remote_code=trusted)
        else:
            stored = getattr(self.source.config, "dtype", None)
            save_model(self.model, output / "model", ranks, self.tokenizer, stored)


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


if __name__ == "__main__":
    sys.exit(record(main)())  # torchrun then shows the first failing rank's traceback in its own summary
