"""Thirty models that many train, and what each can do: `python -m tests.tools.surveys --popular` writes the table.

Each is built tiny. ``chunked`` and ``packed`` train in this process; a budget and the axes run as rank 0 of a job on fake
tensors (`nemo_like.dry_run`). A cell is a yes, or the number of a reason below the table.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nemo_like import Job, PipelineParallel, dry_run, parallelize
from nemo_like._util.extras import require
from nemo_like._util.log import forget_announcements
from nemo_like.layers import find_layers
from nemo_like.planning.model.inputs import model_input
from tests.tools.surveys.plans import model_types
from tests.tools.surveys.tiny_models import ATTEMPTS, build_tiny, cell

POPULAR = """llama llama4_text mistral mixtral ministral3 qwen2 qwen3 qwen3_moe qwen3_next qwen2_5_vl qwen3_vl
    gemma2 gemma3_text gemma3 gemma4_text gpt_oss deepseek_v3 phi3 olmo2 olmoe granite glm4_moe smollm3
    nemotron_h mamba2 gpt2 bert t5 whisper vit"""
PAGE = Path(__file__).parents[3] / "docs" / "reference" / "models.md"
YES = "yes"
ROWS, TOKENS, PLACES = 2, 32, 1024
_FIELDS: dict[str, dict[str, Any]] = {
    "budget": {"ac": "60%"},
    "`tp`": {"tp": 2},
    "`cp`": {"cp": 2},
    "`ep`": {"ep": 2},
    "`pp`": {"pp": PipelineParallel(2)},
}
COLUMNS = ("layers", "budget", "chunked", "`tp`", "`cp`", "`ep`", "`pp`", "packed")


def page() -> str:
    """Return the page with its table."""
    reasons: dict[str, int] = {}
    rows = []
    for name in POPULAR.split():
        cells = row(name)
        texts = [cells[column] for column in COLUMNS]
        for index, text in enumerate(texts[1:], 1):
            if text != YES:
                texts[index] = f"no ({reasons.setdefault(text, len(reasons) + 1)})"
        rows.append(f"| `{name}` | {' | '.join(texts)} |")
        print(rows[-1], flush=True)
    version = require("transformers", "hf", "to name its version").__version__
    return "\n".join(
        [
            "# Models",
            "",
            f"Thirty models of transformers {version}, each built small (`tests.tools.surveys --popular`). Loss in",
            "chunks and packed documents trained here. A budget (60 %) and the axes, of two ranks each, ran as one rank of",
            "the job on fake tensors. Every other model type: [survey](../evidence/surveys/models.md).",
            "",
            f"| model type | {' | '.join(COLUMNS)} |",
            f"|{'---|' * (len(COLUMNS) + 1)}",
            *rows,
            "",
            "## Why not",
            "",
            *(f"{number}. {cell(reason)}" for reason, number in reasons.items()),
            "",
        ]
    )


def row(name: str) -> dict[str, str]:
    """Return the cells of one model type, by column."""
    auto = require("transformers.models.auto.modeling_auto", "hf", "to list its model types")
    with_pictures = auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(name)
    classes = sorted(model_types()[name], key=lambda each: not each.endswith("ForConditionalGeneration"))
    model, batch = _tiny(classes if with_pictures is None else [with_pictures])
    groups: dict[str, int] = {}
    for layer in find_layers(model):
        groups[type(layer.module).__name__] = groups.get(type(layer.module).__name__, 0) + 1
    cells = {"layers": ", ".join(f"`{kind}`" for kind in groups)}
    for column, fields in _FIELDS.items():
        cells[column] = _tried(model, lambda fields=fields: _dry(model, batch, fields))
    cells["chunked"] = _tried(model, lambda: _chunked(model, batch))
    cells["packed"] = _tried(model, lambda: _packed(model, batch))
    return cells


def _tiny(classes: Sequence[str]) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Return the first class that trains on text, or else on what it names as its main input."""
    problem: Exception | None = None
    for name in classes:
        for without in ATTEMPTS:
            try:
                model = build_tiny(name, without)
                batch = _batch(model)
                output = copy.deepcopy(model)(**batch)
            except Exception as error:  # noqa: BLE001 - the next class or size is tried, and the last error is raised
                problem = error
                continue
            if getattr(output, "loss", None) is not None:
                return model, batch
    raise ValueError(f"none of {', '.join(classes)} trains here") from problem


def _batch(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return text with labels; of an encoder of pictures or sound, those with labels."""
    config: Any = model.config
    ids = torch.randint(3, 40, (ROWS, TOKENS), generator=torch.Generator().manual_seed(1))
    main = str(getattr(model, "main_input_name", "input_ids"))
    if main == "pixel_values":
        pictures = torch.randn(ROWS, config.num_channels, config.image_size, config.image_size)
        return {main: pictures, "labels": ids[:, 0] % config.num_labels}
    if main == "input_features":
        sound = torch.randn(ROWS, config.num_mel_bins, 2 * config.max_source_positions)
        return {main: sound, "labels": ids}
    return {"input_ids": ids, "labels": ids.clone()}


def _tried(model: nn.Module, attempt: Callable[[], None]) -> str:
    """Return `YES`, or the first sentence of why it is refused, without the name of the class of `model`."""
    forget_announcements()
    try:
        attempt()
    except (ValueError, TypeError, NotImplementedError, RuntimeError) as error:
        sentence = " ".join(str(error).split()).split(". ")[0].rstrip(".") + "."
        name = type(model).__name__
        sentence = sentence.removeprefix(f"{name}: ").replace(f"This {name}", "It").replace(f"this {name}", "it")
        return sentence.replace(name, "the model")
    return YES


def _dry(model: nn.Module, batch: Mapping[str, torch.Tensor], fields: dict[str, Any]) -> None:
    if "ep" in fields and not any("expert" in name for name, _ in model.named_modules()):
        raise ValueError("It has no experts.")
    if "ac" in fields and hasattr(model.config, "vision_config"):  # a plan is of the layers that its sample runs
        text = torch.randint(3, 40, (ROWS, PLACES), generator=torch.Generator().manual_seed(1))
        batch = model_input(model, {"input_ids": text, "labels": text.clone()}).tensors
    ranks = 1 if "ac" in fields else 2
    dry_run(copy.deepcopy(model).to("meta"), Job.of(world_size=ranks, gpu="cpu", **fields), sample_input=dict(batch))


def _chunked(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> None:
    plain = model(**batch).loss
    output = parallelize(copy.deepcopy(model), ac="none", loss="chunked")(**batch)
    if output.logits is not None:
        raise ValueError("Its loss is not computed of a head's output by a function that is known: it is its own.")
    torch.testing.assert_close(output.loss, plain, rtol=1e-5, atol=1e-6)  # sums of chunks are of another order


def _packed(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> None:
    if "input_ids" not in batch:
        raise ValueError("It takes no text.")
    ids, first = batch["input_ids"][:1], TOKENS // 2
    trained = parallelize(copy.deepcopy(model), ac="none")
    numbers = torch.tensor([[1] * first + [2] * (TOKENS - first)])
    loss = trained(input_ids=ids, labels=ids.clone(), attention_mask=numbers).loss
    alone = [model(input_ids=part, labels=part.clone()).loss for part in (ids[:, :first], ids[:, first:])]
    torch.testing.assert_close(loss, sum(alone) / 2, rtol=1e-5, atol=1e-6)  # matmuls of other shapes round otherwise
