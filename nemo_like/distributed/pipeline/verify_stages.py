"""Context parallelism in a pipeline compared with whole sequences: every stage's hidden states, loss and logits."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_like.distributed.context_parallel.parts import MARK, Parts
from nemo_like.distributed.context_parallel.verify_cut import (
    answers,
    evaluating,
    excess,
    first_tokens,
    refuse_others,
    wanted,
)

if TYPE_CHECKING:
    from nemo_like.distributed.pipeline.pipeline import Pipeline


def sequence_parts(pipeline: Pipeline) -> list[Parts]:
    """How each stage of this rank cuts sequences; empty without ``cp``."""
    found = (
        next((getattr(module, MARK) for module in stage.module.modules() if hasattr(module, MARK)), None)
        for stage in pipeline.stages
    )
    return [parts for parts in found if parts is not None]


def verify_stages(pipeline: Pipeline, batch: Mapping[str, Any]) -> None:
    """Raise ValueError, on every rank, where the stages answer otherwise on parts than on whole sequences.

    Compared is what `nemo_like.distributed.context_parallel.verify_cut.wanted` says: nothing as a rule, the first tokens
    where structure does not say that parts are right, the whole batch with ``NEMO_LIKE_VERIFY=1``.
    """
    cut = sequence_parts(pipeline)
    tokens = wanted(cut[0].compared) if cut else None
    if tokens is None:
        return
    length = next(value.shape[1] for value in batch.values() if isinstance(value, Tensor) and value.ndim > 1)
    inputs = first_tokens(batch, length, tokens, cut[0].ranks)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng())
        for stage in pipeline.stages:
            stack.enter_context(evaluating(stage.module))
        expected, found = (_answers(pipeline, cut, inputs, word) for word in ("whole", "parts"))
    worst = torch.tensor([max(excess(cut[0], *pair) for pair in zip(found, expected))], device=pipeline.device)
    dist.all_reduce(worst, dist.ReduceOp.MAX, group=pipeline.group)
    refuse_others(pipeline.stages[0].module, cut[0], worst.item())


def _answers(pipeline: Pipeline, cut: list[Parts], inputs: Mapping[str, Any], word: str) -> list[Tensor]:
    """What the stages of this rank give: hidden states, and of the last one what the model returns."""
    seen: list[Tensor] = []
    handles = [
        stage.forward.call.register_forward_hook(lambda module, args, output: seen.extend(answers(output)))
        for stage in pipeline.stages
        if stage.slice.is_last
    ]
    for parts in cut:
        parts.verifying = word
    try:
        pipeline.forward(inputs, seen)
    finally:
        for parts in cut:
            parts.verifying = None
        for handle in handles:
            handle.remove()
    return seen
