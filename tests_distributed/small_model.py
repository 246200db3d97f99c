"""A small model of two blocks that a test brings, for experts of plain PyTorch modules."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.blocks import in_turn

WIDTH, VOCAB = 16, 32


class SmallModel(nn.Module):
    """Token ids (B, T) to a loss. `block` makes what maps (B, T, WIDTH) to the same."""

    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.layers = nn.Embedding(VOCAB, WIDTH), nn.ModuleList(block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = in_turn(self.layers, self.embed(ids))
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def tokens(rows: int) -> Tensor:
    """Token ids, (rows, 6)."""
    return torch.randint(VOCAB, (rows, 6), generator=torch.Generator().manual_seed(1))
