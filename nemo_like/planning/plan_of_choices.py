"""A planner's choices for all calls of a model's layers, written down as a `Plan`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from nemo_like._util.module_tree import bare, bare_modules
from nemo_like.activation_checkpointing.plan import LayerPlan, Plan, layer_signature
from nemo_like.planning.block import Choice

if TYPE_CHECKING:
    from nemo_like.planning.planner import Planner


def plan_of(planner: Planner, choices: Sequence[Choice], asked: str, gap: float, reserved: int | None) -> Plan:
    """Return choices for all calls as a `Plan`; `reserved`: bytes, where they are known already."""
    peak = planner.peak(choices)
    layers: dict[str, LayerPlan] = {}
    modules = {name: bare(module) for name, module in bare_modules(planner.whole)}
    exposed = planner.exposed(choices)
    for call, choice, moved, waits in zip(planner.traced.calls, choices, planner.moved(choices), exposed):
        problem = planner.problems[call.kind]
        before = layers.get(call.fqn)
        if before is not None and not problem.trace.saves_something:
            continue  # a call without gradients: what the layer keeps is decided by its others
        if before is not None and not before.none_bytes:
            before = None  # and this is the first of those
        times = 1 if before is None else before.replay_flops // max(1, choice.replay_flops) + 1
        rows: Mapping[str, Sequence[str]] | None = None
        if choice.decisions:
            rows = {} if choice.is_full else problem.rows(choice, one_attention=True)
        layers[call.fqn] = LayerPlan(
            call.fqn,
            layer_signature(modules[call.fqn]),
            choice.label,
            (choice.held_bytes - moved) * times,
            (choice.host_bytes + moved) * times,
            problem.trace.none_bytes * times,
            choice.replay_flops * times,
            (choice.replay_seconds + waits) * times,
            rows,
        )
    calls = [planner.problems[call.kind] for call in planner.traced.calls]
    if reserved is None and (found := planner.reserved(choices)) is not None:
        reserved = found.reserved
    return Plan(
        model=type(planner.whole).__name__,
        device=planner.device.name,
        traced_for=planner.device.kind,
        budget=asked,
        layers=tuple(layers.values()),
        held_bytes=planner.held(choices) - sum(planner.moved(choices)),
        none_bytes=planner.held(planner.uniform("none")),
        full_bytes=planner.held(planner.uniform("full")),
        forward_flops=sum(p.trace.flops for p in calls),
        forward_seconds=sum(p.forward_seconds for p in calls),
        replay_flops=sum(c.replay_flops for c in choices),
        replay_seconds=sum(c.replay_seconds for c in choices) + sum(exposed),
        step_seconds=planner.step_seconds(choices),
        gap_seconds=gap,
        peak=peak.parts,
        peak_at=peak.at,
        step=_step(planner),
        matmuls=planner.matmuls,
        reserved_bytes=reserved,
    )


def _step(planner: Planner) -> dict[str, Any]:
    """`Plan.step`."""
    said = {k: v for k, v in asdict(planner.job.step).items() if k != "loss_fn"}
    return said | {"loss": "model" if planner.outer().own_loss else "loop", "sample": planner.sample}
