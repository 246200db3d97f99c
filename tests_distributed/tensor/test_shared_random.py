"""Dropout beside tensor parallelism: however ranks are seeded, a group drops the same elements of what all of it holds."""

import random
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from nemo_like import parallelize
from nemo_like._util.rng import seed_all
from nemo_like.distributed.mesh import build_mesh
from nemo_like.distributed.ranks import Ranks
from nemo_like.options import PipelineParallel, TensorParallel
from tests.checks import assert_bitwise, backward, gradients_of, labelled, seeded, whole
from tests.models.tiny import made
from tests_distributed.counting import heard
from tests_distributed.small_model import WIDTH, SmallModel, tokens
from tests_distributed.spawn import on_ranks, run_ranks

MODES = ("none", "full", "selective", "submodule", "sequential")


def _phi(attention: float = 0.0, hidden: float = 0.2) -> nn.Module:
    return seeded(
        made, "Phi", vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, resid_pdrop=hidden, embd_pdrop=hidden, attention_dropout=attention, use_cache=False,
    )  # fmt: skip


def _batch(rows: int = 4) -> dict[str, torch.Tensor]:
    return labelled(torch.randint(64, (rows, 8), generator=torch.Generator().manual_seed(1)))


def _steps(model: Any, seeds: list[int | None]) -> list[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """Loss and gradients of a step for each seed; None: not seeded again."""
    found = []
    for seed in seeds:
        if seed is not None:
            torch.manual_seed(seed)
        found.append((backward(model(**_batch()).loss), gradients_of(model)))
        model.zero_grad()
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_ranks_that_are_seeded_apart_drop_what_one_process_does(rank: int, world_size: int, mode: str) -> None:
    """Where nothing that is cut is dropped, a group draws what one process with its first rank's seeds draws."""
    seeds = [100, None, 200]
    expected = _steps(_phi(), seeds)
    model = parallelize(_phi(), ac=mode, tp=2, device="cpu")
    for (loss, grads), (wanted, others) in zip(_steps(model, [s and s + rank for s in seeds]), expected):
        torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=0)
        torch.testing.assert_close(grads, others, rtol=1e-4, atol=1e-6)


@pytest.mark.few(1)
@pytest.mark.parametrize("modes", [("full", "selective"), MODES])
@on_ranks(2)
def test_every_mode_gives_the_same_bits(rank: int, world_size: int, modes: tuple[str, ...]) -> None:
    seeds: list[int | None] = [100 + rank, None]
    expected: Any = None
    for mode in modes:
        found = _steps(parallelize(_phi(attention=0.1), ac=mode, tp=2, device="cpu"), seeds)
        expected = expected or found
        assert_bitwise(found, expected, mode)
    for loss, grads in expected:
        norm = torch.stack([loss, grads["model.layers.0.input_layernorm.weight"].sum()])
        alike = [torch.empty_like(norm) for _ in range(world_size)]
        torch.distributed.all_gather(alike, norm)
        assert torch.equal(*alike)


def _beside(rank: int, world_size: int, axis: str) -> tuple[float, bytes]:
    torch.manual_seed(50 + rank)
    if axis == "cp":
        model = parallelize(_phi(), ac="full", mesh=build_mesh(cp=2, tp=2, device_type="cpu"), cp=2, tp=2)
        torch.manual_seed(50 + rank)
        loss = backward(model(**_batch()).loss)
    else:
        model = parallelize(
            _phi(), ac="full", tp=2, pp=PipelineParallel(2, microbatches=2), sample_input=_batch(2), device="cpu"
        )
        torch.manual_seed(50 + rank)
        loss = model.step(**_batch())
    norms = {n: whole(p.grad) for n, p in model.named_parameters() if "layernorm.weight" in n}
    return [
        float(loss.detach()),
        *(float(grad.sum()) for grad in norms.values()),
    ], torch.get_rng_state().numpy().tobytes()


@pytest.mark.few(1)
@pytest.mark.parametrize("axis", ["cp", "pp"])
def test_groups_of_other_axes_draw_apart(axis: str) -> None:
    (first, here), (second, there), (third, apart), (fourth, also) = run_ranks(4, _beside, axis)
    assert first == second and third == fourth
    assert here == there and apart == also and here != apart


class Holder:
    def __init__(self, generator: Any) -> None:
        self.generator, self.other = generator, self


class Drawing(nn.Module):
    """A block that draws as `how` says."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.up, self.down = how, nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        kinds = {"own": torch.Generator, "own Python": random.Random, "own NumPy": numpy.random.default_rng}
        kind, _, place = how.partition(" in ")
        self.own: Any = kinds[kind]() if kind in kinds else None
        self.how = kind
        if place:  # and nothing but that leads to it
            places = {"a list": [self.own], "a dict": {"a": (1, self.own)}, "an object": Holder(self.own)}
            self.place, self.own = places[place], None

    @property
    def generator(self) -> Any:
        """Its own generator, wherever it is."""
        if self.own is not None:
            return self.own
        if isinstance(self.place, Holder):
            return self.place.generator
        return self.place[0] if isinstance(self.place, list) else self.place["a"][1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(self.up(x).relu())
        if self.how == "uneven":
            torch.rand(1 + torch.distributed.get_rank())
        elif self.how == "Python":
            x = x * random.random()
        elif self.how == "own":
            x = x * (torch.rand(x.shape, generator=self.generator) < 0.8)
        elif self.how.startswith("own "):
            x = x * float(self.generator.random())
        elif self.how == "NumPy":
            x = x * float(numpy.random.rand())
        return torch.nn.functional.dropout(x, 0.2) if self.how == "torch" else x


def _drawing(how: str) -> Any:
    plan = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}
    return parallelize(SmallModel(lambda: Drawing(how)), ac="full", tp=TensorParallel(2, plan=plan), device="cpu")


def _other_generators(rank: int, world_size: int, how: str) -> tuple[list[float], list[tuple[float, float]], list[str]]:
    said, model = heard(), _drawing(how)
    for layer in model.layers if how.partition(" in ")[0] == "own" else ():
        layer.generator.manual_seed(rank)
    losses, drawn = [], []
    for _ in range(2):
        for seed in (torch.manual_seed, random.seed, numpy.random.seed):
            seed(rank)
        losses.append(float(model(tokens(2)).detach()))
        drawn.append((random.random(), float(numpy.random.rand())))
    return losses, drawn, [text for text in said if "random numbers" in text]


HELD = ("own in a list", "own Python in a dict", "own NumPy in an object")


@pytest.mark.parametrize("how", ["torch", "Python", "NumPy", "nothing", *HELD])
def test_generators_that_the_model_draws_from_are_shared(how: str) -> None:
    (losses, drawn, said), (others, drawn_there, nothing) = run_ranks(2, _other_generators, how)
    assert losses == others
    for (python, of_numpy), (python_there, of_numpy_there) in zip(drawn, drawn_there):  # after either call
        alike = python == python_there, of_numpy == of_numpy_there
        assert alike == (how == "Python", how == "NumPy"), "no other is changed"
    assert len(said) == 1 and nothing == [], "on rank zero, once"


@on_ranks(2)
def test_ranks_that_draw_different_amounts_are_refused(rank: int, world_size: int) -> None:
    model = _drawing("uneven")
    with pytest.raises(RuntimeError, match="drew different amounts of random numbers in a call of this SmallModel"):
        model(tokens(2))


@on_ranks(2)
def test_a_model_that_begins_to_draw_later(rank: int, world_size: int) -> None:
    """A model that draws from its third call on."""
    model = _drawing("nothing")
    torch.manual_seed(rank)
    for _ in range(2):
        model(tokens(2))
    for layer in model.layers:
        layer.how = "torch"
    losses = [float(model(tokens(2)).detach()) for _ in range(2)]
    torch.manual_seed(rank)
    losses.append(float(model(tokens(2)).detach()))
    everyone: list[Any] = [None, None]
    torch.distributed.all_gather_object(everyone, losses)
    assert everyone[0] == everyone[1]


@on_ranks(2)
def test_a_model_that_begins_to_draw_later_and_was_seeded_apart_is_refused(rank: int, world_size: int) -> None:
    model = _drawing("nothing")
    model(tokens(2))
    torch.manual_seed(rank)
    for layer in model.layers:
        layer.how = "torch"
    with pytest.raises(RuntimeError, match="Ranks of a tp group drew different random numbers in a call"):
        model(tokens(2))


@on_ranks(2)
def test_a_model_whose_modules_begin_to_train_later(rank: int, world_size: int) -> None:
    """The first call of a model in training draws nothing, since what is inside of it evaluates."""
    expected, model = _steps(_phi(), [100])[0], parallelize(_phi(), ac="none", tp=2, device="cpu")
    model.model.eval()
    _steps(model, [50 + rank])
    loss, _ = _steps(model.train(), [100 + rank])[0]
    torch.testing.assert_close(loss, expected[0], rtol=1e-5, atol=0)


def test_a_job_seeds_the_groups_of_tp_apart() -> None:
    drawn = []
    for rank in range(8):
        ranks = Ranks(rank, 8, torch.device("cpu"), tp=2, cp=2)
        seed_all(7, 3, ranks.data_rank, ranks.tp_group)
        drawn.append((float(torch.rand(())), random.random()))
    of_torch, of_python = zip(*drawn)
    assert of_torch[0::2] == of_torch[1::2] and len(set(of_torch)) == 4
    assert len(set(of_python[:4])) == len(set(of_python[4:])) == 1 and len(set(of_python)) == 2, "by sample"
