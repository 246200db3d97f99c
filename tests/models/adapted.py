"""Models as people fine-tune them: LoRA adapters, k-bit weights."""

import torch
from torch import nn

from nemo_like.layers import find_layers
from tests.checks import seeded


def with_lora(model: nn.Module, targets: list[str] | str) -> nn.Module:
    import peft

    adapted = seeded(
        peft.get_peft_model, model, peft.LoraConfig(r=2, lora_alpha=4, target_modules=targets), seed=3
    )
    # B starts at zero, and with it every gradient of A: move it.
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return adapted


class FourBitLinear(nn.Linear):
    """A k-bit linear by structure: the weight is a uint8 parameter, unpacked when it is used; (..., in) to (..., out)."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None)
        self.scale = float(linear.weight.detach().abs().max()) / 127
        self.weight = nn.Parameter((linear.weight.detach() / self.scale + 128).round().to(torch.uint8), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, (self.weight.to(x.dtype) - 128) * self.scale, self.bias)


def k_bit(model: nn.Module) -> nn.Module:
    """`model` with the MLP linears of its layers k-bit, and everything frozen but the attention's query."""
    for layer in find_layers(model):
        for child in ("gate_proj", "up_proj", "down_proj"):
            setattr(layer.module.mlp, child, FourBitLinear(getattr(layer.module.mlp, child)))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("q_proj" in name)
    return model
