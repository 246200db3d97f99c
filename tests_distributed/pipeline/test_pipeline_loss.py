"""A pipeline's loss and gradients against one call with the whole batch, whatever the loss is made of."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nemo_like import parallelize
from nemo_like.options import ChunkedLoss, PipelineParallel
from tests.checks import loss_of, seeded
from tests.models.blocks import in_turn
from tests.models.families import DIM, VOCAB, Block, hf
from tests.models.tiny import llama
from tests_distributed.context.cut_models import without_dropout
from tests_distributed.spawn import on_ranks

ROWS, LENGTH, MICROBATCHES = 8, 12, 4
Batch = Mapping[str, Tensor]


class Decoder(nn.Module):
    """A plain decoder whose loss a function computes of its logits and the batch."""

    def __init__(self, loss: Callable[[Tensor, Batch], Tensor]) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCAB, DIM), nn.LayerNorm(DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        self.loss = loss

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor, **batch: Tensor) -> Tensor:
        x = in_turn(self.blocks, self.embed(input_ids))
        return self.loss(self.head(self.norm(x)), batch)


def _ce(logits: Tensor, labels: Tensor, **more: Any) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), **more)


def _next(logits: Tensor, batch: Batch, **more: Any) -> Tensor:
    return _ce(logits[:, :-1], batch["labels"][:, 1:], **more)


def _by_hand(logits: Tensor, batch: Batch) -> Tensor:
    labels = batch["labels"]
    found = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return -(found * (labels >= 0)).sum() / (labels >= 0).sum()


def _masked(logits: Tensor, batch: Batch) -> Tensor:
    losses = _ce(logits, batch["input_ids_again"], reduction="none").view_as(batch["loss_mask"])
    return (losses * batch["loss_mask"]).sum() / batch["loss_mask"].sum()


Said = str | Callable[[Any], Any]
_NEXT: Said = lambda batch: (batch["labels"][:, 1:] != -100).sum()  # noqa: E731
_CLASSES = torch.linspace(0.1, 2.0, VOCAB)


def _of_classes(batch: Batch) -> Tensor:
    labels = batch["labels"][:, 1:]
    return _CLASSES[labels.clamp(min=0)][labels >= 0].sum()


RIGHT: dict[str, tuple[Said, Callable[[Tensor, Batch], Tensor]]] = {
    "mean over labels": ("tokens", lambda logits, batch: _ce(logits, batch["labels"])),
    "the plainest GPT": (_NEXT, _next),
    "padded": (_NEXT, lambda logits, batch: _ce(logits, F.pad(batch["labels"], (0, 1), value=-100)[:, 1:])),
    "tokens first": ("tokens", lambda logits, batch: _ce(logits.transpose(0, 1), batch["labels"].t())),
    "heads of a class": (
        "tokens",
        lambda logits, batch: nn.CrossEntropyLoss()(logits.transpose(1, 2), batch["labels"]),
    ),
    "sum": ("sum", lambda logits, batch: _next(logits, batch, reduction="sum")),
    "sum / numel": ("rows", lambda logits, batch: _next(logits, batch, reduction="sum") / batch["labels"].numel()),
    "another ignore_index": (
        lambda batch: ((batch["labels"] >= 0) & (batch["labels"] != 3)).sum(),
        lambda logits, batch: _ce(logits, batch["labels"].masked_fill(batch["labels"] < 0, 3), ignore_index=3),
    ),
    "padding counts for nothing": (
        lambda batch: (batch["padded"] != 0).sum(),
        lambda logits, batch: _ce(logits, batch["padded"], ignore_index=0),
    ),
    "class weights and smoothing": (
        _of_classes, lambda logits, batch: _next(logits, batch, weight=_CLASSES, label_smoothing=0.1)
    ),
    "a sum of squares": ("sum", lambda logits, batch: 0.01 * logits.square().sum()),
    "nll": (
        "tokens",
        lambda logits, batch: F.nll_loss(logits.log_softmax(-1).flatten(0, 1), batch["labels"].flatten()),
    ),
    "by hand": ("tokens", _by_hand),
    "a mask of floats": (lambda batch: batch["loss_mask"].sum(), _masked),
    "regression": ("rows", lambda logits, batch: F.mse_loss(logits.mean((1, 2)), batch["value"])),
    "of many values": ("rows", lambda logits, batch: F.smooth_l1_loss(logits.mean(1), batch["values"])),
    "yes or no": ("rows", lambda logits, batch: F.binary_cross_entropy_with_logits(logits.mean(1), batch["yes"])),
    "probabilities": ("rows", lambda logits, batch: F.cross_entropy(logits.mean(1), batch["yes"].softmax(-1))),
}
WRONG: dict[str, tuple[Said, Callable[[Tensor, Batch], Tensor]]] = {
    "contrastive": (
        "rows",
        lambda logits, batch: F.cross_entropy(
            (x := logits.mean(1)) @ x.roll(1, 0).t(), torch.arange(len(x), device=x.device)
        ),
    ),
    "a root": ("rows", lambda logits, batch: logits.square().mean().sqrt()),
    "two counts by hand": ("tokens", lambda logits, batch: _by_hand(logits, batch) + _masked(logits, batch)),
    "a mean said to be a sum": ("sum", _next),
    "a sum said to be a mean": ("rows", lambda logits, batch: _next(logits, batch, reduction="sum")),
    "labels said to be rows": ("rows", _next),
    "labels but the first": ("tokens", _next),
    "and a mean term": (_NEXT, lambda logits, batch: _next(logits, batch) + logits.logsumexp(-1).square().mean()),
    "a sum and a mean": (_NEXT, lambda logits, batch: _next(logits, batch, reduction="sum") + _next(logits, batch)),
    "two means": (_NEXT, lambda logits, batch: _next(logits, batch) + _ce(logits[:, 0], batch["first"])),
}


def _batch(counts: bool, seed: int = 3) -> dict[str, Tensor]:
    """counts: not as much counts in each microbatch."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, 48, (ROWS, LENGTH), generator=draw)
    labels, padded, mask = ids.roll(1, 1), ids.clone(), torch.ones(ROWS, LENGTH)
    first = torch.randint(0, 10, (ROWS,), generator=draw)
    if counts:
        labels[0, :7], labels[5, 3:] = -100, -100
        padded[1, 4:], padded[7, 1:] = 0, 0
        mask[2, 5:], mask[3, 1:], mask[6] = 0, 0.5, 0.25
        first[3] = -100
    return {
        "input_ids": ids, "input_ids_again": ids.clone(), "labels": labels, "padded": padded, "loss_mask": mask,
        "first": first, "value": torch.randn(ROWS, generator=draw) - 1,
        "values": torch.randn(ROWS, VOCAB, generator=draw),
        "yes": torch.randint(0, 2, (ROWS, VOCAB), generator=draw).float(),
    }  # fmt: skip


def _differences(pipeline: Any, whole: nn.Module, batch: Mapping[str, Any], where: str) -> list[str]:
    """A step of both; the whole model's in one call. What is off by more than sums in another order are."""
    loss = loss_of(whole(**batch))
    whole.zero_grad()
    loss.backward()
    pipeline.zero_grad()
    found = pipeline.step(**batch)
    off = [] if abs(found - loss) <= 2e-6 * abs(loss) else [f"{where}: loss {found} for {loss}"]
    evaluated = pipeline.eval_step(**batch)
    off += [] if abs(evaluated - loss) <= 2e-6 * abs(loss) else [f"{where}: evaluated {evaluated} for {loss}"]
    grads = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
    least = 1e-3 * max(grad.norm() for grad in grads.values())
    parameters = dict(pipeline.named_parameters())
    for name in parameters.keys() & grads.keys():
        grad, wanted = parameters[name].grad, grads[name]
        grad = grad if grad is not None else torch.zeros_like(wanted)
        grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        error = (grad - wanted).norm() / wanted.norm().clamp(min=least)
        off += [] if error < 1e-5 else [f"{where}: {name} {error:.1e}"]
    return off


def _plain(loss: Callable[[Tensor, Batch], Tensor]) -> nn.Module:
    return without_dropout(seeded(Decoder, loss).train())


def _pipeline(model: nn.Module, batch: Mapping[str, Any], said: Said | None = None, **options: Any) -> Any:
    sample = {k: v[:2] if isinstance(v, Tensor) and v.dim() else v for k, v in batch.items()}
    pp = PipelineParallel(2, microbatches=MICROBATCHES, loss_mean=said)
    return parallelize(model, **{"ac": "none", "pp": pp, "sample_input": sample} | options)


FIRST = ("the plainest GPT", "sum / numel", "class weights and smoothing", "a mask of floats")
"""Losses of the default run: one of each way that a mean is said."""


@pytest.mark.few(1)
@pytest.mark.parametrize("names", [FIRST, tuple(name for name in RIGHT if name not in FIRST)])
@on_ranks(2, timeout=240)
def test_every_loss_of_a_plain_model(rank: int, world_size: int, names: tuple[str, ...]) -> None:
    off = []
    for name in names:
        said, loss = RIGHT[name]
        whole = _plain(loss)
        pipeline = _pipeline(_plain(loss), _batch(False), said)
        for counts in (False, True):  # what the first batch does not show, too
            off += _differences(pipeline, whole, _batch(counts), f"{name}, {counts}")
        off += _differences(_pipeline(_plain(loss), _batch(True), said), whole, _batch(True), f"{name} at once")
    assert not off, off


def _assert_refused(pipeline: Any) -> None:
    with pytest.raises(ValueError, match="pp cannot add up the losses of this Decoder's micro-batches under loss_mean"):
        pipeline.step(**_batch(True))
    assert all(parameter.grad is None for parameter in pipeline.parameters())


FIRST_WRONG = ("contrastive", "two counts by hand", "a mean said to be a sum", "two means")


@pytest.mark.few(1)
@pytest.mark.parametrize("names", [FIRST_WRONG, tuple(name for name in WRONG if name not in FIRST_WRONG)])
@on_ranks(2, timeout=120)
def test_a_loss_that_is_another_mean_than_said_is_refused_on_every_rank(
    rank: int, world_size: int, names: tuple[str, ...]
) -> None:
    for name in names:
        said, loss = WRONG[name]
        pipeline = _pipeline(_plain(loss), _batch(True), said)
        before = {key: value.clone() for key, value in pipeline.state_dict().items()}
        _assert_refused(pipeline)
        assert all(torch.equal(value, before[key]) for key, value in pipeline.state_dict().items())


@on_ranks(2)
def test_a_plain_model_has_to_say_it(rank: int, world_size: int) -> None:
    model = _plain(RIGHT["sum"][1])
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    with pytest.raises(ValueError, match=r"(?s)the unit that the loss of Decoder is a mean over.*loss_mean=\"rows\""):
        _pipeline(model, _batch(True))
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == before
    no_labels = {name: value for name, value in _batch(True).items() if name != "labels"}
    pipeline = _pipeline(_plain(RIGHT["regression"][1]), no_labels, "tokens")
    with pytest.raises(
        ValueError, match="which counts labels, targets, target, shift_labels, and the batch has input_ids"
    ):
        pipeline.step(**no_labels)


@on_ranks(2, timeout=120)
def test_a_mean_that_a_later_batch_shows_to_be_another(rank: int, world_size: int) -> None:
    """Means that are the same in the first batch: refused in the step that shows a difference, before anything changes."""
    for name in ("two counts by hand", "labels said to be rows", "and a mean term"):
        said, loss = WRONG[name]
        pipeline = _pipeline(_plain(loss), _batch(False), said)
        pipeline.step(**_batch(False))
        pipeline.zero_grad()
        _assert_refused(pipeline)


class Penalised(Decoder):
    """Its loss has a term that gives the hidden states no gradient."""

    def forward(self, input_ids: Tensor, **batch: Tensor) -> Tensor:
        return super().forward(input_ids, **batch) + 0.01 * self.head.weight.square().sum()


class InDict(Decoder):
    def forward(self, input_ids: Tensor, **batch: Tensor) -> dict[str, Any]:  # type: ignore[override]
        return {"loss": super().forward(input_ids, **batch), "extra": None}


def _padded_ids(logits: Tensor, batch: Batch) -> Tensor:
    ids = batch["input_ids_again"]
    losses, shown = _ce(logits, ids, reduction="none").view_as(ids), (ids != 0).float()
    return (losses * shown).sum() / shown.sum()


@on_ranks(2)
def test_terms_without_hidden_states_and_masks_that_a_later_batch_shows(rank: int, world_size: int) -> None:
    full, padded = _batch(False), _batch(False)
    for row in range(1, ROWS):
        padded["input_ids_again"][row, LENGTH - row :] = 0
    whole = without_dropout(seeded(Decoder, _padded_ids).train())
    pipeline = _pipeline(copy.deepcopy(whole), full, lambda batch: (batch["input_ids_again"] != 0).sum())
    wrong = []
    for name, batch in (("full", full), ("padded", padded), ("counts", _batch(True))):
        wrong += _differences(pipeline, whole, batch, name)
    # A term that gives the hidden states no gradient counts once in each micro-batch: a mean over rows, and no other.
    for said, loss in (("rows", RIGHT["sum / numel"][1]), ("tokens", RIGHT["mean over labels"][1])):
        whole = without_dropout(seeded(Penalised, loss).train())
        wrong += _differences(_pipeline(copy.deepcopy(whole), padded, said), whole, padded, f"penalised, {said}")
        with pytest.raises(ValueError, match="this Penalised's micro-batches"):
            _pipeline(copy.deepcopy(whole), padded, "sum").step(**padded)
    whole = without_dropout(seeded(InDict, RIGHT["mean over labels"][1]).train())
    loss, found = whole(**full)["loss"], _pipeline(copy.deepcopy(whole), full, "tokens").step(**full)
    assert wrong + ([] if abs(found - loss) <= 2e-6 * abs(loss) else [f"in a dict: {found} for {loss}"]) == []


_SMALL = {"vocab_size": VOCAB, "d_model": 32, "decoder_layers": 2, "decoder_ffn_dim": 48, "decoder_attention_heads": 4}
_BERT = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 64,
}  # fmt: skip
HUGGING_FACE: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    **{
        name: (hf(f"{name}ForCausalLM", f"{name}Config", **_SMALL, max_position_embeddings=64, pad_token_id=0), ())
        for name in ("Bart", "MBart", "Pegasus", "Marian", "Blenderbot", "TrOCR")
    },
    # Their loops ask each layer which mask to give to it.
    "ModernBERT": (
        hf("ModernBertForMaskedLM", "ModernBertConfig", **_BERT, pad_token_id=0, bos_token_id=1, cls_token_id=1,
           eos_token_id=2, sep_token_id=2, local_attention=8), (),
    ),
    "Nemotron-H": (
        hf("NemotronHForCausalLM", "NemotronHConfig", **_BERT | {"num_hidden_layers": None}, head_dim=8,
           num_key_value_heads=2, layers_block_type=["attention", "mlp"]), (),
    ),
    "BERT, masked": (hf("BertForMaskedLM", "BertConfig", **_BERT), ()),
    "BERT, both": (hf("BertForPreTraining", "BertConfig", **_BERT), ("next_sentence_label",)),
    "tokens": (hf("BertForTokenClassification", "BertConfig", **_BERT, num_labels=VOCAB), ()),
    "regression": (hf("BertForSequenceClassification", "BertConfig", **_BERT, num_labels=1), ("values",)),
    "classes": (hf("BertForSequenceClassification", "BertConfig", **_BERT, num_labels=12), ("classes",)),
    "several classes": (hf("BertForSequenceClassification", "BertConfig", **_BERT, num_labels=VOCAB), ("yes",)),
    "answers": (hf("BertForQuestionAnswering", "BertConfig", **_BERT), ("start_positions", "end_positions")),
    "GPT-2, classes": (
        hf("GPT2ForSequenceClassification", "GPT2Config", vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, num_labels=12,
           pad_token_id=0), ("classes",),
    ),
}  # fmt: skip


class TorchEncoder(nn.Module):
    """torch's own stack, which asks its first layer whether batches come first."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(DIM, 4, 48, dropout=0.0, batch_first=True)
        self.embed, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return _ce(self.head(self.body(self.embed(input_ids))), labels)


HUGGING_FACE["torch's encoder"] = (TorchEncoder, ())


def _words(asked: tuple[str, ...], counts: bool) -> dict[str, Tensor]:
    batch = _batch(counts)
    given = {"input_ids": batch["input_ids"], "labels": batch["labels"]}
    for name in asked:
        if name == "next_sentence_label":
            given[name] = (
                batch["first"] % 2 if not counts else (batch["first"] % 2).masked_fill(batch["first"] < 0, -100)
            )
        elif name.endswith("positions"):
            given.pop("labels", None)
            given[name] = batch["first"].clamp(min=0) + (LENGTH if counts else 0) * (torch.arange(ROWS) == 3)
        else:
            given["labels"] = {"values": batch["value"], "classes": batch["first"].clamp(min=0), "yes": batch["yes"]}[
                name
            ]
    return given


FEW = ("BERT, both", "answers", "torch's encoder")


@pytest.mark.few(1)
@pytest.mark.parametrize("names", [FEW, tuple(name for name in HUGGING_FACE if name not in FEW)])
@on_ranks(2, timeout=240)
def test_losses_of_hugging_face_models(rank: int, world_size: int, names: tuple[str, ...]) -> None:
    off = []
    for name in names:
        build, asked = HUGGING_FACE[name]
        whole, staged = (without_dropout(seeded(build).float().train()) for _ in range(2))
        said = "tokens" if name == "torch's encoder" else "rows" if "start_positions" in asked else None
        pipeline = _pipeline(staged, _words(asked, False), said)
        off += _differences(pipeline, whole, _words(asked, False), name)
        if name == "answers":  # without a number that does not count, no batch shows that its mean is none of rows
            continue
        if name == "BERT, both":  # means over different things
            with pytest.raises(ValueError, match="pp cannot add up the losses of this BertFor"):
                pipeline.step(**_words(asked, True))
            continue
        off += _differences(pipeline, whole, _words(asked, True), f"{name}, counts")
    assert not off, off


def _llama() -> nn.Module:
    return seeded(llama, num_hidden_layers=2).float().train()


@on_ranks(2, timeout=120)
def test_the_number_of_items_is_the_callers(rank: int, world_size: int) -> None:
    """What a loss is divided by, as the caller says it: in a model that heeds it; one that does not is refused."""
    off = []
    for build in (_llama, HUGGING_FACE["BERT, masked"][0]):
        whole, staged = (without_dropout(seeded(build).float().train()) for _ in range(2))
        pipeline = _pipeline(staged, _words((), True))
        off += _differences(pipeline, whole, _words((), True), type(whole).__name__)
        for number in (17, torch.tensor(29)):
            more = _words((), True) | {"num_items_in_batch": number}
            if build is _llama:
                off += _differences(pipeline, whole, more, f"{type(whole).__name__} {number}")
            elif number == 17:
                with pytest.raises(ValueError, match="or leave num_items_in_batch out"):
                    pipeline.step(**more)
    assert not off, off


@on_ranks(2, timeout=120)
def test_rows_that_are_missing(rank: int, world_size: int) -> None:
    off = []
    for name, every in (("mean over labels", (6, 2, 1)), ("tokens first", (6,))):
        said, loss = RIGHT[name]
        for rows in every:
            pipeline = _pipeline(_plain(loss), _batch(True), said)
            few = {key: value[:rows] for key, value in _batch(True).items()}
            for _ in range(2):
                off += _differences(pipeline, _plain(loss), few, f"{rows} rows, {name}")
    for chunks in (None, "chunked"):
        few = {key: value[:1] for key, value in _words((), True).items()}
        pipeline = _pipeline(_llama(), _words((), True), loss=chunks)
        off += _differences(pipeline, _llama(), few, f"a row, {chunks}")
    for name in ("sum / numel", "regression", "sum"):
        said, loss = RIGHT[name]
        pipeline = _pipeline(_plain(loss), _batch(True), said)
        with pytest.raises(
            ValueError, match="The batch has 6 rows and the pipeline 4 micro-batches: give a multiple of 4"
        ):
            pipeline.step(**{key: value[:6] for key, value in _batch(True).items()})
    assert not off, off


@on_ranks(2)
def test_parts_in_which_nothing_counts(rank: int, world_size: int) -> None:
    """A micro-batch in which nothing counts adds nothing; a batch of such has no loss."""
    batch = _batch(True)
    batch["labels"][2:4] = -100
    said, loss = RIGHT["the plainest GPT"]
    off = _differences(_pipeline(_plain(loss), batch, said), _plain(loss), batch, "")
    pipeline = _pipeline(_plain(RIGHT["mean over labels"][1]), batch, "tokens")
    with pytest.raises(ValueError, match="Nothing counts in the batch"):
        pipeline.step(**batch | {"labels": torch.full_like(batch["labels"], -100)})
    assert not off, off


@on_ranks(2)
def test_another_loss_for_other_names(rank: int, world_size: int) -> None:
    """The same model with another loss for other names, evaluated first and in inference mode."""

    def loss(logits: Tensor, batch: Batch) -> Tensor:
        return _ce(logits, batch["labels"]) if "labels" in batch else F.mse_loss(logits.mean((1, 2)), batch["value"])

    def counted(batch: Batch) -> Tensor | int:
        return (batch["labels"] != -100).sum() if "labels" in batch else len(batch["value"])

    batch = _batch(True)
    texts = {key: batch[key] for key in ("input_ids", "labels")}
    values = {key: batch[key] for key in ("input_ids", "value")}
    pipeline, whole = _pipeline(_plain(loss), texts, counted), _plain(loss)
    with torch.inference_mode():
        evaluated = pipeline.eval_step(**{key: value + 0 for key, value in texts.items()})
        torch.testing.assert_close(evaluated, whole(**texts), rtol=2e-6, atol=0)
    assert [
        text for given in (texts, values, texts) for text in _differences(pipeline, whole, given, f"{list(given)}")
    ] == []


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("ranks", "build", "options"),
    [
        (2, "plain", {"ac": "full", "offload": "saved", "loss": "chunked"}),
        (4, "llama", {"tp": 2, "ac": "full"}),
        (4, "llama", {"cp": 2, "ac": "full", "loss": ChunkedLoss(chunk_tokens=3)}),
    ],
)
@on_ranks(timeout=120)
def test_beside_other_options(rank: int, ranks: int, build: str, options: dict[str, Any]) -> None:
    said, loss = RIGHT["the plainest GPT"]
    make = {"llama": _llama, "plain": lambda: _plain(loss)}[build]
    batch = _batch(True) if build == "plain" else _words((), True)
    pipeline = _pipeline(make(), batch, said if build == "plain" else None, **options)
    assert _differences(pipeline, make(), batch, f"{build} {options}") == []


class _Counting(Decoder):
    """Counts its calls in all that a module may count in."""

    def __init__(self) -> None:
        super().__init__(RIGHT["by hand"][1])
        self.number, self.every, self.named = 0, [0], {"calls": 0}
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.bend = nn.BatchNorm1d(DIM)

    def forward(self, input_ids: Tensor, **batch: Tensor) -> Tensor:
        self.number += 1
        self.every.append(self.number)
        self.named["calls"] += 1
        self.calls += 1
        self.bend(torch.ones(4, DIM))
        return super().forward(input_ids, **batch)


@on_ranks(2)
def test_asking_the_last_stage_leaves_no_trace_in_it(rank: int, world_size: int) -> None:
    pipeline = _pipeline(without_dropout(seeded(_Counting).train()), _batch(True), "tokens")
    module, drawn = pipeline.stages[0].module, torch.get_rng_state()

    def counts() -> list[int]:
        tracked = int(module.bend.num_batches_tracked)
        return [module.number, len(module.every), module.named["calls"], int(module.calls), tracked]

    before = counts()
    pipeline.step(**_batch(True))
    assert [now - then for now, then in zip(counts(), before)] == [MICROBATCHES] * 5
    assert torch.equal(torch.get_rng_state(), drawn) and module.training and module.norm.training
