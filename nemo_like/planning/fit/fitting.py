"""`fit`: from a model and a number of GPUs to a report of the best configurations."""

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any, Unpack

from torch import nn

from nemo_like._util.log import quiet, say_once
from nemo_like._util.module_tree import check_model
from nemo_like._util.progress import Say, silent
from nemo_like.distributed.expert.split_experts import Experts, find_experts
from nemo_like.distributed.tensor.apply import cuts_sequences
from nemo_like.distributed.tensor.plan import resolve_plan
from nemo_like.fake.model_copy import numbers_of
from nemo_like.flags import CONFIGURATIONS, SEQ_LEN, check_keywords
from nemo_like.job import KEYWORDS, FixedKeywords, Job, Strategy
from nemo_like.layers import find_layers
from nemo_like.models import check_positions, class_taken, resolve_model, text_batch
from nemo_like.options import (
    CheckpointConfig,
    ChunkedLoss,
    ContextParallel,
    ExpertParallel,
    OffloadConfig,
    PipelineParallel,
    TensorParallel,
)
from nemo_like.planning.account import dtype_of
from nemo_like.planning.accuracy import kind_of
from nemo_like.planning.devices import device_of, step_limit
from nemo_like.planning.fit.formula import Formula
from nemo_like.planning.fit.layouts import Layout, Room, job_of, layouts
from nemo_like.planning.fit.question import BESIDE, PINS, Question, read_question
from nemo_like.planning.fit.report import FitReport, ways_out
from nemo_like.planning.fit.search import Ranking, Search
from nemo_like.planning.model.traced import TraceCache, with_adapters
from nemo_like.planning.query import PlanQuery, Traced
from nemo_like.planning.sharding import same_on_all_ranks
from nemo_like.transformers_compat import text_config

Number = int | Sequence[int] | None
Word = str | Sequence[str] | None
Switch = bool | Sequence[bool] | None


class FitKeywords(FixedKeywords, total=False):
    """Keywords of `fit`: pins (one value or several), and the fields of a `Job` that it does not choose."""

    dp_replicate: Number
    dp_shard: Number
    tp: Number | TensorParallel
    cp: Number | ContextParallel
    ep: Number | ExpertParallel
    pp: Number | PipelineParallel
    stages_per_rank: Number
    micro_batch: Number
    grad_accum: Number
    ac: Word | CheckpointConfig
    loss: Word | ChunkedLoss
    offload: Word | OffloadConfig
    schedule: Word
    cp_method: Word
    sync: Word
    sequence_parallel: Switch
    loss_parallel: Switch
    reshard_after_forward: Switch
    cpu_offload: Switch
    precision: Any
    optimizer: Word
    imbalance: float | None
    balance: str | Sequence[int]
    host_memory: int | str | None
    strategy: Strategy
    compile: Any


def fit(
    model: nn.Module | str,
    job: Job | None = None,
    *,
    gpus: int,
    seq_len: int = SEQ_LEN,
    global_batch: int | None = None,
    memory: int | str | None = None,
    dtype: Any = None,
    lora: int | None = None,
    four_bit: bool = False,
    sample: Callable[[int], Any] | None = None,
    count: int = CONFIGURATIONS,
    minutes: float | None = None,
    progress: Say = silent,
    **pins: Unpack[FitKeywords],
) -> FitReport:
    """Find the fastest configurations of a training step that fit on `gpus` devices. Runs no kernel, needs no GPU.

    Args:
        model: bare, on any device, `meta` included; or a value of ``fit --model`` (a preset, a ``config.json``).
        job: decides the fields that `Job.of` was given. The others are searched for.
        gpus: how many devices.
        seq_len: tokens per sequence; of the longest, where they differ.
        global_batch: sequences of one optimizer step over all devices. None: as many as are fastest, without accumulation.
        memory: bytes of each device that a step may take (``"70GiB"``); default: all but 5 % and the memory
            outside of torch's allocator. How they are counted: `nemo_like.planning.predictions.reserved`.
        dtype: dtype of the parameters where `model` is a name. Default: float32.
        lora: where `model` is a name, adapters of this rank train, and all else is frozen, in the dtype to compute in
            (peft). None: all trains.
        four_bit: with `lora`, frozen linears have 4 bits, as in QLoRA (bitsandbytes).
        sample: makes the input of one micro-batch of so many sequences. Default: token ids, and the same as labels.
        count: how many configurations to report.
        minutes: end the search after so many, with the best so far; None: when the fastest is known.
        progress: called with words on how far the search is.
        pins: keywords of `Job.of` (``gpu``, ``precision``, ``optimizer``, ``step``, ``allocator``, ...), and fixed
            values of ``dp_replicate, dp_shard, tp, cp, ep, pp, schedule, micro_batch, grad_accum, ac`` (``none``,
            ``full``, ``selective``, ``plan``), ``loss``, ``offload`` (``none``, ``boundary``), ``reshard_after_forward``
            (``[None]``: FSDP2's default), ``cpu_offload``. Each is one value, or a list of allowed ones, also for
            ``precision`` and ``optimizer``. By default, ``precision`` is ``"bf16"`` on CUDA, and ``pp`` is 1 on one node.

    Of a job's fields, these are searched where they are not pinned: ``ac``, ``loss``, ``offload``, ``dp_replicate``, ``pp``;
    these in part, and the rest as given: ``tp``, ``cp``, ``ep`` (size, method, ``sequence_parallel``),
    ``strategy`` (``reshard_after_forward``, ``cpu_offload``), ``step`` (``microbatches``, ``sync``); these follow from
    `gpus` and `seq_len`: ``world_size``, ``planned_tokens``; these are as given: ``ac_scope``, ``layers``, ``precision``,
    ``compile``, ``device``, ``gpu``, ``attention``, ``allocator``, ``search``.

    Where a process group is up, rank 0 searches and the others receive its report.

    Raises:
        ValueError: no combination can be run on so many GPUs; an unknown device or pin; pins that contradict each other; a
            model without repeated layers; ``lora`` below 1, of a model that is there, or with several precisions.
        TypeError: a value of the wrong kind. MissingExtraError: ``lora``, and peft is not installed.
    """
    if not isinstance(model, str):
        check_model(model)
        if lora is not None:
            raise ValueError(
                f"lora is {lora}, and model is a {type(model).__name__}, not a name. Put adapters into it before (peft)."
            )
    if four_bit and lora is None:
        raise ValueError("four_bit is True, and without lora all weights train, in 16 or 32 bits. Give lora too.")
    if minutes is not None and not (isinstance(minutes, int | float) and minutes > 0):
        raise ValueError(f"minutes is {minutes!r}; it must be a number above 0, or None.")
    until = math.inf if minutes is None else time.monotonic() + 60 * minutes
    check_keywords(fit, pins, [*PINS, *KEYWORDS, *BESIDE])
    jobs, pinned, asked = read_question(job, pins)
    if lora is not None and len({each.param_dtype for each in jobs}) > 1:
        raise ValueError(
            f"lora is {lora}, and precision is one of several, in which frozen weights are stored. Give one."
        )
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
        report = _searched(model, questions, dtype, lora, four_bit, sample, count, progress, until)
        if not report.candidates and report.nearest is None:
            raise ValueError(report.problem)
        return report

    return same_on_all_ranks(search)


def _searched(
    model: nn.Module | str,
    questions: Sequence[Question],
    dtype: Any,
    lora: int | None,
    four_bit: bool,
    sample: Callable[[int], Any] | None,
    count: int,
    say: Say,
    until: float,
) -> FitReport:
    """Return the report of all questions, which differ in precision, optimizer and compiler."""
    start = time.perf_counter()
    name = model if isinstance(model, str) else type(model).__name__
    built = model
    if isinstance(model, str):
        built, source = resolve_model(model).built("meta", dtype)
        sample = source.sample_of if sample is None and source.sample is not None else sample
        if lora is not None:
            built = with_adapters(built.train(), lora, questions[0].job.param_dtype, four_bit=four_bit)
    assert isinstance(built, nn.Module)
    search = make_search(built, questions, sample, say, until, name)
    found = search.run(count)
    nearest, question, helps = found.nearest, questions[0], list[str]()
    if nearest is not None and search.least is not None:
        question = search.least.entry.ranking.question
        with quiet("nemo_like", logging.ERROR):
            helps = ways_out(nearest, question, _remade(built, search, sample))
    return FitReport(
        question,
        name,
        sum(map(numbers_of, built.parameters())),
        tuple(found.best),
        dict(found.rejected),
        nearest,
        tuple(helps),
        searched={
            "layouts": sum(len(ranking.layouts) for ranking in search.rankings),
            "looked_at": search.looked_at,
            "seconds": round(time.perf_counter() - start, 2),
        },
        off=found.off,
        lora=lora,
        four_bit=four_bit,
        class_taken=class_taken(built),
        kind=kind_of(built, found.best[0].job if found.best else question.job, question.seq_len),
        interrupted=found.interrupted,
        stored=dtype_of(built),
    )


def _remade(
    model: nn.Module, search: Search, sample: Callable[[int], Any] | None
) -> Callable[[Job, int, int | None], PlanQuery]:
    """Return a function that plans another job: for so many sequences of a micro-batch, of another length, if given."""

    def remade(job: Job, micro_batch: int, seq_len: int | None = None) -> PlanQuery:
        assert search.least is not None
        question = search.least.entry.ranking.question
        if seq_len is None:
            return search.trace(question, micro_batch).query(job)
        if sample is not None:
            raise ValueError("the sample's length is the caller's")
        return Traced(model, _tokens(model, seq_len)(micro_batch), job.layers).query(job)

    return remade


def make_search(
    model: nn.Module,
    questions: Sequence[Question],
    sample: Callable[[int], Any] | None = None,
    say: Say = silent,
    until: float = math.inf,
    name: str = "",
) -> Search:
    """Return the search for questions about one model; those of one precision trace it once."""
    make = sample or _tokens(model, questions[0].seq_len, name)
    caches: dict[Any, TraceCache] = {}
    traced: dict[Any, Traced] = {}

    def trace(question: Question, micro_batch: int) -> Traced:
        key = question.job.precision, micro_batch
        if key not in traced:
            cache = caches.setdefault(question.job.precision, TraceCache())
            traced[key] = Traced(model, make(micro_batch), question.job.layers, cache=cache)
        return traced[key]

    every, rejected = layouts(_room(model, questions[0]))
    rankings, formulas = [], dict[Any, Formula]()
    split, whole = ([layout for layout in every if (layout.ep > 1) == is_split] for is_split in (True, False))
    with quiet("nemo_like", logging.ERROR):
        for question in questions:
            for group in filter(None, (whole, split)):  # experts that are split run other operators
                key = question.job.precision, group is split
                formula = _formula(question, group, trace, rejected, formulas.get(key))
                if formula is not None:
                    formulas[key] = formula
                    rankings.append(Ranking(question, formula, group))
    return Search(rankings, trace, say, until, rejected=rejected)


_BATCH = 8  # Most sequences of the micro-batch that the formula's trace is of.


def _formula(
    question: Question,
    every: Sequence[Layout],
    trace: Callable[[Question, int], Traced],
    rejected: Counter[str],
    known: Formula | None,
) -> Formula | None:
    """Return the formula by a trace of the smallest axes; None: the model cannot be run so, which is counted.

    known: the formula of another optimizer or compiler.
    """
    tp, cp = (min(getattr(layout, name) for layout in every) for name in ("tp", "cp"))
    # Costs that depend on tokens alone show in a larger micro-batch, which takes no longer to trace.
    sizes = {layout.micro_batch for layout in every}
    batch = max((size for size in sizes if size <= _BATCH), default=min(sizes))
    split, cut = (
        next(each for each in every if getattr(each, name) == size) for name, size in (("tp", tp), ("cp", cp))
    )
    alike = sorted(
        {layout.ep for layout in every if (layout.tp, layout.cp) == (tp, cp)} or {layout.ep for layout in every}
    )
    ep = max((size for size in alike if size <= question.device.gpus_per_node), default=alike[0])
    ranks = question.gpus // (tp * cp * min(layout.pp for layout in every))
    ranks = max(ranks, ep) if question.gpus > 1 else 1
    base = Layout(
        dp_shard=ranks,
        tp=tp,
        cp=cp,
        ep=ep,
        micro_batch=batch,
        sequence_parallel=split.sequence_parallel,
        loss_parallel=split.loss_parallel,
        cp_method=cut.cp_method,
    )
    try:
        job = job_of(question.job, base, question.limit_of, question.asked)
        if known is not None:
            return known.under(job)
        return Formula(trace(question, batch).query(job), base, question.between)
    except ValueError as error:
        rejected[str(error).splitlines()[0]] += len(every)
        return None


def _experts(model: nn.Module) -> tuple[Experts, ...]:
    """Return the experts that a plan can split; lists of modules are none."""
    try:
        return find_experts(model)
    except ValueError as error:
        say_once(f"Layouts with ep are left out: {error}")
        return ()


def _room(model: nn.Module, question: Question) -> Room:
    layers = find_layers(model)
    experts = _experts(model)
    if (imbalance := question.job.ep.imbalance) is not None and not experts:
        raise ValueError(
            f"imbalance is {imbalance!r}, and {type(model).__name__} has no experts that ep could split. Leave it out."
        )
    node = question.device.gpus_per_node
    apart = [expert.fqn for expert in experts]
    sizes = [n for n in range(1, min(question.gpus, node) + 1) if node % n == 0 and question.gpus % n == 0]
    tensor_sizes = tuple(size for size in sizes if _splits(model, size))
    config = text_config(getattr(model, "config", None))
    return Room(
        gpus=question.gpus,
        seq_len=question.seq_len,
        global_batch=question.global_batch,
        layers=len(layers),
        gpus_per_node=node,
        experts=min((expert.count for expert in experts), default=0),
        tensor_sizes=tensor_sizes,
        beside_experts=tuple(size for size in sizes if experts and _splits(model, size, apart)),
        sequence_parallel=next((cuts_sequences(model, size) for size in tensor_sizes if size > 1), False),
        heads=getattr(config, "num_key_value_heads", 0) or getattr(config, "num_attention_heads", 0) or 0,
        stages=question.gpus > node,
        pins=question.pins,
    )


def _splits(model: nn.Module, size: int, whole: Collection[str] = ()) -> bool:
    """Return whether `tp` ranks can split the model's weights by its own plan; `whole`: as for `resolve_plan`."""
    try:
        return size == 1 or bool(resolve_plan(model, None, size, whole))
    except ValueError:
        return False


def _tokens(model: nn.Module, seq_len: int, name: str = "") -> Callable[[int], Any]:
    config: Any = getattr(model, "config", None)
    if config is None:
        raise ValueError(
            f"{type(model).__name__} has no config, so its input is unknown. Give sample=, a function of the number of "
            "sequences that returns the model's arguments; on the command line, have module:function return "
            "(model, sample)."
        )
    check_positions(config, "The search", seq_len, name or type(model).__name__)

    return lambda batch: text_batch(batch, seq_len)
