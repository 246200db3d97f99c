"""`fit`: from a model and a number of GPUs to a report of the best configurations."""

from __future__ import annotations

import gc
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Unpack

from torch import nn

from nemo_like._util.log import say_once
from nemo_like._util.module_tree import check_model
from nemo_like._util.progress import Say, silent
from nemo_like.distributed.expert import find_experts
from nemo_like.distributed.tensor.apply import cuts_sequences
from nemo_like.distributed.tensor.plan import resolve_plan
from nemo_like.job import Job
from nemo_like.layers import find_layers
from nemo_like.models import check_positions, resolve_model, text_batch
from nemo_like.options import Precision
from nemo_like.planning.devices import device_of, step_limit
from nemo_like.planning.fit.advice import ways_out
from nemo_like.planning.fit.candidate import Candidate
from nemo_like.planning.fit.layouts import Configuration, Room, configuration, layouts
from nemo_like.planning.fit.question import FitKeywords, Question, read_question
from nemo_like.planning.fit.report import FitReport
from nemo_like.planning.fit.search import Search, quietly
from nemo_like.planning.fit.shapes import Shape, ShapeKey
from nemo_like.planning.model.traced import Known
from nemo_like.planning.query import Traced
from nemo_like.planning.sharding import same_on_all_ranks


class Traces:
    """Traces of one model for one precision; they do not depend on the optimizer.

    Args:
        model: the model to trace.
        sample: makes the input of one micro-batch of so many sequences.
        layers: the layers of the job.
    """

    def __init__(self, model: nn.Module, sample: Callable[[int], Any], layers: Any = None) -> None:
        self.model, self.sample, self.layers, self._known = model, sample, layers, Known()
        self._traced: dict[int, Traced] = {}

    def of(self, micro_batch: int) -> Traced:
        """Return the trace with so many sequences."""
        if micro_batch not in self._traced:
            sample = self.sample(micro_batch)
            self._traced[micro_batch] = Traced(self.model, sample, self.layers, known=self._known)
        return self._traced[micro_batch]


def fit(
    model: nn.Module | str,
    job: Job | None = None,
    *,
    gpus: int,
    seq_len: int = 4096,
    global_batch: int | None = None,
    memory: int | str | None = None,
    dtype: Any = None,
    sample: Callable[[int], Any] | None = None,
    count: int = 10,
    minutes: float | None = None,
    progress: Say = silent,
    **pins: Unpack[FitKeywords],
) -> FitReport:
    """Find the fastest configurations of a training step that fit on `gpus` devices. Runs no kernel, needs no GPU.

    Args:
        model: bare, on any device, `meta` included; or what ``nemo-like fit --model`` takes (a preset, a ``config.json``).
        job: decides the fields that `Job.of` was given. The others are searched for.
        gpus: how many devices.
        seq_len: tokens per sequence; of the longest, where they differ.
        global_batch: sequences of one optimizer step over all devices. None: as many as are fastest, without accumulation.
        memory: bytes of each device that a step may take (``"70GiB"``); default: its memory less a tenth. What counts:
            `nemo_like.planning.answers.verdict`.
        dtype: dtype of the parameters where `model` is a name. Default: float32.
        sample: makes the input of one micro-batch of so many sequences. Default: token ids, and the same as labels.
        count: how many configurations to report.
        minutes: end the search after so many, with the best so far; None: when the fastest is known.
        progress: called with words on how far the search is.
        pins: keywords of `Job.of` (``gpu``, ``precision``, ``optimizer``, ``step``, ``allocator``, ...), and values of what
            is decided already: ``dp_replicate, dp_shard, tp, cp, ep, pp, schedule, micro_batch, grad_accum, ac`` (``none``,
            ``full``, ``selective``, ``plan``), ``loss``, ``offload`` (``none``, ``boundary``), ``reshard_after_forward``
            (``[None]``: FSDP2's default), ``cpu_offload``. Each is one value, or a list of allowed ones, also for
            ``precision`` and ``optimizer``. By default, ``precision`` is ``"bf16"`` on CUDA, and ``pp`` is 1 on one host.

    Where a process group is up, rank 0 searches and the others receive its report.

    Raises:
        ValueError: no combination can be run on so many GPUs; an unknown device or pin; pins that contradict each other; a
            model without repeated layers.
        TypeError: a value of the wrong kind.
    """
    if not isinstance(model, str):
        check_model(model)
    if minutes is not None and not (isinstance(minutes, int | float) and minutes > 0):
        raise ValueError(f"minutes is {minutes!r}; it must be a number above 0, or None.")
    until = math.inf if minutes is None else time.monotonic() + 60 * minutes
    jobs, pinned, asked = read_question(job, pins)
    questions = [
        Question(
            each,
            gpus=gpus,
            seq_len=seq_len,
            global_batch=global_batch,
            limit=step_limit(device_of(each), memory),
            is_default_limit=memory is None,
            pins=pinned,
            asked=asked,
        )
        for each in jobs
    ]

    def search() -> FitReport:
        with frozen_garbage():
            answers = _searched(model, questions, dtype, sample, count, progress, until)
            report = _best_of(answers, count)
        if not report.candidates and report.nearest is None:
            raise ValueError(report.problem)
        return report

    return same_on_all_ranks(search)


@contextmanager
def frozen_garbage() -> Iterator[None]:
    """Keep the garbage collector from the objects that exist already.

    Tracing makes many objects, and each full collection would go through all of torch's and transformers' modules. That
    takes a sixth of a search's time.
    """
    if gc.get_freeze_count():  # frozen by other code, which would not want them thawed
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _best_of(reports: Sequence[FitReport], count: int) -> FitReport:
    """Return the reports of several precisions and optimizers as one."""
    if len(reports) == 1:
        return reports[0]
    every = sorted((c for report in reports for c in report.candidates), key=lambda c: -c.tokens_per_second_per_gpu)
    near = [(report.nearest.need.bytes, n) for n, report in enumerate(reports) if report.nearest is not None]
    nearest = reports[min(near)[1]] if near and not every else None
    counts = sum((Counter(report.rejected) for report in reports), Counter[str]())
    counts["slower than those of another precision or optimizer"] += max(0, len(every) - count)
    return replace(
        reports[0],
        candidates=tuple(every[:count]),
        rejected=dict(+counts),
        nearest=None if nearest is None else nearest.nearest,
        helps=() if nearest is None else nearest.helps,
        searched={name: sum(report.searched[name] for report in reports) for name in reports[0].searched},
        compiled=any(report.compiled for report in reports),
        interrupted=any(report.interrupted for report in reports),
    )


def _searched(
    model: nn.Module | str,
    questions: Sequence[Question],
    dtype: Any,
    sample: Callable[[int], Any] | None,
    count: int,
    say: Say,
    until: float,
) -> list[FitReport]:
    """Return a report for each of the questions on one model; questions of one precision trace it once."""
    name = model if isinstance(model, str) else type(model).__name__
    built = model
    if isinstance(model, str):
        built, source = resolve_model(model).built("meta", dtype)
        sample = source.sample_of if sample is None and source.sample is not None else sample
    assert isinstance(built, nn.Module)
    traces: dict[Precision, Traces] = {}
    return [_answer(name, built, each, sample, count, traces, say, until) for each in questions]


def _answer(
    name: str,
    model: nn.Module,
    question: Question,
    sample: Callable[[int], Any] | None,
    count: int,
    traces: dict[Precision, Traces],
    say: Say,
    until: float,
) -> FitReport:
    """Return the report of one question."""
    start = time.perf_counter()
    search, rejected, spread = make_search(model, question, sample, traces, say, until, name)
    result = search.run(count)
    helps = [] if result.best or result.nearest is None else _helps(search, result.nearest, model, question, sample)
    return FitReport(
        question,
        name,
        sum(p.numel() for p in model.parameters()),
        tuple(result.best),
        dict(rejected + result.rejected),
        None if result.best else result.nearest,
        tuple(helps),
        searched={
            "layouts": spread,
            "shapes": result.traced,
            "looked_at": result.looked_at,
            "seconds": round(time.perf_counter() - start, 2),
        },
        compiled=question.job.compile is not None,
        interrupted=result.interrupted,
    )


def _helps(
    search: Search, nearest: Candidate, model: nn.Module, question: Question, sample: Callable[[int], Any] | None
) -> list[str]:
    shape = search.shapes[ShapeKey.of(nearest.conf)]
    assert not isinstance(shape, str), "what needs least was traced"

    def remade(key: ShapeKey, changed: Question) -> Shape:
        if sample is not None and changed.seq_len != question.seq_len:
            raise ValueError("the sample's length is the caller's")
        make = sample or _tokens(model, changed.seq_len)
        return Shape(key, changed, Traces(model, make, changed.job.layers).of(key.micro_batch))

    with quietly():
        return ways_out(shape, nearest, question, remade)


def make_search(
    model: nn.Module,
    question: Question,
    sample: Callable[[int], Any] | None = None,
    traces: dict[Precision, Traces] | None = None,
    say: Say = silent,
    until: float = math.inf,
    name: str = "",
) -> tuple[Search, Counter[str], int]:
    """Return the search, combinations that are out before it begins, and how many layouts there are."""
    make = sample or _tokens(model, question.seq_len, name)
    known = {} if traces is None else traces
    own_traces = known.setdefault(question.job.precision, Traces(model, make, question.job.layers))
    spread, rejected = layouts(_room(model, question))
    configurations: list[Configuration] = []
    asked = question.asked
    for layout in spread:
        try:
            configurations.append(configuration(question.job, layout, None if asked is None else asked.pp))
        except ValueError as error:  # of `nemo_like.job.RULES`
            rejected[str(error)] += 1

    return (
        Search(question, configurations, lambda key: Shape(key, question, own_traces.of(key.micro_batch)), say, until),
        rejected,
        len(spread),
    )


def _counts_of_experts(model: nn.Module) -> list[int]:
    """Return how many experts each layer has that a plan can split; lists of modules are none."""
    try:
        return [each.count for each in find_experts(model, None)]
    except ValueError as error:
        say_once(f"Layouts with ep are left out: {error}")
        return []


def _room(model: nn.Module, question: Question) -> Room:
    layers = find_layers(model)
    experts = _counts_of_experts(model)
    if (imbalance := question.job.ep.imbalance) is not None and not experts:
        raise ValueError(
            f"imbalance is {imbalance!r}, and {type(model).__name__} has no experts that ep could split. Leave it out."
        )
    host = question.device.gpus_per_host
    apart = [each.fqn for each in find_experts(model)] if experts else []
    sizes = [n for n in range(1, min(question.gpus, host) + 1) if host % n == 0 and question.gpus % n == 0]
    return Room(
        gpus=question.gpus,
        seq_len=question.seq_len,
        global_batch=question.global_batch,
        layers=len(layers),
        gpus_per_host=host,
        experts=min(experts, default=0),
        tensor_sizes=tuple(size for size in sizes if _splits(model, size)),
        beside_experts=tuple(size for size in sizes if experts and _splits(model, size, apart)),
        sequence_parallel=next(
            (cuts_sequences(model, size) for size in sizes if size > 1 and _splits(model, size)), False
        ),
        heads=_heads(model),
        stages=question.gpus > host,
        pins=question.pins,
    )


def _splits(model: nn.Module, size: int, whole: Collection[str] = ()) -> bool:
    """Return whether `tp` ranks can split the model's weights by its own plan; `whole`: as for `resolve_plan`."""
    try:
        return size == 1 or bool(resolve_plan(model, None, size, whole))
    except ValueError:
        return False


def _heads(model: nn.Module) -> int:
    """Return the heads of keys and values; 0: not known."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    return getattr(config, "num_key_value_heads", 0) or getattr(config, "num_attention_heads", 0) or 0


def _tokens(model: nn.Module, seq_len: int, name: str = "") -> Callable[[int], Any]:
    config: Any = getattr(model, "config", None)
    if config is None:
        raise ValueError(
            f"{type(model).__name__} has no config, so its input is unknown. Give sample=, a function of the number of "
            "sequences that returns what the model is called with; on the command line, have module:function return "
            "(model, sample)."
        )
    check_positions(config, "The search", seq_len, name or type(model).__name__)

    return lambda batch: text_batch(batch, seq_len)
