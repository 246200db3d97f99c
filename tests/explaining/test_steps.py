"""Steps that ran here, recorded: their parts, their layers, and causes that were planted in them."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from nemo_like import Job, dry_run, explain
from nemo_like.explaining.explanation import Explanation
from nemo_like.models import resolve_model
from tests.explaining.taped import Taped, dry_runs_taped
from tests.models.blocks import Layer, Stack

WIDTH, LAYERS = 32, 3


def mlp(layer: Any, x: torch.Tensor) -> torch.Tensor:
    inner = torch.relu(layer.up(x))
    return x + layer.down(inner)


def plain(layers: int = LAYERS) -> nn.Module:
    sizes = {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    return Stack(Layer(mlp, **{name: nn.Linear(*size) for name, size in sizes.items()}) for _ in range(layers))


class Loop:
    """A loop with one thing wrong, by its name."""

    def __init__(self, wrong: str, layers: int) -> None:
        self.wrong, self.model = wrong, plain(layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, foreach=False)
        self.kept: list[Any] = []

    def step(self, x: torch.Tensor) -> None:
        if self.wrong == "output kept":
            self.kept = []
        if self.wrong != "zero_grad late":
            self.optimizer.zero_grad()
        loss = self.loss(x)
        if self.wrong == "zero_grad late":
            self.optimizer.zero_grad()
        loss.backward()
        if self.wrong not in ("accumulates", "no update"):
            self.optimizer.step()
        if self.wrong == "loss kept":
            self.kept.append(loss)
        if self.wrong in ("metrics kept", "accumulates"):
            self.kept.append(x.abs().repeat(4, 1))  # a metric
        if self.wrong == "state kept":
            self.kept = [self.state_dict_of()]

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        out = self.model(x)
        if self.wrong == "outputs kept":
            self.kept.append(out)
        if self.wrong == "output kept":  # that of this step only
            self.kept = [out.detach()]
        return out.square().mean()

    def state_dict_of(self) -> Any:
        return copy.deepcopy(self.optimizer.state_dict())


def explained(wrong: str, steps: int = 4, rows: int = 64, layers: int = LAYERS) -> Explanation:
    torch.manual_seed(0)
    with Taped() as tape:
        job = Loop(wrong, layers)
        x = torch.randn(rows, WIDTH)
        second = copy.deepcopy(job.model) if wrong == "second model" else None
        for _ in range(steps):
            job.step(x)
        made = explain(tape.made.snapshot())
        del second
    return made


@pytest.mark.parametrize(
    ("wrong", "kind", "without"),
    [
        ("zero_grad late", "gradients of the last step", ""),
        ("outputs kept", "outputs of an earlier step", "output kept"),
        ("metrics kept", "growth", ""),
        ("accumulates", "growth", "no update"),
        ("state kept", "made while saving", ""),
        ("second model", "a further copy of weights", ""),
    ],
)
def test_a_cause_planted_in_a_loop_is_the_first_that_is_said(wrong: str, kind: str, without: str) -> None:
    """The peak without the cause is the peak of the loop `without` it, which ran."""
    made, right = explained(wrong, layers=8), explained(without, layers=8)
    assert made.unexpected and made.unexpected[0].kind == kind, (made.unexpected, str(made))
    assert not right.unexpected
    assert made.unexpected[0].peak_after == pytest.approx(right.peak_bytes, rel=0.001)
    assert made.unexpected[0].size == made.peak_bytes - made.unexpected[0].peak_after


def test_a_plain_model_has_its_parts_and_layers() -> None:
    made = explained("", steps=2, rows=512)
    weights = 4 * sum(p.numel() for p in plain().parameters())
    steps = 4 * len(list(plain().parameters()))
    assert (made.parts["weights"], made.parts["optimizer state"]) == (weights, 2 * weights + steps)
    inner, out = 4 * 512 * 4 * WIDTH, 4 * 512 * WIDTH  # of a layer: what relu returned, and its output
    assert made.layers == (*[inner + out] * (LAYERS - 1), inner)  # backward of the loss has freed the last one
    # One kept tensor a layer remains.
    cure = next(cure for cure in made.cures if cure.change.startswith("ac='full'"))
    assert cure.peak_after < made.peak_bytes


def test_a_transformers_model_has_its_parts_and_layers() -> None:
    model, source = resolve_model("llama-tiny").built("cpu", torch.float32)
    batch = source.sample_input(2, 128)
    with Taped() as tape:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
        for _ in range(2):
            loss = model(**batch, use_cache=False).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            del loss
    made = explain(tape.made.snapshot())
    assert len(made.layers) == model.config.num_hidden_layers
    assert max(made.layers) < 1.05 * min(made.layers)
    # In this loop zero_grad() comes after the forward, so that the gradients lie under it.
    assert made.unexpected[0].kind == "gradients of the last step"
    # Without them the peak is in backward, which has all gradients but the last ones.
    assert 0.9 < made.unexpected[0].size / (4 * model.num_parameters()) < 1


def test_a_rank_of_eight_under_fsdp2_has_its_parts_and_layers() -> None:
    model, source = resolve_model("llama-tiny").built("meta")
    with dry_runs_taped() as tapes:
        run = dry_run(model, Job.of(gpu="h100-80gb", ac="none", world_size=8), source.sample_input(2, 128), layers=None)
    made = explain(tapes[-1].snapshot())
    counters = 4 * len(list(model.parameters()))  # of steps, which are on the host
    assert made.peak_bytes == run.peak_bytes + counters
    gathered, reduced = run.parts["gathered"], run.parts["gradients"]
    assert gathered < made.parts["gathered weights and communication"] <= gathered + reduced
    assert made.parts["optimizer state"] == run.parts["optimizer"] + counters
    assert len(made.layers) == model.config.num_hidden_layers and not made.unexpected
