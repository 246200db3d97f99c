"""A sequence cut over ranks, with SDPA replaced while forward runs: every mode replays with the replaced function.

torch's own `context_parallel` has no CPU kernel (torch 2.13: "aten._scaled_dot_product_flash_attention_for_cpu does not
have a sharding strategy"), so the context here gathers keys and values itself, over a real process group. What it shares
with torch's is what matters to a replay: the patch is gone when backward runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from nemo_like import apply_activation_checkpointing
from tests.models.tied_decoder import DIM, Block
from tests_distributed.spawn import run_ranks

LENGTH = 16

MODES = ("none", "full", "selective", "submodule")


@contextlib.contextmanager
def cut_sequences(mesh: DeviceMesh) -> Iterator[None]:
    """Within this context, SDPA's inputs (B, H, T / ranks, E) are parts of longer causal sequences."""
    whole_sdpa = F.scaled_dot_product_attention

    def gather(part: torch.Tensor) -> torch.Tensor:
        whole = DTensor.from_local(part, mesh, [Shard(2)], run_check=False).redistribute(placements=[Replicate()])
        return whole.to_local(grad_placements=[Partial()])  # each rank's queries give a part of the gradient

    def cut_sdpa(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool = False) -> torch.Tensor:
        length, ranks = query.shape[2], mesh.size()
        mask = torch.ones(length * ranks, length * ranks, dtype=torch.bool).tril().chunk(ranks)[mesh.get_local_rank()]
        return whole_sdpa(query, gather(key), gather(value), attn_mask=mask if is_causal else None)

    F.scaled_dot_product_attention = cut_sdpa
    try:
        yield
    finally:
        F.scaled_dot_product_attention = whole_sdpa


def _step(rank: int, world_size: int) -> list[str]:
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("cp",))
    inputs = torch.randn(2, LENGTH, DIM, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    single = nn.Sequential(Block(), Block())
    single(inputs).square().mean().backward()
    expected = {name: parameter.grad for name, parameter in single.named_parameters()}

    grads: dict[str, dict[str, torch.Tensor]] = {}
    for mode in MODES:
        torch.manual_seed(0)
        model = nn.Sequential(Block(), Block())
        apply_activation_checkpointing(model, mode)
        with cut_sequences(mesh):
            loss = model(inputs.chunk(world_size, 1)[rank]).square().mean() / world_size
        loss.backward()  # after the context has ended
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        grads[mode] = {name.replace("_checkpoint_wrapped_module.", ""): p.grad for name, p in model.named_parameters()}
    largest = max(grad.abs().max() for grad in expected.values())
    for name, grad in expected.items():
        # Sums over ranks are added in another order; the scale is the largest gradient's, as the keys' bias has none.
        assert (grads["none"][name] - grad).abs().max() < 1e-5 * largest, name
    return [
        f"{mode} {name}" for mode in MODES for name, g in grads[mode].items() if not torch.equal(g, grads["none"][name])
    ]


def test_every_mode_replays_with_the_forwards_attention() -> None:
    assert run_ranks(2, _step) == [[], []]
