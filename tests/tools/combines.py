"""``python -m tests.tools.combines``: write docs/reference/what-combines.md by trying every pair.

Each pair of options is asked of a tiny model: `Job.of` refuses it, or it trains. What requires no other rank trains in this
process, and its gradients are compared with those of no checkpointing; the others run as rank 0 of a job on fake tensors
(`nemo_like.dry_run`).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nemo_like import FSDP2, ContextParallel, Job, OffloadConfig, PipelineParallel, dry_run, parallelize
from tests.models import decoders

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "what-combines.md"
OPTIONS: dict[str, dict[str, Any]] = {
    "`full`": {"ac": "full"},
    "`selective`": {"ac": "selective"},
    "`submodule`": {"ac": "submodule"},
    "`sequential`": {"ac": "sequential"},
    "budget": {"ac": "50%"},
    "`single`": {"strategy": "single"},
    "`ddp`": {"strategy": "ddp"},
    "`dp_replicate`": {"dp_replicate": 2},
    "`cpu_offload`": {"strategy": FSDP2(cpu_offload=True)},
    "`tp`": {"tp": 2},
    "`cp`": {"cp": 2},
    "`cp` ring": {"cp": ContextParallel(2, method="ring")},
    "`cp` Ulysses": {"cp": ContextParallel(2, method="ulysses")},
    "`ep`": {"ep": 2},
    "`pp`": {"pp": PipelineParallel(2)},
    "`compile`": {"compile": "aot_eager"},
    "`offload` boundary": {"offload": OffloadConfig("boundary", min_bytes=1)},
    "`offload` saved": {"offload": OffloadConfig("saved", min_bytes=1)},
    "`loss` chunked": {"loss": "chunked"},
    "`bf16`": {"precision": "bf16"},
    "`fp8`": {"precision": "fp8"},
}
EQUAL, RUNS, REFUSED, TAKEN = "=", "r", "no", "?"
_RANKS = ("dp_replicate", "tp", "cp", "ep", "pp")


def pairs() -> Iterator[tuple[str, str]]:
    """Yield every pair of options that are not two values of one keyword."""
    for one, other in itertools.combinations(OPTIONS, 2):
        if not set(OPTIONS[one]) & set(OPTIONS[other]):
            yield one, other


def asked(one: str, other: str) -> Job:
    """Return the job of two options, on as many ranks as they take.

    Raises:
        ValueError: the two do not go together.
    """
    fields = OPTIONS[one] | OPTIONS[other]
    sizes = [value if isinstance(value, int) else value.size for name in _RANKS if (value := fields.get(name))]
    ranks = math.prod(sizes)
    shared = "strategy" in fields and not isinstance(fields["strategy"], str)
    ranks = max(ranks, 2) if shared or fields.get("strategy") == "ddp" else ranks
    return Job.of(**{"ac": "none", "world_size": ranks, "gpu": "cpu", **fields})


def cell(one: str, other: str) -> tuple[str, str]:
    """Return the mark of a pair, and the message where it is refused."""
    try:
        job = asked(one, other)
    except (ValueError, NotImplementedError) as error:
        return REFUSED, str(error)
    name = "mixtral" if job.ep.size > 1 else "llama"
    try:
        if job.ranks == 1 and job.strategy != "ddp":
            return (EQUAL if _is_equal(job, name) else RUNS), ""
        dry_run(_meta(name), job, _batch())
    except NotImplementedError as error:
        return (TAKEN, "") if "without ranks and memory" in str(error) else (REFUSED, str(error))
    except (ValueError, TypeError) as error:
        return REFUSED, str(error)
    return RUNS, ""


def _meta(name: str) -> nn.Module:
    with torch.device("meta"):
        return decoders.build(name)


def _batch() -> dict[str, torch.Tensor]:
    ids = torch.arange(2 * 16).reshape(2, 16) % 64
    return {"input_ids": ids, "labels": ids.clone()}


def _gradients(name: str, fields: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = parallelize(decoders.build(name).train(), sample_input=_batch(), **fields)
    model(**_batch(), use_cache=False).loss.backward()
    return {key: parameter.grad for key, parameter in model.named_parameters() if parameter.grad is not None}


def _is_equal(job: Job, name: str) -> bool:
    """Whether gradients have the bits of the same job without checkpointing."""
    fields = {key: getattr(job, key) for key in ("strategy", "compile", "offload", "loss", "precision")}
    checkpointed, plain = (
        _gradients(name, fields | {"ac": job.ac}),
        _gradients(name, fields | {"ac": "none", "offload": "none"}),
    )
    values = list(plain.values())
    return len(values) == len(checkpointed) and all(map(torch.equal, checkpointed.values(), values))


def page() -> str:
    """Return the page."""
    marks: dict[tuple[str, str], str] = {}
    reasons: dict[str, list[str]] = {}
    for one, other in pairs():
        mark, reason = cell(one, other)
        marks[one, other] = marks[other, one] = mark
        if reason:
            reasons.setdefault(reason.splitlines()[0], []).append(f"{one} with {other}")
    names = list(OPTIONS)
    rows = []
    for one in names:
        cells = [marks.get((one, other), "") for other in names]
        rows.append(f"| {one} | {' | '.join(cells)} |")
    head = f"| | {' | '.join(names)} |\n|{'---|' * (len(names) + 1)}"
    refused = "\n".join(f"| {'; '.join(where)} | {reason} |" for reason, where in reasons.items())
    return (
        "# What combines with what\n\n"
        "Made by `python -m tests.tools.combines`, not by hand. Every pair is asked of a tiny Llama (of Mixtral with `ep`)\n"
        "on as many ranks as it takes. Where three meet, `parallelize` refuses what does not go together.\n\n"
        f"`{EQUAL}`: trained here, and gradients have the bits of no checkpointing. `{RUNS}`: `parallelize` and two steps\n"
        f"ran as rank 0 of such a job, on fake tensors. `{REFUSED}`: refused, see below. `{TAKEN}`: accepted, not run\n"
        "here, since it takes real ranks. Empty: two values of one option.\n\n"
        f"{head}\n" + "\n".join(rows) + f"\n\n## Refused\n\n| what | message |\n|---|---|\n{refused}\n"
    )


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    with contextlib.suppress(BrokenPipeError):
        PAGE.write_text(page(), encoding="utf-8")
