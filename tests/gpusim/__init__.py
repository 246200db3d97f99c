"""A simulated accelerator for tests: `on_device` runs a function where ``gpusim`` is this process's device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tests_distributed.spawn import run_ranks


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
    return run_ranks(1, _run, function, args, options, init_group=False, timeout=timeout)[0]


def _run(
    rank: int, world_size: int, function: Callable[..., Any], args: tuple[Any, ...], options: Mapping[str, Any]
) -> Any:
    from tests.gpusim.device import install

    device = install(**options)
    result = function(device, *args)
    device.check()
    return result
