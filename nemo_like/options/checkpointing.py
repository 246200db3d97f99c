"""Values of `ac=`: a config, a budget, and the one place where its short strings are read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nemo_like._util.words import (
    a_or_an,
    check_fields,
    did_you_mean,
    exact_bytes,
    field_names,
    is_number,
    normalise,
    parse_bytes,
    setting,
    with_unit,
    write_bytes,
)
from nemo_like.options.names import NO_NAMES, NamedList, NamedLists, are_lists, read_json

AC_STRATEGIES: tuple[str, ...] = ("none", "full", "selective", "submodule", "sequential")


@dataclass(frozen=True)
class CheckpointConfig:
    """Activation checkpointing, spelled out. Usable as ``ac=`` of `nemo_like.parallelize`."""

    enabled: bool = False
    """Checkpoint activations at all."""
    strategy: str = setting("selective", choices=AC_STRATEGIES)
    """``none`` | ``full`` | ``selective`` | ``submodule`` | ``sequential``; case and ``-`` for ``_`` do not matter."""
    memory_threshold_mb: float = setting(50.0, least=0, unit="finite number of MB", wrong_kind=TypeError)
    """Profile-driven only: layers whose measured activations exceed this many MB (10**6 bytes) are checkpointed."""
    use_reentrant: bool = False
    """The older autograd-function form of checkpointing; refused where torch does not support it."""
    preserve_rng_state: bool = True
    """Recompute with the forward's random numbers, so that dropout gives the same gradients as without checkpointing."""
    snn_timestep_checkpoint: bool = False
    """Checkpoint chunks of timesteps of modules that unroll a cell."""
    snn_chunk_size: int = setting(1, least=1)
    """Timesteps per checkpointed chunk."""
    sequential_segments: int | None = setting(None, least=1)
    """Number of segments of ``sequential``; None: round(sqrt(number of layers))."""
    profile_before_apply: bool = True
    """Measure first and checkpoint only layers above `memory_threshold_mb`; needs a sample input."""
    profile_num_runs: int = setting(3, least=1)
    """Runs per measurement."""
    exclude_patterns: Sequence[str] = ()
    """Globs over module names (FQNs); layers that one matches, and those in a module that one matches, are never
    checkpointed."""
    include_patterns: Sequence[str] = ()
    """Globs over layer names (FQNs) that are always checkpointed; beats `exclude_patterns`."""
    layer_classes: Sequence[str] | None = None
    """Class names of the layers to checkpoint, such as ``["LlamaDecoderLayer"]``; None: found by structure."""
    ops_to_save: Sequence[str] | None = None
    """Ops under ``torch.ops`` whose outputs are saved, such as ``"torch.ops.aten.mm.default"``; None: a built-in set."""
    policy: Any = None
    """A policy object that decides which outputs each region of ``selective``, ``submodule`` or ``sequential`` saves.
    None: `SelectivePolicy()` for ``selective``, nothing for the others."""

    def __post_init__(self) -> None:
        check_fields(self)
        self._check_names()
        if self.policy is not None and not is_policy(self.policy):
            raise TypeError(
                f"CheckpointConfig.policy is {self.policy!r}; it must be a policy object, such as SelectivePolicy()."
            )
        self._check_contradictions()

    def _check_names(self) -> None:
        for name in ("exclude_patterns", "include_patterns", "layer_classes", "ops_to_save"):
            value = getattr(self, name)
            if value is None and name in ("layer_classes", "ops_to_save"):
                continue
            if isinstance(value, str) or not isinstance(value, Iterable) or not all(isinstance(v, str) for v in value):
                raise TypeError(f"CheckpointConfig.{name} is {value!r}; it must be a list of strings.")
            if not all(item.strip() for item in value):
                raise ValueError(f"CheckpointConfig.{name} is {value!r}; it holds an empty name.")
            object.__setattr__(self, name, tuple(value))
        if self.ops_to_save:
            from nemo_like._util.op_lookup import resolve_op

            for name in self.ops_to_save:
                resolve_op(name, field="CheckpointConfig.ops_to_save")

    def _check_contradictions(self) -> None:
        """Refuse two settings that cannot both hold, by the field that has to change."""
        strategy, policy = self.strategy, self.policy
        both = sorted(set(self.exclude_patterns) & set(self.include_patterns))
        contradictions = (
            (
                "enabled",
                self.enabled and strategy == "none",
                "strategy is 'none', which checkpoints nothing: set enabled=False or name a strategy.",
            ),
            (
                "ops_to_save",
                self.ops_to_save is not None and strategy != "selective",
                f"strategy is {strategy!r}: only 'selective' keeps single ops.",
            ),
            (
                "sequential_segments",
                self.sequential_segments is not None and strategy != "sequential",
                f"strategy is {strategy!r}: only 'sequential' makes segments.",
            ),
            (
                "policy",
                policy is not None and strategy not in ("selective", "submodule", "sequential"),
                f"strategy is {strategy!r}, which keeps nothing by policy: leave one of the two out.",
            ),
            (
                "policy",
                policy is not None and self.ops_to_save is not None,
                "ops_to_save is given too: put the ops into the policy, SelectivePolicy(save_ops=...).",
            ),
            (
                "use_reentrant",
                policy is not None and self.use_reentrant and not policy.keeps_nothing,
                "a policy keeps tensors, for which only the non-reentrant form has hooks.",
            ),
            (
                "use_reentrant",
                self.use_reentrant and strategy in ("selective", "sequential"),
                f"strategy is {strategy!r}, which needs the saved-tensor hooks that only the non-reentrant form has: "
                "set use_reentrant=False, or strategy='full' or 'submodule'.",
            ),
            (
                "snn_chunk_size",
                self.snn_chunk_size != 1 and not self.snn_timestep_checkpoint,
                "snn_timestep_checkpoint is False: set it to True to checkpoint timesteps.",
            ),
            ("exclude_patterns", both, f"include_patterns holds {both} too: keep each pattern in one of the two."),
        )
        for field, contradicts, reason in contradictions:
            if contradicts:
                raise ValueError(f"CheckpointConfig.{field} is {getattr(self, field)!r}, but {reason}")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CheckpointConfig:
        """The config that a mapping (a parsed YAML or JSON file, or ``dataclasses.asdict``) spells out.

        Raises:
            TypeError: `values` is not a mapping, or a value has the wrong kind.
            ValueError: an unknown key, a wrong value, or two that contradict; the message names the field.
        """
        if not isinstance(values, Mapping):
            raise TypeError(f"A CheckpointConfig is made from a mapping, not from {values!r}.")
        names = field_names(cls)
        for key in values:
            if key not in names:
                raise ValueError(
                    f"CheckpointConfig has no field {key!r}; its fields are {', '.join(names)}."
                    + did_you_mean(str(key), names)
                )
        return cls(**values)

    @property
    def mode(self) -> str:
        """The strategy that takes effect: ``"none"`` where `enabled` is false."""
        return self.strategy if self.enabled else "none"


def is_policy(value: object) -> bool:
    """Return whether `value` has the attributes of a policy that the engine needs (and is not the class of one)."""
    parts = ("keeps_nothing", "tracked_ops", "start")
    return not isinstance(value, type) and all(hasattr(value, name) for name in parts)


@dataclass(frozen=True)
class MemoryBudget:
    """A budget for `nemo_like.parallelize`'s ``ac=``: exactly one of the three fields is set.

    >>> MemoryBudget.parse("40GiB").peak_bytes
    42949672960
    >>> MemoryBudget.parse("50%").fraction, MemoryBudget.parse("auto").device_share
    (0.5, 0.9)
    """

    peak_bytes: int | None = None
    """Peak bytes per rank of a whole training step."""
    fraction: float | None = None
    """Share (0 to 1) of the activation bytes that no checkpointing would hold."""
    device_share: float | None = None
    """Peak bytes per rank as a share (0 to 1) of the device's memory. The rest is for the CUDA context, communication
    buffers and fragmentation."""
    fixed: NamedList = NO_NAMES
    """Names that every plan keeps; the planner decides on the rest."""

    def __post_init__(self) -> None:
        fields = field_names(MemoryBudget)[:-1]
        limits = [name for name in fields if getattr(self, name) is not None]
        if len(limits) != 1:
            raise ValueError(
                f"MemoryBudget was given {' and '.join(limits) or 'nothing'}; it needs exactly one of {', '.join(fields)}."
            )
        if self.fixed.layers or self.fixed.recompute is not None:
            raise ValueError(
                "ac has a budget with layers or recompute; it takes names to save or offload in all layers."
            )
        value = getattr(self, limits[0])
        if isinstance(value, bool) or not isinstance(value, int | float):
            way = f": write MemoryBudget.parse({value!r})" if isinstance(value, str) else ""
            raise TypeError(f"MemoryBudget.{limits[0]} is {value!r}, {a_or_an(value)}; it must be a number{way}.")
        if limits == ["peak_bytes"] and not value > 0:
            raise ValueError(f"MemoryBudget.peak_bytes is {value!r}; it must be > 0.")
        if limits != ["peak_bytes"] and not 0 <= value <= 1:
            raise ValueError(f"MemoryBudget.{limits[0]} is {value!r}; it must be between 0 and 1.")

    @classmethod
    def parse(cls, text: str, name: str = "ac") -> MemoryBudget:
        """``"40GiB"`` (bytes of peak per rank), ``"50%"`` (of the activation bytes of no checkpointing) or ``"auto"``
        (nine tenths of the device's memory). `name` is the argument's, for the error.

        Raises:
            TypeError: `text` is not a string.
            ValueError: it is none of the three, or a number without a unit.
        """
        if not isinstance(text, str):
            raise TypeError(f"budget is {text!r}; write it as '40GiB' or '50%', as 'auto', or as a MemoryBudget.")
        stripped = text.strip()
        if normalise(stripped) == "auto":
            return cls(device_share=0.9)
        if stripped.endswith("%"):
            try:
                return cls(fraction=float(stripped[:-1]) / 100)
            except ValueError as error:
                raise ValueError(f"Budget {text!r} is not a percentage from 0% to 100%.") from error
        if is_number(text) and float(text) <= 100:
            raise ValueError(
                f"{name} is {text!r}, without a unit. Write {with_unit(stripped)!r} or {stripped + '%'!r}."
            )
        return cls(peak_bytes=parse_bytes(text, name))

    @property
    def words(self) -> str | dict[str, Any] | None:
        """The value that `parse_ac` makes this budget of; None where there is no such value.

        >>> MemoryBudget(peak_bytes=40 << 30).words, MemoryBudget(fraction=0.5).words
        ('40GiB', '50%')
        """
        if self.fixed != NO_NAMES:
            return self.fixed.words | {"budget": replace(self, fixed=NO_NAMES).words}
        if self.fraction is not None:
            return f"{self.fraction * 100:g}%"
        if self.device_share is not None:
            return "auto" if self == MemoryBudget.parse("auto") else None
        size = self.peak_bytes or 0
        return exact_bytes(int(size)) if float(size).is_integer() else None

    def __str__(self) -> str:
        if self.fixed != NO_NAMES:
            return json.dumps(self.words)
        if self.fraction is not None:
            return f"{self.fraction * 100:.4g}%"
        if self.device_share is not None:
            return "auto" if self.device_share == 0.9 else f"{self.device_share * 100:.4g}% of the device"
        return write_bytes(int(self.peak_bytes or 0))


def parse_ac(ac: object) -> CheckpointConfig | MemoryBudget | NamedLists:
    """Return the meaning of ``ac=``: a `CheckpointConfig`, a `MemoryBudget` for the planner, or lists. Only this reads it.

    Accepts ``None``/``False``/``"none"``, ``True``/``"full"``, ``"selective"``, ``"submodule"`` and ``"sequential"``.
    Also a budget (``"40GiB"``, ``"50%"``, ``"auto"``), a policy object (``"selective"`` with it), either dataclass, the
    fields of a `CheckpointConfig` as a mapping, or lists of names (`NamedLists`), also as JSON.

    Raises:
        ValueError: an unknown word.
        TypeError: something else.

    >>> parse_ac("Selective").mode
    'selective'
    """
    if isinstance(ac, CheckpointConfig | MemoryBudget | NamedLists):
        return ac
    if isinstance(ac, str) and ac.lstrip()[:1] in ("{", "["):
        ac = read_json(ac)
    if isinstance(ac, Mapping) and ac.get("budget") is not None:
        (fixed,) = NamedLists.of({name: value for name, value in ac.items() if name != "budget"}).lists
        return replace(MemoryBudget.parse(ac["budget"]), fixed=fixed)
    if are_lists(ac):
        return NamedLists.of(ac)
    if isinstance(ac, Mapping):  # to write one is to ask for checkpointing
        return CheckpointConfig.from_dict({"enabled": True, "profile_before_apply": False, **ac})
    if ac is None or ac is False:
        ac = "none"
    elif ac is True:
        ac = "full"
    if is_policy(ac):
        return CheckpointConfig(enabled=True, strategy="selective", policy=ac, profile_before_apply=False)
    if isinstance(ac, type):
        raise TypeError(f"ac is the class {ac.__name__}; it must be an object of it: ac={ac.__name__}().")
    if not isinstance(ac, str):
        raise TypeError(
            f"ac is {ac!r}, {a_or_an(ac)}; it must be None, a bool, one of {', '.join(AC_STRATEGIES)}, "
            "a budget such as '40GiB' or '50%', a MemoryBudget, a Plan, a policy object or a CheckpointConfig "
            "(or its fields as a dict), or lists of names, such as {'save': ['attention']}."
        )
    word = normalise(ac)
    if word in AC_STRATEGIES:
        # A bare word requests the mode itself, everywhere; only a CheckpointConfig requests profiling first.
        return CheckpointConfig(enabled=word != "none", strategy=word, profile_before_apply=False)
    if word == "auto" or re.match(r"\s*[\d.]", ac):
        return MemoryBudget.parse(ac)
    raise ValueError(
        f"ac is {ac!r}; it must be one of {', '.join(AC_STRATEGIES)}, or a budget such as '40GiB', '50%' or 'auto'."
        + did_you_mean(word, AC_STRATEGIES)
    )
