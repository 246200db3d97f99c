"""Experts of models without transformers: of fused weights, by their own forward; with weights in common; or in a list."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from nemo_like import parallelize
from nemo_like.distributed import clip_grad_norm_, get_model_state, materialize, set_model_state
from nemo_like.distributed.expert.split_experts import find_experts
from nemo_like.options import ExpertParallel, PipelineParallel, TensorParallel
from nemo_like.planning.planner import plan_for
from tests.checks import assert_near, on_meta, refused_unchanged, same, step
from tests.models.blocks import Layer
from tests_distributed.expert.whole_gradients import assert_trains
from tests_distributed.small_model import WIDTH, SmallModel, tokens
from tests_distributed.spawn import on_ranks, run_ranks

COUNT = 4
PLAN = {"layers.*.pool": "routed"}


class Weights(nn.Module):
    """Experts with names and biases of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(COUNT, *s) / 4) for s in ((WIDTH, 24), (24, WIDTH)))
        self.bias = nn.Parameter(torch.randn(COUNT, WIDTH) / 4)
        self.n_experts = COUNT

    def each(self, rows: Tensor, number: int) -> Tensor:
        return F.gelu(rows @ self.first[number]) @ self.second[number] + self.bias[number]


class Routed(Weights):
    """(N, D), (N, k), (N, k) to (N, D)."""

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(tokens)
        for number in range(self.n_experts):
            rows, places = (chosen == number).nonzero(as_tuple=True)
            out = out.index_add(0, rows, self.each(tokens[rows], number) * weights[rows, places, None])
        return out


class Every(Weights):
    """(experts * N, D) to the same; a row of zeros gives the bias, so none can be left out."""

    def forward(self, tokens: Tensor) -> Tensor:
        rows = tokens.view(self.n_experts, -1, WIDTH)
        return torch.stack([self.each(row, number) for number, row in enumerate(rows)]).view(-1, WIDTH)


class Scaled(nn.Module):
    """Experts with a norm, a scale and a bias in common, which every rank has, and a buffer that has a row for each.

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


def _routed(block: Any, x: Tensor) -> Tensor:
    flat = block.norm(x).flatten(0, 1)
    probabilities = block.router(flat).softmax(-1)
    if isinstance(block.pool, Every):
        rows = flat.repeat(COUNT, 1) * probabilities.T.reshape(-1, 1)
        return x + block.pool(rows).view(COUNT, *x.shape).sum(0)
    weights, chosen = probabilities.topk(2)
    return x + block.pool(flat, chosen, weights).view_as(x)


def _model(kind: type[nn.Module]) -> SmallModel:
    return SmallModel(
        lambda: Layer(_routed, norm=nn.LayerNorm(WIDTH), router=nn.Linear(WIDTH, COUNT), pool=kind())
    )


def test_found_by_structure_or_by_name() -> None:
    for kind, call in ((Routed, "routed"), (Every, "every")):
        model = _model(kind)
        for found in (find_experts(model), find_experts(model, {"layers.*.pool": call})):
            assert [(e.fqn, e.count, e.call) for e in found] == [(f"layers.{i}.pool", COUNT, call) for i in (0, 1)]
            assert found[0].parameters == ("first", "second", "bias")
    found = find_experts(_model(Scaled), PLAN)
    assert [each.parameters for each in found] == [("gate_up_proj", "down_proj")] * 2, "an expert's own alone"


@pytest.mark.few(1)
@pytest.mark.parametrize("ranks", [2, 4])
@on_ranks(timeout=90)
def test_experts_of_a_plain_model(rank: int, ranks: int) -> None:
    ids = tokens(ranks)
    for kind, call in ((Routed, "routed"), (Every, "every")):
        plan = ExpertParallel(2, plan={"layers.*.pool": call})
        ways = [{"ac": ac, "ep": ep} for ac in ("none", "full", "selective") for ep in (2, plan)]
        assert_trains(partial(_model, kind), step(_model(kind), ids), {"ids": ids[rank : rank + 1]}, *ways)


LAYOUTS: dict[int, tuple[dict[str, Any], ...]] = {
    2: ({"ep": 2},),
    4: ({"ep": 2}, {"ep": 4}, {"ep": 2, "dp_replicate": 2}, {"ep": 2, "tp": 2}, {"ep": 4, "tp": 2}),
}


def _trained(rank: int, world_size: int) -> None:
    for options in LAYOUTS[world_size]:
        tp = options.get("tp", 1)
        ids = tokens(world_size // tp)
        wanted = step(_model(Scaled), ids)
        given = options | {"ep": ExpertParallel(options["ep"], plan=PLAN)}
        if tp > 1:
            given["tp"] = TensorParallel(tp, plan={"head": "colwise_gather_output"})
        ways = [{"ac": ac, **given} for ac in ("none", "full", "selective")]
        model = assert_trains(partial(_model, Scaled), wanted, {"ids": ids[rank // tp : rank // tp + 1]}, *ways)
        norm = clip_grad_norm_(model, 1e9)
        whole = torch.stack([grad.norm() for name, grad in wanted.items() if name != "loss"]).norm()
        assert abs(norm - whole) <= 1e-5 * whole, options
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor)
            axes = parameter.device_mesh.mesh_dim_names
            assert ("ep" in axes) == name.endswith(("gate_up_proj", "down_proj")), (options, name, axes)


def _on_two_ranks(rank: int, world_size: int, folder: str) -> None:
    _trained(rank, world_size)
    model = parallelize(_model(Scaled), ep=ExpertParallel(2, plan=PLAN), device="cpu")
    dcp.save(get_model_state(model), checkpoint_id=folder)


def _on_four_ranks(rank: int, world_size: int, folder: str) -> None:
    _trained(rank, world_size)
    bare = _model(Scaled).state_dict()
    model = parallelize(on_meta(_model, Scaled), ac="full", ep=ExpertParallel(4, plan=PLAN), device="cpu")
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


CALLED: dict[str, Tensor] = {}


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, rows: Tensor) -> Tensor:
        return self.down(self.up(rows).relu())


class Mixture(nn.Module):
    """Each token goes to the expert of its own number; those from `COUNT` on to none."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Expert() for _ in range(COUNT))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        out = flat.clone()
        for number in sorted(set(CALLED["ids"].tolist()) & set(range(COUNT))):
            rows = torch.where(CALLED["ids"] == number)[0]
            out.index_add_(0, rows, self.experts[number](flat[rows]))
        return out.view_as(x)


class ListModel(SmallModel):
    def __init__(self) -> None:
        super().__init__(Mixture)

    def forward(self, ids: Tensor) -> Tensor:
        CALLED["ids"] = ids.flatten()
        return super().forward(ids)


# Of each rank's tokens: no rank has all experts, and none has expert 3.
ROWS = torch.tensor([[0, 1, 9, 9], [2, 2, 2, 2]])


@on_ranks(2)
def test_experts_that_get_no_token_on_some_ranks(rank: int, world_size: int) -> None:
    wanted = step(ListModel(), ROWS)
    for options in ({"strategy": "fsdp2"}, {"strategy": "ddp"}):
        for ac in ("none", "full"):
            model = parallelize(ListModel(), ac=ac, device="cpu", **options)
            for _ in range(2):  # twice: DDP complains in the second forward
                found = step(model, ROWS[rank : rank + 1])
            found = {name.removeprefix("module."): grad for name, grad in found.items()} | {"loss": wanted["loss"]}
            assert_near(found, wanted, where=(options, ac), least=1e-8)


@on_ranks(2)
def test_ep_refuses_lists_before_any_change(rank: int, world_size: int) -> None:
    reason = (
        r"'layers\.0\.experts' are a ModuleList of 4 modules Expert\..*from_pretrained\(\) of transformers 5 or newer"
    )
    for plan in (None, {"layers.*.experts": "routed"}):
        model = ListModel()
        with refused_unchanged(model, reason):
            parallelize(model, ep=ExpertParallel(2, plan=plan), device="cpu")


@pytest.mark.parametrize("ways", [{"ep": 2}, {"ep": 2, "pp": PipelineParallel(2, loss_mean="rows")}])
def test_plans_refuse_lists(ways: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Convert it to fused experts"):
        plan_for(ListModel(), ac="50%", sample_input=tokens(2), world_size=4, **ways)


class ListRouted(Mixture):
    def forward(self, x: Tensor) -> Tensor:
        for number in x.sum(-1).long().unique().tolist():
            x = x + self.experts[number % COUNT](x)
        return x


def test_budgets_without_ep_say_that_rows_are_not_known() -> None:
    with pytest.raises(ValueError, match=r"decides in Python how many rows each gets.*convert it to fused experts"):
        plan_for(SmallModel(ListRouted), ac="50%", sample_input=tokens(2), world_size=2)
