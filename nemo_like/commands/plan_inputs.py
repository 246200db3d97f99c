"""Inputs that the commands give to the model: from options, the model's config, or its own sample input."""

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from nemo_like._util.console import refuse_unread
from nemo_like._util.log import quiet
from nemo_like._util.tensors import describe, map_tensors, split_sample
from nemo_like.models import ModelSource, check_positions
from nemo_like.options import parse_shape
from nemo_like.planning.model.inputs import Media, ModelInput, model_input
from nemo_like.planning.query import PlanQuery
from nemo_like.planning.report import Step
from nemo_like.torch_compat import FAKE_LOGGER

_TEXT_ONLY = Media(images=0, audio_seconds=0.0)


def query_with_inputs(
    make: Callable[[Any], PlanQuery], model: nn.Module, source: ModelSource, args: argparse.Namespace
) -> tuple[PlanQuery, ModelInput]:
    """Return ``make(sample)`` for all that the model takes.

    Where it refuses pictures and sound as they are made up here: for text alone, with the reason in `ModelInput.missing`.

    Raises:
        ValueError: an option requests inputs that the model does not take, or the planner refuses text alone.
    """
    sample, inputs = _input(model, source, args, _media(args), predicted=True)
    if inputs.missing and _asked(args):
        raise ValueError(
            f"{args.model}: {inputs.missing}. Give a --model module:function that returns (model, sample)."
        )
    beside = inputs.tensors.keys() - {"input_ids", "labels"}
    if not beside and not args.input_shape:
        unread = [
            name for name in ("images", "image_size", "audio_seconds") if getattr(args, name) != 0
        ]  # 0: text alone
        refuse_unread(args, unread, f"{args.model} takes text alone.")
    if not beside or "input_ids" not in inputs.tensors:
        return make(sample), inputs
    try:
        with quiet(FAKE_LOGGER):
            return make(sample), inputs
    except ValueError as error:
        if _asked(args):
            raise
        text, alone = _input(model, source, args, _TEXT_ONLY, predicted=True)
        reason = f"{', '.join(sorted(beside))}: {str(error).partition('. Give what')[0]}"
        return make(text), ModelInput(alone.tensors, alone.words, reason)


def step_of(query: PlanQuery, model: nn.Module, source: ModelSource, args: argparse.Namespace) -> Step:
    """Return the step that `query` was made for, which makes inputs of other sizes as that was made."""
    media = _TEXT_ONLY if query.idle_layers() else _media(args)

    def sized(batch: int, length: int) -> tuple[Any, str]:
        other = argparse.Namespace(**(vars(args) | {"batch_size": batch, "seq_len": length or args.seq_len}))
        sample, inputs = _input(model, source, other, media, predicted=other.seq_len <= args.seq_len)
        return sample, inputs.words

    return Step(
        model, query.job, sized, args.batch_size, 0 if args.input_shape or source.sample is not None else args.seq_len
    )


def _input(
    model: nn.Module, source: ModelSource, args: argparse.Namespace, media: Media, *, predicted: bool
) -> tuple[Any, ModelInput]:
    """Return the model's arguments, and their words; `predicted`: as for `ModelSource.sample_input`."""
    if args.input_shape:
        shape = parse_shape("--input-shape", args.input_shape)
        return torch.empty(shape, device="meta"), ModelInput({}, f"an input of {args.input_shape}")
    if source.sample is not None:
        sample = own_sample(source, args)
        return sample, ModelInput({}, describe(*split_sample(sample)))
    text = _text(source, args, predicted=predicted)
    if source.config is None:
        return text["input_ids"], ModelInput(text, f"{args.batch_size} x {args.seq_len} tokens")
    inputs = model_input(model, text, media)
    return dict(inputs.tensors), inputs


def own_sample(source: ModelSource, args: argparse.Namespace) -> Any:
    """Return the sample input of ``module:function``, with ``--batch-size`` sequences where that is set."""
    refuse_unread(args, ["seq_len", "vocab_size"], f"{source.name} returns its own sample input.")
    return source.sample if args.batch_size == 1 else source.sample_of(args.batch_size)


def sample_for(
    source: ModelSource, args: argparse.Namespace, device: str = "cpu", dtype: torch.dtype | None = None
) -> Any:
    """One training input for a built `source` on `device`: its own, random numbers of ``--input-shape``, or token ids.

    Raises:
        ValueError: a shape that is not a list of sizes, or a model that does not state its inputs.
    """
    if args.input_shape is not None:
        shape = parse_shape("--input-shape", args.input_shape)
        return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    if source.sample is not None:
        return map_tensors(lambda t: t.to(device, dtype if t.is_floating_point() else None), own_sample(source, args))
    text = map_tensors(lambda ids: ids.to(device), _text(source, args))
    return text["input_ids"] if source.config is None else text


def _asked(args: argparse.Namespace) -> bool:
    return bool(args.image_size or args.audio_seconds or args.images > 1)


def _media(args: argparse.Namespace) -> Media:
    return Media(args.images, args.image_size, args.audio_seconds)


def _text(source: ModelSource, args: argparse.Namespace, *, predicted: bool = False) -> dict[str, torch.Tensor]:
    """Token ids and labels, (batch, tokens); `predicted`: as for `ModelSource.sample_input`."""
    if args.vocab_size is not None:
        if source.vocab_size is not None:
            refuse_unread(args, ["vocab_size"], f"{args.model} states its own, {source.vocab_size}.")
    elif source.vocab_size is not None:
        return source.sample_input(args.batch_size, args.seq_len, predicted=predicted)
    elif source.config is None:
        raise ValueError(
            f"Model {source.name!r} states no vocab_size. Give --vocab-size if it takes token ids, or --input-shape; or "
            "have the function return (model, sample)."
        )
    check_positions(source.config, "--seq-len", args.seq_len, source.name if predicted else "")
    ids = torch.randint(
        args.vocab_size or 1, (args.batch_size, args.seq_len), generator=torch.Generator().manual_seed(0)
    )
    return {"input_ids": ids, "labels": ids.clone()}  # of an encoder by itself, only their shape is read
