"""`CheckpointSpec`: modules recomputed as one, their saved outputs, and where these wait. And the modes, as functions.

Nothing here looks into a model or changes one: `nemo_like.activation_checkpointing.apply` does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TypedDict, Unpack

from torch import nn

from nemo_like._util.log import warn_once
from nemo_like._util.module_tree import bare, bare_children, join
from nemo_like._util.op_lookup import Op
from nemo_like._util.words import check_fields, setting
from nemo_like.activation_checkpointing.ops import routing_ops
from nemo_like.activation_checkpointing.policy import (
    HOST,
    SAVE,
    Decide,
    Decision,
    FullPolicy,
    Policy,
    SelectivePolicy,
    named_ops_policy,
    parts_of,
)
from nemo_like.activation_checkpointing.transfer import Transfer
from nemo_like.options import CheckpointConfig
from nemo_like.options.names import NamedList, NamedLists

KEEP_NOTHING = FullPolicy()


@dataclass(frozen=True)
class CheckpointSpec:
    """One region of a model and its treatment. Every mode, budget, plan and config resolves to a list of these.

    >>> CheckpointSpec(("model.layers.0",)).policy
    FullPolicy()
    """

    members: tuple[str, ...]
    """Names (in the original model) of the modules that are recomputed as one, in the order in which they are called."""
    policy: Policy | None = KEEP_NOTHING
    """Policy that chooses the outputs saved inside the region; None: all, so nothing is recomputed (the spec only
    states where they wait)."""
    transfer: Transfer | None = None
    """Transfer that moves tensors that wait in CPU memory. With ``policy=None``: a `Placement`, which encloses the
    module."""
    calls: int | None = setting(None, least=1, unit="whole number of timesteps")
    """A module that is called once a timestep: so many consecutive calls are one region. None: each call is one."""
    use_reentrant: bool = False
    """The older autograd-function form of checkpointing."""
    preserve_rng_state: bool = True
    """Recompute with the forward's random numbers."""
    layer: str | None = None
    """Name of the layer in which a policy's names of modules are paths; None: the member."""

    def __post_init__(self) -> None:
        check_fields(self)
        if isinstance(self.members, str) or not self.members or not all(isinstance(m, str) and m for m in self.members):
            raise ValueError(
                f"CheckpointSpec.members is {self.members!r}; it must hold the name of at least one module below the model."
            )
        object.__setattr__(self, "members", tuple(self.members))
        if len(set(self.members)) != len(self.members):
            raise ValueError(f"CheckpointSpec.members is {self.members!r}; it names a module twice.")
        several = len(self.members) > 1 or self.calls is not None
        if self.policy is None and (self.transfer is None or several):
            raise ValueError(
                f"CheckpointSpec of {', '.join(self.members)} has policy=None, which recomputes nothing: it must have one "
                "member and a transfer. Give it a policy to recompute it."
            )
        if self.use_reentrant and several:
            raise ValueError(
                f"CheckpointSpec.use_reentrant is True for {', '.join(self.members)}: only a region of one call can be "
                "recomputed by the older form. Use use_reentrant=False."
            )
        if self.use_reentrant and self.keeps_something:
            raise ValueError(
                f"CheckpointSpec.use_reentrant is True, and {type(self.policy).__name__} keeps tensors inside "
                f"{self.members[0]}, for which only the non-reentrant form has hooks. Use use_reentrant=False."
            )

    @property
    def keeps_something(self) -> bool:
        """Return whether the region is recomputed in part: its policy keeps the output of some operators."""
        return self.policy is not None and not self.policy.keeps_nothing


class How(TypedDict, total=False):
    """The fields of a spec that are the same for all regions of a mode."""

    policy: Policy | None
    use_reentrant: bool
    preserve_rng_state: bool


def one_region_each(names: Iterable[str], **how: Unpack[How]) -> list[CheckpointSpec]:
    """Each module a region of its own: whole layers (``full``, ``selective``) or their sub-modules (``submodule``)."""
    return [CheckpointSpec((name,), **how) for name in names]


def segments_of(
    names: Sequence[str], count: int | None = None, weights: Sequence[float] | None = None, **how: Unpack[How]
) -> list[CheckpointSpec]:
    """Segments of consecutive modules as one region each (``sequential``).

    Args:
        names: in the order in which the model calls them.
        count: how many segments; None: round(sqrt(number of modules)), which holds least for equal modules.
        weights: bytes that each module saves, to balance segments by; None: all alike.

    Raises:
        ValueError: no modules, or `count` or `weights` do not fit them.

    >>> [spec.members for spec in segments_of(["a", "b", "c"], 2)]
    [('a', 'b'), ('c',)]
    """
    sizes = segment_sizes(len(names), count, weights)
    return [CheckpointSpec(tuple(names[end - size : end]), **how) for size, end in zip(sizes, accumulate(sizes))]


def chunks_of_calls(names: Iterable[str], chunk_size: int, **how: Unpack[How]) -> list[CheckpointSpec]:
    """Modules called once a timestep, by the caller's own loop: every `chunk_size` consecutive calls are one region.

    Backward then keeps the state at every `chunk_size`-th step, and the steps of one chunk at a time. A call that gets
    nothing from the chunk before it (a new sequence) begins a new chunk.
    """
    return [CheckpointSpec((name,), calls=chunk_size, **how) for name in names]


def segment_sizes(count: int, segments: int | None = None, weights: Sequence[float] | None = None) -> list[int]:
    """Return how many of `count` consecutive layers go into each segment, so that the heaviest segment is lightest.

    >>> segment_sizes(10), segment_sizes(4, 2, weights=[5, 1, 1, 1])
    ([4, 3, 3], [1, 3])
    """
    if count < 1:
        raise ValueError("There are no layers to make segments of.")
    wanted = max(1, round(count**0.5)) if segments is None else segments
    if isinstance(wanted, bool) or not isinstance(wanted, int) or not 1 <= wanted <= count:
        raise ValueError(f"segments is {segments!r}; it must be a whole number from 1 to {count}, the layers.")
    if weights is None:
        return [count // wanted + (index < count % wanted) for index in range(wanted)]
    if len(weights) != count or not all(weight >= 0 for weight in weights):
        raise ValueError(f"weights is {weights!r}; it must hold one number >= 0 for each of the {count} layers.")
    # best[k][i]: the least heaviest segment of the first i layers in k segments, and where the last of them starts.
    total = [0.0, *accumulate(map(float, weights))]
    best = {1: [(total[i], 0) for i in range(count + 1)]}
    for k in range(2, wanted + 1):
        best[k] = [
            min(((max(best[k - 1][j][0], total[i] - total[j]), j) for j in range(k - 1, i)), default=(float("inf"), 0))
            for i in range(count + 1)
        ]
    sizes, end = [], count
    for k in range(wanted, 0, -1):
        start = best[k][end][1]
        sizes.append(end - start)
        end = start
    return sizes[::-1]


# Save, in every mode, the tensors that determine which token goes to which expert.


@dataclass(frozen=True, eq=False)
class KeepRouting:
    """`inner`, but that the results of routing are saved whatever it decides: the chosen experts, and the numbers of tokens
    that ranks exchange. A recomputation that routed otherwise by one token would send other numbers of rows than forward.
    """

    inner: Policy

    keeps_nothing = False

    @property
    def strict(self) -> bool:
        """As `inner`."""
        return getattr(self.inner, "strict", True)

    @property
    def learns(self) -> bool:
        """As `inner`."""
        return getattr(self.inner, "learns", False)

    def tracked_ops(self) -> Collection[Op] | None:
        """Return the operators that `inner` tracks, and those of routing."""
        tracked = self.inner.tracked_ops()
        return None if tracked is None else frozenset(tracked) | routing_ops()

    def start(self) -> Decide:
        """The decisions of `inner`, called only for operators that it tracks."""
        return _Run(self.inner)


class _Run:
    def __init__(self, inner: Policy) -> None:
        self._decide: Callable[..., Decision] = inner.start()
        tracked = inner.tracked_ops()
        self._asked = None if tracked is None else frozenset(tracked)
        self._routing = routing_ops()
        vars(self).update(parts_of(self._decide))

    def __call__(self, op: Op, index: int, *call: object) -> Decision:
        decision = self._decide(op, index, *call) if self._asked is None or op in self._asked else SAVE
        return SAVE if op in self._routing and decision not in (SAVE, HOST) else decision


def keep_routing(specs: Iterable[CheckpointSpec], experts: Collection[str]) -> list[CheckpointSpec]:
    """`specs`, with `KeepRouting` around the policy of each whose region holds a module named in `experts`."""
    return [
        replace(spec, policy=KeepRouting(spec.policy))
        if spec.policy is not None
        and not spec.use_reentrant
        and any(_holds(member, experts) for member in spec.members)
        else spec
        for spec in specs
    ]


def _holds(member: str, names: Collection[str]) -> bool:
    return any(name == member or name.startswith(f"{member}.") for name in names)


def policy_of(config: CheckpointConfig) -> Policy:
    """Return the policy for the outputs that a config saves inside a region."""
    if config.policy is not None:
        return config.policy
    if config.mode != "selective":
        return FullPolicy()
    return SelectivePolicy() if config.ops_to_save is None else named_ops_policy(config.ops_to_save)


# Which sub-modules of a layer are recomputed one by one: its norms, attentions and MLPs.


def submodule_lists(layers: Mapping[str, nn.Module], *, skip_attention: bool = False) -> NamedLists:
    """Return ``submodule`` as lists of names. Layers that have no such module are in none of them (logged once).

    Args:
        layers: the layers by name.
        skip_attention: as for `submodules_to_checkpoint`.

    Raises:
        ValueError: no layer has any.
    """
    inside = {name: submodules_to_checkpoint(layer) for name, layer in layers.items()}
    without = [type(bare(layers[name])).__name__ for name, paths in inside.items() if not paths]
    if len(without) == len(layers):
        raise ValueError(
            f"A {without[0]} has no MLP, attention or norm sub-module to checkpoint; use ac='full' or 'selective', which "
            "recompute whole layers."
        )
    if without:
        warn_once(
            f"ac='submodule' was asked for; {', '.join(dict.fromkeys(without))} has no MLP, attention or norm sub-module "
            "and keeps its activations."
        )
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, layer in layers.items() if skip_attention else ():
        inside[name] = submodules_to_checkpoint(layer, skip_attention=True)
    for name, paths in inside.items():
        if paths:
            alike.setdefault(tuple(paths), []).append(name)
    return NamedLists(tuple(NamedList(recompute=paths, layers=tuple(names)) for paths, names in alike.items()))


def submodules_to_checkpoint(layer: nn.Module, *, skip_attention: bool = False) -> list[str]:
    """Names within `layer` of its norms, attentions (or linear attentions) and MLPs, in registration order.

    `skip_attention`: leave attentions out, because recomputing one would write a shared key/value cache twice.
    """
    return [name for name, child in _replayable(layer) if not (skip_attention and _is_attention(name, child))]


def _replayable(layer: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """(name within the layer, child), looking into plain lists (T5's ``layer``)."""
    for name, child in bare_children(layer):
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _replayable(child, join(prefix, name))
        elif _is_replayable(name, child):
            yield join(prefix, name), child


def _is_replayable(name: str, child: nn.Module) -> bool:
    """Norms, attentions and MLPs; not single projections and convolutions, which alone gain nothing from recomputation."""
    # With more than one parameter-bearing piece to compute with: an MLP or an MoE block.
    is_composite = len(list(child.children())) > 0 or len(list(child.parameters(recurse=False))) > 2
    has_kind = "norm" in type(child).__name__.lower() or _is_attention(name, child) or is_composite
    return has_kind and any(True for _ in child.parameters())


def _is_attention(name: str, child: nn.Module) -> bool:
    words = f"{name.rpartition('.')[2]} {type(child).__name__}".lower()
    return "norm" not in words and any(word in words for word in ("attn", "attention", "mixer", "mamba"))
