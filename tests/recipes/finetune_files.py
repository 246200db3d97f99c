"""Small files to fine-tune with: a Llama and a tokenizer of its own in a folder, and samples."""

import json
from pathlib import Path
from typing import Any

TEXT = [f"What is {i} and {j}? {i + j}." for i in range(8) for j in range(8)]
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<end>"
    "{% endgeneration %}{% else %}{{ m['content'] }}<end>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def make_model(folder: Path, template: str = TEMPLATE, **config: Any) -> str:
    """Write a Llama of two layers (random weights from a seed) and a tokenizer of 300 byte pairs; its folder."""
    import tokenizers
    import torch
    import transformers
    from tokenizers import models, pre_tokenizers, trainers

    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<eos>", "<end>"], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(TEXT, trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<eos>", pad_token="<eos>")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(str(folder))
    shape: dict[str, Any] = {
        "vocab_size": 300, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 128,
        "eos_token_id": 0, "pad_token_id": 0, "bos_token_id": None, "dtype": "float32",
    }  # fmt: skip
    torch.manual_seed(0)
    made = transformers.LlamaConfig(**shape | config)
    transformers.LlamaForCausalLM(made).to(made.dtype).save_pretrained(str(folder))
    return str(folder)


def write_lines(path: Path, samples: list[Any]) -> str:
    """Write samples as JSON lines; the path."""
    path.write_text("".join(json.dumps(sample) + "\n" for sample in samples), encoding="utf-8")
    return str(path)


def questions(count: int = 40) -> list[dict[str, str]]:
    """Return samples of several lengths, as prompt and completion."""
    return [
        {"prompt": f"What is {i} and {i % 7}?", "completion": f" {i + i % 7}." + " Yes." * (i % 5)}
        for i in range(count)
    ]
