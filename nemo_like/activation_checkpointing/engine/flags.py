"""torch's global switches that decide in what type operators compute, and by which kernels."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

Switch = tuple[Callable[[], Any], Callable[[Any], None]]
"""How to read it, and how to set it to what was read."""

_backends = torch.backends


def _attributes(owner: Any, *names: str) -> list[Switch]:
    def switch(name: str) -> Switch:
        return lambda: getattr(owner, name), lambda value: setattr(owner, name, value)

    return [switch(name) for name in names if hasattr(owner, name)]


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


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


_ALWAYS: list[Switch] = [
    (torch.get_default_dtype, torch.set_default_dtype),
    (_deterministic, lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1])),
    _precision(
        (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        [_backends.cuda.matmul, getattr(_backends.mkldnn, "matmul", _backends.cuda.matmul)],
    ),
    *_attributes(_backends.mkldnn, "enabled"),
]
_ON_CUDA: list[Switch] = [
    *_attributes(_backends.cudnn, "enabled", "benchmark", "deterministic"),
    _precision(
        _attributes(_backends.cudnn, "allow_tf32")[0],
        [getattr(_backends.cudnn, name) for name in ("conv", "rnn") if hasattr(_backends.cudnn, name)],
    ),
    *_attributes(
        _backends.cuda.matmul,
        "allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction", "allow_fp16_accumulation",
    ),
]  # fmt: skip


class Flags:
    """The switches at the moment of creation; those of CUDA's libraries only where `device` is ``"cuda"``."""

    __slots__ = ("_switches", "_values")

    def __init__(self, device: str | None) -> None:
        self._switches = _ALWAYS + _ON_CUDA if device == "cuda" else _ALWAYS
        self._values = [read() for read, _ in self._switches]

    def restore(self, stack: ExitStack) -> None:
        """Put them back until `stack` ends."""
        for (read, put), wanted in zip(self._switches, self._values):
            now = read()
            if now != wanted:
                stack.callback(put, now)
                put(wanted)
