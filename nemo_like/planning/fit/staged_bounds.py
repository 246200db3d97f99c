"""Seconds and bytes that no pipeline of a layout is below, by the whole model traced with the same local weights.

A pipeline is cut and traced only where these allow that it is the best. They are made of what all stages together compute,
send and hold, dealt out evenly: the busiest rank has no less. Layers are dealt out whole, so that a rank may have fewer than
its even share; what is said of the first rank alone counts the fewest.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cached_property
from typing import Any

from nemo_like.planning.block import Choice
from nemo_like.planning.fit import network
from nemo_like.planning.fit.layouts import Layout
from nemo_like.planning.fit.seconds import Links, least_seconds, unit_seconds
from nemo_like.planning.fit.shapes import TracedShape, Variant
from nemo_like.planning.optimizers import optimizer_memory
from nemo_like.planning.sharding import Sharding
from nemo_like.planning.step_time import optimizer_seconds

_FILLS = {"gpipe": 1.0, "1f1b": 1.0, "interleaved_1f1b": 0.5}
"""Share of a forward and backward through the other stages for which a rank waits; of other schedules none is known."""


def in_flight(schedule: str | None, pp: int, microbatches: int) -> float:
    """Microbatches that the first rank of a pipeline has gone forward with and not back, in shares of its layers."""
    if schedule == "gpipe":
        return microbatches
    if schedule == "interleaved_1f1b":
        return min(2 * microbatches, 3 * pp - 1) / 2
    return min(microbatches, pp) / (1 if schedule == "1f1b" else 2)


class StagedBounds:
    """Of all pipelines whose local weights `shape`, the whole model, has."""

    def __init__(self, shape: TracedShape) -> None:
        self.shape, self.device = shape, shape.question.device
        self._least: dict[int, tuple[float, float]] = {}
        self._again: dict[tuple[int, str], float] = {}
        self._one: dict[Any, float] = {}
        self._ends: dict[Any, float] = {}
        self._lies: dict[int, int] = {}

    @cached_property
    def counts(self) -> Counter[int]:
        """Layer calls by kind."""
        return Counter(call.kind for call in self.shape.base.traced.calls)

    def seconds(self, layout: Layout, mode: str, *, exchanges: bool = True, once: bool = True) -> float:
        """Of a step under `mode` (``none``, ``full``, ``selective``).

        Args:
            layout: with stages.
            mode: what is run again.
            exchanges: the traced shape splits experts, as the layout does, be it over other ranks.
            once: it splits them over as many; else what is gathered, reduced and stepped once is left out.
        """
        pp = layout.pp
        one = self._microbatch(layout, mode, exchanges)
        stages = pp * (1 if _FILLS.get(layout.schedule or "", 0.0) == 1.0 else 2)
        even = self._even(stages)
        fill = one * (pp - 1) / pp * even * _FILLS.get(layout.schedule or "", 0.0)
        return layout.grad_accum * one / pp + fill + (self.once(layout) / pp if once else 0.0)

    def _microbatch(self, layout: Layout, mode: str, exchanges: bool) -> float:
        """Of one, in all stages."""
        key = (layout.micro_batch, layout.cp, layout.ep, mode, exchanges)
        if key not in self._one:
            links, share = Links.of(layout, self.device), self._share(layout)
            one = self.head(layout)
            for kind, count in self.counts.items():
                block = self.shape.blocks[kind]
                sent = network.reduce_seconds(int(block.boundary_bytes * share), links.tensor, self.device) * 4
                if layout.cp == self.shape.key.cp:
                    size = int(block.sequence_bytes * self._rows(layout))
                    sent += network.gather_seconds(size, links.sequence, self.device) * 2
                if exchanges:
                    size = int(block.expert_bytes * share)
                    sent += network.exchange_seconds(size, links.experts, self.device) * 2
                one += count * (share * (sum(self._of(kind)) + self._replay(kind, mode)) + sent)
            self._one[key] = one
        return self._one[key]

    def bytes(self, layout: Layout, mode: str) -> int:
        """Of the first rank's peak: what lies there of its layers, and what its microbatches in flight hold."""
        held = sum(choice.held_bytes for choice in self.choices("full" if mode == "plan" else mode))
        lies = self._lying(layout)
        flight = in_flight(layout.schedule, layout.pp, layout.grad_accum)
        stages = layout.pp * (1 if layout.schedule in ("gpipe", "1f1b") else 2)
        return int(self._even(stages) / layout.pp * (lies + held * self._share(layout) * flight))

    def _lying(self, layout: Layout) -> int:
        """Parameters of all layers, stored and gathered, whole gradients and optimizer state."""
        if layout.shard_ranks not in self._lies:
            sharding, optimizer = self.sharding(layout), self.shape.question.step.optimizer
            layers = (*sharding.units, *sharding.experts.values())
            trained = [p for p in sharding.trained if p.in_layer]
            lies = (
                sum(unit.shard for unit in layers) + optimizer_memory(trained, optimizer, device=self.device.kind).state
            )
            if sharding.on:
                lies += sum(unit.gathered + unit.whole_grad for unit in layers)
            self._lies[layout.shard_ranks] = lies
        return self._lies[layout.shard_ranks]

    def _share(self, layout: Layout) -> float:
        """Tokens of a microbatch, as a share of the traced shape's."""
        return self._rows(layout) * self.shape.key.cp / layout.cp

    def _rows(self, layout: Layout) -> float:
        """Sequences of a microbatch, as a share of the traced shape's."""
        return layout.micro_batch / self.shape.key.micro_batch

    def _even(self, stages: int) -> float:
        """The least that a stage has, of its even share of the layers."""
        layers = sum(self.counts.values())
        return layers // stages * stages / layers

    def _of(self, kind: int) -> tuple[float, float]:
        if kind not in self._least:
            self._least[kind] = least_seconds(self.shape.base.problems[kind])
        return self._least[kind]

    def _replay(self, kind: int, mode: str) -> float:
        if (kind, mode) not in self._again:
            problem = self.shape.base.problems[kind]
            choice = self._choice(kind, mode)
            reach = problem.reachable
            run = {k for k, word in enumerate(choice.decisions) if word == "recompute" and k < reach}
            self._again[kind, mode] = least_seconds(problem, run)[0] if run else 0.0
        return self._again[kind, mode]

    def choices(self, mode: str) -> list[Choice]:
        """Of a mode that needs no budget, one for each layer call."""
        return self.shape.uniform[mode]

    def _choice(self, kind: int, mode: str) -> Choice:
        choices = self.choices("none" if mode == "plan" else mode)
        return next(c for call, c in zip(self.shape.base.traced.calls, choices) if call.kind == kind)

    def head(self, layout: Layout) -> float:
        """Of the head's products with one microbatch."""
        return self.shape.head_seconds(layout.micro_batch * self.shape.question.seq_len / layout.cp)

    def once(self, layout: Layout) -> float:
        """Of gathers, reductions and the optimizer, of all stages."""
        key = (layout.shard_ranks, layout.dp_replicate)
        if key not in self._ends:
            sharding, links = self.sharding(layout), Links.of(layout, self.device)
            total = optimizer_seconds(sharding.trained, self.shape.question.step.optimizer, self.device)
            experts = set(map(id, sharding.experts.values()))
            for unit in sharding.all if sharding.on else ():
                shards = links.expert_shards if id(unit) in experts else links.shards
                total += sum(unit_seconds(unit, shards, links))
            self._ends[key] = total
        return self._ends[key]

    def sharding(self, layout: Layout) -> Sharding:
        """Of the whole model over the ranks that share a stage."""
        whole = replace(layout, pp=1, schedule=None, grad_accum=1, micro_batch=1)
        return self.shape.planner(whole, Variant("none", "model", "none", None)).sharding
