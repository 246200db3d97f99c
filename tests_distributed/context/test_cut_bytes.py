"""What one rank holds and sends under context parallelism, counted: the table of docs/evidence/context-parallel.md."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from nemo_like import ContextParallel, apply_activation_checkpointing
from nemo_like._util.live_bytes import LiveBytes
from nemo_like.distributed.context import apply_context_parallel
from nemo_like.distributed.context.methods import ring
from nemo_like.torch_compat import TorchDispatchMode
from tests.models.families import COMMON, hf
from tests_distributed.spawn import run_ranks

ROWS, LENGTH, LAYERS, HEADS, KV_HEADS, WIDTH = 1, 512, 4, 8, 4, 16
HIDDEN = HEADS * WIDTH
HEAD_BYTES = ROWS * LENGTH * WIDTH * 4
"""Of one head over the whole sequence."""


class SentBytes(TorchDispatchMode):
    """Bytes that a rank sends to others, by operator."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: dict[str, int] = {}
        self.calls: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "namespace", "") == "nemo_like" and "ring" not in func.name():
            name, ranks = func.name().removeprefix("nemo_like::"), next(a for a in args[1:][::-1] if isinstance(a, int))
            others = {"gather_sequence": ranks - 1}.get(name, (ranks - 1) / ranks)
            self.sent[name] = self.sent.get(name, 0) + int(args[0].nbytes * others)
            self.calls[name] = self.calls.get(name, 0) + 1
        return func(*args, **(kwargs or {}))

    def __enter__(self) -> Any:
        """What a ring sends inside of its operators is counted where it does."""
        self._exchange = ring._exchange

        def counted(sent: torch.Tensor, group: Any) -> Any:
            self.sent["ring"] = self.sent.get("ring", 0) + sent.nbytes
            return self._exchange(sent, group)

        ring._exchange = counted
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        ring._exchange = self._exchange
        super().__exit__(*exception)


def _count(rank: int, world_size: int, method: str, modes: tuple[str, ...]) -> dict[str, tuple[int, Any, Any]]:
    shape = COMMON | dict(
        hidden_size=HIDDEN, intermediate_size=3 * HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, max_position_embeddings=LENGTH, use_cache=False,
    )  # fmt: skip
    ids = torch.randint(1, 48, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    found = {}
    for mode in modes:
        model = hf("LlamaForCausalLM", "LlamaConfig", **shape)().train()
        if world_size > 1:
            mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("cp",))
            apply_context_parallel(model, mesh, ContextParallel(world_size, method))
        apply_activation_checkpointing(model, mode)
        for _ in range(2):  # the first call compares batches, and makes what stays
            with LiveBytes() as live, SentBytes() as sent:
                loss = model(input_ids=ids, labels=ids).loss
                held = live.live
                loss.backward()
        found[mode] = (held, sent.sent, sent.calls)
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize("method", ["all_gather", "ulysses", "ring"])
def test_what_is_sent(method: str) -> None:
    found = run_ranks(2, _count, method, ("none", "full"))[0]
    _, sent, calls = found["none"]
    both = LAYERS * 2 * KV_HEADS * HEAD_BYTES  # keys and values of the whole sequence
    if method == "ring":  # a part to the next rank; in backward again, and float32 gradients once around
        assert sent["ring"] == both // 2 + both // 2 + both
        assert found["full"][1]["ring"] == sent["ring"] + both // 2, "sent again in backward"
    elif method == "all_gather":  # keys and values of a part to each other rank; their gradients back
        assert calls == {"gather_sequence": 2 * LAYERS, "scatter_sequence": 2 * LAYERS, "sum_parts": 1}
        assert sent["gather_sequence"] == sent["scatter_sequence"] == LAYERS * KV_HEADS * HEAD_BYTES // 2 * 2
        assert found["full"][2]["gather_sequence"] == 4 * LAYERS, "gathered again in backward"
    else:
        assert calls == {"heads_for_sequence": 4 * LAYERS, "sequence_for_heads": 4 * LAYERS, "sum_parts": 1}
        each = LAYERS * (HEADS + 2 * KV_HEADS + HEADS) * HEAD_BYTES // 4  # half of a half of each
        assert sent["heads_for_sequence"] + sent["sequence_for_heads"] == 2 * each


def test_what_is_held_shrinks_with_the_ranks() -> None:
    whole, half = _count(0, 1, "all_gather", ("full",)), run_ranks(2, _count, "all_gather", ("full",))[0]
    assert half["full"][0] < 0.65 * whole["full"][0]
