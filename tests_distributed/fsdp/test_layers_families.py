"""Sixteen kinds of model under FSDP2 on two ranks; towers that a rank skips; adapters and k bits."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from nemo_like import parallelize
from nemo_like.layers import find_layers, layer_groups
from nemo_like.options import FSDP2
from tests.checks import backward, gradients_of, labelled
from tests.models.adapted import k_bit, with_lora
from tests.models.families import FAMILIES
from tests_distributed.spawn import on_ranks

NAMES = (
    "llama", "gemma3_text", "gpt_oss", "deepseek_v3", "mamba2", "jamba", "qwen3_next", "t5", "bart", "modernbert", "swin",
    "wav2vec2", "whisper", "qwen3_vl", "llava", "diffusion_transformer", "transformer_encoder",
)  # fmt: skip


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Whole gradients by name; an unused parameter's is left out, though FSDP2 may hold zeros for it."""
    return {name: grad for name, grad in gradients_of(model).items() if grad.any()}


def differences(model: nn.Module, reference: nn.Module) -> list[str]:
    """Parameters whose gradient is not, to the bit, that of `reference`."""
    got, expected = gradients(model), gradients(reference)
    wrong = [name for name in expected if name not in got or not torch.equal(got[name], expected[name])]
    return wrong + sorted(got.keys() - expected.keys())


# A decoder's layers all add to the gradient of the encoder's output; under FSDP2 these sums round differently than on one
# rank. So an encoder-decoder equals one rank up to that rounding only; its modes equal each other to the bit.
ENCODER_DECODER = ("encoder-decoder", "audio")


def _close(model: nn.Module, reference: nn.Module, name: str) -> bool:
    expected = gradients(reference)
    # The keys' bias has a gradient of nothing but rounding, as softmax does not see it: measured against the others.
    scale = max(expected[name].abs().max(), 1e-2 * max(grad.abs().max() for grad in expected.values()))
    return bool((gradients(model)[name] - expected[name]).abs().max() <= 1e-5 * scale)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", NAMES)
@on_ranks(2, timeout=200)
def test_fsdp2_in_every_mode_is_bitwise_one_rank(rank: int, world_size: int, name: str) -> None:
    """Both ranks see the same batch, so that the mean of their gradients is exactly that of one rank."""
    family = FAMILIES[name]
    reference = family.build()
    expected = backward(family.step(reference))
    wrong, before = [], None
    for mode in ("none", "full", "selective"):
        model = parallelize(family.build(), ac=mode)
        assert all(isinstance(layer.module, FSDPModule) for layer in find_layers(model))
        loss = backward(family.step(model))
        if not torch.equal(loss, expected):
            wrong.append(f"{mode}: loss {loss.item()}, expected {expected.item()}")
        wrong += [f"{mode}: {parameter}" for parameter in differences(model, before or reference)]
        if before is None and family.kind in ENCODER_DECODER:
            wrong = [parameter for parameter in wrong if not _close(model, reference, parameter.removeprefix("none: "))]
            before = model
    assert not wrong, wrong


# ------------------------------------------------------------------------------------------------ towers a rank skips


@pytest.mark.parametrize(
    ("name", "mode", "frozen_sharding"), [("llava", "selective", "root"), ("smolvlm", "full", "replicate")]
)
@on_ranks(2, timeout=60)
def test_a_rank_without_an_image_with_a_trainable_projector(
    rank: int, world_size: int, name: str, frozen_sharding: str, mode: str
) -> None:
    """Known failure 13: ranks that meet a tower and ranks that do not wait for each other."""
    family = FAMILIES[name]

    def build() -> nn.Module:
        model = family.build()
        for module in layer_groups(model)["vision"]:
            module.requires_grad_(False)
        return model

    def batch(index: int) -> dict[str, torch.Tensor]:
        inputs = dict(family.inputs())
        if index == 1:
            inputs = labelled(inputs["input_ids"][:, -12:])
        return inputs

    reference = build()
    torch.manual_seed(0)
    sum(reference(**batch(index)).loss for index in range(2)).div(2).backward()  # type: ignore[union-attr]
    model = parallelize(build(), ac=mode, strategy=FSDP2(frozen_sharding=frozen_sharding))
    towers = [p for p in model.parameters() if not p.requires_grad]
    assert towers and all(isinstance(p, DTensor) == (frozen_sharding != "replicate") for p in towers)
    torch.manual_seed(0)
    model(**batch(rank)).loss.backward()
    trained = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
    assert any("projector" in n or "connector" in n for n in trained)
    found = gradients_of(model)
    # One rank adds two losses before it divides, two ranks divide each: the last bits may differ.
    torch.testing.assert_close({name: found[name] for name in trained}, trained, rtol=1e-5, atol=1e-7)


# ------------------------------------------------------------------------------- ------------- adapters, k-bit weights


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("what", "mode"), [("lora", "full"), ("k_bit", "selective"), ("lora", "selective"), ("k_bit", "full")]
)
@on_ranks(2)
def test_adapters_and_k_bit_weights_are_sharded_right(rank: int, world_size: int, what: str, mode: str) -> None:
    family = FAMILIES["llama"]
    adapted = k_bit if what == "k_bit" else lambda model: with_lora(model, ["q_proj", "v_proj"])
    reference = adapted(family.build())
    family.step(reference).backward()
    model = parallelize(adapted(family.build()), ac=mode)
    family.step(model).backward()
    if what == "k_bit":  # uint8 weights cannot be sharded: every rank holds them whole
        packed = [p for n, p in model.named_parameters() if "mlp" in n and n.endswith("weight")]
        assert packed and all(p.dtype == torch.uint8 and not isinstance(p, DTensor) for p in packed)
    assert differences(model, reference) == []
