"""One training of a program that `tests.tools.surveys.random_cells` draws: by nemo_like on two ranks, or by hand on each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from nemo_like.distributed import clip_grad_norm_, set_gradient_sync
from tests.models.adapted import with_lora
from tests.models.families import FAMILIES, loss_of
from tests.tools.surveys.random_programs import PLAIN, PlainModel

STEPS = 3


def build(cell: dict[str, Any]) -> nn.Module:
    """Return the original model, the same on every rank."""
    torch.manual_seed(cell["seed"])
    if cell["kind"] in PLAIN:
        plain = PlainModel(cell["kind"], extra=cell["extra"])
        PlainModel.before(cell["kind"], plain, 0, "build")
        return plain
    model = FAMILIES["llama" if cell["kind"] == "lora" else cell["kind"]].build(cell["seed"])
    for module in (
        model.modules() if cell["axis"] in ("tp", "cp", "pp") else ()
    ):  # masks of parts are not those of a whole
        for name in ("dropout", "attention_dropout", "p", "attn_dropout", "activation_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return with_lora(model, ["q_proj", "v_proj"]) if cell["kind"] == "lora" else model


def batch_of(cell: dict[str, Any], step: int, micro: int, rank: int) -> dict[str, Any]:
    """Return the batch of one micro-step; tp, cp and pp take one batch on both ranks."""
    whole = cell["axis"] in ("tp", "cp", "pp")
    rng = torch.Generator().manual_seed(1000 * cell["seed"] + 100 * step + 10 * micro + (0 if whole else rank))
    if cell["kind"] in PLAIN:
        return PlainModel.batch(cell["kind"], rng, step, rank)
    batch = dict(FAMILIES["llama" if cell["kind"] == "lora" else cell["kind"]].inputs())
    shape = (4, *batch["input_ids"].shape[1:]) if cell["axis"] == "pp" else None
    ids = {k: torch.randint(3, 48, shape or v.shape, generator=rng) for k, v in batch.items() if v.dtype == torch.long}
    floats = {k: torch.randn(v.shape, generator=rng) for k, v in batch.items() if v.is_floating_point()}
    batch |= ids | floats
    return batch | ({"labels": batch["input_ids"]} if {"labels", "input_ids"} <= batch.keys() else {})


def in_bf16(model: nn.Module, axis: str) -> Any:
    """Return how the original model is called in bf16: under autocast, as DDP does, or with cast weights, as FSDP2 does."""

    def call(**batch: Any) -> Any:
        if axis == "ddp":
            with torch.autocast("cpu", torch.bfloat16):
                return model(**batch)
        batch = {k: v.bfloat16() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in batch.items()}
        return functional_call(model, {n: p.bfloat16() for n, p in model.named_parameters()}, (), batch)

    return call


def losses(model: Any, cell: dict[str, Any], batch: dict[str, Any], bare: bool) -> Iterator[tuple[Tensor, bool]]:
    """Yield each loss of one micro-step, and whether another backward of the same graph follows."""
    model = in_bf16(model, cell["axis"]) if bare and cell["bf16"] else model
    if cell["kind"] in PLAIN:
        yield from PlainModel.losses(cell["kind"], model, batch)
    else:
        yield loss_of(model(**batch)), False


def reduce_by_hand(model: nn.Module, totals: dict[str, Tensor], whole: bool) -> None:
    """Average the gradients of one backward over the ranks, and add them to `totals`."""
    for name, parameter in model.named_parameters():
        used = torch.tensor(float(parameter.grad is not None))
        if not whole:
            dist.all_reduce(used)
        if used.item():
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            if not whole:
                dist.all_reduce(grad)
                grad /= 2
            totals[name] = totals[name] + grad if name in totals else grad
        parameter.grad = None


def make_whole(tensors: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    """Return the whole tensors by the original model's names. A collective."""
    present: list[Any] = [None, None]
    dist.all_gather_object(present, [name for name, value in tensors.items() if value is not None])
    clean = {n: n.removeprefix("module.").replace("_checkpoint_wrapped_module.", "") for n in tensors}
    both = set(present[0]) & set(present[1])
    found = {clean[n]: v.full_tensor() if n in both and isinstance(v, DTensor) else v for n, v in tensors.items()}
    return {n: None if v is None else v.detach().float().clone() for n, v in found.items()}


def train(model: Any, cell: dict[str, Any], rank: int, bare: bool) -> list[tuple[str, Any]]:
    """Train, and return what was seen: names with losses, gradients, weights and buffers."""
    seen: list[tuple[str, Any]] = []
    pipeline, whole = isinstance(model, nn.Module) is False, cell["axis"] in ("tp", "cp", "pp")
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    optimizer: Any = None
    cache = PlainModel.watch(inner) if cell["kind"] == "hooks" else []

    def built() -> torch.optim.Optimizer:
        marked = [p for p in model.parameters() if getattr(p, "_no_weight_decay", False)]
        others = [p for p in model.parameters() if not getattr(p, "_no_weight_decay", False)]
        groups = [{"params": others}, *([{"params": marked, "weight_decay": 0.0}] if marked else [])]
        return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1, eps=1e-3)  # eps: rounding is not made larger

    def once(step: int, micro: int, part: str) -> dict[str, Any]:
        torch.manual_seed(7919 * step + 101 * micro + (0 if whole else rank) + len(part))
        if bare and cell["axis"] == "ddp":
            for buffer in inner.buffers():
                dist.broadcast(buffer, 0)
        if cell["kind"] in PLAIN:
            PlainModel.before(cell["kind"], inner, step, part)
        return batch_of(cell, step, micro, rank)

    optimizer = None if cell["late"] else built()
    for step in range(STEPS):
        totals: dict[str, Tensor] = {}
        for micro in range(cell["accumulate"]):
            last = micro == cell["accumulate"] - 1 or cell["sync"] == "every"
            if not bare and not pipeline and cell["sync"] == "last" and cell["accumulate"] > 1:
                set_gradient_sync(model, last)
            batch = once(step, micro, "train")
            if pipeline:
                seen.append((f"loss {step}", model.step(**batch).detach()))
                continue
            for loss, again in losses(model, cell, batch, bare):
                seen.append((f"loss {step}", loss.detach().float()))
                (loss / cell["accumulate"]).backward(retain_graph=again)
                if bare and last:
                    reduce_by_hand(model, totals, whole)
        seen += [(f"cached {step}", value) for value in PlainModel.cached(cache)]
        for name, parameter in model.named_parameters() if bare else ():
            parameter.grad = totals.get(name)
        if cell["clip"]:
            norm = model.clip_grad_norm_(0.5) if pipeline else (
                nn.utils.clip_grad_norm_(model.parameters(), 0.5) if bare else clip_grad_norm_(model, 0.5))  # fmt: skip
            seen.append((f"norm {step}", norm.full_tensor() if isinstance(norm, DTensor) else norm))
        seen.append((f"gradient {step}", make_whole({n: p.grad for n, p in model.named_parameters()})))
        optimizer = optimizer or built()
        optimizer.step()
        model.zero_grad() if pipeline else optimizer.zero_grad()
        if step == STEPS - 1 or cell["between"]:
            batch = once(step, 5, "evaluate")
            model.eval()
            with torch.no_grad():
                for loss in (
                    [model.eval_step(**batch)] if pipeline else [v for v, _ in losses(model, cell, batch, bare)]
                ):
                    seen.append((f"evaluation {step}", loss.float()))
            model.train()
    seen.append(("weight", make_whole(dict(model.named_parameters()))))
    return seen + ([] if pipeline or whole else [("buffer", make_whole(dict(inner.named_buffers())))])
