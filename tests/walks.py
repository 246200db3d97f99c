"""The walk of an option through the package: which calls are open when the values that it turns into are made."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from nemo_like import (
    CheckpointConfig,
    CheckpointWrapper,
    ChunkedLoss,
    ContextParallel,
    MemoryBudget,
    PipelineParallel,
    parallelize,
)
from nemo_like.activation_checkpointing import CheckpointSpec
from nemo_like.activation_checkpointing.plan import Plan
from nemo_like.distributed.context.parts import Parts
from nemo_like.distributed.pipeline import Pipeline
from nemo_like.distributed.pipeline.stage import Stage
from nemo_like.losses.model_loss import LossHooks
from nemo_like.pipelined import CutModel, CutStage

ROOT = Path(__file__).resolve().parent.parent

Walk = list[tuple[str, str]]
"""Calls, each as its function and its file."""

VALUES: dict[str, tuple[type, ...]] = {
    'ac="selective"': (CheckpointConfig, CheckpointSpec, CheckpointWrapper),
    'ac="50%"': (MemoryBudget, Plan, CheckpointSpec, CheckpointWrapper),
    'loss="chunked"': (ChunkedLoss, LossHooks),
    "cp=2": (ContextParallel, Parts),
    "pp=2": (PipelineParallel, CutModel, CutStage, Stage, Pipeline),
}
"""What each option turns into, in this order."""


def walk(model: nn.Module, option: str, **asked: Any) -> Walk:
    """The calls of the package that are open when the values of `option` are made; the making itself is not counted."""
    open_calls: dict[type, Walk] = {}

    def recording(made: type, make: Callable[..., None]) -> Callable[..., None]:
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            codes = [frame.f_code for frame, _ in traceback.walk_stack(sys._getframe(1))][::-1]
            calls = [
                (code.co_name, str(Path(code.co_filename).relative_to(ROOT)))
                for code in codes
                if code.co_filename.startswith(str(ROOT / "nemo_like"))
                and code.co_name[:2] not in ("__", "<l", "<g", "<d")
            ]
            asked_for = ("of", "nemo_like/job.py") in calls
            if made is not values[0] or (asked_for and made not in open_calls):  # what was asked, and no copy of it
                open_calls[made] = calls
            make(self, *args, **kwargs)

        return init

    values = VALUES[option]
    with pytest.MonkeyPatch.context() as patch:
        for made in values:
            patch.setattr(made, "__init__", recording(made, made.__init__))
        parallelize(model, **eval(f"dict({option})"), **asked)
    return list(dict.fromkeys(call for made in values for call in open_calls[made]))


def written(option: str) -> Walk:
    """The walk of `option` as docs/reference/how-it-works/design.md has it."""
    page = (ROOT / "docs" / "reference" / "how-it-works" / "design.md").read_text(encoding="utf-8")
    section = page.partition(f"### `{option}`\n")[2].partition("\n#")[0]
    return re.findall(r"^\| `(\w+)` \| `([\w/.]+)` \|", section, re.MULTILINE)


def check(found: Walk, option: str) -> None:
    """The walk is the written one, and short: at most eight calls through five files, those of a planner and its plan not
    counted."""
    assert found == written(option), found
    plans = ("nemo_like/planning/", "nemo_like/activation_checkpointing/plan.py")
    outside: Sequence[tuple[str, str]] = [call for call in found if not call[1].startswith(plans)]
    assert len(outside) <= 8 and len({file for _, file in outside}) <= 5, found
