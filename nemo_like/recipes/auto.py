"""The planner in a training job: ``--fit``, which chooses options at the start, and advice where memory runs out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nemo_like._util.console import as_flag
from nemo_like._util.host_memory import host_bytes
from nemo_like._util.json_file import write_json
from nemo_like._util.log import say_once
from nemo_like._util.words import write_bytes
from nemo_like.activation_checkpointing.plan import FORMAT, Plan, layer_signature
from nemo_like.distributed.launch import local_world_size
from nemo_like.distributed.ranks import Ranks
from nemo_like.models import ModelSource
from nemo_like.options import ADAMW, parse_ac, parse_bytes
from nemo_like.options.parallel import reshard_word
from nemo_like.planning.advise import flag_changes, saving, smaller_budget, where_memory_runs_out
from nemo_like.planning.devices import Device, device_at_hand
from nemo_like.planning.fit import FitReport, fit
from nemo_like.planning.planner import lower_peaks, peak_under
from nemo_like.planning.query import PlanQuery
from nemo_like.planning.sharding import same_on_all_ranks
from nemo_like.recipes.options import PretrainOptions

FILE = "fit.json"  # in the folder of checkpoints
_CONDITIONS = ("seq_len", "fit_memory", "fit_host_memory", "global_batch", "precision", "compile")
_FIGURES = ("peak_bytes", "host_bytes", "step_seconds", "tokens_per_second_per_gpu", "mfu")


def _flags(values: Mapping[str, Any]) -> str:
    return " ".join(as_flag(name, value) for name, value in values.items())


@dataclass(frozen=True)
class Fitted:
    """The choice of ``--fit``, in JSON values."""

    conditions: Mapping[str, Any]  # what the choice depends on: a resumed run with the same keeps it
    options: Mapping[str, Any]  # by name
    plan: Mapping[str, Any] | None  # of what each layer keeps, where `ac` is a budget
    predicted: Mapping[str, Any]
    kept: bool = False  # read from an earlier run's file

    @property
    def planned(self) -> Plan | None:
        return None if self.plan is None else Plan.from_json(self.plan)

    def words(self) -> str:
        """Describe it for people, in one line."""
        words: dict[str, Any] = {"verb": "keeps" if self.kept else "chose", "flags": _flags(self.options) or "nothing"}
        words |= {name: write_bytes(n) if name.endswith("bytes") else n for name, n in self.predicted.items()}
        return (
            "--fit {verb} {flags}: predicted peak {peak_bytes} of {limit_bytes} on each rank, for micro-batches of up to "
            "{rows} x {width} tokens; {tokens_per_second_per_gpu:,.0f} tokens/s per rank by the rates of {rates}"
        ).format(**words)

    def save(self, folder: Path) -> None:
        write_json(folder / FILE, vars(self))


def choose(options: PretrainOptions, ranks: Ranks, model: nn.Module) -> tuple[PretrainOptions, Ranks, Fitted]:
    """Return the options with what ``--fit`` chose, and the ranks as these divide them.

    A collective: all ranks decide by the device and the file of rank 0, and by the least CPU memory of any. Raises
    ValueError where nothing fits, or nothing can be run so, with what needs least and what would help.
    """
    device = same_on_all_ranks(lambda: replace(device_at_hand(ranks.device.type), gpus_per_host=local_world_size()))
    host_limit, free = options.fit_host_memory, options.free
    host = -ranks.largest(-host_bytes(local_world_size())) if host_limit is None else parse_bytes(host_limit)
    named = (*(name for name in options.searched if name not in free), *_CONDITIONS)
    conditions = {name: getattr(options, name) for name in named} | {"free": list(free), "ranks": ranks.world_size}
    conditions |= {"pp": ranks.pp, "device": device.name, "model": layer_signature(model), "format": FORMAT}
    fitted = same_on_all_ranks(lambda: _kept(options, conditions, host))
    if fitted is None:
        report = best_of(options, ranks, model, device, host)
        best, layout = report.best, report.best.layout
        values = vars(layout) | {"ac": best.ac, "pp_schedule": layout.schedule}
        values["reshard_after_forward"] = reshard_word(layout.reshard_after_forward)
        chosen = {name: values[name] for name in options.searched if name in free and values[name] is not None}
        figures = {name: getattr(best, name) for name in _FIGURES} | {
            "rows": layout.micro_batch,
            "width": options.seq_len,
        }
        figures |= {"limit_bytes": report.question.limit_of(best.job), "rates": device.rates}
        fitted = Fitted(conditions, chosen, None if best.plan is None else best.plan.as_json(), figures)
    options = replace(options, **fitted.options)
    return options, replace(ranks, tp=options.tp, cp=options.cp, pp=options.pp), fitted


def _kept(options: PretrainOptions, conditions: Mapping[str, Any], host: int) -> Fitted | None:
    """Return the choice of a run that is resumed, if it was made for the same and takes no more than `host` bytes there."""
    path = Path(options.checkpoint_dir or "") / FILE
    if options.resume == "no" or not path.exists():
        return None
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        before, there = body["conditions"], body["predicted"]["host_bytes"]
        other = [
            f"{name} {before.get(name)!r} -> {now!r}" for name, now in conditions.items() if before.get(name) != now
        ]
        other += [f"CPU memory of a rank {write_bytes(there)} -> {write_bytes(host)}"] * (there > host)
        if not other:
            return Fitted(**body | {"kept": True})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        other = [f"{path} cannot be read ({error!r})"]
    say_once(f"--fit chooses again, since the run that is resumed had other conditions: {', '.join(other)}.")
    return None


def best_of(options: PretrainOptions, ranks: Ranks, model: nn.Module, device: Device, host: int) -> FitReport:
    """Search what `options` leave free, for a `device` and `host` bytes of CPU memory; ValueError: nothing fits."""
    pins: dict[str, Any] = {name: getattr(options, name) for name in options.searched if name not in options.free}
    schedule, pins["memory"] = pins.pop("pp_schedule", None), options.fit_memory
    if "ac" in pins:
        budget = parse_ac(options.ac)
        pins["ac"] = getattr(budget, "mode", "plan")
        pins["memory"] = getattr(budget, "peak_bytes", None) or options.fit_memory
    job, problems, reports = options.job(), list[str](), list[FitReport]()
    pins |= {"schedule": schedule if ranks.pp > 1 else None, "pp": ranks.pp, "precision": job.precision, "gpu": device}
    pins |= {"sequence_parallel": options.sequence_parallel, "compile": "none", "host_memory": host}
    for loss in ("model", "chunked") if "loss" in options.free else (options.loss,):
        try:
            options.check_model_loss(model, loss)
            one_pass = replace(options, loss=loss, grad_accum=1, sync="auto")
            pins |= {"step": replace(one_pass.job().step, sync=job.step.sync), "loss": loss, "seq_len": options.seq_len}
            pins |= {"sample": one_pass.planned_input, "global_batch": options.global_batch}
            reports.append(fit(model, gpus=ranks.world_size, count=1, **pins))
        except ValueError as error:  # the model has no such loss, or no layout can be run with it
            problems.append(str(error))
    fitting = [report for report in reports if report.candidates]
    if not fitting:
        raise ValueError(f"--fit: {' '.join(dict.fromkeys(problems + [report.problem for report in reports]))}")
    return min(fitting, key=lambda report: report.best.step_seconds)


class MemoryRanOutError(RuntimeError):
    """A step does not fit; the message has what would lower its peak."""


def advice_on_memory(step: PlannedStep) -> AbstractContextManager[None]:
    """Raise `MemoryRanOutError` with what to change in `step`, where memory runs out inside."""

    def told(error: RuntimeError, ways: list[str]) -> MemoryRanOutError:
        reason = str(error).strip().splitlines()[0]
        return MemoryRanOutError(f"Memory ran out: {reason} What lowers the peak: {'; '.join(ways)}.")

    otherwise = "no plan can be made of this model ({}); try --ac full and a larger --grad-accum"
    return where_memory_runs_out(step.ways_out, otherwise, told)


@dataclass
class PlannedStep:
    """A step of a job, as the planner sees it under any of its options."""

    source: ModelSource
    options: PretrainOptions
    ranks: Ranks
    device: Device | None = None  # default: the one that `ranks` train on

    def query(self, options: PretrainOptions) -> PlanQuery:
        """Return the question of what a rank needs."""
        if self.ranks.pp > 1:
            raise ValueError("peaks of a pipeline's stages are what nemo-like plan --pp predicts")
        device = self.device or device_at_hand(self.ranks.device.type)
        sample = options.planned_input(options.rows(self.ranks.data_ranks))
        return PlanQuery.from_model(
            self.source.build("meta", torch.float32), sample, options.job(world_size=self.ranks.world_size, gpu=device)
        )

    def ways_out(self) -> list[str]:
        """Return the changes of options that lower the peak of a rank, the largest first; then all of them together."""
        options, query, ranks = self.options, self.query(self.options), self.ranks
        job, now, double = query.job, peak_under(query).total, 2 * options.grad_accum
        changes: list[tuple[str, Any]] = [("ac", smaller_budget(job.ac, query.device)), ("ac", "full")]
        changes += [("precision", "bfloat16"), ("strategy", "fsdp2")]
        changes += [("grad_accum", double)] * (options.global_batch % (double * ranks.data_ranks) == 0)
        tried = [{name: value} for name, value in changes if value not in (None, getattr(options, name))]
        others = flag_changes(job, vars(options).keys() - {"ac"})
        tried += [values for values, _ in others if values.get("optimizer", ADAMW[0]) in ADAMW]
        lowered = lower_peaks(now, ((values, self.query(replace(options, **values))) for values in tried))
        ways = [saving(_flags(values), saved) for values, saved in lowered]
        both = {name: value for values, _ in reversed(lowered) for name, value in values.items()}  # the best last
        if len(both) > 1:
            peak = write_bytes(peak_under(self.query(replace(options, **both))).total)
            ways.append(f"a peak of {peak} in place of {write_bytes(now)} with {_flags(both)}")
        return ways or ["a smaller --seq-len, or more ranks to shard over"]
