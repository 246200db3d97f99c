"""Suite ``overhead``: what checkpointing costs where Python is the bottleneck, against PyTorch's own contexts.

Four Llama-style blocks of width 64 on 32 tokens: the kernels take next to nothing, so the step time is the time spent
around them. The variants take turns, step by step, so that a change of the machine's load affects all of them.
"""

from __future__ import annotations

import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from nemo_like.activation_checkpointing.contexts import make_selective_checkpoint_context_fn
from nemo_like.activation_checkpointing.policy import FullPolicy, Policy, SelectivePolicy
from tests.models.blocks import checkpoint_region
from tests.tools.benchmarks.suite import Column, Measured, Suite

WIDTH, TOKENS, LAYERS, REPEATS = 64, 32, 4, 40
HEADS, HEAD_DIM = 4, 16
BASELINE = "PyTorch selective contexts"

Step = Callable[[Tensor], Tensor]


class _Block(nn.Module):
    """Llama-style: width 64, one key-value head, FFN 224, rotary positions. (1, T, D) to (1, T, D)."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {"q": (64, 64), "k": (64, 16), "v": (64, 16), "o": (64, 64), "gate": (64, 224), "up": (64, 224)}
        self.linear = nn.ModuleDict(
            {k: nn.Linear(a, b, bias=False) for k, (a, b) in (shapes | {"down": (224, 64)}).items()}
        )
        self.scale1, self.scale2 = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, t, d = x.shape
        h = _norm(x, self.scale1)
        q, k, v = [self.linear[name](h).view(b, t, -1, HEAD_DIM).transpose(1, 2) for name in "qkv"]
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        k, v = k.expand(b, HEADS, t, HEAD_DIM), v.expand(b, HEADS, t, HEAD_DIM)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        x = x + self.linear["o"](a)
        h = _norm(x, self.scale2)
        return x + self.linear["down"](F.silu(self.linear["gate"](h)) * self.linear["up"](h))


def _norm(x: Tensor, scale: Tensor) -> Tensor:
    """RMS norm in elementary operators, as transformers writes it."""
    return scale * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = HEAD_DIM // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def parity_contexts(policy: SelectivePolicy) -> Any:
    """PyTorch's own contexts with the rule its users write: the save set, and every second `mm` recomputed."""
    save, mm = frozenset(policy.tracked_ops()), torch.ops.aten.mm.default
    count = {False: 0, True: 0}

    def policy_fn(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op is mm:
            count[context.is_recompute] += 1
            keep = count[context.is_recompute] % 2 == 1
        else:
            keep = op in save
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy_fn)


def _variants(blocks: nn.ModuleList, around: tuple[Tensor, Tensor], compile: Sequence[str]) -> dict[str, list[Step]]:
    """Name → one function per layer."""
    selective, full = SelectivePolicy(), FullPolicy()
    context_fn = make_selective_checkpoint_context_fn(selective)

    def each(layer_step: Callable[[nn.Module], Step]) -> list[Step]:
        return [layer_step(block) for block in blocks]

    def region(policy: Policy) -> Callable[[nn.Module], Step]:
        return lambda block: lambda x: checkpoint_region(block, x, *around, policy=policy)

    def torchs(**options: Any) -> Callable[[nn.Module], Step]:
        return lambda block: lambda x: checkpoint(block, x, *around, use_reentrant=False, **options)

    variants = {
        "none": each(lambda block: lambda x: block(x, *around)),
        "PyTorch full": each(torchs()),
        "ours full": each(region(full)),
        BASELINE: each(torchs(context_fn=lambda: parity_contexts(selective))),
        "ours selective": each(region(selective)),
        "our context_fn in torch.utils.checkpoint": each(torchs(context_fn=context_fn)),
    }
    for backend in compile:
        compiled = torch.compile(
            lambda block, x, *a: checkpoint_region(block, x, *a, policy=selective), backend=backend
        )
        variants[f"ours selective, {backend}"] = [_bind(compiled, block, around) for block in blocks]
    return variants


def _bind(compiled: Callable[..., Tensor], block: nn.Module, around: tuple[Tensor, Tensor]) -> Step:
    return lambda x: compiled(block, x, *around)


def run_overhead(
    repeats: int = REPEATS, warmup: int = 5, compile: Sequence[str] = ("aot_eager",)
) -> list[dict[str, Any]]:
    """Measure every variant `repeats` times, taking turns.

    Returns one row per variant: ``median_ms`` of wall time, ``cpu_ms`` (median of this thread's CPU time: less
    disturbed by other processes), and both relative to PyTorch's selective contexts.
    """
    torch.manual_seed(0)
    blocks = nn.ModuleList(_Block() for _ in range(LAYERS))
    x = torch.randn(1, TOKENS, WIDTH, requires_grad=True)
    variants = _variants(blocks, (torch.randn(TOKENS, HEAD_DIM), torch.randn(TOKENS, HEAD_DIM)), compile)
    wall: dict[str, list[float]] = {name: [] for name in variants}
    cpu: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(warmup + repeats):
        for name, steps in variants.items():
            start, start_cpu = time.perf_counter(), time.thread_time()
            h = x
            for step in steps:
                h = step(h)
            h.sum().backward()
            if turn >= warmup:
                wall[name].append(time.perf_counter() - start)
                cpu[name].append(time.thread_time() - start_cpu)
    base, base_cpu = statistics.median(wall[BASELINE]), statistics.median(cpu[BASELINE])
    return [
        {
            "variant": name,
            "median_ms": statistics.median(wall[name]) * 1e3,
            "relative": statistics.median(wall[name]) / base,
            "cpu_ms": statistics.median(cpu[name]) * 1e3,
            "cpu_relative": statistics.median(cpu[name]) / base_cpu,
        }
        for name in variants
    ]


def _run(options: Namespace) -> Measured:
    """Measure on the CPU, in float32, at least 40 steps per variant; ``aot_eager`` unless other back ends are named."""
    repeats = max(options.repeats, REPEATS)
    rows = run_overhead(repeats, 5, options.compile)
    about = {"layers": LAYERS, "width": WIDTH, "tokens": TOKENS, "repeats": repeats}
    return Measured("Overhead of checkpointing", rows, about)


OVERHEAD = Suite(
    help="step time of small layers, where the cost of checkpointing itself shows, against PyTorch's own contexts",
    columns=(
        Column("variant", "variant"),
        Column("median_ms", "median ms", "{:.2f}".format),
        Column("relative", "relative to PyTorch's", "{:.3f}".format),
        Column("cpu_ms", "CPU ms", "{:.2f}".format),
        Column("cpu_relative", "CPU relative", "{:.3f}".format),
    ),
    run=_run,
)
