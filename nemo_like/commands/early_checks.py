"""Values that can be refused before torch is imported, which takes seconds."""

import argparse
from collections.abc import Iterator
from typing import Any

from nemo_like._util.console import check_writable, flag
from nemo_like._util.words import check_dtype_word, check_number
from nemo_like.options import FLOAT8
from nemo_like.options.parallel import undivided
from nemo_like.planning.device_table import check_device_name
from nemo_like.presets import check_model_name

_AXES = ("dp_replicate", "dp_shard", "tp", "cp", "pp")


def check_early(args: argparse.Namespace) -> None:
    """Raise ValueError for a model, a device, a dtype, a size, a divisor or a file to write that no command can use."""
    values = {name: value for name, value in vars(args).items() if value is not None}
    if "model" in values:
        check_model_name(values["model"])
    if "gpu" in values:
        check_device_name(values["gpu"])
    for name, others in (("dtype", ()), ("precision", FLOAT8), ("reduce_dtype", ())):
        for word in _each(values.get(name)):
            if word not in others:
                check_dtype_word(flag(name), word, others)
    for name, (word, least) in args.own.least.items():
        for value in _each(values.get(name)):
            if isinstance(value, int | float):  # not the word of a search
                check_number(word, value, least, "whole number" if isinstance(value, int) else "finite number")
    gpus = values.get("gpus", values.get("world_size"))
    of_axes = {name: [*_each(values.get(name))] for name in _AXES}
    sizes = {
        name: of_axis[0]
        for name, of_axis in of_axes.items()
        if len(of_axis) == 1 and isinstance(of_axis[0], int) and of_axis[0] > 1
    }
    if isinstance(gpus, int) and sizes and (problem := undivided(sizes, gpus, f"--gpus {gpus}")):
        raise ValueError(problem)
    for name in ("json", "save", "strip", "gpu_file"):
        check_writable(flag(name), values.get(name))
    if "settings_to" in values:
        from nemo_like.settings.files import check_suffix

        check_writable("--to", check_suffix(values["settings_to"]))


def _each(value: Any) -> Iterator[Any]:
    yield from value if isinstance(value, list) else [] if value is None else [value]
