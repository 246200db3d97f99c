"""Suite ``planning``: CPU seconds of `plan` and `fit`, cold and warm, in pairs with those of another checkout."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from argparse import Namespace
from pathlib import Path

from tests.tools.benchmarks.suite import Column, Measured, Suite

ROOT = Path(__file__).parents[3]
QUESTIONS = {
    "plan, 8B on 8": ("plan --model llama3-8b --gpus 8", "--gpu h200"),
    "fit, 8B on 8": ("fit --model llama3-8b --gpus 8", "--memory 70GiB"),
    "fit, 405B on 16,384": ("fit --model llama3-405b --gpus 16384", "--memory 70GiB"),
    "fit, DeepSeek-V3 on 2,048": ("fit --model deepseek-v3 --gpus 2048", "--memory 70GiB"),
}
"""Questions, and the option of another one about the same model."""


def _run(options: Namespace) -> Measured:
    """Ask each question: of the other checkout, then cold, warm, and with another option warm; and import torch alone."""
    rows = []
    for name, (words, other) in QUESTIONS.items():
        with tempfile.TemporaryDirectory() as folder:
            before = None if options.against is None else cpu_seconds(words, options.against, folder)
            cold, same, warm = (cpu_seconds(asked, ROOT, folder) for asked in (words, words, f"{words} {other}"))
            alone = cpu_seconds("", ROOT, folder)
        rows.append({"name": name, "against": before, "cold": cold, "warm": warm, "same": same, "torch": alone})
    return Measured("CPU seconds of a question", rows, {"gpu": "h100-80gb", "against": options.against})


def cpu_seconds(words: str, tree: str | Path, cache: str) -> float:
    """Return user and system seconds of a process that asks a question; without words, that imports torch."""
    program = ["-m", "nemo_like", *words.split()] if words else ["-c", "import torch"]
    around = os.environ | {"PYTHONPATH": str(tree), "NEMO_LIKE_CACHE": cache, "OMP_NUM_THREADS": "1"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *program], env=around, cwd=cache, capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


PLANNING = Suite(
    help="CPU seconds of plan and fit, cold and warm, and of another checkout (--against)",
    columns=(
        Column("name", "question"),
        Column("against", "before", "{:.1f}".format),
        Column("cold", "cold", "{:.1f}".format),
        Column("warm", "another option, warm", "{:.1f}".format),
        Column("same", "the same, warm", "{:.1f}".format),
        Column("torch", "import torch", "{:.1f}".format),
    ),
    run=_run,
)
