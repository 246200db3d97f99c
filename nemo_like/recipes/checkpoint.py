"""The contents of a run's checkpoint: weights, optimizer state and the facts that a resumed run must share.

The learning rate, the data order and the random numbers are functions of the step, and so not in there.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch

from nemo_like._util.console import flag
from nemo_like._util.log import warn_once
from nemo_like._util.module_tree import bare
from nemo_like.distributed import get_model_state, get_optimizer_state

# These may change on purpose (train longer, with another rate); the change is logged.
_MAY_CHANGE = "steps lr schedule warmup_steps lr_floor weight_decay beta1 beta2 clip precision".split()  # noqa: SIM905


def gather_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return weights, buffers and moments by the original model's names: the tensors themselves, so a load fills them.

    Second comes the state for `set_optimizer_state` that has the same moments: those of parameters without a step so far
    are not the optimizer's yet.
    """
    weights = get_model_state(model)  # first: it has every FSDP2 unit show its shards, which the optimizer knows
    optimized = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for name, parameter in bare(model).named_parameters():
        if parameter.requires_grad and id(parameter) not in optimized:
            raise RuntimeError(f"The optimizer does not know {name}: it was made before the model was sharded.")
    moments = get_optimizer_state(model, optimizer)
    # The groups' options follow from the job's, and the learning rate from the step.
    return {"model": weights, "optimizer": moments["state"]}, moments


def about_run(options: Any, files: str, model: torch.nn.Module) -> dict[str, Any]:
    """Return the facts that are saved with the tensors; `files` is the fingerprint of the files of ``--data``."""
    shapes = [f"{name} {tuple(tensor.shape)}" for name, tensor in sorted(get_model_state(model).items())]
    about = {"model": options.model, "shapes": hashlib.sha256("\n".join(shapes).encode()).hexdigest()[:16]}
    fixed, changing = ({name: getattr(options, name) for name in names} for names in (options.fixed, _MAY_CHANGE))
    return about | {"data": options.data, "files": files, "fixed": fixed, **changing}


def check_same_run(saved: Mapping[str, Any], now: Mapping[str, Any], way_out: str) -> None:
    """Raise ValueError where the checkpoint belongs to another run; log once which optional facts changed."""
    was = saved.get("fixed", {})
    wrong = [  # first: another one of them may change the samples and the shapes, too
        f"{flag(name)} was {was.get(name)!r} when the checkpoint was written, and is {value!r} now"
        for name, value in now["fixed"].items()
        if was.get(name) != value
    ]
    if saved.get("files") != now["files"]:
        here, there = (about.get("data") or "the standard library" for about in (now, saved))
        wrong.append(f"--data: {here} holds other data than the checkpoint's run read, from {there}")
    if saved.get("shapes") != now["shapes"]:  # the path or preset may differ for the same model, or not for another one
        wrong.append(f"the weights have other names or shapes: --model was {saved.get('model')}, is {now['model']} now")
    if wrong:
        raise ValueError(f"--resume: {wrong[0]}. {way_out}")
    changed = [f"{name} {saved.get(name)!r} -> {now[name]!r}" for name in _MAY_CHANGE if saved.get(name) != now[name]]
    if changed:
        warn_once(f"Resuming with other options than before: {', '.join(changed)}. The run goes on with the new ones.")
