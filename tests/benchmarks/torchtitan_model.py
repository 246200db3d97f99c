"""A Llama as one of torchtitan's tensor- and context-parallel ranks has it, on the meta device.

After ``apply_tp`` of its ``parallelize_llama.py``: the sum of the embedding goes out cut along the sequence; residuals and
norms stay so, down to the last norm; attention, MLP and head gather what they read; the logits stay cut by vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from nemo_like.planning.sequence_twin import PlannedCutSum, PlannedWhole
from nemo_like.planning.tensor_twin import known_rules, with_parts


def tensor_parallel_rank(model: nn.Module, tp: int) -> nn.Module:
    """`model` itself for one rank; else a twin. It is changed by hooks alone, so that stages of it can be cut out."""
    if tp == 1:
        return model
    twin = with_parts(model, known_rules(model, tp), tp)
    inner: Any = twin.get_submodule("model")
    _sum_output(inner.embed_tokens, tp)
    inner.rotary_emb.register_forward_pre_hook(_positions_of_all(tp), with_kwargs=True)
    for layer in inner.layers:
        for owner, last in ((layer.self_attn, layer.self_attn.o_proj), (layer.mlp, layer.mlp.down_proj)):
            _gather_input(owner, tp)
            _sum_output(last, tp)
    _gather_input(twin.get_submodule("lm_head"), tp)
    return twin


def with_ring(model: nn.Module, cp: int) -> nn.Module:
    """`model`, whose attentions take the memory of a ring over `cp` ranks beside their own; changed by hooks alone."""
    if cp > 1:
        inner: Any = model.get_submodule("model")
        for layer in inner.layers:
            layer.self_attn.o_proj.register_forward_pre_hook(
                lambda _module, args: (_Ring.apply(args[0], cp), *args[1:])
            )
    return model


class _Ring(torch.autograd.Function):
    """Allocates what ``_templated_ring_attention`` holds when it holds most, and frees it: behind attention, and before its
    backward. Attention itself is traced for the rank's own keys.

    Forward: what is gathered; in float32 the sum so far and the new one, and the output of a block. Backward: what is
    gathered; in float32 the gradients that came from the neighbour, those that go on, and queries' own; in 16 bits a block's
    three gradients, and the copies of output and its gradient that the kernel makes.
    """

    @staticmethod
    def forward(ctx: Any, attended: Tensor, cp: int) -> Tensor:
        ctx.cp = cp
        _hold(attended, 2 * cp, 2, 2, 1)
        return attended.view_as(attended)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        _hold(grads[0], 2 * ctx.cp, 4, 4, 2, 3, 2)
        return grads[0], None


def _hold(like: Tensor, *times: int) -> None:
    """Have as many times the bytes of `like` for a moment: keys and values have twice as many, in float32 four times."""
    held = [like.new_empty(count * like.numel()) for count in times]
    del held


def _sum_output(module: nn.Module, tp: int) -> None:
    module.register_forward_hook(lambda _module, _args, output: PlannedCutSum.apply(output, tp))


def _gather_input(module: nn.Module, tp: int) -> None:
    def hook(_module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        if args:
            return (_whole(args[0], tp), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": _whole(kwargs["hidden_states"], tp)}

    module.register_forward_pre_hook(hook, with_kwargs=True)


def _whole(x: Tensor, tp: int) -> Tensor:
    return PlannedWhole.apply(x, tp, True)


def _positions_of_all(tp: int) -> Callable[..., Any]:
    """The model counts positions of what it hands on, which is one rank's part; attention sees all."""

    def hook(_module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        if "position_ids" in kwargs:
            return args, kwargs | {"position_ids": kwargs["position_ids"].repeat(1, tp)}
        return (args[0], args[1].repeat(1, tp), *args[2:]), kwargs

    return hook
