"""An embedding that is cut by rows: each rank makes the gradient of its own, and of no other."""

from collections import OrderedDict

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

from nemo_like.distributed.tensor.apply import apply_tensor_parallel
from tests.checks import seeded
from tests_distributed.allocated import allocator_events
from tests_distributed.spawn import on_ranks

ROWS, WIDTH, TOKENS = 384, 64, (2, 96)
WHOLE = ROWS * WIDTH * 4
BATCH = TOKENS[0] * TOKENS[1] * WIDTH * 4


class Scaled(nn.Embedding):
    """As Gemma's: a forward of its own."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 3.0


def _model(kind: type[nn.Embedding] = nn.Embedding, **options: object) -> nn.Module:
    return nn.Sequential(OrderedDict(embed=seeded(kind, ROWS, WIDTH, **options)))


OPTIONS = (
    {}, {"padding_idx": 5}, {"padding_idx": 300}, {"scale_grad_by_freq": True}, {"kind": Scaled},
)  # fmt: skip


def _ids() -> torch.Tensor:
    ids = torch.randint(ROWS, TOKENS, generator=torch.Generator().manual_seed(1))
    ids[:, :20] = 5  # rows that are taken many times, at the ends of both parts too
    ids[:, 20:40] = 300
    ids[0, 40:44] = torch.tensor([0, ROWS // 2 - 1, ROWS // 2, ROWS - 1])
    return ids


@on_ranks(2)
def test_rows_and_their_gradients_are_those_of_torch(rank: int, world_size: int) -> None:
    """To the bit, and in the memory of a rank's rows, with one for the tokens of other ranks."""
    mesh, found = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",)), []
    weights = torch.randn(*TOKENS, WIDTH, generator=torch.Generator().manual_seed(2))
    for options in OPTIONS:
        by_torch, ours = _model(**options), _model(**options)
        parallelize_module(by_torch.embed, mesh, RowwiseParallel(input_layouts=Replicate()))
        apply_tensor_parallel(ours, mesh, {"embed": "embedding_rowwise"})
        outs = [model(_ids()) for model in (by_torch, ours)]
        for out in outs:
            (out * weights).sum().backward()
        theirs = by_torch.embed.weight.grad.full_tensor().chunk(world_size)[rank]
        grad = ours.embed.weight.grad
        same = torch.equal(grad.full_tensor().chunk(world_size)[rank], theirs), torch.equal(*outs)
        found.append((*same, tuple(grad.to_local().shape), grad.to_local().untyped_storage().nbytes()))
    for options, (same_gradient, same_rows, shape, size) in zip(OPTIONS, found, strict=True):
        assert same_gradient and same_rows, options
        if "kind" not in options:
            assert shape == (ROWS // 2, WIDTH) and size == WHOLE // 2 + WIDTH * 4, options


@on_ranks(2)
def test_a_backward_takes_a_rank_s_rows_alone(rank: int, world_size: int) -> None:
    """Half of the table, a row, and the places of the tokens; torch's would take the whole table."""
    mesh, model = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",)), _model()
    apply_tensor_parallel(model, mesh, {"embed": "embedding_rowwise"})
    given = torch.ones(*TOKENS, WIDTH)

    def backward(out: torch.Tensor) -> tuple[int, int]:
        model.zero_grad()
        return allocator_events(lambda: out.backward(given))

    backward(model(_ids()))
    peak, left = backward(model(_ids()))
    assert left == WHOLE // 2 + WIDTH * 4
    assert peak - left <= 4 * TOKENS[0] * TOKENS[1] * 8 < WHOLE // 2


@on_ranks(2)
def test_a_frozen_table_and_gradients_that_are_there(rank: int, world_size: int) -> None:
    mesh, model = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",)), _model()
    whole = model.embed.weight.detach().clone()
    apply_tensor_parallel(model, mesh, {"embed": RowwiseParallel(input_layouts=Replicate())})
    model.embed.weight.requires_grad_(False)
    out = model(_ids())
    assert not out.requires_grad and torch.equal(out, whole[_ids()])
    model.embed.weight.requires_grad_(True)
    model(_ids()).sum().backward()
    once = model.embed.weight.grad.to_local().clone()
    model(_ids()).sum().backward()
    assert torch.equal(model.embed.weight.grad.to_local(), once * 2)
