"""Changes that would help a job that does not fit: one list, each predicted by the caller, reported in one form."""

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from nemo_like._util.device_work import is_out_of_memory
from nemo_like._util.words import write_bytes
from nemo_like.flags import changed_flags
from nemo_like.job import Job
from nemo_like.options import FSDP2, CheckpointConfig, MemoryBudget, NamedLists
from nemo_like.options.optimizers import OPTIMIZERS
from nemo_like.options.parallel import lighter, moves_state
from nemo_like.planning.devices import Device, device_of
from nemo_like.torch_compat import without_dispatch_modes

Each = TypeVar("Each")


@dataclass(frozen=True)
class Change:
    """One change of a job."""

    words: str  # The change in the keywords of `nemo_like.parallelize`, or in variables of the environment.
    job: Job


def changes(job: Job) -> Iterator[Change]:
    """Yield single changes of `job` that may lower the bytes that a rank needs, and change no result."""
    fsdp, step = job.fsdp, job.step
    modes = ("full", "submodule", "sequential")
    if isinstance(job.ac, NamedLists) or (isinstance(job.ac, CheckpointConfig) and job.ac.mode not in modes):
        yield _change(job, job.change(ac="full"))
    if job.loss is None:
        yield _change(job, job.change(loss="chunked"))
    if job.offload.mode == "none":
        yield _change(job, job.change(offload="boundary"))
    if step.keeps_output and job.loss is None and job.pp.size == 1:
        dropped = replace(step, keeps_output=False)
        yield Change("loss = model(**batch).loss, which drops the output", job.change(step=dropped))
    if (smaller := OPTIMIZERS[step.optimizer].lighter) is not None:
        yield Change(f"optimizer={smaller!r}", job.change(step=replace(step, optimizer=smaller)))
    if fsdp is not None:
        device = device_of(job)
        for options in lighter(fsdp, device.kind):
            moves = moves_state(options, device.kind) > moves_state(fsdp, device.kind)
            if not moves or (device.host_bandwidth and job.pp.size == 1):
                yield _change(job, job.change(strategy=options))
    if not job.allocator.expandable_segments and device_of(job).cuda is not None:
        growing = replace(job.allocator, expandable_segments=True)
        yield Change("PYTORCH_ALLOC_CONF=expandable_segments:True", job.change(allocator=growing))


def flag_changes(job: Job, names: Collection[str]) -> Iterator[tuple[dict[str, Any], Job]]:
    """Yield those `changes` of `job` that are made by the flags `names`: their values, and the changed job."""
    for change in changes(job):
        # Only FSDP2 has all flags, and no change goes from one strategy to another.
        before, after = (
            each if each.fsdp is not None else replace(each, strategy=FSDP2()) for each in (job, change.job)
        )
        values = {name: value for name, value in changed_flags(before, after).items() if name != "strategy"}
        if values and values.keys() <= set(names):
            yield values, change.job


def _change(job: Job, changed: Job) -> Change:
    before = job.words()
    changed_words = {name: text for name, text in changed.words().items() if before.get(name) != text}
    return Change(", ".join(f"{name}={text}" for name, text in changed_words.items()), changed)


def lowering(now: int, tried: Iterable[tuple[Each, int]]) -> list[tuple[Each, int]]:
    """Return changes with the bytes that each saves of `now`, the largest saving first, without those below a hundredth.

    tried: changes, with the bytes that are needed then.
    """
    saved = ((change, now - size) for change, size in tried)
    return sorted((each for each in saved if each[1] >= now / 100), key=lambda each: -each[1])


def saving(words: str, saved: int) -> str:
    """Return a change in words with the bytes that it saves.

    >>> saving("--ac full", 3 << 30)
    '--ac full (3.00GiB less)'
    """
    return f"{words} ({write_bytes(saved)} less)"


def helping(now: int, limit: int, tried: Iterable[tuple[str, int]]) -> tuple[list[str], list[str]]:
    """Return the changes that make a job fit that needs the bytes `now`, and the changes that are not enough alone.

    Each is given with the bytes that it saves; `tried` and the changes left out: as in `lowering`.

    Args:
        limit: bytes that fit.
    """
    described = [(saving(words, saved), now - saved <= limit) for words, saved in lowering(now, tried)]
    return [words for words, fits in described if fits], [words for words, fits in described if not fits]


def in_words(fitting: Iterable[str], lowering: Iterable[str]) -> list[str]:
    """Return both lists of `helping` as one, whose last entry names all changes that are not enough."""
    words = ", ".join(lowering)
    return [*fitting, *([f"not enough alone: {words}"] if words else [])]


_ADVISED = "nemo_like_advised"  # Attribute of an error that has advice from a context within.


@contextmanager
def where_memory_runs_out(
    ways: Callable[[], list[str]], otherwise: str, told: Callable[[RuntimeError, list[str]], RuntimeError]
) -> Iterator[None]:
    """Raise the error that `told` makes, where memory runs out inside, of that error and of the lines of `ways`.

    otherwise: in the place of `ways` where no plan can be made, with the reason for ``{}``.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error) or getattr(error, _ADVISED, False):
            raise
        try:
            with without_dispatch_modes():  # a caller's mode counts the step, not its plan
                lines = ways()
        except (ValueError, TypeError, RuntimeError) as problem:
            lines = [otherwise.format(problem)]
        new = told(error, lines)
        setattr(new, _ADVISED, True)
        if new is error:
            raise
        raise new from error


def smaller_budget(budget: object, device: Device) -> str | None:
    """Return the budget to try next on `device`, where `budget` was too much; None: it is none."""
    if not isinstance(budget, MemoryBudget):
        return None
    if budget.fraction is not None:
        return f"{budget.fraction * 100 / 2:g}%"
    return write_bytes(int(0.9 * (budget.peak_bytes or device.memory_bytes * (budget.device_share or 1.0))))
