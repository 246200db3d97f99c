"""``python -m tests.tools.combines``: write docs/reference/what-combines.md by trying every pair.

Each pair of options is asked of a tiny model, with ``ac="selective"`` where neither of the two is a mode: `Job.of` refuses
it, or it trains. Pairs that require no other rank train in this process, and their gradients are compared with those of
no checkpointing. The others run as rank 0 of a job on fake tensors (`nemo_like.dry_run`), and pairs it does not take
train on gloo ranks (`--ranks`).
"""

from __future__ import annotations

import itertools
import logging
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from nemo_like import FSDP2, ContextParallel, Job, OffloadConfig, PipelineParallel, dry_run, parallelize
from tests.models import decoders
from tests_distributed.context.cut_models import without_dropout
from tests_distributed.spawn import run_ranks

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
EQUAL, RUNS, REFUSED, TAKEN, FAILS = "=", "r", "no", "?", "fails"
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
    return Job.of(**{"ac": "selective", "world_size": ranks, "gpu": "cpu", **fields})


def cell(one: str, other: str, ranks: bool = False) -> tuple[str, str]:
    """Return the mark of a pair, and the message where it is refused; `ranks`: start them where it takes real ones."""
    try:
        job = asked(one, other)
    except (ValueError, NotImplementedError) as error:
        return REFUSED, str(error)
    name = "mixtral" if job.ep.size > 1 else "llama"
    try:
        if job.ranks == 1 and job.strategy != "ddp":
            return (EQUAL if _is_equal(job, name) else RUNS), ""
        with torch.device("meta"):
            model = _model(name, {"cp": job.cp, "compile": job.compile})
        dry_run(model, job, _batch())
    except NotImplementedError as error:
        if "without ranks and memory" not in str(error):
            return REFUSED, str(error)
        return on_ranks(one, other, job, name) if ranks else (TAKEN, "")
    except (ValueError, TypeError) as error:
        return REFUSED, str(error)
    return RUNS, ""


def on_ranks(one: str, other: str, job: Job, name: str) -> tuple[str, str]:
    """Return the mark of a pair that trains on gloo ranks, and the message of the rank that failed first."""
    fields = {"ac": "selective", **OPTIONS[one], **OPTIONS[other]}
    try:
        equal = run_ranks(job.ranks, _trained, name, fields)
    except (ValueError, TypeError, NotImplementedError) as error:
        return REFUSED, str(error)
    except Exception as error:  # noqa: BLE001  # a fault: the page has to show it
        return FAILS, f"{type(error).__name__}: {error}"
    return (EQUAL if all(equal) else RUNS), ""


def _trained(rank: int, world_size: int, name: str, fields: Mapping[str, Any]) -> bool:
    return _same(name, fields, "pp" in fields)


def _model(name: str, fields: Mapping[str, Any]) -> nn.Module:
    """Return the model; without dropout for ring, which has none, and where ranks are compared with the plain model."""
    model = decoders.build(name)
    return without_dropout(model) if getattr(fields.get("cp"), "method", None) == "ring" or fields.get("compile") else model


def _batch() -> dict[str, torch.Tensor]:
    ids = torch.arange(2 * 16).reshape(2, 16) % 64
    return {"input_ids": ids, "labels": ids.clone()}


def _gradients(model: nn.Module, fields: Mapping[str, Any], staged: bool = False) -> dict[str, torch.Tensor]:
    torch.compiler.reset()  # after some models of one class Dynamo compiles no more of them, and eager ones round otherwise
    torch.manual_seed(0)
    batch = _batch()
    model = parallelize(model, sample_input=batch, **fields)
    if staged:
        model.step(**{key: value.repeat(fields["pp"].microbatches, 1) for key, value in batch.items()})
    else:
        model(**batch, use_cache=False).loss.backward()
    gradients = {key: parameter.grad for key, parameter in model.named_parameters() if parameter.grad is not None}
    return {key.removeprefix("module."): gradient for key, gradient in gradients.items()}  # of DDP


def _same(name: str, fields: Mapping[str, Any], staged: bool = False) -> bool:
    """Whether gradients have the bits of the same job without checkpointing.

    Raises:
        RuntimeError: layers are compiled, and a gradient is more than 1e-5 from that of the plain model, which one process
            trains without any option but the precision.
    """
    checkpointed = _gradients(_model(name, fields), fields, staged)
    if fields.get("compile") and fields.get("precision") is None:
        wanted = _gradients(_model(name, fields), {"strategy": "single", "ac": "none"})
        if not staged and wanted.keys() != checkpointed.keys():  # a rank of a pipeline has those of its stages
            raise RuntimeError(f"gradients that only one has: {sorted(wanted.keys() ^ checkpointed.keys())}")
        for key, gradient in checkpointed.items():
            error = (_whole(gradient) - wanted[key]).norm() / wanted[key].norm()
            if not error < 1e-5:
                raise RuntimeError(f"the gradient of {key} is {float(error):.2g} from that of the plain model")
    plain = _gradients(_model(name, fields), {**fields, "ac": "none", "offload": "none"}, staged)
    return checkpointed.keys() == plain.keys() and all(
        torch.equal(_local(checkpointed[key]), _local(plain[key])) for key in plain
    )


def _whole(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def _local(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _is_equal(job: Job, name: str) -> bool:
    return _same(
        name, {key: getattr(job, key) for key in ("strategy", "ac", "compile", "offload", "loss", "precision")}
    )


def page(ranks: bool = False) -> str:
    """Return the page; `ranks`: pairs that take real ranks are run on them, else keep the marks of the page."""
    marks: dict[tuple[str, str], str] = {}
    reasons: dict[str, list[str]] = {}
    before = written()
    for one, other in pairs():
        mark, reason = cell(one, other, ranks)
        print(mark, one, other, reason[:200].replace("\n", " "), flush=True)
        mark = before.get((one, other), mark) if mark == TAKEN else mark
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
        "Made by `python -m tests.tools.combines --ranks`, not by hand. Every pair is asked of a tiny Llama (of Mixtral "
        "with\n"
        '`ep`) on as many ranks as it takes, with `ac="selective"` where neither of the two is a mode. Where three meet,\n'
        "`parallelize` refuses options that exclude each other.\n\n"
        f"- `{EQUAL}`: trained here, in one process or on gloo ranks; gradients have the bits of no checkpointing.\n"
        f"- `{RUNS}`: it ran as rank 0 of such a job, on fake tensors, or trained with gradients of other bits. With\n"
        "  `compile` each gradient is within 1e-5 of the original model's, without dropout.\n"
        f"- `{REFUSED}`: refused, see below. `{FAILS}`: an error that is a fault. Empty: two values of one option.\n\n"
        f"{head}\n" + "\n".join(rows) + f"\n\n## Refused\n\n| options | message |\n|---|---|\n{refused}\n"
    )


def written() -> dict[tuple[str, str], str]:
    """Return the marks that the page has."""
    table = PAGE.read_text(encoding="utf-8").split("## Refused")[0]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("|")]
    names = cells[0][1:]
    return {(row[0], name): mark for row in cells[2:] for name, mark in zip(names, row[1:], strict=True) if mark}


def write() -> None:
    """Write the page; with ``--ranks``, pairs that take real ranks are run."""
    logging.disable(logging.WARNING)
    PAGE.write_text(page(ranks="--ranks" in sys.argv), encoding="utf-8")


if __name__ == "__main__":
    from tests.tools import combines  # ranks find functions again by the name of their module

    combines.write()
