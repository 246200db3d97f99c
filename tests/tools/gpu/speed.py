"""Check 5: step times of the modes beside torch's own. Check 7: what of the copies of offloading lies under compute."""

from __future__ import annotations

import copy
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from nemo_like import Job, predict
from nemo_like._util.module_tree import bare_name
from nemo_like.activation_checkpointing.policy import SelectivePolicy
from nemo_like.bench.measured_step import compare_gradients, gradients_of, step_loss, take_turns, zero_gradients
from nemo_like.bench.modes import Mode, our_modes, peer_modes
from nemo_like.layers import find_layers
from nemo_like.offload import offloader_of
from nemo_like.options import OffloadConfig
from tests.tools.benchmarks.overhead import parity_contexts
from tests.tools.gpu.driver import Run
from tests.tools.gpu.machine import COPIES, KERNELS, Machine, common, covered
from tests.tools.gpu.torch_2_11 import NO_POLICIES, OLDER

EAGER = (
    "none",
    "full",
    "selective",
    "submodule",
    "50%",
    "torch: checkpoint per layer",
    "torch: selective, same operators",
    "Hugging Face: gradient checkpointing",
    "selective + offload saved",
    "torch: save_on_cpu",
)
SHORT = ("none", "full", "selective", "torch: checkpoint per layer", "torch: selective, same operators")
"""Of rows so short that the host is the bottleneck."""


def _modes() -> dict[str, Mode]:
    modes = [*our_modes(("50%",)), *peer_modes()]
    modes += [
        Mode("torch: selective, same operators", _torch_selective, peer=True),
        Mode("Hugging Face: gradient checkpointing", _hugging_face, peer=True),
    ]
    return {mode.name.removeprefix("budget "): mode for mode in modes}


def _torch_selective(model: nn.Module, sample: object) -> None:
    """Keep what ``ac="selective"`` keeps, every second matmul left out, by torch's own contexts."""
    contexts = functools.partial(parity_contexts, SelectivePolicy())
    for layer in find_layers(model):
        run = functools.partial(checkpoint, layer.module.forward, use_reentrant=False, context_fn=contexts)
        layer.module.forward = run


def _hugging_face(model: Any, sample: object) -> None:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def check(run: Run) -> None:
    """Let the modes take turns, on short rows, on long ones and compiled."""
    machine = Machine(run.cpu)
    layers = machine.pick(4, 2)
    repeats, warmup = machine.pick((7, 3), (3, 1))
    base = machine.model(layers)
    compiled = [f"{name} + {machine.pick('inductor', 'aot_eager')}" for name in SHORT[: machine.pick(3, 2)]]
    for names, length in (
        (SHORT, machine.pick(512, 16)),
        (EAGER, machine.pick(8192, 64)),
        (compiled, machine.pick(8192, 64)),
    ):
        _turns(run, machine, base, names, machine.batch(1, length), repeats, warmup)
        machine.settle()


def _turns(
    run: Run, machine: Machine, base: nn.Module, names: Sequence[str], batch: Any, repeats: int, warmup: int
) -> None:
    tokens, known = batch["input_ids"].numel(), _modes()
    models: dict[str, nn.Module] = {}
    for name in names:
        with run.guarded(f"{name}, {tokens} tokens"):
            mode, _, backend = (
                name.partition(" + ") if name.split(" + ")[-1] in ("inductor", "aot_eager") else (name, "", "")
            )
            if not (known[mode].on_cpu or machine.is_cuda):
                run.skip(f"{name}, {tokens} tokens", "no GPU")
                continue
            if OLDER and backend and mode == "selective":
                run.skip(f"{name}, {tokens} tokens", NO_POLICIES)
                continue
            model = copy.deepcopy(base, {id(parameter): parameter for parameter in base.parameters()})
            (known[mode].under(backend) if backend else known[mode]).prepare(model, batch)
            zero_gradients(model)
            step_loss(model, batch).backward()  # a mode that cannot run is left out here
            models[name] = model

    def step_of(model: nn.Module) -> Callable[[], None]:
        return lambda: step_loss(model, batch).backward()

    steps = [step_of(model) for model in models.values()]
    times = take_turns(steps, machine.device, repeats, warmup, lambda index: zero_gradients(base))
    milliseconds = {name: statistics.median(taken) for name, taken in zip(models, times)}
    predicted = _predicted(machine, base, batch) if names[0] == "none" else {}
    for (name, ms), taken, step in zip(milliseconds.items(), times, steps, strict=True):
        with run.guarded(f"{name}, {tokens} tokens"):
            peak, _ = machine.peaks(step, base.parameters()) if machine.is_cuda else (None, None)
            machine.wait()
            begun = time.process_time()  # backward has a thread of its own
            step()
            host = 1000 * (time.process_time() - begun)
            events = machine.trace(step, run.out / ".trace.json.gz") if machine.is_cuda else []
            kernels = covered([event for event in events if event.kind in KERNELS])
            busy = sum(stop - start for start, stop in kernels) / (kernels[-1][1] - kernels[0][0]) if kernels else None
            first = next(iter(milliseconds.values()))
            others: dict[str, Any] = {"to_none": ms / first} if names[0] == "none" else {}
            if "torch: selective, same operators" in milliseconds:
                others["to_torch_selective"] = ms / milliseconds["torch: selective, same operators"]
            spread = (max(taken) - min(taken)) / ms
            # Times are data: only that a mode runs is judged.
            run.row(
                f"{name}, {tokens} tokens",
                predicted.get(name),
                ms,
                spread=spread,
                host_ms=host,
                busy=busy,
                peak=peak,
                **others,
            )
    (run.out / ".trace.json.gz").unlink(missing_ok=True)


def _predicted(machine: Machine, base: nn.Module, batch: Any) -> dict[str, float]:
    """Return the milliseconds that plans predict, without those of the optimizer, for the modes that have a plan."""
    job = Job.of("single", device=machine.device, optimizer="sgd")
    report = predict(base, job, sample_input=batch, budgets=("50%",))
    return {row.ac: 1000 * row.seconds for row in report.rows}


def offload(run: Run) -> None:
    """Measure copies and what hides them; compare gradients of many steps in which freed memory is overwritten."""
    machine = Machine(run.cpu)
    layers, batch = machine.pick(4, 2), machine.batch(1, machine.pick(8192, 64))
    junk = machine.pick(1 << 29, 1 << 12)
    machine.same_bits(True)
    wanted = gradients_of(machine.parallelize(machine.model(layers), "full"), batch)
    for mode, ac in (("boundary", "full"), ("saved", "selective"), ("all", "none")):
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
            before = offloader.stats.as_dict()

            def steps() -> None:
                for _ in range(2):
                    step_loss(model, batch).backward()  # noqa: B023

            events = machine.trace(steps, run.out / f"trace-{mode}.json.gz")
            after = offloader.stats.as_dict()
            names = ("moved_bytes", "offload_stalls", "reload_stalls", "prefetched", "reloads")
            more = {name: after[name] - before[name] for name in names}
            more |= {name: after[name] for name in ("host_reserved_bytes", "host_peak_live_bytes")}
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
                ok=more["moved_bytes"] > 0 and (share >= 0.8 if share is not None else not machine.is_cuda),
                first_s=first,
                **more,
            )
            run.row(
                f"{mode}: bitwise, freed memory overwritten", "bitwise", *_race(machine, model, batch, wanted, junk)
            )


def _race(machine: Machine, model: nn.Module, batch: Any, wanted: dict[str, torch.Tensor], junk: int) -> tuple[str]:
    """Return how the gradients of steps compare, where between forward and backward freed memory is filled with NaN."""
    for _ in range(machine.pick(20, 3)):
        for parameter in model.parameters():
            parameter.grad = None
        torch.manual_seed(0)
        loss = step_loss(model, batch)
        nothing = [torch.full((junk,), torch.nan, device=machine.device) for _ in range(4)]
        del nothing
        loss.backward()
        got = {bare_name(name): p.grad for name, p in model.named_parameters() if p.grad is not None}
        result = compare_gradients(wanted, got)
        if result != "bitwise":
            return (result,)
    return ("bitwise",)
