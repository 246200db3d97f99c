"""`dry_run`: a training job's step on one of its ranks, run as it is, on fake tensors and ranks that are not there.

One process plays one rank of any number: torch's ``fake`` back end sends nothing, fake tensors have no memory, and
all else is real: `parallelize` with `fully_shard`, DTensor and the engine, torch's optimizer, autograd. A `StorageLedger`
counts.
"""

import gc
import inspect
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from nemo_like import parallelizer
from nemo_like._util.log import say_once, unsaid
from nemo_like._util.module_tree import bare_modules
from nemo_like._util.tensors import split_sample
from nemo_like._util.words import a_or_an, check_whole
from nemo_like.activation_checkpointing.plan import Plan
from nemo_like.distributed.gradients import set_gradient_sync
from nemo_like.distributed.pipeline.cut import repeated
from nemo_like.distributed.pipeline.pipeline import Pipeline, tie, trust
from nemo_like.distributed.update_in_backward import optimizer_in_backward
from nemo_like.fake.model_copy import copy_on_meta, packed_as, scales_of
from nemo_like.fake.reasons import without_values
from nemo_like.fake.run import FakeRun
from nemo_like.job import Job, as_code
from nemo_like.layers import find_layers
from nemo_like.models import source_of
from nemo_like.options import DDP, FSDP2, MemoryBudget, StepSpec
from nemo_like.options.optimizers import OPTIMIZERS
from nemo_like.options.parallel import moves_state
from nemo_like.parallelizer import parallelize
from nemo_like.planning.devices import Device, device_of, resolve_device
from nemo_like.planning.memory_model.storage_ledger import (
    PARAMETERS,
    Level,
    Repeats,
    StepMoment,
    StorageLedger,
    leave_out,
    repeats,
)
from nemo_like.planning.model.capture import routing_of
from nemo_like.planning.model.outside import loss_of
from nemo_like.planning.planner import PlannedRank, plan_rank
from nemo_like.planning.trace.kinds import BlockKind, ModelTrace
from nemo_like.planning.trace.layer_memory import SumsInPlace
from nemo_like.precision import check_capability, float8_linears
from nemo_like.resolve import layers_for
from nemo_like.torch_compat import fake_ranks, local_part

SAME = 256  # Bytes: numbers and counters of a step, which a plan does not have one by one.


@dataclass(frozen=True)
class DryRun:
    """The bytes of a step of one rank: parameters, gradients, optimizer state, activations, FSDP2's buffers of
    gathers and reductions, and a pipeline's receive buffers. Not counted: buffers and the batch, which are there before
    the first step."""

    moments: Mapping[StepMoment, Level]
    """The most bytes alive in each moment of the step, in order, and by part
    (`nemo_like.planning.memory_model.storage_ledger.PARTS`)."""
    against: int | None
    """The bytes that the planner predicts for the same rank of the same job, by the same rules; None where no plan is made
    of such a job, as of ``ac="sequential"``."""

    @property
    def peak(self) -> tuple[StepMoment, Level]:
        """The moment with the most bytes."""
        return max(self.moments.items(), key=lambda pair: pair[1].total)

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive in the step."""
        return self.peak[1].total

    @property
    def at(self) -> str:
        """Return where in the step the peak is."""
        moment, level = self.peak
        return f"{moment.where}, in {level.op}" if level.op else moment.where

    @property
    def parts(self) -> dict[str, int]:
        """Bytes of the peak by part."""
        return {part: size for part, size in self.peak[1].parts.items() if size}


def dry_run(
    model_or_config: object, job: Job, sample_input: object, *, rank: int = 0, layers: int | None = 5
) -> DryRun:
    """Run `parallelize` and two training steps as one rank would, without its weights, its GPU and the other ranks.

    Operators, collectives and the optimizer are those of ``Job.gpu``, as in a plan; of the CPU and gloo where it is None.

    Args:
        model_or_config: an original model on any device, `meta` included, of which a copy runs; or a transformers config.
        job: the job to run, on ``Job.world_size`` ranks. With ``ep``, this rank's experts are those that most rows come
            to, by ``ExpertParallel.imbalance``.
        sample_input: the model's arguments for one micro-batch of one rank. With ``pp``, a step has
            ``PipelineParallel.microbatches`` of them.
        rank: which of them this process plays.
        layers: how many layers of each stretch of equal ones run, 5 or more (periods, where several kinds alternate). The
            others add as many bytes as one more does. Where the peak is then another than the plan's, all run, which is
            logged. None, with ``pp``, and where no plan is made: all run.

    Raises:
        ValueError, TypeError: as `parallelize`; a rank that the job does not have; a model whose step depends on values.
        NotImplementedError: a job that cannot be run so: stages of the caller's own, ``cp`` by ring, DDP, compilation,
            offloading (FSDP2 with the state of a GPU in CPU memory, too), a step with an optimizer that torch does not
            bring.

    >>> found = dry_run(model, Job.of(ac="full", tp=8, world_size=4096), batch)  # doctest: +SKIP
    >>> found.peak_bytes, found.at, found.parts, found.against  # doctest: +SKIP
    """
    if not isinstance(job, Job):
        raise TypeError(f"job is {job!r}; it must be a Job: Job.of(ac='full', world_size=8).")
    if sample_input is None:
        raise ValueError("sample_input is None; give the model's arguments for one micro-batch of one rank.")
    model = _model(model_or_config)
    gpu = resolve_device("cpu" if job.gpu is None else job.gpu)
    job = replace(job, world_size=job.ranks, gpu=gpu, device=torch.device("cpu"))  # where the fake tensors are
    refuse_dry_run(job)
    check_whole("rank", rank, 0)
    if layers is not None:
        check_whole("layers", layers, 5)
    if rank >= job.ranks:
        raise ValueError(f"rank is {rank}, and the job has {job.ranks}: 0 to {job.ranks - 1}.")
    is_whole = job.pp.size > 1 or job.ac_scope == "all"
    planned_for = job if is_whole else replace(job, layers=tuple(layer.fqn for layer in layers_for(model, job)[1]))
    try:  # here, where no rank waits for the plan of another one
        planned = plan_rank(model, sample_input, planned_for, rank)
    except ValueError as error:
        if isinstance(job.ac, MemoryBudget):
            raise
        say_once(f"No plan is made of this job, so all layers run and nothing is compared: {error}")
        planned = PlannedRank(job, None, None)
    job = replace(job, ac=planned.job.ac)

    def run(skipped: Mapping[str, BlockKind]) -> dict[StepMoment, Level]:
        # Without the checks in the first step of a real job, which compare values.
        with (
            unsaid(),
            patch.dict(os.environ, NEMO_LIKE_VERIFY="0"),
            torch.random.fork_rng(devices=[]),
            fake_ranks(rank, job.ranks),
        ):
            return _run(model, sample_input, job, skipped)

    if layers is not None and planned.traced is not None and planned.peak_bytes is not None:
        ahead = max(1, job.strategy.forward_prefetch) if isinstance(job.strategy, FSDP2) else 1
        kept = max(layers, 3 + 2 * ahead)  # A layer gathers so many behind it: those around the gap gather layers.
        if stretches := _stretches(planned.traced, job.ac, kept):
            levels = _levels_of_all(run, planned.traced, stretches, kept)
            if abs(max(level.total for level in levels.values()) - planned.peak_bytes) <= SAME:
                return DryRun(levels, planned.peak_bytes)
            say_once("Few layers do not tell the bytes of all (another peak than the plan's): all layers run.")
    return DryRun(run({}), planned.peak_bytes)


def _model(model_or_config: object) -> nn.Module:
    """Return the model; one that is made of a config has no memory."""
    if isinstance(model_or_config, nn.Module):
        return model_or_config
    if not hasattr(model_or_config, "model_type"):
        raise TypeError(
            f"model_or_config is {a_or_an(model_or_config)}; it must be a torch.nn.Module or a transformers config."
        )
    return source_of(type(model_or_config).__name__, model_or_config).build("meta")


def _stretches(traced: ModelTrace, ac: object, kept: int) -> list[Repeats]:
    """Return the stretches of equal periods of which `kept` may represent all."""
    names = [call.fqn for call in traced.calls]
    if len(set(names)) < len(names):
        say_once("A layer is called several times in one forward: all layers run.")
        return []
    if any(kind.left or kind.given for kind in traced.kinds):
        say_once("The model and its layers set attributes for each other: all layers run.")
        return []
    decisions = {layer.fqn: repr(layer.decisions) for layer in ac.layers} if isinstance(ac, Plan) else {}
    return repeats([(call.kind, decisions.get(call.fqn)) for call in traced.calls], kept)


def _levels_of_all(
    run: Callable[[Mapping[str, BlockKind]], dict[StepMoment, Level]],
    traced: ModelTrace,
    stretches: Sequence[Repeats],
    kept: int,
) -> dict[StepMoment, Level]:
    """Return the levels of the whole model by runs of short ones: each further period adds as many bytes as one does.

    Levels of left-out periods are between those of their neighbours, so that none of them is the highest.

    run: returns the levels of a run without the layers of these names; their kinds have the outputs that they return.
    """

    def without(more: Repeats | None = None) -> dict[str, BlockKind]:
        calls = [traced.calls[at] for stretch in stretches for at in stretch.left_out(kept + (stretch is more))]
        return {call.fqn: traced.kinds[call.kind] for call in calls}

    levels = short = run(without())
    for stretch in stretches:
        longer, missing = run(without(stretch)), stretch.count - kept
        levels = {at: level.of_more(short[at], longer[at], missing) for at, level in levels.items() if at in longer}
    return levels


def _run(model: nn.Module, sample_input: object, job: Job, skipped: Mapping[str, BlockKind]) -> dict[StepMoment, Level]:
    """Return the levels of a step without the `skipped` layers, by their names; their kinds have their outputs."""
    mine, loop = copy_on_meta(model), job.step
    names = [layer.fqn for layer in find_layers(model, job.layers) if layer.fqn not in skipped]
    leave_out(mine, skipped)
    if skipped or job.layers is not None:
        job = replace(job, layers=tuple(names))
    if isinstance(job.ac, Plan):
        job = replace(job, ac=job.ac.only([layer.fqn for layer in job.ac.layers if layer.fqn not in skipped]))
    with _float8_of(job.gpu):
        parallelized = parallelize(mine, job, sample_input=sample_input)
    modules = [stage.module for stage in parallelized.stages] if isinstance(parallelized, Pipeline) else [parallelized]
    device: Device = job.gpu
    run = FakeRun(cuda=device.cuda, model=model)
    run.routing = routing_of(model, job)
    _give_memory(modules, run)
    args, kwargs = run.sample(split_sample(sample_input))
    ledger = StorageLedger(on_cpu=device.kind == "cpu")
    if isinstance(parallelized, Pipeline):
        tie(parallelized)
        given_by_name = dict(zip(inspect.signature(model.forward).parameters, args)) | kwargs
        go = _pipeline_loop(parallelized, repeated(given_by_name, parallelized.options.microbatches or 1), ledger)
    else:
        split_loss = job.loss is None and job.tp.loss_parallel
        go = _loop(parallelized, args, kwargs, loop, ledger, loss_parallel if split_loss else nullcontext)
    make = OPTIMIZERS[OPTIMIZERS[loop.optimizer].form_on(device.kind)].make
    assert make is not None  # `refuse_dry_run`
    if loop.in_backward:
        assert isinstance(parallelized, nn.Module)  # a rule of `Job`
        optimizers = list(optimizer_in_backward(parallelized, make).optimizers.values())
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(lambda *_: setattr(ledger, "phase", "optimizer step"))
            optimizer.register_step_post_hook(lambda *_: setattr(ledger, "phase", "backward"))
    else:
        optimizers = [make(list(parallelized.parameters()))]
    with run.fake:
        averaged: dict[torch.Tensor, torch.Tensor] = {
            p: torch.empty_like(local_part(p), device="cpu") for p in parallelized.parameters() if loop.ema
        }
    told = without_values(f"{type(model).__name__} cannot be run without values: its step", model)
    by_name = _layers_of(modules, names)
    scales = [t for module in modules for part in module.modules() for t in scales_of(part)]
    with told, run, ledger, SumsInPlace(), ledger.watching(by_name), _sends_hold(), _scales_found():
        for _ in range(2):  # the second one begins with the optimizer's state
            gc.collect()
            ledger.own([*map(local_part, parallelized.parameters()), *averaged.values(), *scales], PARAMETERS)
            ledger.begin()
            go()
            ledger.phase = "optimizer step"
            for optimizer in optimizers:
                if not loop.in_backward:
                    optimizer.step()
                if device.kind == "cuda" and not optimizer.defaults.get("fused"):  # torch counts steps on the host
                    ledger.disown(state["step"] for state in optimizer.state.values() if "step" in state)
                optimizer.zero_grad(set_to_none=loop.zero_grad == "free")
        return ledger.levels()


def _layers_of(modules: Sequence[nn.Module], names: Collection[str]) -> dict[str, nn.Module]:
    return {name: each for module in modules for name, each in bare_modules(module) if name in names}


def _loop(
    model: nn.Module,
    args: tuple,
    kwargs: dict[str, Any],
    loop: StepSpec,
    ledger: StorageLedger,
    around: Callable[[], AbstractContextManager[Any]],
) -> Callable[[], None]:
    """Forward and backward of a step as in `loop`. `around`: the context that they run in."""
    outputs: list[Any] = []

    def go() -> None:
        for number in range(loop.microbatches):
            if loop.sync == "last":
                set_gradient_sync(model, number == loop.microbatches - 1)
            with around():
                ledger.phase = "forward"
                output = model(*args, **kwargs)
                outputs[:] = [output] if loop.keeps_output else []
                loss = loss_of(output, loop.loss_fn)
                del output
                ledger.phase = "backward"
                loss.backward()
                del loss

    return go


def _pipeline_loop(pipeline: Pipeline, batch: dict[str, Any], ledger: StorageLedger) -> Callable[[], object]:
    """Forward and backward of a step in the order of the pipeline's schedule."""

    def enter(*_: object) -> None:
        ledger.phase = "forward"

    def leave(*_: object) -> None:
        ledger.phase = "backward"

    for stage in pipeline.stages:
        stage.module.register_forward_pre_hook(enter, prepend=True)
        stage.module.register_forward_hook(leave)
    trust(pipeline)
    return partial(pipeline.step, **batch)


def refuse_dry_run(job: Job) -> None:
    """Raise NotImplementedError, which names it, where `job` has an option that cannot be run on fake tensors."""
    refused = {
        "PipelineParallel.split": job.pp.size > 1 and job.pp.split is not None,
        "strategy='ddp'": isinstance(job.strategy, DDP),
        f"compile={job.compile!r}": job.compile is not None,
        f"offload={job.offload.mode!r}": job.offload.mode != "none",
        # State in CPU memory would count as the GPU's: both are the CPU's fake tensors.
        f"strategy={as_code(job.strategy)}": job.fsdp is not None and moves_state(job.fsdp, device_of(job).kind),
        f"StepSpec.optimizer={job.step.optimizer!r}": OPTIMIZERS[job.step.optimizer].make is None,
    }
    for name, is_there in refused.items():
        if is_there:
            raise NotImplementedError(
                f"{name} is not run without ranks and memory yet. Leave it out, or ask the planner alone "
                "(nemo_like.planning.plan_for, nemo-like plan)."
            )


class _Sent:
    """The work of a send, which holds the tensor, as that of a back end that sends does."""

    def __init__(self, work: dist.Work, tensor: torch.Tensor) -> None:
        self._work, self._tensor = work, tensor

    def wait(self, *args: Any) -> bool:
        return self._work.wait(*args)


@contextmanager
def _sends_hold() -> Iterator[None]:
    """Within it, a tensor that a pipeline's stage sends lives as long as the work of sending it."""
    isend = dist.isend

    def held(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        work = isend(tensor, *args, **kwargs)
        return None if work is None else _Sent(work, tensor)

    with patch.object(dist, "isend", held), patch.object(dist.distributed_c10d, "isend", held):
        yield


def _scales_found() -> AbstractContextManager[object]:
    """Within it, bitsandbytes gives a fake weight that FSDP2 has gathered its scales: it would make another tensor of it."""
    modules: Any = sys.modules.get("bitsandbytes.nn.modules")
    if modules is None:
        return nullcontext()
    return patch.object(
        modules, "fix_4bit_weight_quant_state_from_module", lambda module: packed_as(module.weight, module)
    )


def _float8_of(device: Device) -> AbstractContextManager[object]:
    """Within it, `parallelize` makes the linears that multiply in float8 on `device`: those of the CPU emulate that."""

    def made(layers: Sequence[nn.Module], matmuls: str, _: str, *, sharded: bool, tp: int) -> None:
        float8_linears(layers, matmuls, device.kind, sharded=sharded, tp=tp)

    def check(place: torch.device, matmuls: str | None) -> None:
        check_capability(matmuls, device.name, device.cuda)

    return patch.multiple(parallelizer, float8_linears=made, check_capability_of=check)


def _give_memory(models: Sequence[nn.Module], run: FakeRun) -> None:
    """Put fake tensors in the place of those on the meta device, and of buffers."""
    memories: dict[torch.Tensor, Any] = {}

    def one(tensor: torch.Tensor) -> Any:
        if tensor not in memories:
            with run.fake, torch.no_grad():
                memory = torch.empty_like(tensor, device="cpu")
            memories[tensor] = (
                packed_as(nn.Parameter(memory, tensor.requires_grad), tensor, one)
                if isinstance(tensor, nn.Parameter)
                else memory
            )
        return memories[tensor]

    for module in (module for model in models for module in model.modules()):
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = run.sample(buffer)
        for name, parameter in module._parameters.items():
            if parameter is not None and not isinstance(parameter, DTensor):
                module._parameters[name] = one(parameter)
        packed_as(module, module, one)  # of a weight in 4 bits that FSDP2 shards
    for model in models:
        if isinstance(model, FSDPModule):  # which pads its own
            model._apply(lambda tensor: one(tensor) if tensor.is_meta else tensor)
