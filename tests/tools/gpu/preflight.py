"""Check 0: versions, every private name of torch that the package uses, and the rates of the machine.

`fit --calibrate` measures rates, too: ``rates.json`` is its file.
"""

from __future__ import annotations

import ast
import json
import os
import pkgutil
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage

from nemo_like import torch_compat
from nemo_like.planning.calibration import calibrate
from nemo_like.planning.devices import device_at_hand
from tests.tools.gpu.driver import MISSING, Run
from tests.tools.gpu.machine import Machine

_DRIVER = "nvidia-smi --query-gpu=driver_version --format=csv,noheader"
_OWNERS = {
    "torch": "torch",
    "_autograd": "torch._C._autograd",
    "_python_dispatch": "torch.utils._python_dispatch",
}
"""Modules, by their names in `torch_compat`."""
_OF_CLASSES = ((FSDPModule, "set_reduce_scatter_unused_params"), (PipelineStage, "_warmup_backward_result"))
"""Names that no chain from ``torch`` leads to."""


def warm_up(run: Run) -> None:
    """Load the libraries of torch, and the first kernels of each."""
    machine = Machine(run.cpu)
    out, kernels = machine.attention(lambda: F.scaled_dot_product_attention(*machine.normal(3, 1, 8, 256, 64)))
    (out @ out.mT).sum().item()
    run.row("libraries are loaded", attention=kernels)


def check(run: Run) -> None:
    """Write versions, missing names and rates."""
    machine = Machine(run.cpu)
    about: dict[str, Any] = {"python": platform.python_version(), "transformers": transformers.__version__}
    if machine.is_cuda:
        free, total = torch.cuda.mem_get_info()
        about |= {
            "GPU": torch.cuda.get_device_name(machine.device).replace("NVIDIA ", ""),
            "driver": subprocess.getoutput(_DRIVER).partition("\n")[0],
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "free_GiB": free / 2**30,
            "total_GiB": total / 2**30,
        }
    run.row("versions", None, torch.__version__, **about, cores=len(os.sched_getaffinity(0)))
    missing = sorted(set(_missing()))
    run.row("private names of torch", 0, len(missing), ok=not missing)
    for name in missing:
        run.row(name, verdict="failed: missing in this torch")
    if missing:
        sys.exit(MISSING)
    _rates(run, machine)


def _missing() -> Iterator[str]:
    """Yield the private names in `torch_compat` that this torch does not have."""
    tree = ast.parse(Path(torch_compat.__file__).read_text(encoding="utf-8"))
    names = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for name in sorted(names):
        first, _, rest = name.partition(".")
        if first in _OWNERS and all(map(str.isidentifier, rest.split("."))):
            try:
                pkgutil.resolve_name(f"{_OWNERS[first]}.{rest}")
            except (ImportError, AttributeError):
                yield name
    yield from (f"{owner.__name__}.{name}" for owner, name in _OF_CLASSES if not hasattr(owner, name))


def _rates(run: Run, machine: Machine) -> None:
    """Compare the rates that plans count with to those of this machine, in units of 10**9 per second."""
    device, size = device_at_hand(machine.device.type), machine.pick(1 << 30, 1 << 20)
    begun = time.perf_counter()
    host = torch.empty(size, dtype=torch.uint8, pin_memory=machine.is_cuda)
    run.row("pinning", None, size / 1e9 / (time.perf_counter() - begun), "GB/s")
    there, other = (torch.zeros(size, dtype=torch.uint8, device=machine.device) for _ in range(2))
    width = machine.pick(4096, 128)
    left, right = machine.normal(width, width), machine.normal(width, width)
    small = machine.normal(8)
    cases: tuple[tuple[str, str, float | None, float, Callable[[], Any]], ...] = (
        ("to CPU memory", "GB/s", device.host_link / 1e9, size / 1e9, lambda: host.copy_(there, non_blocking=True)),
        ("from CPU memory", "GB/s", device.host_link / 1e9, size / 1e9, lambda: there.copy_(host, non_blocking=True)),
        ("copy on the device", "GB/s", device.bandwidth / 1e9, 2 * size / 1e9, lambda: other.copy_(there)),
        ("matmul", "GFLOP/s", device.matmul_flops["half"] / 1e9, 2 * width**3 / 1e9, lambda: left @ right),
        ("launches", "1e6/s", None, 1e-3, lambda: [small.add_(1) for _ in range(1000)]),
    )
    for name, unit, predicted, work, call in cases:
        with run.guarded(name):
            rate = work / machine.ms(call) * 1000
            # A plan is 20 % off where its rates are: more than the spread of `nemo-like plan` against published steps.
            ok = machine.is_cuda is False or predicted is None or 0.8 <= rate / predicted <= 1.25
            run.row(name, predicted, rate, unit, ok=ok)
    with run.guarded("fit --calibrate"):
        os.environ["NEMO_LIKE_CACHE"] = str(run.folder)  # of this process: the plans of other checks use the table
        rates = calibrate(machine.pick(1.0, 0.01))
        (run.out / "rates.json").write_bytes(rates.read_bytes())
        run.row("fit --calibrate", None, "rates.json", **json.loads(rates.read_bytes())["rates"])
