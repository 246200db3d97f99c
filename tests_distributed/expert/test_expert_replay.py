"""Experts on other ranks: how rows travel; what a replay sends again, counted; the same gradients, bit for bit."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nemo_like import parallelize
from nemo_like.activation_checkpointing.policy import HOST, RECOMPUTE, SAVE, DecisionTable, SelectivePolicy
from nemo_like.distributed.context.sequence_ops import name_group
from nemo_like.distributed.expert.exchange import Exchange
from nemo_like.torch_compat import fsdp_param_groups, in_backward
from tests.checks import assert_bitwise, gradients_of
from tests.models.expert_families import build, tokens
from tests_distributed.counting import CountCollectives, CountOps
from tests_distributed.spawn import on_ranks

LAYERS = 2
ROUTE, ROWS = "route", "exchange_rows"


def _table(first: Any, second: Any) -> DecisionTable:
    """What becomes of a layer's exchanges: of tokens and their weights, and of the experts' results."""
    return DecisionTable({f"nemo_like.{ROWS}.default": (first, first, second)})


# Mode → all-to-alls of rows in replay, of both layers. Forward has three in each, and backward's own three are those of the
# gradients. Nothing behind the exchange of results is made again, so that a replay ends before it.
IN_REPLAY: dict[str, tuple[Any, int]] = {
    "none": ("none", 0),
    "full": ("full", 4),
    "selective": ("selective", 0),
    "submodule": ("submodule", 4),
    "sequential": ("sequential", 5),  # the second layer's input comes from the first one's results
    "selective, exchanged again": (SelectivePolicy(drop=["nemo_like.exchange_rows.default"]), 4),
    "kept, and nothing else": (SelectivePolicy(None, save_ops=["nemo_like.exchange_rows.default"]), 0),
    "results kept": (_table(RECOMPUTE, SAVE), 4),
    "on the host": (_table(HOST, HOST), 0),
    "tokens on the host": (_table(HOST, RECOMPUTE), 0),
    "a plan that keeps both": (_table(SAVE, SAVE), 0),
    "a budget that keeps them": ("40%", 0),
    "a budget that keeps none": ("5.6%", 4),  # next to the least there is; at 6 % one is kept
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
        (DRAWN, False, ("none", "results kept", "a budget that keeps them")),
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
        assert forward == {ROUTE: LAYERS, ROWS: 3 * LAYERS}, said
        assert backward == {ROWS: 3 * LAYERS + again}, said  # routing is never done twice
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


EXPERTS, WIDTH = 4, 16


def _through(rank: int, weighted: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Result and gradients of rows that each expert multiplies by its own number, and the same computed here.

    Other numbers of rows on each rank, and the last expert gets none.
    """
    made = torch.Generator().manual_seed(rank)
    rows = torch.randn(5 + 3 * rank, WIDTH, generator=made).requires_grad_()
    weights = torch.rand(len(rows), 2, generator=made).requires_grad_()
    chosen = torch.stack([torch.randperm(3, generator=made)[:2] for _ in rows])
    if not weighted:
        chosen = chosen[:, :1].clone()
        chosen[1] = EXPERTS  # goes to none
    exchange = Exchange(EXPERTS, name_group(torch.distributed.group.WORLD))
    taken, sent = exchange.send(rows, chosen, weights if weighted else None)
    assert taken.shape == (sum(sent.counts), WIDTH)
    assert sent.ends.tolist() == torch.tensor(sent.counts).cumsum(0).tolist()
    first = rank * EXPERTS // 2
    parts = [part * (first + number + 1) for number, part in enumerate(taken.split(sent.counts))]
    out = exchange.bring_back(torch.cat(parts), sent)
    by_hand = torch.tensor([float(1 + number) for number in range(EXPERTS)] + [0.0])[chosen]
    wanted = rows * (by_hand * weights if weighted else by_hand).sum(1, keepdim=True)
    given = torch.randn(out.shape, generator=made)
    leaves = [rows, weights] if weighted else [rows]
    found, expected = ([value, *torch.autograd.grad(value, leaves, given)] for value in (out, wanted))
    ranks = [{int(expert) * 2 // EXPERTS for expert in of_row if expert < EXPERTS} for of_row in chosen]
    assert sum(sent.way[0]) == sum(map(len, ranks)) < chosen.numel()
    return found, expected


@on_ranks(2)
def test_a_token_goes_to_each_rank_once(rank: int, world_size: int) -> None:
    for weighted in (True, False):
        torch.testing.assert_close(*_through(rank, weighted))
