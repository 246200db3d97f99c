"""The limit that binds a configuration, and the cheapest changes that would help."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

from nemo_like._util.words import write_bytes
from nemo_like.activation_checkpointing.plan import largest_group
from nemo_like.job import Job
from nemo_like.options.memory import AllocatorConfig
from nemo_like.planning.advise import changes, helping, in_words
from nemo_like.planning.devices import Device
from nemo_like.planning.fit.candidate import Candidate
from nemo_like.planning.fit.layouts import MOST_STAGES
from nemo_like.planning.fit.question import Question
from nemo_like.planning.predictions.seconds import HOST, Links
from nemo_like.planning.query import PlanQuery
from nemo_like.planning.what_if import largest, least_need

MOST_GPUS = 1 << 17
_GROWING = "PYTORCH_ALLOC_CONF=expandable_segments:True"
_NETWORK = {
    "parameter gathers": "all-gather of parameters",
    "gradient reductions": "reduction of gradients",
    "tensor-parallel sums": "sums of tensor parallelism",
    "sequence gathers": "all-gather of keys and values",
    "expert exchanges": "all-to-all of experts' rows",
    "pipeline sends": "sends between stages",
}


def binds(candidate: Candidate, limit: int, device: Device) -> str:
    """Return what keeps a configuration from being faster.

    ``memory: ...``: it recomputes for want of memory. ``network: ...``: waiting for collectives takes longer than any other
    extra. "between hosts" is added where their ranks are on several hosts. ``pipeline: the bubble``; else ``compute``.
    """
    parts = candidate.seconds.parts
    sent = {name: parts[name] for name in _NETWORK if parts.get(name)}
    extra = {
        "replay": parts.get("replay", 0.0),
        "network": sum(sent.values()),
        "bubble": parts.get("pipeline bubble", 0.0),
        "host": parts.get(HOST, 0.0),
    }
    worst = max(extra, key=lambda name: extra[name])
    if candidate.need.bytes > limit or (worst == "replay" and extra["replay"] > 0.02 * candidate.step_seconds):
        return f"memory: {largest_group(candidate.peak.parts)}"
    if worst == "network" and extra["network"] > 0.02 * candidate.step_seconds:
        longest = max(sent, key=lambda name: sent[name])
        between = " between hosts" if _spans_hosts(longest, candidate.job, device) else ""
        return f"network: {_NETWORK[longest]}{between}"
    if worst == "bubble" and extra["bubble"] > 0.02 * candidate.step_seconds:
        return "pipeline: the bubble"
    if worst == "host" and extra["host"] > 0.02 * candidate.step_seconds:
        return "host: it launches kernels more slowly than the GPU runs them"
    return "compute"


def _spans_hosts(part: str, job: Job, device: Device) -> bool:
    """Return whether the ranks of a collective are on several hosts."""
    links = Links.for_job(job, device)
    groups = {
        "tensor-parallel sums": (links.tensor,),
        "sequence gathers": (links.sequence,),
        "expert exchanges": (links.experts,),
        "parameter gathers": (links.shards,),
        "gradient reductions": (links.shards, links.replicas),
    }
    if part in groups:
        return any(group.hosts > 1 for group in groups[part])
    return job.ranks > device.gpus_per_host  # stages are the outermost axis


Remade = Callable[[Job, int, int | None], PlanQuery]
"""Function that plans a job for so many sequences of a micro-batch, and of another length, if given; raises ValueError where
it cannot be run."""


def ways_out(candidate: Candidate, question: Question, remade: Remade) -> list[str]:
    """Return single changes that make a job fit that does not, the smallest of each kind; then changes that lower its need.

    Args:
        candidate: the configuration that needs least as it is.
        question: the question that `fit` answers.
    """
    layout, limit = candidate.layout, question.limit

    def needs(job: Job, micro_batch: int = layout.micro_batch, seq_len: int | None = None) -> int:
        query = remade(job.change(ac="full"), micro_batch, seq_len)
        # Where its limit is lower, because it has more outside of the allocator, a job needs so many bytes more.
        return least_need(query, question.limit_of(job)) + limit - question.limit_of(job)

    base, tried = candidate.job.change(ac="full"), []
    can_chunk = remade(base, layout.micro_batch, None).stages[-1].part.can_chunk()
    for change in changes(base):
        if (change.job.loss is not None and base.loss is None and not can_chunk) or (
            change.job.offload != base.offload and layout.pp > 1
        ):
            continue
        words = change.words
        if change.job.fsdp is not None and change.job.fsdp.cpu_offload:
            host = max(stage.state_on_host for stage in remade(change.job, layout.micro_batch, None).stages)
            if host > question.host_memory:
                words = f"{words} with {write_bytes(host)} of CPU memory per rank (--host-memory)"
        tried.append((words, needs(change.job)))
    fitting, lowering = helping(needs(base), limit, tried)
    if "micro_batch" in question.pins:  # else smaller ones were searched already
        rows = layout.micro_batch // 2
        while rows and needs(base, rows) > limit:
            rows //= 2
        fitting += [f"micro-batch {rows} instead of {layout.micro_batch}"] * (rows > 0)
    fitting += _with_more_gpus(base, question, needs)
    with suppress(ValueError):
        eighth = max(2, question.seq_len // 8)
        length = largest(lambda size: needs(base, seq_len=size), 4 * eighth, limit, question.seq_len - 1, eighth)
        fitting += [f"sequence {length:,} instead of {question.seq_len:,}"] * (length > 0)
    return in_words(fitting, lowering)


def _with_more_gpus(job: Job, question: Question, needs: Callable[[Job], int]) -> list[str]:
    """Return how many more GPUs to shard over would help.

    For a pipeline whose stages are too large on any number of them: GPUs for more stages.
    """

    def more(jobs: Iterator[Job]) -> int | None:
        with suppress(ValueError):  # more stages than the model has layers
            for larger in jobs:
                if needs(larger) <= question.limit:
                    return larger.ranks
        return None

    def sharded(job: Job) -> Iterator[Job]:
        shards = job.dp_shard
        while (shards := 2 * shards) * job.ranks // job.dp_shard <= MOST_GPUS:
            yield job.on(dp_shard=shards)

    def staged(job: Job) -> Iterator[Job]:
        pp = job.pp
        while 2 * pp.size <= MOST_STAGES:
            pp = replace(pp, size=2 * pp.size, microbatches=max(pp.microbatches or 1, 2 * pp.size))
            yield job.on(dp_shard=job.dp_shard, pp=pp)

    def words(gpus: int) -> str:
        return f"{gpus - question.gpus} GPUs more ({gpus} in all)"

    gpus = more(sharded(job))
    ways = [] if gpus is None else [words(gpus)]
    fewer = more(sharded(job.change(allocator=AllocatorConfig(expandable_segments=True))))
    if fewer is not None and (gpus is None or fewer < gpus):
        ways.append(f"{words(fewer)} with {_GROWING}")
    if gpus is None and job.pp.size > 1 and (gpus := more(staged(job))) is not None:
        ways.append(f"{words(gpus)} in {gpus // job.ranks} times as many stages")
    return ways
