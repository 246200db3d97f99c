"""Packed documents equal the documents one by one, with and without context parallelism."""

import copy
import inspect
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nemo_like import ContextParallel, parallelize
from nemo_like.distributed import documents
from nemo_like.distributed.documents import keep_documents_apart
from nemo_like.options import PipelineParallel
from nemo_like.transformers_compat import FIND_DOCUMENTS, masking
from tests.checks import assert_bitwise
from tests.models.families import ENCODER, hf
from tests_distributed.context.cut_models import (
    LOSS,
    batch,
    build,
    gradients,
    loss_of,
    off,
    step,
    without_dropout,
)
from tests_distributed.fsdp.packed_rows import one_by_one, packed, packed_pictures, wrong_forms
from tests_distributed.spawn import on_ranks, run_ranks

FORMS = ("positions", "numbers", "cu_seqlens")
NAMES = ("llama", "gemma3_text", "gpt_oss", "bert")
OWN_NAMES = ("gptj", "codegen", "gpt_neo")
"""Whose layers compute attention themselves, under the mask that their model makes."""
INDEXED_NAMES = ("deepseek_v32", "glm_moe_dsa")
"""Whose tokens see the best few of the keys that their mask shows."""
MORE_NAMES = ("qwen3", "deepseek_v3", "mixtral", "gemma2", "phi3", "stablelm", "olmoe", "modernbert")


@pytest.mark.parametrize("name", [*NAMES, "gpt2", *OWN_NAMES, *INDEXED_NAMES])
def test_on_one_rank(name: str) -> None:
    assert wrong_forms(name, 1, ("none", "selective")) == []


def _cut(rank: int, world_size: int, name: str, cp: Any, modes: tuple[str, ...]) -> list[str]:
    return wrong_forms(name, cp, modes)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("ranks", "name", "modes"),
    [
        (2, "llama", ("selective",)),
        *((2, name, ("none", "selective", "full")) for name in (*NAMES, "gptj", *MORE_NAMES)),
        *((4, name, ("selective",)) for name in (*NAMES, *MORE_NAMES[:3])),
    ],
)
def test_cut_over_ranks(ranks: int, name: str, modes: tuple[str, ...]) -> None:
    assert run_ranks(ranks, _cut, name, ranks, modes, timeout=120) == [[]] * ranks


@pytest.mark.parametrize(
    "name", ["qwen2_vl", *(pytest.param(name, marks=pytest.mark.long) for name in ("qwen3_vl", "llava"))]
)
@on_ranks(2, timeout=120)
def test_documents_with_pictures(rank: int, world_size: int, name: str) -> None:
    """The rows of a batch with pictures, packed into one, are the batch."""
    whole, inputs = build(name), batch(name)
    inputs.pop("attention_mask", None)
    expected = step(copy.deepcopy(whole), inputs)
    wrong = []
    for cp in (1,) if name == "qwen3_vl" else (1, world_size):  # which cp refuses
        model = parallelize(copy.deepcopy(whole), "single" if cp == 1 else "fsdp2", "selective", cp=cp)
        for form in ("positions", "numbers"):
            found = step(model, packed_pictures(whole, inputs, form))
            wrong += [f"cp={cp}, {form}: {text}" for text in off(found, expected, 2 * LOSS)]
        if "image_grid_thw" in inputs:
            numbers = packed_pictures(whole, inputs, "numbers") | {"position_ids": None}
            with pytest.raises(NotImplementedError, match=r"position_ids of four streams"):
                model(**numbers)
    assert not wrong, wrong


@on_ranks(2)
def test_in_stages(rank: int, world_size: int) -> None:
    """Two stages, microbatches of one row each."""
    whole, wrong = build("llama"), []
    loss, expected = one_by_one(copy.deepcopy(whole), shifts=True)
    sample = {key: packed("positions")[key][:1] for key in ("input_ids", "labels")}
    for form in FORMS:
        pipeline = parallelize(
            copy.deepcopy(whole), ac="full", pp=PipelineParallel(2, microbatches=2), sample_input=sample
        )
        found = pipeline.step(**packed(form)).item()
        grads = {k: v for stage in pipeline.stages for k, v in gradients(stage.module).items()}
        mine = loss, {name: expected[name] for name in grads}
        wrong += [f"{form}: {text}" for text in off((found, grads), mine, 2 * LOSS)]
    assert not wrong, wrong


@on_ranks(2)
def test_in_stages_mixers_are_refused(rank: int, world_size: int) -> None:
    sample = {key: packed("positions")[key][:1] for key in ("input_ids", "labels")}
    model = parallelize(build("qwen3_next"), ac="full", pp=PipelineParallel(2, microbatches=2), sample_input=sample)
    for form in FORMS:
        with pytest.raises(NotImplementedError, match="GatedDeltaNet"):
            model.step(**packed(form))


def test_cut_by_heads() -> None:
    assert run_ranks(2, _cut, "llama", ContextParallel(2, "ulysses"), ("selective",)) == [[], []]


def test_what_cannot_be_told_apart_is_refused() -> None:
    model = parallelize(build("llama"), "single", "none")
    rows = packed("numbers")
    for message, given in (
        ("in one piece", rows | {"attention_mask": rows["attention_mask"].roll(2, 1)}),
        ("go on where a document begins", rows | {"position_ids": torch.arange(15).expand(2, -1)}),
        ("cu_seqlens is", packed("positions") | {"position_ids": None, "cu_seqlens": torch.tensor([0, 31])}),
    ):
        with pytest.raises(ValueError, match=message):
            model(**given)
    for family, message in (
        ("t5", "encoder-decoder"),
        ("llama4", r"rows of 15 tokens, and attention_chunk_size \(4\)"),
        ("llama4_tuned", r"rows of 15 tokens, and floor_scale \(2\)"),
        ("qwen3_next", "GatedDeltaNet"),
    ):
        with pytest.raises(NotImplementedError, match=message):
            parallelize(build(family), "single", "none")(**rows)


OWN_MASKS = {
    "openai-gpt": hf(
        "OpenAIGPTLMHeadModel", "OpenAIGPTConfig", vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64
    ),
    "fnet": hf("FNetForMaskedLM", "FNetConfig", vocab_size=64, hidden_size=32, num_hidden_layers=2, intermediate_size=48),
}
"""Takes positions, and makes its masks itself; and has no attention."""


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("qwen3_next", "GatedDeltaNet, passes a state"),
        ("jamba", "passes a state"),
        ("deepseek_v4", "Compressor, combines neighbours"),
        ("bloom", "takes no position_ids"),
        ("rwkv", "passes a state"),
        ("openai-gpt", "none of its masks is made by transformers"),
        ("fnet", "FNet"),
        ("t5", "encoder-decoder"),
    ],
)
def test_what_documents_cannot_be_kept_apart_in_is_refused_in_every_form(name: str, why: str, form: str) -> None:
    model = parallelize(without_dropout(OWN_MASKS[name]()) if name in OWN_MASKS else build(name), "single", "none")
    with pytest.raises(NotImplementedError, match=rf"has packed documents.*{why}.*one document per row"):
        model(**packed(form))
    rows = packed(form)
    assert loss_of(model(input_ids=rows["input_ids"], labels=rows["labels"])).isfinite()  # nothing is left behind


def padded_on_the_left(first: int) -> dict[str, Tensor]:
    """What transformers' processors make of two rows, one of 9 tokens and one of 13. first: the position of padding."""
    inputs = batch("llama")
    mask = torch.ones_like(inputs["input_ids"])
    mask[0, :4] = 0
    return inputs | {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).masked_fill(mask == 0, first)}


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("mode", ["none", "selective"])
def test_padding_on_the_left_is_no_document(mode: str, first: int, logs: pytest.LogCaptureFixture) -> None:
    """To the bit what the original model trains: no label is dropped, and nothing is said of packing."""
    logs.set_level("INFO", "nemo_like")
    inputs, whole = padded_on_the_left(first), build("llama")
    assert_bitwise(step(copy.deepcopy(whole), inputs), step(parallelize(whole, "single", mode), inputs))
    assert "position_ids" not in logs.text


@on_ranks(2)
def test_padding_on_the_left_is_no_document_under_cp(rank: int, world_size: int) -> None:
    inputs, whole = padded_on_the_left(1), build("llama")
    expected = step(copy.deepcopy(whole), inputs)
    assert off(step(parallelize(whole, ac="selective", cp=world_size), inputs), expected) == []


@pytest.mark.parametrize(
    ("given", "makes", "looks"), [("", "of its tokens", 0), ("", "of ids", 1), ("positions", "of ids", 0)]
)
def test_transformers_looks_for_documents_where_nobody_knows_them(
    given: str, makes: str, looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positions that were given are read once, and those that a model counts along its tokens never restart."""
    model = keep_documents_apart(build("llama"))
    hook: Any = next(hook for hook in model._forward_pre_hooks.values() if isinstance(hook, documents.PackedCalls))
    hook._counts_ids = makes == "of ids"
    seen: list[Tensor] = []
    monkeypatch.setattr(masking(), FIND_DOCUMENTS, partial(documents._documents_in, seen.append))
    ids = torch.randint(1, 40, (2, 8))
    more = {"position_ids": torch.arange(8).expand(2, -1)} if given else {}
    model(input_ids=ids, **more)
    assert len(seen) == looks
    model(input_ids=ids, attention_mask=torch.ones_like(ids), **more)
    assert len(seen) == looks and not documents._are_known.get()


def test_packing_that_positions_show_is_said_once(logs: pytest.LogCaptureFixture) -> None:
    logs.set_level("INFO", "nemo_like")
    model = parallelize(build("llama"), "single", "none")
    for form in ("numbers", "cu_seqlens"):  # where the caller says it, there is nothing to say
        model(**packed(form))
    assert "packed documents" not in logs.text
    model = parallelize(build("llama"), "single", "none")
    for _ in range(2):
        model(**packed("positions"))
    assert logs.text.count("the row is packed documents") == 1


def test_positions_beside_a_mask_are_positions_and_that_is_said_once(logs: pytest.LogCaptureFixture) -> None:
    """As transformers reads them: the row is one document."""
    logs.set_level("INFO", "nemo_like")
    rows = packed("positions")
    rows |= {"attention_mask": torch.ones_like(rows["input_ids"])}
    whole = build("llama")
    expected = step(copy.deepcopy(whole), rows)
    model = parallelize(whole, "single", "none")
    for _ in range(2):
        assert_bitwise(step(model, rows), expected)
    assert logs.text.count("the row is one document") == 1


def test_a_loss_that_counts_a_document_s_first_label_is_refused() -> None:
    model = parallelize(hf("BlipTextLMHeadModel", "BlipTextConfig", **ENCODER, is_decoder=True)(), "single", "none")
    rows = packed("numbers")
    with pytest.raises(NotImplementedError, match="has packed documents, and its own loss counts the label"):
        model(**rows)


def test_lengths_beside_a_mask_of_another_form_are_refused() -> None:
    rows = packed("cu_seqlens")
    model = parallelize(build("llama"), "single", "none")
    with pytest.raises(ValueError, match="leave one of the two out"):
        model(**rows, attention_mask=torch.ones(2, 1, 15, 15, dtype=torch.bool))


@pytest.mark.parametrize("form", FORMS)
def test_labels_that_the_caller_has_shifted(form: str) -> None:
    """The last token of a document predicts none: its label would be the next document's first token."""
    whole, rows = build("llama"), packed(form)
    expected = one_by_one(copy.deepcopy(whole), shifts=True)
    rows["shift_labels"] = torch.nn.functional.pad(rows["labels"], (0, 1), value=-100)[:, 1:].contiguous()
    assert off(step(parallelize(whole, "single", "none"), rows), expected, 2 * LOSS) == []


def _by_lengths(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """What a varlen kernel computes: rows one after the other, attention within ``cu_seq_lens_q``; (B, H, S, D)."""
    assert attention_mask is None
    key, value = (states.repeat_interleave(query.shape[1] // states.shape[1], 1) for states in (key, value))
    flat = [states.transpose(0, 1).flatten(1, 2) for states in (query, key, value)]
    out = torch.cat(
        [
            torch.nn.functional.scaled_dot_product_attention(*(states[:, start:end] for states in flat), is_causal=True)
            for start, end in kwargs["cu_seq_lens_q"].unfold(0, 2, 1).tolist()
        ],
        1,
    )
    assert kwargs["max_length_q"] == kwargs["cu_seq_lens_q"].diff().max()
    return out.unflatten(1, (len(query), -1)).permute(1, 2, 0, 3), None


@pytest.mark.parametrize("form", FORMS)
def test_kernels_without_masks_are_given_lengths(form: str) -> None:
    """Two rows at once, of which transformers' flash attention would tell documents apart by lengths alone."""
    pytest.importorskip("transformers.modeling_utils").AttentionInterface.register("flash_of_a_test", _by_lengths)
    whole: Any = build("llama")
    expected = one_by_one(copy.deepcopy(whole), shifts=True)
    whole.config._attn_implementation_internal = "flash_of_a_test"
    assert off(step(parallelize(whole, "single", "none"), packed(form)), expected, 2 * LOSS) == []


# ------------------------------------------------------------------------------------- every model of the installed release

PARTS = 4
OTHERS = {
    "CsmDepthDecoderForCausalLM": "its positions are codebooks",
    "PaliGemmaForConditionalGeneration": "without a mask it looks both ways in evaluation, with one it does not",
}


@pytest.mark.long
@pytest.mark.parametrize("part", range(PARTS))
def test_every_language_model_keeps_documents_apart_or_refuses(part: int) -> None:
    """Two documents in a row: the loss and the logits of the documents one by one, in each form."""
    transformers = pytest.importorskip("transformers")
    ends = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForMaskedLM")
    names = [name for name in dir(transformers) if name.endswith(ends)]
    names = [name for name in names if hasattr(getattr(transformers, name), "config_class") and name not in OTHERS]
    assert {name: found for name in names[part::PARTS] if (found := _wrong_documents(name))} == {}


def _wrong_documents(name: str) -> list[str]:
    from tests.tools.surveys.tiny_models import ATTEMPTS, build_tiny, within

    documents = [torch.randint(3, 40, (1, n), generator=torch.Generator().manual_seed(n)) for n in (7, 6)]
    for without in ATTEMPTS:
        try:
            with within(20), torch.no_grad():
                model = build_tiny(name, without).eval()
                alone = [model(input_ids=ids, labels=ids) for ids in documents]
                placed = [
                    model(input_ids=ids, labels=ids, position_ids=torch.arange(ids.shape[1])[None])
                    if "position_ids" in inspect.signature(model.forward).parameters
                    else out
                    for ids, out in zip(documents, alone)
                ]
                assert all(isinstance(out.loss, Tensor) for out in alone)
            break
        except Exception:  # noqa: BLE001  (what does not run alone shows nothing)
            continue
    else:
        return []
    keep_documents_apart(model)
    ids, ends = torch.cat(documents, 1), torch.tensor([0, 7, 13], dtype=torch.int32)
    wrong = []
    for form, more in {
        "positions": {"position_ids": torch.cat([torch.arange(7), torch.arange(6)])[None]},
        "numbers": {"attention_mask": torch.tensor([[1] * 7 + [2] * 6])},
        "cu_seqlens": {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 7, "max_length_k": 7},
    }.items():
        expected = placed if form == "positions" else alone
        logits = torch.cat([out.logits for out in expected], 1)
        counts = [n - (not name.endswith("MaskedLM")) for n in (7, 6)]
        loss = sum(out.loss * n for out, n in zip(expected, counts)) / sum(counts)
        try:
            with torch.no_grad():
                found = model(input_ids=ids, labels=ids, **more)
        except (NotImplementedError, ValueError) as error:
            wrong += [] if "packed documents" in str(error) else [f"{form}: {error}"]
            continue
        if not (found.logits - logits).norm() <= 1e-4 * logits.norm():
            wrong.append(f"{form}: logits")
        if not abs(found.loss - loss) <= 1e-5 * abs(loss):
            wrong.append(f"{form}: loss {found.loss} for {loss}")
    return wrong



