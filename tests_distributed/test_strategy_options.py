"""What `DDP(...)`, `FSDP2(...)` and `TensorParallel(...)` say is what torch is given, and what it then does."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import loss_parallel

from nemo_like import DDP, FSDP2, TensorParallel, parallelize
from tests.models.decoders import batch, build
from tests_distributed.spawn import run_ranks


class Branch(nn.Module):
    """Takes its second branch only where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.extra = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, with_extra: bool) -> torch.Tensor:
        for block in self.blocks:
            x = block(x) + x
        return x + self.extra(x) if with_extra else x


def _model() -> Branch:
    torch.manual_seed(0)
    return Branch()


def _inputs(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))


def _two_steps(rank: int, world_size: int, strategy: Any, ac: str) -> dict[str, torch.Tensor]:
    model = parallelize(_model(), strategy, ac, layers=["blocks.*"])
    for step in range(2):
        model(_inputs(rank, step), with_extra=rank == step == 0).square().mean().backward()
    return {name: p.grad for name, p in model.module.named_parameters()}


@pytest.mark.parametrize("ac", ["none", "full", "selective", "sequential"])
def test_unused_parameters(ac: str) -> None:
    reference = _model()
    for step in range(2):
        for rank in range(2):
            loss = reference(_inputs(rank, step), with_extra=rank == step == 0).square().mean() / 2
            loss.backward()
    results = run_ranks(2, _two_steps, DDP(find_unused_parameters=True, bucket_cap_mb=0.0001), ac)
    for gradients in results:
        for name, parameter in reference.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, msg=name)


def test_without_the_option_torch_says_so() -> None:
    with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
        run_ranks(2, _two_steps, "ddp", "full")


def _settings(rank: int, world_size: int, strategy: Any) -> tuple[int, timedelta]:
    model = parallelize(_model(), strategy, "full", layers=["blocks.*"])
    bucket = model.bucket_bytes_cap if isinstance(model, nn.parallel.DistributedDataParallel) else 0
    return bucket, dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout


@pytest.mark.parametrize("strategy", [DDP(bucket_cap_mb=2, timeout_seconds=90), FSDP2(timeout_seconds=90)])
def test_bucket_size_and_timeout(strategy: Any) -> None:
    bucket = 2 << 20 if isinstance(strategy, DDP) else 0
    assert run_ranks(2, _settings, strategy, init_group=False) == [(bucket, timedelta(seconds=90))] * 2


def test_wrong_options() -> None:
    for kind in (DDP, FSDP2):
        for seconds in (0, -1, True, "60", float("inf")):
            with pytest.raises(ValueError, match=r"timeout_seconds is .*above 0"):
                kind(timeout_seconds=seconds)
    for size in (0, -1, True, "25"):
        with pytest.raises(ValueError, match=r"bucket_cap_mb is .*above 0"):
            DDP(bucket_cap_mb=size)
    with pytest.raises(TypeError, match="find_unused_parameters is 1"):
        DDP(find_unused_parameters=1)


def _own_loss(rank: int, world_size: int) -> list[tuple[float, torch.Tensor]]:
    model = parallelize(build("llama").eval(), ac="full", tp=TensorParallel(2, loss_parallel=True), device="cpu")
    tokens = batch()
    ways = r"with torch\.distributed\.tensor\.parallel\.loss_parallel\(\): model.*parallelize\(\.\.\., loss='chunked'\)"
    with pytest.raises(RuntimeError, match=ways):
        model(input_ids=tokens, labels=tokens)
    model(input_ids=tokens)  # without labels there is nothing to refuse
    with loss_parallel():
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
    found = [(loss.full_tensor().item(), model.lm_head.weight.grad.full_tensor())]
    chunked = build("llama").eval()
    chunked.training = True  # chunks are for training; no layer drops anything
    chunked = parallelize(chunked, ac="full", tp=TensorParallel(2, loss_parallel=True), loss="chunked", device="cpu")
    loss = chunked(input_ids=tokens, labels=tokens).loss  # needs no context
    loss.backward()
    return [*found, (loss.item(), chunked.lm_head.weight.grad.full_tensor())]


def test_a_models_own_loss_on_cut_logits() -> None:
    """Within torch's context, or in chunks: the two ways that the error names."""
    reference, tokens = build("llama").eval(), batch()
    loss = reference(input_ids=tokens, labels=tokens).loss
    loss.backward()
    for value, gradient in [each for found in run_ranks(2, _own_loss, timeout=120) for each in found]:
        assert value == pytest.approx(loss.item(), rel=1e-6)
        torch.testing.assert_close(gradient, reference.lm_head.weight.grad)
