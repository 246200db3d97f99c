"""Small models for these tests, and what is asked of them again and again."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.checks import labelled as labelled
from tests.models.blocks import in_turn

VOCAB = 64


def made(family: str, kind: str = "ForCausalLM", device: str | None = None, **sizes: Any) -> Any:
    """A model of transformers with these values of its config: ``made("Llama", hidden_size=32)``; in training mode.

    `device`: where its weights are; None: where the caller makes tensors.
    """
    import transformers

    config = getattr(transformers, f"{family}Config")(**sizes)
    with contextlib.nullcontext() if device is None else torch.device(device):
        return getattr(transformers, f"{family}{kind}")(config).train()


def llama(**changes: Any) -> nn.Module:
    """A Hugging Face Llama of 3 layers, width 32."""
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": VOCAB, "use_cache": False}
    sizes |= {"num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 2}
    return made("Llama", **(sizes | changes))


def tokens(rows: int = 4, length: int = 12, seed: int = 1) -> Tensor:
    """(rows, length) token numbers, the same on every rank."""
    return torch.randint(0, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


class Block(nn.Module):
    """Norm and a two-matmul MLP on a residual, dropout behind both matmuls: (..., width) to the same.

    parts: what else it has by these names: modules, parameters, plain values.
    """

    def __init__(
        self,
        width: int = 16,
        wide: int | None = None,
        *,
        norm: bool = True,
        act: Callable[[Tensor], Tensor] = torch.relu,
        dropout: float = 0.0,
        **parts: Any,
    ):
        super().__init__()
        self.norm = nn.LayerNorm(width) if norm else nn.Identity()
        self.up, self.down = nn.Linear(width, wide or 2 * width), nn.Linear(wide or 2 * width, width)
        self.act, self.dropout = act, dropout
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        return x + self.drop(self.down(self.drop(self.act(self.up(self.norm(x))))))

    def drop(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, self.dropout, self.training)


class Headed(nn.Module):
    """A linear map, three blocks, and heads of which a call uses one: (B, 8) to (B, 4)."""

    def __init__(self, block: Callable[[], nn.Module] = lambda: Block(8)) -> None:
        super().__init__()
        self.inp, self.blocks = nn.Linear(8, 8), nn.ModuleList(block() for _ in range(3))
        self.heads = nn.ModuleDict({name: nn.Linear(8, 4) for name in "abc"})

    def forward(self, x: Tensor, head: str = "a") -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x, head)
        return self.heads[head](x)


class Decoder(nn.Module):
    """Embedding, blocks, norm, head: (B, T) tokens to a scalar loss."""

    def __init__(self, layers: int = 3, width: int = 16, tied: bool = False):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = in_turn(self.layers, self.embed(ids))
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), ids.flatten())
