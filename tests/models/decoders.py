"""Six tiny decoders that stand for their families, built with the same weights every time.

`build(name)` gives a model in training mode with dropout where its family has it; `loss_of(model, ids)` its mean loss.
"""

import torch
import torch.nn.functional as F
from torch import nn

from tests.models.blocks import in_turn

VOCAB, WIDTH, LAYERS = 64, 32, 3
NAMES = ("llama", "qwen3", "gemma3", "mixtral", "gpt2", "plain")

_COMMON = dict(
    vocab_size=VOCAB,
    hidden_size=WIDTH,
    intermediate_size=48,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
)


class PlainBlock(nn.Module):
    """Pre-norm attention and MLP, as people write them by hand. (B, T, D) to (B, T, D)."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = PlainAttention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attn(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class PlainAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # each (B, H, T, D/H)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class PlainDecoder(nn.Module):
    """Token ids (B, T) to logits (B, T, V); no Hugging Face anywhere."""

    def __init__(self, width: int = WIDTH, heads: int = 4, layers: int = LAYERS, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.blocks = nn.ModuleList(PlainBlock(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(in_turn(self.blocks, self.embed(ids))))


class DecoderWithLoss(PlainDecoder):
    """A `PlainDecoder` that returns its loss."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids).sum()


class Prompted(nn.Module):
    """Prompt tuning: trained vectors before the tokens, and a decoder in which nothing trains; (B, T) ids to a loss."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.decoder = PlainDecoder(dropout=dropout).requires_grad_(False)
        self.prompt = nn.Parameter(torch.randn(4, WIDTH))  # registered behind the layers, as adapters are

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = torch.cat([self.prompt.expand(len(ids), -1, -1), self.decoder.embed(ids)], dim=1)
        return self.decoder.head(self.decoder.norm(in_turn(self.decoder.blocks, x))).square().mean()


def build(name: str, seed: int = 0, use_cache: bool = False) -> nn.Module:
    """The decoder `name` of `NAMES`, weights drawn from `seed`, float32, in training mode.

    `use_cache`: the config's; off, so that a call of the original model runs the kernels that a checkpointed one runs.
    """
    torch.manual_seed(seed)
    if name == "plain":
        return PlainDecoder().train()
    import transformers as hf

    configs = {
        "llama": lambda: hf.LlamaConfig(**_COMMON, attention_dropout=0.1),
        "qwen3": lambda: hf.Qwen3Config(**_COMMON, tie_word_embeddings=True),
        "gemma3": lambda: hf.Gemma3TextConfig(
            **_COMMON, sliding_window=8, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
        ),
        "mixtral": lambda: hf.MixtralConfig(**_COMMON, num_local_experts=4, num_experts_per_tok=2),
        "gpt2": lambda: hf.GPT2Config(vocab_size=VOCAB, n_embd=WIDTH, n_layer=LAYERS, n_head=4, n_positions=64),
    }
    config = configs[name]()
    config.use_cache = use_cache
    return hf.AutoModelForCausalLM.from_config(config).train()


def batch(size: int = 4, length: int = 16, seed: int = 1) -> torch.Tensor:
    """Token ids, (size, length) int64."""
    return torch.randint(VOCAB, (size, length), generator=torch.Generator().manual_seed(seed))


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Mean next-token loss, a float32 scalar."""
    output = model(ids)
    logits = getattr(output, "logits", output).float()
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
