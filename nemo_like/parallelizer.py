"""`parallelize`: one call from a bare model to a sharded, checkpointed, compiled one.

The order, always: find the layers → tensor parallel → activation checkpointing → per-layer compile → offloading →
`fully_shard` on each layer, then on the root. Everything is checked before the first change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy
from torch.nn.parallel import DistributedDataParallel

from nemo_like.compile import compile_layers, parse_compile
from nemo_like.distributed.agreement import check_agreement
from nemo_like.distributed.launch import local_device, world_size
from nemo_like.distributed.mesh import axis_size, build_mesh, validate_mesh
from nemo_like.distributed.same_weights import start_from_the_same_weights
from nemo_like.distributed.shard import check_options, check_sharding, shard_layers
from nemo_like.distributed.tensor_parallel import apply_tensor_parallel
from nemo_like.layers import find_layers
from nemo_like.log import say_once, warn_once
from nemo_like.offload import apply_offloading, parse_offload
from nemo_like.options import STRATEGIES, OffloadConfig, did_you_mean, normalise
from nemo_like.planning.sharding import OPTIMIZERS
from nemo_like.precision import autocast_forward, check_autocast, read_precision
from nemo_like.request import CheckpointRequest, read_checkpointing

_MARK = "_nemo_like_parallelized"
_FSDP2_DEFAULTS = dict(reshard_after_forward=None, forward_prefetch=1, backward_prefetch=1, frozen_sharding="root")


def apply_activation_checkpointing(
    model: nn.Module,
    ac: Any = "selective",
    scope: str | Iterable[str] = "all",
    compile: bool = False,
    *,
    layers: Iterable[str | nn.Module] | None = None,
    sample_input: Any = None,
) -> nn.Module:
    """Checkpoint the repeated layers of `model` in place, and nothing else: for callers who shard later themselves.

    Args:
        model: any Hugging Face or plain PyTorch model; changed in place and returned.
        ac, layers, sample_input: as for `parallelize`. A budget counts the ranks of the process group, if there is one.
        scope: `parallelize`'s ``ac_scope``.
        compile: the layers will be compiled.

    Raises:
        ValueError, TypeError: as `parallelize`. The model is unchanged then.
    """
    request = read_checkpointing(model, ac, scope, layers, sample_input)
    _check_compile(compile, request)
    request.settle(model).carry_out(model, compile=compile)
    return model


def parallelize(
    model: nn.Module,
    strategy: str = "fsdp2",
    ac: Any = "selective",
    *,
    mesh: DeviceMesh | None = None,
    ac_scope: str | Iterable[str] = "all",
    compile: bool | str = False,
    mp_policy: MixedPrecisionPolicy | None = None,
    param_dtype: torch.dtype | str | None = None,
    reduce_dtype: torch.dtype | str | None = None,
    output_dtype: torch.dtype | str | None = None,
    cpu_offload: bool = False,
    reshard_after_forward: bool | int | None = None,
    forward_prefetch: int = 1,
    backward_prefetch: int = 1,
    dp_replicate: int = 1,
    frozen_sharding: str = "root",
    layers: Iterable[str | nn.Module] | None = None,
    offload: str | OffloadConfig | None = None,
    tp: int | None = None,
    tp_plan: Mapping[str, Any] | None = None,
    sequence_parallel: bool = False,
    loss_parallel: bool = False,
    sample_input: Any = None,
    optimizer: str = "adamw",
    device: str | torch.device | None = None,
) -> nn.Module:
    """Make `model` ready to train: shard it, checkpoint its activations, compile its layers. Returns it.

    The model is changed in place and returned; ``ddp`` returns the `DistributedDataParallel` around it. Build the
    optimizer afterwards: sharding replaces the parameters. Where something is replayed, calls with gradients on
    go without a key/value cache (a replay would write it twice), unless layers hand states on through it; the config
    stays as it is. transformers tells packed documents apart by ``position_ids`` only in calls without a cache.

    Args:
        model: any Hugging Face or plain PyTorch model, on the CPU, a GPU or the meta device (then call
            `nemo_like.distributed.materialize` afterwards).
        strategy: ``"fsdp2"``, ``"ddp"`` or ``"single"``. With one rank all three mean ``"single"``: no process group.
        ac: ``None``/``False``/``"none"``, ``True``/``"full"`` (replay whole layers), ``"selective"`` (keep the
            expensive ops), ``"submodule"``, ``"sequential"`` (replay segments of layers); ``"40GiB"`` (the best plan
            for that peak per rank), ``"50%"`` (of the activation bytes of ``"none"``), ``"auto"`` (this device's memory)
            or a `MemoryBudget`, all with
            `sample_input`; a `Plan`, a `CheckpointConfig`, or a policy object (`SelectivePolicy`, `TorchPolicy`).
        mesh: a mesh that a framework built, with axes out of ``dp_replicate``, ``dp_shard``, ``cp``, ``tp``; default:
            made from the launcher's environment.
        ac_scope: the groups of layers to checkpoint: ``"all"``, ``"language"``, ``"vision"``, ``"audio"``,
            ``"multimodal"`` or a list. Layers in which nothing trains are left out.
        compile: ``True``/``"inductor"`` or ``"aot_eager"``: compile each layer in place.
        mp_policy: FSDP2's own policy object, instead of the three dtypes.
        param_dtype: the dtype to compute in (``"bf16"``); parameters and optimizer state stay as they are. FSDP2 casts
            parameters; the other strategies use autocast.
        reduce_dtype: the dtype to reduce gradients in (FSDP2); default: float32 where `param_dtype` is given.
        output_dtype: the dtype of the model's floating-point outputs.
        cpu_offload: FSDP2 only: keep parameters, gradients and optimizer state in host memory.
        reshard_after_forward: FSDP2: free a layer's parameters after its forward; None: all but the last layer. A number:
            shard layers over that many ranks in between; the last layer and the tail stay whole.
        forward_prefetch: FSDP2: how many layers ahead forward gathers.
        backward_prefetch: FSDP2: how many layers ahead backward gathers.
        dp_replicate: FSDP2: replicas of the sharded model (HSDP); must divide the number of ranks.
        frozen_sharding: FSDP2: frozen towers go into the ``"root"`` unit, stay whole on every rank (``"replicate"``), or
            are sharded ``"per_layer"``, which saves most and hangs as soon as one rank skips the tower.
        layers: names (globs) or modules of the layers, instead of the layers that are found.
        offload: what waits in host memory between forward and backward: ``"boundary"`` (layer inputs), ``"saved"`` (these
            and what checkpointing keeps), ``"all"``, or an `OffloadConfig`.
        tp: FSDP2: ranks that each large weight is split over (tensor parallelism); must divide the number of ranks.
        tp_plan: module name pattern to `ParallelStyle` or its name; default: the model's own plan.
        sequence_parallel: with `tp`: norms and residuals split along the sequence too.
        loss_parallel: with `tp`: the logits stay split by vocabulary.
        sample_input: what one step of one rank gives to the model, as keywords, positions or one tensor; needed by
            budgets, used by ``"sequential"`` and by a `CheckpointConfig` that profiles first.
        optimizer: the optimizer whose state a budget counts: ``"adamw"``, ``"adamw-8bit"``, ``"sgd"``, ...
        device: where the model goes; default: this rank's accelerator if there is one, else the CPU.

    Raises:
        ValueError, TypeError: any bad argument, with the value, the reason and the way out; a model without repeated
            layers; a model that was parallelized or checkpointed before; a budget that cannot be met (`BudgetError`).
            The model is unchanged then.
    """
    check_agreement(model, dict(locals()))
    strategy = _check_model_and_strategy(model, strategy, cpu_offload, tp, tp_plan)
    request = read_checkpointing(model, ac, ac_scope, layers, sample_input)
    backend = _check_compile(compile, request)
    offload_config = _check_offload(offload, request)
    precision = read_precision(mp_policy, param_dtype, reduce_dtype, output_dtype)
    options: dict[str, Any] = dict(
        reshard_after_forward=reshard_after_forward,
        forward_prefetch=forward_prefetch,
        backward_prefetch=backward_prefetch,
        frozen_sharding=frozen_sharding,
    )
    check_options(**options)
    if strategy == "ddp" and options != _FSDP2_DEFAULTS:
        warn_once(f"Options of FSDP2 were given ({', '.join(options)}), and strategy is 'ddp': they change nothing.")
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer is {optimizer!r}; it must be one of {', '.join(OPTIMIZERS)}.")
    _check_device(device)
    mesh = _mesh(strategy, mesh, dp_replicate, tp, device)
    shard_mesh = mesh if strategy == "fsdp2" else None
    if shard_mesh is not None:
        check_sharding(model, request.found, shard_mesh, **options)
    else:
        check_autocast(model, precision.param_dtype)
    planning = dict(
        mesh=shard_mesh,
        world_size=1 if shard_mesh is None else None,
        optimizer=optimizer,
        param_dtype=precision.param_dtype,
        reduce_dtype=precision.reduce_dtype,
        reshard_after_forward=reshard_after_forward,
        prefetch=(forward_prefetch, backward_prefetch),
    )
    names = [layer.fqn for layer in request.found]
    split = axis_size(shard_mesh, "tp") > 1
    _check_tensor_parallel(split, request, tp_plan, sequence_parallel, loss_parallel)
    request = request.settle(model, planning)
    start_from_the_same_weights(model, shard_mesh)

    if shard_mesh is not None and split:
        apply_tensor_parallel(
            model, shard_mesh["tp"], tp_plan, sequence_parallel=sequence_parallel, loss_parallel=loss_parallel
        )
    request.carry_out(model, compile=backend is not None)
    if backend is not None:
        compile_layers(model, backend, _modules(model, names))
    if offload_config.mode != "none":
        apply_offloading(model, _modules(model, names), offload_config)
    if shard_mesh is not None:
        # Pinned memory is for copies to a GPU; without one torch raises on it.
        host = CPUOffloadPolicy(pin_memory=shard_mesh.device_type != "cpu") if cpu_offload else OffloadPolicy()
        shard_layers(model, find_layers(model, names), shard_mesh, mp_policy=precision, offload_policy=host, **options)
    else:
        model = _replicate(model, mesh, precision, device)
    setattr(model, _MARK, True)
    return model


def _modules(model: nn.Module, names: list[str]) -> list[nn.Module]:
    """The layers as they are registered now: the outermost wrappers, where there are any."""
    return [layer.module for layer in find_layers(model, names)]


def _check_model_and_strategy(
    model: nn.Module, strategy: str, cpu_offload: bool, tp: int | None, tp_plan: Mapping[str, Any] | None
) -> str:
    """The strategy's word, once model and strategy are fit for each other."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {model!r}, a {type(model).__name__}; it must be a torch.nn.Module.")
    word = normalise(strategy) if isinstance(strategy, str) else strategy
    if word not in STRATEGIES:
        raise ValueError(
            f"strategy is {strategy!r}; it must be one of {', '.join(STRATEGIES)}." + did_you_mean(str(word), STRATEGIES)
        )
    if not isinstance(cpu_offload, bool):
        raise TypeError(f"cpu_offload is {cpu_offload!r}; it must be True or False.")
    if word != "fsdp2" and cpu_offload:
        raise ValueError(f"cpu_offload=True keeps FSDP2's shards in host memory; strategy {word!r} has none.")
    if word != "fsdp2" and (tp not in (None, 1) or tp_plan is not None):
        raise ValueError(f"tp splits weights over ranks beside FSDP2; strategy {word!r} keeps them whole. Use 'fsdp2'.")
    for name, module in model.named_modules():
        if hasattr(module, _MARK) or isinstance(module, FSDPModule | DistributedDataParallel):
            raise ValueError(
                f"{name or 'The model'} is parallelized already; call parallelize once, on a freshly built model."
            )
    return word


def _check_compile(compile: bool | str, request: CheckpointRequest) -> str | None:
    backend = parse_compile(compile)
    if backend is not None and request.config is not None and request.config.use_reentrant:
        raise ValueError("CheckpointConfig.use_reentrant is True and compile is on: torch cannot compile it. Drop one.")
    return backend


def _check_offload(offload: str | OffloadConfig | None, request: CheckpointRequest) -> OffloadConfig:
    config = parse_offload(offload, default="none")
    if config.mode == "saved" and request.config is not None and request.config.mode == "none":
        raise ValueError(
            "offload='saved' moves what activation checkpointing keeps, and ac is 'none'. Use ac='selective' (or another "
            "mode), or offload='all'."
        )
    return config


def _check_tensor_parallel(
    split: bool,
    request: CheckpointRequest,
    tp_plan: Mapping[str, Any] | None,
    sequence_parallel: bool,
    loss_parallel: bool,
) -> None:
    if split and request.budget is not None:
        raise ValueError(
            f"ac is {request.budget!r} beside tensor parallelism: a plan is traced on whole weights. Use a mode such as "
            "'selective', or budget without tp."
        )
    for name, given in (("sequence_parallel", sequence_parallel), ("loss_parallel", loss_parallel)):
        if given and not split:
            raise ValueError(f"{name}=True splits tensors over the ranks of tp, and there is one; pass tp= as well.")
    if tp_plan is not None and not split:
        warn_once("tp_plan was given, and tp is one rank: no weight is split.")


def _check_device(device: str | torch.device | None) -> None:
    if device is None:
        return
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device is {device!r}; write it like 'cpu', 'cuda' or 'cuda:1'.") from error
    if place.type == "meta":
        raise ValueError(
            "device is 'meta', where a model has shapes and no values: nothing can train there. Leave device out; a model "
            "built on the meta device gets its values from nemo_like.distributed.materialize afterwards."
        )
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device is {device!r}, and torch sees {torch.cuda.device_count()} CUDA device(s) here. Leave device out to "
            "take what there is, or install a CUDA build of torch."
        )


def _mesh(
    strategy: str, mesh: DeviceMesh | None, dp_replicate: int, tp: int | None, device: str | torch.device | None
) -> DeviceMesh | None:
    """The mesh to work on; None for one rank, where no process group is made or used."""
    ranks = world_size()
    if mesh is not None:
        validate_mesh(mesh)
        for name, size in (("dp_replicate", dp_replicate), ("tp", tp)):
            if size not in (None, 1, axis_size(mesh, name)):
                raise ValueError(
                    f"{name} is {size}, but the mesh's axis has {axis_size(mesh, name)} rank(s); drop one of the two."
                )
    if ranks == 1:
        for name, size in (("dp_replicate", dp_replicate), ("tp", tp)):
            if size not in (None, 1):
                raise ValueError(f"{name} is {size}, but this job has one rank; start more with torchrun.")
        if strategy != "single":
            say_once(f"strategy={strategy!r} with one rank: training on a single device, without a process group.")
        return None
    if strategy == "single":
        if mesh is not None:
            raise ValueError("strategy='single' uses no process group, but a mesh was given; use 'fsdp2' or 'ddp'.")
        if dp_replicate != 1:
            raise ValueError(f"dp_replicate is {dp_replicate!r}, and strategy='single' has no replicas; use 'fsdp2'.")
        warn_once(f"strategy='single' in a job of {ranks} ranks: every rank trains a model of its own.")
        return None
    if strategy == "ddp" and dp_replicate not in (1, ranks):
        raise ValueError(f"dp_replicate is {dp_replicate}, but 'ddp' replicates over all {ranks} ranks; use 'fsdp2'.")
    device_type = None if device is None else torch.device(device).type
    return mesh if mesh is not None else build_mesh(
        dp_replicate=dp_replicate, tp=1 if tp is None else tp, device_type=device_type
    )


def _replicate(
    model: nn.Module, mesh: DeviceMesh | None, precision: MixedPrecisionPolicy, device: str | torch.device | None
) -> nn.Module:
    """Put the whole model on this rank's device, under autocast; with a mesh, inside DistributedDataParallel."""
    if device is not None:
        place = torch.device(device)
    else:
        place = local_device(None if mesh is None else mesh.device_type)
    if not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        model.to(place)
    elif mesh is not None:
        raise ValueError(
            "strategy='ddp' needs a model with weights, and this one is on the meta device: build it on the CPU, or use "
            "strategy='fsdp2' and materialize() afterwards."
        )
    autocast_forward(model, place.type, precision.param_dtype, precision.output_dtype)
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
        gradient_as_bucket_view=True,  # or every gradient would be held twice
    )
