"""`parallelize(model, cp=...)` on whole sequences: loss and gradients are those of one process; what is held and sent.

torch refuses flex attention's backward on the CPU before it runs (``_validate_device``), though its plain implementation has
one, which differs from SDPA's by rounding. The test of it takes that check away, in the process of a rank.
"""

import copy
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import flex_attention as flex

from nemo_like import ContextParallel, apply_activation_checkpointing, parallelize
from nemo_like._util.live_bytes import LiveBytes
from nemo_like.distributed.context import apply_context_parallel, methods
from tests.models.families import COMMON, hf
from tests_distributed.context.cut_models import LENGTH, LOSS, batch, build, step, wrong_in_modes
from tests_distributed.fsdp.packed_rows import wrong_forms
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


@on_ranks(2)
def test_targets_that_change_after_the_first_calls_are_refused(rank: int, world_size: int) -> None:
    model, inputs = parallelize(build("llama"), ac="none", cp=2), batch("llama")
    for _ in range(2):
        model(**inputs)

    def rolled(logits: Tensor, labels: Tensor, vocab_size: int, **kwargs: Any) -> Tensor:
        return torch.nn.functional.cross_entropy(logits.view(-1, vocab_size), labels.roll(1, 1).view(-1))

    model.loss_function = rolled
    with pytest.raises(NotImplementedError, match="other targets than its labels"):
        model(**inputs)


ROWS, LONG_LENGTH, LAYERS, HEADS, KV_HEADS, WIDTH = 1, 512, 4, 8, 4, 16
HIDDEN = HEADS * WIDTH
HEAD_BYTES = ROWS * LONG_LENGTH * WIDTH * 4
"""Of one head over the whole sequence."""


@contextmanager
def sent_bytes() -> Iterator[Counter[str]]:
    """Bytes that a rank sends to others, by collective."""
    sent: Counter[str] = Counter()
    with pytest.MonkeyPatch.context() as patch:

        def count(owner: Any, name: str, share: Callable[[int], float], place: int) -> None:
            before = getattr(owner, name)

            def counted(*args: Any, **kwargs: Any) -> Any:
                sent[name] += int(args[place].nbytes * share(dist.get_world_size()))
                return before(*args, **kwargs)

            patch.setattr(owner, name, counted)

        count(dist, "all_gather_single", lambda ranks: ranks - 1, 1)
        for name in ("reduce_scatter_single", "all_to_all_single"):
            count(dist, name, lambda ranks: (ranks - 1) / ranks, 1)
        count(methods, "_exchange", lambda ranks: 1, 0)
        yield sent


def _count(rank: int, world_size: int, method: str, modes: tuple[str, ...]) -> dict[str, tuple[int, Counter[str]]]:
    shape = COMMON | dict(
        hidden_size=HIDDEN, intermediate_size=3 * HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, max_position_embeddings=LONG_LENGTH, use_cache=False,
    )  # fmt: skip
    ids = torch.randint(1, 48, (ROWS, LONG_LENGTH), generator=torch.Generator().manual_seed(0))
    found = {}
    for mode in modes:
        model = hf("LlamaForCausalLM", "LlamaConfig", **shape)().train()
        if world_size > 1:
            mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("cp",))
            apply_context_parallel(model, mesh, ContextParallel(world_size, method))
        apply_activation_checkpointing(model, mode)
        for _ in range(2):  # the first call compares batches, and makes what stays
            with LiveBytes() as live, sent_bytes() as sent:
                loss = model(input_ids=ids, labels=ids).loss
                held = live.live
                loss.backward()
        found[mode] = (held, sent)
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize("method", ["all_gather", "ulysses", "ring"])
def test_what_is_sent(method: str) -> None:
    found = run_ranks(2, _count, method, ("none", "full"))[0]
    (_, sent), (_, recomputed) = found["none"], found["full"]
    both = LAYERS * 2 * KV_HEADS * HEAD_BYTES  # keys and values of the whole sequence
    if method == "ring":  # a part to the next rank; in backward again, and float32 gradients once around
        assert sent == {"_exchange": both // 2 + both // 2 + both}
        assert recomputed["_exchange"] == sent["_exchange"] + both // 2, "sent again in backward"
    elif (
        method == "all_gather"
    ):  # keys and values of a part to each other rank, in backward again; their gradients back
        assert sent == {"all_gather_single": 2 * (both // 2), "reduce_scatter_single": both // 2}
        assert recomputed["all_gather_single"] == 3 * (both // 2), "gathered again in the recomputation"
    else:  # half of a half of each, there and back
        assert sent == {"all_to_all_single": 2 * LAYERS * (HEADS + 2 * KV_HEADS + HEADS) * HEAD_BYTES // 4}


def test_what_is_held_shrinks_with_the_ranks() -> None:
    whole, half = _count(0, 1, "all_gather", ("full",)), run_ranks(2, _count, "all_gather", ("full",))[0]
    assert half["full"][0] < 0.65 * whole["full"][0]


FLEX_MODES = ("none", "full", "selective")


def train_flex_on_the_cpu() -> None:
    """Until the process ends, flex attention has a backward on the CPU, and nothing is compiled for it."""
    flex._validate_device = lambda *states: None  # type: ignore[attr-defined]
    flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True  # type: ignore[attr-defined]
    integration: Any = sys.modules["transformers.integrations.flex_attention"]
    masking: Any = sys.modules["transformers.masking_utils"]
    integration.compile_friendly_flex_attention = lambda *qkv, training=False, **named: flex.flex_attention(*qkv, **named)
    masking.create_block_mask = lambda *args, _compile=False, **named: flex.create_block_mask(*args, **named)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "modes"),
    [("llama+flex", FLEX_MODES[2:]), *((name, FLEX_MODES) for name in ("llama+flex", "gemma3_text+flex", "bert+flex"))],
)
@on_ranks(2, timeout=240)
def test_flex_attention(rank: int, world_size: int, name: str, modes: tuple[str, ...]) -> None:
    whole = build(name)
    train_flex_on_the_cpu()
    wrong = wrong_in_modes(whole, batch(name), ContextParallel(2), modes)
    if modes == FLEX_MODES and name.startswith("llama"):
        wrong += wrong_forms(name, 2, ("selective",))
        wrong += wrong_in_modes(build(name), batch(name), ContextParallel(2, "ulysses"), ("full",))
    assert not wrong, wrong
