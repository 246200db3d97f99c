"""What `fit` was asked: the job, the device, and what is pinned; checked before anything is traced."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from nemo_like.options import LOSSES, SCHEDULES, OffloadConfig, Precision, StepSpec, did_you_mean, normalise
from nemo_like.options.parallel import check_imbalance
from nemo_like.planning.devices import Device
from nemo_like.planning.planner import HOST_MEMORY

MODES = ("none", "full", "selective", "plan")
AXES = ("dp_replicate", "dp_shard", "tp", "cp", "ep", "pp", "micro_batch", "grad_accum")
"""Pins that are whole numbers."""
_WORDS: dict[str, tuple[str, ...]] = {
    "ac": MODES, "loss": LOSSES, "offload": ("none", "boundary"), "schedule": SCHEDULES,
}  # fmt: skip
_FLAGS = ("reshard_after_forward", "cpu_offload")
PINS = (*AXES, *_WORDS, *_FLAGS)


@dataclass(frozen=True)
class Question:
    """One job on one kind of device."""

    gpus: int
    device: Device
    seq_len: int
    """Tokens of the sequences that bytes and seconds are of: the longest, where they differ."""
    limit: int
    """Bytes that a step may take on each of them."""
    global_batch: int | None = None
    """Sequences of a step over all of them."""
    precision: Precision = field(default_factory=Precision)
    step: StepSpec = field(default_factory=StepSpec)
    """The loop; how many microbatches it goes through is what `fit` looks for."""
    imbalance: float | None = None
    host_memory: int = HOST_MEMORY
    """Bytes of host memory that one rank has, for `offload` and `cpu_offload`."""
    planned_for: str = ""
    """In words: which sequences these are."""
    pins: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Allowed values by name out of `PINS`; what is not there is free."""

    def __post_init__(self) -> None:
        for name, least in (("gpus", 1), ("seq_len", 2), ("global_batch", 1), ("limit", 1), ("host_memory", 0)):
            value = getattr(self, name)
            if value is None and name == "global_batch":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} is {value!r}; it must be a whole number >= {least}.")
        if self.step.microbatches != 1:
            raise ValueError(
                f"step has microbatches={self.step.microbatches}, which fit looks for itself; pin grad_accum instead."
            )
        if self.imbalance is not None:
            most = max(self.pins["ep"]) if "ep" in self.pins else None
            check_imbalance("imbalance", self.imbalance, most)
        self._check_sizes()
        self._check_host()

    @property
    def host_state(self) -> tuple[bool, ...]:
        """Values of `cpu_offload` that are looked at, where a parameter is sharded; of a CPU, host memory is its own."""
        looked = self.gpus > 1 and self.device.kind != "cpu" and not self.lacks_host_rates
        return tuple(dict.fromkeys(self.pins.get("cpu_offload", (False, True) if looked else (False,))))

    @property
    def lacks_host_rates(self) -> bool:
        """`cpu_offload` is left out since nobody knows how fast an optimizer on the host is."""
        asked = self.gpus > 1 and "cpu_offload" not in self.pins
        return asked and not self.device.knows_host_rates

    def _check_host(self) -> None:
        asked = self.pins.get("cpu_offload", ())
        if True not in asked:
            return
        self.device.check_host_rates("cpu_offload")
        if self.gpus == 1:
            raise ValueError(
                "cpu_offload is FSDP2's, gpus is 1, and one rank keeps the model whole. Use more GPUs, or leave it out."
            )

    def _check_sizes(self) -> None:
        """Pins that contradict each other or the number of GPUs."""
        one = {name: self.pins[name][0] for name in AXES if len(self.pins.get(name, ())) == 1}
        axes = [name for name in ("dp_replicate", "dp_shard", "tp", "cp", "pp") if name in one]
        product = math.prod(one[name] for name in axes)
        said = " x ".join(f"{name} {one[name]}" for name in axes)
        if axes and (self.gpus % product or (len(axes) == 5 and product != self.gpus)):
            raise ValueError(
                f"gpus is {self.gpus}, and {said} is {product}: it must divide them"
                + (", and all five together be as many" if len(axes) == 5 else "")
                + ". Leave one of them out, or change gpus."
            )
        shares = [name for name in ("dp_replicate", "dp_shard", "micro_batch", "grad_accum") if name in one]
        sequences = math.prod(one[name] for name in shares)
        if self.global_batch is not None and self.global_batch % sequences:
            raise ValueError(
                f"global_batch is {self.global_batch}, which is no multiple of "
                f"{' x '.join(f'{name} {one[name]}' for name in shares)} = {sequences}. Change one of them."
            )
        if "schedule" in self.pins and one.get("pp") == 1:
            raise ValueError(f"schedule is {self.pins['schedule'][0]!r} and pp is 1: one stage has none. Drop one.")


def read_pins(pins: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """What callers pinned, as allowed values: one value means that one, a list any of its members, None nothing.

    Raises:
        ValueError: an unknown name, or a value that the name cannot have. TypeError: a value of the wrong kind.
    """
    read: dict[str, tuple[Any, ...]] = {}
    for name, value in pins.items():
        if name not in PINS:
            raise ValueError(f"{name!r} can't be pinned; what can: {', '.join(PINS)}." + did_you_mean(name, PINS))
        if value is None:
            continue
        several = isinstance(value, Collection) and not isinstance(value, str)
        values = tuple(value) if several else (value,)
        if not values:
            raise ValueError(f"{name} is {value!r}; give at least one value, or leave it out.")
        read[name] = tuple(_read(name, one) for one in values)
    return read


def _read(name: str, value: Any) -> Any:
    if name in AXES:
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} is {value!r}; it must be a whole number.")
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be >= 1.")
        return value
    if name in _FLAGS:
        if not isinstance(value, bool):
            raise TypeError(f"{name} is {value!r}; it must be True or False.")
        return value
    if not isinstance(value, str):
        raise TypeError(f"{name} is {value!r}; it must be one of {', '.join(_WORDS[name])}.")
    word = normalise(value)
    if name == "offload" and word == "none":
        return OffloadConfig(word).mode
    if word not in _WORDS[name]:
        raise ValueError(
            f"{name} is {value!r}; it must be one of {', '.join(_WORDS[name])}." + did_you_mean(word, _WORDS[name])
        )
    return word
