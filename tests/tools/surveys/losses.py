"""Which language models of the installed transformers compute their loss in chunks: each built tiny, and run twice."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nemo_like._util.extras import require
from nemo_like._util.log import forget_announcements, logger
from nemo_like.losses.model_loss import chunk_model_loss
from nemo_like.options import ChunkedLoss
from tests.tools.surveys.tiny_causes import CAUSES
from tests.tools.surveys.tiny_models import ATTEMPTS, build_tiny, cell, one_line, within
from tests.tools.surveys.tiny_rules import INPUTS

ENDINGS = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")
SECTION = "## Losses in chunks"
SECONDS = 20
"""What one class may take; a default size that no rule below makes small would take minutes."""


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
    for without in ATTEMPTS:
        try:
            with within(SECONDS):
                model = build_tiny(name, without)
                batch = _inputs(name, model.config)
                theirs = _step(model, batch)
            break
        except Exception as error:  # noqa: BLE001 - whatever a third-party model raises is what the table reports
            reason = reason or one_line(error)
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
        return LossRow(name, ran=True, wrong=True, reason=one_line(error))
    finally:
        logger.removeHandler(handler)
    reasons = [line.partition("because ")[2].rstrip(".") for line in said if "loss='chunked'" in line]
    return LossRow(name, not reasons, "; ".join(reasons), ran=True, wrong=not _same(ours, theirs))


def _text() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 40, (2, 9), generator=generator)
    return {"input_ids": ids, "labels": ids.clone().index_fill_(1, torch.tensor([0, 1]), -100)}


def _inputs(name: str, config: Any) -> dict[str, Tensor]:
    """Text with labels, and what `name` needs besides."""
    text = _text()
    torch.manual_seed(3)
    batch = text | INPUTS[name](config, text) if name in INPUTS else text
    return {key: value for key, value in batch.items() if value is not None}


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


def markdown(rows: list[LossRow]) -> str:
    """The last section of `docs/evidence/surveys/models.md`."""
    version = require("transformers", "hf", "to name its version").__version__
    ran = [row for row in rows if row.ran]
    chunked = [row for row in ran if row.chunked and not row.wrong]
    plain = [row for row in ran if not row.chunked or row.wrong]
    lines = [
        SECTION,
        "",
        "Made by `python -m tests.tools.surveys --losses --output docs/evidence/surveys/models.md`.",
        "",
        f"transformers {version} has {len(rows)} classes named `*ForCausalLM`, `*ForConditionalGeneration` or "
        f"`*LMHeadModel`. {len(ran)} of them run here tiny in training mode, on text with labels, and on pictures or sound "
        "where they need them. "
        f'With `parallelize(loss="chunked")` {len(chunked)} of these compute their loss in chunks, and it is the plain '
        "one (float32: loss within 1e-6 relative, gradients within 1e-5 of their norm).",
        "",
        "Chunked: " + ", ".join(row.model_class for row in chunked) + ".",
        "",
        "### Whole logits, and why",
        "",
        "| class | reason |",
        "|---|---|",
        *(f"| {row.model_class} | {'wrong: ' if row.wrong else ''}{cell(row.reason)} |" for row in plain),
        "",
        "### Not run here",
        "",
        "Nothing is known of these.",
        "",
        "| class | cause | what it raised |",
        "|---|---|---|",
        *(
            f"| {row.model_class} | {CAUSES.get(row.model_class, 'not looked into')} | {cell(row.reason)} |"
            for row in rows
            if not row.ran
        ),
        "",
    ]
    return "\n".join(lines)
