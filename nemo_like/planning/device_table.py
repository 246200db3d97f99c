"""The table of devices that plans are made for, by name. Loads without torch."""

import json
import re
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from nemo_like._util.words import did_you_mean


@cache  # it is asked for with every device that is named
def device_table() -> dict[str, Any]:
    """Return ``devices.json``: figures of each device, with their sources."""
    return json.loads(resources.files("nemo_like.planning").joinpath("devices.json").read_text(encoding="utf-8"))


def known_devices() -> tuple[str, ...]:
    """Return the names of the devices in the table."""
    return tuple(name for name in device_table() if not name.startswith("_"))


def check_device_name(spec: str) -> str | None:
    """Return the device of the table that `spec` names; None: it is a file.

    Raises:
        ValueError: there is no such device, and no such file.
    """
    devices, name = known_devices(), spec.strip().lower().replace("_", "-")
    begun = [device for device in devices if re.fullmatch(rf"{re.escape(name)}-\d+gb", device)]
    if len(begun) == 1:  # "h100", where the table has it with one size of memory
        name = begun[0]
    if name in devices:
        return name
    if Path(spec).is_file():
        return None
    raise ValueError(
        f"Device {spec!r} is neither one of {', '.join(devices)} nor a file." + did_you_mean(name, devices)
    )
