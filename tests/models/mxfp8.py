"""A model whose sides MXFP8 fits, also split over two ranks, and torchao's own conversion of it."""

from typing import Any

import torch
from torch import nn

from tests.checks import seeded
from tests.models.tiny import made


def wide_llama(dtype: torch.dtype = torch.float32) -> Any:
    """Two layers of width 64, with 64 tokens in its vocabulary; its parameters in `dtype`."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = seeded(made, "Llama", vocab_size=64, use_cache=False, **sizes)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def converted() -> Any:
    """The same in bfloat16, whose linears of layers torchao has converted to MXFP8, emulated."""
    from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig, MXFP8TrainingRecipe
    from torchao.quantization import quantize_

    model = wide_llama(torch.bfloat16)
    config = MXFP8TrainingOpConfig.from_recipe(MXFP8TrainingRecipe.MXFP8_EMULATED_RCEIL)
    quantize_(model.model.layers, config, filter_fn=lambda module, name: isinstance(module, nn.Linear))
    return model
