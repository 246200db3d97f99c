"""How close plans come to the proven optimum at any budget, and the ends of frontiers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from nemo_like import Job
from nemo_like.options import MemoryBudget, Precision, StepSpec
from nemo_like.planning.answers.within import choose
from nemo_like.planning.devices import resolve_device
from nemo_like.planning.query import PlanQuery
from tests.planning.brute_force import all_best, least_cost_of_two
from tests.planning.queries import part_of, saved

hf = pytest.importorskip("transformers", reason="needs the extra 'hf'")

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
    "mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(
        hidden_size=512, intermediate_size=1792, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2,
        vocab_size=64,
    )),
}  # fmt: skip


def _query(name: str, **setup: Any) -> PlanQuery:
    with torch.device("meta"):
        model = FAMILIES[name]().train()
    ids = torch.zeros(1, LENGTH, dtype=torch.long)
    return PlanQuery.of(
        model,
        {"input_ids": ids},
        Job.of(
            step=StepSpec(loss_fn=lambda out: out[0].float().sum()),
            precision=Precision("bf16"),
            world_size=2,
            **setup,
            gpu=resolve_device("h100-80gb"),
        ),
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_plan_is_within_half_a_per_cent_of_a_brute_force_at_32_budgets(name: str) -> None:
    """Two layers together, in shares of one forward pass."""
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
            [(0, problem.full().replay_seconds), *(p for p in all_best(problem.ops()) if p[0] < none[0]), none]
        )
    worst = 0.0
    for step in range(32):
        budget = least + (most - least) * step // 32
        choices, _ = choose(query, MemoryBudget(fraction=(budget + 1) / most))
        assert saved(query, choices) <= budget + 1
        cost = sum(choice.replay_seconds for choice in choices[0])
        worst = max(worst, (cost - least_cost_of_two(*points, budget - inputs)) / forward)
    assert worst <= 0.005


@pytest.mark.parametrize("name", FAMILIES)
def test_the_first_choice_holds_what_full_holds(name: str) -> None:
    (stage,) = _query(name).stages
    for kind, problem in enumerate(stage.part.problems):
        frontier = stage.part.frontier(kind, skip=stage.skip, host=stage.host)
        assert frontier[0].held_bytes == problem.full().held_bytes == problem.trace.input_bytes
