"""The limit that binds a configuration, and the cheapest changes that would help."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

from nemo_like._util.words import write_bytes
from nemo_like.activation_checkpointing.plan import largest_group
from nemo_like.job import Job
from nemo_like.options.memory import AllocatorConfig
from nemo_like.planning.advise import changes, helping, in_words
from nemo_like.planning.answers.seconds import HOST, Links
from nemo_like.planning.devices import Device
from nemo_like.planning.fit.candidate import Candidate
from nemo_like.planning.fit.layouts import MOST_STAGES, Configuration
from nemo_like.planning.fit.question import Question
from nemo_like.planning.fit.shapes import Shape, ShapeKey

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
    links = Links.of(job, device)
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


def ways_out(
    shape: Shape,
    candidate: Candidate,
    question: Question,
    remade: Callable[[ShapeKey, Question], Shape],
) -> list[str]:
    """Return single changes that make a job fit that does not, the smallest of each kind; then changes that lower its need.

    Args:
        shape, candidate: the configuration that needs least as it is.
        question: the question that `fit` answers.
        remade: makes another shape, or the same one for another question; raises ValueError where there is none.
    """
    limit, conf = question.limit, candidate.conf.change(ac="full")
    key, growing = shape.key, AllocatorConfig(expandable_segments=True)
    tried = []
    for change in changes(conf.job):
        job, changed = change.job, Configuration(change.job, conf.micro_batch)
        if (job.loss != conf.job.loss and not shape.can_chunk) or (job.offload != conf.job.offload and key.staged):
            continue
        words, host = change.words, shape.host_bytes(changed) if changed.cpu_offload else 0
        if host > question.host_memory:
            words = f"{words} with {write_bytes(host)} of host memory per rank (--host-memory)"
        tried.append((words, _needs(shape, changed)))
    fitting, lowering = helping(_needs(shape, conf), limit, tried)
    rows = _fewer_rows(question, conf, lambda rows: remade(replace(key, micro_batch=rows), question))
    if rows is not None:
        fitting.append(f"micro-batch {rows} instead of {conf.micro_batch}")
    sharded = Shape(replace(key, whole=False), question, shape.traced) if key.whole else shape
    fitting += _with_more_gpus(sharded, conf, question, growing)
    length = _shorter(question, conf, lambda length: remade(key, replace(question, seq_len=length)))
    if length is not None:
        fitting.append(f"sequence {length:,} instead of {question.seq_len:,}")
    return in_words(fitting, lowering)


def _needs(shape: Shape, conf: Configuration) -> int:
    """Return the bytes of the question's limit that `conf` needs under ``ac="full"``.

    Where the limit of `conf` is lower, because it has more outside of the allocator, it needs so many bytes more.
    """
    choices, question = shape.choices(conf), shape.question
    need = shape.need(conf, choices, shape.peak(conf, choices)).bytes
    return need + question.limit - question.limit_of(conf.job)


def _fits(shape: Shape, conf: Configuration, limit: int) -> bool:
    """Return whether `conf` fits in `limit` bytes under ``ac="full"``.

    Reserved bytes are computed only where tensors alone would fit.
    """
    tensors = shape.peak(conf, shape.choices(conf)).total
    return tensors <= limit and _needs(shape, conf) <= limit


def _fewer_rows(question: Question, conf: Configuration, of_rows: Callable[[int], Shape]) -> int | None:
    """Return the most of half, a quarter ... of a micro-batch's sequences with which it fits; None: none does.

    None, too, where smaller micro-batches were searched already.
    """
    if "micro_batch" not in question.pins:
        return None
    rows = conf.micro_batch // 2
    while rows and (conf.micro_batch % rows == 0):
        fewer = conf.sized(micro_batch=rows, grad_accum=conf.grad_accum * (conf.micro_batch // rows))
        if _needs(of_rows(rows), fewer) <= question.limit:
            return rows
        rows //= 2
    return None


def _with_more_gpus(shape: Shape, conf: Configuration, question: Question, growing: AllocatorConfig) -> list[str]:
    """Return how many more GPUs to shard over would help.

    For a pipeline whose stages are too large on any number of them: GPUs for more stages.
    """
    limit = question.limit
    ways = []
    gpus = _more_gpus(shape, limit, _sharded_over_more(conf))
    if gpus is not None:
        ways.append(f"{gpus - question.gpus} GPUs more ({gpus} in all)")
    fewer = _more_gpus(shape, limit, _sharded_over_more(conf.change(allocator=growing)))
    if fewer is not None and (gpus is None or fewer < gpus):
        ways.append(f"{fewer - question.gpus} GPUs more ({fewer} in all) with {_GROWING}")
    if gpus is None and shape.key.staged:
        gpus = _more_gpus(shape, limit, _in_more_stages(conf))
        if gpus is not None:
            ways.append(f"{gpus - question.gpus} GPUs more ({gpus} in all) in {gpus // conf.gpus} times as many stages")
    return ways


def _sharded_over_more(conf: Configuration) -> Iterator[Configuration]:
    """Yield `conf` sharded over twice, four times ... the ranks."""
    for power in range(1, MOST_GPUS.bit_length()):
        yield conf.sized(dp_shard=conf.dp_shard << power)


def _in_more_stages(conf: Configuration) -> Iterator[Configuration]:
    """Yield the pipeline in twice, four times ... the stages, with more micro-batches where each rank needs one."""
    for power in range(1, MOST_STAGES.bit_length()):
        stages = conf.pp << power
        yield conf.sized(pp=stages, grad_accum=max(conf.grad_accum, stages))


def _more_gpus(shape: Shape, limit: int, larger: Iterator[Configuration]) -> int | None:
    """Return the GPUs of the first configuration that fits; None: none does, up to `MOST_GPUS`."""
    for conf in itertools.takewhile(lambda conf: conf.gpus <= MOST_GPUS, larger):
        try:
            if _fits(shape, conf, limit):
                return conf.gpus
        except ValueError:
            return None  # more stages than the model has layers
    return None


def _shorter(question: Question, conf: Configuration, at_length: Callable[[int], Shape]) -> int | None:
    """Return the longest of seven, six ... eighths of the sequence that fits; None: not even one eighth does."""
    low, high, limit = 0, 8, question.limit
    while high - low > 1:
        eighths = (low + high) // 2
        length = question.seq_len * eighths // 8
        try:
            fits = (size := _needs(at_length(length), conf)) <= limit
        except ValueError:
            return None
        low, high = (eighths, high) if fits else (low, eighths)
        if not fits and eighths == 4 and size > 2 * limit:
            return None  # what does not depend on the sequence is too much already
    return question.seq_len * low // 8 if low else None
