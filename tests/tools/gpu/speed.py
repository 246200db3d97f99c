"""Check 2: step times of the modes together with torch's own; AdamW. Check 7: compiled layers. Check 8: the copies of
offloading. Check 10: head and loss in chunks. Check 12: matmuls in float8."""

from __future__ import annotations

import copy
import functools
import importlib.util
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from nemo_like._util.module_tree import bare_name
from nemo_like.activation_checkpointing.kv_sharing import disable_cache
from nemo_like.activation_checkpointing.plan import Part
from nemo_like.activation_checkpointing.policy import SelectivePolicy
from nemo_like.comparison import TorchCheckpoint, in_mode
from nemo_like.layers import find_layers
from nemo_like.losses import chunked_cross_entropy
from nemo_like.offload import offloader_of
from nemo_like.options import ChunkedLoss, OffloadConfig
from nemo_like.profiling.measured_step import (
    compare_gradients,
    gradients_of,
    measure_seconds,
    spread,
    step_loss,
    zero_gradients,
)
from tests.tools.benchmarks.overhead import parity_contexts
from tests.tools.gpu.driver import Run
from tests.tools.gpu.machine import COPIES, KERNELS, Machine, common, covered, training
from tests.tools.gpu.memory import Plans, write_peaks
from tests.tools.gpu.torch_2_11 import NO_POLICIES, OLDER

EAGER = (
    "none",
    "full",
    "selective",
    "submodule",
    "50%",
    "torch-full",
    "torch: selective, same operators",
    "Hugging Face: gradient checkpointing",
    "selective+offload=saved",
)
STATS = ("moved_bytes", "prefetched", "reloads", "host_live_bytes")
PLANNED = ("none", "full", "selective", "50%")
SHORT = ("none", "full", "selective", "torch-full", "torch: selective, same operators")
"""Of rows so short that the host is the bottleneck."""


def _prepared(model: nn.Module, name: str, batch: Any) -> nn.Module:
    """Return `model` in a mode; torch's selective one keeps what ``ac="selective"`` keeps, every second matmul left out."""
    if name.startswith("Hugging Face"):
        model.gradient_checkpointing_enable({"use_reentrant": False})
    elif name == "torch: selective, same operators":
        for layer in find_layers(model):
            TorchCheckpoint(layer.module, context_fn=functools.partial(parity_contexts, SelectivePolicy())).put()
    else:
        return in_mode(model, name, batch)
    return model


def check(run: Run) -> None:
    """Let the modes take turns, on long rows and on short ones; then measure AdamW."""
    machine = Machine(run.cpu)
    base = machine.model(machine.pick(4, 2))
    for names, length in ((EAGER, machine.pick(8192, 64)), (SHORT[: machine.pick(5, 1)], machine.pick(512, 16))):
        _turns(run, machine, base, names, machine.batch(1, length))
        machine.settle()
    _optimizers(run, machine, base, machine.batch(1, machine.pick(512, 16)))


def _turns(run: Run, machine: Machine, base: nn.Module, names: Sequence[str], batch: Any) -> None:
    tokens = batch["input_ids"].numel()
    models: dict[str, nn.Module] = {}
    disable_cache(base)
    for name in names:
        with run.guarded(f"{name}, {tokens} tokens"):
            model = copy.deepcopy(base, {id(parameter): parameter for parameter in base.parameters()})
            model = _prepared(model, name, batch)
            measure_seconds(model, batch, machine.device)  # a mode that cannot run is left out here
            models[name] = model
    repeats, warmup = machine.pick((7, 3), (3, 0))
    turns = [
        [1000 * measure_seconds(model, batch, machine.device) for model in models.values()]
        for _ in range(warmup + repeats)
    ]
    times = dict(zip(models, zip(*turns[warmup:])))
    milliseconds = {name: statistics.median(taken) for name, taken in times.items()}
    plans = Plans(machine, base, batch)
    for name, ms in milliseconds.items():

        def step() -> None:
            step_loss(models[name], batch).backward()  # noqa: B023

        with run.guarded(f"{name}, {tokens} tokens"):
            peak, _ = machine.peaks(step, base.parameters()) if machine.is_cuda else (None, None)
            machine.wait()
            begun = time.process_time()  # backward has a thread of its own
            step()
            host = 1000 * (time.process_time() - begun)
            compared = {"none": "to_none", "torch: selective, same operators": "to_torch_selective"}
            others = {title: ms / milliseconds[other] for other, title in compared.items() if other in milliseconds}
            # Times are data: only that a mode runs is judged.
            run.row(
                f"{name}, {tokens} tokens",
                1000 * plans.row(name, optimizer="sgd").seconds if name in PLANNED else None,
                ms,
                "ms",
                **others,
                spread=spread(times[name]),
                host_ms=host,
                peak=peak,
            )


def _optimizers(run: Run, machine: Machine, model: nn.Module, batch: Any) -> None:
    """Measure a step of AdamW, and the bytes that it takes in addition to the state; plans predict both."""
    zero_gradients(model)
    plans = Plans(machine, model, batch)
    for word in ("adamw-fused", "adamw-foreach"):
        with run.guarded(word):
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **{word.partition("-")[2]: True})
            optimizer.step()
            machine.settle()
            before = torch.cuda.memory_allocated() if machine.is_cuda else 0
            peak, _ = machine.peaks(optimizer.step)
            sgd, adamw = (plans.row("none", optimizer=each) for each in ("sgd", word))
            run.row(f"{word}: step", 1000 * (adamw.seconds - sgd.seconds), machine.ms(optimizer.step), "ms")
            run.row(f"{word}: temporaries", adamw.plan.peak.get(Part.OPTIMIZER_STEP, 0), peak - before, "bytes")
            del optimizer


def compiled(run: Run) -> None:
    """Compile the layers of one mode after the other: time and peak of each are written before the next one begins."""
    machine = Machine(run.cpu)
    layers, batch = machine.pick(4, 2), machine.batch(1, machine.pick(8192, 64))
    compiler = machine.pick("inductor", "aot_eager")
    plans = Plans(machine, machine.model(layers, place="meta"), batch)
    for ac in machine.pick(("none", "full", "selective"), ("none",)):
        name = f"{ac} + {compiler}"
        if OLDER and ac == "selective":
            run.skip(name, NO_POLICIES)
            continue
        with run.guarded(name):
            machine.settle()
            model = machine.parallelize(machine.model(layers), ac, batch, compile=compiler)
            begun = time.perf_counter()
            steps = training(model, batch, torch.optim.SGD(model.parameters(), lr=1e-4))
            steps(2)
            machine.wait()
            run.row(f"{name}: first two steps", None, time.perf_counter() - begun, "s")
            machine.settle()  # the compiler's own tensors
            allocated, reserved = machine.peaks(lambda: steps(2), model.parameters())  # noqa: B023
            ms = machine.ms(lambda: steps(1), machine.pick(7, 2))  # noqa: B023
            # Tracing for a plan takes seconds, so what is measured is written before.
            run.row(f"{name}: measured", None, ms, "ms", allocated=allocated, reserved=reserved)
            row = plans.row(ac, optimizer="sgd", compile=compiler)
            run.row(name, 1000 * row.seconds, ms, "ms")
            write_peaks(run, name, row, allocated, reserved)


def float8(run: Run) -> None:
    """Train in float8 and in bfloat16: milliseconds of a step, the loss and the peak."""
    machine = Machine(run.cpu)
    if importlib.util.find_spec("torchao") is None:
        run.skip("float8", "no package torchao")
        return
    layers, batch, losses = machine.pick(4, 1), machine.batch(1, machine.pick(8192, 64)), list[float]()
    for precision in ("bf16", "fp8"):
        with run.guarded(precision):
            machine.settle()
            model = machine.parallelize(machine.model(layers), "none", batch, precision=precision)
            losses.append(step_loss(model, batch).item())
            step = lambda: step_loss(model, batch).backward()  # noqa: B023, E731
            peak, _ = machine.peaks(step, model.parameters())
            ms, near = machine.ms(step, machine.pick(5, 1), machine.pick(2, 0)), abs(losses[-1] / losses[0] - 1) <= 0.02
            run.row(f"{precision}: step", None, ms, "ms", ok=near, loss=losses[-1], peak=peak)


def offload(run: Run) -> None:
    """Measure copies and what hides them; compare gradients of many steps in which freed memory is overwritten."""
    machine = Machine(run.cpu)
    layers, batch = machine.pick(4, 2), machine.batch(1, machine.pick(8192, 64))
    junk = machine.pick(1 << 29, 1 << 12)
    machine.same_bits(True)
    wanted = gradients_of(machine.parallelize(machine.model(layers), "full"), batch)
    ways = (("boundary", "full"), ("saved", "selective"), ("all", "none"))
    for mode, ac in ways[: machine.pick(3, 2)]:
        machine.settle()
        with run.guarded(mode):
            # By default tensors below a MiB stay: the tiny model has none above.
            model = machine.parallelize(
                machine.model(layers), ac, offload=OffloadConfig(mode, min_bytes=machine.pick(1 << 20, 1 << 10))
            )
            offloader = offloader_of(model)
            assert offloader is not None
            begun = time.perf_counter()
            step_loss(model, batch).backward()
            machine.wait()
            first = time.perf_counter() - begun
            zero_gradients(model)
            step_loss(model, batch).backward()
            events = machine.trace(
                lambda: [step_loss(model, batch).backward() for _ in range(2)],  # noqa: B023
                keep=functools.partial(run.keep, f"trace-{mode}.json"),
            )
            stats = offloader.stats.as_dict()
            more: dict[str, Any] = {name: stats[name] for name in STATS}
            # A copy on the device is one of its kernels, in other words.
            copies = [e for e in events if e.kind in COPIES and ("DtoH" in e.name or "HtoD" in e.name)]
            under = common(covered(copies), covered([e for e in events if e.kind in KERNELS]))
            share, busy = None, sum(end - start for start, end in covered(copies))
            if copies:
                share = under / busy
                for way in ("DtoH", "HtoD"):
                    some = [e for e in copies if way in e.name]
                    more[f"{way}_GBs"] = sum(e.size for e in some) / 1e3 / max(1e-9, sum(e.end - e.start for e in some))
            # The audit's aim: four fifths of the copies' time under kernels.
            run.row(
                f"{mode}: copies under kernels",
                0.8,
                share,
                "share",
                ok=more["moved_bytes"] > 0 and (share >= 0.8 if share is not None else not machine.is_cuda),
                first_s=first,
                **more,
            )
            result, attention = machine.attention(lambda: _race(machine, model, batch, wanted, junk))  # noqa: B023
            run.row(
                f"{mode}: bitwise, freed memory overwritten",
                "bitwise",
                result,
                ok=result == "bitwise",
                attention=attention,
            )


def _race(machine: Machine, model: nn.Module, batch: Any, wanted: dict[str, torch.Tensor], junk: int) -> str:
    """Return how the gradients of steps compare, where between forward and backward freed memory is filled with NaN."""
    results = set[str]()
    for _ in range(machine.pick(20, 2)):
        for parameter in model.parameters():
            parameter.grad = None
        torch.manual_seed(0)
        loss = step_loss(model, batch)
        nothing = [torch.full((junk,), torch.nan, device=machine.device) for _ in range(4)]
        del nothing
        loss.backward()
        got = {bare_name(name): p.grad for name, p in model.named_parameters() if p.grad is not None}
        results.add(compare_gradients(wanted, got))
    return " ".join(sorted(results))


def loss(run: Run) -> None:
    """Measure the head and cross entropy of Llama 3, whole and in chunks, and their gradients against float64."""
    machine = Machine(run.cpu)
    width, vocabulary, tokens = machine.pick((4096, 128_256, 16_384), (64, 512, 256))
    torch.manual_seed(0)
    hidden = machine.normal(tokens, width, grad=True)
    labels = torch.randint(vocabulary, (tokens,), device=machine.device)
    head = nn.Linear(width, vocabulary, bias=False, device="meta")
    head.weight = nn.Parameter(machine.normal(vocabulary, width) * width**-0.5)
    some = slice(0, min(512, tokens))  # whose logits in float64 are 0.5 GB
    wide = hidden.detach()[some].double().requires_grad_()
    logits = wide @ head.weight.detach().double().t()
    (exact,) = torch.autograd.grad(F.cross_entropy(logits, labels[some], reduction="sum") / tokens, wide)
    del logits

    chunked = functools.partial(chunked_cross_entropy, hidden, head, labels)
    cases: dict[str, Callable[[], Any]] = {
        "whole": lambda: F.cross_entropy(head(hidden).float(), labels),
        "chunked": chunked,
    }
    if machine.is_cuda:  # it compiles for seconds
        cases["chunked, inductor"] = functools.partial(chunked, options=ChunkedLoss(compile="inductor"))
    errors = list[float]()
    for name, call in cases.items():
        with run.guarded(name):

            def step(call: Callable[[], torch.Tensor] = call) -> None:
                hidden.grad = head.weight.grad = None
                call().backward()

            step()  # compiles
            peak, _ = machine.peaks(step, (hidden, head.weight, labels))
            assert hidden.grad is not None
            error, ms = ((hidden.grad[some] - exact).norm() / exact.norm()).item(), machine.ms(step)
            errors.append(error)
            # Chunks round as the whole does: once to the gradients' dtype.
            run.row(name, None, ms, "ms", ok=error <= 2 * errors[0], peak=peak, error=error)
        machine.settle()
