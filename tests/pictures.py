"""Pictures of the documents, drawn from what the package computes. ``python -m tests.pictures [FOLDER]`` writes them.

With a FOLDER, PNGs on white and on dark ground are written there instead, to look at.
"""

from __future__ import annotations

import inspect
import itertools
import re
import sys
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from matplotlib import pyplot, rc_context
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Patch

from nemo_like import parallelizer
from nemo_like.activation_checkpointing.plan import Part
from nemo_like.job import Job
from nemo_like.models import resolve_model
from nemo_like.planning.answers.rank import points_of
from nemo_like.planning.planner import query_of
from nemo_like.planning.predict import text_of
from nemo_like.planning.report import make_report

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
MODEL, BATCH, TOKENS = "llama-tiny", 4, 512
"""The job of docs/start/quickstart.md."""
GREY, BLUE, ORANGE, GREEN, RED, VIOLET = "#808080", "#3b82c4", "#e0862f", "#4c9f70", "#cf5c5c", "#8f72bd"
"""Colours that are seen on white and on a dark ground."""
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "nemo_like",
    "font.family": "sans-serif",
    "font.size": 9,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), GREY),
}
MIB = 2**20


def memory_of_a_step() -> Any:
    """Draw the planner's bytes over a step, stacked by part, for three modes and a budget."""
    model, _ = resolve_model(MODEL).built("meta", torch.float32)
    query = query_of(model, text_of(model, BATCH, TOKENS), Job.of(gpu="cpu"))
    rows = {row.ac: row for row in make_report(query, ["50%"]).rows}
    groups = {
        "parameters, optimizer state": (GREY, (Part.PARAMETERS, Part.OPTIMIZER_STATE, Part.OPTIMIZER_STEP)),
        "gradients": (VIOLET, (Part.GRADIENTS,)),
        "saved activations": (BLUE, (Part.SAVED_ACTIVATIONS,)),
        "the running layer": (ORANGE, (Part.RUNNING_LAYER,)),
        "embedding, head, logits, loss": (GREEN, (Part.OUTSIDE_OF_LAYERS, Part.KEPT_OUTPUT)),
    }
    figure, every = pyplot.subplots(2, 2, figsize=(8.5, 5.4), sharex=True, sharey=True)
    for axes, ac in zip(every.flat, ("none", "selective", "50%", "full")):
        points = points_of(query, 0, rows[ac].choices)
        if unknown := {name for point in points for name, size in point.parts.items() if size} - {
            part for _, parts in groups.values() for part in parts
        }:
            raise ValueError(f"The picture has no colour for {unknown}.")
        edges = list(range(len(points) + 1))
        bottom = [0.0] * len(points)
        for color, parts in groups.values():
            top = [low + sum(p.parts.get(part, 0) for part in parts) / MIB for low, p in zip(bottom, points)]
            axes.fill_between(edges, [*bottom, bottom[-1]], [*top, top[-1]], step="post", color=color, linewidth=0)
            bottom = top
        peak = max(range(len(points)), key=lambda number: points[number].total)
        axes.axhline(bottom[peak], color=RED, linewidth=0.8, linestyle="--")
        place = {"x": 0.2, "ha": "left"}
        axes.text(**place, y=bottom[peak] + 2, s=f"peak {bottom[peak]:.0f} MiB: {points[peak].where}", color=RED)
        axes.set_title(f'ac="{ac}"', fontsize=10, family="monospace")
        begin = 0
        for phase, of_phase in itertools.groupby(points, key=lambda point: point.phase):
            end = begin + len(list(of_phase))
            if begin:
                axes.axvline(begin, color=GREY, linewidth=0.6, linestyle=":")
            if axes in every[1]:
                middle, word = (begin + end) / 2, "step" if phase == "optimizer" else phase
                axes.text(middle, -4, word, ha="center", va="top")
            begin = end
        axes.set_xlim(0, len(points))
        axes.set_ylim(0, 125)
        axes.set_xticks([])
        axes.spines[["top", "right"]].set_visible(False)
    for axes in every[:, 0]:
        axes.set_ylabel("MiB alive")
    figure.legend(
        handles=[Patch(color=color, label=name) for name, (color, _) in groups.items()],
        loc="lower center",
        ncols=3,
        frameon=False,
    )
    figure.tight_layout(rect=(0, 0.1, 1, 1))
    return figure


LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Of a Llama's layer, in the order in which they run."""


def _box(axes: Any, x: float, y: float, width: float, height: float, color: str, title: str, text: str = "") -> None:
    style = "round,pad=0,rounding_size=0.08"
    lines = {"facecolor": "none", "edgecolor": color, "linewidth": 1.3}
    axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=style, **lines))
    middle = y + height / 2
    if text:
        axes.text(x + 0.12, middle + 0.15, title, va="center", family="monospace", color=color, fontsize=8.5)
        axes.text(x + 0.12, middle - 0.15, text, va="center", fontsize=8)
    else:
        axes.text(x + width / 2, middle, title, ha="center", va="center", family="monospace", color=color, fontsize=8.5)


def _arrow(axes: Any, begin: tuple[float, float], end: tuple[float, float], **options: Any) -> None:
    options = {"color": GREY, "linewidth": 1.1} | options
    axes.add_patch(FancyArrowPatch(begin, end, arrowstyle="-|>", mutation_scale=9, shrinkA=0, shrinkB=0, **options))


CHECKS = {
    "Job.of": "read what was asked, as one value",
    "check_agreement": "compare it between the ranks",
    "_on_ranks": "find the mesh and the sizes of its axes",
    "cut_into_stages": "pp: cut; each stage goes on from here",
    "layers_for": "find the layers",
    "check_": "head, float8, ep, tp, cp: what cannot be split",
    "try_split": "tp, cp: run a copy on fake tensors",
    "check_sharding": "fsdp2: the weights, the mesh",
    "resolve": "a mode or a budget becomes regions",
    "check_specs": "the regions can be put in",
}
CHANGES = {
    "start_from_the_same_weights": "as on rank 0",
    "keep_documents_apart": "packed rows",
    "float8_linears": "precision=",
    "apply_tensor_parallel": "tp",
    "apply_context_parallel": "cp",
    "split_experts": "ep",
    "apply_specs": "ac=, offload=: wrappers around layers",
    "chunk_model_loss": "loss=",
    "compile_layers": "compile=: inside of the wrappers",
    "_shard": "fsdp2: each layer, then the rest; else _replicate",
    "_watch_planned": "compare the first step with the plan",
}


def order_of_parallelize() -> Any:
    """Draw the steps of `parallelize` in two columns. They are compared with the source."""
    for steps, functions in (
        (CHECKS, (parallelizer.parallelize, parallelizer._check)),
        (CHANGES, (parallelizer._make_ready,)),
    ):
        source = "".join(inspect.getsource(function).split('"""')[-1] for function in functions)
        places = [source.find("check_float8(" if name == "check_" else f"{name}(") for name in steps]
        if places != sorted(places) or places[0] < 0:
            raise ValueError(f"parallelizer.py has another order: {dict(zip(steps, places))}")
    figure, axes = pyplot.subplots(figsize=(8.5, 7.4))
    height, gap, width = 0.62, 0.2, 4.6
    columns = ((0.0, BLUE, "nothing is changed", CHECKS), (5.6, ORANGE, "the model is changed", CHANGES))
    for x, color, title, steps in columns:
        axes.text(x + width / 2, 0.3, title, ha="center", color=color, fontsize=10)
        for number, (name, text) in enumerate(steps.items()):
            y = -(number + 1) * (height + gap)
            shown = "check_..." if name == "check_" else name
            _box(axes, x, y + gap, width, height, color, shown, text)
            if number:
                _arrow(axes, (x + width / 2, y + height + 2 * gap), (x + width / 2, y + height + gap))
    bottom = -len(CHECKS) * (height + gap) + gap + height / 2
    top = -gap - height / 2 + 0.09
    axes.plot([width, 5.1, 5.1], [bottom, bottom, top], color=GREY, linewidth=1.1)
    _arrow(axes, (5.1, top), (5.6, top))
    axes.set_xlim(-0.1, 10.3)
    axes.set_ylim(-len(CHANGES) * (height + gap) - 0.1, 0.6)
    axes.axis("off")
    figure.tight_layout(pad=0.3)
    return figure


BANDS: Mapping[str, tuple[str, ...]] = {
    "programs": ("__main__", "cli", "commands", "settings", "bench", "recipes", "integrations"),
    "execution": ("fake_rank", "parallelizer", "pipelined", "legacy", "resolve"),
    "prediction": ("planning", "profiling"),
    "ranks": ("distributed",),
    "the model": ("flags", "fake", "compile", "precision", "models", "layers"),
    "memory, loss": ("offload", "losses"),
    "job, regions": ("job", "activation_checkpointing", "options"),
    "tools": ("_util", "torch_compat", "transformers_compat"),
}
"""The layers of the import contract, top to bottom."""


def folders() -> Any:
    """Draw the folders in the order of the import contract of pyproject.toml, with which `BANDS` is compared."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contract = settings["tool"]["importlinter"]["contracts"][0]
    order = [name.strip() for line in contract["layers"] for name in line.split("|")]
    names = dict.fromkeys(name.split(".")[1] for name in order)
    drawn = [name for band in BANDS.values() for name in band]
    if sorted(drawn) != sorted(names) or [name for name in drawn if name not in BANDS["tools"]] != [
        name for name in names if name not in BANDS["tools"]
    ]:
        raise ValueError(f"pyproject.toml has another order: {list(names)}")
    figure, axes = pyplot.subplots(figsize=(8.5, 5.8))
    colors = itertools.cycle((BLUE, ORANGE, GREEN, VIOLET))
    left, right, height, step = 1.7, 10.6, 0.6, 1.05
    for number, (band, boxes) in enumerate(BANDS.items()):
        y, color = -number * step, next(colors)
        axes.text(0, y + height / 2, band, va="center", fontsize=9, color=color)
        shown = [box for box in boxes if box != "__main__"]
        lengths = [0.5 + 0.125 * len(name) for name in shown]
        x = left
        for name, length in zip(shown, lengths):
            _box(axes, x, y, length, height, color, name)
            x += length + 0.2
        if number:
            _arrow(axes, (left + 0.35, y + step), (left + 0.35, y + height))
        if band == "execution":
            note = "only a budget goes down to planning"
        else:
            note = "an arrow: imports; any folder below is allowed" if number == 0 else ""
        axes.text(left + 3.0, y - 0.225, note, va="center", fontsize=8)
    axes.set_xlim(-0.1, right)
    axes.set_ylim(-(len(BANDS) - 1) * step - 0.1, height + 0.1)
    axes.axis("off")
    figure.tight_layout(pad=0.3)
    return figure


PICTURES: Mapping[str, Callable[[], Any]] = {
    "start/memory-of-a-step.svg": memory_of_a_step,
    "reference/how-it-works/order-of-parallelize.svg": order_of_parallelize,
    "folders.svg": folders,
}


def write(look: Path | None = None) -> None:
    """Write every picture to docs/, or as PNGs to `look`."""
    with rc_context(STYLE):
        for name, draw in PICTURES.items():
            figure = draw()
            if look is None:
                figure.savefig(DOCS / name, transparent=True, metadata={"Date": None, "Creator": None})
                text = (DOCS / name).read_text(encoding="utf-8")
                text = re.sub(r"\d+\.\d{3,}", lambda number: f"{float(number[0]):.1f}", text)
                lines = [line.rstrip() for line in text.splitlines()]
                (DOCS / name).write_text("\n".join([*lines, ""]), encoding="utf-8")
            else:
                for ground in ("#ffffff", "#0d1117"):
                    for axes in figure.axes:
                        axes.set_facecolor("none")
                    figure.savefig(look / f"{Path(name).stem}{ground[1:]}.png", facecolor=ground, dpi=100)
            pyplot.close(figure)


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
