"""Small programs of plain PyTorch for `tests.tools.surveys.random_cells`: a model, its batches and its losses, by kind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, LAYERS = 16, 4
PLAIN = (
    "mlp", "dropout", "noise", "batch_norm", "running_mean", "recurrent", "state_space", "uvit", "heads", "languages",
    "dict_state", "list_outputs", "auxiliary", "looped", "shared_block", "tied", "gan", "two_losses", "two_forwards",
    "tower", "marks", "hooks", "attribute", "outside_tensor", "method", "thaw", "frozen_half", "conditioned", "tuples",
    "weight_norm", "experts", "routed", "layer_drop", "vision",
    "memory", "dict_output",
)  # fmt: skip
"""The kinds; each is what it is called, and `PlainLayer` or `PlainModel` names it where it does that."""


class PlainLayer(nn.Module):
    """A residual block (B, T, WIDTH) to the same, with what its kind does."""

    def __init__(self, kind: str, index: int) -> None:
        super().__init__()
        self.kind, self.index, self.gain, self.aux = kind, index, 1.0, None
        self.shift: Tensor | None = None
        self.state: Tensor | None = None
        self.norm = nn.BatchNorm1d(WIDTH) if kind == "batch_norm" else nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.3 if kind == "dropout" else 0.0)
        if kind == "languages":
            self.adapters = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in ("de", "fr", "it")})
        if kind in (
            "experts",
            "routed",
        ):  # nemo_like looks at lists of the first name
            self.router = nn.Linear(WIDTH, 4)
            self.add_module(kind, nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        if kind == "recurrent":
            self.cell = nn.GRU(WIDTH, WIDTH, batch_first=True)
        if kind in ("state_space", "marks"):
            self.log_a = nn.Parameter(torch.full((WIDTH,), 0.3))
            self.log_a._no_weight_decay = True  # type: ignore[attr-defined]
        if kind == "uvit" and index >= LAYERS // 2:
            self.merge = nn.Linear(2 * WIDTH, WIDTH)
        if kind == "running_mean":
            self.register_buffer("mean", torch.zeros(WIDTH))
        if kind == "weight_norm":
            nn.utils.parametrizations.weight_norm(self.up)

    def forward(self, x: Tensor, more: Any = None) -> Any:
        h = self.norm(x.flatten(0, 1)).view_as(x) if self.kind == "batch_norm" else self.norm(x)
        if self.kind == "recurrent":
            h = self.cell(h)[0]
        elif self.kind == "state_space":
            state, states = torch.zeros_like(h[:, 0]), []
            for t in range(h.shape[1]):
                state = state * torch.sigmoid(self.log_a) + h[:, t]
                states.append(state)
            h = torch.stack(states, 1)
        elif self.kind == "marks":
            h = h * self.log_a.exp()
        elif self.kind == "uvit":
            if self.index < LAYERS // 2:
                more.append(h)
            else:
                h = self.merge(torch.cat([h, more.pop()], -1))
        elif self.kind == "languages":
            h = h + self.adapters[more](h)
        elif self.kind == "dict_state":
            more["sum"] = more.get("sum", 0.0) + h.mean(1, keepdim=True)
            more["calls"] = more.get("calls", 0) + 1
            h = h + more["sum"] / more["calls"]
        elif self.kind == "conditioned":
            h = h + more
        elif self.kind == "noise":
            h = h + 0.1 * torch.randn_like(h) if self.training else h
        elif self.kind == "running_mean":
            if self.training:
                with torch.no_grad():
                    self.mean.mul_(0.9).add_(0.1 * h.mean((0, 1)))
            h = h - self.mean
        elif self.kind == "memory":
            h = h if self.state is None else h + self.state
            self.state = h.mean(1, keepdim=True).detach()
        elif self.kind == "attribute":
            h = h * self.gain
        elif self.kind == "outside_tensor":
            h = h + self.shift
        elif self.kind in ("experts", "routed"):
            weights, choice = self.router(h).softmax(-1).max(-1)
            out = torch.zeros_like(h)
            for number, expert in enumerate(getattr(self, self.kind)):
                rows = choice == number
                if rows.any():
                    out[rows] = (expert(h[rows]) * weights[rows].unsqueeze(-1)).to(out.dtype)
            h = out
        h = x + self.drop(self.down(F.gelu(self.up(h))))
        if self.kind == "auxiliary":
            self.aux = h.square().mean()
        if self.kind == "list_outputs":
            more.append(h)
        return {"h": h} if self.kind == "dict_output" else (h, h.square().mean()) if self.kind == "tuples" else h


class PlainModel(nn.Module):
    """Batches as `batch` makes them to a loss, or to what `losses` reads."""

    def __init__(self, kind: str, extra: bool) -> None:
        super().__init__()
        self.kind = kind
        self.embed, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(PlainLayer(kind, index) for index in range(LAYERS))
        if extra:  # no rank uses it
            self.spare = nn.Linear(WIDTH, WIDTH)
            self.layers[1].spare = nn.Linear(WIDTH, WIDTH)
        if kind == "shared_block":
            self.layers[2] = self.layers[0]
        if kind == "tied":
            self.head.weight = self.embed.weight
        if kind == "heads":
            self.heads = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in ("words", "tags", "parts")})
        if kind == "conditioned":
            self.condition = nn.Parameter(torch.randn(WIDTH))
        if kind == "gan":
            self.critic = nn.ModuleList(PlainLayer(kind, index) for index in range(2))
        if kind in ("tower", "vision"):
            self.tower = "tower" if kind == "tower" else "vision_tower"
            self.add_module(
                self.tower + "s", nn.ModuleList(PlainLayer(kind, i) for i in range(2)).requires_grad_(False)
            )
            self.projector = nn.Linear(WIDTH, WIDTH)
            self.embed.requires_grad_(kind == "tower")
        if kind == "frozen_half":
            self.layers[:2].requires_grad_(False)
        if kind == "thaw":
            self.layers[0].requires_grad_(False)

    def body(self, x: Tensor, language: str | None, skip: int) -> tuple[Tensor, Tensor]:
        x, extra = self.embed(x), x.new_zeros(())
        more: Any = {"uvit": list, "list_outputs": list, "dict_state": dict}.get(self.kind, lambda: language)()
        more = self.condition if self.kind == "conditioned" else more
        for _ in range(2 if self.kind == "looped" else 1):
            for index, layer in enumerate(self.layers):
                if index == skip:
                    continue
                x = layer(x=x)["h"] if self.kind == "dict_output" else layer(x) if more is None else layer(x, more)
                if self.kind == "tuples":
                    x, each = x
                    extra = extra + 0.01 * each
        if self.kind == "auxiliary":
            extra = sum((0.01 * layer.aux for layer in self.layers), extra)
        return (x + sum(more) if self.kind == "list_outputs" else x), extra

    def forward(
        self, x: Tensor, y: Tensor, task: str = "", language: str | None = None, image: Tensor | None = None,
        part: str = "", skip: int = -1,
    ) -> Any:  # fmt: skip
        if image is not None:
            for layer in getattr(self, self.tower + "s"):
                image = layer(image)
            x = x + self.projector(image)
        out, extra = self.body(x, language, skip)
        out = (self.heads[task] if self.kind == "heads" else self.head)(out)
        if self.kind == "gan":
            fake = out.detach() if part == "critic" else out
            score = lambda v: self.critic[1](self.critic[0](v)).mean()  # noqa: E731
            return score(fake).square() + (score(y) - 1).square() if part == "critic" else (score(fake) - 1).square()
        if self.kind == "two_forwards":
            return out
        if self.kind == "two_losses":
            return F.mse_loss(out, y), out.square().mean()
        return F.mse_loss(out, y) + extra

    def score(self, x: Tensor, y: Tensor) -> Tensor:
        """Return a loss by another method than forward."""
        return F.mse_loss(self.head(self.body(x, None, -1)[0]), y)

    @staticmethod
    def batch(kind: str, rng: torch.Generator, step: int, rank: int) -> dict[str, Any]:
        batch: dict[str, Any] = {name: torch.randn(2, 6, WIDTH, generator=rng) for name in ("x", "y")}
        if kind in ("tower", "vision") and (rank == 0 or step == 1):  # step 1: both ranks have images
            batch["image"] = torch.randn(2, 6, WIDTH, generator=rng)
        more = {"heads": {"task": ("words", "tags")[(rank + step) % 2] if step else "words"}}
        more["languages"] = {"language": ("de", "fr")[rank] if step != 1 else "it"}
        return batch | more.get(kind, {}) | ({"skip": step} if kind == "layer_drop" else {})

    @staticmethod
    def losses(kind: str, model: Any, batch: dict[str, Any]) -> Iterator[tuple[Tensor, bool]]:
        """Yield each loss of one micro-step, and whether another backward of the same graph follows."""
        if kind == "gan":
            yield model(**batch, part="critic"), False
            yield model(**batch, part="generator"), False
        elif kind == "two_losses":
            first, second = model(**batch)
            yield first, True
            yield second, False
        elif kind == "two_forwards":
            yield F.mse_loss(model(**batch), model(x=batch["y"], y=batch["x"])), False
        else:
            yield (model.score(**batch) if kind == "method" else model(**batch)), False

    @staticmethod
    def before(kind: str, model: Any, step: int, part: str) -> None:
        """Do what the user's loop does before each pass."""
        for index, layer in enumerate(model.layers if kind in ("attribute", "outside_tensor") else ()):
            layer.gain, layer.shift = 0.5 + 0.25 * step, torch.full((WIDTH,), 0.1 * (step + index))
        if kind == "thaw" and step >= 1 and part == "train":
            model.layers[0].requires_grad_(True)

    @staticmethod
    def watch(model: Any) -> list[Tensor]:
        """Cache what each layer's `up` returns, with its gradient."""
        cache: list[Tensor] = []

        def keep(module: nn.Module, args: Any, output: Tensor) -> None:
            if output.requires_grad:
                output.retain_grad()
                cache.append(output)

        for layer in model.layers:
            layer.up.register_forward_hook(keep)
        return cache

    @staticmethod
    def cached(cache: list[Tensor]) -> list[Tensor]:
        found = [t for output in cache for t in (output.detach().float().clone(), output.grad.float().clone())]
        cache.clear()
        return found
