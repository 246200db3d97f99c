"""The planner's solver against brute force, plans against the proven optimum, and the last size within a limit."""

import itertools
import random
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from nemo_like import Job
from nemo_like.options import MemoryBudget, Precision, StepSpec
from nemo_like.planning.devices import resolve_device
from nemo_like.planning.predictions.budget_search import choose, last_within
from nemo_like.planning.query import PlanQuery
from nemo_like.planning.selection import solver
from nemo_like.planning.selection.layer import BlockProblem
from nemo_like.planning.selection.solver import Op
from tests.planning.brute_force import all_best, at_budget, least_cost_of_two
from tests.planning.queries import part_of, saved

hf = pytest.importorskip("transformers")


@st.composite
def blocks(draw, most=9):
    """Random DAGs of ops with few distinct sizes, so that ties and dominated choices occur."""
    n = draw(st.integers(1, most))
    ops = []
    for i in range(n):
        reads = tuple(sorted(draw(st.sets(st.integers(0, i - 1), max_size=2)))) if i else ()
        forced = draw(st.sampled_from([None] * 6 + ["save", "replay"]))
        ops.append(
            Op(
                bytes=draw(st.integers(0, 8)), cost=float(draw(st.integers(0, 9))), reads=reads,
                needed=draw(st.booleans()), keepable=draw(st.integers(0, 5)) > 0 or forced == "save", forced=forced,
            )
        )  # fmt: skip
    return ops


def choices(ops):
    """All valid keep masks with their bytes."""
    for bits in itertools.product((0, 1), repeat=len(ops)):
        if all(
            (bit == 1) if op.forced == "save" else (bit == 0 or (op.keepable and op.forced is None))
            for bit, op in zip(bits, ops)
        ):
            yield sum(b << i for i, b in enumerate(bits)), sum(op.bytes for b, op in zip(bits, ops) if b)


@settings(max_examples=120, deadline=None)
@given(blocks())
def test_linear_frontier_is_brute_force(ops):
    points = solver.closure_every(solver.without_skips(ops))
    everything = [(kept, sum(op.cost for i, op in enumerate(ops) if not keep >> i & 1)) for keep, kept in choices(ops)]
    for budget in range(max(b for b, _ in everything) + 2):
        fitting = [cost for kept, cost in everything if kept <= budget]
        best = at_budget(points, budget)
        assert (best is None) == (not fitting)
        if best is not None:
            assert best.cost == min(fitting)
            assert best.bytes <= budget
            assert best.bytes == sum(op.bytes for i, op in enumerate(ops) if best.keep >> i & 1)
    costs = [p.cost for p in points]
    assert costs == sorted(costs, reverse=True), "more bytes never cost more time"


@settings(max_examples=60, deadline=None)
@given(blocks(most=7))
def test_closure_every_is_brute_force(ops):
    everything = [(kept, solver.closure_replay(ops, keep)[0]) for keep, kept in choices(ops)]
    points = solver.closure_every(ops)
    for budget in range(sum(op.bytes for op in ops) + 1):
        fitting = [cost for kept, cost in everything if kept <= budget]
        best = at_budget(points, budget)
        assert (best is None) == (not fitting)
        assert best is None or best.cost == pytest.approx(min(fitting), abs=1e-9)  # float sums in another order


def test_a_thinned_sweep_with_skips_has_the_ends_of_the_whole_one():
    random.seed(1)
    ops = [
        Op(
            random.randrange(1, 10**6),
            float(random.randrange(1, 10**6)),
            (i - 1, max(0, i - 3)) if i else (),
            i % 2 == 0,
        )
        for i in range(24)
    ]
    whole, thinned = solver.closure_every(ops), solver.closure_every(ops, max_states=128)
    assert len(thinned) < len(whole)
    assert (thinned[0].bytes, thinned[-1].cost) == (whole[0].bytes, whole[-1].cost)
    for point in thinned:
        best = at_budget(whole, point.bytes)
        assert best is not None and best.cost <= point.cost <= 1.2 * best.cost


def test_a_block_of_many_branches_at_a_time_is_swept_without_skips():
    """Each of 24 branches has an op in every step: any set of their outputs may be required."""
    width = 24
    ops = [Op(1 + i % 5, 1.0 + i % 7, (i - width,) if i >= width else (), i >= 2 * width) for i in range(3 * width)]
    linear = solver.closure_every(solver.without_skips(ops))
    points = solver.closure_every(ops, max_states=4096)
    assert points[-1].cost == 0
    assert all(at_budget(points, point.bytes).cost <= point.cost for point in linear)


@settings(max_examples=60, deadline=None)
@given(blocks(), st.integers(0, 511))
def test_closure_replay_runs_exactly_what_is_read(ops, mask):
    keep = sum(1 << i for i, op in enumerate(ops) if mask >> i & 1 and op.keepable and op.forced is None)
    cost, skip = solver.closure_replay(ops, keep)
    decisions = solver.Point(0, cost, keep, skip).decisions(len(ops))
    for i, op in enumerate(ops):
        if decisions[i] == "recompute":
            assert all(decisions[j] != "skip" for j in op.reads), "a replayed op reads a skipped one"
            read = any(i in ops[k].reads and decisions[k] == "recompute" for k in range(i + 1, len(ops)))
            assert op.needed or op.forced == "replay" or read, "an op is replayed that nobody reads"
        if decisions[i] == "skip":
            assert not op.needed and op.forced != "replay"


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12).map(float)), min_size=1, max_size=4),
            st.integers(0, 3),
        ),
        min_size=1,
        max_size=3,
    )
)
def test_mixes_are_the_best_of_two_points_of_a_kind(kinds):
    """The judge tries every way to give the layers of each kind two points."""
    mixes = solver.path(kinds)
    layers = [
        [pick for pick in itertools.combinations_with_replacement(points, count) if len(set(pick)) <= 2]
        for points, count in kinds
    ]
    every = [tuple(itertools.chain(*picks)) for picks in itertools.product(*layers)]
    everything = [(sum(b for b, _ in pick), sum(c for _, c in pick)) for pick in every]
    for budget in range(0, max(b for b, _ in everything) + 3, 2):
        fitting = [c for b, c in everything if b <= budget]
        inside = [m for m in mixes if m.bytes <= budget]
        assert bool(fitting) == bool(inside)
        if fitting and len(kinds) == 1:
            assert min(m.cost for m in inside) == min(fitting)
    assert [m.bytes for m in mixes] == sorted(m.bytes for m in mixes)
    assert [m.cost for m in mixes] == sorted((m.cost for m in mixes), reverse=True)
    for mix in mixes:
        assert [sum(c) for c in mix.counts] == [count for _, count in kinds]
        assert all(sum(map(bool, c)) <= 2 for c in mix.counts)
        spent = sum(n * points[i][0] for (points, _), c in zip(kinds, mix.counts) for i, n in enumerate(c))
        assert spent == mix.bytes and (mix.bytes, pytest.approx(mix.cost)) in everything


def test_mixes_of_several_kinds_stay_close_to_the_linear_relaxation():
    """The bound: at most this much is saved by any mix, of any number of points."""
    random.seed(0)
    points = sorted({(b, 1000.0 / (1 + b)) for b in random.sample(range(10_000), 30)})
    kinds = [(points, 126), (points[::3], 40)]
    mixes = solver.path(kinds)
    ends = [solver.hull(points) for points, _ in kinds]
    steps = sorted(((c1 - c0) / (b1 - b0), b1 - b0, n) for hull, (_, n) in zip(ends, kinds)
                   for (b0, c0), (b1, c1) in itertools.pairwise(hull))  # fmt: skip
    for share in (0.2, 0.5, 0.8):
        budget = mixes[0].bytes + share * (mixes[-1].bytes - mixes[0].bytes)
        left, bound = budget - mixes[0].bytes, mixes[0].cost
        for slope, size, count in steps:
            taken = min(left, size * count)
            bound, left = bound + slope * taken, left - taken
        assert bound <= min(m.cost for m in mixes if m.bytes <= budget) <= bound * 1.02


LENGTH = 512
FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(
        hidden_size=1024, intermediate_size=3584, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2,
        vocab_size=64,
    )),
    "gemma3": lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(
        hidden_size=640, intermediate_size=2560, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=160, vocab_size=64, layer_types=["full_attention"] * 2,
    )),
    "t5": lambda: hf.T5EncoderModel(hf.T5Config(d_model=512, d_ff=2048, num_layers=2, num_heads=8, vocab_size=64)),
    "llama3": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=1, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=64,
    )),
    "mixtral-8x7b": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(num_hidden_layers=1, vocab_size=64)),
    "mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(
        hidden_size=512, intermediate_size=1792, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2,
        vocab_size=64,
    )),
}  # fmt: skip


SMALL = ("llama", "gemma3", "t5", "mixtral")


def _query(name: str, length: int = LENGTH, **setup: Any) -> PlanQuery:
    with torch.device("meta"):
        model = FAMILIES[name]().train()
    return PlanQuery.from_model(
        model,
        {"input_ids": torch.zeros(1, length, dtype=torch.long)},
        Job.of(
            step=StepSpec(loss_fn=lambda out: out[0].float().sum()),
            precision=Precision("bf16"),
            world_size=2,
            **setup,
            gpu=resolve_device("h100-80gb"),
        ),
    )


def _named(problem: BlockProblem) -> list[Op]:
    """The operators of a block, of which those without a name are never kept."""
    names = {k for k, record in enumerate(problem.records) if "statistics" in record.names} | set(problem.titles)
    return [replace(op, keepable=op.keepable and k in names) for k, op in enumerate(problem.ops())]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", SMALL)
def test_a_plan_is_within_half_a_per_cent_of_a_brute_force_at_32_budgets(name: str) -> None:
    """Two layers together, of all lists of names; in shares of one forward pass."""
    query = _query(name)
    part = part_of(query)
    problems = [part.problems[call.kind] for call in part.traced.calls]
    forward = sum(problem.forward_seconds for problem in problems)
    inputs = part.traced.shared_bytes + sum(problem.trace.input_bytes for problem in problems)
    least, most = (saved(query, query.uniform(mode)) for mode in ("full", "none"))
    points = []
    for problem in problems:
        none = problem.none().held_bytes - problem.trace.input_bytes, 0.0
        points.append(
            [(0, problem.full().recompute_seconds), *(p for p in all_best(_named(problem)) if p[0] < none[0]), none]
        )
    worst = 0.0
    for step in range(32):
        budget = least + (most - least) * step // 32
        choices = choose(query, MemoryBudget(fraction=(budget + 1) / most))
        assert saved(query, choices) <= budget + 1
        cost = sum(choice.recompute_seconds for choice in choices[0])
        worst = max(worst, (cost - least_cost_of_two(*points, budget - inputs)) / forward)
    assert worst <= 0.005


@pytest.mark.parametrize("name", ["llama3", "mixtral-8x7b"])
@pytest.mark.parametrize(("attention", "share_of_a_step"), [("flash", 0.007), (None, 0.0075)])
def test_two_lists_of_names_cost_a_step_little_beside_any_plan(
    name: str, attention: str | None, share_of_a_step: float
) -> None:
    """The judge: the linear relaxation of all points that a brute force over single operators finds, which no mix of any
    number of tables is below. A step takes three forwards at least; it is shorter with cuDNN's attention."""
    query = _query(name, 8192, attention=attention)
    (problem,) = part_of(query).problems
    inputs, none = problem.trace.input_bytes, problem.none().held_bytes
    points = [(inputs + b, c) for b, c in all_best(problem.ops()) if inputs + b < none] + [(none, 0.0)]
    every = solver.hull(points)
    mixes = solver.path([([(c.held_bytes, c.recompute_seconds) for c in problem.frontier()], 32)])
    for share in (0.75, 0.5, 0.25, 0.125):
        budget = share * 32 * none
        mine = min(mix.cost for mix in mixes if mix.bytes <= budget)
        (b0, c0), (b1, c1) = next(pair for pair in itertools.pairwise(every) if pair[1][0] > budget / 32)
        bound = 32 * (c0 + (c1 - c0) * (budget / 32 - b0) / (b1 - b0))
        assert 0 <= (mine - bound) / (32 * 3 * problem.forward_seconds) <= share_of_a_step


@pytest.mark.parametrize("name", SMALL)
def test_the_first_choice_holds_what_full_holds(name: str) -> None:
    (stage,) = _query(name).stages
    for kind, problem in enumerate(stage.part.problems):
        frontier = stage.part.problems[kind].frontier(skip=stage.skip, host=stage.host)
        assert frontier[0].held_bytes == problem.full().held_bytes == problem.trace.input_bytes


@pytest.mark.parametrize("noise", [0, 5, 1000])
def test_what_bisection_finds_is_found_in_fewer_steps(noise):
    draw, asked, steps = random.Random(noise), [], 0
    for count in [0, 1, 2, 3, 700] * 20:
        about = list(accumulate(draw.randint(1, 50) for _ in range(count)))
        sizes = sorted(1000 + held + draw.randint(0, noise) for held in about)
        limit = draw.randint(900, 1100 + 26 * count)

        def size(at, sizes=sizes, asked=asked):
            asked.append(at)
            return sizes[at]

        assert last_within(limit, size, about) == bisect_right(sizes, limit) - 1
        assert len(set(asked)) == len(asked)  # nothing is asked twice
        steps, asked = steps + len(asked) * (count == 700), []
    assert noise > 5 or steps <= 20 * 5  # bisection takes ten
