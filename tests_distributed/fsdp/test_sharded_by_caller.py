"""Sub-modules that the caller has sharded on a mesh of their own: left as they are, units inside ours, trained right."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from nemo_like import apply_activation_checkpointing, parallelize
from nemo_like.distributed import clip_grad_norm_
from nemo_like.options import FSDP2, MemoryBudget
from tests.checks import assert_bitwise, assert_near, backward, gradients_of, mean_over_ranks, seeded
from tests.models.blocks import in_turn
from tests_distributed.spawn import on_ranks

DIM, VOCAB, EXPERTS = 16, 32, 4
MODES = ("none", "full", "selective", "submodule", "sequential")


class Experts(nn.Module):
    """Weights of all experts in one tensor each, as grouped kernels want them: (T, D), (T,) to (T, D)."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(EXPERTS, *shape) / 4) for shape in ((DIM, 32), (32, DIM)))

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        hidden = F.gelu(torch.einsum("td,tdh->th", x, self.up[chosen]))
        return torch.einsum("th,thd->td", hidden, self.down[chosen])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attn, self.router = nn.LayerNorm(DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, EXPERTS)
        self.experts, self.dropout = Experts(), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D) -> (B, T, D)
        x = x + self.attn(self.norm(x)).tanh()
        flat = x.flatten(0, 1)
        weight, chosen = self.router(flat).softmax(-1).max(-1)
        return x + self.dropout(weight[:, None] * self.experts(flat, chosen)).view_as(x)


class Model(nn.Module):
    """A tower of blocks without experts' routing of its own, and a decoder with experts; ids (B, T) to a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.tower = nn.Embedding(VOCAB, DIM), nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(2)))
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = in_turn(self.layers, self.tower(self.embed(ids)))
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), ids.flatten())


def _built() -> Model:
    return seeded(Model).eval()  # dropout is compared between modes below, in training mode


def _ids() -> Tensor:
    return torch.randint(VOCAB, (4, 6), generator=torch.Generator().manual_seed(1))


def _sharded(*modules: nn.Module, **options: object) -> list[nn.Module]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("efsdp",))
    return [fully_shard(module, mesh=mesh, **options) for module in modules]


def _experts(model: Model, **options: object) -> list[nn.Module]:
    return _sharded(*(layer.experts for layer in model.layers), **options)


SHARDED: dict[str, Callable[[Model], list[nn.Module]]] = {
    "experts": _experts,
    "experts, gathered": lambda model: _experts(model, reshard_after_forward=False),
    "frozen tower": lambda model: _sharded(model.tower.requires_grad_(False)),
    "a layer": lambda model: _sharded(model.layers[1]),
    "head": lambda model: _sharded(model.head, reshard_after_forward=False),
}


@pytest.mark.parametrize(
    ("which", "mode"),
    [
        ("experts", "full"),
        ("experts, gathered", "selective"),
        ("a layer", "selective"),
        ("head", "selective"),
        *(pytest.param("experts", mode, marks=pytest.mark.long) for mode in MODES[3:]),
        *(pytest.param("frozen tower", mode, marks=pytest.mark.long) for mode in MODES),
    ],
)
@on_ranks(2)
def test_what_the_caller_sharded_stays_and_trains_as_on_one_rank(
    rank: int, world_size: int, which: str, mode: str
) -> None:
    reference = _built()
    if which == "frozen tower":
        reference.tower.requires_grad_(False)
    ids = _ids()
    expected_loss = backward(reference(ids))
    model = _built()
    theirs = SHARDED[which](model)
    before = {unit: [type(p) for p in unit.parameters()] for unit in theirs}
    parallelize(model, ac=mode, device="cpu")
    assert all(isinstance(unit, FSDPModule) for unit in theirs)
    assert {unit: [type(p) for p in unit.parameters()] for unit in theirs} == before
    assert all(isinstance(p, DTensor) for p in model.parameters())
    for step in range(2):
        model.zero_grad()
        torch.testing.assert_close(mean_over_ranks(backward(model(ids.chunk(2)[rank]))), expected_loss, rtol=1e-5, atol=0)
        assert_near(gradients_of(model), gradients_of(reference), where=(which, mode, step))
    norm = clip_grad_norm_(model, 1e9)
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(reference.parameters(), 1e9), rtol=1e-5, atol=0)
    model.eval()
    with torch.no_grad():
        model(ids.chunk(2)[rank])


@on_ranks(2)
def test_every_mode_is_bitwise_no_checkpointing(rank: int, world_size: int) -> None:
    expected: dict[str, Tensor] = {}
    for mode in MODES:
        model = _built().train()
        _experts(model)
        parallelize(model, ac=mode, device="cpu")
        torch.manual_seed(7 + rank)
        model(_ids().chunk(2)[rank]).backward()
        found = gradients_of(model)
        expected = expected or found
        assert_bitwise(found, expected, mode)


@on_ranks(2)
def test_what_cannot_be_done_with_them_is_refused_before_any_change(rank: int, world_size: int) -> None:
    def message(model: nn.Module, **options: object) -> str:
        before = {name: type(m) for name, m in model.named_modules()}
        with pytest.raises(ValueError) as caught:
            parallelize(model, device="cpu", **options)
        assert {name: type(m) for name, m in model.named_modules()} == before
        return str(caught.value)

    model = _built()
    _experts(model)
    assert "layers.0.experts" in message(model, strategy="ddp") and "strategy='fsdp2'" in message(model, strategy="ddp")
    assert "layers.0.experts" in message(model, ac=MemoryBudget(fraction=0.5), sample_input={"ids": _ids()})
    parallelize(model, FSDP2(), "sequential", sample_input={"ids": _ids()}, device="cpu")
    assert "already" in message(model)


OWN_LOOPS: dict[str, dict[str, object]] = {
    "fully_shard": {},
    "reshard_after_forward": {"reshard_after_forward": False},
    "mixed precision": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    "CPU offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "checkpointing after sharding": {"sharded_first": True},
    "gradients reduced at the last micro-batch": {"microbatches": 2},
}
"""Lines of docs/how-to/your-own-loop.md, section "I have `fully_shard` already"."""


def _own_loop(
    checkpoints: bool, sharded_first: bool = False, microbatches: int = 1, **options: Any
) -> dict[str, Tensor]:
    """Return the gradients of a loop that calls `fully_shard` itself."""
    model = _built().train()
    mesh = init_device_mesh("cpu", (2,))
    if checkpoints and not sharded_first:
        model = apply_activation_checkpointing(model, "selective")
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    if checkpoints and sharded_first:
        model = apply_activation_checkpointing(model, "selective")
    assert all(isinstance(layer, FSDPModule) and isinstance(layer, Block) for layer in model.layers)
    torch.manual_seed(3)
    for number in range(microbatches):
        model.set_requires_gradient_sync(number == microbatches - 1)
        model(_ids()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return gradients_of(model)


@on_ranks(2)
def test_a_loop_with_fully_shard_of_its_own_keeps_its_gradients(rank: int, world_size: int) -> None:
    for name, options in OWN_LOOPS.items():
        assert_bitwise(_own_loop(True, **options), _own_loop(False, **options), name)
    with pytest.raises(ValueError, match="sharded already, by fully_shard"):
        parallelize(fully_shard(_built(), mesh=init_device_mesh("cpu", (2,))))
