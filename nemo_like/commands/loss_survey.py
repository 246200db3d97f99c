"""Which language models of the installed transformers compute their loss in chunks: each built tiny, and run twice."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nemo_like.extras import require
from nemo_like.log import forget_announcements, logger
from nemo_like.losses.model_loss import chunk_model_loss
from nemo_like.options import ChunkedLoss

ENDINGS = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")
SECTION = "## Losses in chunks"
SECONDS = 20
"""What one class may take; a default size that no rule below makes small would take minutes."""

# What makes a configuration small. By the field's name, wherever in the tree of configurations it stands.
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "hidden_dim", "dim", "embed_dim", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("attention_hidden_size", "lru_width", "embedding_size", "projection_dim", "out_hidden_size"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "decoder_ffn_dim", "encoder_ffn_dim", "n_inner"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_decoder_layers", "depth", "num_encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "linear_num_value_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "linear_num_key_heads"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "mamba_d_head"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 16),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "n_group", "topk_group"), 2),
    "vocab_size": 96,
    "use_cache": False,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip


_LEFT: tuple[tuple[str, ...], ...] = ((), ("head_dim",), ("head_dim", "num_key_value_heads"), ("hidden_size", "head_dim"))
"""What is left at its default size in each attempt: configurations check what must divide what."""


@dataclass(frozen=True)
class LossRow:
    """What happened to one class."""

    model_class: str
    chunked: bool = False
    reason: str = ""
    """Why the plain path was taken; or why the class could not be run here."""
    ran: bool = False
    wrong: bool = False
    """It ran, and its loss or a gradient was another one."""


def language_models() -> list[str]:
    """Every class of the installed transformers with a language head, by its name."""
    transformers = require("transformers", "hf", "to list its models")
    named = [name for name in dir(transformers) if name.endswith(ENDINGS)]
    return [name for name in named if hasattr(getattr(transformers, name), "config_class")]


def survey(names: Iterable[str]) -> Iterator[LossRow]:
    """One `LossRow` for each class."""
    for name in names:
        yield survey_one(name)


def survey_one(name: str) -> LossRow:
    """Run `name`, tiny, on text with labels: as it is, and in chunks of five tokens."""
    reason = ""
    for without in _LEFT:
        try:
            with _within(SECONDS):
                model = build_tiny(name, without)
                batch = _text()
                theirs = _step(model, batch)
            break
        except Exception as error:  # noqa: BLE001 - whatever a third-party model raises is what the table reports
            reason = reason or _one_line(error)
            if isinstance(error, TimeoutError):
                return LossRow(name, reason=reason)
    else:
        return LossRow(name, reason=reason)
    try:
        chunk_model_loss(model, ChunkedLoss(chunk_tokens=5))
    except ValueError as error:
        why = str(error).split(": ", 1)[-1].split(". Use")[0]
        return LossRow(name, ran=True, reason=f"no output head is found in it: {why}")
    said: list[str] = []
    handler = _Lines(said)
    logger.addHandler(handler)
    forget_announcements()
    try:
        ours = _step(model, batch)
    except Exception as error:  # noqa: BLE001 - as above: it ran without us, so it is wrong now
        return LossRow(name, ran=True, wrong=True, reason=_one_line(error))
    finally:
        logger.removeHandler(handler)
    reasons = [line.partition("because ")[2].rstrip(".") for line in said if "loss='chunked'" in line]
    return LossRow(name, not reasons, "; ".join(reasons), ran=True, wrong=not _same(ours, theirs))


def build_tiny(name: str, without: tuple[str, ...] = ()) -> nn.Module:
    """`name` with random weights, in training mode, without dropout."""
    transformers = require("transformers", "hf", "to build its models")
    transformers.logging.set_verbosity_error()
    cls = getattr(transformers, name)
    config = cls.config_class(**_small(cls.config_class, without))
    torch.manual_seed(0)
    model = cls(config).float().train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    if sum(parameter.numel() for parameter in model.parameters()) > 30_000_000:
        raise ValueError("its default sizes are not made small by the names that are known")
    return model


def _small(config_class: Any, without: tuple[str, ...]) -> dict[str, Any]:
    """Arguments of `config_class`; what `without` names stays as it is."""
    known = config_class().to_dict()
    values = {
        key: value
        for key, value in _SIZES.items()
        if key in known and key not in without and isinstance(known[key], int | None)
    }
    if "kv_lora_rank" in known:
        values["num_key_value_heads"] = _SIZES["num_attention_heads"]  # latent attention shares no heads
    for key, value in known.items():
        if "dropout" in key and isinstance(value, float):
            values[key] = 0.0
    for key, sub in (getattr(config_class, "sub_configs", None) or {}).items():
        model_type = (known.get(key) or {}).get("model_type") if isinstance(known.get(key), dict) else None
        if not hasattr(sub, "for_model") and hasattr(sub, "model_type"):
            values[key] = _small(sub, without)
        elif model_type:
            auto = require("transformers", "hf", "to build its models").AutoConfig
            values[key] = {"model_type": model_type} | _small(type(auto.for_model(model_type)), without)
    return values


def _text() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 40, (2, 9), generator=generator)
    return {"input_ids": ids, "labels": ids.clone().index_fill_(1, torch.tensor([0, 1]), -100)}


def _step(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    torch.manual_seed(2)
    model.zero_grad()
    loss = model(**batch).loss
    if not isinstance(loss, Tensor):
        raise ValueError("called with input_ids and labels, it gives no loss")
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def _same(ours: tuple[Tensor, dict[str, Tensor]], theirs: tuple[Tensor, dict[str, Tensor]]) -> bool:
    """Loss within 1e-6 relative, each gradient within 1e-5 of its norm (and 1e-7 of the largest: zeros round too)."""
    largest = max((gradient.norm() for gradient in theirs[1].values()), default=torch.zeros(()))
    return (
        bool((ours[0] - theirs[0]).abs() <= 1e-6 * theirs[0].abs() + 1e-7)
        and ours[1].keys() == theirs[1].keys()
        and all((ours[1][n] - g).norm() <= 1e-5 * g.norm() + 1e-6 * largest for n, g in theirs[1].items())
    )


class _Lines(logging.Handler):
    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self.lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class _within:
    """Raise TimeoutError after so many seconds (main thread, POSIX)."""

    def __init__(self, seconds: int) -> None:
        self.seconds = seconds

    def __enter__(self) -> None:
        self._handler = signal.signal(signal.SIGALRM, self._ring)
        self._timer = signal.setitimer(signal.ITIMER_REAL, self.seconds)

    def __exit__(self, *error: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, *self._timer)  # somebody else's (a test runner's), if there was one
        signal.signal(signal.SIGALRM, self._handler)

    def _ring(self, *_: object) -> None:
        raise TimeoutError(f"not built and run within {self.seconds} s")


def markdown(rows: list[LossRow]) -> str:
    """The last section of `docs/model-coverage.md`."""
    version = require("transformers", "hf", "to name its version").__version__
    ran = [row for row in rows if row.ran]
    chunked = [row for row in ran if row.chunked and not row.wrong]
    plain = [row for row in ran if not row.chunked or row.wrong]
    lines = [
        SECTION,
        "",
        "Made by `nemo-like coverage --losses --output docs/model-coverage.md`.",
        "",
        f"transformers {version} has {len(rows)} classes named `*ForCausalLM`, `*ForConditionalGeneration` or "
        f"`*LMHeadModel`. {len(ran)} of them run here tiny on text alone, in training mode, with `input_ids` and `labels`. "
        f"With `parallelize(loss=\"chunked\")` {len(chunked)} of these compute their loss in chunks, and it is the plain "
        "one (float32: loss within 1e-6 relative, gradients within 1e-5 of their norm).",
        "",
        "Chunked: " + ", ".join(row.model_class for row in chunked) + ".",
        "",
        "### Whole logits, and why",
        "",
        "| class | reason |",
        "|---|---|",
        *(f"| {row.model_class} | {'wrong: ' if row.wrong else ''}{_cell(row.reason)} |" for row in plain),
        "",
        "### Not run here",
        "",
        "Nothing is known of these: they need other inputs than text, or sizes that the survey does not know.",
        "",
        "| class | what it raised |",
        "|---|---|",
        *(f"| {row.model_class} | {_cell(row.reason)} |" for row in rows if not row.ran),
        "",
    ]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "/").replace("<", "&lt;")


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
