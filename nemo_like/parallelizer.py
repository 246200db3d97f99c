"""`parallelize`: one call from an original model to a sharded, checkpointed, compiled one.

`parallelize` reads the job and the ranks; `_make_ready` has the order of the steps, for a model or for one stage of a
pipeline, and `_check` the checks before the first of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Unpack, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from nemo_like._util.forwards import sentences
from nemo_like._util.log import is_rank_zero, say_once, warn_once
from nemo_like._util.module_tree import bare_modules, check_model
from nemo_like._util.words import parse_dtype
from nemo_like.activation_checkpointing import kv_sharing
from nemo_like.activation_checkpointing.apply import apply_specs, check_met, check_specs
from nemo_like.activation_checkpointing.plan import Plan
from nemo_like.activation_checkpointing.spec import CheckpointSpec, keep_routing
from nemo_like.compile import compile_layers
from nemo_like.distributed.consistency_checks import check_agreement, compare_batches, mesh_groups
from nemo_like.distributed.context import apply_context_parallel
from nemo_like.distributed.documents import keep_documents_apart
from nemo_like.distributed.expert.split_experts import (
    ExpertMesh,
    Experts,
    make_expert_mesh,
    shard_experts,
    split_experts,
)
from nemo_like.distributed.launch import check_places, checked_device, world_size
from nemo_like.distributed.mesh import axis_size, build_mesh, check_sizes
from nemo_like.distributed.pipeline import Pipeline
from nemo_like.distributed.pipeline.cut import STAGE_MARK, call_of, ends_of
from nemo_like.distributed.shard import (
    ask_for_weights,
    chain_prefetch,
    check_reshard,
    check_sharding,
    shard_layers,
)
from nemo_like.distributed.tensor.apply import (
    apply_tensor_parallel,
    put_edges,
)
from nemo_like.distributed.unit_calls import guard_units, refuse_new_parameters
from nemo_like.distributed.units import sharded_by_caller
from nemo_like.distributed.weights.replaced import (
    parameters_of,
    refuse_to_train,
    start_from_the_same_weights,
    watch_replaced,
)
from nemo_like.distributed.weights.state_dict import guard_shards
from nemo_like.job import Job, JobKeywords, StagedKeywords, Strategy
from nemo_like.layers import Layer, find_layers
from nemo_like.layers.structure import is_list_of_experts
from nemo_like.losses.model_loss import check_head, chunk_model_loss
from nemo_like.options import (
    DDP,
    FSDP2,
    ChunkedLoss,
    PipelineParallel,
    Single,
)
from nemo_like.precision import (
    Autocast,
    check_autocast,
    check_capability_of,
    check_float8,
    check_four_bits,
    effective_matmuls,
    float8_linears,
    scale_before_forward,
)
from nemo_like.profiling.larger_batch import size_watch
from nemo_like.resolve import check_axes, layers_for, place_of, resolve
from nemo_like.torch_compat import fuse_collectives_into_matmuls

if TYPE_CHECKING:
    from nemo_like.job import Checkpointing

_MARK = "_nemo_like_parallelized"


def apply_activation_checkpointing(
    model: nn.Module,
    ac: object = "selective",
    scope: str | Iterable[str] = "all",
    compile: bool | str = False,
    *,
    layers: Iterable[str | nn.Module] | None = None,
    loss: str | ChunkedLoss = "model",
    sample_input: object = None,
    autocast: str | torch.dtype | None = None,
) -> nn.Module:
    """Checkpoint the repeated layers of `model` in place, for callers who shard later themselves.

    Args:
        model: any Hugging Face or plain PyTorch model; changed in place and returned.
        ac, layers, loss, sample_input: as for `parallelize`. A budget counts the ranks of the process group, if there is
            one.
        scope: `parallelize`'s ``ac_scope``.
        compile: the layers will be compiled.
        autocast: the dtype (``"bf16"``) of the autocast that the caller runs the model under, which a budget is planned
            for; default: none.

    Raises:
        ValueError, TypeError: as `parallelize`. The model is unchanged then.
    """
    check_model(model)
    return checkpoint(
        model,
        Job.of(
            "fsdp2" if autocast is None else "single",
            ac,
            ac_scope=scope,
            layers=layers,
            loss=loss,
            compile=compile,
            precision=None if autocast is None else parse_dtype("autocast", autocast),
            world_size=world_size(),
        ),
        sample_input,
    )


def checkpoint(model: nn.Module, job: Job, sample_input: object = None) -> nn.Module:
    """`apply_activation_checkpointing` for a job that was read already."""
    layers_found, chosen = layers_for(model, job)
    if job.loss is not None:
        check_head(model)
    _, specs = resolve(model, job, layers_found, chosen, sample_input)
    apply_specs(model, specs, compile=job.compile is not None)
    check_met(model, specs)
    _log_steps(model)
    return model if job.loss is None else chunk_model_loss(model, job.loss)


Model = TypeVar("Model", bound=nn.Module)


@overload
def parallelize(
    model: Model,
    strategy: Literal["fsdp2", "single"] | FSDP2 | Single | Job = "fsdp2",
    ac: Checkpointing = "selective",
    *,
    mesh: DeviceMesh | None = None,
    sample_input: object = None,
    **keywords: Unpack[JobKeywords],
) -> Model: ...


@overload
def parallelize(
    model: Model,
    strategy: Literal["ddp"] | DDP,
    ac: Checkpointing = "selective",
    *,
    mesh: DeviceMesh | None = None,
    sample_input: object = None,
    **keywords: Unpack[JobKeywords],
) -> Model | DistributedDataParallel: ...


@overload
def parallelize(
    model: Model,
    strategy: Strategy | Job = "fsdp2",
    ac: Checkpointing = "selective",
    *,
    mesh: DeviceMesh | None = None,
    sample_input: object = None,
    pp: int | PipelineParallel,
    **keywords: Unpack[JobKeywords],
) -> Pipeline: ...


def parallelize(
    model: nn.Module,
    strategy: Strategy | Job = "fsdp2",
    ac: Checkpointing = "selective",
    *,
    mesh: DeviceMesh | None = None,
    sample_input: object = None,
    **keywords: Unpack[StagedKeywords],
) -> Any:
    """Make `model` ready to train: shard it, checkpoint its activations, compile its layers. Returns it.

    The model is changed in place and returned; ``ddp`` returns the `DistributedDataParallel` around it. Build the
    optimizer afterwards: sharding replaces the parameters. Where something is recomputed, calls with gradients on
    go without a key/value cache (recomputation would write it twice), unless layers hand states on through it; the config
    stays as it is. Packed rows (``position_ids`` that restart where there is no mask, ``cu_seqlens``, a mask of document
    numbers) of a Hugging Face model train as their documents one by one, under every ``ac``: no attention over an edge, no
    loss for a document's first token.

    Args:
        model: any Hugging Face or plain PyTorch model, on the CPU, a GPU or the meta device (then call
            `nemo_like.distributed.materialize` afterwards). One that transformers has split and sharded, by a
            ``distributed_config``, stays so, and is checkpointed.
        mesh: a mesh that a framework built, with axes out of ``dp_replicate``, ``dp_shard``, ``cp``, ``tp``; default:
            made from the launcher's environment.
        sample_input: the model's arguments in one step of one rank, as keywords, positions or one tensor; needed by
            budgets and ``pp``, used by ``"sequential"`` and by a `CheckpointConfig` that profiles first. Under ``tp`` and
            ``cp`` a copy without weights is run on it (of a transformers model also on its own dummy inputs), so that a
            model that fails once it is split is refused here.
        strategy: The way in which parameters are spread over the ranks. ``"fsdp2"``, ``"ddp"`` or ``"single"``. Also
            `FSDP2(...)` with its own options (resharding, prefetch, CPU offload, frozen encoders), or `DDP(...)`
            (unused parameters, bucket size). With one rank all mean ``"single"``: no process group.
        ac: Activation checkpointing, or a budget such as ``"40GiB"``, ``"50%"`` or ``"auto"``.
            ``None``/``False``/``"none"``, ``True``/``"full"`` (recompute whole layers), ``"selective"`` (keep the
            expensive ops), ``"submodule"``, ``"sequential"`` (recompute segments of layers). With a `sample_input`:
            ``"40GiB"`` (the best plan for that peak per rank), ``"50%"`` (of the activation bytes of ``"none"``),
            ``"auto"`` (this device's memory) or a `MemoryBudget`. Lists of names: ``{"save": ["attention"],
            "offload": ["mlp.up_proj"]}``, the rest of a layer being recomputed; ``{"recompute": ["mlp"]}``, these
            modules alone; several with ``"layers"``, of which the first that matches counts (`NamedList`). Also a
            `Plan`, a `CheckpointConfig`, or a policy object (`SelectivePolicy`, `TorchPolicy`).
        ac_scope: The groups of layers to checkpoint. ``"all"``, ``"language"``, ``"vision"``, ``"audio"``,
            ``"multimodal"`` or a list. A frozen layer is recomputed in calls with an input that needs a gradient.
        layers: Names (globs) or modules of the layers; None: found by structure.
        dp_replicate: FSDP2: replicas of the sharded model (HSDP); must divide the number of ranks.
        tp: FSDP2: ranks that each large weight is split over (must divide the number of ranks), or
            `TensorParallel(...)` with a plan, sequence parallelism and a loss that stays split by vocabulary.
        cp: FSDP2: ranks that each sequence is split over, or `ContextParallel(...)` with the method. Every rank of a
            ``cp`` group is called with the same whole sequences. The loss is that of the whole, the same on each.
            Other outputs are this rank's part (`nemo_like.distributed.unshard_sequence`).
        ep: FSDP2: ranks that each layer's experts are split over, or `ExpertParallel(...)` with a plan. It must
            divide ``dp_shard x cp x tp``, and the number of experts. Tokens travel to the experts and back.
        pp: Ranks that the layers are divided among, or `PipelineParallel(...)` with schedule, micro-batches and
            balance. It needs `sample_input`, one micro-batch. A `Pipeline` is returned then, whose ``step(**batch)``
            takes whole batches.
        loss: Whose loss: the model's own, or head and loss of a few tokens at a time. ``"model"``, or ``"chunked"``
            (`ChunkedLoss(...)` with sizes): a cross entropy that the model computes of its head's output from
            ``labels`` in training mode is computed a chunk of tokens at a time, and ``output.logits`` is None. Where
            the model does something else with the logits, they are made, and this is logged.
        precision: The dtype to compute in (``"bf16"``), ``"fp8"`` (bfloat16, with the matmuls of the layers' linears
            in float8, by torchao; also ``"fp8-rowwise"``, ``"fp8-gather"``, ``"mxfp8"``, ``"mxfp8-emulated"``), a
            `Precision` (also for reduction and outputs) or torch's `MixedPrecisionPolicy`. FSDP2 casts parameters;
            the other strategies use autocast.
        compile: The backend that compiles each layer in place. ``True`` means ``"inductor"``.
        offload: Tensors that wait in CPU memory between forward and backward. ``"boundary"`` (layer inputs),
            ``"saved"`` (these and the tensors that checkpointing keeps), ``"all"``, or an `OffloadConfig`.
        step: The training loop that a prediction counts with. A `StepSpec` has micro-batches, a loss outside of the
            model, whether the output is dropped before backward, and the optimizer. Default: ``out = model(**batch);
            out.loss.backward()``, then one step of AdamW.
        planned_tokens: Tokens of the largest micro-batch of one rank that memory was planned for. `nemo-like fit`
            reports it, for jobs without a plan. A larger batch is trained on, and a warning is logged once.
        device: The device that the model goes to; None: this rank's accelerator if there is one, else the CPU.
        gpu: The device to predict for, by name or JSON file. A name of `nemo_like.planning.devices.known_devices`, a
            file or a `Device`; None: the one at hand.
        attention: The kernel whose speed a prediction counts attention with. ``"cudnn"``, ``"flash"``
            (FlashAttention-2) or ``"fa3"`` (FlashAttention-3), in 16 bits; None: the kernel that PyTorch picks on
            that GPU.
        world_size: Ranks in all. It must be as many as there are, and is for predictions where no process group is;
            None: the process group's, else the launcher's, else 1.
        allocator: The settings of CUDA's caching allocator that a prediction counts with, as in PYTORCH_ALLOC_CONF.
            Default: its own.
        search: Ways that a plan may use to stay within a budget.
        optimizer: the optimizer that a budget counts, short for ``step=StepSpec(optimizer=...)``; default: ``"adamw"``.

    Raises:
        ValueError, TypeError: any bad argument, with the value, the reason and the way out; a model without repeated
            layers; a model that was parallelized or checkpointed before; a budget that cannot be met (`BudgetError`).
            The model is unchanged then.
    """
    check_model(model)
    settings: dict[str, Any] = {"strategy": strategy, "ac": ac, **keywords}
    if isinstance(strategy, Job):
        settings.pop("ac")  # the default, unless it was given too
        settings |= {} if ac == "selective" else {"ac": ac}
    try:
        job = Job.of(**settings)
    except (ValueError, TypeError) as error:
        if str(strategy).lower() != "single" and not isinstance(strategy, Single):
            check_agreement(model, error, mesh, settings.get("device"))  # the other ranks hear of it
        raise
    check_agreement(model, job, mesh)
    if job.param_dtype is torch.float16:
        warn_once(
            "precision is fp16, whose gradients lose values below 6e-8: scale the loss with torch.amp.GradScaler, "
            "or use precision='bf16'."
        )
    if _comes_in_split(model):
        return _checkpoint_as_it_came(model, job, mesh, sample_input)
    _refuse_parallelized(model)
    if job.device is None and mesh is None:
        check_places(model)
    job, mesh = _on_ranks(job, mesh)
    check_float8(job.precision.matmuls)
    check_capability_of(place_of(job, mesh), job.precision.matmuls)
    if job.pp.size == 1:
        return _make_ready(model, job, mesh, sample_input)

    from nemo_like.pipelined import cut_into_stages  # it traces the model, as planning does

    assert mesh is not None  # a pipeline has several ranks
    cut = cut_into_stages(model, job, mesh, sample_input)
    # Nothing has been changed up to here.
    start_from_the_same_weights(model, mesh)
    stages = cut.own_stages()
    return cut.pipeline(
        [replace(stage, module=_make_ready(stage.module, of_stage, cut.stage_mesh)) for stage, of_stage in stages]
    )


def _make_ready(model: nn.Module, job: Job, mesh: DeviceMesh | None, sample_input: object = None) -> Any:
    """Check `model`, a whole model or one stage of a pipeline, then change it, on the ranks of `mesh`.

    The order below is that of torchtitan's ``parallelize.py``: weights are cut before they are checkpointed, compiled and
    sharded; `_check` has the same axes in the same order.
    """
    job, layers, experts, specs = _check(model, job, mesh, sample_input)
    # Nothing has been changed up to here.
    ranks = mesh if job.fsdp is not None else None  # all axes but replicas are FSDP2's alone
    place, before = place_of(job, mesh), parameters_of(model)
    names, is_stage = [layer.fqn for layer in layers], hasattr(model, STAGE_MARK)
    if not is_stage:  # a pipeline does the last two around its stages
        start_from_the_same_weights(model, ranks)
        compare_batches(model, ranks)
        keep_documents_apart(model)
    if job.precision.matmuls is not None:
        float8_linears(
            [layer.inner for layer in layers],
            job.precision.matmuls,
            place.type,
            sharded=ranks is not None,
            tp=job.tp.size,
        )
    if ranks is not None and job.tp.size > 1:
        apply_tensor_parallel(
            model,
            ranks["tp"],
            job.tp.plan,
            sequence_parallel=job.tp.sequence_parallel,
            loss_parallel=job.tp.loss_parallel,
            whole=[expert.fqn for expert in experts],
            ends=ends_of(model),
        )
    if ranks is not None and job.cp.size > 1:
        apply_context_parallel(model, ranks["cp"], job.cp, layers, call_of(model))
    expert_mesh = None
    if ranks is not None and job.ep.size > 1:  # a stage without experts, too: making process groups takes every rank
        expert_mesh = make_expert_mesh(ranks, job.ep.size)
        split_experts(model, experts, expert_mesh)
        specs = keep_routing(specs, [expert.fqn for expert in experts])
    apply_specs(model, specs, compile=job.compile is not None)
    check_met(model, specs, labels=not is_stage)
    if not specs and not kv_sharing.needs_cache(model):
        # As with checkpointing: a cache of keys and values takes memory that no plan has, and training never reads it.
        kv_sharing.call_without_cache(model, [layer.module for layer in find_layers(model, names)])
    put_edges(model)
    if job.chunks is not None:
        chunk_model_loss(model, job.chunks)
    if job.tp.asynchronous and ranks is not None:
        fuse_collectives_into_matmuls(ranks["tp"].get_group())
    if job.compile is not None:
        compile_layers(model, job.compile, [layer.module for layer in find_layers(model, names)])
    _log_steps(model)
    if ranks is not None:
        _shard(model, job, ranks, names, experts, expert_mesh)
        units = sum(isinstance(module, FSDPModule) for module in model.modules())
        say_once(f"FSDP2: {units} units on {ranks.size()} ranks")
    else:
        model = _replicate(model, mesh, job, place)
    watch_replaced(before, model)
    setattr(model, _MARK, True)
    if not is_stage and is_rank_zero() and (isinstance(job.ac, Plan) or job.planned_tokens is not None):
        watch = size_watch(job.ac if isinstance(job.ac, Plan) else None, job.planned_tokens)
        if watch is not None:
            model.register_forward_pre_hook(watch.before_forward, with_kwargs=True)
    return model


def _check(
    model: nn.Module, job: Job, mesh: DeviceMesh | None, sample_input: object
) -> tuple[Job, Sequence[Layer], tuple[Experts, ...], list[CheckpointSpec]]:
    """Return the job with its plan, the layers, the experts to split and the regions to checkpoint, or raise."""
    ranks = mesh if job.fsdp is not None else None
    check_four_bits(model, job)
    layers, chosen = layers_for(model, job)
    experts = check_axes(model, job, mesh, layers, sample_input)
    if ranks is not None:
        check_sharding(model, layers, ranks, options=job.fsdp)
    else:
        _check_whole_model(model, mesh, job)
    job, specs = resolve(model, job, layers, chosen, sample_input)
    if isinstance(job.ac, Plan):
        job.ac.check_matmuls(effective_matmuls(job.precision, sharded=ranks is not None))
    check_specs(model, specs, compile=job.compile is not None)
    return job, layers, experts, specs


def _shard(
    model: nn.Module,
    job: Job,
    mesh: DeviceMesh,
    names: list[str],
    experts: tuple[Experts, ...],
    expert_mesh: ExpertMesh | None,
) -> None:
    """FSDP2 over the layers `names`, the rest of the model, and the experts over the ranks that hold the same ones."""
    apart, policy = [weight for expert in experts for weight in expert.weights], job.precision.policy
    plan = shard_layers(
        model,
        find_layers(model, names),
        mesh,
        options=job.fsdp,
        mp_policy=policy,
        apart=apart,
        keep_gathered=hasattr(model, STAGE_MARK),
    )
    if expert_mesh is not None:
        shard_experts(experts, expert_mesh, mp_policy=policy, options=job.fsdp)
        chain_prefetch(model, plan, job.fsdp, [expert.module for expert in experts])
        guard_units(model, [(expert.module, expert.fqn) for expert in experts], mesh_groups(expert_mesh.fsdp))
    guard_shards(model)
    if job.precision.matmuls == "fp8-gather":
        scale_before_forward(model)


def _on_ranks(job: Job, mesh: DeviceMesh | None) -> tuple[Job, DeviceMesh | None]:
    """Return the job with the sizes of its ranks, and its mesh; None for ranks that train by themselves.

    Raises:
        ValueError: a mesh, a number of ranks or a device that is not there, or sizes that do not divide the ranks.
    """
    ranks = world_size()
    if job.world_size not in (None, ranks):
        raise ValueError(f"world_size is {job.world_size}, but this job has {ranks} rank(s). Leave world_size out.")
    if job.device is not None:
        checked_device(job.device)
    job = replace(job, world_size=ranks) if mesh is None else _sized_by(job, mesh)
    if job.is_single:
        if mesh is not None and ranks > 1:
            raise ValueError("strategy='single' uses no process group, but a mesh was given; use 'fsdp2' or 'ddp'.")
        if ranks == 1 and not isinstance(job.strategy, Single):
            word = type(job.strategy).__name__.lower()
            say_once(f"strategy={word!r} with one rank: training on a single device, without a process group.")
        elif ranks > 1 and job.pp.size == 1:
            warn_once(f"strategy='single' in a job of {ranks} ranks: every rank trains a model of its own.")
        if job.pp.size == 1:
            return job, None
    if job.tp.plan is not None and job.tp.size == 1:
        warn_once("TensorParallel.plan was given, and tp is one rank: no weight is split.")
    if job.ep.plan is not None and job.ep.size == 1:
        warn_once("ExpertParallel.plan was given, and ep is one rank: no experts are split.")
    if mesh is None:
        sizes = {"pp": job.pp.size, "dp_replicate": job.dp_replicate, "cp": job.cp.size, "tp": job.tp.size}
        if isinstance(job.strategy, DDP):
            sizes["dp_replicate"] = 1  # one flat group
        kind = None if job.device is None else job.device.type
        mesh = build_mesh(
            **sizes, device_type=kind, one_rank=isinstance(job.strategy, FSDP2) and job.strategy.on_one_rank
        )
    return job, mesh


def _sized_by(job: Job, mesh: DeviceMesh) -> Job:
    """Return `job` with the sizes of `mesh`, which must be those that it has where it has any."""
    sizes = {"dp_replicate": job.dp_replicate, "cp": job.cp.size, "tp": job.tp.size}
    if job.pp.size > 1:
        sizes["pp"] = job.pp.size
    check_sizes(mesh, sizes)
    outside = 1 if job.pp.size > 1 else axis_size(mesh, "pp")  # the caller's own stages
    return replace(
        job,
        dp_replicate=axis_size(mesh, "dp_replicate"),
        tp=replace(job.tp, size=axis_size(mesh, "tp")),
        cp=replace(job.cp, size=axis_size(mesh, "cp")),
        world_size=mesh.size() // outside,
    )


def _comes_in_split(model: object) -> bool:
    """Return whether transformers has split and sharded `model`, by its `DistributedConfig`."""
    decided = getattr(getattr(model, "config", None), "distributed_config", None)
    return decided is not None and isinstance(model, FSDPModule) and not hasattr(model, _MARK)


# Fields of a job that a model which comes in split has decided already.
_DECIDED = ("strategy", "dp_replicate", "tp", "cp", "ep", "pp", "precision", "offload", "step", "device")


def _checkpoint_as_it_came(model: nn.Module, job: Job, mesh: DeviceMesh | None, sample_input: object) -> nn.Module:
    """Checkpointing, loss and compilation for a model that is sharded; its shards and units stay as they are."""
    differing = [name for name in _DECIDED if getattr(job, name) != getattr(Job(), name)]
    if differing or mesh is not None:
        name = differing[0] if differing else "mesh"
        wanted = job.words().get(name, getattr(job, name)) if differing else mesh
        raise ValueError(
            f"{name} is {wanted}, and this {type(model).__name__.removeprefix('FSDP')} was split and sharded by "
            "transformers by its distributed_config, and stays so. Set it there, or load the model without one."
        )
    model = checkpoint(model, replace(job, world_size=world_size()), sample_input)
    if job.compile is not None:
        compile_layers(model, job.compile)
    setattr(model, _MARK, True)
    guard_shards(model)
    return model


def _log_steps(model: nn.Module) -> None:
    for sentence in sentences(model):
        say_once(sentence)


def is_parallelized(model: nn.Module) -> bool:
    """Return whether `parallelize` returned `model`."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    return hasattr(model, _MARK) or hasattr(inner, _MARK)


def _refuse_parallelized(model: nn.Module) -> None:
    if isinstance(model, FSDPModule) and not hasattr(model, _MARK):  # parts may be: see `sharded_by_caller`
        raise ValueError(
            "The model is sharded already, by fully_shard. Leave that out; or keep it, and use "
            "nemo_like.apply_activation_checkpointing in the place of parallelize."
        )
    for name, module in model.named_modules():
        if hasattr(module, _MARK) or isinstance(module, DistributedDataParallel):
            raise ValueError(
                f"{name or 'The model'} is parallelized already; call parallelize once, on a freshly built model."
            )


def _check_whole_model(model: nn.Module, mesh: DeviceMesh | None, job: Job) -> None:
    """For a model that every rank holds whole."""
    if theirs := sharded_by_caller(model):
        name = next(name for name, module in model.named_modules() if module is theirs[0])
        raise ValueError(
            f"{name} is already sharded with fully_shard; only strategy='fsdp2' on several ranks supports partly sharded "
            "models. Use that, or leave that part whole."
        )
    if isinstance(job.strategy, FSDP2):
        check_reshard(job.strategy, 1)
    check_autocast(model, job.param_dtype)
    if mesh is not None and not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            "strategy='ddp' averages the gradients of parameters, and no parameter of this model trains. Put the ones "
            "to train into the model, or use strategy='single'."
        )
    if mesh is not None and any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise ValueError(
            "strategy='ddp' needs a model with weights, and this one is on the meta device: build it on the CPU, or use "
            "strategy='fsdp2' and materialize() afterwards."
        )


def _replicate(model: nn.Module, mesh: DeviceMesh | None, job: Job, place: torch.device) -> nn.Module:
    """Put the whole model on this rank's device, under autocast; with a mesh, inside DistributedDataParallel."""
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        ask_for_weights(model)
    else:
        model.to(place)
    precision, options = job.precision, job.ddp
    Autocast(model, place.type, precision.dtypes["param_dtype"], precision.dtypes["output_dtype"]).put()
    if mesh is None or options is None:
        return model
    if precision.reduce_dtype not in (None, torch.float32):
        warn_once(f"reduce_dtype={precision.reduce_dtype} was asked for; 'ddp' reduces gradients in their own dtype.")
    refuse_to_train(model, model.parameters())
    refuse_new_parameters(model, lambda: ())
    # The block of a list of experts calls those that have tokens, which are others on each rank.
    listed = any(is_list_of_experts(name, module) for name, module in bare_modules(model))
    return DistributedDataParallel(
        model,
        device_ids=[place.index] if place.type == "cuda" else None,
        # One flat group: a mesh of several data-parallel axes has none, and 'ddp' means all ranks.
        process_group=mesh.get_group() if mesh.ndim == 1 else None,
        find_unused_parameters=options.find_unused_parameters or listed,
        bucket_cap_mb=options.bucket_cap_mb,  # None: torch's default
        gradient_as_bucket_view=options.gradient_as_bucket_view,
    )
