"""Scenarios by role, written anew from the *cases* of TRL's `tests/test_activation_offloading.py`, of which transformers
holds a copy under the same name. The models are made here, and the device is the CPU, behind a back end whose copies wait
for somebody to wait for them.

Left out: none. Stricter here: gradients are compared bit for bit and moved bytes are counted, where the originals allow a
tolerance or ask only that nothing raises.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nemo_like.integrations import NoOpManager, OffloadActivations, get_lora_act_offloading_ctx_manager
from nemo_like.offload.backends import Backend
from tests.models.adapted import with_lora

IDS = torch.randint(0, 64, (2, 10), generator=torch.Generator().manual_seed(0))


def qwen2() -> nn.Module:
    """A Qwen2 of two layers with attention dropout, in training mode."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, attention_dropout=0.1, use_cache=False,
    )  # fmt: skip
    return transformers.Qwen2ForCausalLM(config).train()


def step(model: nn.Module, context: Any, backward_inside: bool = True) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and the gradients of what trains, with forward (and backward) inside `context`."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(42)
    with context:
        loss = model(input_ids=IDS, labels=IDS).loss
        if backward_inside:
            loss.backward()
    if not backward_inside:
        loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_step(got: tuple[Tensor, dict[str, Tensor]], wanted: tuple[Tensor, dict[str, Tensor]]) -> None:
    assert torch.equal(got[0], wanted[0]) and got[1].keys() == wanted[1].keys() and wanted[1]
    for name, grad in wanted[1].items():
        assert torch.equal(got[1][name], grad), name


def offloading(**fields: Any) -> OffloadActivations:
    return OffloadActivations(**({"min_offload_size": 0, "backend": Backend()} | fields))


@pytest.mark.parametrize("backward_inside", [True, False])
@pytest.mark.parametrize("kind", ["full fine-tuning", "LoRA"])
def test_a_model_of_transformers(kind: str, backward_inside: bool) -> None:
    model = qwen2()
    if kind == "LoRA":
        model = with_lora(model, ["q_proj", "v_proj"])
        for name, module in list(model.named_modules()):
            if name.endswith("lora_dropout"):
                module["default"] = nn.Dropout(0.1)
    wanted = step(model, NoOpManager())
    context = offloading(model=model)
    assert_same_step(step(model, context, backward_inside), wanted)
    assert context.stats.moved_bytes > 0 and context.collect().host_live_bytes == 0


def test_a_section_without_offloading_inside_one_with_it() -> None:
    model = qwen2()
    wanted = step(model, NoOpManager())
    with offloading(model=model) as context:
        assert_same_step(step(model, NoOpManager()), wanted)
        assert context.stats.copies == 0
        torch.manual_seed(42)
        loss = model(input_ids=IDS, labels=IDS).loss
        model.zero_grad(set_to_none=True)
        loss.backward()
        assert context.stats.copies > 0
    assert_same_step((loss.detach(), {n: p.grad for n, p in model.named_parameters()}), wanted)


@pytest.mark.parametrize(("least", "moved"), [(0, 2 * 1000 * 4 + 2 * 5 * 4), (1000, 2 * 1000 * 4), (8001, 0)])
def test_storages_below_the_least_size_stay(least: int, moved: int) -> None:
    # Saved are the input (2 x 5, kept by the caller's own name too), the tanh of the small layer and of the large one.
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 1000), nn.Tanh())
    x = torch.randn(2, 5, requires_grad=True)
    wanted = torch.autograd.grad(model(x).sum(), [x, *model.parameters()])
    context = offloading(model=model, min_offload_size=least)
    with context:
        out = model(x).sum()
    got = torch.autograd.grad(out, [x, *model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    assert context.stats.moved_bytes == moved


class Views(nn.Module):
    """One output saved three times: flat, transposed, and as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x) * 1
        return out.view(-1).square().sum() + out.transpose(0, 1).exp().sin().sum() + out.cos().sum()


def test_views_of_one_storage_move_once() -> None:
    torch.manual_seed(0)
    model, x = Views(), torch.randn(8, 16, requires_grad=True)
    wanted = torch.autograd.grad(model(x), [x, *model.parameters()])
    context = offloading(model=model)
    with context:
        loss = model(x)
    got = torch.autograd.grad(loss, [x, *model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    # `out` is saved flat, transposed and plain; the exponential is saved by itself and by its sine.
    assert context.stats.shared >= 2
    assert context.stats.moved_bytes == 2 * 8 * 16 * 4


@pytest.mark.parametrize("told", [True, False], ids=["told the model", "not told"])
def test_parameters_never_move(told: bool) -> None:
    model = nn.Sequential(nn.Linear(10, 20), nn.Tanh(), nn.Linear(20, 10))
    context = offloading(model=model) if told else offloading()
    with context:
        out = model(torch.randn(4, 10, requires_grad=True)).sum()
    # The second layer's weight is saved for the gradient of its input; the tanh's output is the one activation.
    assert context.stats.moved_bytes == 4 * 20 * 4
    out.backward()


def test_one_context_for_all_steps_reuses_its_host_memory() -> None:
    model = qwen2()
    wanted = step(copy.deepcopy(model), NoOpManager())
    context = get_lora_act_offloading_ctx_manager(model, min_offload_size=0)
    reserved = set()
    for _ in range(3):
        assert_same_step(step(model, context), wanted)
        reserved.add(context.stats.host_reserved_bytes)
    assert len(reserved) == 1
