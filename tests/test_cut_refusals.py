"""What context parallelism refuses before the first change, and what fails once its forward runs without values."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

from nemo_like import ContextParallel, parallelize
from nemo_like.distributed.context import check_context_parallel
from nemo_like.distributed.context.sequence_ops import cut, join, pad, padded_length, positions, split
from nemo_like.distributed.first_rank import try_context_parallel, try_tensor_parallel
from nemo_like.layers import find_layers
from nemo_like.options import TensorParallel
from tests.models.blocks import Layer, in_turn
from tests.models.families import COMMON, DIM, ENCODER, FAMILIES, HEADED, VOCAB, Block, causal, hf
from tests_distributed.context.cut_models import build

REFUSED = {
    "mamba": "Mamba", "mamba2": "Mamba", "jamba": "Mamba", "rwkv": "Rwkv", "qwen3_next": "GatedDeltaNet",
    "vit": "no layers of a language",
    "transformer_encoder": "inside torch", "whisper": "states of another modality",
    "t5": "a T5Attention, makes relative position biases", "bloom": "a BloomAttention, computes attention itself",
    "falcon": "a FalconAttention, computes attention itself",
    "gpt_neo": "a GPTNeoAttention, computes attention itself, not by transformers' AttentionInterface",
    "bart": "a BartLearnedPositionalEmbedding, counts the positions", "roberta": "counts positions over the ids",
    "opt": "a OPTLearnedPositionalEmbedding, counts the positions", "llama4_tuned": "scales queries by positions",
    "qwen3_vl": "a Qwen3VLTextModel, adds states of pictures between its layers",
    "bert_classes": "a BertPooler, reads one token of a sequence",
    "longrope": "a Phi3RotaryEmbedding, makes frequencies by the longest position",
    "flex": "a _Flex, calls flex attention itself",
    "t5gemma": "a T5GemmaCrossAttention, looks at states of another modality or of an encoder",
}  # fmt: skip
OWN = {
    "falcon": causal("Falcon", vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True),
    "t5gemma": hf(
        "T5GemmaForConditionalGeneration",
        "T5GemmaConfig",
        **dict.fromkeys(("encoder", "decoder"), HEADED | {"head_dim": 8, "query_pre_attn_scalar": 8}),
    ),
    "roberta": hf("RobertaForMaskedLM", "RobertaConfig", **ENCODER),
    "bert_classes": hf("BertForSequenceClassification", "BertConfig", **ENCODER),
    "longrope": lambda: hf("Phi3ForCausalLM", "Phi3Config", **COMMON, rope_parameters=_LONG)(),
    "flex": lambda: nn.Sequential(nn.Embedding(8, 8), nn.Sequential(_Flex(), _Flex()), nn.Linear(8, 8)),
}
_LONG = {
    "rope_type": "longrope", "rope_theta": 100.0, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 13,
}  # fmt: skip


class _Flex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(8), nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + flex_attention(*self.qkv(self.norm(x))[:, None].chunk(3, -1))[:, 0]


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_structure(name: str) -> None:
    model = OWN[name]() if name in OWN else build(name)
    before = {key: dict(vars(module)) for key, module in model.named_modules()}
    with pytest.raises(ValueError, match=rf"{REFUSED[name]}.*Use cp=1"):
        check_context_parallel(model, ContextParallel(2))
    assert all(vars(module).keys() == before[key].keys() for key, module in model.named_modules())


def test_two_stacks_of_layers_are_refused() -> None:
    two = nn.ModuleDict({name: FAMILIES["llama"].build().model for name in ("first", "second")})
    with pytest.raises(ValueError, match=r"one stack of layers, and there are 2 \(first, second\).*Use cp=1"):
        check_context_parallel(two, ContextParallel(2))


_MIXTRAL = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, num_local_experts=4, output_router_logits=True,
)  # fmt: skip


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (FAMILIES["gpt_oss"].build, (2, "ring"), r"ring.*'eager'"),
        (FAMILIES["llama"].build, (3, "ulysses"), "has 4: use a divisor"),
        (FAMILIES["gpt_oss"].build, (2, "ulysses"), "sinks"),
        (causal("Mixtral", **_MIXTRAL), (2,), "output_router_logits"),
    ],
)
def test_what_a_method_cannot_cut_is_refused(make: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_context_parallel(make(), ContextParallel(*options))


@pytest.mark.parametrize("implementation", ["flash_attention_2", "flash_attention_3"])
def test_an_attention_that_cannot_be_cut_is_refused(implementation: str) -> None:
    model = FAMILIES["llama"].build()
    model.config._attn_implementation = implementation
    with pytest.raises(ValueError, match=implementation):
        check_context_parallel(model, ContextParallel(2))


@pytest.mark.parametrize(
    ("strategy", "message"),
    [("ddp", "strategy 'ddp' keeps them whole"), ("fsdp2", "this job has one rank")],
)
def test_parts_of_sequences_need_ranks_that_shard(strategy: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parallelize(FAMILIES["llama"].build(), strategy, cp=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *[({"size": size}, "whole number of ranks") for size in (0, True, "2")],
        ({"size": 2, "method": "ulyses"}, "Did you mean 'ulysses'"),
        (
            {"size": 2, "loss_mean": "rowss"},
            "loss_mean is 'rowss'; it must be 'tokens', 'rows', 'sum' or a function",
        ),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ContextParallel(**options)


def _convolved(block: Any, x: Tensor) -> Tensor:
    """A plain block that looks at its neighbours."""
    return x + block.out(block.near(block.norm(x).transpose(1, 2)).transpose(1, 2))


def test_a_convolution_is_named() -> None:
    parts = ({"norm": nn.LayerNorm(8), "near": nn.Conv1d(8, 8, 3, padding=1), "out": nn.Linear(8, 8)} for _ in range(2))
    layers = nn.Sequential(*(Layer(_convolved, **each) for each in parts))
    model = nn.Sequential(nn.Embedding(8, 8), layers, nn.Linear(8, 8))
    with pytest.raises(ValueError, match=r"1\.0\.near, a Conv1d, combines neighbours"):
        check_context_parallel(model, ContextParallel(2))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("length", [1, 5, 24])
def test_parts_are_a_cut_of_the_whole(ranks: int, length: int) -> None:
    whole = pad(torch.arange(2 * length).view(2, length), 1, ranks, -1)
    assert whole.shape[1] == padded_length(length, ranks) and whole.shape[1] - length < 2 * ranks
    parts = [cut(whole, 1, ranks, rank) for rank in range(ranks)]
    assert all(part.shape == (2, whole.shape[1] // ranks) for part in parts)
    for rank, part in enumerate(parts):
        assert torch.equal(part, whole[:, positions(whole.shape[1], ranks, rank)])
    assert torch.equal(torch.stack(parts), split(whole, 1, ranks))
    assert torch.equal(join(torch.stack(parts), 1), whole)


def test_causal_work_is_the_same_on_every_rank() -> None:
    assert len({int((positions(24, 3, rank) + 1).sum()) for rank in range(3)}) == 1


DOGE = hf("DogeForCausalLM", "DogeConfig", vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
          num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)  # fmt: skip


@pytest.mark.parametrize("method", ["all_gather", "ring"])
def test_a_forward_that_fails_on_parts_of_sequences(method: str) -> None:
    """Its layers make masks of their own."""
    model = DOGE()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    with pytest.raises(
        ValueError, match=r"cp=2 cannot cut the sequences of this .* fails on parts .*sdpa_attention.*cp=1"
    ):
        try_context_parallel(model, ContextParallel(2, method), find_layers(model))
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before


def test_forwards_that_fail_with_a_part_of_the_weights() -> None:
    with pytest.raises(
        ValueError, match=r"tp=2 cannot split this DogeForCausalLM by its plan: .* fails with a part of them"
    ):
        try_tensor_parallel(DOGE(), TensorParallel(2))


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "deepseek_v3", "qwen2_vl"])
def test_forwards_that_run(name: str) -> None:
    model = FAMILIES[name].build()
    try_context_parallel(model, ContextParallel(2), find_layers(model))
    try_tensor_parallel(model, TensorParallel(2))
    assert not any(module._forward_hooks for module in model.modules())


class _LossOfTheHead(nn.Module):
    """Computes its loss from the head's weight, in training alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(VOCAB, DIM), nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        x = in_turn(self.blocks, self.embed(input_ids))
        if labels is None:
            return self.head(x)
        return F.cross_entropy(F.linear(x, self.head.weight).flatten(0, 1), labels.flatten())


PLAN = {"blocks.*.mlp.0": "colwise", "blocks.*.mlp.3": "rowwise", "head": "colwise_gather_output"}


def test_a_cut_weight_that_is_read_outside_of_its_module() -> None:
    ids, options = torch.zeros(2, 8, dtype=torch.long), TensorParallel(2, plan=PLAN)
    with pytest.raises(ValueError, match=r"fails with a part of them.*DTensor"):
        try_tensor_parallel(_LossOfTheHead(), options, sample_input={"input_ids": ids, "labels": ids})
    try_tensor_parallel(_LossOfTheHead(), options, sample_input={"input_ids": ids})
    try_tensor_parallel(_LossOfTheHead(), options)  # nobody says what it is called with


def test_a_model_that_fails_whole_says_nothing_of_the_split() -> None:
    model = DOGE()
    wrong = {"input_ids": torch.zeros(3)}
    try_context_parallel(model, ContextParallel(2), find_layers(model), wrong)
    try_tensor_parallel(model, TensorParallel(2), sample_input=wrong)
