"""The last stage of a pipeline, called by itself: without its layers, with hidden states that are drawn."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from nemo_like._util.module_tree import bare_modules
from nemo_like.activation_checkpointing.engine.module_state import ModuleWorld
from nemo_like.distributed.context_parallel.verify_cut import evaluating, put_back
from nemo_like.distributed.pipeline.stage import Stage, StagesOfRank
from nemo_like.losses.batch_means import LossCalls
from nemo_like.torch_compat import answering_calls


@dataclass
class _Alone:
    """`BatchShares` of one microbatch, whose loss is not part of another's."""

    context: LossCalls
    shares: Sequence[float] = (1.0,)
    autocast: bool = False
    """Whether the loss was computed under autocast."""

    def calls(self, number: int) -> LossCalls:
        self.autocast = any(map(torch.is_autocast_enabled, ("cpu", "cuda")))
        return self.context


class LastStage:
    """To be called within `undisturbed`."""

    def __init__(self, pipeline: StagesOfRank, stage: Stage) -> None:
        self._pipeline, self._stage = pipeline, stage
        self._drawn = torch.Generator().manual_seed(0)
        exact = torch.get_float32_matmul_precision() == "highest"
        self.fewer_bits = not exact or any(map(_is_low, stage.module.parameters()))
        """Whether something was computed with fewer than float32 has."""

    def states(
        self, first: Mapping[str, Any], both: Mapping[str, Any], rows: int, tokens: int
    ) -> tuple[list[Tensor], list[int | None]]:
        """Draw what the stage before might send for `both`; and the dimension along which two microbatches have it."""
        pipeline, index = self._pipeline, self._stage.slice.index - 1
        states, places = [], []
        sent = zip(pipeline.parts.sent(index, both, 2 * rows, tokens), pipeline.parts.sent(index, first, rows, tokens))
        for form, half in sent:
            drawn = torch.randn(form.shape, generator=self._drawn).to(pipeline.device, form.dtype)
            states.append(drawn)
            places.append(next((dim for dim, (a, b) in enumerate(zip(form.shape, half.shape)) if a != b), None))
        return states, places

    def gradients(
        self, microbatch: Mapping[str, Any], states: Sequence[Tensor], context: LossCalls
    ) -> tuple[list[Tensor], Tensor]:
        """Compute the gradients of the loss of `microbatch` with respect to the hidden states, and the loss, 0-dim."""
        forward, alone = self._stage.forward, _Alone(context)
        before = forward.microbatches, forward.shares
        forward.microbatches, forward.shares = [microbatch], alone
        leaves = [state.detach().requires_grad_() for state in states]
        scale = 2.0 ** min(14, leaves[0][..., 0].numel().bit_length())  # or float16 has no gradients of a mean
        try:
            with put_back(self._stage.module):  # or a schedule in the model would go on
                loss = self._stage.module(*leaves, microbatch=torch.tensor([0])).sum()
            given = torch.autograd.grad(loss * scale, leaves, allow_unused=True) if loss.requires_grad else leaves
        finally:
            forward.microbatches, forward.shares = before
        if alone.autocast or any(map(_is_low, (*leaves, loss))):
            self.fewer_bits = True
        if not loss.requires_grad:
            return [torch.zeros_like(leaf) for leaf in leaves], _whole(loss)
        found = (torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, given))
        return [(grad.float() if _is_low(grad) else grad) / scale for grad in found], _whole(loss)

    @contextlib.contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Within it, the last stage is called without its layers and without dropout; afterwards it is as it was."""
        pipeline, stage = self._pipeline, self._stage
        modules = dict(bare_modules(stage.module))
        training = stage.module.training
        devices = [pipeline.device] if pipeline.device.type == "cuda" else []
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(torch.random.fork_rng(devices))
            ModuleWorld(stage.module).restore(stack)
            stack.enter_context(evaluating(stage.module))
            stage.module.training = training  # a model may return a loss in training alone
            for index in stage.slice.layers:
                passing = pipeline.parts.passing(index)
                if passing is not None:
                    stack.enter_context(answering_calls(modules[pipeline.parts.layers[index]], passing))
            for parts in pipeline.sequence_parts():
                stack.callback(setattr, parts, "verifying", parts.verifying)
                parts.verifying = "whole"
            yield


def _whole(loss: Tensor) -> Tensor:
    value = loss.detach()
    return (value.full_tensor() if isinstance(value, DTensor) else value).double()


def _is_low(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.element_size() < 4
