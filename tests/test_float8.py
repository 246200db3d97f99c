"""``precision="fp8"``: the layers' matmuls in float8, emulated on the CPU; the same bits in every mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nemo_like import apply_activation_checkpointing, parallelize
from nemo_like._util.live_bytes import LiveBytes
from nemo_like.options import Precision
from nemo_like.precision import float8_linears

transformers = pytest.importorskip("transformers")


def _model() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=64, max_position_embeddings=32, use_cache=False,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config).train()


def _gradients(precision: Any, ac: str) -> tuple[float, dict[str, torch.Tensor]]:
    model = parallelize(_model(), ac=ac, precision=precision, device="cpu")
    ids = torch.arange(32).reshape(2, 16)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("word", ["fp8", "fp8-rowwise"])
def test_every_mode_gives_the_same_bits(word: str) -> None:
    pytest.importorskip("torchao.float8")
    runs = {ac: _gradients(word, ac) for ac in ("none", "full", "selective", "submodule", "sequential")}
    loss, grads = runs["none"]
    lowered, _ = _gradients("bf16", "none")
    assert loss != lowered and abs(loss - lowered) < 0.05 * lowered
    for ac, (other, others) in runs.items():
        assert other == loss, ac
        assert [torch.equal(a, b) for a, b in zip(grads.values(), others.values())] == [True] * len(grads), ac


def test_linears_of_layers_alone_are_replaced_and_names_stay() -> None:
    float8 = pytest.importorskip("torchao.float8.float8_linear")
    names = [name for name, _ in _model().named_parameters()]
    model = parallelize(_model(), ac="none", precision="fp8", device="cpu")
    found = [name for name, module in model.named_modules() if isinstance(module, float8.Float8Linear)]
    assert len(found) == 2 * 7 and not any("lm_head" in name for name in found)
    assert [name for name, _ in model.named_parameters()] == names


def test_what_was_not_tried_is_refused_before_a_change() -> None:
    model = _model()
    before = {name: type(module) for name, module in model.named_modules()}
    with pytest.raises(ValueError, match="precision is 'fp8-gather' with tp=2: torchao gathers no weights in float8"):
        parallelize(model, tp=2, precision="fp8-gather")
    with pytest.raises(ValueError, match=r"Precision\.matmuls is 'fp4'"):
        Precision("bf16", matmuls="fp4")
    assert {name: type(module) for name, module in model.named_modules()} == before


def _held(word: str | None, ac: str) -> tuple[int, list[int]]:
    """Bytes that forward leaves behind, and the sizes of those storages that have as many elements as a weight."""
    model = _model().bfloat16()
    if word is not None:
        float8_linears(list(model.model.layers), word, "cpu")
    apply_activation_checkpointing(model, ac)
    weights = {p.numel() for p in model.model.layers.parameters() if p.dim() == 2}
    ids = torch.arange(33).reshape(3, 11)  # rows of no weight's size
    with LiveBytes() as live:
        loss = model(input_ids=ids, labels=ids).loss
        held = live.live
        sizes = list(live.sizes.values())
    loss.backward()
    return held, [size for size in sizes if any(size == n * bytes for n in weights for bytes in (1, 2, 4))]


@pytest.mark.parametrize("word", ["fp8", "fp8-rowwise"])
def test_nothing_of_a_weights_size_is_kept_for_backward(word: str) -> None:
    """Neither ``abs(W)``, of which a scale is the largest, nor the weight in float8."""
    pytest.importorskip("torchao.float8")
    for ac in ("none", "full", "selective", "submodule", "sequential"):
        held, sizes = _held(word, ac)
        plain, _ = _held(None, ac)
        assert sizes == [], ac
        scales = 2 * 7 * 4 * 2 * (64 + 33)  # at most: of each linear's rows and columns, float32
        assert held <= plain + (scales if ac == "selective" else 0), (ac, held, plain)


@pytest.mark.parametrize("word", ["fp8", "fp8-rowwise"])
def test_scales_are_no_state_that_a_replay_could_change(word: str) -> None:
    pytest.importorskip("torchao.float8")
    for ac in ("none", "full", "selective"):
        model = parallelize(_model(), ac=ac, precision=word, device="cpu")
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        assert {name for name, _ in model.named_buffers()} == {name for name, _ in _model().named_buffers()}
        ids = torch.arange(32).reshape(2, 16)
        first, second = (model(input_ids=ids, labels=ids).loss for _ in range(2))
        (first + second).backward()
        assert torch.equal(first, second)
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
