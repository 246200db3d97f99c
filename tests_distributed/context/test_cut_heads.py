"""Context parallelism where the loss is none of tokens or outputs are made of a row; and what the first call compares."""

import copy
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nemo_like import ContextParallel, parallelize
from tests.checks import backward, seeded
from tests.models.blocks import Layer
from tests.models.families import ENCODER, HEADED, hf
from tests_distributed.context.cut_models import LOSS, NanoGPT, batch, build, gradients, off, without_dropout
from tests_distributed.spawn import on_ranks, refused_on_ranks, run_ranks

VOCAB, END, ROWS, LENGTH = 64, 2, 2, 13
DISTIL = dict(vocab_size=VOCAB, dim=32, n_layers=2, n_heads=4, hidden_dim=48, max_position_embeddings=64)
GPT2 = dict(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64, pad_token_id=0, num_labels=2)


def ids() -> Tensor:
    found = torch.randint(5, 48, (ROWS, LENGTH), generator=torch.Generator().manual_seed(3))
    found[:, -1] = END
    return found


def of_rows(model: nn.Module) -> dict[str, Any]:
    return {"input_ids": ids(), "labels": torch.tensor([1, 0])}


def real_numbers(model: nn.Module) -> dict[str, Any]:
    model.config.problem_type = "regression"  # type: ignore[union-attr]
    return {"input_ids": ids(), "labels": torch.tensor([[0.5, -1.0], [2.0, 0.25]])}


def places(model: nn.Module) -> dict[str, Any]:
    return {"input_ids": ids(), "start_positions": torch.tensor([2, 9]), "end_positions": torch.tensor([5, 11])}


def replaced(model: nn.Module) -> dict[str, Any]:
    return {"input_ids": ids(), "labels": ids() % 2}


def bare(model: nn.Module) -> dict[str, Any]:
    return {"input_ids": ids()}


own = operator.attrgetter("loss")
Case = tuple[Callable[[], nn.Module], Callable[[nn.Module], dict[str, Any]], Callable[[Any], Tensor]]
CASES: dict[str, Case] = {
    "answers (BERT)": (hf("BertForQuestionAnswering", "BertConfig", **ENCODER), places, own),
    "classes (DistilBERT)": (hf("DistilBertForSequenceClassification", "DistilBertConfig", **DISTIL), of_rows, own),
    "answers (Llama)": (hf("LlamaForQuestionAnswering", "LlamaConfig", **HEADED), places, own),
    "classes (GPT-2)": (hf("GPT2ForSequenceClassification", "GPT2Config", **GPT2), of_rows, own),
    "regression (Llama)": (hf("LlamaForSequenceClassification", "LlamaConfig", **HEADED), real_numbers, own),
}
WHOLE: dict[str, Case] = {
    "a binary loss of tokens (ELECTRA)": (
        hf("ElectraForPreTraining", "ElectraConfig", **ENCODER, embedding_size=32), replaced, own
    ),
    "a loss outside, of classes (Llama)": (
        hf("LlamaForSequenceClassification", "LlamaConfig", **HEADED), bare,
        lambda output: (output.logits * torch.linspace(-1, 1, output.logits.numel()).view_as(output.logits)).sum(),
    ),
}  # fmt: skip
"""With ``loss_mean="rows"``."""


@pytest.mark.few(2)
@pytest.mark.parametrize("name", [*CASES, *WHOLE])
@on_ranks(2)
def test_losses_and_gradients_are_those_of_whole_sequences(rank: int, world_size: int, name: str) -> None:
    make, inputs_of, loss_of = (CASES | WHOLE)[name]
    cp = ContextParallel(world_size, loss_mean="rows" if name in WHOLE else None)
    whole = without_dropout(seeded(make).double().train())  # biases of two classes are sums of nearly nothing
    inputs, wrong = inputs_of(whole), []
    reference = copy.deepcopy(whole)
    expected = backward(loss_of(reference(**inputs))).item(), gradients(reference)
    for mode in ("none", "full"):
        model = parallelize(copy.deepcopy(whole), ac=mode, cp=cp)
        for _ in range(2):  # the first call is compared; the second is not
            model.zero_grad()
            found = backward(loss_of(model(**inputs))).item(), gradients(model)
            wrong += [f"{mode}: {text}" for text in off(found, expected, 2 * LOSS)]
    assert not wrong, wrong


def counting(layer: Any, x: Tensor) -> Tensor:
    return layer.norm(x) * torch.linspace(0.5, 1.5, x.shape[1], device=x.device)[:, None]


@pytest.mark.parametrize("counts", [True, False])
@on_ranks(2)
def test_the_first_call_of_a_hugging_face_model_is_compared(rank: int, world_size: int, counts: bool) -> None:
    """On every rank, by the model's name: one that counts positions behind its layers, and one that gives states of whole
    rows, where one rank's outputs alone are others."""
    whole: Any = build("llama") if counts else hf("LlamaForSequenceClassification", "LlamaConfig", **HEADED)().train()
    whole.model.norm = Layer(counting, norm=whole.model.norm) if counts else whole.model.norm
    words = "gives this FSDP.* other outputs than" if counts else "fails on a part of cp=2.*loss_mean='rows'"
    with pytest.raises((ValueError, RuntimeError, NotImplementedError), match=words):
        parallelize(whole, ac="none", cp=2)(**(batch("llama") if counts else bare(whole)))


class OwnLoss(NanoGPT):
    """Its loss is no cross entropy of torch's: a sum over `targets` that count, and over `divisor` of them."""

    divisor = "tokens"

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
        logits, _ = super().forward(idx)
        counts = targets >= 0
        losses = logits.logsumexp(-1) - logits.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
        return (losses * counts).sum() / (counts.sum() if self.divisor == "tokens" else 1)


def counted(part: dict[str, Any]) -> Tensor:
    return (part["targets"] >= 0).sum()


def _own_loss(rank: int, world_size: int, divisor: str, loss_mean: Any) -> list[str]:
    whole = OwnLoss()
    whole.divisor = divisor
    labels = ids().masked_fill(torch.arange(LENGTH) < 4, -100)
    labels[1, 7:] = -100
    expected = backward(whole(ids(), labels))
    model = parallelize(copy.deepcopy(whole).requires_grad_(), ac="full", cp=ContextParallel(2, loss_mean=loss_mean))
    for _ in range(2):
        model.zero_grad()
        loss = backward(model(ids(), targets=labels))
    return off((loss.item(), gradients(model)), (expected.item(), gradients(whole)), 2 * LOSS)


@pytest.mark.parametrize(("divisor", "loss_mean"), [("tokens", "tokens"), ("tokens", counted), ("one", "sum")])
def test_a_loss_is_what_its_caller_writes(divisor: str, loss_mean: Any) -> None:
    assert run_ranks(2, _own_loss, divisor, loss_mean) == [[], []]


@pytest.mark.parametrize(
    ("divisor", "loss_mean", "words"),
    [
        ("tokens", None, "the loss of this FSDPOwnLoss is none.*loss_mean=.*'rows'"),
        ("tokens", "sum", "other outputs than whole sequences do"),
        ("one", "tokens", "other outputs than whole sequences do"),
        ("tokens", "rows", "has its layers and the code behind them in one module"),
    ],
)
def test_a_wrong_loss_is_refused_in_the_first_step_on_every_rank(divisor: str, loss_mean: Any, words: str) -> None:
    refused_on_ranks(2, _own_loss, divisor, loss_mean, error=(ValueError, NotImplementedError), match=words)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["mixtral", "gemma3_text", "gpt_oss"])
@on_ranks(2)
def test_rounding_in_bfloat16_is_no_difference(rank: int, world_size: int, name: str) -> None:
    """Rounding, and tokens that it sends to other experts, are not taken for a difference."""
    whole, inputs = build(name), batch(name)
    loss = whole(**inputs).loss.item()
    assert abs(parallelize(copy.deepcopy(whole), cp=2, precision="bf16")(**inputs).loss.item() - loss) < 2e-2


@on_ranks(2)
def test_the_comparison_leaves_no_trace(rank: int, world_size: int) -> None:
    """Random numbers, training flags, buffers and attributes are as without it."""
    model: Any = build("llama")
    model.model.norm.register_buffer("calls", torch.zeros(()))
    model.model.norm.count = 0

    def count(module: Any, args: Any) -> None:
        module.calls += 1
        module.count += 1

    model.model.norm.register_forward_pre_hook(count)
    model.model.norm.eval()
    flags = [module.training for module in model.modules()]
    model = parallelize(model, ac="none", cp=2)
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    model(**batch("llama"))
    wrong = [] if torch.equal(before, torch.random.get_rng_state()) else ["random numbers"]
    wrong += [] if [module.training for module in model.modules()] == flags else ["training flags"]
    norm = model.model.norm
    assert wrong + ([] if (norm.calls.item(), norm.count) == (1, 1) else [f"counters {norm.calls} {norm.count}"]) == []
