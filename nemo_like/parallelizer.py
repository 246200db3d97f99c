"""`parallelize`: one call from a bare model to a sharded, checkpointed, compiled one.

The order, always: find the layers → tensor parallel → activation checkpointing → per-layer compile → `fully_shard`
on each layer, then on the root. Everything is checked before the first change.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy
from torch.nn.parallel import DistributedDataParallel

from nemo_like.activation_checkpointing.policy import Policy
from nemo_like.checkpointing import checkpoint_found, parse_checkpointing, refuse_checkpointed
from nemo_like.compile import compile_layers, parse_compile
from nemo_like.config import STRATEGIES, CheckpointConfig, did_you_mean, normalise, parse_dtype
from nemo_like.distributed.launch import local_device, world_size
from nemo_like.distributed.mesh import axis_size, build_mesh, validate_mesh
from nemo_like.distributed.shard import check_sharding, shard_layers
from nemo_like.layers import Layer, find_layers, select_layers
from nemo_like.log import say_once, warn_once
from nemo_like.precision import autocast_forward

_MARK = "_nemo_like_parallelized"


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
    device: str | torch.device | None = None,
) -> nn.Module:
    """Make `model` ready to train: shard it, checkpoint its activations, compile its layers. Returns it.

    The model is changed in place and returned; ``ddp`` returns the `DistributedDataParallel` around it. Build the
    optimizer afterwards: sharding replaces the parameters.

    Args:
        model: any Hugging Face or plain PyTorch model, on the CPU, a GPU or the meta device (then call
            `nemo_like.distributed.materialize` afterwards).
        strategy: ``"fsdp2"``, ``"ddp"`` or ``"single"``. With one rank all three mean ``"single"``: no process group.
        ac: ``None``/``False``/``"none"``, ``True``/``"full"`` (replay whole layers), ``"selective"`` (keep the
            expensive ops), ``"submodule"``, a `CheckpointConfig`, or a `SelectivePolicy` object of your own.
        mesh: a mesh that a framework built, with axes out of ``dp_replicate``, ``dp_shard``, ``cp``, ``tp``; default:
            made from the launcher's environment.
        ac_scope: the groups of layers to checkpoint: ``"all"``, ``"language"``, ``"vision"``, ``"audio"``,
            ``"multimodal"`` or a list. Layers in which nothing trains are left out.
        compile: ``True``/``"inductor"`` or ``"aot_eager"``: compile each layer in place.
        mp_policy: FSDP2's own policy object, instead of the three dtypes.
        param_dtype: the dtype to compute in (``"bf16"``); parameters and optimizer state stay as they are. FSDP2 casts
            parameters; the other strategies use autocast.
        reduce_dtype: the dtype to reduce gradients in (FSDP2).
        output_dtype: the dtype of the model's floating-point outputs.
        cpu_offload: FSDP2 only: keep parameters, gradients and optimizer state in host memory.
        reshard_after_forward: FSDP2: free a layer's parameters after its forward; None: all but the last layer.
        forward_prefetch: FSDP2: how many layers ahead forward gathers.
        backward_prefetch: FSDP2: how many layers ahead backward gathers.
        dp_replicate: FSDP2: replicas of the sharded model (HSDP); must divide the number of ranks.
        frozen_sharding: FSDP2: where frozen towers go: ``"root"``, ``"per_layer"`` or ``"replicate"``.
        layers: names (globs) or modules of the layers, instead of the layers that are found.
        device: where the model goes; default: this rank's accelerator if there is one, else the CPU.

    Raises:
        ValueError, TypeError: any bad argument, with the value, the reason and the way out; a model without repeated
            layers; a model that was parallelized or checkpointed before. The model is unchanged then.
    """
    request = _validate(model, strategy, ac, ac_scope, compile, layers, cpu_offload)
    precision = _precision(mp_policy, param_dtype, reduce_dtype, output_dtype)
    sharding = dict(
        reshard_after_forward=reshard_after_forward,
        forward_prefetch=forward_prefetch,
        backward_prefetch=backward_prefetch,
        frozen_sharding=frozen_sharding,
    )
    mesh = _mesh(request.strategy, mesh, dp_replicate, device)
    if mesh is not None and request.strategy == "fsdp2":
        check_sharding(model, request.found, mesh, **sharding)

    checkpoint_found(model, request.chosen, request.config, request.policy, compile=request.backend is not None)
    placed = find_layers(model, [layer.fqn for layer in request.found])  # the wrappers, where there are any now
    if request.backend is not None:
        compile_layers(model, request.backend, [layer.module for layer in placed])
    if mesh is not None and request.strategy == "fsdp2":
        # Pinned memory is for copies to a GPU, and without one torch raises on it.
        pinned = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
        offload_policy = pinned if cpu_offload else OffloadPolicy()
        shard_layers(model, placed, mesh, mp_policy=precision, offload_policy=offload_policy, **sharding)
    else:
        model = _replicate(model, mesh, precision, device)
    setattr(model, _MARK, True)
    return model


@dataclass(frozen=True)
class _Request:
    """What was asked for, read and checked, before anything is changed."""

    strategy: str
    config: CheckpointConfig
    policy: Policy | None
    backend: str | None
    found: tuple[Layer, ...]
    chosen: tuple[Layer, ...]


def _validate(
    model: nn.Module,
    strategy: str,
    ac: Any,
    ac_scope: str | Iterable[str],
    compile: bool | str,
    layers: Iterable[str | nn.Module] | None,
    cpu_offload: bool,
) -> _Request:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {model!r}, a {type(model).__name__}; it must be a torch.nn.Module.")
    word = normalise(strategy) if isinstance(strategy, str) else strategy
    if word not in STRATEGIES:
        raise ValueError(
            f"strategy is {strategy!r}; it must be one of {', '.join(STRATEGIES)}." + did_you_mean(str(word), STRATEGIES)
        )
    if cpu_offload and word != "fsdp2":
        raise ValueError(f"cpu_offload=True keeps FSDP2's shards in host memory; strategy {word!r} has none.")
    config, policy = parse_checkpointing(ac)
    backend = parse_compile(compile)
    if backend is not None and config.use_reentrant:
        raise ValueError("CheckpointConfig.use_reentrant is True and compile is on: torch cannot compile it. Drop one.")
    for name, module in model.named_modules():
        if hasattr(module, _MARK) or isinstance(module, FSDPModule | DistributedDataParallel):
            raise ValueError(
                f"{name or 'The model'} is parallelized already; call parallelize once, on a freshly built model."
            )
    refuse_checkpointed(model)
    found = find_layers(model, layers)
    chosen = select_layers(found, ac_scope)  # a wrong scope is an error also where nothing is checkpointed
    if config.mode != "none":
        chosen = select_layers(found, ac_scope, drop_frozen=True)
    return _Request(word, config, policy, backend, found, chosen)


def _precision(
    mp_policy: MixedPrecisionPolicy | None,
    param_dtype: torch.dtype | str | None,
    reduce_dtype: torch.dtype | str | None,
    output_dtype: torch.dtype | str | None,
) -> MixedPrecisionPolicy:
    dtypes = {
        "param_dtype": parse_dtype("param_dtype", param_dtype),
        "reduce_dtype": parse_dtype("reduce_dtype", reduce_dtype),
        "output_dtype": parse_dtype("output_dtype", output_dtype),
    }
    given = [name for name, dtype in dtypes.items() if dtype is not None]
    if mp_policy is not None:
        if not isinstance(mp_policy, MixedPrecisionPolicy):
            raise TypeError(f"mp_policy is {mp_policy!r}; it must be a torch.distributed.fsdp.MixedPrecisionPolicy.")
        if given:
            raise ValueError(f"mp_policy and {given[0]} are both given; put {given[0]} into the policy, or drop the policy.")
        return mp_policy
    if dtypes["param_dtype"] is not None and dtypes["reduce_dtype"] is None:
        # Gradients of many ranks are summed: a 16-bit sum loses what a 16-bit product does not (torchtitan's default too).
        dtypes["reduce_dtype"] = torch.float32
    return MixedPrecisionPolicy(**dtypes)


def _mesh(
    strategy: str, mesh: DeviceMesh | None, dp_replicate: int, device: str | torch.device | None
) -> DeviceMesh | None:
    """The mesh to work on; None for one rank, where no process group is made or used."""
    ranks = world_size()
    if mesh is not None:
        validate_mesh(mesh)
        if dp_replicate not in (1, axis_size(mesh, "dp_replicate")):
            raise ValueError(
                f"dp_replicate is {dp_replicate}, but the mesh's axis has {axis_size(mesh, 'dp_replicate')} rank(s); "
                "drop one of the two."
            )
    if ranks == 1:
        if dp_replicate != 1:
            raise ValueError(f"dp_replicate is {dp_replicate}, but this job has one rank; start more with torchrun.")
        if strategy != "single":
            say_once(f"strategy={strategy!r} with one rank: training on a single device, without a process group.")
        return None
    if strategy == "single":
        if mesh is not None:
            raise ValueError("strategy='single' uses no process group, but a mesh was given; use 'fsdp2' or 'ddp'.")
        warn_once(f"strategy='single' in a job of {ranks} ranks: every rank trains a model of its own.")
        return None
    if strategy == "ddp" and dp_replicate not in (1, ranks):
        raise ValueError(f"dp_replicate is {dp_replicate}, but 'ddp' replicates over all {ranks} ranks; use 'fsdp2'.")
    device_type = None if device is None else torch.device(device).type
    return mesh if mesh is not None else build_mesh(dp_replicate=dp_replicate, device_type=device_type)


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
        model, device_ids=[place.index] if place.type == "cuda" else None, process_group=group
    )
