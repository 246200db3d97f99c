"""On how many of the installed transformers' model types the layers are found, and how fully."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from nemo_like._util.extras import require
from nemo_like.layers import LayersNotFoundError, find_layers

# Least share of a model's non-embedding parameters that should lie inside the layers found.
LEAST_SHARE = 0.90

# Model types below that share, each with the reason. At most 15.
EXCEPTIONS: dict[str, str] = {
    "dac": "a convolutional codec: single convolutions before and after its blocks hold the rest",
    "glm4v_moe_vision": "a tower by itself: its one merger into the language model's width is not a repeated layer",
    "glm4v_vision": "a tower by itself: its one merger into the language model's width is not a repeated layer",
    "glm5_next_vision": "a tower by itself: its one merger into the language model's width is not a repeated layer",
    "glm_image_vqmodel": "a quantizer: one codebook and two convolutions, nothing repeats",
    "granite_docling_vision": "a tower by itself: the projections of its connector are no repeated layers",
    "groupvit": "each stage is followed by one token-grouping module, which is not a layer, and two projections",
    "inkling2_vision": "a tower by itself: its one merger into the language model's width is not a repeated layer",
    "minicpm_ocr_vision": "a tower by itself: one window-attention merger inside it is not a repeated layer",
    "minicpmv4_7_vision": "a tower by itself: one window-attention merger inside it is not a repeated layer",
    "mobilenet_v2": "a last 1 x 1 convolution outside the blocks holds the rest",
    "muse_spark_audio": "a tower by itself: its one output projection is not a repeated layer",
    "nemotron3_5_transcribe_word_timestamp": "two layers by default, beside one transposed convolution",
    "tvp": "learned frame-padding prompts and a grid convolution hold the rest",
    "vits": "the posterior encoder keeps its convolutions in two parallel lists, not in blocks",
}


@dataclass(frozen=True)
class CoverageRow:
    """What was found in one model type, built from its default configuration on the meta device."""

    model_type: str
    model_class: str = ""
    problem: str = ""
    """Why the model cannot be built here, or what is wrong with the layers found; empty where nothing is."""
    built: bool = False
    groups: tuple[tuple[str, str, int], ...] = ()
    """(group, layer class, how many)."""
    share: float = 0.0
    """Share of the non-embedding parameters that lie inside the layers (0 to 1)."""


def model_types() -> list[str]:
    """Every model type that the installed transformers can build with ``AutoModel``."""
    auto = require("transformers.models.auto.modeling_auto", "hf", "to list its model types")
    return sorted(auto.MODEL_MAPPING_NAMES)


def survey(types: Iterable[str]) -> list[CoverageRow]:
    """One `CoverageRow` for each model type. Takes about 0.3 s each; nothing is allocated."""
    return [survey_one(model_type) for model_type in types]


def survey_one(model_type: str) -> CoverageRow:
    """Build `model_type` on the meta device and look for its layers."""
    try:
        model = build(model_type)
    except Exception as error:  # noqa: BLE001 - whatever a third-party constructor raises is what the table reports
        reason = (str(error).strip().splitlines() or [""])[0]
        return CoverageRow(model_type, problem=f"cannot be built: {type(error).__name__}: {reason[:120]}")
    return look_at(model_type, model)


def build(model_type: str) -> nn.Module:
    """`model_type` from its default configuration, on the meta device, without initialising weights."""
    transformers = require("transformers", "hf", "to build its models")
    initialization = require("transformers.initialization", "hf", "to build its models")
    transformers.logging.set_verbosity_error()
    with torch.device("meta"), initialization.no_init_weights():
        return transformers.AutoModel.from_config(transformers.AutoConfig.for_model(model_type))


def look_at(model_type: str, model: nn.Module) -> CoverageRow:
    """Find the layers of `model` and check them against what does not depend on how they were found."""
    try:
        layers = find_layers(model)
    except LayersNotFoundError as error:
        return CoverageRow(model_type, type(model).__name__, str(error).splitlines()[0], built=True)
    problems = [*_overlaps([layer.module for layer in layers]), *_missed(model, [layer.module for layer in layers])]
    counts = Counter((layer.group, type(layer.module).__name__) for layer in layers)
    groups = tuple((group, name, count) for (group, name), count in counts.items())
    return CoverageRow(
        model_type,
        type(model).__name__,
        "; ".join(problems),
        built=True,
        groups=groups,
        share=share_inside(model, [layer.module for layer in layers]),
    )


def share_inside(model: nn.Module, layers: list[nn.Module]) -> float:
    """Share of the parameters of `model` inside `layers`; embeddings and output heads do not count."""
    inside = {id(parameter) for layer in layers for parameter in layer.parameters()}
    vocabularies = _vocabulary_sizes(getattr(model, "config", None))
    embedding: set[int] = set()
    for name, module in model.named_modules():
        is_head = isinstance(module, nn.Linear) and (name.endswith("head") or module.out_features in vocabularies)
        parameters = {id(parameter) for parameter in module.parameters()}
        if (is_head or "embed" in type(module).__name__.lower()) and not inside & parameters:
            embedding |= parameters
    counted = [parameter for parameter in model.parameters() if id(parameter) not in embedding]
    total = sum(parameter.numel() for parameter in counted)
    return sum(parameter.numel() for parameter in counted if id(parameter) in inside) / total if total else 0.0


def _vocabulary_sizes(config: object) -> set[int]:
    """Every ``*vocab_size`` of a configuration, sub-configurations included: a linear as wide is an output head."""
    sizes: set[int] = set()
    for name, value in vars(config).items() if config is not None else ():
        if name.endswith("vocab_size") and isinstance(value, int):
            sizes.add(value)
        elif name.endswith("_config") and hasattr(value, "to_dict"):
            sizes |= _vocabulary_sizes(value)
    return sizes


def _overlaps(layers: list[nn.Module]) -> Iterator[str]:
    owners: dict[int, int] = {}
    for index, layer in enumerate(layers):
        for part in layer.modules():
            if next(part.parameters(), None) is None:
                continue  # an activation object that layers share holds nothing that could be in two units
            if owners.setdefault(id(part), index) != index:
                yield f"{type(part).__name__} lies in two layers"
                return


def _missed(model: nn.Module, layers: list[nn.Module]) -> Iterator[str]:
    """Blocks that the model itself can checkpoint and that are neither a layer, nor in one, nor around some."""
    covered = {id(part) for layer in layers for part in layer.modules()}
    missed = Counter(
        type(module).__name__
        for module in model.modules()
        if any(base.__name__ == "GradientCheckpointingLayer" for base in type(module).__mro__)
        and not any(id(part) in covered for part in module.modules())
    )
    yield from (f"{count} x {name} missed" for name, count in missed.items())


def failures(rows: Iterable[CoverageRow]) -> Iterator[str]:
    """What is wrong, one line each, exceptions left out."""
    for row in rows:
        if not row.built or row.model_type in EXCEPTIONS:
            continue
        if row.problem:
            yield f"{row.model_type}: {row.problem}"
        elif row.share < LEAST_SHARE:
            yield f"{row.model_type}: only {row.share:.1%} of the non-embedding parameters lie inside its layers"


def to_markdown(rows: list[CoverageRow]) -> str:
    """The table of `docs/evidence/surveys/models.md`."""
    version = require("transformers", "hf", "to name its version").__version__
    built = [row for row in rows if row.built]
    good = [row for row in built if not row.problem and row.share >= LEAST_SHARE]
    lines = [
        "# Model coverage",
        "",
        "Made by `python -m tests.tools.surveys --output docs/evidence/surveys/models.md`; do not edit by hand.",
        "",
        f"transformers {version} knows {len(rows)} model types for `AutoModel`. {len(built)} build from their default "
        f"configuration on the meta device here. In {len(good)} of these every checkpointable block lies in a layer, "
        f"no layers overlap, and at least {LEAST_SHARE:.0%} of the non-embedding parameters lie inside the layers.",
        "",
        "Embeddings, which do not count: modules whose class name says so, and output heads (linear layers named so, "
        "or as wide as a vocabulary), unless they lie inside a layer.",
        "",
        "## Exceptions",
        "",
        "| model type | share inside | reason |",
        "|---|---|---|",
        *(
            f"| {row.model_type} | {row.share:.1%} | {EXCEPTIONS[row.model_type]} |"
            for row in rows
            if row.model_type in EXCEPTIONS
        ),
        "",
        "## Layers found",
        "",
        "| model type | class | layers | share inside |",
        "|---|---|---|---|",
        *(f"| {row.model_type} | {row.model_class} | {_layers_cell(row)} | {row.share:.1%} |" for row in built),
        "",
        "## Not built here",
        "",
        "| model type | why |",
        "|---|---|",
        *(f"| {row.model_type} | {row.problem.replace('|', '/')} |" for row in rows if not row.built),
        "",
    ]
    return "\n".join(lines)


def _layers_cell(row: CoverageRow) -> str:
    return "<br>".join(f"{group}: {count} x {name}" for group, name, count in row.groups) or row.problem
