"""Weights in 4 bits of bitsandbytes, of which no plan is made."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nemo_like import plan_for


class Params4bit(nn.Parameter):
    """Of the name that bitsandbytes' class has."""


def test_a_model_with_weights_in_four_bits_is_refused_with_the_way_out() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = Params4bit(torch.zeros(8, 8), requires_grad=False)
    with pytest.raises(ValueError, match=r"'1.weight' has its weights in 4 bits .* such as ac='full', or nemo-like"):
        plan_for(model, ac="50%", sample_input=torch.zeros(2, 8), gpu="cpu", layers=["0", "1"])
