"""`parallelize` with ``pp=``: the model is cut into stages, and each stage made ready to train as a model of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from nemo_like.activation_checkpointing import kv_sharing
from nemo_like.compile import parse_compile
from nemo_like.distributed.context_parallel import check_context_parallel
from nemo_like.distributed.documents import packed_calls
from nemo_like.distributed.expert_parallel import find_experts
from nemo_like.distributed.launch import checked_device, local_device
from nemo_like.distributed.mesh import axis_size, build_mesh, check_sizes
from nemo_like.distributed.pipeline import Pipeline
from nemo_like.distributed.pipeline.cut import STAGE_MARK, StageForward, cut, loss_of
from nemo_like.distributed.pipeline.dealing import StageParts, StageSlice, counts_of, slices
from nemo_like.distributed.pipeline.pipeline import Stage
from nemo_like.distributed.pipeline.schedules import kind_of, stages_of
from nemo_like.distributed.same_weights import start_from_the_same_weights
from nemo_like.log import is_rank_zero, logger
from nemo_like.losses.model_loss import check_head
from nemo_like.options import (
    FSDP2,
    CheckpointConfig,
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
from nemo_like.planning.larger_batch import size_watch
from nemo_like.planning.plan import Plan
from nemo_like.planning.planner import Setup
from nemo_like.planning.split_parts import SplitParts
from nemo_like.planning.stage_parts import check_stages, stage_parts
from nemo_like.planning.stage_plans import balance_for_memory, plan_pipeline
from nemo_like.planning.tensor_twin import check_tensor_budget
from nemo_like.planning.trial import try_context_parallel, try_tensor_parallel
from nemo_like.resolve import layers_for, read_ac
from nemo_like.torch_compat import splits_compiled_backward

Parallelize = Callable[..., nn.Module]


def parallelize_pipeline(
    model: nn.Module, pp: PipelineParallel, options: Mapping[str, Any], parallelize: Parallelize
) -> Pipeline:
    """Cut `model` into stages and call `parallelize` with the other `options` on each that this rank holds.

    Args:
        model: bare, the same on every rank; it is not changed, and shares its layers with the stages.
        pp: the cut and the schedule.
        options: `parallelize`'s arguments but for the model and ``pp``.
        parallelize: what makes one stage ready.

    Raises:
        ValueError: a model that cannot be cut, or options that a pipeline cannot have. The model is unchanged then.
    """
    word, fsdp, _ = parse_strategy(options["strategy"])
    if word == "ddp":
        raise ValueError(
            "strategy='ddp' beside pp: a stage is replicated by FSDP2(...) with dp_replicate. Use 'fsdp2'."
        )
    sample = options["sample_input"]
    if sample is None:
        raise ValueError(
            "pp needs sample_input=, one microbatch as the model is called with it ({'input_ids': ..., 'labels': ...}): it "
            "shows which parameters run before and after the layers, and the shape of what stages send."
        )
    size_watch(None, options["planned_tokens"])
    asked = read_ac(options["ac"])
    found, _ = layers_for(model, asked, options["ac_scope"], options["layers"])
    _refuse(model, found, pp, asked)
    precision = Precision.of(options["precision"])
    if isinstance(asked, Plan):  # before stages are cut
        asked.check_matmuls(precision.matmuls)
    if options["compile"] and kind_of(pp).splits_backward and not splits_compiled_backward():
        raise ValueError(
            f"compile is {options['compile']!r} beside the schedule {pp.schedule!r}, which cuts backward in two: torch "
            f"{torch.__version__} cannot do that to compiled layers (2.13 can). Use 'interleaved_1f1b', or compile=False."
        )
    tensor = TensorParallel.of(options["tp"])
    context = ContextParallel.of(options["cp"])
    if word != "fsdp2" and context.size > 1:
        raise ValueError(f"cp splits sequences over ranks beside FSDP2; strategy {word!r} has none. Use 'fsdp2'.")
    sizes = {"pp": pp.size, "dp_replicate": options["dp_replicate"], "tp": tensor.size, "cp": context.size}
    mesh = _mesh(options["mesh"], sizes, options["device"])
    context = replace(context, size=axis_size(mesh, "cp"))
    if context.size > 1:
        _refuse_beside_split(pp, f"cp is {context.size}", "what they send is not cut along the sequence")
        check_context_parallel(model, context, found)
        try_context_parallel(model, context, found, sample)
    shards = any(axis_size(mesh, name) > 1 for name in ("dp_replicate", "dp_shard", "cp", "tp"))
    in_chunks = ChunkedLoss.of(options["loss"])
    if in_chunks is not None:
        check_head(model)
        in_chunks = in_chunks if in_chunks.compile else replace(in_chunks, compile=parse_compile(options["compile"]))
    dtype = precision.dtypes["param_dtype"]
    lowered = {"dtype" if shards else "autocast": dtype} if dtype is not None else {}
    parts: StageParts | SplitParts
    if pp.split is None:
        parts = stage_parts(model, found, sample, **lowered)
    else:
        parts = SplitParts(model, pp.split, pp.stages, found, sample, **lowered)
    expert = ExpertParallel.of(options["ep"])
    tp = axis_size(mesh, "tp")
    if tp > 1:
        whole = [each.fqn for each in find_experts(model, expert.plan)] if expert.size > 1 else []
        try_tensor_parallel(model, tp, tensor, whole, sample)
    rest = {
        name: value
        for name, value in options.items()
        if name not in ("mesh", "loss", "sample_input", "tp", "cp", "step", "planned_tokens")
    }
    setup = Setup(
        shard_ranks=axis_size(mesh, "dp_shard") * context.size, replicas=axis_size(mesh, "dp_replicate"),
        step=StepSpec.of(options["step"], options["optimizer"]),
        precision=precision, fsdp=FSDP2(**{**vars(fsdp), "reshard_after_forward": False}) if shards else None,
        tp=tensor.size, tp_plan=tensor.plan, ep=expert.size, expert_plan=expert.plan, imbalance=expert.imbalance,
        cp=context, loss=in_chunks, offload=OffloadConfig.of(options["offload"]),
    )  # fmt: skip
    pp, rest["ac"] = _planned(model, pp, asked, setup, options)
    if isinstance(parts, SplitParts):
        all_slices = parts.slices
    else:
        all_slices = slices(counts_of(parts, pp))
        check_stages(model, parts, all_slices, sample, **lowered)
    device = checked_device(options["device"]) if options["device"] is not None else local_device(mesh.device_type)

    # Nothing has been changed up to here.
    start_from_the_same_weights(model, mesh)
    if shards:
        fsdp = FSDP2(**{**vars(fsdp), "reshard_after_forward": _reshard(fsdp)})
        rest |= {"mesh": mesh[tuple(n for n in mesh.mesh_dim_names or () if n != "pp")], "strategy": fsdp}
        rest |= {"tp": tensor, "cp": context}
    else:
        rest |= {"strategy": "single", "dp_replicate": 1}
    stages = _stages(
        model, parts, [all_slices[index] for index in stages_of(pp, mesh.get_local_rank("pp"))], rest, in_chunks, device,
        lowered.get("dtype"), parallelize,
    )  # fmt: skip
    if is_rank_zero():
        counts = [len(piece.layers) for piece in all_slices]
        logger.info(f"Pipeline of {len(counts)} stages on {pp.size} ranks ({pp.schedule}): {counts} layers each.")
    pipeline = Pipeline(stages, parts, pp, mesh, device)
    watch = size_watch(rest["ac"] if isinstance(rest["ac"], Plan) else None, options["planned_tokens"])
    if watch is not None and is_rank_zero():
        pipeline.sees = watch.see
    return pipeline


def _stages(
    model: nn.Module, parts: StageParts | SplitParts, own: Sequence[StageSlice], rest: Mapping[str, Any],
    in_chunks: ChunkedLoss | None, device: torch.device, dtype: torch.dtype | None, parallelize: Parallelize,
) -> list[Stage]:  # fmt: skip
    """This rank's `own` stages, each made ready by `parallelize` with the options `rest`; `dtype`: as for `cut`."""
    stages = []
    packed = packed_calls(model)  # of the whole: a stage does not see what layers of other stages mix
    for piece in own:
        if isinstance(parts, SplitParts):
            tree, received = parts.take(piece.index)
            packed = packed_calls(tree)
        else:
            tree, received = cut(model, parts, piece, device, dtype)
        forward = StageForward(tree, received, piece, loss_of, packed, in_chunks)
        tree.forward = forward
        setattr(tree, STAGE_MARK, True)
        names = [parts.layers[i] for i in piece.layers]
        options = {**rest, "layers": names, "ac_scope": "all"}
        if isinstance(rest["ac"], Plan):
            options["ac"] = rest["ac"].only(names)
        stages.append(Stage(piece, parallelize(tree, **options), forward))
    if isinstance(parts, SplitParts):
        parts.forget_weights()
    return stages


def _refuse_beside_split(pp: PipelineParallel, asked: str, reason: str) -> None:
    if pp.split is not None:
        raise ValueError(
            f"{asked} beside split=, whose stages are the caller's own: {reason}. Leave one of the two out."
        )


def _refuse(model: nn.Module, found: Any, pp: PipelineParallel, asked: Any) -> None:
    """What no pipeline can have, and what none has beside ``split=``."""
    kind = type(model).__name__
    if isinstance(asked, MemoryBudget | Plan):
        word = asked if isinstance(asked, MemoryBudget) else "a plan"
        _refuse_beside_split(pp, f"ac is {word}", "no plan is made for those; a mode such as 'selective' goes")
    groups = {layer.group for layer in found}
    if len(groups) > 1 and pp.split is None:
        raise ValueError(
            f"pp cannot cut {kind}: it has layers in {len(groups)} groups ({', '.join(sorted(groups))}), and a pipeline is "
            "one chain. Name one group's with layers=, say with PipelineParallel(split=...) what each stage is, or use "
            "strategy='fsdp2' with tp or cp."
        )
    if kv_sharing.has_kv_sharing(model):
        raise ValueError(
            f"pp cannot cut {kind}: its layers share keys and values, which stay on one stage. Use fsdp2 or tp."
        )
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False) and pp.split is None:
        raise ValueError(
            f"pp cannot cut {kind}: encoder and decoder are two chains. Say with PipelineParallel(split=...) what each "
            "stage is, or use strategy='fsdp2' with tp."
        )
    if getattr(config, "output_router_logits", False):
        raise ValueError(
            f"pp cannot cut {kind} with output_router_logits=True: the balance loss is made of all layers' routers, which "
            "the last stage has not got. Set config.output_router_logits=False."
        )


def _planned(
    model: nn.Module, pp: PipelineParallel, asked: Any, setup: Setup, options: Mapping[str, Any]
) -> tuple[PipelineParallel, Any]:
    """`pp` with what a plan decides of it, and what goes to each stage as ``ac=``: a budget as its plan."""
    if isinstance(asked, MemoryBudget):
        if setup.tp > 1:
            split = find_experts(model, setup.expert_plan) if setup.ep > 1 else ()
            whole = [experts.fqn for experts in split]
            tensor = TensorParallel.of(options["tp"])
            for name in ("sequence_parallel", "loss_parallel"):
                if getattr(tensor, name):
                    raise ValueError(
                        f"ac is {asked} beside {name}=True and pp, which no plan is made for. Use a mode: ac='selective'."
                    )
            check_tensor_budget(model, setup.tp, tensor, asked, whole)
        asked = plan_pipeline(model, asked, options["sample_input"], pp, setup=setup, layers=options["layers"])
    elif pp.balance == "memory":
        mode = asked.mode if isinstance(asked, CheckpointConfig) and asked.mode in ("none", "selective") else "full"
        counts = balance_for_memory(model, options["sample_input"], pp, setup, mode, options["layers"])
        return replace(pp, balance=tuple(counts)), options["ac"]
    if not isinstance(asked, Plan):
        return pp, options["ac"]
    taken = {name: asked.step[name] for name in ("replay", "balance") if name in asked.step}
    if pp.replay == "auto" and "replay" in taken:
        pp = replace(pp, replay=taken["replay"])
    if pp.balance == "memory" and "balance" in taken:
        pp = replace(pp, balance=tuple(taken["balance"]))
    return pp, asked


def _mesh(mesh: DeviceMesh | None, sizes: Mapping[str, int], device: Any) -> DeviceMesh:
    if mesh is None:
        kind = None if device is None else checked_device(device).type
        return build_mesh(**sizes, device_type=kind)
    check_sizes(mesh, sizes)
    return mesh


def _reshard(fsdp: FSDP2) -> bool | int:
    """Gathered once per step, not per microbatch, unless the caller says otherwise."""
    return False if fsdp.reshard_after_forward is None else fsdp.reshard_after_forward
