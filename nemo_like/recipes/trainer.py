"""Pretraining: which model, on which text, and what happens in a step."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from nemo_like.distributed.mesh import build_mesh
from nemo_like.distributed.pipeline import Pipeline
from nemo_like.distributed.weights.materialize import materialize
from nemo_like.models import ModelSource, resolve_model
from nemo_like.recipes.agree import Ranks
from nemo_like.recipes.data import END, VOCABULARY, Sampler, TextData, as_tokens, for_transformers, load_text, train_bpe
from nemo_like.recipes.job import TrainingJob, seed_all, synced_only_if
from nemo_like.recipes.job_options import Options
from nemo_like.recipes.loss import (
    HeldOut,
    MeanLoss,
    check_piped,
    count_targets,
    document_lengths,
    next_byte,
    piped_batch,
)
from nemo_like.recipes.progress import Progress
from nemo_like.recipes.result import save_model
from nemo_like.recipes.run_options import RunOptions
from nemo_like.recipes.run_state import about_run, make_optimizer


class Trainer(TrainingJob):
    """One run: built on every rank from the same options, then `run`.

    Raises (every rank alike):
        ValueError: an option does not fit the data, the model or the number of ranks.
        CheckpointError: there are checkpoints to resume from, and none can be read.
    """

    options: Options

    def __init__(self, options: Options, ranks: Ranks):
        super().__init__(options, ranks)
        with ranks.together("reading the training text"):
            self.text, self.tokenizer = load_text(options.data), ""
        if options.tokenizer == "bpe":
            self.tokenizer = _train_tokenizer(self.text, options, ranks)
            self.unit = "token"
        with ranks.together("reading the training text"):
            if self.tokenizer:
                self.text = as_tokens(self.text, self.tokenizer)
            self.sampler = Sampler(self.text.train, options.seq_len, options.batch_size, options.seed)
            samples = options.eval_samples
            held_out = self.text.held_out
            self.held_out = HeldOut(held_out, options.seq_len, samples, options.pack) if samples else None
        _check_same_text(self.text, ranks)
        with ranks.together("building the model"):
            self.source = resolve_model(options.model)
            if self.tokenizer:
                _set_vocabulary(self.source, json.loads(self.tokenizer))
            self.model = _build(self.source, options)
        if options.export is not None and not hasattr(self.model, "save_pretrained"):
            raise ValueError(
                f"--export writes a folder of transformers, and {type(self.model).__name__} is not a model of it."
            )
        if options.pack and "position_ids" not in inspect.signature(self.model.forward).parameters:
            raise ValueError(
                f"--pack tells documents apart by position_ids, which {type(self.model).__name__} does not take."
            )
        self._look_at(self.model, options.seq_len)
        with self._advice():
            self._prepare()
        self.unigram_entropy = None if self.held_out is None else self.held_out.entropy()

    def _bare(self, options: RunOptions) -> nn.Module:
        return _without_cache(self.source.build("meta", torch.float32))

    def _prepare(self) -> None:
        """The model cut and sharded, its optimizer, and what a checkpoint has of them. A collective."""
        options = self.options
        mesh = _mesh(options, self.ranks)
        self._loss = MeanLoss(options.loss == "chunked", mesh)
        if options.pp > 1:  # each rank then has a part of the model
            self.about = about_run(options, self.text.fingerprint, self.model)
        self.trained = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        model = self._cut(self.model, mesh)
        self.pipeline = model if isinstance(model, Pipeline) else None
        self.model = model.module if isinstance(model, Pipeline) else model
        self.optimizer = make_optimizer(self.model, options)
        if options.pp == 1:
            self.about = about_run(options, self.text.fingerprint, self.model)
        self._begin()

    def _cut(self, model: nn.Module, mesh: DeviceMesh | None) -> Any:
        options, ranks = self.options, self.ranks
        samples = options.rows(ranks.data_ranks)
        if options.pp > 1:  # which cuts its batch by itself
            samples = -(-samples // (options.job().pp.microbatches or 1))
        options.check_model_loss(model, options.loss)
        if options.pp > 1:
            check_piped(model)
        made = self._parallelized(model, samples, options.seq_len, mesh=mesh)
        if options.init == "sharded":
            materialize(made, seed=options.seed)
        return made

    unit = "byte"

    def facts(self) -> dict[str, Any]:
        return {"unigram_entropy": self.unigram_entropy}

    def _introduce(self, progress: Progress) -> None:
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

    def _step_lengths(self, step: int) -> Sequence[int]:
        if self.options.pack:
            return document_lengths(self.sampler.documents(step))
        return [self.options.seq_len] * self.options.batch_size

    def _train(self, step: int) -> torch.Tensor:
        options, ranks = self.options, self.ranks
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
                loss = self._loss(self.model, next_byte(tokens, documents), counted) / options.grad_accum
                loss.backward()
            total += loss.detach()
        return total

    def _clip(self, most: float) -> torch.Tensor:
        return super()._clip(most) if self.pipeline is None else self.pipeline.clip_grad_norm_(most)

    def save_result(self) -> None:
        """Write the folder of ``--export``. A collective."""
        if self.options.export is not None:
            tokenizer = for_transformers(self.tokenizer) if self.tokenizer else None
            state = None if self.pipeline is None else self.pipeline.full_state_dict()
            model = self.model if self.pipeline is None else self.source.build("meta", torch.float32)
            save_model(model, Path(self.options.export), self.ranks, tokenizer, None, state)

    def _evaluate(self) -> float | None:
        if self.held_out is None:
            return None
        size = self.options.rows(self.ranks.data_ranks)
        return self.held_out.loss(self.pipeline or self.model, self.ranks, size, self._loss)


def _train_tokenizer(text: TextData, options: Options, ranks: Ranks) -> str:
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
    return _without_cache(source.build("meta" if options.init == "sharded" else "cpu", torch.float32))


def _without_cache(model: nn.Module) -> nn.Module:
    config: Any = getattr(model, "config", None)
    if hasattr(config, "use_cache"):
        config.use_cache = False  # a cache of keys and values is of no use in training
    return model


def _mesh(options: Options, ranks: Ranks) -> DeviceMesh | None:
    """The mesh that the loss cuts its targets over; None where sequences are whole, or the last stage has the loss."""
    if options.cp == 1 or options.pp > 1:
        return None
    return build_mesh(dp_replicate=options.dp_replicate, cp=options.cp, tp=options.tp, device_type=ranks.device.type)
