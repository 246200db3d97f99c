"""A Llama as one of torchtitan's tensor-parallel ranks has it, on the meta device.

After ``apply_tp`` of its ``parallelize_llama.py``: the sum of the embedding goes out cut along the sequence; residuals and
norms stay so, down to the last norm; attention, MLP and head gather what they read; the logits stay cut by vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
