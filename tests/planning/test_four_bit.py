"""Weights in 4 bits: what a layer of them takes, and what a plan says of adapters beside them."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from nemo_like import Job
from nemo_like.cli import main
from nemo_like.options import Precision
from nemo_like.planning.answers.rank import peak_of
from nemo_like.planning.devices import resolve_device
from nemo_like.planning.model.quantised import FourBitLinear, with_four_bit_weights
from nemo_like.planning.query import PlanQuery
from tests.planning.queries import reserved


def _bytes(module: nn.Module) -> int:
    return sum(t.nbytes for t in (*module.parameters(), *module.buffers()))


def test_a_layer_takes_half_a_byte_per_weight_and_its_scales():
    # 1024 x 4096 weights: 2 MiB; 65,536 scales of one byte; 256 of those, and 273 values of tables, in float32.
    layer = FourBitLinear(nn.Linear(4096, 1024, bias=False, device="meta"))
    assert _bytes(layer) == 2 * 2**20 + 65536 + 4 * (256 + 273)


def test_a_layer_takes_what_one_of_bitsandbytes_does():
    bnb = pytest.importorskip("bitsandbytes")
    for rows, columns in ((64, 128), (100, 96), (512, 300)):
        made = bnb.nn.Linear4bit(columns, rows, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4")
        made.load_state_dict(nn.Linear(columns, rows, bias=False).state_dict())
        made = made.to("cpu")
        state = made.weight.quant_state
        parts = (made.weight, state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code)
        assert _bytes(FourBitLinear(nn.Linear(columns, rows, bias=False))) == sum(t.nbytes for t in parts)


class _Adapted(nn.Module):
    """A frozen linear layer with a low-rank one beside it."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.base_layer = nn.Linear(width, width, bias=False).requires_grad_(False)
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.up(self.down(x))


def test_only_frozen_linear_layers_are_packed():
    model = nn.Sequential(_Adapted(64, 4), nn.LayerNorm(64))
    twin = with_four_bit_weights(model)
    assert type(twin[0].base_layer) is FourBitLinear and type(model[0].base_layer) is nn.Linear
    assert twin[0].down.weight is model[0].down.weight
    with pytest.raises(ValueError, match="no frozen linear layer"):
        with_four_bit_weights(nn.Linear(2, 2))


def test_a_plan_with_adapters_beside_packed_weights():
    width, rank, layers = 256, 8, 3
    with torch.device("meta"):
        model = nn.Sequential(*(_Adapted(width, rank) for _ in range(layers)))
    sample = torch.zeros(2, 128, width)
    setup = Job.of(precision=Precision())
    plain, packed = (
        PlanQuery.of(m, sample, setup.change(gpu=resolve_device("a100-80gb"), layers=[str(i) for i in range(layers)]))
        for m in (model, with_four_bit_weights(model))
    )
    before, after = (peak_of(query, query.uniform("none")) for query in (plain, packed))
    adapters = layers * 2 * 4 * width * rank
    assert before.parts["parameters"] == layers * 4 * width**2 + adapters
    each = width**2 // 2 + width**2 // 64 + 4 * (width**2 // 64 // 256 + 273)
    assert after.parts["parameters"] == layers * each + adapters
    assert before.parts["optimizer state"] == after.parts["optimizer state"] == 2 * adapters
    assert reserved(packed, packed.uniform("none")).tensors == after.total


@pytest.mark.long
def test_the_command_plans_qlora(capsys):
    pytest.importorskip("peft")
    args = ["plan", "--model", "llama-tiny", "--seq-len", "64", "--no-what-if", "--json", "-"]
    found = {}
    for name, more in {"whole": [], "lora": ["--lora", "4"], "qlora": ["--lora", "4", "--four-bit"]}.items():
        assert main([*args, *more]) == 0
        found[name] = json.loads(capsys.readouterr().out)["rows"][0]["peak_parts"]
    state = {name: peak["optimizer state"] for name, peak in found.items()}
    params = {name: peak["parameters"] for name, peak in found.items()}
    assert state["lora"] == state["qlora"] < state["whole"] / 10
    assert params["qlora"] < params["lora"] < params["whole"]
    assert main([*args, "--four-bit"]) == 2
    assert "--four-bit keeps frozen weights" in capsys.readouterr().err
