"""Ranks that run other layers under FSDP2 raise on all ranks, with the first layer that differs; none mixes weights."""

import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from nemo_like import parallelize
from nemo_like._util.log import forget_announcements
from nemo_like.distributed import layer_order
from tests.checks import seeded
from tests.models.blocks import Stack
from tests.models.tiny import Block
from tests_distributed.counting import heard
from tests_distributed.small_model import WIDTH
from tests_distributed.spawn import on_ranks, refused_on_ranks, run_ranks


class Skipping(nn.Module):
    """Four blocks of which some are skipped, then one of two heads; the output of a block may be cut from backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.heads = nn.ModuleDict({"words": nn.Linear(WIDTH, 3), "tags": nn.Linear(WIDTH, 3)})

    def forward(self, x: torch.Tensor, skipped: tuple[int, ...] = (), head: str = "words", cut: int = -1) -> Any:
        for index, block in enumerate(self.blocks):
            if index not in skipped:
                x = block(x).detach() if index == cut else block(x)
        return self.heads[head](x).square().mean()


def _steps(rank: int, world: int, ac: str, alike: int, mode: str, of_ranks: tuple[dict[str, Any], ...]) -> None:
    """So many steps on which all ranks agree, then one on which they do not."""
    model = parallelize(seeded(Skipping), ac=ac)
    for number in range(alike + 1):
        model.train(number < alike or mode == "train")
        with torch.set_grad_enabled(model.training):
            loss = model(torch.ones(2, WIDTH), **of_ranks[rank] if number == alike else {})
        if model.training:
            loss.backward()


SKIPS = "FSDP2 gathers and reduces each layer on all ranks together. Run the same layers everywhere: draw the "


@pytest.mark.parametrize(
    ("ac", "alike", "mode", "of_ranks", "differing"),
    [
        ("none", 0, "train", ({"skipped": (1, 2)}, {}),
         "the forward of blocks.3 on rank 0 and the forward of blocks.1 on rank 1"),
        ("full", 0, "train", ({"skipped": (1,)}, {"skipped": (2,)}),
         "the forward of blocks.2 on rank 0 and the forward of blocks.1 on rank 1"),
        ("selective", 0, "evaluate", ({}, {"skipped": (3,)}),
         "the forward of blocks.3 on rank 0 and the end of forward on rank 1"),
        ("full", 5, "train", ({"skipped": (1,)}, {"skipped": (2,)}),
         "the forward of blocks.2 on rank 0 and the forward of blocks.1 on rank 1"),
        ("full", 5, "evaluate", ({"skipped": (1,)}, {"skipped": ()}),
         "the forward of blocks.2 on rank 0 and the forward of blocks.1 on rank 1"),
        ("full", 5, "train", ({"skipped": ()}, {"skipped": (3,)}),
         "the forward of blocks.3 on rank 0 and the end of forward on rank 1"),
    ],
)  # fmt: skip
def test_skipped_layers(ac: str, alike: int, mode: str, of_ranks: Any, differing: str) -> None:
    words = re.escape(f"Ranks run different layers: next is {differing}. {SKIPS}")
    refused_on_ranks(2, _steps, ac, alike, mode, of_ranks, error=RuntimeError, match=words)


def _later_in_backward(rank: int, world: int) -> None:
    model = parallelize(seeded(Skipping), ac="none")
    for step in range(6):
        model(torch.ones(2, WIDTH), cut=1 if step == 5 and rank == 0 else -1).backward()


def test_a_backward_that_ends_early_on_one_rank_is_refused() -> None:
    errors = run_ranks(2, _later_in_backward, return_exceptions=True)
    # The other rank waits in a reduction, which ends with the connection of the one that raises.
    assert all(isinstance(error, RuntimeError) for error in errors)
    wanted = "next is the end of backward on rank 0 and the reduction of blocks.2 on rank 1"
    assert any(wanted in str(error) for error in errors), errors


def _one_mode_on_each_rank(rank: int, world: int) -> None:
    model = parallelize(seeded(Skipping), ac="none")
    for _ in range(3):
        model(torch.ones(2, WIDTH)).backward()
    if rank == 0:
        model.eval()
        with torch.no_grad():
            model(torch.ones(2, WIDTH))
    model(torch.ones(2, WIDTH)).backward()


def test_an_evaluation_on_one_rank_alone_is_refused() -> None:
    words = "a forward in evaluation mode without gradients on rank 0"
    refused_on_ranks(2, _one_mode_on_each_rank, error=RuntimeError, match=words)


@on_ranks(2)
def test_ranks_that_skip_the_same_layers_train(rank: int, world: int) -> None:
    model = parallelize(seeded(Skipping), ac="full")
    for step in range(6):
        mine = {"skipped": (step % 4,), "head": "words" if step % 2 else "tags", "cut": step % 3}
        model(torch.ones(2, WIDTH), **mine).backward()
        model.train(step % 2 == 0)


def _warnings_of_layer_drop(rank: int, world: int) -> int:
    config = transformers.Wav2Vec2Config(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, conv_dim=(16,), conv_stride=(5,),
        conv_kernel=(10,), num_feat_extract_layers=1, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
        vocab_size=12, layerdrop=0.5,
    )  # fmt: skip
    forget_announcements()
    lines = heard()
    parallelize(transformers.Wav2Vec2ForCTC(config), ac="none")
    return sum("layerdrop is 0.5, and transformers runs every layer" in text for text in lines)


def test_layer_drop_that_transformers_turns_off_is_said() -> None:
    assert run_ranks(2, _warnings_of_layer_drop) == [1, 0]


@on_ranks(2)
def test_an_old_question_is_none(rank: int, world: int) -> None:
    """One rank waits for the other at each change of the mode, then none changes for longer than a look at the store."""
    model = parallelize(seeded(Skipping), ac="none")
    for train in (True, False, True, True, False, True):
        torch.distributed.barrier()
        time.sleep(0.02 * rank)
        model.train(train)
        with torch.set_grad_enabled(train):
            loss = model(torch.ones(2, WIDTH))
        if train:
            loss.backward()
    for _ in range(8):
        time.sleep(layer_order._LOOK / 4)
        model(torch.ones(2, WIDTH)).backward()


def _layers() -> tuple[nn.Module, torch.Tensor]:
    return parallelize(Stack([Block(8), Block(8)]), "fsdp2", "none", device="cpu"), torch.rand(2, 8)


ALONE: dict[str, Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor | None]] = {
    "skips": lambda model, x, loss: None,
    "runs one more": lambda model, x, loss: loss + model(x).mean(),
    "detaches": lambda model, x, loss: loss.detach().requires_grad_(),
}
"""What one rank makes of a step's loss."""


def _left_out(rank: int, world: int, how: str, at: int) -> None:
    model, x = _layers()
    for number in range(at + 2):
        loss = model(x).square().mean()
        if rank == 1 and number == at:
            loss = ALONE[how](model, x, loss)
        if loss is not None:
            loss.backward()


@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize("how", ALONE)
def test_a_backward_that_one_rank_leaves_out_is_named_on_both(how: str, at: int) -> None:
    words = "next is the backward of layers.1 on rank 0 and a forward in training mode with gradients on rank 1"
    refused_on_ranks(2, _left_out, how, at, error=RuntimeError, match=rf"(?s){re.escape(words)}.*left a backward out")


@on_ranks(2)
def test_forwards_in_a_row_put_few_questions(rank: int, world: int) -> None:
    """Pairs of answers put none from the second step on; an evaluation without ``no_grad`` two, however long it is."""
    model, x = _layers()
    asked: list[str] = []
    ask = layer_order.LayerOrder._ask

    def noted(order: layer_order.LayerOrder, index: int, event: str) -> None:
        asked.append(event)
        ask(order, index, event)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer_order.LayerOrder, "_ask", noted)
        for evaluated in (0, 0, 0, 12, 30, 50):
            asked.clear()
            (model(x).mean() + model(x).square().mean()).backward()
            for _ in range(evaluated):
                model(x)
            assert len(asked) <= (2 if evaluated else 0), asked
