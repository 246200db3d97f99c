"""Experts on other ranks and replay: what is sent again, counted; and the same gradients, bit for bit, whatever is kept."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from nemo_like import parallelize
from nemo_like.activation_checkpointing.policy import HOST, RECOMPUTE, SAVE, DecisionTable, SelectivePolicy
from nemo_like.torch_compat import fsdp_param_groups, in_backward
from tests.checks import assert_bitwise, gradients_of
from tests.models.expert_families import build, tokens
from tests_distributed.counting import CountCollectives, CountOps
from tests_distributed.spawn import on_ranks

LAYERS = 2
ROUTE, ROWS = "route", "exchange_rows"


def _table(first: Any, second: Any) -> DecisionTable:
    """What becomes of a layer's two exchanges: of the tokens, and of the experts' results."""
    return DecisionTable({f"nemo_like.{ROWS}.default": (first, second)})


# Mode → all-to-alls of rows in replay, per layer. Forward has two, and backward's own two are those of the gradients.
IN_REPLAY: dict[str, tuple[Any, int]] = {
    "none": ("none", 0),
    "full": ("full", 2),
    "selective": ("selective", 0),
    "submodule": ("submodule", 2),
    "sequential": ("sequential", 2),
    "selective, exchanged again": (SelectivePolicy(drop=["nemo_like.exchange_rows.default"]), 2),
    "kept, and nothing else": (SelectivePolicy(None, save_ops=["nemo_like.exchange_rows.default"]), 0),
    "results kept": (_table(RECOMPUTE, SAVE), 1),
    "on the host": (_table(HOST, HOST), 0),
    "tokens on the host": (_table(HOST, RECOMPUTE), 1),
    "a plan that keeps both": (_table(SAVE, SAVE), 0),
    "a budget that keeps one": ("40%", 1),
    "a budget that keeps none": ("6%", 2),
}


DRAWN = {"router_jitter_noise": 0.3, "attention_dropout": 0.2}


def _step(model: nn.Module, ids: torch.Tensor) -> tuple[Counter[str], Counter[str]]:
    torch.manual_seed(7)  # jitter and dropout
    with CountOps("nemo_like") as forward:
        loss = model(input_ids=ids, labels=ids).loss
    with CountOps("nemo_like") as backward, CountOps("aten") as aten:
        loss.backward()
    # Forward waits for the device in `route`, once a layer; a replay, in which these would be looks at its values, never.
    assert not {"_local_scalar_dense", "nonzero", "_unique2"} & set(aten.counts)
    return forward.counts, backward.counts


@pytest.mark.compat
@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("changes", "brink", "modes"),
    [
        (DRAWN, False, ("none", "results kept", "a budget that keeps one")),
        ({}, True, ("none", "full", "tokens on the host")),
        (DRAWN, False, tuple(IN_REPLAY)),
        ({}, True, tuple(IN_REPLAY)),
    ],
)
@on_ranks(2, timeout=120)
def test_exchanges_of_each_mode(
    rank: int, world_size: int, changes: dict[str, Any], brink: bool, modes: tuple[str, ...]
) -> None:
    ids = tokens(world_size)[rank : rank + 1]
    plain: dict[str, torch.Tensor] = {}
    for said in modes:
        ac, again = IN_REPLAY[said]
        model = build("mixtral", **changes)
        if brink:
            for layer in model.model.layers:
                layer.mlp.gate.weight.data.zero_()  # equal probabilities, which any rounding would tip over
        sample = {"input_ids": ids, "labels": ids} if "%" in str(ac) else None
        model = parallelize(model, ac=ac, ep=2, device="cpu", sample_input=sample)
        forward, backward = _step(model, ids)
        assert forward == {ROUTE: LAYERS, ROWS: 2 * LAYERS}, said
        assert backward == {ROWS: (2 + again) * LAYERS}, said  # routing is never done twice
        found = gradients_of(model)
        plain = plain or found
        assert_bitwise(found, plain, said)


@pytest.mark.few(1)
@pytest.mark.parametrize("modes", [("selective",), ("none", "full")])
@on_ranks(4)
def test_a_replay_gathers_no_experts_twice(rank: int, world_size: int, modes: tuple[str, ...]) -> None:
    """Units: root, tail, two layers, and the experts of each; the last layer and the root are not freed after forward."""
    ids = tokens(world_size)[rank : rank + 1]
    for ac in modes:
        model = parallelize(build("mixtral"), ac=ac, ep=2, device="cpu")
        with CountCollectives() as forward:
            loss = model(input_ids=ids, labels=ids).loss
        with CountCollectives() as backward:
            loss.backward()
        assert (forward.gathers, backward.gathers) == (6, 3), ac


@on_ranks(4)
def test_replay_lets_go_of_what_experts_were_gathered_into(rank: int, world_size: int) -> None:
    ids = tokens(world_size)[rank : rank + 1]
    # Its shared experts come first in backward and start the replay, so that it is the replay that gathers the others.
    model = parallelize(build("glm4_moe"), ac="full", ep=2, device="cpu")
    experts = model.model.layers[1].mlp.experts
    held: list[tuple[bool, bool]] = []

    def holds() -> bool:
        (group,) = fsdp_param_groups(experts)
        return group.comm_ctx.all_gather_state is not None

    forward = experts.act_fn.forward  # not a hook, which a recomputation leaves out
    experts.act_fn.forward = lambda x: (forward(x), held.append((in_backward(), holds())))[0]
    _step(model, ids)
    # Forward holds the flat buffer till another unit is gathered; behind a replay there may be none before the next step.
    assert held == [(False, True), (True, False)]
    assert not holds()
