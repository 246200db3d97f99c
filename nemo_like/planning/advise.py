"""Changes that would help a job that does not fit: one list, each predicted by the caller, reported in one form."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from nemo_like._util.words import write_bytes
from nemo_like.job import Job
from nemo_like.options import CheckpointConfig
from nemo_like.options.optimizers import OPTIMIZER_OBJECTS
from nemo_like.planning.devices import device_of


@dataclass(frozen=True)
class Change:
    """One change of a job."""

    words: str
    """The change in the keywords of `nemo_like.parallelize`, or in variables of the environment."""
    job: Job
    """The changed job."""


def changes(job: Job) -> Iterator[Change]:
    """Yield single changes of `job` that may lower what a rank needs, and change no result."""
    fsdp, step = job.fsdp, job.step
    if isinstance(job.ac, CheckpointConfig) and job.ac.mode not in ("full", "submodule", "sequential"):
        yield _change(job, job.change(ac="full"))
    if job.loss is None:
        yield _change(job, job.change(loss="chunked"))
    if job.offload.mode == "none":
        yield _change(job, job.change(offload="boundary"))
    if step.keeps_output and job.loss is None and job.pp.size == 1:
        dropped = replace(step, keeps_output=False)
        yield Change("loss = model(**batch).loss, which drops the output", job.change(step=dropped))
    if (lighter := OPTIMIZER_OBJECTS[step.optimizer].lighter) is not None:
        yield Change(f"optimizer={lighter!r}", job.change(step=replace(step, optimizer=lighter)))
    if fsdp is not None:
        if fsdp.reshard_after_forward is False:
            yield _change(job, job.change(strategy=replace(fsdp, reshard_after_forward=None)))
        if max(fsdp.forward_prefetch, fsdp.backward_prefetch) > 1:
            yield _change(job, job.change(strategy=replace(fsdp, forward_prefetch=1, backward_prefetch=1)))
        if not fsdp.cpu_offload and device_of(job).kind != "cpu" and device_of(job).host_bandwidth and job.pp.size == 1:
            yield _change(job, job.change(strategy=replace(fsdp, cpu_offload=True)))
    if not job.allocator.expandable_segments and device_of(job).cuda is not None:
        growing = replace(job.allocator, expandable_segments=True)
        yield Change("PYTORCH_ALLOC_CONF=expandable_segments:True", job.change(allocator=growing))


def _change(job: Job, changed: Job) -> Change:
    before = job.words()
    changed_words = {name: text for name, text in changed.words().items() if before.get(name) != text}
    return Change(", ".join(f"{name}={text}" for name, text in changed_words.items()), changed)


def helping(now: int, limit: int, tried: Iterable[tuple[str, int]]) -> tuple[list[str], list[str]]:
    """Return the changes that make a job fit that needs the bytes `now`, and the changes that are not enough alone.

    Each is given with the bytes that it saves. Changes that save less than a hundredth are left out.

    Args:
        limit: bytes that fit.
        tried: changes in words, with the bytes that are needed then.
    """
    lower = sorted(((words, size) for words, size in tried if now - size >= now / 100), key=lambda change: change[1])
    described = [(f"{words} ({write_bytes(now - size)} less)", size <= limit) for words, size in lower]
    return [words for words, fits in described if fits], [words for words, fits in described if not fits]


def in_words(fitting: Iterable[str], lowering: Iterable[str]) -> list[str]:
    """Return both lists of `helping` as one, whose last entry names all changes that are not enough."""
    words = ", ".join(lowering)
    return [*fitting, *([f"not enough alone: {words}"] if words else [])]
