"""What a trace says, in exact numbers, and the command that prints it."""

import json

import pytest
import torch
from torch import nn

from nemo_like._util.live_bytes import LiveBytes
from nemo_like.activation_checkpointing.op_trace import table_of, trace_regions
from nemo_like.activation_checkpointing.policy import RECOMPUTE, SAVE, DecisionTable, FullPolicy, SelectivePolicy
from nemo_like.cli import main
from tests.models.blocks import LlamaBlock, checkpoint_region

UNIT = 2 * 8 * 16 * 16  # FLOPs of one matmul of 8 rows, 16 -> 16
SIZE = 8 * 16 * 4  # bytes of one activation


def traced(fn, policy, *args):
    with trace_regions() as trace:
        checkpoint_region(fn, *args, policy=policy, name="block")
    (region,) = trace.regions
    return region


def by_decision(region, op="aten.mm.default"):
    return {row.decision: row for row in region.rows() if row.op == op}


def test_three_linears():
    # The third matmul runs after autograd saved its last tensor (that matmul's input): nobody replays it.
    block = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(3)))
    region = traced(block, SelectivePolicy(), torch.randn(8, 16, requires_grad=True))
    rows = by_decision(region)
    assert (rows["SAVE"].count, rows["SAVE"].kept_bytes, rows["SAVE"].flops, rows["SAVE"].read) == (
        2,
        SIZE,
        2 * UNIT,
        1,
    )
    assert "1 not saved after all" in rows["SAVE"].note
    assert (rows["RECOMPUTE"].count, rows["RECOMPUTE"].kept_bytes, rows["RECOMPUTE"].read) == (1, 0, 1)
    assert (region.forward_flops, region.replay_flops, region.full_flops) == (3 * UNIT, UNIT, 2 * UNIT)
    assert (region.kept_bytes, region.none_bytes, region.tokens) == (SIZE, 2 * SIZE, 8)
    totals = table_of(region)["totals"]
    assert totals["none"] == {"bytes": 2 * SIZE, "replay_flops": 0}
    assert totals["full"] == {"bytes": SIZE, "replay_flops": 2 * UNIT}
    assert totals["this policy"] == {"bytes": 2 * SIZE, "replay_flops": UNIT}


def test_it_says_when_a_policy_pays_without_saving():
    w = torch.randn(16, 16, requires_grad=True)

    def fn(x):
        unread = (x @ w).sum()  # feeds only an addition, which saves nothing
        y = (x @ w).tanh()
        return y.sin() + unread

    x = torch.randn(8, 16, requires_grad=True)
    wasted = traced(fn, DecisionTable({"aten.mm.default": [RECOMPUTE, SAVE]}), x)
    assert "1 recomputed that backward doesn't read" in by_decision(wasted)["RECOMPUTE"].note
    unread = traced(fn, DecisionTable({"aten.mm.default": [SAVE, SAVE]}), x)
    assert by_decision(unread)["SAVE"].note == "1 saved that backward doesn't read"
    assert by_decision(unread)["SAVE"].kept_bytes == 2 * SIZE


@pytest.mark.parametrize("policy", [SelectivePolicy(), FullPolicy(), SelectivePolicy(every_nth_matmul=None)])
def test_traced_bytes_are_the_bytes_held(policy):
    block, x = LlamaBlock(32), torch.randn(1, 8, 32, requires_grad=True)
    region = traced(block, policy, x)
    with LiveBytes() as live:
        out = checkpoint_region(block, x, policy=policy)
        assert live.live - out.untyped_storage().nbytes() == region.kept_bytes
    assert region.input_bytes == x.untyped_storage().nbytes()
    stored = set()

    def pack(t):
        stored.add(t.untyped_storage())
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        block(x)
    existing = {t.untyped_storage()._cdata for t in (x, *block.parameters())}
    assert region.none_bytes == sum({s._cdata: s.nbytes() for s in stored if s._cdata not in existing}.values())


def test_tracing_changes_no_gradient_and_ends():
    block, x = LlamaBlock(32), torch.randn(1, 8, 32, requires_grad=True)
    (wanted,) = torch.autograd.grad(block(x).sum(), x)
    with trace_regions() as trace:
        y = checkpoint_region(block, x, policy=SelectivePolicy())
        with pytest.raises(RuntimeError, match="traced already"), trace_regions():
            pass
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], wanted)
    checkpoint_region(block, x, policy=SelectivePolicy())
    assert len(trace.regions) == 1


def test_the_command_prints_a_table_and_json(capsys):
    pytest.importorskip("transformers")
    assert main(["trace", "--seq-len", "16", "--json"]) == 0
    regions = json.loads(capsys.readouterr().out)
    assert sum(region["count"] for region in regions) == len([name for r in regions for name in r["regions"]])
    rows = {(row["op"], row["decision"]): row for row in regions[0]["rows"]}
    assert rows["aten.mm.default", "SAVE"]["count"] == 4 and rows["aten.mm.default", "RECOMPUTE"]["count"] == 3
    totals = regions[0]["totals"]
    assert totals["full"]["bytes"] < totals["this policy"]["bytes"] < totals["none"]["bytes"]
    assert main(["trace", "--seq-len", "16"]) == 0
    text = capsys.readouterr().out
    assert "not saved after all: the recompute stops before it" in text and "this policy" in text


def test_the_command_refuses_what_makes_no_regions(capsys):
    pytest.importorskip("transformers")
    assert main(["trace", "--seq-len", "16", "--ac", "none"]) == 2
    assert "nothing to trace" in capsys.readouterr().err
    assert main(["trace", "--seq-len", "0"]) == 2
