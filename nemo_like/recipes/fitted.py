"""``--fit``: the options that are the fastest by prediction under the job's batch, chosen once at the start.

Rank 0 decides and the others receive it. What was chosen is stored next to the checkpoints, so that a resumed run has
the same, unless it was started with other ranks, sizes or pins.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from nemo_like._util.console import as_flag
from nemo_like._util.json_file import write_json
from nemo_like._util.log import say_once
from nemo_like._util.words import write_bytes
from nemo_like.activation_checkpointing.plan import FORMAT, Plan, layer_signature
from nemo_like.distributed.launch import local_world_size
from nemo_like.flags import RESHARD, reshard_word
from nemo_like.options import FSDP2, MemoryBudget, normalise, parse_ac, parse_bytes
from nemo_like.planning.devices import Device, device_at_hand
from nemo_like.planning.fit import Candidate, FitReport, fit
from nemo_like.recipes.agree import Ranks
from nemo_like.recipes.options import RunOptions

FILE = "fit.json"
"""In the folder of checkpoints."""
_AXES = ("tp", "cp", "ep")


@dataclass(frozen=True)
class Fitted:
    """The choice of ``--fit``."""

    asked: Mapping[str, Any]
    """Values that the choice depends on: a resumed run with the same keeps what was chosen."""
    options: Mapping[str, Any]
    """Values of options by name."""
    plan: Mapping[str, Any] | None
    """Plan as `Plan.as_json` of what each layer keeps, where ``ac`` is a budget."""
    predicted: Mapping[str, Any]
    """``peak_bytes`` of a rank and the ``limit_bytes`` for it, ``reserved_bytes`` or None, ``step_seconds``,
    ``tokens_per_second_per_gpu``, ``mfu``, ``rows`` and ``width`` of the largest micro-batch, whose ``rates``, and
    ``host_bytes`` that a rank has in host memory."""
    kept: bool = False
    """Read from an earlier run's file."""

    @property
    def planned(self) -> Plan | None:
        return None if self.plan is None else Plan.from_json(self.plan)

    def words(self) -> str:
        """For people, in one line."""
        figures = self.predicted
        chosen = " ".join(as_flag(name, value) for name, value in self.options.items())
        return (
            f"--fit {'keeps' if self.kept else 'chose'} {chosen or 'nothing'}: predicted peak "
            f"{write_bytes(figures['peak_bytes'])} of {write_bytes(figures['limit_bytes'])} on each rank, for micro-batches "
            f"of up to {figures['rows']} x {figures['width']} tokens; {figures['tokens_per_second_per_gpu']:,.0f} tokens/s "
            f"per rank by the rates of {figures['rates']}"
        )

    def save(self, folder: Path) -> None:
        """Write it next to the checkpoints in `folder`: a reader finds the old file or the whole new one."""
        body = {name: value for name, value in vars(self).items() if name != "kept"}
        write_json(folder / FILE, {"format": FORMAT} | body)

    @classmethod
    def load(cls, text: str) -> Fitted | None:
        """Return what `save` wrote; None where that cannot be read any more."""
        try:
            body = json.loads(text)
            body["predicted"]["host_bytes"]  # what else is read may be anything
            return cls(**{k: v for k, v in body.items() if k != "format"}) if body["format"] == FORMAT else None
        except (ValueError, KeyError, TypeError):
            return None


def choose(options: RunOptions, ranks: Ranks, model: nn.Module, width: int) -> tuple[RunOptions, Ranks, Fitted]:
    """The options with what ``--fit`` chose, and the ranks that these make of the job. A collective.

    Args:
        options: with `RunOptions.free` not empty.
        ranks: which have joined.
        model: bare, on any device; not changed.
        width: tokens of the longest row.

    Raises:
        ValueError: nothing fits, or nothing can be run so; the message has what needs least and what would help.
    """
    device = replace(device_at_hand(ranks.device.type), gpus_per_host=local_world_size())
    _check_state_on_host(options, ranks, device)
    question = _asked(options, ranks, model, width, device)
    host = _host_memory(options, ranks)
    fitted = _kept(options, ranks, question, host)
    if fitted is None:
        best, report = best_of(options, ranks, model, width, device, host)
        fitted = _fitted(options, question, best, report, device)
    changed = replace(options, **fitted.options)
    axes = changed.axes
    return changed, replace(ranks, tp=axes.get("tp", 1), cp=axes.get("cp", 1), pp=axes.get("pp", 1)), fitted


def _check_state_on_host(options: RunOptions, ranks: Ranks, device: Device) -> None:
    """Raise ValueError where ``--cpu-offload`` is given and cannot be, or what it takes cannot be told."""
    if not options.cpu_offload or "cpu_offload" in options.free:
        return
    if ranks.world_size == 1:
        raise ValueError(
            "--cpu-offload with --fit, and one rank was started, which keeps the model whole: what is sharded alone can "
            "be in host memory. Start more ranks, or leave --cpu-offload out."
        )
    if not device.knows_host_rates:
        raise ValueError(
            "--cpu-offload with --fit: the optimizer then runs in host memory, and the bandwidth of that next to "
            f"{device.name} is not known, so nothing can be predicted. Leave one of the two out."
        )


def _host_memory(options: RunOptions, ranks: Ranks) -> int:
    """Bytes of host memory that each rank may take: as given, else those of the rank that has least. A collective."""
    if options.fit_host_memory is not None:
        return parse_bytes(options.fit_host_memory)
    return -ranks.largest(-host_bytes())


def _asked(options: RunOptions, ranks: Ranks, model: nn.Module, width: int, device: Device) -> dict[str, Any]:
    fixed = {name: getattr(options, name) for name in options.searched if name not in options.free}
    return {
        "free": list(options.free),
        "fixed": fixed,
        "memory": options.fit_memory,
        "host_memory": options.fit_host_memory,
        "ranks": ranks.world_size,
        "pp": ranks.pp,
        "batch_size": options.batch_size,
        "width": width,
        "precision": options.precision,
        "compile": options.compile,
        "device": device.name,
        "model": layer_signature(model),
    }


def _kept(options: RunOptions, ranks: Ranks, question: Mapping[str, Any], host: int) -> Fitted | None:
    """Return what an earlier run of a job that is resumed chose, where ranks that have `host` bytes of host memory can
    run it."""
    if options.resume == "no" or options.checkpoint_dir is None:
        return None
    path = Path(options.checkpoint_dir) / FILE
    with ranks.together(f"reading {path}"):
        text = path.read_text(encoding="utf-8") if ranks.rank == 0 and path.exists() else ""
    kept = Fitted.load(ranks.text_from_first(text))
    if kept is None:
        return None
    other = {name: value for name, value in question.items() if kept.asked.get(name) != value}
    if other:
        changes = ", ".join(f"{name} {kept.asked.get(name)!r} -> {value!r}" for name, value in other.items())
        say_once(f"--fit chooses anew, since the run that is resumed had other conditions: {changes}.")
        return None
    if (there := kept.predicted["host_bytes"]) > host:
        say_once(
            f"--fit chooses anew: what the run that is resumed chose takes {write_bytes(there)} of host memory on each "
            f"rank, and there are {write_bytes(host)}."
        )
        return None
    return replace(kept, kept=True)


def best_of(
    options: RunOptions, ranks: Ranks, model: nn.Module, width: int, device: Device, host: int
) -> tuple[Candidate, FitReport]:
    """Return the fastest of what `options` leave free, and the search's report; the arguments are those of `choose`.

    Args:
        device: what to predict for.
        host: bytes of host memory that each rank may take.

    Raises:
        ValueError: nothing fits.
    """
    pins, memory = _pins(options, ranks)
    fitting, problems = list[FitReport](), list[str]()
    for loss in ("model", "chunked") if "loss" in options.free else (options.loss,):
        try:
            options.check_model_loss(model, loss)
        except ValueError:
            if "loss" not in options.free:
                raise
            continue  # this model has no such loss
        one_pass = replace(options, loss=loss, grad_accum=1, sync="auto")
        input_of, job = partial(one_pass.planned_input, width=width), one_pass.job()
        try:
            report = fit(
                model,
                gpus=ranks.world_size,
                gpu=device,
                seq_len=width,
                global_batch=options.batch_size,
                memory=memory,
                host_memory=host,
                precision=job.precision,
                step=replace(job.step, sync=options.job().step.sync),
                optimizer=job.step.optimizer,
                compile="none",  # as given or not, both are decided: nothing is advised
                count=1,
                loss=loss,
                sample=input_of,
                **pins,
            )
        except ValueError as error:  # no layout at all with this loss
            problems.append(str(error))
            continue
        if report.candidates:
            fitting.append(report)
        else:
            problems.append(report.problem)
    if not fitting:
        raise ValueError(f"--fit: {' '.join(dict.fromkeys(problems))}")
    report = min(fitting, key=lambda report: report.best.step_seconds)
    return report.best, report


def _pins(options: RunOptions, ranks: Ranks) -> tuple[dict[str, Any], int | str | None]:
    """Return what is decided, by the names of `fit`, and the memory that a step may take."""
    pins: dict[str, Any] = {name: getattr(options, name, 1) for name in _AXES if name not in options.free}
    memory: int | str | None = options.fit_memory
    pins["pp"] = ranks.pp
    if (parallel := getattr(options, "sequence_parallel", None)) is not None:
        pins["sequence_parallel"] = parallel
    if ranks.pp > 1 and "pp_schedule" not in options.free:
        pins["schedule"] = getattr(options, "pp_schedule")  # noqa: B009 - only jobs with pipelines have it
    for name in ("dp_replicate", "grad_accum", "offload", "reshard_after_forward", "cpu_offload"):
        if name not in options.free:
            value = getattr(options, name)
            pins[name] = RESHARD[value] if name == "reshard_after_forward" else value
    if "ac" not in options.free:
        budget = parse_ac(options.ac)
        pins["ac"] = "plan" if isinstance(budget, MemoryBudget) else normalise(options.ac)
        if isinstance(budget, MemoryBudget) and budget.peak_bytes is not None:
            memory = budget.peak_bytes
    return pins, memory


def _fitted(
    options: RunOptions, question: Mapping[str, Any], best: Candidate, report: FitReport, device: Device
) -> Fitted:
    layout, job = best.layout, best.job
    sharded = job.strategy if isinstance(job.strategy, FSDP2) else FSDP2()
    values = {
        "dp_replicate": layout.dp_replicate,
        "grad_accum": layout.grad_accum,
        "ac": best.ac,
        "loss": "model" if job.loss is None else "chunked",
        "offload": job.offload.mode,
        "reshard_after_forward": reshard_word(sharded.reshard_after_forward),
        "cpu_offload": sharded.cpu_offload,
        "tp": layout.tp,
        "cp": layout.cp,
        "ep": layout.ep,
        "pp_schedule": layout.schedule,
    }
    chosen = {name: values[name] for name in options.searched if name in options.free and values[name] is not None}
    return Fitted(
        question,
        chosen,
        None if best.plan is None else best.plan.as_json(),
        {
            "peak_bytes": best.peak_bytes,
            "limit_bytes": report.question.limit_of(best.job),
            "reserved_bytes": best.reserved,
            "step_seconds": best.step_seconds,
            "tokens_per_second_per_gpu": best.tokens_per_second_per_gpu,
            "mfu": best.mfu,
            "rows": layout.micro_batch,
            "width": report.question.seq_len,
            "rates": device.rates,
            "host_bytes": best.host_bytes,
        },
    )


# How much host memory a rank may take.

_LEFT = 10
"""One part in so many is left to everything else on the host."""


def host_bytes(groups: Path = Path("/sys/fs/cgroup"), process: Path = Path("/proc/self/cgroup")) -> int:
    """Bytes of host memory for each rank of this host: an equal share of nine tenths of what the host has, or of what the
    control groups of this process may have (containers, Slurm), if that is less.

    groups, own: where Linux shows control groups, and which of them this process is in; files that are not there bound
    nothing.
    """
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    size = min([size, *_limits(groups, process)])
    return size * (_LEFT - 1) // _LEFT // local_world_size()


def _limits(groups: Path, process: Path) -> list[int]:
    """Return the limits of the process's group and of those above it, of both versions of control groups."""
    limits = []
    for line in _text(process).splitlines():
        _, kinds, path = line.split(":", 2)
        if kinds not in ("", "memory") and "memory" not in kinds.split(","):
            continue
        top, name = (groups / "memory", "memory.limit_in_bytes") if kinds else (groups, "memory.max")
        inner = Path(path.lstrip("/"))
        limits += [_text(top / folder / name).strip() for folder in (inner, *inner.parents)]
    return [int(limit) for limit in limits if limit.isdigit()]  # "max": as much as there is


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
