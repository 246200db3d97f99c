"""What is refused because its forward, run on tensors without values, fails once it is split."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nemo_like.distributed.trial import try_context_parallel, try_tensor_parallel
from nemo_like.layers import find_layers
from nemo_like.options import ContextParallel, TensorParallel
from tests.models.families import DIM, FAMILIES, VOCAB, Block, hf

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
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
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
