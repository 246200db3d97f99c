"""Modes side by side on one model: step time, bytes, FLOPs, gradients.

On a CPU both sides of offloading are main memory. The copying back end copies as a GPU's would, so the bytes are those of a
GPU. The device's share is PyTorch's memory: copies are in Python's. Step times show the cost of the copies, without overlap.
"""

import copy
import datetime
import json
import platform
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from nemo_like._util.forwards import Forward
from nemo_like._util.table import ByteUnit, Column, Fact, Table, paragraph, percent, three_digits
from nemo_like.distributed.launch import world_size
from nemo_like.layers import find_layers
from nemo_like.offload.offloader import offloader_of
from nemo_like.parallelizer import parallelize
from nemo_like.profiling.measured_step import (
    clock_for,
    compare_gradients,
    gradients_of,
    measure_bytes,
    measure_flops,
    measure_seconds,
    spread,
)

# Errors that a mode may raise on a model or machine that is not for it.
_ERRORS = (ValueError, TypeError, RuntimeError, ImportError, AttributeError, NotImplementedError)

_MATMULS = {torch.ops.aten.mm.default, torch.ops.aten.linear.default}
_SAVED = {
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten.max.default,
}


def _every_second_matmul() -> Any:
    """Return PyTorch's selective contexts with the rule of torchtitan and NeMo Automodel: every second mm is dropped."""
    counts = Counter[bool]()

    def policy(context: Any, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        counts[context.is_recompute] += op in _MATMULS
        is_saved = op in _SAVED or (op in _MATMULS and counts[context.is_recompute] % 2 == 1)
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


# PyTorch's own checkpointing, by name: keywords of `torch.utils.checkpoint.checkpoint`.
TORCH: Mapping[str, dict[str, Any]] = {"torch-full": {}, "torch-selective": {"context_fn": _every_second_matmul}}


class TorchCheckpoint(Forward):
    """PyTorch's `checkpoint` of a layer, as its own recipes put it there."""

    word = "torch's checkpoint"

    def __init__(self, module: nn.Module, **settings: Any) -> None:
        super().__init__(module)
        self._settings = settings

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self.call, *args, use_reentrant=False, **self._settings, **kwargs)


def keywords_of(mode: str) -> dict[str, Any]:
    """Return the keywords of `parallelize` that a mode means.

    >>> keywords_of("selective+offload=saved"), keywords_of("torch-full")
    ({'ac': 'selective', 'offload': 'saved'}, {'ac': 'none'})
    """
    ac, *more = mode.split("+")
    return {"ac": "none" if ac in TORCH else ac, **dict(pair.partition("=")[::2] for pair in more)}


def in_mode(model: nn.Module, mode: str, sample: object, strategy: str = "single") -> Any:
    """Return `model`, changed in place, in the mode: a word of ``ac=`` or of `TORCH`, with ``+keyword=word`` behind it."""
    torchs = TORCH.get(mode.partition("+")[0])
    if torchs is not None:
        for layer in find_layers(model):
            TorchCheckpoint(layer.module, **torchs).put()
    place = next(model.parameters()).device
    return parallelize(model, strategy, sample_input=sample, device=place, **keywords_of(mode))


_NOTE = (
    "peak: bytes beyond parameters, gradients and inputs, by the device's allocator, on a CPU by the storages that "
    "operators make; saved: of them, between forward and backward. step / none: median over turns; the modes take turns. "
    "recompute: FLOPs, as a share of a forward. moved: to CPU memory in a step. gradients: against those of none. "
    "torch: PyTorch's own checkpoint."
)


@dataclass(frozen=True)
class Comparison:
    """A model in several modes."""

    about: dict[str, Any]  # Conditions of the measurement: model, sizes, device, versions.
    # For each mode its values by name, such as ``peak_bytes`` or ``step_ms``.
    rows: list[dict[str, Any]]
    notes: list[str]  # Modes that could not run, with the reason.

    def text(self, width: int | None = None) -> str:
        """Return the table and its conditions for a screen of `width` columns (None: as wide as it gets)."""
        unit = ByteUnit.for_sizes(row["peak_bytes"] for row in self.rows if "peak_bytes" in row)
        lines = (
            (
                Fact("", row["mode"], Column("mode", left=True, least=28)),
                Fact("", row["ratio"], Column("step / none"), "{:.2f}".format),
                Fact("", row["step_ms"], Column("step ms", keep=2), three_digits),
                Fact("", row["spread"], Column("spread", keep=5), percent),
                Fact("", row.get("peak_bytes"), Column(f"peak {unit.name}"), unit.number),
                Fact("", row.get("saved_bytes"), Column(f"saved {unit.name}"), unit.number),
                Fact("", row.get("moved_bytes"), Column(f"moved {unit.name}", keep=4), unit.number),
                Fact("", row.get("recompute"), Column("recompute", keep=1), percent),
                Fact("", row["gradients"], Column("gradients", keep=3)),
            )
            for row in self.rows
        )
        about = ", ".join(f"{key}: {value}" for key, value in self.about.items())
        first, table = paragraph(f"Measured: {about}.", width), Table.of(lines).with_note(width=width)
        return "\n".join([first, "", table, *(paragraph(note, width) for note in (*self.notes, _NOTE))])

    def to_json(self) -> str:
        """Return everything, values unrounded."""
        return json.dumps(asdict(self), indent=2, default=str)


def compare(
    model: nn.Module,
    sample: object,
    modes: Iterable[str],
    device: torch.device,
    strategy: str = "single",
    runs: int = 3,
) -> Comparison:
    """Measure a training step of `model`, which stays as it is, in ``none`` and the `modes`; they take turns.

    A mode that cannot run here has its reason in `Comparison.notes` instead of a row.
    """
    rows, models, notes = list[dict[str, Any]](), list[nn.Module](), list[str]()
    wanted = dict[str, torch.Tensor]()
    # On one device the modes share their parameters, so that large models fit.
    shared = {id(parameter): parameter for parameter in model.parameters()} if strategy == "single" else {}
    for mode in dict.fromkeys(["none", *modes]):
        try:
            prepared = in_mode(copy.deepcopy(model, dict(shared)), mode, sample, strategy)
            gradients = gradients_of(prepared, sample)
            wanted = wanted or {name: gradient.clone() for name, gradient in gradients.items()}
            row: dict[str, Any] = {"mode": mode, "gradients": compare_gradients(wanted, gradients)}
            if offloader := offloader_of(prepared):
                row["moved_bytes"] = offloader.stats.moved_bytes
            is_eager = "compile" not in keywords_of(mode)  # a compiled graph is one operator to the counters
            if is_eager or device.type != "cpu":
                row["saved_bytes"], row["peak_bytes"] = measure_bytes(prepared, sample, device)
            if is_eager:
                row["forward_flops"], row["flops"] = measure_flops(prepared, sample)
        except _ERRORS as error:
            if mode == "none":
                raise  # there is nothing to compare with
            notes.append(f"{mode}: not run: {(str(error).strip() or type(error).__name__).splitlines()[0][:200]}")
            continue
        rows.append(row)
        models.append(prepared)
    times = [[measure_seconds(each, sample, device) for each in models] for _ in range(runs)]
    plain = rows[0]
    for row, taken in zip(rows, zip(*times)):
        row["step_ms"], row["spread"] = 1000 * statistics.median(taken), spread(taken)
        row["ratio"] = statistics.median(mine / turn[0] for mine, turn in zip(taken, times))
        if "flops" in row:
            row["recompute"] = (row["flops"] - plain["flops"]) / (plain["forward_flops"] or 1)
    clock = "CPU time" if clock_for(device) is time.process_time else "wall time"
    about = {"strategy": strategy, "ranks": world_size(), "runs": runs, "clock": clock}
    return Comparison(about | surroundings(device), rows, notes)


def surroundings(device: torch.device) -> dict[str, Any]:
    """Return the facts that a number depends on besides the code: device, versions, threads, date."""
    is_cpu = device.type == "cpu"
    return {
        "device": platform.machine() if is_cpu else torch.get_device_module(device).get_device_name(device),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "date": datetime.date.today().isoformat(),
    }
