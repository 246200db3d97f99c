"""Which model types `materialize(seed=)` gives the values of transformers' own initialisation, each built tiny."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from nemo_like._util.extras import require
from nemo_like.distributed import materialize
from tests.tools.surveys.tiny_models import ATTEMPTS, build_tiny, cell, one_line, within

PAGE = Path("docs/evidence/surveys/initial_values.md")
SECONDS = 60


@dataclass(frozen=True)
class InitialValues:
    """What happened to one model type."""

    model_type: str
    model_class: str = ""
    tensors: int = 0
    verdict: str = ""
    """``equal``, ``different``, ``refused`` or ``not built``."""
    problem: str = ""


def survey(types: Iterable[str]) -> Iterator[InitialValues]:
    """Compare each model type, one after the other."""
    names = require("transformers.models.auto.modeling_auto", "hf", "to list its model types").MODEL_MAPPING_NAMES
    for model_type in types:
        classes = names[model_type]
        yield survey_one(model_type, classes if isinstance(classes, str) else classes[0])
        gc.collect()


def survey_one(model_type: str, model_class: str) -> InitialValues:
    """Build `model_class` tiny, and compare its drawn values with those of transformers."""
    problem = ""
    for without in ATTEMPTS:
        try:
            with within(SECONDS):
                build_tiny(model_class, without)
        except Exception as error:  # noqa: BLE001  (a configuration that cannot be made small; it is in the table)
            problem = problem or one_line(error)
            continue
        return _compare(model_type, model_class, lambda: build_tiny(model_class, without))  # noqa: B023
    return InitialValues(model_type, model_class, 0, "not built", problem)


def _compare(model_type: str, model_class: str, build: Callable[[], nn.Module]) -> InitialValues:
    eager = build()
    tensors = dict(eager.named_parameters()) | dict(eager.named_buffers())
    try:
        with within(SECONDS), torch.device("meta"):
            model = build()
        materialize(model, seed=0)
    except Exception as error:  # noqa: BLE001  (it is in the table)
        return InitialValues(model_type, model_class, len(tensors), "refused", one_line(error))
    wrong = list(differences(eager, model))
    return InitialValues(model_type, model_class, len(tensors), "different" if wrong else "equal", "; ".join(wrong[:3]))


def initialized(model: nn.Module, seed: int) -> nn.Module:
    """Return `model`, of transformers and built on a CPU, after transformers' own initialisation was run once more."""
    for module in model.modules():
        vars(module).pop("_is_hf_initialized", None)
    for tensor in (*model.parameters(), *model.buffers()):
        vars(tensor).pop("_is_hf_initialized", None)
    torch.manual_seed(seed)
    model.initialize_weights()  # type: ignore[operator]
    return model


def differences(eager: nn.Module, model: nn.Module) -> Iterator[str]:
    """Yield each tensor of `model` that has other values than `initialized(eager, 0)`.

    A tensor that the initialisation does not write has the constructor's values in `eager`: there the kind of values
    is compared, the constants or the spread.
    """
    before = {name: tensor.detach().clone() for name, tensor in _tensors(eager)}
    initialized(eager, 0)
    drawn = dict(_tensors(model))
    # A tied tensor is initialised at each of its places, and the last one wins when they are tied already.
    tied = {name for names in _places(eager).values() if len(names) > 1 for name in names}
    for name, wanted in _tensors(eager):
        got = drawn[name].detach()
        if torch.equal(got, wanted):
            continue
        constructed = torch.equal(wanted, before[name]) or name in tied
        if not (constructed and alike(got, before[name])):
            yield f"{name}: {_describe(got)} for {_describe(wanted)}"


def alike(drawn: Tensor, eager: Tensor) -> bool:
    """Return whether two tensors have the same constants, or random values of the same spread and mean."""
    if torch.equal(drawn, eager):
        return True
    if not eager.is_floating_point() or eager.unique().numel() < 3 or drawn.unique().numel() < 3:
        return False
    spread, mean = eager.float().std(), eager.float().mean()
    off = 6 / eager.numel() ** 0.5  # a few standard errors
    return bool((drawn.float().std() / spread - 1).abs() < off and (drawn.float().mean() - mean).abs() < off * spread)


def _tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _places(model: nn.Module) -> dict[int, list[str]]:
    places: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        places.setdefault(id(parameter), []).append(name)
    return places


def _describe(tensor: Tensor) -> str:
    values = tensor.float()
    return f"mean {values.mean():.3g}, std {values.std():.3g}"


def markdown(rows: Iterable[InitialValues]) -> str:
    """Return the page of `docs/evidence/surveys`."""
    rows = list(rows)
    version = require("transformers", "hf", "to build its models").__version__
    count = Counter(row.verdict for row in rows)
    built = [row for row in rows if row.verdict != "not built"]
    lines = [
        "# Initial values",
        "",
        "Made by `python -m tests.tools.surveys --initial`; do not edit by hand.",
        "",
        f"{len(built)} of {len(rows)} model types of transformers {version} build with tiny sizes. Each was built on the "
        "meta device, and `materialize(model, seed=0)` gave it values. The judge is the same model on a CPU after "
        "`torch.manual_seed(0)` and transformers' own `initialize_weights()`: every parameter and buffer is compared with "
        "`torch.equal`. Tensors that this initialisation does not write, and tied ones, are compared with the "
        "constructor's: equal constants, or random values of the same mean and spread.",
        "",
        "Some constructors make a tensor outside of the meta device: `torch.Tensor(n)` is memory that has not been "
        "written. If the initialisation would give such a tensor other values, `materialize` refuses it by name; after "
        "`model.to('meta')` it is initialized as the others are.",
        "",
        ", ".join(f"{count[verdict]} are {verdict}" for verdict in ("equal", "different", "refused")) + ".",
        "",
        "| model type | class | tensors | result | reason |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.model_type} | {row.model_class} | {row.tensors} | {row.verdict} | {cell(row.problem)} |"
        for row in built
    ]
    return "\n".join([*lines, ""])
