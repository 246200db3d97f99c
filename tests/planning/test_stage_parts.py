"""What a trace says of a cut into stages, and which models it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nemo_like.distributed.pipeline.cut import StageParts, cut, deal, slices
from nemo_like.distributed.pipeline.stage_parts import check_stages, stage_parts
from nemo_like.layers import find_layers
from tests.models.families import FAMILIES
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
    with pytest.raises(ValueError, match="2 layers cannot be divided over 3 stages"):
        deal([1.0, 1.0], 3)


def test_a_tower_is_refused_with_the_shapes_that_differ() -> None:
    model = FAMILIES["vit"].build()
    reason = r"returns hidden states of shape \(2, 17, 32\) for a sample of 2 rows and 3 tokens"
    with pytest.raises(ValueError, match=reason):
        stage_parts(model, find_layers(model), dict(FAMILIES["vit"].inputs()))


class _Experts(nn.Module):
    """A block whose experts are a list: each gets the rows that chose it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(16, 4), nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        chosen, out = self.gate(x).argmax(-1), torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            mine = chosen == index
            if mine.any():
                out[mine] = expert(x[mine])
        return x + out


def test_a_list_of_experts_is_refused_without_a_word_of_budgets() -> None:
    model = _Odd(lambda model, x: [x := layer(x) for layer in model.layers][-1])
    model.layers = nn.ModuleList(_Experts() for _ in range(4))
    with pytest.raises(
        ValueError, match=r"_Odd cannot be cut into stages by pp: .*'layers\.0\.experts' is a list"
    ) as error:
        _parts(model)
    assert "budget" not in str(error.value) and "strategy='fsdp2' with tp, cp or ep" in str(error.value)


class _AsksItsLayers(nn.Module):
    """Reads of each layer what kind it is, and of the first one the shape of a weight."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.embed, self.layers, self.head = (
            nn.Embedding(64, 16),
            nn.ModuleList(Block() for _ in range(4)),
            nn.Linear(16, 64),
        )
        for index, layer in enumerate(self.layers):
            layer.kind = index
        self.fails = fails

    def forward(self, ids: Tensor) -> Tensor:
        first: Any = self.layers[0]
        assert first.norm.eps == 1e-5 and first.up.weight.shape == (32, 16)
        x = self.embed(ids)
        for index, layer in enumerate(self.layers):
            assert layer.kind == index
            if self.fails:
                x = x + 0 * next(layer.parameters()).sum()
            x = layer(x)
        return self.head(x).sum()


def test_absent_layers_answer_for_those_that_they_stand_for() -> None:
    model = _AsksItsLayers()
    parts = _parts(model)
    stages = slices([2, 2])
    check_stages(model, parts, stages, {"ids": tokens()})
    tree, _ = cut(model, parts, stages[1], torch.device("cpu"))
    absent = tree.layers[0]  # type: ignore[index, union-attr]
    assert absent.kind == 0 and not list(absent.parameters()) and not absent.state_dict()
    assert not hasattr(absent, "nothing_of_that_name")


def test_a_stage_that_fails_without_the_others_layers_is_refused() -> None:
    model = _AsksItsLayers()
    parts = _parts(model)
    model.fails = True
    with pytest.raises(
        ValueError, match="pp cannot cut _AsksItsLayers into stages: stage 0 of 2 fails without the layers"
    ):
        check_stages(model, parts, slices([2, 2]), {"ids": tokens()})
