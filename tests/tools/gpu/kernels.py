"""Check 1: the attention kernel that a plan expects, and the one that runs. Check 6: head and loss in chunks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_like.fake.cuda_ops import Call, backend
from nemo_like.fake.run import FakeRun
from nemo_like.losses import chunked_cross_entropy
from nemo_like.options import ChunkedLoss
from tests.models.blocks import Operators
from tests.tools.gpu.driver import Run
from tests.tools.gpu.machine import KERNELS, Machine

H100 = (9, 0)
NAMES = {
    "_scaled_dot_product_flash_attention": "flash",
    "_scaled_dot_product_efficient_attention": "mem_efficient",
    "_scaled_dot_product_cudnn_attention": "cudnn",
}


def _calls(machine: Machine) -> dict[str, Callable[[], Call]]:
    """Return calls by name; the tensors of one are freed before those of the next are made."""
    rows, keys = machine.pick(2048, 64), machine.pick(16_384, 512)

    def call(
        queries: int = rows,
        length: int = rows,
        heads: int = 32,
        kv_heads: int = 8,
        head: int = 128,
        value: int = 0,
        dtype: torch.dtype = torch.bfloat16,
        mask: Callable[[], Tensor] | None = None,
        **options: Any,
    ) -> Call:
        def states(count: int, tokens: int, width: int) -> Tensor:
            return torch.randn(1, count, tokens, width, dtype=dtype, device=machine.device).requires_grad_()

        shapes = (heads, queries, head), (kv_heads, length, head), (kv_heads, length, value or head)
        query, keys, values = (states(*shape) for shape in shapes)
        return Call(query, keys, values, None if mask is None else mask(), **options)

    def positions(count: int) -> Tensor:
        return torch.arange(count, device=machine.device)

    def bias(first: int) -> Tensor:
        """The mask of a rank's rows from `first` on, as numbers."""
        hidden = positions(keys)[None] > first + positions(rows)[:, None]
        return torch.zeros(rows, keys, dtype=torch.bfloat16, device=machine.device).masked_fill_(hidden, -torch.inf)

    def documents(window: int) -> Tensor:
        at = positions(rows)
        of = at // (rows // 4)
        near = at[:, None] - at[None] < window
        return ((of[:, None] == of[None]) & (at[:, None] >= at[None]) & near)[None, None]

    causal: dict[str, Any] = {"is_causal": True}
    return {
        "causal, grouped": lambda: call(enable_gqa=True, **causal),
        "causal": lambda: call(kv_heads=32, **causal),
        "all keys, grouped": lambda: call(length=keys, enable_gqa=True),
        "bias of rank 0 of 8": lambda: call(length=keys, kv_heads=32, mask=lambda: bias(0)),
        "bias of rank 7 of 8": lambda: call(length=keys, kv_heads=32, mask=lambda: bias(keys - rows)),
        "documents, boolean": lambda: call(kv_heads=32, mask=lambda: documents(rows)),
        "window, boolean": lambda: call(kv_heads=32, mask=lambda: documents(rows // 8)),
        "heads of 64": lambda: call(kv_heads=32, head=64, **causal),
        "heads of 256": lambda: call(heads=16, kv_heads=16, head=256, **causal),
        "heads of 192 and 128": lambda: call(kv_heads=32, head=192, value=128, **causal),
        "heads of 60": lambda: call(kv_heads=32, head=60, **causal),
        "dropout": lambda: call(kv_heads=32, dropout_p=0.1, **causal),
        "float32": lambda: call(kv_heads=32, dtype=torch.float32, **causal),
    }


def check(run: Run) -> None:
    """Compare the kernels; on the CPU, of an H100 on fake tensors."""
    machine = Machine(run.cpu)
    capability = torch.cuda.get_device_capability() if machine.is_cuda else H100
    for name, make in _calls(machine).items():
        with run.guarded(name):
            with nullcontext() if machine.is_cuda else FakeRun(cuda=capability):
                call = make()
                predicted = backend(call, capability)
                with Operators() as ran:
                    out = _attend(call)
            ops = [op.__name__.partition(".")[0] for op in ran.ops]
            measured = next((NAMES[op] for op in ops if op in NAMES), "math")
            more: dict[str, Any] = {}
            if machine.is_cuda:
                grad = torch.randn_like(out)
                del out
                seconds = machine.ms(lambda call=call: _attend(call)) / 1000  # type: ignore[misc]
                query, key = call.query, call.key
                flops = 4 * query.numel() * key.shape[2] * (0.5 if call.is_causal else 1)
                both = machine.ms(lambda call=call, grad=grad: _attend(call).backward(grad)) / 1000  # type: ignore[misc]
                kernels = machine.trace(lambda call=call: _attend(call), run.out / ".trace.json.gz")  # type: ignore[misc]
                longest = max((e for e in kernels if e.kind in KERNELS), key=lambda e: e.end - e.start, default=None)
                more = {"ms": seconds * 1000, "backward_ms": (both - seconds) * 1000, "TFLOPs": flops / seconds / 1e12}
                more["kernel"] = "" if longest is None else longest.name[:50]
            run.row(name, predicted, measured, ok=predicted == measured, **more)
        machine.settle()
    (run.out / ".trace.json.gz").unlink(missing_ok=True)


def _attend(call: Call) -> Tensor:
    return F.scaled_dot_product_attention(
        *call.tensors, call.mask, call.dropout_p, call.is_causal, scale=call.scale, enable_gqa=call.enable_gqa
    )


def loss(run: Run) -> None:
    """Measure the head and cross entropy of Llama 3, whole and in chunks, and their gradients against float64."""
    machine = Machine(run.cpu)
    width, vocabulary, tokens = machine.pick((4096, 128_256, 16_384), (64, 512, 256))
    torch.manual_seed(0)
    hidden = machine.normal(tokens, width, grad=True)
    weight = (machine.normal(vocabulary, width) * width**-0.5).requires_grad_()
    labels = torch.randint(vocabulary, (tokens,), device=machine.device)
    compiler = machine.pick("inductor", "aot_eager")  # inductor takes 20 s on the CPU
    head = torch.nn.Linear(width, vocabulary, bias=False, device="meta")
    head.weight = torch.nn.Parameter(weight.detach())

    def whole() -> Tensor:
        return F.cross_entropy(head(hidden).float(), labels)

    def chunked(**options: Any) -> Callable[[], Tensor]:
        return lambda: chunked_cross_entropy(hidden, head, labels, options=ChunkedLoss(**options))

    some = slice(0, min(512, tokens))  # whose logits in float64 are 0.5 GB
    logits = hidden.detach()[some].double() @ head.weight.detach().double().t()
    share = logits.softmax(-1)
    share[torch.arange(len(share), device=machine.device), labels[some]] -= 1
    exact = share @ head.weight.detach().double() / tokens
    del logits, share
    cases = {"whole": whole, "chunked": chunked(), f"chunked, {compiler}": chunked(compile=compiler)}
    first: dict[str, float] = {}
    for name, call in cases.items():
        with run.guarded(name):

            def step(call: Callable[[], Tensor] = call) -> None:
                hidden.grad = head.weight.grad = None
                call().backward()

            step()  # compiles
            peak, _ = machine.peaks(step, (hidden, head.weight, labels))
            assert hidden.grad is not None
            error = ((hidden.grad[some] - exact).norm() / exact.norm()).item()
            ms = machine.ms(step)
            first = first or {"ms": ms, "peak": peak, "error": error}
            # Chunks round as the whole does: once to the gradients' dtype.
            run.row(
                name,
                first["ms"],
                ms,
                ok=error <= 2 * first["error"],
                peak=peak,
                peak_of_whole=first["peak"],
                error=error,
            )
        machine.settle()
