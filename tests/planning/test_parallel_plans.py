"""Plans for sequences that are cut over ranks, and for experts on other ranks: bytes, seconds on the network."""

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_like import Job
from nemo_like.distributed.context import methods
from nemo_like.distributed.first_rank import first_rank
from nemo_like.fake.run import PlannedRouting, planned_table
from nemo_like.layers import find_layers
from nemo_like.models import resolve_model
from nemo_like.options import FSDP2, ContextParallel, ExpertParallel, MemoryBudget, Precision, TensorParallel, parallel
from nemo_like.planning.devices import resolve_device
from nemo_like.planning.planner import balanced_peak
from nemo_like.planning.predictions.budget_search import choose
from nemo_like.planning.predictions.rank import peak_of
from nemo_like.planning.predictions.seconds import step_seconds
from nemo_like.planning.query import PlanQuery
from nemo_like.planning.report import make_report
from nemo_like.planning.roofline import gather_seconds, group_of
from nemo_like.planning.sharding import ParameterForms, sharding_of
from nemo_like.torch_compat import local_part
from tests.models.expert_families import NAMES, build, tokens
from tests.models.families import FAMILIES
from tests.models.tiny import labelled
from tests.planning.queries import part_of, plan_of, saved

ROWS, LENGTH, WIDTH = 2, 64, 8


def test_no_code_compares_the_word_of_a_method() -> None:
    assert set(methods.METHODS) == set(parallel.CONTEXT_METHODS)
    for path in Path(methods.__file__).parents[2].rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            sides = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
            assert not any(isinstance(side, ast.Attribute) and side.attr == "method" for side in sides), path


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("method", ["all_gather", "ring"])
def test_a_gather_costs_what_a_rank_receives(method: str, ranks: int) -> None:
    """Keys and values once in forward, twice in backward, once more in a recomputation; kernels as of one rank's tokens."""
    device = resolve_device("h100")
    job = Job.of(world_size=ranks, cp=ContextParallel(ranks, method)).change(gpu=device)
    query = PlanQuery.from_model(FAMILIES["llama"].build(), labelled(tokens(ROWS, LENGTH) % 48), job)
    (record,) = (r for r in part_of(query).problems[0].records if r.op.name() == "nemo_like::causal_attention")
    heads, kv_heads = (getattr(part_of(query).model.config, f"num_{of}_heads") for of in ("attention", "key_value"))
    whole = 2 * ROWS * kv_heads * LENGTH * WIDTH * 4
    assert record.gathered == whole and record.flops == 4 * ROWS * heads * LENGTH * LENGTH // 2 // ranks * WIDTH
    layers, once = len(part_of(query).traced.calls), gather_seconds(whole, group_of(ranks, 1, 8), device)
    for mode, times in (("none", 3), ("full", 4)):
        assert step_seconds(query, query.uniform(mode)).parts["sequence gathers"] == pytest.approx(
            layers * times * once
        )


EXCHANGE = "nemo_like.exchange_rows.default"


def test_parameter_bytes_of_deepseek_v3_on_1024_ranks() -> None:
    whole = resolve_model("deepseek-v3").build("meta")
    part, experts = first_rank(whole, TensorParallel(), ExpertParallel(64))
    sharding = sharding_of(
        ParameterForms(part, find_layers(part), whole=False, experts=experts), shard_ranks=1024,
        precision=Precision("bf16"), fsdp=FSDP2(), expert_ranks=16,
    )  # fmt: skip
    # 58 layers of 256 experts: gate, up and down of 7168 x 2048, float32. 4 experts for each of 64, over 16 ranks.
    by_hand = 58 * 256 * 3 * 7168 * 2048 * 4 // 1024
    units = sharding.experts.values()
    assert len(units) == 58 and sum(unit.shard for unit in units) == by_hand
    # A rank gathers the four experts that it computes with, in bfloat16.
    assert {unit.gathered for unit in units} == {4 * 3 * 7168 * 2048 * 2}
    # The rest, by the paper: 671.03 billion in all.
    rest = sum(p.numel() for p in whole.parameters()) * 4 // 1024 - by_hand
    assert sum(p.numel() for p in whole.parameters()) == 671_026_404_352
    assert sharding.params - by_hand - rest == pytest.approx(sharding.padding, abs=4096)


def test_parameters_of_the_presets() -> None:
    """By hand, from the shapes of the papers: per layer attention, norms, router and experts; embedding, head, last norm."""
    mixtral = (
        32 * (2 * 4096**2 + 2 * 4096 * 1024 + 2 * 4096 + 8 * 4096 + 8 * 3 * 4096 * 14_336) + 2 * 32_000 * 4096 + 4096
    )
    qwen = 48 * (2 * 2048 * 4096 + 2 * 2048 * 512 + 2 * 128 + 2 * 2048 + 128 * 2048 + 128 * 3 * 2048 * 768)
    qwen += 2 * 151_936 * 2048 + 2048
    attention = 2880 * (4096 + 2 * 512) + 4096 + 2 * 512 + 4096 * 2880 + 2880 + 64  # with biases and sinks
    experts = 128 * (2880 * 5760 + 5760 + 2880 * 2880 + 2880)
    oss = 36 * (attention + 2 * 2880 + 128 * 2880 + 128 + experts) + 2 * 201_088 * 2880 + 2880
    for name, by_hand in {"mixtral-8x7b": mixtral, "qwen3-30b-a3b": qwen, "gpt-oss-120b": oss}.items():
        assert sum(p.numel() for p in resolve_model(name).build("meta").parameters()) == by_hand, name
    assert (mixtral, qwen, oss) == (46_702_792_704, 30_532_122_624, 116_829_156_672)


def _query(imbalance: float | None, name: str = "mixtral", ep: int = 2, shard_ranks: int = 4, **more: Any) -> PlanQuery:
    sample = labelled(tokens(1, 32))
    setup = Job.of(world_size=shard_ranks, ep=ExpertParallel(ep, imbalance=imbalance), **more)
    return PlanQuery.from_model(build(name, "meta"), sample, setup.change(gpu=resolve_device("h100")))


def test_rows_grow_with_imbalance() -> None:
    # 5 of 6 tokens have an expert on a rank, which has 2 of 4; all of them on one whose experts get twice their share.
    for imbalance, came in ((1.0, 53), (2.0, 64)):
        query = _query(imbalance)
        records = [r for problem in part_of(query).problems for r in problem.records if str(r.op) == EXCHANGE]
        there, weights, back = records  # one kind of layer
        assert (there.bytes, weights.bytes, back.bytes) == (came * 32 * 4, came * 2 * 4, 53 * 32 * 4)
    balanced, default, worst = (saved(_query(i), _query(i).uniform("none")) for i in (1.0, None, 2.0))
    assert balanced < default < worst
    assert default - balanced == pytest.approx(worst - default, rel=0.01)


@pytest.mark.parametrize("ac", ["full", pytest.param("60%", marks=pytest.mark.long)])
def test_a_report_has_the_peak_of_balanced_routers_too(ac: str) -> None:
    query, even = _query(2.0), _query(1.0)
    choices = query.uniform(ac) if ac == "full" else choose(query, MemoryBudget.parse(ac), ac)
    peak = balanced_peak(query, choices)
    assert peak is not None and peak.total < peak_of(query, choices).total
    if ac == "full":
        assert peak == peak_of(even, even.uniform("full"))
        assert balanced_peak(even, even.uniform("full")) is None
        return
    report = make_report(query, ["50%"])
    assert report.best is not None and report.balanced is not None
    assert report.to_dict()["balanced_peak_bytes"] == report.balanced < report.best.plan.peak_bytes
    assert "2 times their share of the tokens" in report.text()


def test_the_table_of_a_plan_adds_up() -> None:
    sent, came, rows = planned_table(10, 2, 6, PlannedRouting(3, 1.5, 1.0)).split([3, 3, 2])
    # A rank with 2 of 6 experts has one of a token's two with 1 - 4/6 * 3/5, the fullest one with 1 - 3/6 * 2/5.
    assert (sent.tolist(), came.tolist(), rows.tolist()) == ([6, 6, 6], [8, 8, 8], [15, 15])


def test_an_exchange_is_kept_or_repeated_at_the_price_of_the_network() -> None:
    query = _query(1.0)
    problem = part_of(query).problems[0]
    seconds = {s for r, s in zip(problem.records, problem.seconds, strict=True) if str(r.op) == EXCHANGE}
    device = resolve_device("h100")
    assert seconds == {53 * 32 * 4 / device.host_link, 53 * 2 * 4 / device.host_link}  # tokens or results, and weights
    full, none = (query.uniform(mode)[0][0] for mode in ("full", "none"))
    assert full.held_bytes < none.held_bytes
    words = dict(zip((str(r.op) for r in problem.records), full.decisions, strict=False))
    assert words[EXCHANGE] == "recompute"
    rows = plan_of(query, MemoryBudget.parse("60%")).layers[0].decisions
    assert rows is not None and set(rows.get(EXCHANGE, ())) <= {"save", "recompute"}


def test_what_says_where_rows_go_is_held_in_every_mode() -> None:
    """As the engine keeps it (`KeepRouting`): 32 tokens choose 2 of 4 experts each, and 1.5 times as many rows come."""
    part = part_of(_query(1.5))
    (full,) = set(part.uniform("full"))
    chosen = 32 * 2 * (4 + 8)  # weights and numbers of the chosen experts
    # Of 53 rows sent and 96 of experts here: the token or slot, and the order; starts of 32 and 64 tokens; ends; the table.
    route = (2 * 53 + 2 * 96 + 32 + 64 + 2) * 4 + (2 * 2 + 2) * 8
    assert full.held_bytes == 32 * 32 * 4 + chosen + route
    assert part.memory(0, full).held == chosen + route
    for choice in part.problems[0].frontier(skip=True):
        kept = {str(r.op) for r, word in zip(part.problems[0].records, choice.decisions) if word == "save"}
        assert not choice.decisions or {"aten.topk.default", "nemo_like.route.default"} <= kept


def test_gradients_of_split_experts_are_added_together() -> None:
    """They are DTensors, whose local parts are taken before anything is computed of them: backward has the gradients of
    both weights at hand until it is through, and only then adds them to those of the microbatch before."""
    part = part_of(_query(1.5))
    (full,) = set(part.uniform("full"))
    first, rest = (part.memory(0, full, accumulate=accumulate) for accumulate in (False, True))
    assert [events.bytes_of(events.param_grads.values()) for events in (first, rest)] == [49_920, 0]
    assert first.backward_peak == rest.backward_peak == 196_144  # 6,144 less, were each added as soon as it is made


@pytest.mark.few(2)
@pytest.mark.parametrize("name", NAMES)
def test_every_family_can_be_planned(name: str) -> None:
    plan = plan_of(_query(None, name), MemoryBudget.parse("50%"))
    assert 0 < plan.held_bytes <= 0.5 * plan.none_bytes + 1


IN_CI = ("mixtral", "llama4")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in IN_CI else pytest.mark.long) for n in NAMES])
def test_families_beside_tp(name: str) -> None:
    """A rank of tp sends half of the tokens that it would send alone, and makes them whole again."""
    alone, beside = (part_of(_query(None, name, tp=tp)) for tp in (1, 2))
    sent = [
        sum(r.bytes for problem in part.problems for r in problem.records if str(r.op) == EXCHANGE)
        for part in (alone, beside)
    ]
    assert sent[1] * 2 == pytest.approx(sent[0], rel=0.02)  # 53 tokens alone, 27 beside tp: whole ones
    whole = [r.bytes for p in beside.problems for r in p.records if str(r.op) == "nemo_like.rows_of_all.default"]
    assert whole and len(set(whole)) == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: _query(3.0), "number of ranks that share the experts, 2"),
        (
            lambda: ExpertParallel(2, imbalance=0.5),
            r"imbalance is 0\.5; it must be a number from 1 \(balanced\) to .*, 2\.",
        ),
        (lambda: _query(1.0, ep=4, shard_ranks=2), "ep is 4, which does not divide the 2 ranks that hold one copy"),
        (lambda: _query(1.0, ep=3, shard_ranks=3), "does not divide the 4 experts"),
    ],
)
def test_what_cannot_be_planned_says_so(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_model_is_not_changed() -> None:
    model = build("mixtral")
    before = {name: (p, p.shape) for name, p in model.named_parameters()}
    part, _ = first_rank(model, TensorParallel(), ExpertParallel(2))
    assert all(model.get_parameter(name) is p and p.shape == shape for name, (p, shape) in before.items())
    assert "forward" not in vars(model.model.layers[0].mlp.experts)
    assert all(p.is_meta for p in part.parameters())
    assert sum(local_part(p).numel() for p in part.parameters()) < sum(p.numel() for p in model.parameters())
    torch.testing.assert_close(part.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)
