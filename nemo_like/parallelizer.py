"""`parallelize`: one call from a bare model to a sharded, checkpointed, compiled one.

The order, always: find the layers → tensor, context and expert parallel → activation checkpointing and host offloading →
loss → per-layer compile → `fully_shard` on each layer, then on the root. Everything is checked before the first change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

from nemo_like.activation_checkpointing.apply import apply_specs, check_specs
from nemo_like.activation_checkpointing.keep_routing import keep_routing
from nemo_like.compile import compile_layers, parse_compile
from nemo_like.distributed.agreement import check_agreement, compare_batches
from nemo_like.distributed.context_parallel import apply_context_parallel, check_context_parallel
from nemo_like.distributed.documents import keep_documents_apart
from nemo_like.distributed.expert_parallel import (
    Experts,
    check_experts,
    make_expert_mesh,
    reduce_idle_experts,
    shard_experts,
    split_experts,
)
from nemo_like.distributed.launch import checked_device, local_device, world_size
from nemo_like.distributed.mesh import axis_size, build_mesh, check_sizes
from nemo_like.distributed.pipeline.cut import STAGE_MARK, call_of
from nemo_like.distributed.same_weights import start_from_the_same_weights
from nemo_like.distributed.shard import check_sharding, shard_layers
from nemo_like.distributed.state_dict import refuse_to_save_shards
from nemo_like.distributed.tensor_parallel import (
    apply_tensor_parallel,
    check_packed_weights,
    cut_outside_of_regions,
)
from nemo_like.distributed.units import sharded_by_caller
from nemo_like.float8 import check_float8, effective_matmuls, float8_linears, scale_before_forward
from nemo_like.layers import find_layers
from nemo_like.log import is_rank_zero, say_once, warn_once
from nemo_like.losses.model_loss import check_head, chunk_model_loss
from nemo_like.module_tree import bare, check_model
from nemo_like.options import (
    DDP,
    FSDP2,
    ChunkedLoss,
    ContextParallel,
    ExpertParallel,
    MemoryBudget,
    OffloadConfig,
    PipelineParallel,
    Precision,
    StepSpec,
    TensorParallel,
    parse_strategy,
)
from nemo_like.options.words import check_whole, parse_dtype
from nemo_like.pipelined import parallelize_pipeline
from nemo_like.planning.first_step import watch_first_step
from nemo_like.planning.larger_batch import size_watch, warn_of_larger_batches
from nemo_like.planning.plan import Plan
from nemo_like.planning.tensor_twin import check_tensor_budget
from nemo_like.planning.trial import try_context_parallel, try_tensor_parallel
from nemo_like.precision import autocast_forward, check_autocast
from nemo_like.resolve import Asked, layers_for, planned, read_ac, resolve

_MARK = "_nemo_like_parallelized"


def apply_activation_checkpointing(
    model: nn.Module,
    ac: Any = "selective",
    scope: str | Iterable[str] = "all",
    compile: bool = False,
    *,
    layers: Iterable[str | nn.Module] | None = None,
    loss: str | ChunkedLoss = "model",
    sample_input: Any = None,
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
    asked = read_ac(ac)
    found, chosen = layers_for(model, asked, scope, layers)
    compiled = parse_compile(compile) is not None
    _check_compile(compiled, asked)
    in_chunks = ChunkedLoss.of(loss)
    if in_chunks is not None:
        check_head(model)
    cast = Precision(parse_dtype("autocast", autocast))
    planning: dict[str, Any] = {} if autocast is None else {"precision": cast, "fsdp": None}
    planning["loss"] = loss
    if isinstance(asked, MemoryBudget):
        asked = planned(model, asked, chosen, sample_input, planning)
    specs = resolve(model, asked, found, chosen, sample_input=sample_input, compile=compiled)
    apply_specs(model, specs, compile=compiled)
    return model if in_chunks is None else chunk_model_loss(model, in_chunks)


def parallelize(
    model: nn.Module,
    strategy: str | FSDP2 | DDP = "fsdp2",
    ac: Any = "selective",
    *,
    mesh: DeviceMesh | None = None,
    dp_replicate: int = 1,
    tp: int | TensorParallel = 1,
    cp: int | ContextParallel = 1,
    ep: int | ExpertParallel = 1,
    pp: int | PipelineParallel = 1,
    ac_scope: str | Iterable[str] = "all",
    layers: Iterable[str | nn.Module] | None = None,
    loss: str | ChunkedLoss = "model",
    precision: str | torch.dtype | Precision | MixedPrecisionPolicy | None = None,
    compile: bool | str = False,
    offload: str | OffloadConfig | None = None,
    sample_input: Any = None,
    optimizer: str | None = None,
    step: StepSpec | None = None,
    planned_tokens: int | None = None,
    device: str | torch.device | None = None,
) -> Any:
    """Make `model` ready to train: shard it, checkpoint its activations, compile its layers. Returns it.

    The model is changed in place and returned; ``ddp`` returns the `DistributedDataParallel` around it. Build the
    optimizer afterwards: sharding replaces the parameters. Where something is replayed, calls with gradients on
    go without a key/value cache (a replay would write it twice), unless layers hand states on through it; the config
    stays as it is. Packed rows (``position_ids`` that restart where there is no mask, ``cu_seqlens``, a mask of document
    numbers) of a Hugging Face model train as their documents one by one, under every ``ac``: no attention over an edge, no
    loss for a document's first token.

    Args:
        model: any Hugging Face or plain PyTorch model, on the CPU, a GPU or the meta device (then call
            `nemo_like.distributed.materialize` afterwards). One that transformers has split and sharded, by a
            ``distributed_config``, stays so, and is checkpointed.
        strategy: ``"fsdp2"``, ``"ddp"`` or ``"single"``; or `FSDP2(...)` with what only it has (resharding, prefetch,
            CPU offload, frozen towers), or `DDP(...)` (unused parameters, bucket size). With one rank all mean
            ``"single"``: no process group.
        ac: ``None``/``False``/``"none"``, ``True``/``"full"`` (replay whole layers), ``"selective"`` (keep the
            expensive ops), ``"submodule"``, ``"sequential"`` (replay segments of layers); ``"40GiB"`` (the best plan
            for that peak per rank), ``"50%"`` (of the activation bytes of ``"none"``), ``"auto"`` (this device's memory)
            or a `MemoryBudget`, all with
            `sample_input`; a `Plan`, a `CheckpointConfig`, or a policy object (`SelectivePolicy`, `TorchPolicy`).
        mesh: a mesh that a framework built, with axes out of ``dp_replicate``, ``dp_shard``, ``cp``, ``tp``; default:
            made from the launcher's environment.
        dp_replicate: FSDP2: replicas of the sharded model (HSDP); must divide the number of ranks.
        tp: FSDP2: ranks that each large weight is split over (must divide the number of ranks), or `TensorParallel(...)`
            with a plan, sequence parallelism and a loss that stays split by vocabulary.
        cp: FSDP2: ranks that each sequence is split over, or `ContextParallel(...)` with the method. Every rank of a ``cp``
            group is called with the same whole sequences; the loss is that of the whole, the same on each, and other
            outputs are this rank's part (`nemo_like.distributed.unshard_sequence`).
        ep: FSDP2: ranks that each layer's experts are split over (must divide ``dp_shard x cp x tp``, and the number of
            experts), or `ExpertParallel(...)` with a plan. Tokens travel to the experts and back.
        pp: ranks that the layers are dealt out to, or `PipelineParallel(...)` with schedule, microbatches and balance; needs
            `sample_input`, one microbatch. A `Pipeline` is returned then, whose ``step(**batch)`` takes whole batches.
        ac_scope: the groups of layers to checkpoint: ``"all"``, ``"language"``, ``"vision"``, ``"audio"``,
            ``"multimodal"`` or a list. A frozen layer is replayed in calls with an input that needs a gradient.
        layers: names (globs) or modules of the layers, instead of the layers that are found.
        loss: ``"model"``, or ``"chunked"`` (`ChunkedLoss(...)` with sizes): where the model computes a cross entropy of its
            head's output from ``labels`` in training mode, it does so a chunk of tokens at a time, and
            ``output.logits`` is None; where it does something else with the logits, they are made, and this is logged.
        precision: the dtype to compute in (``"bf16"``), ``"fp8"`` (bfloat16, with the matmuls of the layers' linears in
            float8, by torchao; also ``"fp8-rowwise"``, ``"fp8-gather"``),
            a `Precision` (also for reduction and outputs) or torch's `MixedPrecisionPolicy`. FSDP2
            casts parameters; the other strategies use autocast.
        compile: ``True``/``"inductor"`` or ``"aot_eager"``: compile each layer in place.
        offload: what waits in host memory between forward and backward: ``"boundary"`` (layer inputs), ``"saved"`` (these
            and what checkpointing keeps), ``"all"``, or an `OffloadConfig`.
        sample_input: what one step of one rank gives to the model, as keywords, positions or one tensor; needed by
            budgets and ``pp``, used by ``"sequential"`` and by a `CheckpointConfig` that profiles first. Under ``tp`` and
            ``cp`` a copy without weights is run on it (of a transformers model also on its own dummy inputs), so that what
            fails once it is split is refused here.
        optimizer: the optimizer that a budget counts: ``"adamw"`` (default), ``"adamw-8bit"``, ``"sgd"``, ...
        step: what else a budget counts of the training loop (`StepSpec`: microbatches, a loss outside of the model, whether
            the output is dropped before backward); default: ``out = model(**batch); out.loss.backward()``, then one
            step of the optimizer.
        planned_tokens: tokens of the largest microbatch of one rank that memory was planned for, as `nemo-like fit` says it
            where there is no plan to know it: a larger batch is trained on, and a warning says so once.
        device: where the model goes; default: this rank's accelerator if there is one, else the CPU.

    Raises:
        ValueError, TypeError: any bad argument, with the value, the reason and the way out; a model without repeated
            layers; a model that was parallelized or checkpointed before; a budget that cannot be met (`BudgetError`).
            The model is unchanged then.
    """
    given = dict(locals())
    check_model(model)
    check_agreement(model, given)
    if _comes_in_split(model):
        return _checkpoint_as_it_came(model, given)
    _refuse_parallelized(model)
    check_whole("dp_replicate", dp_replicate, 1, "ranks")
    stages = PipelineParallel.of(pp)
    if stages.size > 1:
        others = {name: value for name, value in given.items() if name not in ("model", "pp")}
        return parallelize_pipeline(model, stages, others, parallelize)
    word, fsdp, ddp = parse_strategy(strategy)
    tensor, cast, place = TensorParallel.of(tp), Precision.of(precision), OffloadConfig.of(offload)
    context = ContextParallel.of(cp)
    if word != "fsdp2" and context.size > 1:
        raise ValueError(f"cp splits sequences over ranks beside FSDP2; strategy {word!r} has none. Use 'fsdp2'.")
    expert = ExpertParallel.of(ep)
    for name, asked_for in (("tp", tensor != TensorParallel()), ("ep", expert != ExpertParallel())):
        if word != "fsdp2" and asked_for:
            raise ValueError(
                f"{name} splits weights over ranks beside FSDP2; strategy {word!r} keeps them whole. Use 'fsdp2'."
            )
    asked = read_ac(ac)
    found, chosen = layers_for(model, asked, ac_scope, layers)
    backend = parse_compile(compile)
    _check_compile(backend is not None, asked)
    _check_float8(cast, {"tp": tensor.size, "ep": expert.size}, fsdp)
    in_chunks = ChunkedLoss.of(loss)
    if in_chunks is not None:
        check_head(model)
    _check_sharded_by_caller(model, word)
    loop = StepSpec.of(step, optimizer)
    size_watch(None, planned_tokens)
    asked_device = None if device is None else checked_device(device)
    sizes = {"dp_replicate": dp_replicate, "tp": tensor.size, "cp": context.size}
    mesh = _mesh(word, mesh, sizes, asked_device, hasattr(model, STAGE_MARK))
    shard_mesh = mesh if word == "fsdp2" else None
    target = asked_device or local_device(None if mesh is None else mesh.device_type)
    experts = _check_expert_parallel(model, shard_mesh, expert, asked)
    split = _check_tensor_parallel(model, shard_mesh, asked, tensor, experts, fsdp)
    context = replace(context, size=axis_size(shard_mesh, "cp"))
    if context.size > 1:
        check_context_parallel(model, context, found, call_of(model))
    if not hasattr(model, STAGE_MARK):  # what stages are cut from was tried
        if context.size > 1:
            try_context_parallel(model, context, found, sample_input)
        if split:
            whole = [each.fqn for each in experts]
            try_tensor_parallel(model, axis_size(shard_mesh, "tp"), tensor, whole, sample_input)
    if shard_mesh is not None:
        check_sharding(model, found, shard_mesh, options=fsdp)
    else:
        _check_whole_model(model, mesh, cast)
    if isinstance(asked, MemoryBudget):
        ddp_ranks = mesh is not None and word == "ddp"
        asked = planned(
            model, asked, chosen, sample_input,
            _planning(shard_mesh, loop, cast, fsdp, loss, place, expert, ddp=ddp_ranks)
            | {
                "cp": context, "tp_plan": tensor.plan, "sequence_parallel": tensor.sequence_parallel,
                "loss_parallel": tensor.loss_parallel,
            },
        )  # fmt: skip
    elif isinstance(asked, Plan):
        asked.check_matmuls(effective_matmuls(cast, sharded=shard_mesh is not None))
    specs = resolve(model, asked, found, chosen, sample_input=sample_input, offload=place, compile=backend is not None)
    check_specs(model, specs, compile=backend is not None)

    # Nothing has been changed up to here.
    start_from_the_same_weights(model, shard_mesh)
    names = [layer.fqn for layer in found]
    if cast.matmuls is not None:
        float8_linears(
            [bare(layer.module) for layer in found], cast.matmuls, target.type, sharded=shard_mesh is not None
        )
    if not hasattr(model, STAGE_MARK):  # a pipeline's stages do it themselves
        compare_batches(model, shard_mesh)
        keep_documents_apart(model)
    if split and shard_mesh is not None:
        apply_tensor_parallel(
            model, shard_mesh["tp"], tensor.plan,
            sequence_parallel=tensor.sequence_parallel, loss_parallel=tensor.loss_parallel,
            whole=[found.fqn for found in experts],
        )  # fmt: skip
    if context.size > 1 and shard_mesh is not None:
        apply_context_parallel(model, shard_mesh["cp"], context, found, call_of(model))
    # Also for a stage without experts: making process groups takes every rank.
    expert_mesh = None if shard_mesh is None or expert.size == 1 else make_expert_mesh(shard_mesh, expert.size)
    if expert_mesh is not None:
        experts = split_experts(model, experts, expert_mesh, expert.dispatch)
        specs = keep_routing(specs, [found.fqn for found in experts])
    if mesh is not None:
        reduce_idle_experts(model, expert.plan)
    apply_specs(model, specs, compile=backend is not None)
    cut_outside_of_regions(model)
    if in_chunks is not None:
        chunk_model_loss(model, in_chunks if in_chunks.compile else replace(in_chunks, compile=backend))
    if backend is not None:
        compile_layers(model, backend, [layer.module for layer in find_layers(model, names)])
    if shard_mesh is not None:
        apart = [] if expert_mesh is None else [weight for found in experts for weight in found.weights]
        shard_layers(model, find_layers(model, names), shard_mesh, options=fsdp, mp_policy=cast.policy, apart=apart)
        if expert_mesh is not None:
            shard_experts(experts, expert_mesh, mp_policy=cast.policy, options=fsdp)
        refuse_to_save_shards(model)
        if cast.matmuls == "fp8-gather":
            scale_before_forward(model)
    else:
        model = _replicate(model, mesh, cast, target, ddp)
    setattr(model, _MARK, True)
    staged = hasattr(model, STAGE_MARK)  # whose plan's peak is that of a rank, with all microbatches in flight
    watch = size_watch(asked if isinstance(asked, Plan) else None, planned_tokens)
    if watch is not None and is_rank_zero() and not staged:
        warn_of_larger_batches(model, watch)
    if isinstance(asked, Plan) and is_rank_zero() and not (staged or fsdp.cpu_offload or place.mode != "none"):
        watch_first_step(model, asked, target)
    return model


def _check_float8(cast: Precision, sizes: Mapping[str, int], fsdp: FSDP2) -> None:
    """Raise where float8 matmuls are asked for beside what was never tried with them, or torchao is not installed."""
    if cast.matmuls is None:
        return
    split = next((f"{name}={size}" for name, size in sizes.items() if size > 1), None)
    if cast.matmuls == "fp8-gather" and fsdp.cpu_offload:
        raise ValueError(
            "precision is 'fp8-gather' beside cpu_offload: shards would be cast to float8 on the host, which was not "
            "tried. Use 'fp8'."
        )
    if split is not None:
        raise ValueError(
            f"precision is {cast.matmuls!r} beside {split}: weights that are split were not tried with float8. Leave one of "
            "the two out, or use precision='bf16'."
        )
    check_float8(cast.matmuls)


def _planning(
    mesh: DeviceMesh | None, step: StepSpec, precision: Precision, fsdp: FSDP2, loss: str | ChunkedLoss,
    offload: OffloadConfig, expert: ExpertParallel, *, ddp: bool,
) -> dict[str, Any]:  # fmt: skip
    """What `plan_for` is to know of the step."""
    return dict(
        mesh=mesh,
        world_size=1 if mesh is None else None,
        step=step,
        precision=precision,
        fsdp=None if mesh is None else fsdp,
        loss=loss,
        offload=offload,
        ddp=ddp,
        ep=expert.size,
        expert_plan=expert.plan,
        imbalance=expert.imbalance,
    )


_AS_THEY_ARE: Mapping[str, Any] = {
    "strategy": "fsdp2", "mesh": None, "dp_replicate": 1, "tp": 1, "cp": 1, "ep": 1, "pp": 1, "precision": None,
    "offload": None, "step": None, "optimizer": None, "device": None,
}  # fmt: skip
"""What a model that comes in split has decided already, at the values that ask for nothing."""


def _comes_in_split(model: Any) -> bool:
    """Whether transformers has split and sharded `model`, as its `DistributedConfig` says."""
    decided = getattr(getattr(model, "config", None), "distributed_config", None)
    return decided is not None and isinstance(model, FSDPModule) and not hasattr(model, _MARK)


def _checkpoint_as_it_came(model: nn.Module, given: Mapping[str, Any]) -> nn.Module:
    """Checkpointing, loss and compilation for a model that is sharded; its shards and units stay as they are."""
    asked = [name for name, default in _AS_THEY_ARE.items() if given[name] != default and given[name] is not default]
    if asked:
        raise ValueError(
            f"{asked[0]} is {given[asked[0]]!r}, and this {type(model).__name__.removeprefix('FSDP')} was split and sharded "
            "by transformers as its distributed_config says, and stays so. Say it there, or load the model without one."
        )
    backend = parse_compile(given["compile"])
    model = apply_activation_checkpointing(
        model, given["ac"], given["ac_scope"], backend is not None,
        layers=given["layers"], loss=given["loss"], sample_input=given["sample_input"],
    )  # fmt: skip
    if backend is not None:
        compile_layers(model, backend)
    setattr(model, _MARK, True)
    refuse_to_save_shards(model)
    return model


def is_parallelized(model: nn.Module) -> bool:
    """Whether `parallelize` returned `model`."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    return hasattr(model, _MARK) or hasattr(inner, _MARK)


def _refuse_parallelized(model: nn.Module) -> None:
    for name, module in model.named_modules():
        sharded = isinstance(module, FSDPModule) and not name  # parts may be: see `sharded_by_caller`
        if sharded or hasattr(module, _MARK) or isinstance(module, DistributedDataParallel):
            raise ValueError(
                f"{name or 'The model'} is parallelized already; call parallelize once, on a freshly built model."
            )


def _check_sharded_by_caller(model: nn.Module, strategy: str) -> None:
    """Raise ValueError where the caller sharded parts of the model, and `strategy` keeps it whole."""
    theirs = sharded_by_caller(model)
    if theirs and strategy != "fsdp2":
        name = next(name for name, module in model.named_modules() if module is theirs[0])
        raise ValueError(
            f"strategy is {strategy!r}, and {name} is sharded by fully_shard already, which only 'fsdp2' goes on from: "
            "use FSDP2, or leave that part whole."
        )


def _check_compile(compiled: bool, asked: Asked) -> None:
    if compiled and getattr(asked, "use_reentrant", False):
        raise ValueError("CheckpointConfig.use_reentrant is True and compile is on: torch cannot compile it. Drop one.")


def _check_tensor_parallel(
    model: nn.Module, mesh: DeviceMesh | None, asked: Asked, tensor: TensorParallel, experts: Iterable[Experts],
    fsdp: FSDP2,
) -> bool:  # fmt: skip
    """Whether weights are split at all; `experts`: those that are split otherwise."""
    split = axis_size(mesh, "tp") > 1
    whole = [found.fqn for found in experts]
    if split and mesh is not None:
        check_packed_weights(model, mesh, tensor.plan, whole, fsdp.reshard_after_forward)
    if split and isinstance(asked, MemoryBudget):
        check_tensor_budget(model, axis_size(mesh, "tp"), tensor, asked, whole)
    for name in ("sequence_parallel", "loss_parallel"):
        if getattr(tensor, name) and not split:
            raise ValueError(
                f"{name}=True splits tensors over the ranks of tp, and there is one; TensorParallel(2, ...)."
            )
    if tensor.plan is not None and not split:
        warn_once("TensorParallel.plan was given, and tp is one rank: no weight is split.")
    return split


def _check_expert_parallel(
    model: nn.Module, mesh: DeviceMesh | None, expert: ExpertParallel, asked: Asked
) -> tuple[Experts, ...]:
    """The modules whose experts are to be split."""
    if mesh is None or expert.size == 1:
        if expert.size > 1:
            raise ValueError(f"ep is {expert.size}, but this job has one rank; start more with torchrun.")
        if expert.plan is not None:
            warn_once("ExpertParallel.plan was given, and ep is one rank: no experts are split.")
        return ()
    if isinstance(asked, MemoryBudget) and expert.dispatch != ExpertParallel().dispatch:
        raise ValueError(
            f"ac is {asked} beside ExpertParallel.dispatch={expert.dispatch!r}: plans know all-to-all alone. Use a mode "
            "such as 'selective', or dispatch='all_to_all'."
        )
    return check_experts(model, mesh, expert)


def _check_whole_model(model: nn.Module, mesh: DeviceMesh | None, precision: Precision) -> None:
    """For a model that every rank holds whole."""
    check_autocast(model, precision.dtypes["param_dtype"])
    if mesh is not None and not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            "strategy='ddp' averages the gradients of parameters, and no parameter of this model trains. Put what trains "
            "into the model, or use strategy='single'."
        )
    if mesh is not None and any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise ValueError(
            "strategy='ddp' needs a model with weights, and this one is on the meta device: build it on the CPU, or use "
            "strategy='fsdp2' and materialize() afterwards."
        )


def _mesh(
    strategy: str, mesh: DeviceMesh | None, sizes: Mapping[str, int], device: torch.device | None, is_stage: bool
) -> DeviceMesh | None:
    """The mesh to work on; None for one rank, where no process group is made or used. `sizes`: ranks by axis."""
    ranks, dp_replicate = world_size(), sizes["dp_replicate"]
    if mesh is not None:
        check_sizes(mesh, sizes)
    if ranks == 1:
        for name, size in sizes.items():
            if size != 1:
                raise ValueError(f"{name} is {size}, but this job has one rank; start more with torchrun.")
        if strategy != "single":
            say_once(f"strategy={strategy!r} with one rank: training on a single device, without a process group.")
        return None
    if strategy == "single":
        if mesh is not None:
            raise ValueError("strategy='single' uses no process group, but a mesh was given; use 'fsdp2' or 'ddp'.")
        if dp_replicate != 1:
            raise ValueError(f"dp_replicate is {dp_replicate!r}, and strategy='single' has no replicas; use 'fsdp2'.")
        if not is_stage:
            warn_once(f"strategy='single' in a job of {ranks} ranks: every rank trains a model of its own.")
        return None
    if strategy == "ddp" and dp_replicate not in (1, ranks):
        raise ValueError(f"dp_replicate is {dp_replicate}, but 'ddp' replicates over all {ranks} ranks; use 'fsdp2'.")
    device_type = None if device is None else device.type
    return mesh if mesh is not None else build_mesh(**sizes, device_type=device_type)


def _replicate(
    model: nn.Module, mesh: DeviceMesh | None, precision: Precision, place: torch.device, options: DDP
) -> nn.Module:
    """Put the whole model on this rank's device, under autocast; with a mesh, inside DistributedDataParallel."""
    if not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        model.to(place)
    autocast_forward(model, place.type, precision.dtypes["param_dtype"], precision.dtypes["output_dtype"])
    if mesh is None:
        return model
    if precision.reduce_dtype not in (None, torch.float32):
        warn_once(f"reduce_dtype={precision.reduce_dtype} was asked for; 'ddp' reduces gradients in their own dtype.")
    # One flat group: a mesh of several data-parallel axes has none, and 'ddp' means all ranks.
    group = mesh.get_group() if mesh.ndim == 1 else None
    return DistributedDataParallel(
        model,
        device_ids=[place.index] if place.type == "cuda" else None,
        process_group=group,
        find_unused_parameters=options.find_unused_parameters,
        bucket_cap_mb=options.bucket_cap_mb,  # None: torch's default
        gradient_as_bucket_view=True,  # or every gradient would be held twice
    )
