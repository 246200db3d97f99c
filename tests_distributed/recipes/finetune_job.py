"""What the tests of fine-tuning share: a small model's folder, with a tokenizer of its own, and a run of the job."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_like.recipes.command_line import parse_options
from nemo_like.recipes.finetune import FineTuning, main
from nemo_like.recipes.loop import run_job
from tests_distributed.spawn import run_ranks

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TEXT = [f"what is {i} and {j}? {i + j}, of course." for i in range(12) for j in range(12)]


def make_model(folder: Path, *, vocab: int = 300, extra_vocab: int = 0, **config: Any) -> Path:
    """A folder with a tiny Llama (random weights from a seed) and a BPE tokenizer that was trained on `TEXT`."""
    import torch
    import transformers

    tokenizer = make_tokenizer(vocab)
    values = {
        "vocab_size": len(tokenizer) + extra_vocab, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 128, "tie_word_embeddings": False,
    } | config  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**values))
    model.save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))
    return folder


def make_tokenizer(vocab: int) -> Any:
    import tokenizers
    import transformers

    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    special = ["<|eos|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=special, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    bpe.train_from_iterator(TEXT, trainer)
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|eos|>", pad_token="<|eos|>")
    made.chat_template = TEMPLATE
    return made


def questions(count: int = 40) -> list[dict[str, Any]]:
    """Samples of several lengths, as prompt and completion."""
    texts = (TEXT[i * 7 % len(TEXT)] for i in range(count))
    return [
        {"prompt": text.split("?")[0] + "?", "completion": text.split("?")[1] + " Yes." * (i % 3)}
        for i, text in enumerate(texts)
    ]


def write_lines(path: Path, samples: list[Any]) -> Path:
    path.write_text("".join(json.dumps(sample) + "\n" for sample in samples), encoding="utf-8")
    return path


def read_samples(path: Path, tokenizer: Any, seq_len: int = 64, skip_bad: bool = False) -> Any:
    """The usable samples of a file, looked through by this process alone."""
    import torch

    from nemo_like.recipes.agree import Ranks
    from nemo_like.recipes.encode import Encoder
    from nemo_like.recipes.sample_files import open_samples
    from nemo_like.recipes.sample_rows import look_through

    alone = Ranks(0, 1, torch.device("cpu"))
    return look_through(
        "--data", open_samples("--data", str(path)), Encoder(tokenizer, seq_len), alone, skip_bad=skip_bad
    )


def _must_end_well(rank: int, world_size: int, arguments: list[str]) -> None:
    code = main(arguments)
    assert code == 0, f"rank {rank} ended with code {code}"


def run_finetune(world_size: int, arguments: list[str], summary: Path) -> dict[str, Any]:
    """The job on all ranks, which must end well; what it wrote to `summary`."""
    run_ranks(world_size, _must_end_well, [*arguments, "--json", str(summary)], init_group=False, timeout=200)
    found: dict[str, Any] = json.loads(summary.read_text())
    return found


def _several(rank: int, world_size: int, cases: dict[str, list[str]], folder: str) -> None:
    import torch
    import torch.distributed as dist

    from nemo_like.recipes.agree import Ranks

    control = dist.new_group(backend="gloo") if world_size > 1 else None
    for name, line in cases.items():
        torch._dynamo.reset()
        options = parse_options("finetune", ["--output", f"{folder}/{name}", "--json", f"{folder}/{name}.json", *line])
        with contextlib.redirect_stdout(io.StringIO()):
            code = run_job(FineTuning(options, Ranks(rank, world_size, torch.device("cpu"), control=control)))
        assert code == 0, f"rank {rank} ended {name!r} with code {code}"


def run_several(world_size: int, cases: Mapping[str, Sequence[str]], folder: Path) -> dict[str, dict[str, Any]]:
    """One job after the other on the same ranks, cheaper than a launch for each; each one's summary. A case writes to the
    folder of its name in `folder`."""
    lines = {name: list(line) for name, line in cases.items()}
    run_ranks(world_size, _several, lines, str(folder), timeout=200)
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in cases}
