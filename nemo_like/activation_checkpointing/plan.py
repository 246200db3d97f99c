"""A plan: for each layer, the outputs to keep; saved and loaded as readable JSON, and checked against the model."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from nemo_like._util.log import warn_once
from nemo_like._util.module_tree import bare_modules, join
from nemo_like.activation_checkpointing.policy import DecisionTable, FullPolicy, Policy
from nemo_like.activation_checkpointing.spec import CheckpointSpec
from nemo_like.options.names import NamedList, NamedLists

FORMAT = 1


class PlanError(ValueError):
    """A plan file is damaged, or was made for another model."""


@dataclass(frozen=True)
class LayerPlan:
    """The plan for one layer."""

    fqn: str
    """Its name in the original model."""
    signature: str
    """Digest of its class and parameter shapes, which `Plan.check` compares."""
    label: str
    """``none`` (not checkpointed) | ``full`` (inputs only) | ``plan`` (some outputs are saved)."""
    held_bytes: int
    """Kept on the device between its forward and its backward."""
    host_bytes: int
    """Kept in CPU memory meanwhile."""
    none_bytes: int
    """Bytes that it would save without checkpointing."""
    recompute_flops: int
    recompute_seconds: float
    decisions: Mapping[str, Sequence[str]] | None
    """Op name → decision of each invocation; None: the layer is not a region. All attention kernels share one row."""
    names: Mapping[str, Sequence[str]] | None = None
    """The list of names that makes these decisions; None: they have another origin."""
    regions: Mapping[str, Mapping[str, Sequence[str]]] | None = None
    """Path of a module in it → its `decisions`, where these are regions; None: the layer itself is one, or none is."""

    def policies(self) -> dict[str, Policy]:
        """The policies of its regions by name."""
        policy = self.policy()
        if self.regions is None:
            return {} if policy is None else {self.fqn: policy}
        return {join(self.fqn, path): _policy(rows) for path, rows in self.regions.items()}

    def policy(self) -> Policy | None:
        """The engine's policy for this layer; None: no region.

        It is not strict: a batch with another mask than the sample's trains on, with more to recompute.
        """
        if self.decisions is None:
            return None
        return _policy(self.decisions)


def _policy(rows: Mapping[str, Sequence[str]]) -> Policy:
    return DecisionTable.from_json(rows, strict=False) if rows else FullPolicy()


@dataclass(frozen=True)
class Plan:
    """The result of `nemo_like.planning.plan_for`: one `LayerPlan` per layer call site, and its settings."""

    model: str
    """Class of the model."""
    device: str
    """Name of the device whose rates it counts with."""
    traced_for: str
    """``"cuda"`` or ``"cpu"``: whose operators the decisions are for."""
    budget: str
    """As asked."""
    layers: tuple[LayerPlan, ...]
    """One for each layer, in the order of forward."""
    held_bytes: int
    """All layers together, and the tensors they share, on the device."""
    none_bytes: int
    """Bytes that the layers would save without checkpointing."""
    full_bytes: int
    """Bytes that they would save if each were recomputed whole."""
    forward_flops: int
    """One forward pass of all layers."""
    forward_seconds: float
    """Seconds of that, by the roofline."""
    recompute_flops: int
    """Floating-point operations that backward recomputes."""
    recompute_seconds: float
    """Seconds of these."""
    step_seconds: float = 0.0
    """Predicted, by the roofline of the device: one optimizer step on one rank, communication included."""
    peak: Mapping[str, int] = field(default_factory=dict)
    """Predicted bytes per rank at the peak of a step, by kind (see `Part`); their sum is the peak."""
    peak_at: str = ""
    """The moment of the step at which the peak is."""
    reserved_bytes: int | None = None
    """Bytes per rank that CUDA's caching allocator is predicted to reserve (`nemo_like.planning.predictions.reserved`);
    compared with no GPU's. None: not known, as with tensors in CPU memory, pipelines or another allocator."""
    step: Mapping[str, Any] = field(default_factory=dict)
    """The step that the peak is of: the fields of its `StepSpec`; ``loss``, of the ``model`` or of the ``loop``; and the
    tensors of the ``sample``."""
    matmuls: str | None = None
    """The format that the layers' linears multiply in, in the words of `nemo_like.options.Precision.matmuls`; None: as
    they do."""
    torch: str = torch.__version__
    """Release that traced the layers."""

    @property
    def peak_bytes(self) -> int:
        """Predicted peak per rank of a whole training step; 0 where it was not asked for."""
        return sum(self.peak.values())

    @property
    def recompute_share(self) -> float:
        """Recomputation time as a share of one forward pass of the layers (roofline)."""
        return self.recompute_seconds / self.forward_seconds if self.forward_seconds else 0.0

    @property
    def lists(self) -> NamedLists | None:
        """The lists of names that make the plan, as ``ac=`` takes them; None: some layer has another origin."""
        layers: dict[str, list[str]] = {}
        for layer in self.layers:
            if layer.names is None:
                return None
            layers.setdefault(json.dumps(layer.names), []).append(layer.fqn)
        fewest = sorted(layers.items(), key=lambda item: len(item[1]))
        lists = [
            NamedList(**json.loads(words) | ({"layers": layer_globs(names)} if at < len(fewest) - 1 else {}))
            for at, (words, names) in enumerate(fewest)
        ]
        return NamedLists(tuple(lists))

    def policies(self) -> dict[str, Policy]:
        """Policy of each region by name.

        Layers that keep the same have one object: Dynamo compiles a layer again for each object that it meets.
        """
        shared: dict[Policy, Policy] = {}
        return {
            name: shared.setdefault(policy, policy)
            for layer in self.layers
            for name, policy in layer.policies().items()
        }

    def say_other_device(self, device_type: str) -> None:
        """Warn once where the plan was traced for another type of device than the model runs on."""
        if device_type != self.traced_for:
            warn_once(
                f"This plan was traced for {self.traced_for} ({self.device}), and the model runs on {device_type}, where "
                "other operators do some of the work (attention, dropout, norms). Gradients are the same; but results "
                "of operators that do not run are computed again, and the plan's bytes and peak do not hold. Make "
                f"the plan for {device_type} (device=)."
            )

    def only(self, names: Collection[str]) -> Plan:
        """The plan of these layers, for a model that has no others; its sums and its peak stay those of the whole."""
        return replace(self, layers=tuple(layer for layer in self.layers if layer.fqn in names))

    def check(self, model: nn.Module) -> None:
        """Compare with the model's layers.

        Raises:
            PlanError: a planned layer is missing, or is another one (class, parameter names, shapes or dtypes).
        """
        modules = dict(bare_modules(model))
        for layer in self.layers:
            if layer.fqn not in modules:
                raise PlanError(
                    f"The plan was made for a {self.model} with a layer {layer.fqn!r}, which this "
                    f"{type(model).__name__} does not have. Make the plan again for this model."
                )
            signature = layer_signature(modules[layer.fqn])
            if signature != layer.signature:
                raise PlanError(
                    f"Layer {layer.fqn!r} of this {type(model).__name__} is not the one that the plan was made for "
                    f"(its class or the shapes of its parameters differ: {signature}, planned {layer.signature}). Make "
                    "the plan again for this model."
                )

    def check_matmuls(self, matmuls: str | None) -> None:
        """Raise PlanError where linears will multiply in another format than the plan was made for; `matmuls`: in the
        words of `nemo_like.options.Precision.matmuls`."""
        if matmuls != self.matmuls:
            there, here = (f"precision={word!r}" if word else "linears as they are" for word in (self.matmuls, matmuls))
            raise PlanError(
                f"The plan was made for {there}, and the model is to run with {here}: it has other operators and other "
                "bytes then. Make the plan again with the same precision, or leave that as it was."
            )

    def save(self, path: str | Path) -> None:
        """Write `as_json` to a file."""
        Path(path).write_text(json.dumps(self.as_json(), indent=1) + "\n", encoding="utf-8")

    def as_json(self) -> dict[str, Any]:
        """In JSON values that people can read: equal layers share one entry of decisions."""
        tables: dict[str, Any] = {}
        layers = []
        for layer in self.layers:
            entry = {k: v for k, v in asdict(layer).items() if k != "decisions"}
            key = "none"
            if layer.decisions is not None:
                text = json.dumps(layer.decisions, sort_keys=True)
                key = next(
                    (k for k, v in tables.items() if json.dumps(v, sort_keys=True) == text), f"table {len(tables)}"
                )
                tables[key] = {name: list(row) for name, row in layer.decisions.items()}
            layers.append(entry | {"decisions": key})
        head = {k: v for k, v in asdict(replace(self, layers=())).items() if k != "layers"}
        return {"format": FORMAT} | head | {"decisions": tables, "layers": layers}

    @classmethod
    def load(cls, path: str | Path, model: nn.Module | None = None) -> Plan:
        """Read a plan that `save` wrote, and `check` it against `model`, if given.

        Raises:
            PlanError: the file is damaged, of another format, or was made for another model.
        """
        try:
            return cls.from_json(json.loads(Path(path).read_text(encoding="utf-8")), model)
        except json.JSONDecodeError as error:
            raise PlanError(f"Plan file {path} is not valid JSON: {error}") from error
        except UnicodeDecodeError as error:
            raise PlanError(f"Plan file {path} is not text: {error}") from error
        except PlanError as error:
            raise PlanError(f"Plan file {path}: {error}") from error
        except (KeyError, TypeError, AttributeError) as error:
            raise PlanError(f"Plan file {path} is damaged or not a plan: {type(error).__name__}: {error}") from error

    @classmethod
    def from_json(cls, body: Mapping[str, Any], model: nn.Module | None = None) -> Plan:
        """The plan in the values of `as_json`."""
        if body.get("format") != FORMAT:
            raise PlanError(
                (
                    f"It has format {body['format']!r}, and this version reads {FORMAT}. Make it again: "
                    if "format" in body
                    else "It is not a plan. Plans are written by "
                )
                + "plan.save(...), or nemo-like plan --save."
            )
        tables = body["decisions"]
        layers = tuple(
            LayerPlan(**(entry | {"decisions": None if entry["decisions"] == "none" else tables[entry["decisions"]]}))
            for entry in body["layers"]
        )
        plan = cls(layers=layers, **{k: v for k, v in body.items() if k not in ("format", "decisions", "layers")})
        for layer in plan.layers:
            try:
                layer.policies()
            except ValueError as error:
                raise PlanError(f"Layer {layer.fqn!r} of the plan: {error}") from error
        if model is not None:
            plan.check(model)
        return plan


def layer_globs(names: Sequence[str]) -> list[str]:
    """Return globs of exactly these names of layers, with ranges of numbers.

    >>> layer_globs(["h.0", "h.1", "h.5"]), layer_globs(["encoder.block"])
    (['h.[0-1]', 'h.5'], ['encoder.block'])
    """
    spans: list[tuple[str, int, int, str]] = []
    globs = []
    for name in names:
        head, number, tail = re.fullmatch(r"(.*?)(\d*)(\D*)", name).groups()  # type: ignore[union-attr]
        if not number:
            globs.append(name)
        elif spans and (spans[-1][0], spans[-1][2] + 1, spans[-1][3]) == (head, int(number), tail):
            spans[-1] = (head, spans[-1][1], int(number), tail)
        else:
            spans.append((head, int(number), int(number), tail))
    return globs + [f"{h}{a}{t}" if a == b else f"{h}[{a}-{b}]{t}" for h, a, b, t in spans]


def plan_specs(model: nn.Module, plan: Plan, device_type: str) -> list[CheckpointSpec]:
    """The regions of `plan` on `model`, which is not changed. A layer that is in several places is one region.

    Raises:
        PlanError: the plan was made for another model.
    """
    plan.check(model)
    plan.say_other_device(device_type)
    modules = dict(bare_modules(model))
    specs: dict[nn.Module, CheckpointSpec] = {}
    for name, policy in plan.policies().items():
        specs.setdefault(modules[name], CheckpointSpec((name,), policy))
    return list(specs.values())


def layer_signature(module: nn.Module) -> str:
    """Class name and a digest of parameter names, whole shapes and dtypes of a layer, sharded or not."""
    kind = next(kind for kind in type(module).__mro__ if not issubclass(kind, FSDPModule))
    shapes = [(name, tuple(p.shape), str(p.dtype)) for name, p in module.named_parameters()]
    return f"{kind.__name__}:{hashlib.sha256(repr(shapes).encode()).hexdigest()[:12]}"


class BudgetError(ValueError):
    """No plan fits the budget. `smallest_bytes` is the least that one does fit."""

    def __init__(self, message: str, smallest_bytes: int) -> None:
        super().__init__(message)
        self.smallest_bytes = smallest_bytes

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.smallest_bytes)  # it travels from rank 0 to the others


# The parts of a rank's memory in a step: by kind, and by the options that would lower them.


class Part(StrEnum):
    """A kind of bytes, as reports print it. To tell another part apart, add it here and to one of the groups below."""

    PARAMETERS = "parameters"
    AVERAGED_WEIGHTS = "averaged weights"
    REMEMBERED_TABLES = "remembered tables"
    OPTIMIZER_STATE = "optimizer state"
    GRADIENTS = "gradients"
    GATHERED_LAYERS = "gathered layers"
    GATHERED_ROOT = "gathered root"
    REDUCE_BUFFERS = "reduce buffers"
    SAVED_ACTIVATIONS = "saved activations"
    RUNNING_LAYER = "running layer"
    OUTSIDE_OF_LAYERS = "outside of layers"
    KEPT_OUTPUT = "kept output"
    OPTIMIZER_STEP = "optimizer step"
    MICROBATCHES_IN_FLIGHT = "micro-batches in flight"
    RECEIVE_BUFFERS = "receive buffers"
    SENT_TENSORS = "sent tensors"


# There before the first step of a loop, or from then on; gradients apart.
STAYING = (Part.PARAMETERS, Part.AVERAGED_WEIGHTS, Part.REMEMBERED_TABLES, Part.OPTIMIZER_STATE)
OF_LAYERS = (Part.SAVED_ACTIVATIONS, Part.RUNNING_LAYER)
OF_HEAD = (Part.OUTSIDE_OF_LAYERS, Part.KEPT_OUTPUT)
STATE, GATHERED = "parameters and optimizer", "gathered layers and their reductions"
ACTIVATIONS, HEAD = "activations", "head"
GROUPS: Mapping[str, tuple[Part, ...]] = {
    STATE: (*STAYING, Part.GRADIENTS, Part.OPTIMIZER_STEP),
    GATHERED: (Part.GATHERED_LAYERS, Part.GATHERED_ROOT, Part.REDUCE_BUFFERS),
    ACTIVATIONS: OF_LAYERS,
    HEAD: OF_HEAD,
    "activations of micro-batches in flight": (Part.MICROBATCHES_IN_FLIGHT,),
    "tensors that stages send and receive": (Part.RECEIVE_BUFFERS, Part.SENT_TENSORS),
}
"""Parts by the options that would lower them."""


def largest_group(parts: Mapping[str, int]) -> str:
    """The key of `GROUPS` whose `parts`, bytes by name, are the most."""
    return max(GROUPS, key=lambda group: sum(parts.get(part, 0) for part in GROUPS[group]))
