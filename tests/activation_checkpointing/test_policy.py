"""Policies as objects, and `CheckpointSpec`: what they decide and refuse, combinations with regions, and who wraps."""

import gc
import json
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint
from torch.utils.flop_counter import FlopCounterMode

import nemo_like
from nemo_like import CheckpointConfig, SelectivePolicy, parallelize
from nemo_like._util.forwards import step_of
from nemo_like._util.live_bytes import LiveBytes
from nemo_like.activation_checkpointing import (
    CheckpointSpec,
    DecisionTable,
    FullPolicy,
    Policy,
    apply_specs,
    is_checkpointed,
)
from nemo_like.activation_checkpointing.contexts import make_selective_checkpoint_context_fn
from nemo_like.activation_checkpointing.policy import HOST, RECOMPUTE, SAVE, SKIP, TorchPolicy, named_ops_policy
from nemo_like.activation_checkpointing.sequential import SegmentMember
from nemo_like.activation_checkpointing.spec import one_region_each, segments_of
from nemo_like.activation_checkpointing.transfer import SynchronousTransfer
from nemo_like.offload import HostPolicy, Offloading
from tests.checks import assert_bitwise, gradients_of, refused_unchanged
from tests.models.blocks import (
    LlamaBlock,
    NotingTransfer,
    Operators,
    RouterBlock,
    checkpoint_region,
    gradients,
    region,
    without_collector,
)
from tests.models.decoders import PlainDecoder, batch, build, loss_of

aten = torch.ops.aten


def decisions(policy, *ops):
    decide, counts, out = policy.start(), {}, []
    for op in ops:
        out.append(decide(op, counts.get(op, 0)))
        counts[op] = counts.get(op, 0) + 1
    return out


def test_matmuls_of_all_plain_kinds_share_one_count():
    got = decisions(SelectivePolicy(), aten.mm.default, aten.linear.default, aten._grouped_mm.default, aten.mm.default)
    assert got == [SAVE, RECOMPUTE, SAVE, RECOMPUTE]


def test_two_regions_in_flight_count_apart():
    policy = SelectivePolicy()
    one, two = policy.start(), policy.start()
    assert [one(aten.mm.default, 0), two(aten.mm.default, 0), one(aten.mm.default, 1)] == [SAVE, SAVE, RECOMPUTE]


@pytest.mark.parametrize(("every", "wanted"), [(None, "SSSS"), (1, "RRRR"), (2, "SRSR"), (3, "SSRS")])
def test_every_nth(every, wanted):
    got = decisions(SelectivePolicy(every_nth_matmul=every), *[aten.mm.default] * 4)
    assert "".join(decision.name[0] for decision in got) == wanted


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({"every_nth_matmul": every}, "every_nth_matmul") for every in (0, -1, 1.5, True, "2")),
        ({"extra": ["aten.view.default"]}, r"can't keep aten\.view\.default"),
        ({"extra": [aten.empty.memory_format]}, r"can't keep aten\.empty\.memory_format"),
    ],
)
def test_what_no_policy_can_do_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        SelectivePolicy(**options)


def test_the_set_can_grow_shrink_and_be_replaced():
    assert decisions(SelectivePolicy(extra=["aten.gelu.default"]), aten.gelu.default) == [SAVE]
    assert decisions(SelectivePolicy(drop=[aten.topk]), aten.topk.default) == [RECOMPUTE]
    named = named_ops_policy(["torch.ops.aten.mm.default"])
    assert decisions(named, aten.mm.default, aten.mm.default, aten.addmm.default) == [SAVE, SAVE, RECOMPUTE]

    class Mine(SelectivePolicy):
        def get_save_ops(self):
            return super().get_save_ops() | {aten.exp.default}

    assert decisions(Mine(), aten.exp.default, aten.mm.default) == [SAVE, SAVE]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"aten.mm": [SAVE]}, "overloads; name one"),
        ({"aten.mn.default": [SAVE]}, "is not an operator"),
        ({"aten.mm.default": ["keep"]}, "is not a decision"),
        ({"aten.native_dropout.default": [SKIP]}, "draws random numbers"),
        ({"aten.topk.default": [RECOMPUTE]}, "must not run twice"),
        ({"aten.topk.default": [SKIP]}, "must not run twice"),
        ({"aten.t.default": [SAVE]}, "always runs again"),
        ({"aten.add_.Tensor": [SAVE]}, "always runs again"),
    ],
)
def test_impossible_tables_are_refused_when_they_are_made(table, message):
    with pytest.raises(ValueError, match=message):
        DecisionTable(table)


def test_a_table_survives_json():
    table = DecisionTable({"aten.mm.default": [SAVE, RECOMPUTE, HOST, SKIP], aten.topk.default: ["save"]})
    again = DecisionTable.from_json(json.loads(json.dumps(table.to_json())))
    assert again == table and hash(again) == hash(table)
    assert again != DecisionTable({"aten.mm.default": [SAVE]})
    assert table.to_json() == {"aten.mm.default": ["save", "recompute", "host", "skip"], "aten.topk.default": ["save"]}


def test_policies_can_be_pickled():
    extra = (op for op in [aten.gelu.default, "aten.exp.default"])
    policy = SelectivePolicy(every_nth_matmul=3, extra=extra, drop=[aten.topk])
    again = pickle.loads(pickle.dumps(policy))
    assert again.every_nth_matmul == 3 and set(again.tracked_ops()) == set(policy.tracked_ops())
    assert {aten.gelu.default, aten.exp.default} <= set(
        again.tracked_ops()
    ) and aten.topk.default not in again.tracked_ops()
    table = DecisionTable({"aten.mm.default": [SAVE, RECOMPUTE]})
    assert pickle.loads(pickle.dumps(table)) == table


def test_a_table_keeps_routing_without_being_asked():
    # Known failure 2: a replayed top-k may route other tokens.
    block, x = RouterBlock(), torch.randn(2, 3, 16)
    table = DecisionTable({"aten._softmax.default": [RECOMPUTE]})
    assert_bitwise(gradients(region(block, table), block, x), gradients(block, block, x))
    with Operators() as calls:
        checkpoint_region(block, x.requires_grad_(), policy=table).sum().backward()
    assert calls.ops.count(aten.topk.default) == 1 < calls.ops.count(aten._softmax.default)


def test_a_function_made_for_pytorchs_contexts_is_followed_offloading_included():
    # Known failure 35: PyTorch's eager contexts recompute what they are told to offload.
    asked, transfer = [], NotingTransfer()

    def policy_fn(context, op, *args, **kwargs):
        asked.append((op, context.is_recompute, context.op_output is not None))
        if op is aten.mm.default:
            return CheckpointPolicy.MUST_CPU_OFFLOAD
        return op is aten._scaled_dot_product_flash_attention_for_cpu.default

    block, x = LlamaBlock(32), torch.randn(1, 8, 32)
    policy = TorchPolicy(policy_fn)
    assert_bitwise(gradients(region(block, policy, transfer=transfer), block, x), gradients(block, block, x))
    assert sum(move > 0 for move in transfer.moves) == 7
    assert not any(recompute for _, recompute, _ in asked) and all(output for _, _, output in asked)
    assert aten.view.default not in {op for op, _, _ in asked}
    with Operators() as calls:
        checkpoint_region(block, x.clone().requires_grad_(), policy=policy).sum().backward()
    with Operators() as plain:
        block(x.clone().requires_grad_()).sum().backward()
    for op in (aten.mm.default, aten._scaled_dot_product_flash_attention_for_cpu.default):
        assert calls.ops.count(op) == plain.ops.count(op) > 0  # nothing was computed again


def test_a_counting_function_is_made_anew_for_each_region():
    def make():
        count = 0

        def policy_fn(context, op, *args, **kwargs):
            nonlocal count
            count += op is aten.mm.default
            return op is aten.mm.default and count % 2 == 1

        return policy_fn

    block, x = LlamaBlock(32), torch.randn(1, 8, 32)
    run = region(block, TorchPolicy(make, make=True))
    both = lambda call: lambda t: call(call(t))  # noqa: E731
    assert_bitwise(gradients(both(run), block, x), gradients(both(block), block, x))


def test_a_policy_function_that_returns_something_else():
    with pytest.raises(TypeError, match="needs a function"):
        TorchPolicy("mm")
    wrong = TorchPolicy(lambda *a, **k: "save")
    with pytest.raises(TypeError, match="returned 'save' for"):
        checkpoint_region(torch.exp, torch.ones(1, requires_grad=True), policy=wrong)


# --- our policies behind torch.utils.checkpoint -------------------------------------------------------------------------


def test_context_fn_drives_pytorchs_checkpoint():
    torch.manual_seed(0)
    block, x = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(3)), nn.Tanh()), torch.randn(64, 512)
    context_fn = make_selective_checkpoint_context_fn()
    run = lambda t: checkpoint(block, t, use_reentrant=False, context_fn=context_fn)  # noqa: E731
    assert_bitwise(gradients(run, block, x), gradients(block, block, x))
    assert_bitwise(gradients(lambda t: run(run(t)), block, x), gradients(lambda t: block(block(t)), block, x))
    out = run(x.clone().requires_grad_()).sum()
    with FlopCounterMode(display=False) as counter:
        out.backward()
    assert counter.get_total_flops() == (6 + 1) * 2 * 64 * 512 * 512  # three matmuls twice, and the second one again


def test_context_fn_counts_tracked_operators_only_and_survives_in_place_routing():
    block, x, calls = RouterBlock(), torch.randn(2, 3, 16), []

    def fn(t):
        calls.append(1)
        if len(calls) % 2 == 0:
            torch.zeros(2).exp()
        return block(t)

    context_fn = make_selective_checkpoint_context_fn()
    run = lambda t: checkpoint(fn, t, use_reentrant=False, context_fn=context_fn)  # noqa: E731
    assert_bitwise(gradients(run, block, x), gradients(block, block, x))


BLOCKS = ["blocks.0", "blocks.1", "blocks.2"]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (dict(members=()), "at least one module"),
        (dict(members="blocks.0"), "at least one module"),
        (dict(members=("a", "a")), "names a module twice"),
        (dict(members=("a",), calls=0), "calls is 0"),
        (dict(members=("a",), policy=None), "recomputes nothing"),
        (dict(members=("a", "b"), policy=None, transfer=SynchronousTransfer()), "recomputes nothing"),
        (dict(members=("a", "b"), use_reentrant=True), "only a region of one call"),
        (dict(members=("a",), use_reentrant=True, policy=SelectivePolicy()), "keeps tensors inside a"),
    ],
)
def test_a_spec_that_makes_no_sense_cannot_be_written(fields: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        CheckpointSpec(**fields)


def test_specs_that_do_not_fit_the_model_change_nothing() -> None:
    model = PlainDecoder()
    for specs, kind, says in (
        (one_region_each(["blocks.0", "block.1"]), ValueError, "Did you mean 'blocks.1'"),
        (one_region_each(BLOCKS) + segments_of(BLOCKS, 1), ValueError, "is in two regions"),
        (one_region_each(["blocks.0"]) + [CheckpointSpec(("head",), policy=None, transfer=SynchronousTransfer())],
         TypeError, "moves the tensors that a policy keeps"),
    ):  # fmt: skip
        with refused_unchanged(model, says, kind):
            apply_specs(model, specs)
    with refused_unchanged(model, "torch cannot compile it"):
        apply_specs(model, [CheckpointSpec(("blocks.0",), use_reentrant=True)], compile=True)
    apply_specs(model, one_region_each(BLOCKS))
    with pytest.raises(TypeError, match="already checkpointed"):
        apply_specs(model, one_region_each(BLOCKS))


def _step(model: nn.Module) -> tuple[int, list[torch.Tensor]]:
    torch.manual_seed(3)
    with LiveBytes() as live:
        loss = loss_of(model, batch(2))
        held = live.live
    loss.backward()
    return held, [p.grad for p in model.parameters()]


@pytest.mark.parametrize("name", ["plain", "llama", "mixtral"])
@pytest.mark.parametrize("strategy", ["sequential", "submodule"])
def test_a_policy_goes_with_every_region(strategy: str, name: str) -> None:
    held, grads = {}, {}
    for policy in ("none", None, SelectivePolicy(every_nth_matmul=None)):
        own = {} if policy == "none" else {"strategy": strategy, "policy": policy}
        config = CheckpointConfig(enabled=policy != "none", profile_before_apply=False, **own)
        held[str(policy)], grads[str(policy)] = _step(parallelize(build(name), "single", config))
    none, nothing, expensive = held
    assert held[nothing] < held[expensive] < held[none]
    assert_bitwise(list(grads.values()), [grads[none]] * 3)


@pytest.mark.parametrize(("segments", "policy"), [(1, SelectivePolicy()), (2, FullPolicy())])
def test_segments_keep_what_their_policy_says_over_several_calls_and_backwards(segments: int, policy: Policy) -> None:
    plain, model = build("plain"), build("plain")
    apply_specs(model, segments_of(BLOCKS, segments, policy=policy))
    assert sum(isinstance(block.forward, SegmentMember) for block in model.blocks) == 4 - segments  # one alone is no member
    for m in (plain, model):
        torch.manual_seed(0)
        first, second = loss_of(m, batch(2, seed=4)), loss_of(m, batch(3, seed=5))
        first.backward(retain_graph=True)
        first.backward()
        second.backward()
    assert_bitwise(gradients_of(model), gradients_of(plain))


def test_a_segment_that_is_never_finished_leaves_nothing_behind() -> None:
    model = build("plain").eval()
    apply_specs(model, segments_of(BLOCKS, 1, policy=SelectivePolicy()))
    gc.collect()
    with without_collector():
        out = model.blocks[0](torch.randn(1, 4, 32, requires_grad=True))  # the other members are not called
        region = model.blocks[0].forward._segment._open
        assert region() is not None
        del out
        assert region() is None


def test_place_is_a_part_of_the_spec() -> None:
    model = parallelize(build("plain"), "single", "selective", offload=nemo_like.OffloadConfig("saved", min_bytes=0))
    first, last = model.blocks[0], model.blocks[2]
    assert step_of(first, Offloading) and not step_of(last, Offloading)
    region = first.forward.inner
    assert isinstance(region.policy, HostPolicy) and region.transfer is first.forward.offloader
    assert repr(first.forward) == "PlainBlock (offloaded, selective)" and is_checkpointed(last)
    assert not isinstance(last.forward.policy, HostPolicy)
