"""Timeline of a pipeline's schedule: each rank's actions in their order, each as soon as what it needs exists."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from nemo_like.distributed.pipeline.schedules import BACKWARD, FORWARD, INPUTS, WEIGHTS, Action


@dataclass(frozen=True)
class Timeline:
    """A step of a pipeline."""

    seconds: float
    """Seconds from the first action to the end of the last."""
    busy: float
    """Seconds in which ranks compute, of all ranks."""
    ranks: int

    @property
    def bubble(self) -> float:
        """The share of the ranks' time in which they wait."""
        total = self.seconds * self.ranks
        return 1 - self.busy / total if total else 0.0


class StageSeconds(NamedTuple):
    """Seconds of one micro-batch in one stage."""

    forward: float
    """Seconds of its layers' forward."""
    backward: float
    """Seconds of its layers' backward, without recomputation."""
    replay: float
    outer: float = 0.0
    """Forward and backward of embedding, head and loss, of which a third is the forward."""
    sent: float = 0.0
    """Seconds of collectives inside: forward and backward send as much."""


def action_seconds(stages: Iterable[StageSeconds]) -> dict[tuple[str, int], float]:
    """Return seconds by kind of action and stage; both halves of a cut backward recompute."""
    seconds: dict[tuple[str, int], float] = {}
    for index, own in enumerate(stages):
        third, sent = own.outer / 3, own.sent / 2
        seconds[FORWARD, index] = own.forward + third + sent
        seconds[BACKWARD, index] = own.backward + own.replay + 2 * third + sent
        # torch runs the first stage's backward whole, in the place of the second half.
        seconds[INPUTS, index] = 0.0 if index == 0 else own.backward / 2 + own.replay + third + sent
        seconds[WEIGHTS, index] = seconds[BACKWARD, index] if index == 0 else own.backward / 2 + own.replay + third
    return seconds


def timeline(
    actions: Sequence[Sequence[Action]], seconds: Mapping[tuple[str, int], float], stages: int, sending: float = 0.0
) -> Timeline:
    """Run the schedule.

    Args:
        actions: actions of each rank, in its order.
        seconds: seconds by kind of action and stage.
        stages: number of stages.
        sending: seconds from the end of an action to the begin of one on another rank that needs it.

    Raises:
        ValueError: in this order, an action never gets what it needs.
    """
    done: dict[tuple[str, int, int], float] = {}
    free, at, busy = [0.0] * len(actions), [0] * len(actions), 0.0
    left = sum(map(len, actions))
    ranks = {action.stage: rank for rank, rank_actions in enumerate(actions) for action in rank_actions}
    late = {
        (stage, other): sending if ranks[stage] != ranks[other] else 0.0
        for stage in ranks
        for other in (stage - 1, stage, stage + 1)
        if other in ranks
    }
    while left:
        before = left
        for rank, rank_actions in enumerate(actions):
            while at[rank] < len(rank_actions):
                action = rank_actions[at[rank]]
                ready = _ready(action, done, stages, late)
                if ready is None:
                    break
                took = seconds[action.kind, action.stage]
                free[rank] = end = max(ready, free[rank]) + took
                done[_result(action), action.stage, action.microbatch] = end
                busy += took
                at[rank], left = at[rank] + 1, left - 1
        if left == before:
            stuck = next(
                rank_actions[at[rank]] for rank, rank_actions in enumerate(actions) if at[rank] < len(rank_actions)
            )
            raise ValueError(f"The schedule comes to a standstill at {stuck}: what it needs is never made.")
    return Timeline(max(free, default=0.0), busy, len(actions))


def _result(action: Action) -> str:
    return INPUTS if action.kind == BACKWARD else action.kind


def _ready(
    action: Action, done: Mapping[tuple[str, int, int], float], stages: int, late: Mapping[tuple[int, int], float]
) -> float | None:
    """Return the time at which what `action` needs exists; None: it does not yet. `late`: seconds between two stages."""
    stage, number = action.stage, action.microbatch
    needed: list[tuple[str, int, int]] = []
    if action.kind == FORWARD:
        needed = [(FORWARD, stage - 1, number)] if stage else []
    elif action.kind in (BACKWARD, INPUTS):
        needed = [(FORWARD, stage, number)] + ([(INPUTS, stage + 1, number)] if stage + 1 < stages else [])
    elif action.kind == WEIGHTS:
        needed = [(INPUTS, stage, number)]
    if any(key not in done for key in needed):
        return None
    return max((done[key] + late[stage, key[1]] for key in needed), default=0.0)
