"""Seconds and bytes that no pipeline of a conf is below, by the whole model traced with the same local weights.

A pipeline is cut and traced only where these allow that it is the best. They are made of what all stages together compute,
send and hold, dealt out evenly: the busiest rank has no less. Layers are dealt out whole, so that a rank may have fewer than
its even share; what is said of the first rank alone counts the fewest.
"""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from typing import Any

from nemo_like.options import PipelineParallel
from nemo_like.options.optimizers import optimizer_memory
from nemo_like.options.pipelining import SCHEDULE_OBJECTS
from nemo_like.planning import network
from nemo_like.planning.block import Choice
from nemo_like.planning.fit.layouts import Configuration
from nemo_like.planning.fit.shapes import TracedShape
from nemo_like.planning.seconds import Links, least_seconds, unit_seconds
from nemo_like.planning.sharding import Sharding
from nemo_like.planning.step_time import optimizer_seconds


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

    def seconds(self, conf: Configuration, mode: str, *, exchanges: bool = True, once: bool = True) -> float:
        """Of a step under `mode` (``none``, ``full``, ``selective``).

        Args:
            conf: with stages.
            mode: what is run again.
            exchanges: the traced shape splits experts, as the conf does, be it over other ranks.
            once: it splits them over as many; else what is gathered, reduced and stepped once is left out.
        """
        pp = conf.pp
        one = self._microbatch(conf, mode, exchanges)
        facts = SCHEDULE_OBJECTS[conf.schedule or PipelineParallel.schedule]
        stages = pp * facts.default_per_rank
        even = self._even(stages)
        fill = one * (pp - 1) / pp * even * facts.fill
        return conf.grad_accum * one / pp + fill + (self.once(conf) / pp if once else 0.0)

    def _microbatch(self, conf: Configuration, mode: str, exchanges: bool) -> float:
        """Of one, in all stages."""
        key = (conf.micro_batch, conf.cp, conf.ep, mode, exchanges)
        if key not in self._one:
            links, share = Links.of(conf.job, self.device), self._share(conf)
            one = self.head(conf)
            for kind, count in self.counts.items():
                block = self.shape.blocks[kind]
                sent = network.reduce_seconds(int(block.boundary_bytes * share), links.tensor, self.device) * 4
                if conf.cp == self.shape.key.cp:
                    size = int(block.sequence_bytes * self._rows(conf))
                    sent += network.gather_seconds(size, links.sequence, self.device) * 2
                if exchanges:
                    size = int(block.expert_bytes * share)
                    sent += network.exchange_seconds(size, links.experts, self.device) * 2
                one += count * (share * (sum(self._of(kind)) + self._replay(kind, mode)) + sent)
            self._one[key] = one
        return self._one[key]

    def bytes(self, conf: Configuration, mode: str) -> int:
        """Of the first rank's peak: what lies there of its layers, and what its microbatches in flight hold."""
        if conf.reshard or conf.job.offload.mode != "none":
            return 0  # less lies there, or is held
        held = sum(choice.held_bytes for choice in self.choices("full" if mode == "plan" else mode))
        lies = self._lying(conf)
        facts = SCHEDULE_OBJECTS[conf.schedule or PipelineParallel.schedule]
        flight = facts.in_flight(conf.pp, conf.grad_accum, facts.default_per_rank)
        stages = conf.pp * facts.default_per_rank
        return int(self._even(stages) / conf.pp * (lies + held * self._share(conf) * flight))

    def _lying(self, conf: Configuration) -> int:
        """Parameters of all layers, stored and gathered, whole gradients and optimizer state."""
        if conf.shard_ranks not in self._lies:
            sharding, optimizer = self.sharding(conf), self.shape.question.job.step.optimizer
            layers = (*sharding.units, *sharding.experts.values())
            trained = [p for p in sharding.trained if p.in_layer]
            lies = (
                sum(unit.shard for unit in layers) + optimizer_memory(trained, optimizer, device=self.device.kind).state
            )
            if sharding.on:
                lies += sum(unit.gathered + unit.whole_grad for unit in layers)
            self._lies[conf.shard_ranks] = lies
        return self._lies[conf.shard_ranks]

    def _share(self, conf: Configuration) -> float:
        """Tokens of a microbatch, as a share of the traced shape's."""
        return self._rows(conf) * self.shape.key.cp / conf.cp

    def _rows(self, conf: Configuration) -> float:
        """Sequences of a microbatch, as a share of the traced shape's."""
        return conf.micro_batch / self.shape.key.micro_batch

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

    def head(self, conf: Configuration) -> float:
        """Of the head's products with one microbatch."""
        return self.shape.head_seconds(conf.micro_batch * self.shape.question.seq_len / conf.cp)

    def once(self, conf: Configuration) -> float:
        """Of gathers, reductions and the optimizer, of all stages."""
        key = (conf.shard_ranks, conf.dp_replicate)
        if key not in self._ends:
            sharding, links = self.sharding(conf), Links.of(conf.job, self.device)
            total = optimizer_seconds(sharding.trained, self.shape.question.job.step.optimizer, self.device)
            experts = set(map(id, sharding.experts.values()))
            for unit in sharding.all if sharding.on else ():
                shards = links.expert_shards if id(unit) in experts else links.shards
                total += sum(unit_seconds(unit, shards, links))
            self._ends[key] = total
        return self._ends[key]

    def sharding(self, conf: Configuration) -> Sharding:
        """Of the whole model over the ranks that share a stage."""
        whole = conf.sized(pp=1, schedule=None, grad_accum=1, micro_batch=1)
        plain = whole.change(ac="none", loss=None, offload="none").with_strategy(
            reshard_after_forward=None, cpu_offload=False
        )
        return self.shape.planner(plain).sharding
