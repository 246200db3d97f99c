"""Train a decoder on text: ``python -m nemo_like.recipes.pretrain``, or the same under torchrun.

    torchrun --nproc-per-node 2 -m nemo_like.recipes.pretrain --steps 200

The same options give the same run on any number of ranks, up to the order of sums: the batch size is that of all ranks
together, and weights and data order depend on the seed alone. A run resumed on the same number of ranks repeats the
uninterrupted one to the bit where the device's kernels are deterministic, as they are on a CPU.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record

from nemo_like.distributed.weights.materialize import materialize
from nemo_like.models import ModelSource, resolve_model
from nemo_like.recipes.agree import Ranks
from nemo_like.recipes.command_line import parse_options
from nemo_like.recipes.loop import TrainingJob, run_on_ranks, seed_all
from nemo_like.recipes.options import PretrainOptions
from nemo_like.recipes.progress import Progress
from nemo_like.recipes.result import save_model
from nemo_like.recipes.text import (
    END,
    VOCABULARY,
    HeldOutText,
    TextData,
    TextRows,
    as_tokens,
    for_transformers,
    load_text,
    train_bpe,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the job; the process's exit code, see `run_on_ranks`."""
    return run_on_ranks(parse_options("pretrain", arguments), Pretraining)


class Pretraining(TrainingJob):
    """A decoder trained on windows of a text, from weights that are drawn."""

    options: PretrainOptions

    def read(self) -> int:
        options, ranks = self.options, self.ranks
        with ranks.together("reading the training text"):
            self.text, self.tokenizer = load_text(options.data), ""
        self.unit = "byte"
        if options.tokenizer == "bpe":
            self.tokenizer = _train_tokenizer(self.text, options, ranks)
            self.unit = "token"
        with ranks.together("reading the training text"):
            if self.tokenizer:
                self.text = as_tokens(self.text, self.tokenizer)
            text, shape = self.text, (options.seq_len, options.batch_size, options.seed)
            self.rows = TextRows(text.train, *shape, packed=options.pack, fingerprint=text.fingerprint)
            self.held_out: HeldOutText | None = None
            if options.eval_samples:
                self.held_out = HeldOutText(text.held_out, options.seq_len, options.eval_samples, packed=options.pack)
        if not ranks.same(int(text.fingerprint[:15], 16)):
            raise ValueError(
                f"The ranks see different training texts: {text.name} differs between hosts. Give all of them the same "
                "files with --data."
            )
        self.unigram_entropy = None if self.held_out is None else self.held_out.entropy()
        return options.seq_len

    def bare(self, options: PretrainOptions) -> nn.Module:
        return _without_cache(self.source.build("meta", torch.float32))

    def build(self) -> nn.Module:
        options = self.options
        self.source = resolve_model(options.model)
        if self.tokenizer:
            _set_vocabulary(self.source, json.loads(self.tokenizer))
        if self.source.vocab_size is not None and self.source.vocab_size < VOCABULARY:
            raise ValueError(
                f"Model {self.source.name!r} has {self.source.vocab_size} tokens; bytes need a vocab_size >= {VOCABULARY}."
            )
        # On the CPU, whatever the device: the same seed gives the same weights on each strategy and number of ranks.
        seed_all(options.seed)
        model = _without_cache(self.source.build("meta" if options.init == "sharded" else "cpu", torch.float32))
        if options.export is not None and not hasattr(model, "save_pretrained"):
            raise ValueError(
                f"--export writes a folder of transformers, and {type(model).__name__} is not a model of it."
            )
        if options.pack and "position_ids" not in inspect.signature(model.forward).parameters:
            raise ValueError(
                f"--pack tells documents apart by position_ids, which {type(model).__name__} does not take."
            )
        return model

    def made_ready(self, model: nn.Module, make_ready: Callable[[nn.Module], Any]) -> Any:
        ready = make_ready(model)
        if self.options.init == "sharded":
            materialize(ready, seed=self.options.seed)
        return ready

    def introduce(self, progress: Progress) -> None:
        options, text = self.options, self.text
        progress.say(
            f"{self.source.name}: {self.trained:,} parameters, {self.strategy} on {self.ranks.world_size} rank(s), "
            f"ac={options.ac}, {options.precision}"
        )
        sizes = f"{text.train.size:,} {self.unit}s to train on, {text.held_out.size:,} held out"
        progress.say(f"text: {text.name}, {sizes}")
        if self.unigram_entropy is not None:
            entropy = f"{self.unigram_entropy:.4f} nats per {self.unit}"
            progress.say(f"{self.unit}-unigram entropy of the held-out samples: {entropy}")

    def facts(self) -> dict[str, Any]:
        return {"unigram_entropy": self.unigram_entropy}

    def save_result(self) -> None:
        """Write the folder of ``--export``."""
        if self.options.export is not None:
            tokenizer = for_transformers(self.tokenizer) if self.tokenizer else None
            state = None if self.pipeline is None else self.pipeline.full_state_dict()
            model = self.model if self.pipeline is None else self.source.build("meta", torch.float32)
            save_model(model, Path(self.options.export), self.ranks, tokenizer, None, state)


def _train_tokenizer(text: TextData, options: PretrainOptions, ranks: Ranks) -> str:
    """Rank 0's tokenizer, as JSON, on every rank."""
    trained = ""
    with ranks.together("training the tokenizer"):
        if ranks.rank == 0:
            trained = train_bpe(text.train, options.vocab_size)
    return ranks.text_from_first(trained)


def _set_vocabulary(source: ModelSource, tokenizer: dict[str, Any]) -> None:
    """Have the model built with as many tokens as the tokenizer has."""
    if source.config is None:
        raise ValueError(
            f"--tokenizer bpe sets the model's vocabulary, and {source.name!r} has no config to set it in."
        )
    end = next(token["id"] for token in tokenizer["added_tokens"] if token["content"] == END)
    config = source.config.get_text_config()
    config.vocab_size = len(tokenizer["model"]["vocab"])
    config.eos_token_id = config.pad_token_id = end
    config.bos_token_id = None


def _without_cache(model: nn.Module) -> nn.Module:
    config: Any = getattr(model, "config", None)
    if hasattr(config, "use_cache"):
        config.use_cache = False  # a cache of keys and values is of no use in training
    return model


if __name__ == "__main__":
    sys.exit(record(main)())  # torchrun then shows the first failing rank's traceback in its own summary
