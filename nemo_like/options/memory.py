"""Options that the planner may use to stay within a memory budget."""

from __future__ import annotations

import os
from dataclasses import dataclass

from nemo_like._util.words import check_fields, parse_bytes
from nemo_like.options.flag import flagged


@dataclass(frozen=True)
class PlanSearch:
    """The way in which a plan for a budget is searched.

    >>> PlanSearch(host=True, host_memory="32GiB").host_memory
    34359738368

    Raises:
        ValueError, TypeError: a wrong value.
    """

    host: bool = flagged(False, group="memory", kind=bool, stages=False, moves=True)
    """Also consider keeping outputs in CPU memory, over the device's link. Time of the copies that computing does not
    hide counts."""
    host_memory: int | str = flagged(
        64 << 30,
        group="memory",
        default="64GiB",
        read=lambda size: parse_bytes(size, "--host-memory") if isinstance(size, str) else size,
    )
    """CPU memory of one rank, for saved outputs, `offload` and the state of FSDP2. The layers share it evenly. The
    default is a quarter of a node's 2 TiB for eight GPUs."""

    def __post_init__(self) -> None:
        check_fields(self)
        size = parse_bytes(self.host_memory, "host_memory") if isinstance(self.host_memory, str) else self.host_memory
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise ValueError(
                f"host_memory is {self.host_memory!r}; it must be a number of bytes >= 0, or a string like '64GiB'."
            )
        object.__setattr__(self, "host_memory", size)

    @classmethod
    def of(cls, search: PlanSearch | None) -> PlanSearch:
        """Return the meaning of ``search=``: the object, or None: the defaults.

        Raises:
            TypeError: something else.
        """
        if search is not None and not isinstance(search, PlanSearch):
            raise TypeError(f"search is {search!r}; it must be a PlanSearch(...), or None.")
        return search or cls()


# The settings of CUDA's caching allocator that decide how much it reserves.

# Variables of the environment with settings of CUDA's caching allocator; the first one that is set counts.
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def allocator_here(value: str | None) -> AllocatorConfig:
    """Return the allocator's settings that `value` means; None: those that a job which is started here would read."""
    here = (os.environ[name] for name in ALLOCATOR_VARIABLES if name in os.environ)
    return AllocatorConfig.parse(next(here, "") if value is None else value)


@dataclass(frozen=True)
class AllocatorConfig:
    """The settings in ``PYTORCH_ALLOC_CONF``.

    >>> AllocatorConfig.parse("expandable_segments:True,max_split_size_mb:512").max_split_size
    536870912

    Raises:
        ValueError: a number out of range, as torch refuses it.
    """

    expandable_segments: bool = False
    """Segments grow in place, so that fragmentation hardly occurs."""
    max_split_size: int | None = None
    """Bytes; None: every block may be split."""
    roundup_power2_divisions: int = 0
    """Steps between two powers of two, a power of two itself; 0: requests are rounded to 512 bytes."""
    large_segment: int = 20 << 20
    """Bytes of a segment that requests of 1 to 10 MiB share."""

    def __post_init__(self) -> None:
        divisions, limit = self.roundup_power2_divisions, self.max_split_size
        if divisions < 0 or divisions & (divisions - 1):
            raise ValueError(f"roundup_power2_divisions is {divisions}; it must be a power of two, or 0 for none.")
        if limit is not None and limit < self.large_segment:
            raise ValueError(f"max_split_size is {limit} bytes; torch takes no less than {self.large_segment}.")

    @classmethod
    def of(cls, allocator: AllocatorConfig | str | None) -> AllocatorConfig:
        """Return the meaning of ``allocator=``: the object, ``PYTORCH_ALLOC_CONF`` text, or None: torch's defaults.

        Raises:
            ValueError: as `parse`.
            TypeError: something else.
        """
        if isinstance(allocator, str | None):
            return cls.parse(allocator or "")
        if isinstance(allocator, AllocatorConfig):
            return allocator
        raise TypeError(f"allocator is {allocator!r}; it must be a text such as 'expandable_segments:True', or None.")

    @classmethod
    def parse(cls, text: str) -> AllocatorConfig:
        """The settings in `text`, written as for ``PYTORCH_ALLOC_CONF``; settings that change no size are passed over.

        Raises:
            ValueError: a setting without a value, or one that is not modelled.
        """
        if "[" in text:
            raise ValueError(f"{text!r} has a list of values, which is not modelled; give one number for all sizes.")
        settings: dict[str, int | bool] = {}
        for part in filter(None, map(str.strip, text.split(","))):
            name, colon, value = (piece.strip() for piece in part.partition(":"))
            if not colon:
                raise ValueError(
                    f"{part!r} in {text!r} has no value; write name:value, as in expandable_segments:True."
                )
            if name == "backend" and value != "native":
                raise ValueError(
                    f"backend:{value} is another allocator than torch's own: the bytes it reserves are not known."
                )
            if name == "expandable_segments":
                settings[name] = value == "True"
            elif name in _NUMBERS:
                settings[_NUMBERS[name][0]] = int(value) * _NUMBERS[name][1]
        return cls(**settings)  # type: ignore[arg-type]


# Settings with a number: the field, and the bytes of one.
_NUMBERS = {
    "max_split_size_mb": ("max_split_size", 1 << 20),
    "large_segment_size_mb": ("large_segment", 1 << 20),
    "roundup_power2_divisions": ("roundup_power2_divisions", 1),
}
