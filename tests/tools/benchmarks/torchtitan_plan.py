"""One published step of torchtitan, planned: bytes and seconds of a rank."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.tensor.parallel import loss_parallel

from nemo_like.distributed.pipeline.schedules import actions_of
from nemo_like.fake.model_copy import model_copy
from nemo_like.job import Job
from nemo_like.models import resolve_model
from nemo_like.options import FSDP2, PipelineParallel
from nemo_like.options.pipelining import SCHEDULE_OBJECTS
from nemo_like.planning import roofline
from nemo_like.planning.answers.reserved import Reserved
from nemo_like.planning.answers.seconds import KERNELS_PER_PARAMETER, Links, unit_seconds
from nemo_like.planning.choose.layer import Choice
from nemo_like.planning.devices import Device
from nemo_like.planning.fit.layouts import Layout, job_of
from nemo_like.planning.model.traced import Known
from nemo_like.planning.program.timeline import StageSeconds, action_seconds, timeline
from nemo_like.planning.query import Choices, PlanQuery, Stage, parts_of
from nemo_like.planning.roofline import optimizer_seconds
from nemo_like.torch_compat import local_part
from tests.tools.benchmarks import torchtitan_step
from tests.tools.benchmarks.torchtitan_model import tensor_parallel_rank, with_ring
from tests.tools.benchmarks.torchtitan_seconds import HowRun, LayerSeconds, layer_seconds


@dataclass(frozen=True)
class PublishedStep:
    """What a row says of the job."""

    model: str
    gpus: int
    dp_shard: int
    tp: int
    cp: int
    pp: int
    schedule: str
    local_batch: int
    seq_len: int
    ac: str
    compiled: bool
    fp8: bool
    async_tp: bool
    compiled_loss: bool = False

    @classmethod
    def of(cls, row: dict[str, str], *, compiled_loss: bool = False) -> PublishedStep:
        """Of a line of a table, in which the loss may be compiled, too."""
        numbers = ("gpus", "dp_shard", "tp", "cp", "pp", "local_batch", "seq_len")
        return cls(
            model=row["model"],
            schedule=row["schedule"],
            ac=row["ac"],
            compiled=row["compile"] == "yes",
            fp8=row["precision"] == "fp8",
            async_tp=row["async_tp"] == "yes",
            compiled_loss=compiled_loss,
            **{name: int(row[name]) for name in numbers},
        )

    @property
    def microbatches(self) -> int:
        """As many as ranks of the pipeline (``build_pipeline_schedule`` until January 2025)."""
        return self.pp

    @property
    def micro_batch(self) -> int:
        """Sequences of a micro-batch on one rank."""
        return self.local_batch // self.microbatches

    @property
    def sequences(self) -> int:
        """Sequences of all ranks in one step."""
        return self.dp_shard * self.micro_batch * self.microbatches

    @property
    def job(self) -> Job:
        """Its sizes."""
        sizes = {"dp_shard": self.dp_shard, "tp": self.tp, "cp": self.cp, "pp": self.pp}
        layout = Layout(
            **sizes, schedule=self.schedule or None, micro_batch=self.micro_batch, grad_accum=self.microbatches
        )
        return job_of(Job(), layout, lambda job: 0)


@dataclass(frozen=True)
class StepPrediction:
    """What is predicted for it."""

    parts: dict[str, float]
    """Seconds of the step by what takes them."""
    memory: Reserved
    """Of the rank that reserves most."""
    rank: int = 0
    """Which that is, of the pipeline."""

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


def plan_step(step: PublishedStep, device: Device) -> StepPrediction:
    """Bytes and seconds of `step` on `device`; nothing runs."""
    with loss_parallel() if step.tp > 1 else nullcontext():
        return _Stages(step, device).planned() if step.pp > 1 else _Whole(step, device).planned()


class _Step:
    def __init__(self, step: PublishedStep, device: Device) -> None:
        self.step, self.device, self.links = step, device, Links.of(step.job, device)
        self.whole = model_copy(resolve_model(step.model).build("meta"))  # which is planned with its hooks
        self.model = with_ring(tensor_parallel_rank(self.whole, step.tp), step.cp)
        rate = device.matmul_flops["float8"] if step.fp8 else 0.0
        self.how = HowRun(step.compiled, rate, step.async_tp, step.tp, step.cp)
        loop = torchtitan_step.STEP
        if step.compiled_loss:
            loop = replace(loop, loss_fn=torchtitan_step.compiled_loss)
        # The model is one rank's already, of tp and of cp, which shards parameters.
        how = {"step": loop, "precision": "bf16", "strategy": FSDP2(ends="root")}
        self.job = Job.of(gpu=device, world_size=step.job.shard_ranks, **how)

    def sample(self) -> dict[str, torch.Tensor]:
        """One microbatch of one rank: of a sequence that several share, its part."""
        ids = torch.zeros(self.step.micro_batch, self.step.seq_len // self.step.cp, dtype=torch.long)
        return {"input_ids": ids}

    def layers(self, stage: Stage, choices: Sequence[Choice]) -> list[LayerSeconds]:
        """Of each call."""
        known: dict[Any, LayerSeconds] = {}
        made = []
        for call, choice in zip(stage.part.traced.calls, choices):
            if (call.kind, choice) not in known:
                known[call.kind, choice] = layer_seconds(stage.part.problems[call.kind], choice, self.how, self.links)
            made.append(known[call.kind, choice])
        return made

    def optimizer(self, stage: Stage) -> float:
        trained = stage.sharding.trained
        loop = len(trained) * KERNELS_PER_PARAMETER * self.device.launch_seconds
        return max(loop, optimizer_seconds(trained, stage.job.step.optimizer, self.device))


class _Whole(_Step):
    """Without stages."""

    def planned(self) -> StepPrediction:
        query = PlanQuery.of(self.model, self.sample(), self.job)
        choices, (stage,) = query.uniform(self.step.ac), query.stages
        eager = self.step.ac == "selective" and not self.step.compiled
        memory = torchtitan_step.reserved(query, choices, eager_selective=eager)
        layers, sharding = self.layers(stage, choices[0]), stage.sharding
        parts = _sum_of(layers) | {"head and embedding": stage.outside().seconds}
        gathers = reductions = 0.0
        for layer, unit in zip(layers, sharding.units):
            gather, reduce = unit_seconds(unit, self.links.shards, self.links)
            gathers += max(0.0, gather - layer.whole_forward)
            left = layer.whole_backward
            if unit.reshard:
                gathers, left = gathers + max(0.0, gather - left), max(0.0, left - gather)
            reductions += max(0.0, reduce - left)
        gather, reduce = unit_seconds(sharding.root, self.links.shards, self.links)
        parts |= {"parameter gathers": gathers + gather, "gradient reductions": reductions + reduce}
        return StepPrediction(parts | {"optimizer": self.optimizer(stage)}, memory)


class _Stages(_Step):
    """A pipeline, cut as theirs."""

    def planned(self) -> StepPrediction:
        step = self.step
        stages = step.pp * SCHEDULE_OBJECTS[step.schedule].default_per_rank
        pp = PipelineParallel(step.pp, step.schedule, step.microbatches, balance=_dealt(len(self._layers()), stages))
        sample = self.sample() | {"labels": self.sample()["input_ids"]}
        job = self.job.on(dp_shard=self.job.dp_shard, pp=pp)
        known = Known()
        known.cut = parts_of(self.whole, sample, job)
        query = PlanQuery.of(self.model, sample, job, known=known, parts_sent=step.tp)
        choices = query.uniform(step.ac)
        ranked = [self._memory(query, rank, choices) for rank in range(step.pp)]
        rank = max(range(step.pp), key=lambda r: ranked[r].reserved)
        return StepPrediction(self._seconds(query, choices), ranked[rank], rank)

    def _layers(self) -> Any:
        return self.model.get_submodule("model.layers")

    def _memory(self, query: PlanQuery, rank: int, choices: Choices) -> Reserved:
        head: Any = self.model.get_submodule("lm_head")
        rows = self.step.micro_batch * self.step.seq_len // self.step.cp
        kept = [query.hidden_bytes] * len(query.stages)
        kept[-1] = rows * local_part(head.weight).shape[0] * torch.bfloat16.itemsize
        return torchtitan_step.reserved_on_rank(query, rank, choices, kept)

    def _seconds(self, query: PlanQuery, choices: Choices) -> dict[str, float]:
        layers = [self.layers(stage, own) for stage, own in zip(query.stages, choices)]
        seconds = action_seconds(
            StageSeconds(
                sum(layer.whole_forward for layer in own),
                sum(layer.whole_backward for layer in own),
                0.0,
                stage.outside().seconds,
            )
            for own, stage in zip(layers, query.stages)
        )
        actions, count, step = actions_of(query.pp), len(query.stages), self.step
        same_host = self.device.gpus_per_host > step.gpus // step.pp
        handed = roofline.send_seconds(query.hidden_bytes, same_host, self.device)
        ranks = [query.of_rank(rank) for rank in range(step.pp)]
        busiest = max(
            ranks, key=lambda own: sum(each.whole_forward + each.whole_backward for i in own for each in layers[i])
        )
        parts = {
            name: value * step.microbatches
            for name, value in _sum_of([layer for index in busiest for layer in layers[index]]).items()
        }
        parts["head and embedding"] = step.microbatches * sum(query.stages[i].outside().seconds for i in busiest)
        computing = timeline(actions, seconds, count).seconds
        parts["pipeline bubble"] = max(0.0, computing - sum(parts.values()))
        parts["pipeline sends"] = max(0.0, timeline(actions, seconds, count, handed).seconds - computing)
        units = [
            [unit_seconds(unit, self.links.shards, self.links) for i in own for unit in query.stages[i].sharding.all]
            for own in ranks
        ]
        parts["parameter gathers"] = max(sum(gather for gather, _ in own) for own in units)
        parts["gradient reductions"] = max(sum(reduce for _, reduce in own) for own in units)
        parts["optimizer"] = max(sum(self.optimizer(query.stages[i]) for i in own) for own in ranks)
        return parts


def _sum_of(layers: Sequence[LayerSeconds]) -> dict[str, float]:
    return {
        "forward": sum(layer.forward for layer in layers),
        "backward": sum(layer.backward for layer in layers),
        "replay": sum(layer.replay for layer in layers),
        "tensor-parallel sums": sum(layer.sums_forward + layer.sums_backward for layer in layers),
        "ring": sum(layer.ring_forward + layer.ring_backward for layer in layers),
    }


def _dealt(layers: int, stages: int) -> tuple[int, ...]:
    """``generate_split_points``: what does not divide goes to the stages behind the first one, one layer each."""
    each, more = divmod(layers, stages)
    return tuple(each + (0 < index <= more) for index in range(stages))


__all__ = ["PublishedStep", "StepPrediction", "plan_step"]
