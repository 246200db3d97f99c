"""The contents of a run's checkpoint: weights, optimizer state and the facts that a resumed run must share.

The learning rate, the data order and the random numbers of a step are functions of the step. So the step is all there
is of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from nemo_like._util.console import flag
from nemo_like._util.log import warn_once
from nemo_like.distributed import get_model_state
from nemo_like.distributed.weights.slots import in_boxes
from nemo_like.recipes.options import RunOptions

# These may change on purpose (train longer, with another rate); the change is logged.
_MAY_CHANGE = (
    "steps",
    "lr",
    "schedule",
    "warmup_steps",
    "lr_floor",
    "weight_decay",
    "beta1",
    "beta2",
    "clip",
    "precision",
)


def make_optimizer(model: nn.Module, options: RunOptions) -> torch.optim.AdamW:
    """AdamW over what trains; weight decay on matrices only, not on norms and biases."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise ValueError("The model has no parameter that trains: every requires_grad is False.")
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": options.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    forms = {"adamw-loop": {"foreach": False}, "adamw-foreach": {"foreach": True}, "adamw-fused": {"fused": True}}
    how: dict[str, Any] = forms.get(options.optimizer, {})
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=options.lr, betas=(options.beta1, options.beta2), **how
    )


def gather_state(model: nn.Module, optimizer: torch.optim.Optimizer, *, frozen: bool = True) -> dict[str, Any]:
    """Weights, buffers and optimizer state by the bare model's names; the tensors themselves, so a load fills them in.

    frozen: with the weights that do not train.

    Moments that the optimizer has not made yet are made here, as zeros: that is how AdamW would begin.
    """
    weights = get_model_state(model)  # first: it has every FSDP2 unit show its shards, which the optimizer knows
    optimized = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    moments: dict[str, dict[str, torch.Tensor]] = {}
    for name, parameter in _bare(model).named_parameters():
        if not parameter.requires_grad:
            continue
        if id(parameter) not in optimized:
            raise RuntimeError(f"The optimizer does not know {name}: it was made before the model was sharded.")
        kept = optimizer.state[parameter]
        if not kept:
            kept["step"] = torch.tensor(0.0)
            kept["exp_avg"] = torch.zeros_like(parameter)
            kept["exp_avg_sq"] = torch.zeros_like(parameter)
        moments[name] = {key: in_boxes(value) for key, value in kept.items()}
    if not frozen:
        still = {name for name, parameter in _bare(model).named_parameters() if not parameter.requires_grad}
        weights = {name: tensor for name, tensor in weights.items() if name not in still}
    return {"model": weights, "optimizer": moments}


def about_run(options: Any, files: str, model: nn.Module) -> dict[str, Any]:
    """The facts that are saved with a checkpoint's tensors; `files` is the fingerprint of what ``--data`` names."""
    shapes = [f"{name} {tuple(tensor.shape)}" for name, tensor in sorted(get_model_state(model).items())]
    return {
        "model": options.model,
        "shapes": hashlib.sha256("\n".join(shapes).encode()).hexdigest()[:16],
        "data": options.data,
        "files": files,
        "fixed": {name: getattr(options, name) for name in options.fixed},
        **{name: getattr(options, name) for name in _MAY_CHANGE},
    }


def check_same_run(saved: Mapping[str, Any], now: Mapping[str, Any], way_out: str) -> None:
    """Raise ValueError where the checkpoint belongs to another run; log once which optional facts changed."""
    # Options first: another one of them may change the samples and the shapes, too.
    for name, value in now["fixed"].items():
        before = saved.get("fixed", {}).get(name)
        if before != value:
            raise ValueError(
                f"--resume: {flag(name)} was {before!r} when the checkpoint was written, and is {value!r} now. {way_out}"
            )
    if saved.get("files") != now["files"]:
        raise ValueError(
            f"--resume: {_said(now)} holds other data than the checkpoint's run read, from {_said(saved)}. {way_out}"
        )
    if saved.get("shapes") != now["shapes"]:
        # The path or preset may differ for the same model, and be the same for another.
        raise ValueError(
            f"--resume: the model's weights, of --model {now['model']}, have other names or shapes than the "
            f"checkpoint's, of {saved.get('model')}. {way_out}"
        )
    changed = [f"{name} {saved.get(name)!r} -> {now[name]!r}" for name in _MAY_CHANGE if saved.get(name) != now[name]]
    if changed:
        warn_once(f"Resuming with other options than before: {', '.join(changed)}. The run goes on with the new ones.")


def _said(about: Mapping[str, Any]) -> str:
    return "the standard library (no --data)" if about.get("data") is None else f"--data {about['data']!r}"


def _bare(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model
