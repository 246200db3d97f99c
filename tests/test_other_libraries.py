"""Models of diffusers, timm, sentence-transformers and a graph network: layers are found, modes are equal to the bit.

`.ci/nightly` installs these libraries; elsewhere the tests are skipped where one is missing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from nemo_like import parallelize
from nemo_like._util.tensors import tensors_in
from nemo_like.layers import find_layers

Model = tuple[nn.Module, dict[str, Any]]


def _flux(_: Path) -> Model:
    diffusers = pytest.importorskip("diffusers")
    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=2, num_single_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    return model, {
        "hidden_states": torch.randn(1, 16, 4), "encoder_hidden_states": torch.randn(1, 8, 32),
        "pooled_projections": torch.randn(1, 32), "timestep": torch.tensor([1.0]), "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(8, 3), "return_dict": False,
    }  # fmt: skip


def _sd3(_: Path) -> Model:
    diffusers = pytest.importorskip("diffusers")
    model = diffusers.SD3Transformer2DModel(
        sample_size=8, patch_size=1, in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=4,
        caption_projection_dim=32, joint_attention_dim=32, pooled_projection_dim=64, out_channels=4,
    )  # fmt: skip
    return model, {
        "hidden_states": torch.randn(1, 4, 8, 8), "encoder_hidden_states": torch.randn(1, 8, 32),
        "pooled_projections": torch.randn(1, 64), "timestep": torch.tensor([1.0]), "return_dict": False,
    }  # fmt: skip


def _wan(_: Path) -> Model:
    diffusers = pytest.importorskip("diffusers")
    model = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16,
        freq_dim=256, ffn_dim=32, num_layers=2, cross_attn_norm=True, rope_max_seq_len=32,
    )  # fmt: skip
    return model, {
        "hidden_states": torch.randn(1, 4, 2, 8, 8), "encoder_hidden_states": torch.randn(1, 8, 16),
        "timestep": torch.tensor([1]), "return_dict": False,
    }  # fmt: skip


def _timm(_: Path) -> Model:
    timm = pytest.importorskip("timm", exc_type=ImportError)
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=16, depth=3, num_heads=2, num_classes=5
    )
    return model, {"x": torch.randn(2, 3, 32, 32)}


def _sentences(folder: Path) -> Model:
    library, parts_of = map(pytest.importorskip, ("sentence_transformers", "sentence_transformers.models"))
    transformers.BertModel(
        transformers.BertConfig(
            vocab_size=64, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    ).save_pretrained(folder)  # fmt: skip
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{number}" for number in range(59))]
    (folder / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    parts = [parts_of.Transformer(str(folder)), parts_of.Pooling(16)]
    ids = torch.randint(5, 64, (2, 6))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return library.SentenceTransformer(modules=parts, device="cpu"), {"input": batch}


class GraphLayer(nn.Module):
    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.norm, self.conv = nn.LayerNorm(16), conv

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        return x + self.conv(self.norm(x), edges).relu()


class Graph(nn.Module):
    def __init__(self, conv: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(GraphLayer(conv()) for _ in range(3))

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, edges)
        return x


def _graph(_: Path) -> Model:
    library = pytest.importorskip("torch_geometric.nn")
    edges = torch.tensor([[0, 1, 2, 3, 4], [1, 2, 3, 4, 5]])
    return Graph(lambda: library.GCNConv(16, 16)), {"x": torch.randn(6, 16), "edges": edges}


MODELS = {
    "flux": (_flux, 4), "sd3": (_sd3, 2), "wan": (_wan, 2), "timm": (_timm, 3), "sentences": (_sentences, 3),
    "graph": (_graph, 3),
}  # fmt: skip
MODES = ("none", "full", "selective", "submodule", "sequential", "50%")


def _gradients(model: nn.Module, sample: dict[str, Any]) -> list[torch.Tensor | None]:
    torch.manual_seed(1)
    output = model(**sample)
    output = output.get("sentence_embedding", output) if isinstance(output, dict) else output
    sum(t.square().mean() for t in tensors_in(output) if t.requires_grad).backward()  # type: ignore[union-attr]
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_another_library(name: str, tmp_path: Path) -> None:
    build, layers = MODELS[name]
    torch.manual_seed(0)
    model, sample = build(tmp_path)
    model.train()
    assert len(find_layers(model)) == layers
    wanted = _gradients(copy.deepcopy(model), sample)
    for ac in MODES:
        found = _gradients(parallelize(copy.deepcopy(model), ac=ac, sample_input=sample), sample)
        for one, other in zip(found, wanted, strict=True):
            assert one is other is None or torch.equal(one, other), ac  # type: ignore[arg-type]
