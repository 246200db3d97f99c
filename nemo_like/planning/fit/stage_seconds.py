"""What one microbatch takes in the layers of one stage, and a schedule of such stages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from nemo_like.options import PipelineParallel
from nemo_like.planning.block import BlockProblem, Choice
from nemo_like.planning.fit import network
from nemo_like.planning.fit.seconds import BlockSeconds, Links
from nemo_like.planning.schedule_time import StageSeconds, action_seconds

_SENT = ("tensor-parallel sums", "sequence gathers", "expert exchanges")
_PARTS = ("forward", "backward", "replay", *_SENT, "head and embedding")


def layer_parts(calls: Iterable[tuple[BlockSeconds, BlockProblem, Choice]], links: Links) -> dict[str, float]:
    """Seconds of one microbatch in these layer calls, by what takes them; ``"head and embedding"`` is 0."""
    parts, device = dict.fromkeys(_PARTS, 0.0), links.device
    alike: dict[tuple[int, int], list[tuple[BlockSeconds, BlockProblem, Choice]]] = {}
    for call in calls:
        alike.setdefault((id(call[1]), id(call[2])), []).append(call)
    for same in alike.values():
        count, (block, problem, choice) = len(same), same[0]
        again = 1 if choice.label == "full" else 0
        parts["forward"] += count * block.forward
        parts["backward"] += count * block.backward
        parts["replay"] += count * block.replay(choice, problem.reachable)
        sums = network.reduce_seconds(block.boundary_bytes, links.tensor, device)
        parts["tensor-parallel sums"] += count * sums * (4 + again)
        gathered = network.gather_seconds(block.sequence_bytes, links.sequence, device)
        parts["sequence gathers"] += count * gathered * (2 + again)
        sent = network.exchange_seconds(block.expert_bytes, links.experts, device)
        parts["expert exchanges"] += count * sent * (2 + again)
    return parts


def action_seconds_of(stages: Sequence[Mapping[str, float]], pp: PipelineParallel) -> dict[tuple[str, int], float]:
    """Seconds by kind of action and stage, of stages by their `layer_parts`."""
    made = (
        StageSeconds(
            forward=parts["forward"], backward=parts["backward"], replay=parts["replay"],
            outer=parts["head and embedding"], sent=sum(parts[name] for name in _SENT),
        )
        for parts in stages
    )  # fmt: skip
    return action_seconds(made, pp.replay)
