"""`plan_for`: from a model, a budget and a sample input to a plan; and the choices of a job that is already decided."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias, Unpack

from torch import nn

from nemo_like._util.log import say_once
from nemo_like._util.module_tree import bare_modules, check_model
from nemo_like._util.words import write_bytes
from nemo_like.activation_checkpointing.apply import apply_specs
from nemo_like.activation_checkpointing.ops import facts
from nemo_like.activation_checkpointing.plan import BudgetError, LayerPlan, Plan, layer_signature, plan_specs
from nemo_like.activation_checkpointing.spec import policy_of, submodule_lists
from nemo_like.distributed.launch import pick_device_type, world_size
from nemo_like.job import AllKeywords, Job, as_code
from nemo_like.offload import place_decisions
from nemo_like.offload.backends import Backend
from nemo_like.options import CheckpointConfig, MemoryBudget, NamedList, NamedLists, parse_ac
from nemo_like.options.parallel import check_imbalance
from nemo_like.planning.advise import Each, lowering
from nemo_like.planning.memory_model.storages import Peak
from nemo_like.planning.model.capture import planned_imbalance
from nemo_like.planning.model.traced import MODES
from nemo_like.planning.predictions.budget_search import choose
from nemo_like.planning.predictions.rank import fullest_peaks, fullest_rank, parts_at_peak, peak_of, peaks_of, rank_peak
from nemo_like.planning.predictions.reserved import reserved_on
from nemo_like.planning.predictions.seconds import step_seconds
from nemo_like.planning.query import Choices, PlanQuery, Stage
from nemo_like.planning.selection.layer import BlockProblem, Choice, decided
from nemo_like.planning.sharding import same_on_all_ranks
from nemo_like.planning.trace.kinds import ModelTrace
from nemo_like.precision import effective_matmuls

Ac: TypeAlias = CheckpointConfig | MemoryBudget | NamedLists | Plan


def plan_for(
    model: nn.Module, job: Job | None = None, *, sample_input: Any = None, **asked: Unpack[AllKeywords]
) -> Plan:
    """Find the fastest way to run `model`'s layers within a memory budget, with its predicted peak.

    Runs no kernel and requires no GPU. Where a process group is up, rank 0 plans and the others receive its plan, so that
    all ranks run the same one. In a pipeline, early stages usually have more micro-batches in flight than late ones, so
    their layers save less.

    Args:
        model: an original model: not sharded, compiled or checkpointed. On any device, `meta` included. It is not changed.
        job: the job, whose ``ac`` is the budget, or lists of names.
        asked: the keywords of `Job.of`, instead of `job`: ``ac="40GiB", world_size=8, gpu="h100-80gb"``. Where the job names
            only some of the layers that would be found, the others are left without checkpointing, and count in the peak.
        sample_input: the input of `model` in one step of one rank (keywords, positions, or one tensor); with ``cp``, whole
            sequences; with ``pp``, one micro-batch.

    Returns:
        The plan; for a pipeline that of all stages. `Plan.step` has the layers of each stage as ``balance``.

    Raises:
        BudgetError: (a ValueError) no plan fits; the error has the smallest budget that one does.
        ValueError: no budget, no sample input, an unknown device, no head for a chunked loss, a model that cannot be traced
            or cut.
        TypeError: an unknown keyword, or keywords together with a job.

    >>> plan_for(model, ac="40GiB", world_size=8, gpu="h100-80gb", sample_input=batch)  # doctest: +SKIP
    """
    check_model(model)
    job_to_plan = asked_job(job, asked, sample_input)
    return same_on_all_ranks(lambda: planned(model, sample_input, job_to_plan)[1])


def planned(model: nn.Module, sample_input: Any, job: Job) -> tuple[PlanQuery, Plan]:
    """Return the plan of `job`, and the query as it was planned, with options that were open decided.

    Raises:
        BudgetError: no plan fits.
    """
    query = query_of(model, sample_input, job)
    choices = choices_under(query)
    assert choices is not None  # `asked_job`
    return query, describe(query, choices, str(job.ac))


def query_of(model: nn.Module, sample_input: Any, job: Job, mode: str = "full") -> PlanQuery:
    """Return the query of `job`, with layers divided for ``balance="memory"`` if it has that; `mode`: as for `balanced`.

    Raises:
        ValueError: as `plan_for`, for models that cannot be traced or cut; an imbalance above 1 of experts that all ranks
            have.
    """
    if job.ep.imbalance is not None:
        check_imbalance("imbalance", job.ep.imbalance, job.ep.size)
    query = PlanQuery.from_model(model, sample_input, job)
    return balanced(query, mode) if query.is_pipeline and query.pp.balance == "memory" else query


def balanced(query: PlanQuery, mode: str) -> PlanQuery:
    """Return the same job with layers divided for memory under ``none``, ``full`` or ``selective``.

    The search begins with the division by time. A layer goes from the highest rank's stages to the other stage where that
    lowers the highest peak most, as long as one does.
    """
    best, peak = query, _worst(query, mode)
    while True:
        moves = []
        for giver in best.of_rank(peak[1]):
            for taker in range(len(best.counts)):
                if taker not in best.of_rank(peak[1]) and best.counts[giver] > 1:
                    counts = list(best.counts)
                    counts[giver] -= 1
                    counts[taker] += 1
                    other = best.under(replace(best.job, pp=replace(best.pp, balance=tuple(counts))))
                    moves.append((_worst(other, mode), counts, other))
        if not moves or (lowest := min(moves, key=lambda move: (move[0][0], move[1])))[0][0] >= peak[0]:
            return best
        peak, _, best = lowest


def _worst(query: PlanQuery, mode: str) -> tuple[int, int]:
    """Return the highest peak, and the rank that has it."""
    return max((peak.total, rank) for rank, peak in enumerate(peaks_of(query, query.uniform(mode))))


def balance_for_memory(model: nn.Module, sample_input: Any, job: Job, mode: str) -> list[int]:
    """Return the layers of each stage under ``balance="memory"``, the same on all ranks; `mode`: as for `balanced`."""
    return same_on_all_ranks(lambda: query_of(model, sample_input, job, mode).counts)


def describe(
    query: PlanQuery,
    choices: Choices,
    asked: str,
    *,
    reserved: Iterable[int] | None = None,
) -> Plan:
    """Return choices for all stages as one `Plan` of the whole model, with the peak of the rank that has the highest.

    Args:
        query, choices: the job, and its chosen checkpointing.
        asked: the budget, as the caller wrote it.
        reserved: bytes that the fullest ranks reserve, where they are known already.
    """
    if reserved is None:
        ranks = {} if query.device.cuda is None else fullest_peaks(query, choices)
        reserved = [reserved_on(query, rank, choices).reserved for rank in ranks]
    rank = fullest_rank(query, choices)
    first = query.stages[0]
    pipeline = {
        "pp": query.pp.size,
        "schedule": query.pp.schedule,
        "microbatches": query.microbatches,
        "balance": query.counts,
    }
    step = {k: v for k, v in asdict(first.job.step).items() if k != "loss_fn"}
    step |= {"loss": "model" if first.outside().own_loss else "loop", "sample": first.part.sample}
    stages = list(zip(query.stages, choices))
    sums = [_sums(*stage) for stage in stages]
    return Plan(
        model=type(query.traced.given).__name__,
        device=query.device.name,
        traced_for=query.device.kind,
        budget=asked,
        layers=tuple(layer for stage in stages for layer in _layers(*stage)),
        step_seconds=step_seconds(query, choices).total,
        peak=parts_at_peak(query, rank, choices),
        peak_at=rank_peak(query, rank, choices).at + (f", on rank {rank}" if query.is_pipeline else ""),
        step=step | (pipeline if query.is_pipeline else {}),
        # Weights that are not sharded are not gathered, either.
        matmuls=effective_matmuls(first.job.precision, sharded=first.job.fsdp is not None),
        reserved_bytes=max(reserved, default=None),
        **{name: sum(of_stage[name] for of_stage in sums) for name in sums[0]},
    )


def _layers(stage: Stage, choices: Sequence[Choice]) -> list[LayerPlan]:
    """Return the plan of each layer of a stage, with its name in the whole model."""
    part, layers = stage.part, dict[str, LayerPlan]()
    modules = dict(bare_modules(part.whole))
    names = dict(zip((layer.fqn for layer in part.layers), stage.names))
    for call, choice, moved, waits in zip(part.traced.calls, choices, stage.moved(choices), stage.exposed(choices)):
        problem = part.problems[call.kind]
        before = layers.get(call.fqn)
        if before is not None and not problem.trace.saves_something:
            continue  # a call without gradients: the layer's other calls decide its saved tensors
        if before is not None and not before.none_bytes:
            before = None  # and this is the first of those
        times = 1 if before is None else before.recompute_flops // max(1, choice.recompute_flops) + 1
        rows: Mapping[str, Sequence[str]] | None = None
        if choice.decisions and not choice.inside:
            rows = {} if choice.is_full else problem.rows(choice, one_attention=True)
        layers[call.fqn] = LayerPlan(
            names[call.fqn],
            layer_signature(modules[call.fqn]),
            choice.label,
            (choice.held_bytes - moved) * times,
            (choice.host_bytes + moved) * times,
            problem.trace.none_bytes * times,
            choice.recompute_flops * times,
            (choice.recompute_seconds + waits) * times,
            rows,
            None if choice.names is None else choice.names.words,
            {region.path: region.rows for region in choice.inside if region.choice.decisions} or None,
        )
    return list(layers.values())


def _sums(stage: Stage, choices: Sequence[Choice]) -> dict[str, Any]:
    """Return the fields of a `Plan` that add up over stages."""
    part = stage.part
    calls = [part.problems[call.kind] for call in part.traced.calls]
    return {
        "held_bytes": part.saved(choices) - sum(stage.moved(choices)),
        "none_bytes": part.saved(part.uniform("none")),
        "full_bytes": part.saved(part.uniform("full")),
        "forward_flops": sum(problem.trace.flops for problem in calls),
        "forward_seconds": sum(problem.forward_seconds for problem in calls),
        "recompute_flops": sum(choice.recompute_flops for choice in choices),
        "recompute_seconds": sum(choice.recompute_seconds for choice in choices) + sum(stage.exposed(choices)),
    }


def asked_job(job: Job | None, asked: Mapping[str, Any], sample_input: Any) -> Job:
    """Return the job that `plan_for` plans, with its number of ranks.

    Raises:
        ValueError, TypeError: as `plan_for`, for its arguments.
    """
    if job is not None and not isinstance(job, Job):
        raise TypeError(
            f"job is {job!r}; it must be a Job. A budget is given as ac=: plan_for(model, ac='40GiB', ...)."
        )
    job_to_plan = Job.of(**asked) if job is None else Job.of(job, **asked)
    if job_to_plan.world_size is None:
        job_to_plan = replace(job_to_plan, world_size=world_size())
    if not isinstance(job_to_plan.ac, MemoryBudget | NamedLists):
        raise ValueError(
            f"ac is {as_code(job_to_plan.ac, parse_ac)}; a plan needs a budget ('40GiB', '50%' or 'auto') or lists of names."
        )
    if sample_input is None:
        raise ValueError(
            "A memory budget needs a sample input (sample_input=): activation bytes depend on batch and sequence. Give "
            "the model's arguments in one step of one rank, such as {'input_ids': ..., 'labels': ...}."
        )
    return job_to_plan


__all__ = ["BudgetError", "apply_plan", "plan_for"]


# A plan that is applied to a model by itself, for callers who own the order of the steps.


def apply_plan(
    model: nn.Module,
    plan: Plan,
    *,
    device_type: str | None = None,
    backend: Backend | None = None,
    compile: bool = False,
) -> nn.Module:
    """Wrap `model`'s layers by `plan`, in place, and return it. Call it before compiling and sharding.

    As with every other mode, the model is called without a key/value cache where gradients are on.

    Args:
        model: the original model that the plan was made for.
        plan: from `plan_for` or `Plan.load`.
        device_type: ``"cpu"`` or ``"cuda"``, where the model will run; default: CUDA if there is any. Where the plan was
            traced for the other one, that is logged.
        backend: moves the bytes of outputs that wait in CPU memory; default: that of the accelerator.
        compile: `nemo_like.compile.compile_layers` will be called afterwards.

    Raises:
        PlanError: the plan was made for another model. The model is unchanged then.
        TypeError: a layer is checkpointed already. The model is unchanged then.
    """
    specs = plan_specs(model, plan, device_type or pick_device_type())
    layers = [layer.fqn for layer in plan.layers]
    apply_specs(model, place_decisions(specs, layers, backend=backend), compile=compile)
    return model


def balanced_peak(query: PlanQuery, choices: Choices) -> Peak | None:
    """Return the peak of a step where each rank's experts get as many rows, under the decisions of `choices`.

    None where `query` counts with that already: no experts on other ranks, or ``imbalance=1``.
    """
    job = query.job
    if job.ep.size == 1 or planned_imbalance(job) == 1:
        return None
    other = query.under(replace(job, ep=replace(job.ep, imbalance=1.0)))
    return peak_of(other, [_same(stage, chosen) for stage, chosen in zip(other.stages, choices)])


def _same(stage: Stage, choices: Sequence[Choice]) -> list[Choice]:
    """Return `choices` for the same operators on other numbers of rows."""
    same = []
    for call, choice in zip(stage.part.traced.calls, choices):
        problem, words = stage.part.problems[call.kind], choice.decisions  # the number of rows changes no operator
        if choice.names is not None and choice.inside:
            same.append(stage.part.in_regions(call.kind, choice.names, skip=stage.skip))
        else:
            same.append(problem.choice(words, choice.label) if words else problem.none())
    return same


@dataclass(frozen=True)
class PlannedRank:
    """A planned job, and one rank's peak in it."""

    job: Job  # The job, with a `Plan` in the place of a budget.
    traced: ModelTrace | None  # The model's layers; None: they are on several stages.
    peak_bytes: int | None  # Peak of the rank, in bytes; None: nothing is predicted for such an ``ac``.


def plan_rank(model: nn.Module, sample_input: Any, job: Job, rank: int) -> PlannedRank:
    """Plan `job`, and predict the peak of `rank`.

    Raises:
        ValueError: as `nemo_like.planning.plan_for`, where no plan is made of such a model or job.
    """
    if isinstance(job.ac, MemoryBudget):
        query, plan = planned(model, sample_input, job)
        job = replace(job, ac=plan)
    else:
        query = _under_plan(model, sample_input, job)
    chosen = None if query.is_pipeline and job.ac_scope != "all" else choices_under(query)
    if any("host" in choice.decisions for choices in chosen or () for choice in choices):
        chosen = None  # fake tensors in CPU memory are on the device that they stand for, so that a dry run counts them
    peak = None if chosen is None else rank_peak(query, rank * job.pp.size // job.ranks, chosen).total
    return PlannedRank(job, None if query.is_pipeline else query.stages[0].part.live, peak)


def choices_under(query: PlanQuery, ac: Ac | None = None, asked: str = "") -> Choices | None:
    """Return the choices of each layer call; None: they are not predicted.

    Args:
        query: the job.
        ac: checkpointing; None: that of the job.
        asked: it as the caller wrote it, for errors.

    Raises:
        BudgetError: no plan fits its budget.
        ValueError: lists of names that do not fit the model.
    """
    ac = query.job.ac if ac is None else ac
    if isinstance(ac, MemoryBudget):
        return choose(query, ac, asked)
    chosen = [choices_of(stage, ac) for stage in query.stages]
    predicted = [each for each in chosen if each is not None]
    return predicted if len(predicted) == len(chosen) else None


def peak_under(query: PlanQuery) -> Peak:
    """Return the highest peak under the ``ac`` of the job of `query`; where that is not predicted, without checkpointing.

    Raises:
        BudgetError: no plan fits its budget.
    """
    return peak_of(query, choices_under(query) or query.uniform("none"))


def lower_peaks(now: int, tried: Iterable[tuple[Each, PlanQuery | None]]) -> list[tuple[Each, int]]:
    """Return the changes that lower the peak `now`, as `lowering` does.

    tried: changes, with the query of each; None: it cannot be had. One whose budget no plan fits is left out.
    """
    peaks = list[tuple[Each, int]]()
    for change, query in tried:
        with suppress(BudgetError):
            if query is not None:
                peaks.append((change, peak_under(query).total))
    return lowering(now, peaks)


def _under_plan(model: nn.Module, sample_input: Any, job: Job) -> PlanQuery:
    """Return the query of a job whose layers are divided, and recomputed, as its `Plan` states, if it has one."""
    if isinstance(job.ac, Plan) and "balance" in job.ac.step:
        job = replace(job, pp=replace(job.pp, balance=tuple(job.ac.step["balance"])))
    return query_of(model, sample_input, job, getattr(job.ac, "mode", "full"))


def choices_of(stage: Stage, ac: Ac) -> list[Choice] | None:
    """Return the choice of each layer call under a mode, lists of names or a `Plan`; None: it is not predicted."""
    part = stage.part
    if isinstance(ac, NamedLists):
        if not ac.whole and stage.job.offload.mode != "none":
            return None  # copies of the inputs of regions inside of a layer are not counted
        choices = stage.by_names(ac)
        for kind, choice in dict.fromkeys(zip((call.kind for call in part.traced.calls), choices)):
            _say_fused(part.problems[kind], choice)
        return choices
    if isinstance(ac, CheckpointConfig):
        return _of_config(stage, ac)
    assert isinstance(ac, Plan)  # `choices_under`
    plans = {layer.fqn: layer for layer in ac.layers}
    names = dict(zip((layer.fqn for layer in part.layers), stage.names))
    return [_choice(stage, call.kind, plans.get(names[call.fqn])) for call in part.traced.calls]


def _say_fused(problem: BlockProblem, choice: Choice) -> None:
    """Log once the price of the result of a fused attention that a list recomputes."""
    for record, word, seconds in zip(problem.records, choice.decisions, problem.seconds):
        if word == "recompute" and facts(record.op).attention:
            say_once(
                f"Core attention is fused, so it keeps no scores: saving it (save 'attention') costs "
                f"{write_bytes(record.bytes)} a layer and buys {1e3 * seconds:.2g} ms."
            )


def _of_config(stage: Stage, config: CheckpointConfig) -> list[Choice] | None:
    """Return the choice of each layer call under a mode, or a policy of it; None: the config has more, or is not traced."""
    plain = parse_ac(config.mode)
    assert isinstance(plain, CheckpointConfig)
    if config.mode == "submodule" and config == plain:
        every = zip(stage.names, stage.part.layers)
        layers = {name: layer.module for name, layer in every if layer.fqn in stage.part.chosen}
        return stage.by_names(submodule_lists(layers)) if stage.job.offload.mode == "none" else None
    if config.mode == "selective" and config == replace(plain, policy=config.policy, ops_to_save=config.ops_to_save):
        by_tensors = getattr(policy_of(config).start(), "needs_call", False)  # and a plan has none
        return None if by_tensors else stage.part.under_policy(policy_of(config))
    return stage.part.uniform(config.mode) if config.mode in MODES and config == plain else None


def _choice(stage: Stage, kind: int, plan: LayerPlan | None) -> Choice:
    problem = stage.part.problems[kind]
    if plan is not None and plan.regions is not None:
        names: dict[str, Any] = dict(plan.names or {})
        return stage.part.in_regions(kind, NamedList(**names), skip=stage.skip)
    policy = None if plan is None else plan.policy()
    if policy is None:
        return problem.none()
    if plan is not None and not plan.decisions:
        return problem.full()
    return decided(problem, policy, "plan")
