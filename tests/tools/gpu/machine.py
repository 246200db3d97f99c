"""The device that is measured: models on it, times, bytes and kernels. What differs between a GPU and the CPU is here."""

from __future__ import annotations

import gc
import json
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from nemo_like import parallelize
from nemo_like._util.device_work import wait_for
from tests.allocator_events import cpu_events, quiet_profiler

T = TypeVar("T")
KERNELS, COPIES = ("kernel",), ("gpu_memcpy",)
"""Categories of a trace of CUDA; on the CPU operators stand for kernels, and there is no copy."""
MODELS = {"llama": (LlamaConfig, LlamaForCausalLM), "moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM)}


_ATTENTION = re.compile(r"flash|fmha|sdpa|_dot_product_\w+_attention(?!_math)")


class Event(NamedTuple):
    """A kernel or a copy of a trace; microseconds."""

    name: str
    kind: str
    start: float
    end: float
    size: int


class Machine:
    """One GPU, or the CPU with tiny sizes."""

    def __init__(self, cpu: bool) -> None:
        self.is_cuda = not cpu
        self.device = torch.device("cpu") if cpu else torch.device("cuda", 0)
        self.dtype = torch.bfloat16
        if self.is_cuda:
            torch.cuda.set_device(self.device)

    def pick(self, gpu: T, cpu: T) -> T:
        """Return the value for a GPU or that for the CPU."""
        return gpu if self.is_cuda else cpu

    # --- models ---------------------------------------------------------------------------------------------------

    def config(self, layers: int, kind: str = "llama", **options: Any) -> Any:
        """Return the config of a model with the widths of Llama 3 8B, or of Qwen3-30B-A3B with fewer experts."""
        sizes = {
            "llama": self.pick((4096, 14336, 32, 8, 32_000), (64, 128, 4, 2, 128)),
            "moe": self.pick((2048, 6144, 32, 4, 32_000), (64, 128, 4, 2, 128)),
        }[kind]
        names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
        fixed: dict[str, Any] = {"max_position_embeddings": 1 << 17, "attn_implementation": "sdpa", "use_cache": False}
        if kind == "moe":
            experts = self.pick((32, 8, 768, 128), (4, 2, 64, 16))
            fixed |= zip(("num_experts", "num_experts_per_tok", "moe_intermediate_size", "head_dim"), experts)
        return MODELS[kind][0](num_hidden_layers=layers, **fixed | dict(zip(names, sizes)) | options)

    def model(self, layers: int, kind: str = "llama", place: str | torch.device | None = None, **options: Any) -> Any:
        """Return that model, always with the same random weights, on the device or on `place`."""
        torch.manual_seed(0)
        with torch.device(self.device if place is None else place):
            return MODELS[kind][1](self.config(layers, kind, **options)).to(self.dtype).train()

    def batch(self, rows: int, length: int) -> dict[str, torch.Tensor]:
        """Return token ids and labels."""
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(1, self.pick(32_000, 128), (rows, length), generator=generator).to(self.device)
        return {"input_ids": ids, "labels": ids}

    def parallelize(self, model: nn.Module, ac: Any, batch: Any = None, **options: Any) -> Any:
        """Return the model ready to train on this device alone."""
        return parallelize(model, "single", ac, sample_input=batch, device=self.device, **options)

    def normal(self, *shape: int, dtype: torch.dtype | None = None, grad: bool = False) -> torch.Tensor:
        """Return normal random numbers on the device."""
        return torch.randn(shape, device=self.device, dtype=dtype or self.dtype).requires_grad_(grad)

    def same_bits(self, wanted: bool) -> None:
        """Have kernels give the same bits in each run, or not: flash attention's backward adds in any order by default.

        With ``warn_only=True`` torch would warn and run the kernels of attention that add in any order.
        """
        torch.use_deterministic_algorithms(wanted, warn_only=False)
        # It would write to new memory, on another stream than that which offloading copies to it on.
        settings: Any = torch.utils.deterministic
        settings.fill_uninitialized_memory = False

    # --- measuring ------------------------------------------------------------------------------------------------

    def wait(self) -> None:
        """Block until the device has nothing left to do."""
        wait_for(self.device)

    def settle(self) -> None:
        """Free what is not used, so that the next mode begins with an empty allocator."""
        gc.collect()
        if self.is_cuda:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def ms(self, call: Callable[[], Any], repeats: int = 5, warmup: int = 2) -> float:
        """Return the median milliseconds of `call`, by events on a GPU."""
        times = []
        for turn in range(warmup + repeats):
            if self.is_cuda:
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                call()
                end.record()
                end.synchronize()
                taken = start.elapsed_time(end)
            else:
                begun = time.perf_counter()
                call()
                taken = 1000 * (time.perf_counter() - begun)
            if turn >= warmup:
                times.append(taken)
        return statistics.median(times)

    def peaks(self, call: Callable[[], Any], there: Iterable[torch.Tensor] = ()) -> tuple[int, int | None]:
        """Return the most bytes that are allocated and reserved while `call` runs, those of the tensors `there` included.

        A GPU's allocator knows all tensors; the CPU's tells only of those that are made while it is watched.
        """
        if self.is_cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            call()
            torch.cuda.synchronize()
            return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        before = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in there}
        return sum(before.values()) + max(cpu_events(call)), None

    def trace(
        self, call: Callable[[], Any], host: bool = False, keep: Callable[[bytes], Any] = lambda text: None
    ) -> list[Event]:
        """Return the kernels and copies of `call`; `keep` gets the trace for Perfetto.

        host: also trace the operators of the host, and take those for kernels that `record_function` names.
        """
        on_host = host or not self.is_cuda
        activities = [ProfilerActivity.CUDA] if self.is_cuda else []
        with quiet_profiler(), profile(activities=activities + [ProfilerActivity.CPU] * on_host) as profiler:
            call()
            self.wait()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trace.json")
            profiler.export_chrome_trace(str(path))
            text = path.read_bytes()
        keep(text)
        kinds = ("user_annotation",) if host else (*KERNELS, *COPIES) if self.is_cuda else ("cpu_op",)
        found = [
            Event(e["name"], e["cat"], e["ts"], e["ts"] + e["dur"], int((e.get("args") or {}).get("bytes", 0)))
            for e in json.loads(text)["traceEvents"]
            if e.get("cat") in kinds and "dur" in e
        ]
        return sorted(found, key=lambda event: event.start)

    def attention(self, call: Callable[[], T]) -> tuple[T, str]:
        """Return the result of `call`, and the kernels (on the CPU the operators) that its attention ran."""
        results: list[T] = []
        events = self.trace(lambda: results.append(call()))
        names = {re.sub(r"^void |<.*|\(.*|^aten::", "", event.name) for event in events}
        fused = sorted(name[:60] for name in names if _ATTENTION.search(name))
        return results[0], " ".join(fused) or "math"


def covered(events: Sequence[Event]) -> list[tuple[float, float]]:
    """Return the spans in which one of `events`, sorted by their start, runs."""
    spans: list[tuple[float, float]] = []
    for event in events:
        if spans and event.start <= spans[-1][1]:
            spans[-1] = spans[-1][0], max(spans[-1][1], event.end)
        else:
            spans.append((event.start, event.end))
    return spans


def common(one: Sequence[tuple[float, float]], other: Sequence[tuple[float, float]]) -> float:
    """Return the microseconds that spans have in common; of each list none overlap."""
    return sum(max(0.0, min(end, stop) - max(start, begin)) for start, end in one for begin, stop in other)


def training(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer | None = None) -> Callable[[int], None]:
    """Return the loop that a plan counts with by default: steps of AdamW, of which the output stays until the next one."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4) if optimizer is None else optimizer
    state: dict[str, Any] = {}

    def run(steps: int) -> None:
        for _ in range(steps):
            state["out"] = model(**batch)
            state["out"].loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return run
