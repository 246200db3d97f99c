"""The devices that plans are made for: memory and speeds, each figure with its source in ``devices.json``."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from nemo_like._util.device_work import check_kind
from nemo_like._util.folders import cache_folder
from nemo_like._util.log import warn_once
from nemo_like.activation_checkpointing.ops import facts, grouped_mm
from nemo_like.distributed.launch import current_device, pick_device_type
from nemo_like.job import Job
from nemo_like.options import parse_bytes
from nemo_like.planning.device_table import check_device_name, device_table, known_devices
from nemo_like.torch_compat import OpOverload


@dataclass(frozen=True)
class Device:
    """Rates and sizes of an accelerator. Speeds are those that real kernels reach, not peaks."""

    name: str
    memory_bytes: int
    # FLOP/s of large matrix products: ``"half"`` (bfloat16, float16), ``"single"`` (float32), ``"float8"`` where
    # known.
    matmul_flops: Mapping[str, float]
    # FLOP/s of fused attention, likewise: forward, by the kernel that PyTorch picks there.
    attention_flops: Mapping[str, float]
    bandwidth: float  # Bytes per second between its memory and its kernels.
    host_link: float  # Bytes per second to or from CPU memory, one direction.
    kind: str  # ``"cuda"`` or ``"cpu"``: whose attention kernels run, and how its allocator rounds.
    sources: Mapping[str, str]
    # CUDA compute capability, by which attention kernels are chosen; of no meaning where `kind` is not ``"cuda"``.
    capability: tuple[int, int] = (8, 0)
    peak_flops: float = 0.0  # FLOP/s in 16 bits by the data sheet, of which MFU is a share. 0: unknown.
    # Bytes per second that a collective reaches between devices of one node, one direction of one device.
    nvlink: float = 20e9
    network: float = 10e9  # The same between nodes.
    gpus_per_node: int = 8
    hop_seconds: float = 1e-5  # Latency of one step of a collective.
    launch_seconds: float = 0.0  # The least that one kernel takes, with its launch.
    rates: str = "the table"  # Source of its speeds: the table, or the file of a calibration.
    known_as: str = ""  # The table's name of it, where it has another one of its own.
    # Bytes per second between the host's memory and its processors, one device's share of a full host; 0: not known.
    host_bandwidth: float = 0.0
    grouped: float = 1.0  # Speed of grouped matrix products, as a share of that of whole ones.
    # Multiprocessors, over which the tiles of a matrix product are spread; 0: not known, and not counted.
    processors: int = 0
    # By kernel of attention in 16 bits, its speed in forward and backward as a multiple of `attention_flops`; the one that
    # PyTorch picks is the first.
    attention_kernels: Mapping[str, tuple[float, float]] = field(default_factory=lambda: {"flash": (1.0, 1.0)})
    # Bytes of a CUDA context with the kernels that training loads: taken before torch's allocator has any.
    context_bytes: int = 512 << 20

    def flops_of(self, op: OpOverload, *, half: bool) -> float:
        """FLOP/s that the kernel of `op` reaches; `half`: in a 16-bit type."""
        precision = "half" if half else "single"
        if facts(op).attention:
            return self.attention_flops[precision] * self.attention_speed(op, half=half)[0]
        return self.matmul_flops[precision] * (self.grouped if facts(op).flops is grouped_mm else 1.0)

    def attention_speed(self, op: OpOverload, *, half: bool) -> tuple[float, float]:
        """Return the speed of an attention kernel in forward and backward, as a multiple of `attention_flops`; flash
        attention's where it is not known."""
        kernel, kernels = facts(op).attention, self.attention_kernels
        if not half:
            return 1.0, 1.0
        return kernels[next(iter(kernels)) if kernel == "sdpa" else kernel if kernel in kernels else "flash"]

    def with_attention(self, kernel: str) -> Device:
        """Return this device with all fused attention in 16 bits at the speed of `kernel`.

        Raises:
            ValueError: that is not known of this device.
        """
        kernels = self.attention_kernels
        if kernel not in kernels:
            raise ValueError(
                f"attention is {kernel!r}, and its speed on {self.name} is not known: there is that of "
                f"{', '.join(kernels)}. Leave it out for the kernel that PyTorch picks, or give a device file with it."
            )
        every = dict.fromkeys((kernel, *kernels), kernels[kernel])
        words = f" with {kernel} attention"
        return replace(self, name=self.name.removesuffix(words) + words, attention_kernels=every)

    @property
    def about(self) -> str:
        """Return the sources of its rates, and of its kernels where these are another maker's, in words."""
        foreign = " Attention kernels, and their temporaries, are those of NVIDIA GPUs: it runs others."
        return f"rates of {self.rates}.{foreign if 'kernels' in self.sources else ''}"

    @property
    def knows_host_rates(self) -> bool:
        """Return whether the seconds of an optimizer in CPU memory are known."""
        return self.kind == "cpu" or bool(self.host_bandwidth)

    def check_host_rates(self, asked: str) -> None:
        """Raise ValueError where `asked`, which has the optimizer step on the host, takes seconds that are not known."""
        if not self.knows_host_rates:
            raise ValueError(
                f"{asked} runs the optimizer in CPU memory, and the bandwidth of that beside {self.name} is not known. "
                "Give a device file with 'host_memory_gbps', one device's share of it in GB/s; or leave it out."
            )

    @property
    def cuda(self) -> tuple[int, int] | None:
        """Its compute capability; None: not a CUDA device, so that the CPU's operators run."""
        return self.capability if self.kind == "cuda" else None


def resolve_device(spec: str | Path | Device) -> Device:
    """A device by name, or from a JSON file in the format of ``devices.json``: one entry, with or without its name.

    Raises:
        ValueError: no such name or file, several entries, or a field is missing; the message says which.
    """
    if isinstance(spec, Device):
        return spec
    return _device(*device_entry(str(spec)))


def device_entry(spec: str) -> tuple[str, dict[str, Any]]:
    """Return the name of a device and its entry; arguments and errors as for `resolve_device`."""
    name = check_device_name(spec)
    if name is not None:
        return name, device_table()[name]
    path = Path(spec)
    try:
        entry = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"Device file {path} is not valid JSON: {error}") from error
    if not isinstance(entry, dict):
        raise ValueError(
            f"Device file {path} has no device; an entry of devices.json is {{...}}, with or without a name."
        )
    if "memory_gib" in entry:
        return path.stem, entry
    named = {name: value for name, value in entry.items() if isinstance(value, dict) and "memory_gib" in value}
    if len(named) > 1:
        raise ValueError(f"Device file {path} has {', '.join(named)}, and a file is for one device. Keep one of them.")
    return next(iter(named.items()), (path.stem, entry))


def device_at_hand(kind: str | None = None) -> Device:
    """The device this process trains on: the current GPU if there is one, else ``cpu``; at the rates that were measured here
    (`nemo_like.planning.calibration`), if they were.

    kind: ``"cuda"`` or ``"cpu"``, where the caller has chosen.

    A GPU that the table does not know gets the nearest known speeds (said in `sources`) and its own memory.
    """
    kind = pick_device_type() if kind is None else kind
    if kind == "cpu":
        return calibrated(resolve_device("cpu"))
    check_kind(kind)
    properties = torch.get_device_module(kind).get_device_properties(current_device(kind))
    table = device_table()
    matches = [(len(part), name, part) for name in known_devices() for part in table[name].get("match", [])]
    # The longest: "H100 PCIe" is not "H100".
    found = (match for match in matches if re.search(rf"\b{re.escape(match[2])}\b", properties.name, re.IGNORECASE))
    known_as = max(found, default=(0, "", ""))[1]
    nearest = known_as or "a100-80gb"
    at_hand = {"name": properties.name, "memory_bytes": properties.total_memory, "known_as": known_as}
    if kind == "cuda":
        at_hand["capability"] = (properties.major, properties.minor)
    return calibrated(replace(_device(nearest, table[nearest]), **at_hand))


def device_of(job: Job) -> Device:
    """Return the device that `job` is predicted for: its `Job.gpu`, as it was calibrated, else the one at hand;
    attention by `Job.attention`."""
    if job.gpu is None:
        device = device_at_hand(None if job.device is None else job.device.type)
    else:
        device = job.gpu if isinstance(job.gpu, Device) else calibrated(resolve_device(job.gpu))
    return device if job.attention is None else device.with_attention(job.attention)


def rates_file(device: Device) -> Path | None:
    """Return the file of the rates that devices of that kind reach; None: there is no folder for it."""
    folder, name = cache_folder(), device.known_as or device.name
    return folder and folder / "rates" / (re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") + ".json")


# By field of `Device` that is measured, its entry in the file.
RATES: Mapping[str, tuple[str, str | None]] = {
    "matmul_half": ("matmul_flops", "half"),
    "matmul_single": ("matmul_flops", "single"),
    "attention_half": ("attention_flops", "half"),
    "attention_single": ("attention_flops", "single"),
    "bandwidth": ("bandwidth", None),
    "launch_seconds": ("launch_seconds", None),
    "host_link": ("host_link", None),
    "nvlink": ("nvlink", None),
    "network": ("network", None),
}


def calibrated(device: Device) -> Device:
    """`device` at the rates that were measured on one of its name; as it is where none were, or the file is damaged (said
    once)."""
    path = rates_file(device)
    if path is None or not path.exists():
        return device
    try:
        return replace(device, **_measured_rates(device, json.loads(path.read_text(encoding="utf-8")), path))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        warn_once(
            f"{path} is damaged ({error}); the table's rates are used. Measure again with nemo-like fit --calibrate."
        )
        return device


def _measured_rates(device: Device, said: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the fields of `device` that a rates file sets, and `Device.rates`."""
    rates = {name: float(said["rates"][name]) for name in said["rates"] if name in RATES}
    if not all(0.0 < rate < float("inf") for rate in rates.values()):
        raise ValueError("a rate is no positive number")
    changed: dict[str, Any] = {"rates": f"a calibration on {said['measured']} with torch {said['torch']} ({path})"}
    for name, rate in rates.items():
        field, entry = RATES[name]
        changed[field] = rate if entry is None else {**changed.get(field, getattr(device, field)), entry: rate}
    return changed


def _device(name: str, entry: Mapping[str, Any]) -> Device:
    kinds = {key: int | float | dict if key == "attention" else int | float for key in _FIELDS}
    missing = [key for key, kind in kinds.items() if not isinstance(entry.get(key), kind)]
    if missing:
        raise ValueError(f"Device {name!r} lacks {', '.join(missing)}; a device needs {', '.join(_FIELDS)} as numbers.")
    peak = {"half": entry["bf16_tflops"] * 1e12, "single": entry["fp32_tflops"] * 1e12}
    matmul = {kind: value * entry["matmul"] for kind, value in peak.items()}
    kernels, usual = attention_shares(entry["attention"], name)
    if "fp8_tflops" in entry:
        matmul["float8"] = entry["fp8_tflops"] * 1e12 * entry.get("matmul_fp8", entry["matmul"])
    return Device(
        name=name,
        memory_bytes=math.ceil(entry["memory_gib"] * (1 << 30)),
        matmul_flops=matmul,
        attention_flops={kind: value * usual for kind, value in peak.items()},
        attention_kernels={name: (forward / usual, backward / usual) for name, (forward, backward) in kernels.items()},
        bandwidth=entry["memory_gbps"] * 1e9 * entry["bandwidth"],
        host_link=entry["host_link_gbps"] * 1e9,
        kind="cpu" if name == "cpu" else "cuda",
        sources=dict(entry.get("sources", {})),
        capability=tuple(entry.get("capability", (8, 0))),
        peak_flops=peak["half"],
        **{name: make(entry[name_there]) for name, (name_there, make) in _OPTIONAL.items() if name_there in entry},
    )


def attention_shares(said: Any, name: str) -> tuple[Mapping[str, Sequence[float]], float]:
    """Return the shares of the peak that kernels of attention reach in forward and backward, and the first one's forward.

    Raises:
        ValueError: `said` is neither a number, for all of them, nor such shares, flash attention's among them.
    """
    kernels = said if isinstance(said, Mapping) else {"flash": (said, said)}
    pairs = [pair for pair in kernels.values() if isinstance(pair, list | tuple) and len(pair) == 2]
    shares = [share for pair in pairs for share in pair if isinstance(share, int | float) and share > 0]
    if "flash" in kernels and len(shares) == 2 * len(kernels):
        return kernels, next(iter(kernels.values()))[0]
    raise ValueError(
        f"attention of device {name!r} is {said!r}; it must be a share of the peak, or by kernel its shares in forward and "
        'backward, flash among them: {"flash": [0.34, 0.32]}.'
    )


# Field of `Device`: its key in the table, and how to read it. An entry may leave these out.
_OPTIONAL: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "nvlink": ("nvlink_gbps", lambda value: value * 1e9),
    "network": ("network_gbps", lambda value: value * 1e9),
    "host_bandwidth": ("host_memory_gbps", lambda value: value * 1e9),
    "gpus_per_node": ("gpus_per_node", int),
    "hop_seconds": ("hop_us", lambda value: value * 1e-6),
    "launch_seconds": ("launch_us", lambda value: value * 1e-6),
    "processors": ("processors", int),
    "grouped": ("grouped", float),
    "context_bytes": ("context_mib", lambda value: int(value * (1 << 20))),
}


_FIELDS = (
    "memory_gib",
    "bf16_tflops",
    "fp32_tflops",
    "memory_gbps",
    "host_link_gbps",
    "matmul",
    "attention",
    "bandwidth",
)


# Share of a device that a step leaves free by default: half of the published peaks are predicted within 5 %.
MARGIN = 0.05


def step_limit(device: Device, memory: int | str | None = None) -> int:
    """Return the bytes of `device` that a step may take: `memory`, or by default all but `MARGIN`.

    Raises:
        ValueError: `memory` is no number of bytes.
    """
    if memory is None:
        return int(device.memory_bytes * (1 - MARGIN))
    size = parse_bytes(memory, "memory") if isinstance(memory, str) else memory
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(f"memory is {memory!r}; it must be a number of bytes >= 1, or a string like '70GiB'.")
    return size
