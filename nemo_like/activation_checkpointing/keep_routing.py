"""Keep, in every mode, what says which token goes to which expert."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

from nemo_like.activation_checkpointing.ops import routing_ops
from nemo_like.activation_checkpointing.policy import HOST, SAVE, Decide, Decision, Policy
from nemo_like.activation_checkpointing.spec import CheckpointSpec
from nemo_like.op_lookup import Op


@dataclass(frozen=True, eq=False)
class KeepRouting:
    """`inner`, but that the results of routing are kept whatever it says: the chosen experts, and the numbers of tokens
    that ranks exchange. A replay that routed otherwise by one token would send other numbers of rows than forward.
    """

    inner: Policy

    keeps_nothing = False

    @property
    def strict(self) -> bool:
        """As `inner`."""
        return getattr(self.inner, "strict", True)

    def tracked_ops(self) -> Collection[Op] | None:
        """Those of `inner`, and of routing."""
        tracked = self.inner.tracked_ops()
        return None if tracked is None else frozenset(tracked) | routing_ops()

    def start(self) -> Decide:
        """The decisions of `inner`, asked only about what it tracks."""
        return _Run(self.inner)


class _Run:
    """One region's decisions."""

    def __init__(self, inner: Policy) -> None:
        self._decide: Callable[..., Decision] = inner.start()
        tracked = inner.tracked_ops()
        self._asked = None if tracked is None else frozenset(tracked)
        self._routing = routing_ops()
        self.needs_call = getattr(self._decide, "needs_call", False)
        finish = getattr(self._decide, "finish", None)
        if finish is not None:
            self.finish = finish

    def __call__(self, op: Op, index: int, *call: Any) -> Decision:
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
