"""What the tests of trainers share: settings of a short and silent run, words, and what a trained model has."""

from typing import Any

import torch
from torch import nn

from nemo_like.activation_checkpointing import is_checkpointed
from tests.models import decoders

QUIET: dict[str, Any] = dict(learning_rate=1e-2, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True)
"""Training arguments."""
WORDS = [f"w{i}" for i in range(decoders.VOCAB)]


def tokenizer() -> Any:
    """Return a tokenizer of `WORDS` with blanks between."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="w1", pad_token="w2", unk_token="w0", bos_token="w3"
    )


def regions(model: nn.Module) -> int:
    """Return how many modules are checkpointed."""
    return sum(map(is_checkpointed, model.modules()))


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of the weights that train."""
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
