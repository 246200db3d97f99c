"""`CheckpointSpec` and `apply_specs`: what a spec may say, combinations of region and policy, and who wraps."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import nemo_like
from nemo_like import CheckpointConfig, SelectivePolicy, parallelize
from nemo_like._util.live_bytes import LiveBytes
from nemo_like.activation_checkpointing import CheckpointSpec, CheckpointWrapper, FullPolicy, Policy, apply_specs
from nemo_like.activation_checkpointing.sequential import SegmentMember
from nemo_like.activation_checkpointing.spec import one_region_each, segments_of
from nemo_like.activation_checkpointing.transfer import SynchronousTransfer
from nemo_like.offload import HostPolicy, OffloadWrapper
from tests.checks import assert_bitwise, gradients_of
from tests.models.decoders import PlainDecoder, batch, build, loss_of

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
    before = dict(model.named_modules())
    for specs, kind, says in (
        (one_region_each(["blocks.0", "block.1"]), ValueError, "Did you mean 'blocks.1'"),
        (one_region_each(BLOCKS) + segments_of(BLOCKS, 1), ValueError, "is in two regions"),
        (one_region_each(["blocks.0"]) + [CheckpointSpec(("head",), policy=None, transfer=SynchronousTransfer())],
         TypeError, "moves what a policy keeps"),
    ):  # fmt: skip
        with pytest.raises(kind, match=says):
            apply_specs(model, specs)
        assert dict(model.named_modules()) == before
    with pytest.raises(ValueError, match="torch cannot compile it"):
        apply_specs(model, [CheckpointSpec(("blocks.0",), use_reentrant=True)], compile=True)
    assert dict(model.named_modules()) == before
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
        model = parallelize(build(name), "single", config)
        held[str(policy)], grads[str(policy)] = _step(model)
    none, nothing, expensive = held
    assert held[nothing] < held[expensive] < held[none]
    assert_bitwise(list(grads.values()), [grads[none]] * 3)


@pytest.mark.parametrize(("segments", "policy"), [(1, SelectivePolicy()), (2, FullPolicy())])
def test_segments_keep_what_their_policy_says_over_several_calls_and_backwards(segments: int, policy: Policy) -> None:
    plain, model = build("plain"), build("plain")
    apply_specs(model, segments_of(BLOCKS, segments, policy=policy))
    assert sum(isinstance(block, SegmentMember) for block in model.blocks) == 4 - segments  # one alone is no member
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
    gc.disable()
    try:
        out = model.blocks[0](torch.randn(1, 4, 32, requires_grad=True))  # the other members are not called
        region = model.blocks[0]._segment._open
        assert region() is not None
        del out
        assert region() is None
    finally:
        gc.enable()


def test_place_is_a_part_of_the_spec() -> None:
    model = parallelize(build("plain"), "single", "selective", offload=nemo_like.OffloadConfig("saved", min_bytes=0))
    first, last = model.blocks[0], model.blocks[2]
    assert isinstance(first, OffloadWrapper) and not isinstance(last, OffloadWrapper)
    inside = first._checkpoint_wrapped_module
    assert isinstance(inside, CheckpointWrapper) and isinstance(inside.policy, HostPolicy)
    assert inside.transfer is first.offloader and not isinstance(last.policy, HostPolicy)
