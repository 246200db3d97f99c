"""Suite ``scale``: how long `parallelize` takes to set up very large models, on meta with a fake back end."""

from __future__ import annotations

import contextlib
import os
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import Any

from nemo_like.layers import find_layers
from nemo_like.models import PRESETS, resolve_model
from nemo_like.parallelizer import parallelize
from nemo_like.torch_compat import fake_ranks
from tests.tools.benchmarks.suite import MODEL, Column, Measured, Suite

SHAPES = (("llama3-8b", 8), ("llama3-70b", 64), ("llama3-405b", 512))
"""(preset, ranks)."""


def shapes_of(options: Namespace, large: Sequence[tuple[str, int]]) -> Sequence[tuple[str, int]]:
    """The (preset, ranks) of a suite over `large` models; another preset in `options.model` runs alone, on 8 ranks."""
    usual = {name for name, _ in large} | {MODEL}
    return ((options.model, 8),) if options.model in PRESETS and options.model not in usual else large


def _run(options: Namespace) -> Measured:
    """Set up each shape once (or, for another preset in `options.model`, that one with 8 ranks)."""
    rows = [_measure(*shape) for shape in shapes_of(options, SHAPES)]
    return Measured("Set-up time", rows, {"strategy": "fsdp2", "ac": "selective"})


def _measure(name: str, ranks: int) -> dict[str, Any]:
    source = resolve_model(name)
    with fake_process_group(ranks):
        start = time.perf_counter()
        model = source.build(device="meta")
        built = time.perf_counter()
        layers = find_layers(model)
        searched = time.perf_counter()
        parameters = sum(parameter.numel() for parameter in model.parameters())
        begin = time.perf_counter()
        parallelize(model, strategy="fsdp2", ac="selective", device="cpu")
        end = time.perf_counter()
    return {
        "model": name,
        "ranks": ranks,
        "parameters": parameters,
        "layers": len(layers),
        "build_s": built - start,
        "find_s": searched - built,
        "parallelize_s": end - begin,
    }


@contextlib.contextmanager
def fake_process_group(ranks: int) -> Iterator[None]:
    """This process as rank 0 of `ranks`, with a back end that sends nothing.

    Raises:
        RuntimeError: this torch has no fake back end.
    """
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks)}
    before = {key: os.environ.get(key) for key in variables}
    os.environ.update(variables)
    try:
        with fake_ranks(0, ranks):
            yield
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key)
            else:
                os.environ[key] = value


SCALE = Suite(
    help="set-up time of parallelize() for 8B, 70B and 405B shapes, on meta, with a fake process group",
    columns=(
        Column("model", "model"),
        Column("ranks", "ranks"),
        Column("parameters", "parameters", "{:,}".format),
        Column("layers", "layers"),
        Column("build_s", "build on meta s", "{:.2f}".format),
        Column("find_s", "find layers s", "{:.3f}".format),
        Column("parallelize_s", "parallelize s", "{:.2f}".format),
    ),
    run=_run,
)
