"""Random training loops on random small models: the bare model to the bit, or an error; no third outcome."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nemo_like import apply_activation_checkpointing
from tests.models.loops import Action, LoopModel, differences, loops, models, run_loop

MODES = ("full", "selective", "submodule", "sequential")


def outcome_of(kinds: tuple[str, ...], actions: list[Action], mode: str) -> str:
    """``same``, ``error`` (of the checkpointed model alone) or ``both`` raise; anything else fails."""
    torch.manual_seed(1)
    bare = LoopModel(kinds)
    wrapped = LoopModel(kinds)
    wrapped.load_state_dict(bare.state_dict())
    apply_activation_checkpointing(wrapped, mode)
    expected, actual = run_loop(bare, actions), run_loop(wrapped, actions)
    assert differences(expected, actual) == [], (kinds, actions, mode, actual.error)
    if expected.error is not None:
        assert actual.error is not None, f"the bare model raised {expected.error!r}, and {mode} trained on"
        return "both"
    return "same" if actual.error is None else "error"


@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(models, loops, st.sampled_from(MODES))
def test_a_random_loop_trains_the_bare_model_or_raises(
    kinds: tuple[str, ...], actions: list[Action], mode: str
) -> None:
    outcome_of(kinds, actions, mode)


@pytest.mark.long
@settings(max_examples=5000, deadline=None, suppress_health_check=list(HealthCheck))
@given(models, loops, st.sampled_from(MODES))
def test_many_random_loops(kinds: tuple[str, ...], actions: list[Action], mode: str) -> None:
    outcome_of(kinds, actions, mode)
