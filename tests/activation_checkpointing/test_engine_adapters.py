"""The engine without the private names of torch that it uses where they are there."""

import pytest
import torch

from nemo_like import torch_compat
from nemo_like.activation_checkpointing.engine import checkpoint_region
from nemo_like.activation_checkpointing.engine.errors import RegionError
from nemo_like.activation_checkpointing.policy import FullPolicy, SelectivePolicy
from tests.models.blocks import LlamaBlock, NewBytes, assert_bitwise, gradients, region

ABSENT = [
    name
    for name in (
        "_make_saved_tensor",
        "_keep_graph",
        "_graph_task",
        "_functorch_level",
        "_get_priority",
        "_set_priority",
        "_mode_stack",
        "_mode_depth",
    )
    if getattr(torch_compat, name) is not None
]


@pytest.fixture(params=[*ABSENT, "all"])
def absent(request, monkeypatch):
    for name in ABSENT if request.param == "all" else [request.param]:
        monkeypatch.setattr(torch_compat, name, None)


@pytest.mark.parametrize("policy", [FullPolicy(), SelectivePolicy()], ids=["full", "selective"])
def test_gradients_memory_and_errors_are_the_same(absent, policy):
    torch.manual_seed(0)
    block, x = LlamaBlock(32), torch.randn(1, 8, 32)
    assert_bitwise(gradients(region(block, policy), block, x), gradients(block, block, x))
    x.requires_grad_()
    (wanted,) = torch.autograd.grad(block(x).sum(), x)
    with NewBytes(x, wanted, *block.parameters()) as live:
        loss = checkpoint_region(block, x, policy=policy).sum()
        for retain in (True, False):
            (got,) = torch.autograd.grad(loss, x, retain_graph=retain)
            assert torch.equal(got, wanted)
        del loss, got
        assert live.count() == 0
    h = x * 1
    loss = checkpoint_region(block, h, policy=policy).sum()
    h.add_(1)
    with pytest.raises(RegionError, match="inputs was changed in place"):
        loss.backward()
