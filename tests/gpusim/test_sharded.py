"""FSDP2 and what stands on it on two ranks that have a simulated device each: gloo sends, and streams are checked."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from nemo_like import parallelize
from nemo_like.options import FSDP2, OffloadConfig, parallel
from tests.gpusim import on_devices
from tests.gpusim.test_package import Model


def _gradients(_: Any, jobs: list[dict[str, Any]]) -> list[bool]:
    """Return for each job whether its gradients of three steps are those of the first."""
    parallel.BACKENDS["gpusim"] = "gloo"
    rank = torch.distributed.get_rank()
    found: list[list[torch.Tensor]] = []
    torch.manual_seed(0)
    bare, x = Model().to("gpusim"), torch.randn(8, 16).to("gpusim") * (1 + rank)
    for job in jobs:
        model: nn.Module = parallelize(copy.deepcopy(bare), device="gpusim", **job)
        optimizer, grads = torch.optim.SGD(model.parameters(), lr=0.01), []
        for step in range(3):
            torch.manual_seed(step)
            model(x).square().mean().backward()
            grads += [p.grad.full_tensor().cpu() for p in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
        found.append(grads)
    return [all(map(torch.equal, found[0], grads)) for grads in found]


MOVES = OffloadConfig(mode="all", min_bytes=0, max_inflight_bytes=1)
JOBS = {
    "checkpointing": [{"ac": "full"}, {"ac": "selective"}],
    "parameters on the host": [{"strategy": FSDP2(cpu_offload=True)}],
    "offloading": [{"ac": "none", "offload": MOVES}, {"ac": "selective", "offload": MOVES}],
    "prefetch": [{"strategy": FSDP2(forward_prefetch=ahead, backward_prefetch=ahead)} for ahead in (0, 2)],
    "kept gathered": [{"ac": "full", "strategy": FSDP2(reshard_after_forward=False)}],
}


@pytest.mark.few(3)
@pytest.mark.parametrize("name", JOBS)
def test_two_ranks_are_bitwise_and_nothing_races(name: str) -> None:
    jobs = [{"ac": "none"}, *JOBS[name]]
    assert on_devices(2, _gradients, jobs) == [[True] * len(jobs)] * 2
