"""What the planner may use to stay within a memory budget."""

from __future__ import annotations

from dataclasses import dataclass

from nemo_like._util.words import parse_bytes


@dataclass(frozen=True)
class PlanSearch:
    """How a plan for a budget is searched.

    >>> PlanSearch(host=True, host_memory="32GiB").host_memory
    34359738368

    Raises:
        ValueError, TypeError: a wrong value.
    """

    skip: bool | None = None
    """Leave out of the recomputation what nothing reads; needs scipy. None: where scipy is installed (else logged once)."""
    host: bool = False
    """Also consider keeping outputs in host memory, over the device's link. What computing does not hide of the copies
    counts as time."""
    host_memory: int | str = 64 << 30
    """Host bytes of one rank for that, for `offload` and for ``cpu_offload``, shared evenly by the layers. The default is a
    quarter of a node's 2 TiB for eight GPUs."""
    measure: bool = False
    """Time each operator of a layer on the device at hand, instead of the roofline."""

    def __post_init__(self) -> None:
        for name in ("skip", "host", "measure"):
            value = getattr(self, name)
            if not isinstance(value, bool) and not (name == "skip" and value is None):
                raise TypeError(f"PlanSearch.{name} is {value!r}; it must be True or False.")
        size = parse_bytes(self.host_memory, "host_memory") if isinstance(self.host_memory, str) else self.host_memory
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise ValueError(
                f"host_memory is {self.host_memory!r}; it must be a number of bytes >= 0, or a string like '64GiB'."
            )
        object.__setattr__(self, "host_memory", size)

    @classmethod
    def of(cls, search: PlanSearch | None) -> PlanSearch:
        """Return what ``search=`` means: the object, or None: the defaults.

        Raises:
            TypeError: something else.
        """
        if search is not None and not isinstance(search, PlanSearch):
            raise TypeError(f"search is {search!r}; it must be a PlanSearch(...), or None.")
        return search or cls()
