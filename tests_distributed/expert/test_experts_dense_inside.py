"""Weights inside a module of experts that belong to no single expert: norms, scales, biases that all experts share.

Every rank has them, whatever `ep`; their gradients are summed over all ranks, and they are sharded as the other weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from nemo_like import parallelize
from nemo_like.distributed import clip_grad_norm_, get_model_state, materialize, set_model_state
from nemo_like.distributed.expert import find_experts
from nemo_like.options import ExpertParallel, TensorParallel
from tests.checks import same, step
from tests_distributed.expert.whole_gradients import assert_trains
from tests_distributed.small_model import WIDTH, SmallModel, tokens
from tests_distributed.spawn import run_ranks

COUNT = 4
PLAN = {"layers.*.pool": "routed"}


class Scaled(nn.Module):
    """Experts with a norm, a scale and a bias in common, and a buffer that has a row for each.

    Their names are those of Llama 4's experts; what they compute is not.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(COUNT, WIDTH, 24) / 4)
        self.down_proj = nn.Parameter(torch.randn(COUNT, 12, WIDTH) / 4)
        self.scale, self.bias = nn.Parameter(torch.rand(WIDTH) + 0.5), nn.Parameter(torch.randn(1, WIDTH) / 4)
        self.act_fn, self.norm = nn.SiLU(), nn.LayerNorm(WIDTH)
        self.norm.weight.data.uniform_(0.5, 1.5)
        self.register_buffer("offsets", torch.arange(COUNT * 1.0)[:, None] / COUNT)
        self.num_experts = COUNT

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(tokens)
        for number in range(self.num_experts):
            rows, places = (chosen == number).nonzero(as_tuple=True)
            gate, up = (tokens[rows] @ self.gate_up_proj[number]).chunk(2, -1)
            made = self.norm(self.act_fn(gate) * up @ self.down_proj[number]) * self.scale + self.bias
            out = out.index_add(0, rows, (made + self.offsets[number]) * weights[rows, places, None])
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router, self.pool = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, COUNT), Scaled()

    def forward(self, x: Tensor) -> Tensor:
        flat = self.norm(x).flatten(0, 1)
        weights, chosen = self.router(flat).softmax(-1).topk(2)
        return x + self.pool(flat, chosen, weights).view_as(x)


class Model(SmallModel):
    def __init__(self) -> None:
        super().__init__(Block)


LAYOUTS: dict[int, tuple[dict[str, Any], ...]] = {
    2: ({"ep": 2},),
    4: ({"ep": 2}, {"ep": 4}, {"ep": 2, "dp_replicate": 2}, {"ep": 2, "tp": 2}, {"ep": 4, "tp": 2}),
}


def _trained(rank: int, world_size: int) -> None:
    for options in LAYOUTS[world_size]:
        tp = options.get("tp", 1)
        ids = tokens(world_size // tp)
        wanted = step(Model(), ids)
        given = options | {"ep": ExpertParallel(options["ep"], plan=PLAN)}
        if tp > 1:
            given["tp"] = TensorParallel(tp, plan={"head": "colwise_gather_output"})
        ways = [{"ac": ac, **given} for ac in ("none", "full", "selective")]
        model = assert_trains(Model, wanted, {"ids": ids[rank // tp : rank // tp + 1]}, *ways)
        norm = clip_grad_norm_(model, 1e9)
        whole = torch.stack([grad.norm() for name, grad in wanted.items() if name != "loss"]).norm()
        assert abs(norm - whole) <= 1e-5 * whole, options
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor)
            axes = parameter.device_mesh.mesh_dim_names
            assert ("ep" in axes) == name.endswith(("gate_up_proj", "down_proj")), (options, name, axes)


def test_which_weights_are_an_expert_s_own() -> None:
    found = find_experts(Model(), PLAN)
    assert [(e.fqn, e.count, e.parameters) for e in found] == [
        (f"layers.{i}.pool", COUNT, ("gate_up_proj", "down_proj")) for i in (0, 1)
    ]


def _on_two_ranks(rank: int, world_size: int, folder: str) -> None:
    _trained(rank, world_size)
    model = parallelize(Model(), ep=ExpertParallel(2, plan=PLAN), device="cpu")
    dcp.save(get_model_state(model), checkpoint_id=folder)


def _on_four_ranks(rank: int, world_size: int, folder: str) -> None:
    _trained(rank, world_size)
    bare = Model().state_dict()
    with torch.device("meta"):
        empty = Model()
    model = parallelize(empty, ac="full", ep=ExpertParallel(4, plan=PLAN), device="cpu")
    materialize(model, state_dict={name: value + 1 for name, value in bare.items()})
    state = get_model_state(model)
    dcp.load(state, checkpoint_id=folder)
    set_model_state(model, state)
    found = get_model_state(model, full=True)
    assert rank or same(found, bare)


@pytest.mark.long
def test_what_all_experts_share_is_summed_over_all_ranks_and_saved(tmp_path: Path) -> None:
    run_ranks(2, _on_two_ranks, str(tmp_path), timeout=120)
    run_ranks(4, _on_four_ranks, str(tmp_path), timeout=120)
