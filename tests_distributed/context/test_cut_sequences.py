"""`parallelize(model, cp=...)` on whole sequences: loss and gradients are those of one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from nemo_like import ContextParallel, parallelize
from tests.models.families import COMMON, hf
from tests_distributed.context.cut_models import LENGTH, LOSS, batch, build, step, wrong_in_modes
from tests_distributed.spawn import on_ranks, run_ranks

MODES = ("none", "full", "selective", "submodule", "50%")
FAMILY_NAMES = (
    "llama", "qwen3", "gemma3_text", "gpt_oss", "deepseek_v3", "mixtral", "bert", "qwen2_vl", "nanogpt",
)  # fmt: skip
MORE_NAMES = (
    "gemma2", "gemma3", "llama4", "gpt2", "gptj", "modernbert", "phi3", "stablelm", "llava", "olmoe", "jetmoe",
)  # fmt: skip


def _modes(
    rank: int, world_size: int, name: str, cp: Any, modes: tuple[str, ...], length: int = LENGTH
) -> list[str]:  # fmt: skip
    """What is wrong under some mode; nothing is right."""
    return wrong_in_modes(build(name), batch(name, length=length), cp, modes)


@pytest.mark.few(1)
@pytest.mark.parametrize("modes", [("full", "50%"), MODES])
@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_families(name: str, modes: tuple[str, ...]) -> None:
    assert run_ranks(2, _modes, name, 2, modes) == [[], []]


def _under_a_function_mode(rank: int, world_size: int, name: str) -> list[str]:
    torch.set_default_device("cpu")
    try:
        return wrong_in_modes(build(name), batch(name), 2, ("full",))
    finally:
        torch.set_default_device(None)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["llama", "nanogpt"])
def test_a_default_device_does_not_cut_the_labels_twice(name: str) -> None:
    assert run_ranks(2, _under_a_function_mode, name) == [[], []]


@pytest.mark.few(2)
@pytest.mark.parametrize("name", MORE_NAMES)
def test_more_families(name: str) -> None:
    assert run_ranks(2, _modes, name, 2, ("selective",)) == [[], []]


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["gemma3_text", "bert", "llama", "deepseek_v3", "qwen3", "nanogpt"])
def test_ulysses(name: str) -> None:
    assert run_ranks(2, _modes, name, ContextParallel(2, "ulysses"), ("none", "selective")) == [[], []]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ("gemma3_text", *(name for name in FAMILY_NAMES if name != "gemma3_text")))
def test_four_ranks(name: str) -> None:
    assert run_ranks(4, _modes, name, 4, ("selective",)) == [[]] * 4


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_chunks_of_one_token(name: str) -> None:
    assert run_ranks(2, _modes, name, 2, ("full",), 4) == [[]] * 2


@on_ranks(2)
def test_plain_models_on_longer_rows(rank: int, world_size: int) -> None:
    """37 tokens: the first call compares the first 31, whole against parts. A model that looks both ways sees padding."""
    wrong = _modes(rank, world_size, "nanogpt", 2, ("none",), 37)
    for cp in (ContextParallel(2), ContextParallel(2, "ulysses")):
        wrong += _modes(rank, world_size, "nanobert", cp, ("none", "full"), 37)
    assert not wrong, wrong


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "ranks", "modes"),
    [
        ("llama", 2, ("none", "selective")),
        *((name, 2, ("none", "full", "selective", "submodule")) for name in ("llama", "qwen3", "nanogpt")),
        *((name, ranks, ("none", "full")) for name, ranks in (("jetmoe", 2), ("llama", 4), ("mixtral", 4))),
    ],
)
def test_ring(name: str, ranks: int, modes: tuple[str, ...]) -> None:
    assert run_ranks(ranks, _modes, name, ContextParallel(ranks, "ring"), modes) == [[]] * ranks


@on_ranks(2)
def test_methods_refuse_attention_that_they_do_not_have(rank: int, world_size: int) -> None:
    inputs = batch("llama")
    whole = build("llama")
    expected, _ = step(copy.deepcopy(whole), inputs)
    model = parallelize(whole, ac="full", cp=ContextParallel(2, "ring"))
    ones = torch.ones_like(inputs["input_ids"])
    found, _ = step(model, inputs | {"attention_mask": ones})
    assert abs(found - expected) <= LOSS * expected
    for more in ({"attention_mask": ones.tril(10)}, {"position_ids": torch.arange(13).remainder(6).expand(2, -1)}):
        with pytest.raises(NotImplementedError, match="without a mask"):
            model(**inputs, **more)
    one_head = hf("LlamaForCausalLM", "LlamaConfig", **COMMON | {"num_key_value_heads": 1})()
    with pytest.raises(NotImplementedError, match="heads that 2 ranks divide, those of keys as well"):
        parallelize(one_head, cp=ContextParallel(2, "ulysses"))(**inputs)
