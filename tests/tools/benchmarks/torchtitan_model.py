"""A Llama as one of torchtitan's tensor- and context-parallel ranks has it, on the meta device.

After ``apply_tp`` of its ``parallelize_llama.py``: the sum of the embedding goes out cut along the sequence; residuals and
norms stay so, down to the last norm; attention, MLP and head gather what they read; the logits stay cut by vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, parallelize_module

from nemo_like.fake.model_copy import copy_on_meta
from nemo_like.fake.ranks import fake_mesh


def tensor_parallel_rank(model: nn.Module, tp: int) -> nn.Module:
    """`model` itself for one rank; else a copy, split by torch's styles on ranks that are not there."""
    if tp == 1:
        return model
    part, (ranks, mesh) = copy_on_meta(model), fake_mesh(tp=tp)
    inner: Any = part.get_submodule("model")
    part_of_sequence, whole, vocabulary = Shard(1), Replicate(), Shard(-1)
    owner = {
        "input_kwarg_layouts": {"hidden_states": part_of_sequence},
        "desired_input_kwarg_layouts": {"hidden_states": whole},
    }
    ends = {
        "model.embed_tokens": RowwiseParallel(input_layouts=whole, output_layouts=part_of_sequence),
        "lm_head": ColwiseParallel(input_layouts=part_of_sequence, output_layouts=vocabulary, use_local_output=False),
    }
    layer = {
        "self_attn": PrepareModuleInput(**owner),
        "mlp": PrepareModuleInput(input_layouts=(part_of_sequence,), desired_input_layouts=(whole,)),
        **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
        **{f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")},
        **{name: RowwiseParallel(output_layouts=part_of_sequence) for name in ("self_attn.o_proj", "mlp.down_proj")},
    }
    with ranks:
        parallelize_module(part, mesh, ends, src_data_rank=None)
        for each in inner.layers:
            parallelize_module(each, mesh, layer, src_data_rank=None)
    for name in ends:
        _where_its_weight_is(part.get_submodule(name))
    # On the other stages it says how long a sequence is, and nothing of it is used.
    inner.embed_tokens.register_forward_hook(
        lambda module, _, out: None if isinstance(module.weight, DTensor) else out.chunk(tp, 1)[0]
    )
    inner.rotary_emb.register_forward_pre_hook(_positions_of_all(tp), with_kwargs=True)
    return part


def with_ring(model: nn.Module, cp: int) -> nn.Module:
    """`model`, whose attentions take the memory of a ring over `cp` ranks beside their own; changed by hooks alone."""
    if cp > 1:
        inner: Any = model.get_submodule("model")
        for layer in inner.layers:
            layer.self_attn.o_proj.register_forward_pre_hook(
                lambda _module, args: (_Ring.apply(args[0], cp), *args[1:]), prepend=True
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


def _where_its_weight_is(module: nn.Module) -> None:
    """Have the styles of `module` act on the stage of a pipeline that has its weight."""

    def guarded(hook: Callable[..., Any]) -> Callable[..., Any]:
        return lambda module, *given: hook(module, *given) if isinstance(module.weight, DTensor) else None

    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        hooks.update({key: guarded(hook) for key, hook in hooks.items()})


def _positions_of_all(tp: int) -> Callable[..., Any]:
    """The model counts positions of what it hands on, which is one rank's part; attention sees all."""

    def hook(_module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        if "position_ids" in kwargs:
            return args, kwargs | {"position_ids": kwargs["position_ids"].repeat(1, tp)}
        return (args[0], args[1].repeat(1, tp), *args[2:]), kwargs

    return hook
