"""Models of other libraries: layers are found, modes are equal to the bit; what is known of transformers' inside.

`.ci/nightly` installs diffusers, timm, sentence-transformers and PyTorch Geometric; elsewhere the tests are skipped where
one is missing.
"""

import copy
import importlib
import sys
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from nemo_like import apply_activation_checkpointing, parallelize, transformers_compat
from nemo_like._util.tensors import tensors_in
from nemo_like.activation_checkpointing import CheckpointWrapper
from nemo_like.layers import find_layers
from nemo_like.transformers_compat import given_cache, is_cache
from tests.checks import seeded
from tests.models.blocks import Layer, in_turn

SAID = (
    r"transformers 5\.25\.0 .*\. nemo_like was tested with transformers 5\.23\.0 and 5\.24\.0: pip install "
    r"'transformers==5\.24\.0', or report this\."
)


class Cache:
    """What all of transformers' caches can do."""

    def update(self, key: Any, value: Any, layer: int) -> tuple[Any, Any]:
        return key, value

    def get_seq_length(self) -> int:
        return 0


class RecurrentCache:
    """One that can do less, as xLSTM's."""


@pytest.fixture(scope="module")
def hf() -> Any:
    found = pytest.importorskip("transformers", reason="needs the extra 'hf'")
    _ = found.GPT2LMHeadModel  # imports what it needs, which takes seconds
    return found


@pytest.fixture
def next_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transformers 5.25.0 without anything inside."""
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(__version__="5.25.0"))
    for name in ("modeling_utils", "masking_utils"):
        monkeypatch.setitem(sys.modules, f"transformers.{name}", ModuleType(name))


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("a_name_of_2030", Cache(), True),
        ("a_name_of_2030", RecurrentCache(), False),
        ("cache", RecurrentCache(), True),
        ("cache", torch.ones(2), False),  # a table of the model's own
        ("cache", True, False),
        ("cache", (torch.ones(2), torch.ones(2)), False),
        ("past_key_values", (torch.ones(2), torch.ones(2)), True),
        ("past_key_values", torch.ones(2), True),
        ("past_key_values", None, False),
        ("attention_mask", torch.ones(2), False),
        ("kwargs", {}, False),
    ],
)
def test_a_cache_is_what_it_can_do_or_what_its_name_says(name: str, value: Any, expected: bool) -> None:
    assert is_cache(value, name) is expected


def test_a_cache_is_found_by_position_and_by_keyword() -> None:
    names = ("hidden_states", "layer_past")
    assert given_cache(names, (torch.ones(1), Cache()), {}) == "layer_past"
    assert given_cache(names, (torch.ones(1), None, Cache()), {}) == "argument 2"
    assert given_cache(names, (torch.ones(1),), {"anything": Cache()}) == "anything"
    assert given_cache(names, (torch.ones(1),), {"anything": None, "layer_past": None}) is None


@pytest.mark.parametrize(
    ("function", "name"),
    [
        ("model_base", "PreTrainedModel in transformers.modeling_utils"),
        ("attention_functions", "ALL_ATTENTION_FUNCTIONS in transformers.modeling_utils"),
        ("attention_interface", "AttentionInterface in transformers.modeling_utils"),
        ("mask_functions", "ALL_MASK_ATTENTION_FUNCTIONS in transformers.masking_utils"),
        ("mask_interface", "AttentionMaskInterface in transformers.masking_utils"),
        ("causal_mask_function", "causal_mask_function in transformers.masking_utils"),
    ],
)
def test_what_is_absent_is_named_with_the_releases_that_were_tested(
    next_release: None, function: str, name: str
) -> None:
    with pytest.raises(RuntimeError, match=SAID) as raised:
        getattr(transformers_compat, function)()
    assert f"has no {name}. " in str(raised.value)


def test_a_program_without_transformers_has_none_of_its_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "transformers.modeling_utils", raising=False)
    assert transformers_compat.model_base() is None


@pytest.mark.parametrize(
    "function",
    ["model_base", "attention_functions", "attention_interface", "mask_functions", "mask_interface"]
    + ["causal_mask_function"],
)
def test_the_installed_transformers_has_each(hf: Any, function: str) -> None:
    assert getattr(transformers_compat, function)() is not None


@pytest.mark.parametrize("by_position", [False, True])
def test_a_region_refuses_a_cache_under_a_name_that_nobody_knows(by_position: bool) -> None:
    class Layer(nn.Linear):
        def forward(self, x: torch.Tensor, memory: Any = None) -> torch.Tensor:
            return super().forward(x)

    wrapped, cache, x = CheckpointWrapper(Layer(2, 2), name="layers.3"), Cache(), torch.ones(1, 2)
    with pytest.raises(RuntimeError, match=r"layers\.3 was called with memory= while gradients are on"):
        wrapped(x, cache) if by_position else wrapped(x, memory=cache)


@pytest.mark.parametrize("ac", ["full", "selective", "sequential"])
def test_gpt2_never_gives_back_a_cache_that_was_written_twice(hf: Any, ac: str) -> None:
    config = hf.GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2, n_positions=16)
    model, ids = apply_activation_checkpointing(hf.GPT2LMHeadModel(config), ac), torch.arange(16)[None]
    with pytest.raises(RuntimeError, match=r"transformer\.h\.0 was called with (past_key_values|cache)="):
        model(ids, use_cache=True)
    cache = hf.DynamicCache(config=config)
    with pytest.raises(RuntimeError, match="a second time"):
        model(ids, past_key_values=cache)
    assert cache.get_seq_length() == 0
    with torch.no_grad():
        assert model(ids, use_cache=True).past_key_values.get_seq_length() == 16


@pytest.mark.parametrize(
    ("family", "name"), [("gpt2", "GPT2Block"), ("llama", "LlamaDecoderLayer"), ("bloom", "BloomBlock")]
)
def test_layers_of_the_installed_transformers_take_a_cache_that_is_known(hf: Any, family: str, name: str) -> None:
    layer = getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), name)
    assert set(transformers_compat.parameter_names(layer.forward)) & set(transformers_compat.CACHE_ARGUMENTS)


def test_cut_attention_is_refused_where_no_configuration_has_a_name_for_it(next_release: None) -> None:
    from nemo_like.distributed.context import _reroute

    stack: Any = SimpleNamespace(module=nn.Linear(1, 1))
    with pytest.raises(
        RuntimeError, match=r"5\.25\.0 has no _attn_implementation_internal in .* of Linear\. nemo_like"
    ):
        _reroute(stack, ExitStack())


Model = tuple[nn.Module, dict[str, Any]]


def _flux(_: Path) -> Model:
    model = pytest.importorskip("diffusers").FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=2, num_single_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    return model, {
        "hidden_states": torch.randn(1, 16, 4), "encoder_hidden_states": torch.randn(1, 8, 32),
        "pooled_projections": torch.randn(1, 32), "timestep": torch.tensor([1.0]), "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(8, 3), "return_dict": False,
    }  # fmt: skip


def _sd3(_: Path) -> Model:
    model = pytest.importorskip("diffusers").SD3Transformer2DModel(
        sample_size=8, patch_size=1, in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=4,
        caption_projection_dim=32, joint_attention_dim=32, pooled_projection_dim=64, out_channels=4,
    )  # fmt: skip
    return model, {
        "hidden_states": torch.randn(1, 4, 8, 8), "encoder_hidden_states": torch.randn(1, 8, 32),
        "pooled_projections": torch.randn(1, 64), "timestep": torch.tensor([1.0]), "return_dict": False,
    }  # fmt: skip


def _wan(_: Path) -> Model:
    model = pytest.importorskip("diffusers").WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16,
        freq_dim=256, ffn_dim=32, num_layers=2, cross_attn_norm=True, rope_max_seq_len=32,
    )  # fmt: skip
    return model, {
        "hidden_states": torch.randn(1, 4, 2, 8, 8), "encoder_hidden_states": torch.randn(1, 8, 16),
        "timestep": torch.tensor([1]), "return_dict": False,
    }  # fmt: skip


def _timm(_: Path) -> Model:
    model = pytest.importorskip("timm", exc_type=ImportError).create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=16, depth=3, num_heads=2, num_classes=5
    )
    return model, {"x": torch.randn(2, 3, 32, 32)}


def _sentences(folder: Path) -> Model:
    transformers = pytest.importorskip("transformers")
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


def _graph(_: Path) -> Model:
    library = pytest.importorskip("torch_geometric.nn")
    edges = torch.tensor([[0, 1, 2, 3, 4], [1, 2, 3, 4, 5]])
    layers = (
        Layer(
            lambda layer, x, edges: x + layer.conv(layer.norm(x), edges).relu(),
            norm=nn.LayerNorm(16),
            conv=library.GCNConv(16, 16),
        )
        for _ in range(3)
    )
    model = Layer(lambda graph, x, edges: in_turn(graph.layers, x, edges), layers=nn.ModuleList(layers))
    return model, {"x": torch.randn(6, 16), "edges": edges}


MODELS = {
    "flux": (_flux, 4), "sd3": (_sd3, 2), "wan": (_wan, 2), "timm": (_timm, 3), "sentences": (_sentences, 3),
    "graph": (_graph, 3),
}  # fmt: skip
MODES = ("none", "full", "selective", "submodule", "sequential", "50%")


def _gradients(model: nn.Module, sample: dict[str, Any]) -> list[torch.Tensor | None]:
    output = seeded(model, **sample, seed=1)
    output = output.get("sentence_embedding", output) if isinstance(output, dict) else output
    sum(t.square().mean() for t in tensors_in(output) if t.requires_grad).backward()  # type: ignore[union-attr]
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_another_library(name: str, tmp_path: Path) -> None:
    build, layers = MODELS[name]
    model, sample = seeded(build, tmp_path)
    model.train()
    assert len(find_layers(model)) == layers
    wanted = _gradients(copy.deepcopy(model), sample)
    for ac in MODES:
        found = _gradients(parallelize(copy.deepcopy(model), ac=ac, sample_input=sample), sample)
        for one, other in zip(found, wanted, strict=True):
            assert one is other is None or torch.equal(one, other), ac  # type: ignore[arg-type]
