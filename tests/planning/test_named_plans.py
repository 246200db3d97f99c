"""Lists of names in plans: the bytes that the engine keeps, and a plan's lists, read again, as its tables.

The judge of bytes is a real forward, whose saved outputs are counted by their storages.
"""

import json
import random
from typing import Any

import pytest

from nemo_like import (
    ContextParallel,
    ExpertParallel,
    Job,
    PipelineParallel,
    Plan,
    PlanSearch,
    TensorParallel,
    parallelize,
    plan_for,
)
from nemo_like._util.tensors import split_sample, tensors_in
from nemo_like.activation_checkpointing.engine import region
from nemo_like.activation_checkpointing.plan import layer_globs
from nemo_like.options import NamedList, NamedLists, StepSpec, parse_ac
from nemo_like.planning.planner import choices_under, describe
from nemo_like.planning.predict import predict
from nemo_like.planning.query import PlanQuery
from tests.models.families import FAMILIES, loss_of

STEP = StepSpec(loss_fn=lambda out: loss_of(out))


def _names(problem: Any) -> list[str]:
    """Names of all outputs of a block that something may keep."""
    ops = problem.ops()
    kept = (r.names for k, r in enumerate(problem.records[: problem.reachable]) if ops[k].keepable and not ops[k].forced)
    return sorted({name for names in kept for name in names})


OTHERS = ("gpt2", "mixtral", "t5", "vit", "deepseek_v3", "mamba2", "module_list")


@pytest.mark.parametrize("name", ["llama", *(pytest.param(name, marks=pytest.mark.long) for name in OTHERS)])
def test_the_engine_keeps_the_predicted_bytes_of_20_random_lists(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family = FAMILIES[name]
    sample = dict(family.inputs())
    query = PlanQuery.from_model(family.build(), sample, Job.of(gpu="cpu", ac="none", step=STEP))
    part, draw = query.stages[0].part, random.Random(name)
    names = sorted({each for problem in part.problems for each in _names(problem)})
    held: list[int] = []
    drop = region.Region.drop_unreachable

    def note(self: Any) -> None:
        drop(self)
        kept = [t for entry in self.kept if entry.decision.value == "save" for t in tensors_in(entry.value)]
        held.append(sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}.values()))

    monkeypatch.setattr(region.Region, "drop_unreachable", note)
    for _ in range(20):
        asked = NamedLists((NamedList(save=tuple(draw.sample(names, draw.randint(1, min(6, len(names)))))),))
        choices = query.stages[0].by_names(asked)
        model = parallelize(family.build(), "single", ac=asked, precision=None)
        for _ in range(2):
            held.clear()
            loss_of(model(*split_sample(sample)[0], **split_sample(sample)[1])).backward()
        predicted = [
            choice.held_bytes - part.problems[call.kind].trace.input_bytes
            for call, choice in zip(part.traced.calls, choices)
            if choice.decisions
        ]
        assert held == predicted, (name, asked.words)


@pytest.mark.parametrize(
    ("model", "budget", "options"),
    [
        ("llama-tiny", "50%", {}),
        ("llama-tiny", "25%", {"tp": TensorParallel(2, sequence_parallel=True)}),
        ("llama-tiny", "60%", {"cp": 2}),
        ("llama-tiny", "40%", {"cp": ContextParallel(2, "ulysses")}),
        ("llama-tiny", "30%", {"pp": PipelineParallel(2, "1f1b", 2)}),
        ("mixtral-tiny", "50%", {}),
        ("mixtral-tiny", "40%", {"ep": ExpertParallel(2)}),
        ("llama-tiny", "20%", {"search": PlanSearch(host=True)}),
        ("llama-tiny", "75%", {"precision": "bf16"}),
        ("llama-tiny", '{"save": ["mlp.up_proj"], "budget": "50%"}', {}),
    ],
)
def test_the_lists_of_a_plan_read_again_give_its_tables(model: str, budget: str, options: dict[str, Any]) -> None:
    from nemo_like.models import resolve_model

    source = resolve_model(model)
    job = Job.of(**{"gpu": "h100-80gb", "world_size": 4, "ac": budget, "precision": None, **options})
    query = PlanQuery.from_model(source.build("meta"), source.sample_input(2, 64), job)
    choices = choices_under(query)
    assert choices is not None
    plan = describe(query, choices, budget)
    assert plan.lists is not None
    again = choices_under(query, parse_ac(json.loads(json.dumps(plan.lists.words))))
    assert again == choices
    assert describe(query, again, budget).policies() == plan.policies()
    for kind in {call.kind for stage in query.stages for call in stage.part.traced.calls}:
        for stage, each in zip(query.stages, choices):
            assert len({c for call, c in zip(stage.part.traced.calls, each) if call.kind == kind}) <= 2
    if "budget" in budget:
        assert all(each.recompute == () or "mlp.up_proj" in each.save for each in plan.lists.lists)


def test_a_saved_plan_has_its_tables_and_its_lists(tmp_path: Any) -> None:
    report = predict("llama-tiny", gpu="h100-80gb", gpus=2, seq_len=64, rows=["30%"])
    row = report.rows[-1]
    row.plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again == row.plan and again.lists == row.plan.lists is not None
    assert [each.decisions for each in again.layers] == [each.decisions for each in row.plan.layers]
    assert report.to_dict()["rows"][-1]["lists"] == row.plan.lists.words


def test_named_rows_are_predicted_as_they_are_written() -> None:
    lists = '{"save": ["attention"], "offload": ["mlp.up_proj"]}'
    report = predict("llama-tiny", gpu="h100-80gb", gpus=2, seq_len=64, rows=[lists])
    row = report.rows[-1]
    layers, tokens = 4, 64
    assert row.ac == lists and row.host_bytes == layers * tokens * 384 * 2  # bfloat16
    assert "ac={'save': ['attention'], 'offload': ['mlp.up_proj']}" in report.call(row)
    full = next(row for row in report.rows if row.ac == "full")
    assert row.plan.held_bytes > full.plan.held_bytes


def test_names_that_a_model_does_not_have_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'mlp.upproj', which these layers do not have.*Did you mean 'mlp.up_proj'"):
        predict("llama-tiny", gpus=1, seq_len=64, rows=['{"save": ["mlp.upproj"]}'])
    with pytest.raises(ValueError, match="a plan needs a budget"):
        plan_for(FAMILIES["llama"].build(), ac="full", sample_input=FAMILIES["llama"].inputs())


def test_globs_of_layers_are_exact() -> None:
    names = [f"model.layers.{n}" for n in (0, 1, 2, 5, 7, 8, 12)]
    assert layer_globs(names) == ["model.layers.[0-2]", "model.layers.5", "model.layers.[7-8]", "model.layers.12"]
