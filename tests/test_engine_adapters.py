"""The engine without the private names of torch that it uses where they are there."""

import pytest
import torch

from nemo_like.activation_checkpointing import ambient, torch_private
from nemo_like.activation_checkpointing.engine import checkpoint_region
from nemo_like.activation_checkpointing.errors import RegionError
from nemo_like.activation_checkpointing.policy import FullPolicy, SelectivePolicy
from tests.engine_blocks import LlamaBlock, NewBytes, assert_bitwise, gradients, region

ABSENT = [
    (torch_private, "_make_saved_tensor"),
    (torch_private, "_keep_graph"),
    (torch_private, "_graph_task"),
    (torch_private, "_functorch_level"),
    (ambient, "_get_priority"),
    (ambient, "_set_priority"),
    (ambient, "_mode_stack"),
    (ambient, "_mode_depth"),
]


@pytest.fixture(params=[*ABSENT, ABSENT], ids=[name for _, name in ABSENT] + ["all"])
def absent(request, monkeypatch):
    for module, name in [request.param] if isinstance(request.param, tuple) else request.param:
        assert getattr(module, name) is not None  # this torch has it, or the adapter needs another look
        monkeypatch.setattr(module, name, None)


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
