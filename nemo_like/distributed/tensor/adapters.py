"""PEFT's LoRA adapters on linears that a tensor-parallel plan cuts: see through their wrapping, and cut them alike.

Cut by columns, ``y = W x + B A x`` has the rows of `B` where it has those of `W`, and `A` is whole. Cut by rows, `A` has the
columns of `W`, and `B` is whole. What is between the two, r numbers a token, is reduced by itself. One reduction of `y`
would do for the output, but the gradient of a whole factor would then be a sum over ranks that nothing makes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ParallelStyle

from nemo_like._util.module_tree import base_model
from nemo_like._util.words import a_or_an

_INSIDE = re.compile(r"\.base_layer(?=\.)")


class WholeFactor(ParallelStyle):
    """Every rank keeps the whole matrix `A`, whose product the ranks' parts of `B` read.

    Given a DTensor (a sequence that sequence parallelism has put together), it returns one, so that the gradient of its
    input stays the partial sum that those of cut linears are. That of `A` is summed over the ranks.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        forward = module.forward

        def forward_like_input(x: Tensor) -> Tensor:
            if not isinstance(x, DTensor):
                return forward(x)
            weight: Any = module.weight
            return F.linear(x, DTensor.from_local(weight, device_mesh, [Replicate()], run_check=False))

        module.forward = forward_like_input
        return module


def plain_names(model: nn.Module) -> Callable[[str], str]:
    """Return what gives a module or parameter of `model` the name that it has without PEFT's wrapping."""
    inside = base_model(model)
    prefix = next((f"{name}." for name, module in model.named_modules() if name and module is inside), "")
    return lambda name: _INSIDE.sub("", name.removeprefix(prefix))


def is_adapted(module: nn.Module) -> bool:
    """Return whether `module` is one that PEFT has put around another."""
    return type(module).__module__.partition(".")[0] == "peft"


def adapter_around(model: nn.Module, fqn: str) -> str | None:
    """Return the name of the adapted module that the module or parameter `fqn` is a part of, if any."""
    while fqn := fqn.rpartition(".")[0]:
        module = model.get_submodule(fqn)
        if is_adapted(module) and hasattr(module, "base_layer"):
            return fqn
    return None


def check_tuners(model: nn.Module) -> None:
    """Raise ValueError where PEFT has changed `model` by something else than LoRA."""
    configs = getattr(model, "peft_config", None)
    for name, config in configs.items() if isinstance(configs, dict) else ():
        kind = getattr(config, "peft_type", None)
        kind = str(getattr(kind, "value", kind))
        if kind != "LORA":
            raise ValueError(
                f"This {type(model).__name__} has {name!r}, tuned by {kind}, and tp knows LoRA alone: it is not known what "
                "part of the rest a rank reads. Use peft.LoraConfig, merge it first (merge_and_unload), or set tp=1."
            )


def factors(fqn: str, module: Any, style_name: str, by_columns: bool) -> Iterator[tuple[str, nn.Module, str]]:
    """The linears in the LoRA layer `module`, by name, with the names of their styles; '' is `WholeFactor`.

    `check_linear` has passed `module`.

    Args:
        fqn: the name of `module`.
        style_name: the style that the plan gives to the linear.
        by_columns: whether that cuts output features; False: input features.
    """
    yield f"{fqn}.base_layer", module.base_layer, style_name
    for name in module.lora_A:
        yield f"{fqn}.lora_A.{name}", module.lora_A[name], "" if by_columns else style_name
        yield f"{fqn}.lora_B.{name}", module.lora_B[name], style_name if by_columns else "replicate"


def check_linear(fqn: str, module: Any) -> None:
    """Raise ValueError unless `module` is plain LoRA on an unmerged `torch.nn.Linear` of floating-point weights."""
    base = getattr(module, "base_layer", None)
    pairs = [getattr(module, name, None) for name in ("lora_A", "lora_B")]
    if base is None or not all(isinstance(each, nn.ModuleDict) for each in pairs):
        refuse(fqn, f"{type(module).__name__} is not plain LoRA")
    if not isinstance(base, nn.Linear) or not base.weight.is_floating_point():
        refuse(
            fqn,
            f"the adapter is on {a_or_an(base)}, and only that on an nn.Linear of floating-point weights can be cut",
        )
    if kinds := sorted({type(each).__name__ for each in getattr(module, "lora_variant", {}).values()}):
        refuse(fqn, f"{', '.join(kinds)} (DoRA or another variant) reads the whole weight")
    if len(getattr(module, "lora_magnitude_vector", None) or ()):
        refuse(fqn, "DoRA reads the norms of the whole weight")
    if not all(isinstance(each, nn.Linear) for pair in pairs for each in pair.values()):  # type: ignore[union-attr]
        refuse(fqn, "its factors are not nn.Linear")
    if getattr(module, "merged", False):
        refuse(fqn, "its adapters are merged, and a part of the weight could not be unmerged")


def refuse(fqn: str, reason: str) -> None:
    """Raise ValueError that `fqn` cannot be cut."""
    raise ValueError(
        f"The tensor-parallel plan cuts {fqn!r}, which PEFT has adapted: {reason}. Leave it out of the adapter's targets, "
        "merge the adapters (merge_and_unload), or take it out of the plan (TensorParallel(plan=...))."
    )
