"""Causal attention of a part by blocks of keys: values on the CPU, and the kernels and bytes of a GPU on fake tensors."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from nemo_like import parallelize
from nemo_like._util.live_bytes import LiveBytes
from nemo_like.distributed.context import methods
from nemo_like.fake.run import FakeRun
from nemo_like.planning.trace.layer_memory import TracedBytes
from nemo_like.torch_compat import TorchDispatchMode
from tests.models.families import HEADED, VOCAB, causal


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("heads", [1, 2])
def test_a_block_is_attention_of_torch(is_causal: bool, heads: int) -> None:
    query, grad = torch.randn(1, 2, 40, 8, requires_grad=True), torch.randn(1, 2, 40, 8)
    key, value = (torch.randn(1, heads, 40 if is_causal else 70, 8, requires_grad=True) for _ in range(2))
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=is_causal, scale=0.3, enable_gqa=True)
    with torch.no_grad():
        out, total = methods.attend_block(query, key, value, is_causal, 0.3)
        found = methods.attend_block_backward(grad, query, key, value, out, total, is_causal, 0.3)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found, torch.autograd.grad(expected, (query, key, value), grad), rtol=1e-4, atol=1e-5)


class Kernels(TorchDispatchMode):
    """Names of the attention operators that ran with their key heads, and the most elements of any tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: set[tuple[str, int]] = set()
        self.most = 0
        self.sums: list[tuple[int, ...]] = []
        """Shapes of the log-sum-exps that the memory-efficient kernel's backward is given."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if "attention" in func.__name__:
            key = args[2] if "backward" in func.__name__ else args[1]
            if func.__name__.startswith("_scaled_dot_product_efficient_attention_backward"):
                self.sums.append(tuple(args[6].shape))
            self.ran.add((func.__name__.removeprefix("_scaled_dot_product_").split("_attention")[0], key.shape[1]))
        made = [out] if isinstance(out, Tensor) else out if isinstance(out, tuple | list) else []
        self.most = max([self.most, *(each.numel() for each in made if isinstance(each, Tensor))])
        return out


def without_ranks(monkeypatch: pytest.MonkeyPatch, kernel: str) -> None:
    """Have attention of a part run `kernel`, and get tensors of the right shapes from ranks that are not there."""
    done = SimpleNamespace(wait=lambda: None)
    monkeypatch.setattr(methods, "fused_attention_kernel", lambda *_: kernel)
    monkeypatch.setattr(dist, "all_gather_single", lambda *_, **__: done)
    monkeypatch.setattr(dist, "reduce_scatter_single", lambda *_, **__: done)
    monkeypatch.setattr(methods, "_exchange", lambda sent, group: (torch.empty_like(sent), []))
    monkeypatch.setattr(methods, "find_group", lambda name: None)


HEADS, KV_HEADS, WIDTH = 32, 8, 128
"""Of an 8B Llama."""


@pytest.mark.parametrize("tokens", [32_768, 131_072, 1_048_576])
@pytest.mark.parametrize("kernel", ["flash", "cudnn", "mem_efficient"])
@pytest.mark.parametrize("method", ["all_gather", "ring"])
@pytest.mark.parametrize("rank", [0, 7])
def test_a_gpu_runs_fused_kernels_without_masks(
    method: str, kernel: str, tokens: int, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And holds at most the bytes that plans count."""
    ranks = 8
    without_ranks(monkeypatch, kernel)
    part = tokens // ranks
    how = (WIDTH**-0.5, method, rank, ranks, "")
    with FakeRun():
        query, out, grad = (torch.empty(1, HEADS, part, WIDTH, dtype=torch.bfloat16) for _ in range(3))
        key, value = (torch.empty(1, KV_HEADS, part, WIDTH, dtype=torch.bfloat16) for _ in range(2))
        forward, backward = (query, key, value, *how), (grad, query, key, value, out, torch.empty(1, HEADS, part), *how)
        for function, args in ((methods.causal_attention, forward), (methods.causal_attention_backward, backward)):
            meter, kernels = TracedBytes([each for each in args if isinstance(each, Tensor)]), Kernels()
            with meter, kernels:
                results = function._init_fn(*args)
            name = "efficient" if kernel == "mem_efficient" else kernel
            assert kernels.ran == {(name, HEADS if kernel == "mem_efficient" else KV_HEADS)}
            assert kernels.most <= 2 * ranks * key.numel() * (HEADS // KV_HEADS if kernel == "mem_efficient" else 1)
            if kernel == "mem_efficient":  # which repeats the keys: no plan is made for it on a GPU that has bfloat16
                continue
            counted = methods._scratch(args, results) + sum(each.nbytes for each in results)
            assert 0.9 * counted <= meter.peak <= 1.02 * counted


def test_sums_for_the_memory_efficient_kernel_are_in_blocks_of_32(monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes rows up to a multiple of 32, and reads as many in backward."""
    monkeypatch.setattr(methods, "fused_attention_kernel", lambda *_: "mem_efficient")
    with FakeRun(), Kernels() as kernels:
        query, key = torch.empty(1, 4, 40, 16), torch.empty(1, 2, 40, 16)
        out, total = methods.attend_block(query, key, key, True, 0.25)
        assert total.shape == (1, 4, 40)
        grads = methods.attend_block_backward(out, query, key, key, out, total, True, 0.25)
    assert [grad.shape for grad in grads] == [query.shape, key.shape, key.shape]
    assert kernels.sums == [(1, 4, 64)]


def test_a_mask_of_packed_rows_is_kept_once_for_all_layers() -> None:
    """Each layer keeps as much as with whole rows; a boolean mask would be made numbers of in each, and kept."""
    rows, length = 2, 64
    ids, positions = torch.randint(1, VOCAB, (rows, length)), torch.arange(length).remainder(16).expand(rows, -1)
    heads = {"num_key_value_heads": HEADED["num_attention_heads"]}  # else keys and values are repeated beside any mask

    def kept(layers: int, batch: dict[str, Tensor]) -> int:
        model = parallelize(causal("Llama", **HEADED | heads | {"num_hidden_layers": layers})(), "single", ac="none")
        with LiveBytes() as live:
            model(input_ids=ids, **batch)  # what it returns is dropped
            loss = model(input_ids=ids, labels=ids, **batch).loss
            there = live.live
        del loss
        return there

    packed, whole = ([kept(layers, batch) for layers in (2, 4)] for batch in ({"position_ids": positions}, {}))
    assert packed[1] - packed[0] == whole[1] - whole[0]
    assert rows * length**2 * 4 <= packed[0] - whole[0] <= 2 * rows * length**2 * 4
