"""Calls of torch and PEFT on a model whose parameters are shards: the table of `docs/how-to/your-own-loop.md`, "What takes
shards". The judge is the same call on the model as it was."""

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from nemo_like import parallelize
from tests.checks import whole
from tests.models.adapted import with_lora
from tests.models.fit_models import llama
from tests_distributed.spawn import on_ranks


def _clip(model: nn.Module) -> Iterable[Tensor]:
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    return [norm, *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


def _step_of(kind: Any) -> Callable[[Any], Iterable[Tensor]]:
    def step(model: Any) -> Iterable[Tensor]:
        kind([p for name, p in model.named_parameters() if "proj" in name and p.requires_grad], lr=0.1).step()
        return model.parameters()

    return step


def _clones(model: nn.Module) -> Iterable[Tensor]:
    average = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        return [average[name].lerp_(2 * parameter, 0.001) for name, parameter in model.named_parameters()]


def _merge(model: Any) -> Iterable[Tensor]:
    model.merge_adapter()
    return model.parameters()


# By a word of its row in the page; clones are below the table. All others are right.
CALLS: dict[str, Callable[[Any], Iterable[Tensor]]] = {
    "clip_grad_norm_": _clip,
    "Adafactor": _step_of(torch.optim.Adafactor),
    "Muon": _step_of(torch.optim.Muon),
    "AveragedModel": lambda model: AveragedModel(model).parameters(),
    "merge_adapter()": _merge,
    "clone()": _clones,
}
ERRORS: dict[str, dict[str, type[Exception]]] = {
    "fsdp2": {"Adafactor": RuntimeError, "AveragedModel": AssertionError},
    "tp": dict.fromkeys(("Adafactor", "clip_grad_norm_", "merge_adapter()"), RuntimeError)
    | {"AveragedModel": AssertionError},
}


@pytest.mark.parametrize("axis", ["fsdp2", "tp"])
@on_ranks(2)
def test_which_calls_take_shards(rank: int, world_size: int, axis: str) -> None:
    ids = torch.arange(16).view(2, 8)
    for name, call in CALLS.items():
        results = []
        for options in (None, {"tp": 2 if axis == "tp" else 1}):
            model = with_lora(llama(2), ["q_proj"]) if call is _merge else llama(2)
            model = model if options is None else parallelize(model, ac="none", device="cpu", **options)
            model(input_ids=ids, labels=ids).loss.backward()
            error = ERRORS[axis].get(name) if options else None
            with pytest.raises(error) if error else contextlib.nullcontext():
                results.append([whole(tensor.detach()) for tensor in call(model)])
        # Muon's products are bfloat16, and FSDP2 and tp sum in another order.
        torch.testing.assert_close(results[-1], results[0], rtol=0, atol=0.02 if name == "Muon" else 1e-6)
