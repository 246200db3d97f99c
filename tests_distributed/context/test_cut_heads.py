"""Context parallelism where the loss is none of tokens, outputs are made of a row, or positions are counted in a stack."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nemo_like import parallelize
from tests.models.families import ENCODER, HEADED, hf
from tests_distributed.context.cut_models import LOSS, batch, build, differences, gradients, without_dropout
from tests_distributed.spawn import run_ranks

VOCAB, END, ROWS, LENGTH = 64, 2, 2, 13
BOTH = dict(
    vocab_size=VOCAB, d_model=32, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=48, decoder_ffn_dim=48,
    encoder_attention_heads=4, decoder_attention_heads=4, max_position_embeddings=64, pad_token_id=0, bos_token_id=1,
    eos_token_id=END, decoder_start_token_id=1, forced_eos_token_id=END, num_labels=2,
)  # fmt: skip
T5 = dict(
    vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, pad_token_id=0, eos_token_id=END,
    decoder_start_token_id=1, num_labels=2,
)  # fmt: skip
GPT2 = dict(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64, pad_token_id=0, num_labels=2)
ALBERT = dict(ENCODER, embedding_size=16)


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


def two_tasks(model: nn.Module) -> dict[str, Any]:
    names = inspect.signature(model.forward).parameters
    name = next(name for name in ("next_sentence_label", "sentence_order_label") if name in names)
    return {"input_ids": ids(), "labels": ids(), name: torch.tensor([1, 0])}


def choices(model: nn.Module) -> dict[str, Any]:
    return {"input_ids": torch.stack([ids(), ids().flip(1)], 1), "labels": torch.tensor([1, 0])}


def replaced(model: nn.Module) -> dict[str, Any]:
    return {"input_ids": ids(), "labels": ids() % 2}


def tokens(model: nn.Module) -> dict[str, Any]:
    return {"input_ids": ids(), "labels": ids().index_fill(1, torch.tensor([3]), -100)[:, :11].contiguous()}


def padded(model: nn.Module) -> dict[str, Any]:
    found = ids()
    found[0, -4:], found[1, :3] = 0, 0
    return {"input_ids": found, "attention_mask": (found != 0).long(), "labels": found.masked_fill(found == 0, -100)}


def bare(model: nn.Module) -> dict[str, Any]:
    return {"input_ids": ids()}


def own(output: Any) -> Tensor:
    return output.loss


def pooled(output: Any) -> Tensor:
    """A loss outside of the model."""
    states = output.get("pooler_output") if "pooler_output" in output else output.logits
    return (states * torch.linspace(-1, 1, states.numel()).view_as(states)).sum()


Case = tuple[Callable[[], nn.Module], Callable[[nn.Module], dict[str, Any]], Callable[[Any], Tensor]]
CASES: dict[str, Case] = {
    "answers (BERT)": (hf("BertForQuestionAnswering", "BertConfig", **ENCODER), places, own),
    "answers (Llama)": (hf("LlamaForQuestionAnswering", "LlamaConfig", **HEADED), places, own),
    "answers (BART)": (hf("BartForQuestionAnswering", "BartConfig", **BOTH), places, own),
    "answers (T5)": (hf("T5ForQuestionAnswering", "T5Config", **T5), places, own),
    "classes (BERT)": (hf("BertForSequenceClassification", "BertConfig", **ENCODER), of_rows, own),
    "classes (GPT-2)": (hf("GPT2ForSequenceClassification", "GPT2Config", **GPT2), of_rows, own),
    "classes (BART)": (hf("BartForSequenceClassification", "BartConfig", **BOTH), of_rows, own),
    "regression (Llama)": (hf("LlamaForSequenceClassification", "LlamaConfig", **HEADED), real_numbers, own),
    "next sentences (BERT)": (hf("BertForNextSentencePrediction", "BertConfig", **ENCODER), of_rows, own),
    "two tasks (BERT)": (hf("BertForPreTraining", "BertConfig", **ENCODER), two_tasks, own),
    "two tasks (ALBERT)": (hf("AlbertForPreTraining", "AlbertConfig", **ALBERT), two_tasks, own),
    "choices (BERT)": (hf("BertForMultipleChoice", "BertConfig", **ENCODER), choices, own),
    "a binary loss of tokens (ELECTRA)": (
        hf("ElectraForPreTraining", "ElectraConfig", **ENCODER, embedding_size=32), replaced, own
    ),
    "a loss outside, of a pooler (BERT)": (hf("BertModel", "BertConfig", **ENCODER), bare, pooled),
    "a loss outside, of classes (BERT)": (hf("BertForSequenceClassification", "BertConfig", **ENCODER), bare, pooled),
    "a loss outside, of classes (Llama)": (
        hf("LlamaForSequenceClassification", "LlamaConfig", **HEADED), bare, pooled
    ),
    "sinusoids (Marian)": (hf("MarianMTModel", "MarianConfig", **BOTH), tokens, own),
    "sinusoids (Pegasus)": (hf("PegasusForConditionalGeneration", "PegasusConfig", **BOTH), tokens, own),
    "sinusoids over ids (M2M-100)": (hf("M2M100ForConditionalGeneration", "M2M100Config", **BOTH), tokens, own),
    "a table (Blenderbot)": (hf("BlenderbotForConditionalGeneration", "BlenderbotConfig", **BOTH), tokens, own),
    "positions over ids (RoBERTa)": (hf("RobertaForMaskedLM", "RobertaConfig", **ENCODER), padded, own),
}  # fmt: skip
SHORT = ("answers (BERT)", "answers (T5)", "classes (GPT-2)", "two tasks (ALBERT)", "sinusoids over ids (M2M-100)")


def _wrong(rank: int, world_size: int, name: str, modes: tuple[str, ...]) -> list[str]:
    make, inputs_of, loss_of = CASES[name]
    torch.manual_seed(0)
    whole = without_dropout(make().double().train())  # biases of two classes are sums of nearly nothing
    inputs, wrong = inputs_of(whole), []
    reference = copy.deepcopy(whole)
    loss = loss_of(reference(**inputs))
    loss.backward()
    for mode in modes:
        model = parallelize(copy.deepcopy(whole), ac=mode, cp=world_size)
        for _ in range(2):  # the first call is compared; the second is not
            model.zero_grad()
            found = loss_of(model(**inputs))
            found.backward()
            if not abs(found - loss) <= 2 * LOSS * abs(loss) + 1e-7:
                wrong.append(f"{mode}: loss {found.item()} for {loss.item()}")
            wrong += [f"{mode}: {text}" for text in differences(gradients(model), gradients(reference))]
    return wrong


@pytest.mark.few(4)
@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_those_of_whole_sequences(name: str) -> None:
    assert run_ranks(2, _wrong, name, ("none", "full")) == [[], []]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", SHORT)
def test_on_four_ranks(name: str) -> None:
    assert run_ranks(4, _wrong, name, ("selective",)) == [[]] * 4


def _refused(rank: int, world_size: int, make: Callable[[], nn.Module]) -> str:
    model = parallelize(make(), ac="none", cp=2)
    with pytest.raises(ValueError) as raised:
        model(**(bare(model) if make is pools_by_itself else batch("llama")))
    return str(raised.value)


def pools_by_itself() -> nn.Module:
    """Takes the first token inside its stack, by no module."""
    return without_dropout(hf("AlbertModel", "AlbertConfig", **ALBERT)().float().train())


class Counting(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) * torch.linspace(0.5, 1.5, x.shape[1], device=x.device)[:, None]


def counts_behind_its_layers() -> nn.Module:
    model: Any = build("llama")
    model.model.norm = Counting(model.model.norm)
    return model


@pytest.mark.parametrize("make", [pools_by_itself, counts_behind_its_layers])
def test_the_first_call_of_a_hugging_face_model_is_compared(make: Callable[[], nn.Module]) -> None:
    """On every rank, by the model's name: also where one rank's outputs alone are others."""
    first, second = run_ranks(2, _refused, make)
    assert first == second
    assert "gives this FSDP" in first and "other outputs than whole sequences do" in first


def _in_lower_precision(rank: int, world_size: int, name: str) -> list[float]:
    """Rounding, and tokens that it sends to other experts, are not taken for a difference."""
    whole, inputs = build(name), batch(name)
    loss = whole(**inputs).loss.item()
    return [parallelize(copy.deepcopy(whole), cp=2, precision="bf16")(**inputs).loss.item() - loss]


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "gemma3_text"])
def test_rounding_in_bfloat16_is_no_difference(name: str) -> None:
    for (off,) in run_ranks(2, _in_lower_precision, name):
        assert abs(off) < 2e-2


def _what_the_comparison_leaves(rank: int, world_size: int) -> list[str]:
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
    return wrong + ([] if (norm.calls.item(), norm.count) == (1, 1) else [f"counters {norm.calls} {norm.count}"])


def test_the_comparison_leaves_no_trace() -> None:
    assert run_ranks(2, _what_the_comparison_leaves) == [[], []]


def _all_masked(rank: int, world_size: int) -> list[str]:
    """The first tokens of a row are padding, or have no labels: there is something to compare all the same."""
    wrong = []
    for start in (40, 0):
        whole = build("llama")
        generator = torch.Generator().manual_seed(3)
        found = torch.randint(5, 48, (ROWS, 60), generator=generator)
        mask = torch.ones_like(found)
        mask[0, :start] = 0
        labels = found.clone()
        labels[:, :50] = -100
        inputs = {"input_ids": found, "labels": labels, "attention_mask": mask}
        inputs["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
        loss = whole(**inputs).loss.item()
        got = parallelize(whole, ac="none", cp=2)(**inputs).loss.item()
        wrong += [] if abs(got - loss) <= 2 * LOSS * loss else [f"{start}: {got} for {loss}"]
    return wrong


def test_rows_that_begin_with_padding_or_without_labels() -> None:
    assert run_ranks(2, _all_masked) == [[], []]
