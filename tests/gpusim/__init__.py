"""A simulated accelerator for tests: `on_device` runs a function where ``gpusim`` is this process's device."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from tests_distributed.spawn import run_ranks

_NO_LAUNCHER = dict.fromkeys(("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def on_device(function: Callable[..., Any], *args: Any, timeout: float = 60.0, **options: Any) -> Any:
    """Return ``function(device, *args)`` of a process of its own, whose accelerator is the simulated device.

    Args:
        function: of a module's top level.
        args: what it gets behind the device; pickled.
        timeout: seconds that it may take.
        options: of `tests.gpusim.device.install`.

    Raises:
        RaceError: accesses to memory were not ordered.
    """
    return run_ranks(1, _run, function, args, options, init_group=False, timeout=timeout, env=_NO_LAUNCHER)[0]


_GPUS = [pytest.param("cuda", marks=pytest.mark.cuda)] if torch.cuda.is_available() else []
PLACES = pytest.mark.parametrize("place", ["gpusim", *_GPUS])
"""For a test that gives ``place`` to `run_at`: on the simulated device, and on a GPU where there is one."""


def run_at(place: str, function: Callable[..., Any], *args: Any) -> Any:
    """Return ``function(place, *args)``: here on a GPU, else in a process that has the simulated device."""
    if place == "cuda":
        return function(place, *args)
    return on_device(_without_device, function, place, *args)


def _without_device(_: Any, function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def on_devices(ranks: int, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    """Return ``function(device, *args)`` of each of so many ranks, which are a gloo group; each has its device."""
    return run_ranks(ranks, _run, function, args, options, env={"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"})


def _run(
    rank: int, world_size: int, function: Callable[..., Any], args: tuple[Any, ...], options: Mapping[str, Any]
) -> Any:
    from tests.gpusim.device import install
    from tests.tools.branches import VARIABLE, recording

    with recording(os.environ.get(VARIABLE)):
        device = install(**options)
        result = function(device, *args)
        device.reuse()
    return result
