"""torch's global switches that decide in what type operators compute, and by which kernels, those of SDPA among them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from operator import call
from typing import Any

import torch

from nemo_like.torch_compat import SWITCH_READERS

Switch = tuple[Callable[[], Any], Callable[[Any], None]]
"""How to read it, and how to set it to what was read."""

_backends: Any = torch.backends
SDPA_KERNELS = ("flash", "mem_efficient", "math", "cudnn")


def _attributes(owner: Any, *names: str) -> list[Switch]:
    def switch(name: str) -> Switch:
        return lambda: getattr(owner, name), lambda value: setattr(owner, name, value)

    return [switch(name) for name in names]


def _precision(old: Switch, backends: list[Any]) -> Switch:
    """torch has two sets of names for float32's precision. After the newer one was used, asking by the older one raises."""

    def read() -> Any:
        try:
            return old[0]()
        except RuntimeError:
            return [backend.fp32_precision for backend in backends]

    def put(value: Any) -> None:
        if not isinstance(value, list):
            old[1](value)
            return
        for backend, wanted in zip(backends, value):
            if backend.fp32_precision != wanted:
                backend.fp32_precision = wanted

    return read, put


def _put_deterministic(value: bool) -> None:
    torch.use_deterministic_algorithms(value, warn_only=SWITCH_READERS["warn_only"]())


def _put_warn_only(value: bool) -> None:
    torch.use_deterministic_algorithms(SWITCH_READERS["deterministic"](), warn_only=value)


_ALWAYS: list[Switch] = [
    *((SWITCH_READERS[kind], getattr(_backends.cuda, f"enable_{kind}_sdp")) for kind in SDPA_KERNELS),
    (torch.get_default_dtype, torch.set_default_dtype),
    (SWITCH_READERS["deterministic"], _put_deterministic),
    (SWITCH_READERS["warn_only"], _put_warn_only),
    _precision(
        (SWITCH_READERS["matmul_precision"], torch.set_float32_matmul_precision),
        [_backends.cuda.matmul, _backends.mkldnn.matmul],
    ),
    (SWITCH_READERS["mkldnn"], lambda value: setattr(_backends.mkldnn, "enabled", value)),
]
_ON_CUDA: list[Switch] = [
    *_attributes(_backends.cudnn, "enabled", "benchmark", "deterministic"),
    _precision(
        _attributes(_backends.cudnn, "allow_tf32")[0],
        [_backends.cudnn.conv, _backends.cudnn.rnn],
    ),
    *_attributes(
        _backends.cuda.matmul,
        "allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction", "allow_fp16_accumulation",
    ),
]  # fmt: skip
_ON_CPU_AND_CUDA = _ALWAYS + _ON_CUDA


_READ_ALWAYS = [read for read, _ in _ALWAYS]
_READ_ON_CPU_AND_CUDA = [read for read, _ in _ON_CPU_AND_CUDA]


def switches_for(device: str | None) -> list[Switch]:
    """Those that exist; those of CUDA's libraries only where `device` is ``"cuda"``."""
    return _ON_CPU_AND_CUDA if device == "cuda" else _ALWAYS


def read_switches(device: str | None) -> list[Any]:
    """What each of `switches_for` reads."""
    return list(map(call, _READ_ON_CPU_AND_CUDA if device == "cuda" else _READ_ALWAYS))


def put_back(switches: list[Switch], wanted: list[Any], stack: ExitStack) -> None:
    """Set what was read as `wanted`, until `stack` ends."""
    for (read, put), value in zip(switches, wanted):
        now = read()
        if now != value:
            stack.callback(put, now)
            put(value)
