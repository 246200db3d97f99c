"""`model(**batch).loss` in chunks is what it was: values, gradients, outputs, and what is said of the plain path."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from nemo_like._util.live_bytes import LiveBytes
from nemo_like.losses.model_loss import chunk_model_loss
from nemo_like.options import ChunkedLoss
from tests.checks import assert_bitwise, assert_near, gradients_of, seeded
from tests.models.families import FAMILIES
from tests.tools.surveys import losses as loss_survey
from tests.tools.surveys.tiny_causes import CAUSES

transformers = pytest.importorskip("transformers")

CHUNKED = [
    "llama", "qwen3", "gemma3_text", "phi3", "olmo2", "gpt2", "gpt_neox", "opt", "bloom", "mixtral", "qwen3_moe", "olmoe",
    "gpt_oss", "deepseek_v3", "mamba", "mamba2", "jamba", "qwen3_next", "rwkv", "t5", "bart", "bert", "albert",
    "modernbert", "whisper", "llava", "gemma3", "mistral3", "smolvlm", "qwen2_vl", "qwen3_vl",
]  # fmt: skip
TOKENS = 5


def outcome(model, batch):
    torch.manual_seed(1)
    model.zero_grad()
    output = model(**batch)
    output.loss.backward()
    return output, gradients_of(model)


def same(ours, theirs):
    torch.testing.assert_close(ours[0].loss, theirs[0].loss, rtol=1e-6, atol=0)
    assert_near(ours[1], theirs[1], least=1e-4)


@pytest.fixture
def said(logs):
    logs.set_level("INFO", "nemo_like")
    return lambda: [record.message for record in logs.records if "loss='chunked'" in record.message]


@pytest.mark.parametrize("name", CHUNKED)
def test_families(name, said):
    family = FAMILIES[name]
    model = family.build()
    theirs = outcome(model, family.inputs())
    chunk_model_loss(model, ChunkedLoss(TOKENS))
    ours = outcome(model, family.inputs())
    same(ours, theirs)
    assert said() == []
    assert ours[0].logits is None
    assert {key for key in theirs[0] if key not in ("logits",)} == set(ours[0].keys())


def llama(**more):
    return FAMILIES["llama"].build(), FAMILIES["llama"].inputs() | more


@pytest.mark.parametrize(
    "more",
    [
        dict(num_items_in_batch=torch.tensor(17)),
        dict(num_items_in_batch=17),
        dict(ignore_index=7),
        dict(shift_labels=torch.arange(24).view(2, 12)),
        dict(attention_mask=torch.ones(2, 12, dtype=torch.long).index_fill(1, torch.tensor([0, 1]), 0)),
    ],
    ids=["count", "number", "ignore_index", "shift_labels", "mask"],
)
def test_what_transformers_takes_beside_labels(more, said):
    model, batch = llama(**more)
    batch["labels"] = batch["labels"].index_fill(1, torch.tensor([0, 1, 2]), more.get("ignore_index", -100))
    theirs = outcome(model, batch)
    same(outcome(chunk_model_loss(model, ChunkedLoss(TOKENS)), batch), theirs)
    assert said() == []


@pytest.mark.parametrize(
    ("model_class", "config_class", "more"),
    [
        ("GraniteForCausalLM", "GraniteConfig", dict(logits_scaling=3.0)),
        ("CohereForCausalLM", "CohereConfig", dict(logit_scale=0.25)),
        ("Gemma2ForCausalLM", "Gemma2Config", dict(final_logit_softcapping=0.5, head_dim=8)),
    ],
)
def test_scaled_and_capped_logits(model_class, config_class, more, said):
    sizes = dict(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    config = getattr(transformers, config_class)(vocab_size=64, pad_token_id=0, **sizes, **more)
    model = seeded(getattr(transformers, model_class), config).train()
    _, batch = llama()
    theirs = outcome(model, batch)
    same(outcome(chunk_model_loss(model, ChunkedLoss(TOKENS)), batch), theirs)
    assert said() == []


def test_nothing_changes_without_labels_in_evaluation_and_generation():
    model, batch = llama()
    other = chunk_model_loss(copy.deepcopy(model), ChunkedLoss(TOKENS))
    ids = batch["input_ids"]
    assert torch.equal(model(input_ids=ids).logits, other(input_ids=ids).logits)
    model.eval(), other.eval()
    with torch.no_grad():
        theirs, ours = model(**batch), other(**batch)
    assert torch.equal(theirs.logits, ours.logits) and torch.equal(theirs.loss, ours.loss)
    made = [m.generate(ids[:1], max_new_tokens=4, do_sample=False, pad_token_id=0) for m in (model, other)]
    assert torch.equal(*made)


def test_tuples_and_no_grad():
    model, batch = llama()
    with torch.no_grad():
        theirs = model(**batch, return_dict=False)
        ours = chunk_model_loss(model, ChunkedLoss(TOKENS))(**batch, return_dict=False)
    torch.testing.assert_close(ours[0], theirs[0])
    assert ours[1] is None and not ours[0].requires_grad


def test_a_copy_has_a_head_of_its_own():
    model, batch = llama()
    chunk_model_loss(model, ChunkedLoss(TOKENS))
    twin = copy.deepcopy(model)
    twin(**batch).loss.backward()
    assert model.lm_head.weight.grad is None and twin.lm_head.weight.grad is not None


def test_an_error_in_forward_leaves_the_head_as_it_was():
    model, batch = llama()
    chunk_model_loss(model, ChunkedLoss(TOKENS))
    with pytest.raises(ValueError, match="labels has 64"):
        model(**batch | {"labels": torch.full((2, 12), 64)})
    assert model(input_ids=batch["input_ids"]).logits.shape == (2, 12, 64)
    assert type(model.lm_head(torch.zeros(2, 32))) is torch.Tensor


class Nano(nn.Module):
    """As nanoGPT computes its loss."""

    def __init__(self, between=lambda logits: logits):
        super().__init__()
        self.embed, self.body, self.lm_head = nn.Embedding(64, 8), nn.Linear(8, 8), nn.Linear(8, 64, bias=False)
        self.between = between

    def forward(self, idx, targets=None):
        hidden = self.body(self.embed(idx))
        if targets is None:
            return self.lm_head(hidden[:, [-1], :]), None
        logits = self.between(self.lm_head(hidden))
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


def nano(between, chunked):
    model = seeded(Nano, between)
    if chunked:
        chunk_model_loss(model, ChunkedLoss(TOKENS))
    idx = torch.arange(20).view(2, 10)
    logits, loss = model(idx, (idx * 3) % 64)
    loss.backward()
    return logits, loss, [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize(
    "between",
    [
        lambda logits: logits,
        lambda logits: 2 * logits.float() / 3,
        lambda logits: 15 * torch.tanh(logits / 15),
        lambda logits: -15 * torch.tanh(torch.tanh(logits) / 15),
        lambda logits: logits + torch.linspace(-1, 1, 64),
        lambda logits: logits.mul_(0.5),
        lambda logits: logits.to(torch.bfloat16).to(logits.dtype)[:, :, :64].contiguous(),
    ],
)
def test_what_is_carried_into_chunks(between, said):
    (logits, ours, grads), (_, theirs, others) = nano(between, True), nano(between, False)
    assert logits is None and said() == []
    torch.testing.assert_close(ours, theirs, rtol=1e-6 if ours.dtype == theirs.dtype else 1e-2, atol=2e-3)
    assert_near(grads, others, 2e-2)


@pytest.mark.parametrize(
    ("between", "word"),
    [
        (lambda logits: logits.softmax(-1), "softmax"),
        (lambda logits: logits * nn.Parameter(torch.ones(())), "mul"),
        (lambda logits: torch.where(logits > 0, logits, 2 * logits), "gt"),
        (lambda logits: logits - logits.amax(-1, keepdim=True), "amax"),
        (lambda logits: logits[..., torch.arange(64).flip(0)], "getitem"),
    ],
)
def test_what_needs_whole_logits_gets_them_and_it_is_said(between, word, said):
    (logits, ours, grads), (whole, theirs, others) = nano(between, True), nano(between, False)
    assert_bitwise([logits, ours, *grads], [whole, theirs, *others])
    assert len(said()) == 1 and word in said()[0] and "Nano gets whole logits" in said()[0]


class AnotherLoss(Nano):
    def forward(self, idx, targets):
        return self.lm_head(self.body(self.embed(idx))), self.body.weight.square().sum()


class ByWeight(Nano):
    def forward(self, idx, targets):
        logits = F.linear(self.body(self.embed(idx)), self.lm_head.weight)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize(
    ("kind", "words"),
    [(AnotherLoss, "is not a cross entropy of them"), (ByWeight, "does not call its head, a Linear")],
)
def test_a_loss_that_cannot_be_chunked_leaves_the_logits_and_it_is_said(kind, words, said):
    model, idx = kind(), torch.arange(20).view(2, 10)
    theirs = model(idx, idx)
    assert_bitwise(chunk_model_loss(model, ChunkedLoss(TOKENS))(idx, idx), theirs)
    assert len(said()) == 1 and words in said()[0]


def test_lora_on_the_head(said):
    peft = pytest.importorskip("peft")
    model, batch = llama()
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    model = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    theirs = outcome(model, batch)
    assert any("lm_head.lora_A" in name for name in theirs[1])
    same(outcome(chunk_model_loss(model, ChunkedLoss(TOKENS)), batch), theirs)
    assert said() == []


def test_a_compiled_head_is_not_called_with_all_tokens(said):
    model, batch = llama()
    theirs = outcome(model, batch)
    model.lm_head.compile(backend="aot_eager")
    ours = outcome(chunk_model_loss(model, ChunkedLoss(TOKENS)), batch)
    same(ours, theirs)
    assert ours[0].logits is None and said() == []
    model.eval()
    assert torch.equal(model(**batch).logits, model.lm_head(model.model(batch["input_ids"])[0]))
    assert model.lm_head._compiled_call_impl is not None


def test_logits_never_exist():
    sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=4096)
    model = seeded(transformers.LlamaForCausalLM, transformers.LlamaConfig(**sizes, use_cache=False)).train()
    ids = torch.randint(4096, (2, 256))
    peaks = []
    for _ in range(2):
        with LiveBytes() as peak:
            model(input_ids=ids, labels=ids).loss.backward()
        peaks.append(peak.take_peak())
        model.zero_grad()
        chunk_model_loss(model, ChunkedLoss(32))
    logits = 2 * 256 * 4096 * 4
    assert peaks[0] > 2 * logits
    assert peaks[1] < logits / 2


def test_a_z_loss_comes_with_the_option():
    family = FAMILIES["llama"]
    plain, model, batch = family.build(), family.build(), family.inputs()
    torch.manual_seed(1)
    logits = plain(**{name: value for name, value in batch.items() if name != "labels"}).logits[:, :-1].flatten(0, 1)
    labels = batch["labels"][:, 1:].flatten()
    z_loss = logits.logsumexp(-1)[labels != -100].square().mean()
    (F.cross_entropy(logits, labels) + 1e-2 * z_loss).backward()
    chunk_model_loss(model, ChunkedLoss(TOKENS, z_loss=1e-2))
    torch.manual_seed(1)
    model(**batch).loss.backward()
    assert_near(gradients_of(model), gradients_of(plain))


PARTS = 20
KNOWN = tuple(int(part) for part in transformers.__version__.split(".")[:2]) >= (5, 23)
"""Whether this release is the one that the list below was made with, or a later one."""
PLAIN = {
    "BlipForConditionalGeneration": "no output head",
    "ChameleonForConditionalGeneration": "'__setitem__'",
    "CsmDepthDecoderForCausalLM": "no output head",
    "FSMTForConditionalGeneration": "does not call its head",
    "MusicgenForCausalLM": "no output head",
    "MusicgenMelodyForCausalLM": "no output head",
    "ProphetNetForCausalLM": "'transpose'",
    "ProphetNetForConditionalGeneration": "'transpose'",
}
"""Classes that keep whole logits, and why."""


@pytest.mark.few(1)
@pytest.mark.parametrize("part", range(PARTS))
def test_the_loss_of_every_language_model(part: int) -> None:
    rows = list(loss_survey.survey(loss_survey.language_models()[part::PARTS]))
    assert [row for row in rows if row.wrong] == []
    # 277 of 325 run; a survey that runs next to nothing would show nothing.
    assert sum(row.ran for row in rows) >= 0.3 * len(rows)
    for row in rows if KNOWN else ():
        if not row.ran:
            assert row.model_class in CAUSES, row
        if row.ran and not row.chunked:
            assert PLAIN.get(row.model_class, "not listed") in row.reason, row
        if row.model_class in PLAIN:
            assert not row.chunked, f"{row.model_class} is chunked now; take it off the list"
