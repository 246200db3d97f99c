"""A plain decoder as people write it after nanoGPT."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.blocks import in_turn
from tests.models.families import DIM, VOCAB, Block


class NanoGPT(nn.Module):
    """As people write it: positions in a parameter, logits and loss in a tuple, a tied head."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, DIM), nn.Parameter(torch.randn(32, DIM) / 8)
        self.h = nn.ModuleList(Block() for _ in range(layers))
        self.ln_f, self.lm_head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = in_turn(self.h, self.wte(input_ids) + self.wpe[: input_ids.shape[1]])
        logits = self.lm_head(self.ln_f(x))
        return logits, None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())
