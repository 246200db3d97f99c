"""On which model types of the installed transformers a budget holds: each built tiny, planned, and run for one step."""

from __future__ import annotations

import gc
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from nemo_like._util.extras import require
from nemo_like.fake.outside_state import RememberedTables
from nemo_like.job import Job
from nemo_like.options import MemoryBudget, StepSpec
from nemo_like.planning.devices import resolve_device
from nemo_like.planning.model.outside import loss_of
from nemo_like.planning.planner import apply_plan, describe
from nemo_like.planning.predictions.budget_search import choose
from nemo_like.planning.predictions.rank import peak_of
from nemo_like.planning.query import PlanQuery
from tests.allocator_events import cpu_events
from tests.planning.queries import bytes_between_steps, held_bytes, saved
from tests.tools.surveys.code_version import code_version
from tests.tools.surveys.tiny_models import ATTEMPTS, build_tiny, one_line, within

BUDGET = 0.35
"""Share of the activation bytes of no checkpointing."""
SECONDS = 120
CLOSE = 0.01
"""What a predicted peak may be off, as a share of the measured one."""
BATCH, TOKENS, SAMPLES = 4, 64, 16_000

_HEADS = (
    "CAUSAL_LM",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "MASKED_LM",
    "IMAGE_CLASSIFICATION",
    "AUDIO_CLASSIFICATION",
    "CTC",
    "SPEECH_SEQ_2_SEQ",
    "",
)
"""The kinds of head that are tried for a type, in this order; the last is the model without one."""


@dataclass(frozen=True)
class SurveyedPlan:
    """What happened to one model type."""

    model_type: str
    model_class: str = ""
    planned: str = ""
    """The budget that a plan was made for; empty: none could be."""
    ran: bool = False
    """One step ran as planned."""
    trains: bool = True
    """It runs without a plan; False: nothing can be said of it."""
    peak_error: float = 0.0
    """(predicted - measured) / measured, bytes of a whole step with its optimizer."""
    held_error: float = 0.0
    """The same for what is alive between forward and backward, without parameters and optimizer state."""
    problem: str = ""
    """What it raised."""
    code: str = field(default_factory=code_version)
    """The commit of this package that it was tried with."""

    @property
    def close(self) -> bool:
        """Planned, run, and its peak as predicted."""
        return self.ran and abs(self.peak_error) <= CLOSE

    @property
    def exceeded(self) -> bool:
        """The step peaked higher than predicted."""
        return self.ran and self.peak_error < -CLOSE


def model_types() -> dict[str, tuple[str, ...]]:
    """For each model type of the installed transformers the classes to try, by name."""
    auto = require("transformers.models.auto.modeling_auto", "hf", "to list its model types")
    tried: dict[str, list[str]] = {name: [] for name in sorted(auto.MODEL_MAPPING_NAMES)}
    for head in _HEADS:
        mapping = getattr(auto, f"MODEL_FOR_{head}_MAPPING_NAMES" if head else "MODEL_MAPPING_NAMES", {})
        for name, classes in mapping.items():
            tried.setdefault(name, []).extend([classes] if isinstance(classes, str) else classes)
    return {name: tuple(dict.fromkeys(classes)) for name, classes in sorted(tried.items()) if classes}


def survey(types: Iterable[str]) -> Iterator[SurveyedPlan]:
    """One `SurveyedPlan` for each type; some seconds each."""
    classes = model_types()
    for name in types:
        yield survey_one(name, classes[name])
        gc.collect()


def survey_one(model_type: str, classes: Iterable[str]) -> SurveyedPlan:
    """The first of `classes` that trains, tiny, on this machine: planned, and run."""
    reason = ""
    for name, without in itertools.product(classes, ATTEMPTS):
        try:
            with within(SECONDS):
                model, sample = _trainable(name, without)
        except Exception as error:  # noqa: BLE001 - whatever a third-party model raises is what the table reports
            reason = reason or one_line(error)
            if isinstance(error, TimeoutError | ImportError):
                break
            continue
        try:
            with within(SECONDS):
                return planned_and_run(model_type, model, sample)
        except TimeoutError as error:
            return SurveyedPlan(model_type, name, problem=one_line(error))
    return SurveyedPlan(model_type, trains=False, problem=reason)


def _trainable(name: str, without: tuple[str, ...]) -> tuple[nn.Module, dict[str, Tensor]]:
    """The class, tiny, and an input with which it trains."""
    model = build_tiny(name, without)
    problem: Exception | None = None
    for sample in samples_for(model):
        try:
            _step(model, sample)
            return model, sample
        except Exception as error:  # noqa: BLE001 - as above; the first one is raised if nothing works
            problem = problem or error
    assert problem is not None
    raise problem


def samples_for(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Random inputs of the kind that `model` names as its main one, with labels where it takes text and has a head.

    For a model that takes text and pictures: text alone, then both.

    Raises:
        ValueError: its main input is of a kind that is not known here.
    """
    main = getattr(model, "main_input_name", "input_ids")
    config: Any = model.config
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 40, (BATCH, TOKENS), generator=generator)
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", None) or 64
    height, width = size if isinstance(size, tuple | list) else (size, size)
    channels = getattr(vision, "num_channels", 3)
    pictures = torch.randn(2, channels if isinstance(channels, int) else 3, height, width, generator=generator)
    if main == "input_ids":
        heads = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForMaskedLM")
        yield {main: ids} | ({"labels": ids.clone()} if type(model).__name__.endswith(heads) else {})
        if hasattr(config, "vision_config"):
            yield {main: ids[:2, :16], "pixel_values": pictures}
    elif main == "pixel_values":
        yield {main: pictures}
    elif main == "input_values":
        yield {main: torch.randn(2, SAMPLES, generator=generator)}
    elif main == "input_features":
        bins, positions = getattr(config, "num_mel_bins", 80), getattr(config, "max_source_positions", 100)
        sound = {main: torch.randn(2, bins, 2 * positions, generator=generator)}
        yield sound | ({"labels": ids[:2]} if getattr(config, "is_encoder_decoder", False) else {})
    else:
        raise ValueError(f"its main input is {main!r}, which the survey cannot make up")


def _step(model: nn.Module, sample: dict[str, Tensor]) -> None:
    loss_of(model(**sample)).backward()
    if not any(parameter.grad is not None for parameter in model.parameters()):
        raise ValueError("no parameter gets a gradient")
    model.zero_grad()


def planned_and_run(model_type: str, model: nn.Module, sample: dict[str, Tensor]) -> SurveyedPlan:
    name = type(model).__name__
    try:
        query = PlanQuery.from_model(
            model, sample, Job.of(step=StepSpec(keeps_output=False), gpu=resolve_device("cpu"))
        )
        budget = _budget(query)
        choices = choose(query, budget, str(budget))
        plan, predicted = describe(query, choices, str(budget)), peak_of(query, choices)
    except TimeoutError:
        raise
    except Exception as error:  # noqa: BLE001 - the table reports it, whatever it is
        return SurveyedPlan(model_type, name, problem=one_line(error))
    try:
        apply_plan(model, plan)
        peak, alive = measured(model, sample)
    except TimeoutError:
        raise
    except Exception as error:  # noqa: BLE001 - as above
        return SurveyedPlan(model_type, name, planned=str(budget), problem=one_line(error))
    return SurveyedPlan(
        model_type,
        name,
        str(budget),
        ran=True,
        peak_error=(predicted.total - peak) / peak,
        held_error=(held_bytes(query, choices) - alive) / max(1, alive),
    )


def _budget(query: PlanQuery) -> MemoryBudget:
    """`BUDGET`, or the least that the layers can hold where that is more."""
    least = saved(query, query.uniform("full")) / max(1, saved(query, query.uniform("none")))
    return MemoryBudget(fraction=min(1.0, max(BUDGET, math.ceil(100 * least) / 100)))


def measured(model: nn.Module, sample: dict[str, Tensor]) -> tuple[int, int]:
    """The peak of the second step with AdamW, and what is alive when its forward has ended, from allocator events."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        loss = loss_of(model(**sample))
        loss.backward()
        optimizer.step()

    with RememberedTables(model) as tables:
        step()
        optimizer.zero_grad(set_to_none=True)
        outputs: list[Any] = []
        alive = cpu_events(lambda: outputs.append(model(**sample)))[-1]
        outputs.clear()
        before = bytes_between_steps(model, optimizer, gradients=False) + tables.bytes
        return before + max(cpu_events(step)), alive
