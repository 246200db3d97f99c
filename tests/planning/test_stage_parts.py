"""What a trace says of a cut into stages, and which models it refuses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from nemo_like.distributed.pipeline.dealing import deal, slices
from nemo_like.layers import find_layers
from nemo_like.planning.stage_parts import StageParts, stage_parts
from tests.models.nano_gpt import NanoGPT
from tests.models.tiny import Block, llama, tokens


def _parts(model: nn.Module) -> StageParts:
    return stage_parts(model, find_layers(model), {"ids": tokens()})


def test_a_llama() -> None:
    model = llama()
    parts = stage_parts(model, find_layers(model), {"input_ids": tokens(), "labels": tokens()})
    assert parts.layers == ("model.layers.0", "model.layers.1", "model.layers.2")
    assert parts.before == {"model.embed_tokens.weight"}
    assert parts.after == {"model.norm.weight", "lm_head.weight"}
    assert (parts.tied, parts.forms, parts.hidden_width) == ((), (None, None, None), (32,))
    # 4 x 12 tokens: q, k, v, o of width 32, three matrices of 32 x 64; attention 2 x 12 pairs; multiply-adds are two.
    linears = 2 * 48 * (4 * 32 * 32 + 3 * 32 * 64)
    assert parts.layer_flops == (linears + 4 * 2 * 12 * 12 * 32 * 2,) * 3
    assert (parts.flops_before, parts.flops_after) == (0, 2 * 48 * 32 * 64)


def test_tied_weights_and_positions_in_a_parameter() -> None:
    model = NanoGPT()
    parts = stage_parts(model, find_layers(model), {"input_ids": tokens(), "labels": tokens()})
    assert parts.before == {"wte.weight", "wpe", "lm_head.weight"}  # the two names of one tensor
    assert parts.after == {"wte.weight", "ln_f.weight", "ln_f.bias", "lm_head.weight"}
    assert parts.tied == ("wte.weight",)


class _Odd(nn.Module):
    """Four layers, run by `run`."""

    def __init__(self, run: Callable[[_Odd, Tensor], Tensor]) -> None:
        super().__init__()
        self.embed, self.head, self.scale = nn.Embedding(64, 16), nn.Linear(16, 64), nn.Parameter(torch.ones(16))
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.run = run

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.run(self, self.embed(ids))).sum()


def _with_first(model: _Odd, x: Tensor) -> Tensor:
    first = x
    for layer in model.layers:
        x = layer(x + first)
    return x


def _scaled(model: _Odd, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = layer(x) * model.scale
    return x


def _backwards(model: _Odd, x: Tensor) -> Tensor:
    for layer in reversed(model.layers):
        x = layer(x)
    return x


def _long_skip(model: _Odd, x: Tensor) -> Tensor:
    first = model.layers[0](x)
    x = first
    for layer in list(model.layers)[1:]:
        x = layer(x)
    return x + first


def _early_exit(model: _Odd, x: Tensor) -> Tensor:
    return model.layers[0](x)


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (_with_first, "layers.0 uses a tensor from|layers.1 is not called with|what runs after layers.0 uses a tensor"),
        (_scaled, "layers.1 is not called with what layers.0 returned, and nothing else"),
        (_backwards, "layers.3 is called in what runs before the layers, and not once, in its place"),
        (_long_skip, "what runs after layers.3 uses a tensor from layers.0"),
        (_early_exit, "the forward pass ends in what runs after layers.0"),
    ],
)
def test_what_goes_past_the_hidden_states_is_refused(run: Callable[[_Odd, Tensor], Tensor], reason: str) -> None:
    with pytest.raises(ValueError, match=f"pp cannot cut _Odd into stages: .*({reason})"):
        _parts(_Odd(run))


def test_layers_are_dealt_out_so_that_the_dearest_stage_costs_least() -> None:
    assert deal([1.0] * 6, 3) == [2, 2, 2]
    assert deal([1.0] * 6, 3, first=1.0, last=1.0) == [2, 3, 1] or deal([1.0] * 6, 3, first=1.0, last=1.0) == [1, 3, 2]
    assert deal([1.0, 1.0, 1.0, 9.0], 2) == [3, 1]
    assert deal([1.0] * 7, 4, last=3.0) == [2, 2, 2, 1]
    assert [piece.layers for piece in slices([2, 1])] == [range(2), range(2, 3)]
    with pytest.raises(ValueError, match="2 layers cannot be dealt out to 3 stages"):
        deal([1.0, 1.0], 3)
