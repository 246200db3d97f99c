"""Pipelines whose stages a function of the caller's makes (``split=``), against one process."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn

from nemo_like import parallelize
from nemo_like.distributed import clip_grad_norm_
from nemo_like.options import PipelineParallel
from tests.checks import assert_bitwise, backward, on_meta, refused_unchanged, seeded
from tests.models.families import DIM, VOCAB, Block
from tests_distributed.context.cut_models import without_dropout
from tests_distributed.spawn import on_ranks, run_ranks

ROWS, MICROBATCHES = 8, 4


class SkipDecoder(nn.Module):
    """What the list of layers cannot cut: the embedding goes past all layers, and a norm stands between them."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed, self.middle, self.norm = nn.Embedding(VOCAB, DIM), nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.scale: Tensor
        self.register_buffer("scale", torch.full((DIM,), 0.5))

    def forward(self, input_ids: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
        first = x = self.embed(input_ids)
        for index, block in enumerate(self.blocks):
            x = self.middle(x) if index == 2 else x
            x = block(x)
        logits = self.head(self.norm(x + first * self.scale))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=reduction)


class Stage(nn.Module):
    """One of them: hidden states, and the embedding beside them."""

    def __init__(self, model: Any, blocks: range, stage: int, stages: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({str(i): model.blocks[i] for i in blocks})
        if stage == 0:
            self.embed = model.embed
        if 2 in blocks:
            self.middle = model.middle
        if stage == stages - 1:
            self.norm, self.head = model.norm, model.head
            self.register_buffer("scale", model.scale)

    def run(self, x: Tensor) -> Tensor:
        for index, block in self.blocks.items():
            x = block(self.middle(x) if index == "2" else x)
        return x


class First(Stage):
    def forward(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        first = self.embed(input_ids)
        return self.run(first), first


class Middle(Stage):
    def forward(self, x: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
        return self.run(x), first


class Last(Stage):
    def forward(self, x: Tensor, first: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.norm(self.run(x) + first * self.scale))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def split(model: nn.Module, stage: int, stages: int) -> nn.Module:
    each = 4 // stages
    kind = First if stage == 0 else Last if stage == stages - 1 else Middle
    return kind(model, range(stage * each, stage * each + each), stage, stages)


def _build(tied: bool = False) -> nn.Module:
    return without_dropout(seeded(SkipDecoder, tied).train())


def _batch(length: int = 12) -> dict[str, Tensor]:
    ids = torch.randint(1, VOCAB, (ROWS, length), generator=torch.Generator().manual_seed(3))
    labels = ids.roll(-1, 1)
    labels[0, :5] = -100  # microbatches count differently
    return {"input_ids": ids, "labels": labels}


def _reference(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """One process, the same microbatches one after the other, each mean times its share."""
    count = int(batch["labels"].ne(-100).sum())
    total = torch.zeros(())
    for ids, labels in zip(batch["input_ids"].chunk(MICROBATCHES), batch["labels"].chunk(MICROBATCHES)):
        total += backward(model(ids, labels) * (int(labels.ne(-100).sum()) / count))
    return total


def _same(pipeline: Any, model: nn.Module, tied: bool = False, where: str = "") -> None:
    wanted = dict(model.named_parameters(remove_duplicate=False))
    for name, parameter in pipeline.named_parameters():
        got, want = parameter.grad, wanted[name].grad
        assert got is not None and want is not None, (where, name)
        if tied and name in ("embed.weight", "head.weight"):  # the sums of two stages, not microbatch by microbatch
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)
        else:
            assert torch.equal(got, want), (where, name, (got - want).abs().max())


CASES: list[tuple[str, Any, bool]] = [
    ("1f1b", "none", False), ("1f1b", "full", True), ("zbv", "selective", False), ("interleaved_1f1b", "submodule", True),
]  # fmt: skip
MORE_CASES: list[tuple[str, Any, bool]] = [
    ("gpipe", "submodule", False), ("zbv", "none", True), ("zbv", "full", False),
    ("interleaved_zero_bubble", "sequential", False), ("interleaved_zero_bubble", "full", True),
    ("dualpipev", "full", False),
]  # fmt: skip


@pytest.mark.compat
@pytest.mark.few(1)
@pytest.mark.parametrize("cases", [CASES[1:3], [CASES[0], CASES[3], *MORE_CASES]], ids=["some", "others"])
@on_ranks(2, timeout=240)
def test_stages_of_a_function_give_the_bits_of_one_process(
    rank: int, world_size: int, cases: list[tuple[str, Any, bool]]
) -> None:
    for schedule, ac, tied in cases:
        where = f"{schedule} {ac} {tied}"
        model, batch = _build(tied), _batch()
        loss = _reference(model, batch)
        pp = PipelineParallel(2, schedule=schedule, microbatches=MICROBATCHES, split=split, loss_mean="tokens")
        pipeline = parallelize(_build(tied), ac=ac, pp=pp, sample_input={key: value[:2] for key, value in batch.items()})
        for _ in range(2):
            pipeline.zero_grad()
            torch.testing.assert_close(pipeline.step(**batch), loss, rtol=0, atol=1e-6, msg=where)
            _same(pipeline, model, tied, where)
        torch.testing.assert_close(pipeline.eval_step(**batch), loss, rtol=0, atol=1e-6)
        norm = nn.utils.clip_grad_norm_(model.parameters(), math.inf)
        for whole_or_stage in (pipeline, pipeline.module, pipeline.parameters()):
            torch.testing.assert_close(clip_grad_norm_(whole_or_stage, math.inf), norm, rtol=1e-5, atol=0, msg=where)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        torch.testing.assert_close(pipeline.clip_grad_norm_(1.0), norm, rtol=1e-5, atol=0)
        assert pipeline.full_state_dict().keys() == (model.state_dict().keys() if rank == 0 else set()), where
        pipeline.zero_grad()
        short = _batch(7)  # other shapes are sent
        model.zero_grad()
        torch.testing.assert_close(pipeline.step(**short), _reference(model, short), rtol=0, atol=1e-6)
        _same(pipeline, model, tied, where)


def _saved(rank: int, world_size: int, folder: str) -> None:
    """Stages of a meta model read their part of the whole model's file, are trained, and saved."""
    whole = _build()
    empty = on_meta(lambda: without_dropout(SkipDecoder().train()))
    batch = _batch()
    pp = PipelineParallel(2, microbatches=MICROBATCHES, split=split, loss_mean="tokens")
    pipeline = parallelize(empty, ac="full", pp=pp, sample_input={key: value[:2] for key, value in batch.items()})
    pipeline.materialize(state_dict=whole.state_dict())
    torch.testing.assert_close(pipeline.step(**batch), _reference(whole, batch), rtol=0, atol=1e-6)
    for model in (pipeline, whole):
        torch.optim.AdamW(model.parameters(), lr=0.01).step()
    dcp.save({"model": pipeline.module.state_dict()}, checkpoint_id=folder)
    if rank == 0:
        torch.save(whole.state_dict(), f"{folder}/trained.pt")


def test_stages_of_a_function_are_saved_under_the_names_of_the_whole_model(tmp_path: Path) -> None:
    run_ranks(2, _saved, str(tmp_path))
    state = {"model": SkipDecoder().state_dict()}
    dcp.load(state, checkpoint_id=tmp_path)
    assert_bitwise(state["model"], torch.load(tmp_path / "trained.pt"))


def _refusals(rank: int, world_size: int) -> None:
    sample = {key: value[:2] for key, value in _batch().items()}

    def refused(function: Any, message: str, **options: Any) -> None:
        model = _build()
        given = {"pp": PipelineParallel(2, microbatches=MICROBATCHES, split=function), "ac": "full"} | options
        with refused_unchanged(model, message):
            parallelize(model, sample_input=sample, **given)

    def changed(change: Any) -> Any:
        def function(model: Any, stage: int, stages: int) -> Any:
            tree = split(model, stage, stages)
            change(tree, model, stage)
            return tree

        return function

    renamed = changed(lambda tree, *_: setattr(tree, "blocks", nn.ModuleList(tree.blocks.values())))
    without_middle = changed(lambda tree, *_: setattr(tree, "middle", nn.Identity()))

    def twice(tree: Any, model: Any, stage: int) -> None:
        tree.blocks["0"], tree.blocks["1"], tree.norm = model.blocks[0], model.blocks[1], model.norm

    def computing(at: int, forward: Any) -> Any:
        return changed(lambda tree, model, stage: stage == at and setattr(tree, "forward", forward))

    def headless(tree: Any, model: Any, stage: int) -> None:
        if stage == 1:
            del tree.blocks
        elif stage == 0:
            tree.blocks = nn.ModuleDict({str(i): block for i, block in enumerate(model.blocks)})
            tree.middle = model.middle

    for wrong, words in (
        (lambda model, stage, stages: None, "split returned None for stage 0 of 2; it must be an nn.Module"),
        (renamed, r"'blocks.0.norm1.weight' of stage 1 is the model's 'blocks.2.norm1.weight': keep that name"),
        (lambda *given: copy.deepcopy(split(*given)), "of stage 0 is none of the model's"),
        (without_middle, "no stage has 'middle.weight'"),
        (
            computing(0, lambda input_ids: input_ids),
            "stage 0 returns torch.int64. A stage sends one floating-point tensor",
        ),
        (computing(0, lambda tokens: tokens), "forward takes tokens, and a micro-batch has input_ids, labels"),
        (computing(1, lambda x, first: x), "without a loss"),
        (changed(headless), "stage 1 has none of the model's layers"),
    ):
        refused(wrong, words)
    four = PipelineParallel(2, "interleaved_1f1b", microbatches=MICROBATCHES, split=changed(twice))
    refused(None, r"'norm.weight' is in stages 0, 1, 2, 3. A parameter is one stage's", pp=four)
    refused(split, "ac is 1.00GiB with split=, whose stages are the caller's own: no plan is made", ac="1GiB")


def test_stages_that_are_not_the_models_are_refused_and_the_model_left_unchanged() -> None:
    run_ranks(2, _refusals)
    with pytest.raises(ValueError, match=r"split is 3; it must be a function \(model, stage, stages\)"):
        PipelineParallel(2, split=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"balance is \(2, 2\) with split="):
        PipelineParallel(2, split=split, balance=[2, 2])  # type: ignore[arg-type]
