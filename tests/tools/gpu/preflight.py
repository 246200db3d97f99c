"""Check 0: versions, every private name of torch that the package uses, and the rates of the machine."""

from __future__ import annotations

import ast
import importlib
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage

from nemo_like import torch_compat
from nemo_like.planning.devices import device_at_hand
from tests.tools.gpu.driver import MISSING, Run
from tests.tools.gpu.machine import Machine

_OF_CLASSES = ((FSDPModule, "set_reduce_scatter_unused_params"), (PipelineStage, "_warmup_backward_result"))
"""Names that no chain from ``torch`` leads to."""


def check(run: Run) -> None:
    """Write versions, missing names and rates."""
    machine = Machine(run.cpu)
    about: dict[str, Any] = {"python": platform.python_version(), "transformers": transformers.__version__}
    if machine.is_cuda:
        free, total = torch.cuda.mem_get_info()
        nccl = ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else "none"
        about |= {
            "GPU": torch.cuda.get_device_name(machine.device).replace("NVIDIA ", ""),
            "driver": _driver(),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "nccl": nccl,
            "free_GiB": free / 2**30,
            "total_GiB": total / 2**30,
        }
    run.row("versions", None, torch.__version__, cores=len(os.sched_getaffinity(0)), **about)
    missing = sorted(set(_missing()))
    run.row("private names of torch", 0, len(missing), ok=not missing)
    for name in missing:
        run.row(name, verdict="failed: missing in this torch")
    if missing:
        sys.exit(MISSING)
    _rates(run, machine)


def _driver() -> str:
    command = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown"


def _missing() -> Iterator[str]:
    """Yield the private names in `torch_compat` that this torch does not have."""
    tree = ast.parse(Path(torch_compat.__file__).read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        chain: list[str] = []
        inner: Any = node
        while isinstance(inner, ast.Attribute):
            chain.append(inner.attr)
            inner = inner.value
        if not isinstance(inner, ast.Name) or inner.id not in ("torch", "_autograd", "_python_dispatch"):
            continue
        owner: Any = getattr(torch_compat, inner.id)
        path = inner.id
        for name in reversed(chain):
            path = f"{path}.{name}"
            if not hasattr(owner, name):
                if not _is_module(path):
                    yield path
                break
            owner = getattr(owner, name)
    yield from (f"{owner.__name__}.{name}" for owner, name in _OF_CLASSES if not hasattr(owner, name))


def _is_module(path: str) -> bool:
    """Return whether `path` is a module of torch that was not imported yet."""
    try:
        importlib.import_module(path)
    except ImportError:
        return False
    return True


def _rates(run: Run, machine: Machine) -> None:
    """Compare the rates that plans count with to those of this machine, in units of 10**9 per second."""
    device, size = device_at_hand(machine.device.type), machine.pick(1 << 30, 1 << 20)
    begun = time.perf_counter()
    host = torch.empty(size, dtype=torch.uint8, pin_memory=machine.is_cuda)
    run.row("pinning, GB/s", None, size / 1e9 / (time.perf_counter() - begun))
    there, other = (torch.zeros(size, dtype=torch.uint8, device=machine.device) for _ in range(2))
    width = machine.pick(4096, 128)
    left, right = machine.normal(width, width), machine.normal(width, width)
    small = machine.normal(8)
    cases: tuple[tuple[str, float | None, float, Callable[[], Any]], ...] = (
        ("to the host, GB/s", device.host_link / 1e9, size / 1e9, lambda: host.copy_(there, non_blocking=True)),
        ("from the host, GB/s", device.host_link / 1e9, size / 1e9, lambda: there.copy_(host, non_blocking=True)),
        ("copy on the device, GB/s", device.bandwidth / 1e9, 2 * size / 1e9, lambda: other.copy_(there)),
        ("matmul, GFLOP/s", device.matmul_flops["half"] / 1e9, 2 * width**3 / 1e9, lambda: left @ right),
        ("launches, millions/s", None, 1e-3, lambda: [small.add_(1) for _ in range(1000)]),
    )
    for name, predicted, work, call in cases:
        with run.guarded(name):
            rate = work / machine.ms(call) * 1000
            # A plan is 20 % off where its rates are: more than the spread of `nemo-like plan` against published steps.
            ok = machine.is_cuda is False or predicted is None or 0.8 <= rate / predicted <= 1.25
            run.row(name, predicted, rate, ok=ok)
