"""``nemo-like plan``: will it fit, and which checkpointing is the fastest that does? No GPU, no weights."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nemo_like._util.console import refuse_unread
from nemo_like._util.table import paragraph, screen_width
from nemo_like._util.words import GIB
from nemo_like.commands import MODEL, NO_CACHE, WIDE, print_report, settings_options, step_options
from nemo_like.commands.settings_options import write_to
from nemo_like.commands.step_options import asked_job, check_step_options, traced_step
from nemo_like.flags import BATCH_SIZE, SEQ_LEN
from nemo_like.options import MemoryBudget, parse_ac, parse_bytes

if TYPE_CHECKING:  # the command imports torch and the planner only when it runs
    import torch

    from nemo_like.job import Job
    from nemo_like.models import ModelSource
    from nemo_like.planning.model.inputs import ModelInput
    from nemo_like.planning.query import PlanQuery

EXAMPLES = (
    "--model llama3-8b --gpus 64 --seq-len 8192 --gpu h100-80gb",
    "--model llama3-8b --gpus min --seq-len 8192",
    "--model llama3-8b --gpus 8 --ac 40GiB --ac 50% --save plan.json",
    "--model llama3-70b --gpus 64 --pp 4 --tp 4 --grad-accum 8",
    "--model llama3-8b --gpus 512 --tp 8 --check",
)


OPTIONS: dict[str, dict[str, Any]] = {
    **step_options.OPTIONS,
    "--model": {**MODEL, "required": True},
    "--ac": {
        "group": "memory",
        "action": "append",
        "default": [],
        "help": "also plan for this: 40GiB (peak), 50%% (activations), or lists of names as JSON; repeatable",
    },
    "--memory": {
        "help": "bytes that a step may take (default: all but 5 %% and the memory outside of torch's allocator)"
    },
    "--calibrate-from": {
        "metavar": "LOG",
        "help": "first correct the rates of --gpu by a measured run of this very job: 1.83s, 6120tok/s (of one GPU), or a "
        "log of nemo-like, torchtitan, KempnerForge, nanotron or litgpt",
    },
    "--ran-with": {"metavar": "AC", "help": "checkpointing of that run: none, selective, full or a budget"},
    "--gpu-file": {"metavar": "PATH", "help": "write the corrected GPU here, for --gpu (default: measured.json)"},
    "--explain": {
        "action": "store_true",
        "help": "also print the parts of the peak, and the meaning of the columns",
    },
    "--no-what-if": {"dest": "what_if", "action": "store_false", "help": "plan for no change of the job"},
    "--wide": WIDE,
    "--no-cache": NO_CACHE,
    "--check": {
        "action": "store_true",
        "help": "also run the job on rank 0, without memory and without the other ranks, by the operators of --gpu, and "
        "compare its peak with the plan's",
    },
    **settings_options.OPTIONS,
    "--json": {"metavar": "PATH", "help": "write the numbers here ('-': standard output)"},
    "--save": {"metavar": "PATH", "help": "write the recommended plan here (read it with nemo_like.Plan.load)"},
}


def first_line(args: argparse.Namespace) -> str:
    """Return the line that is printed before torch is imported."""
    gpus = "the fewest" if args.world_size == "min" else f"{args.world_size} x"
    return f"{args.from_words}Planning {args.model} on {gpus} {args.gpu} ..."


def run(args: argparse.Namespace) -> int:
    """Trace, choose, predict, report. Returns 0; 1 where nothing fits."""
    from nemo_like.models import resolve_model
    from nemo_like.planning.predict import searched_size
    from nemo_like.planning.trace.store import keeping

    search = searched_size(gpus=args.world_size, seq_len=args.seq_len, batch_size=args.batch_size)
    limit = None if args.memory is None else parse_bytes(args.memory, "--memory")
    _check(args)
    source = resolve_model(args.model)
    with keeping(args.cache, source.config, args.dtype, args.lora, args.four_bit):
        return _answer(args, source, search, limit)


def _answer(args: argparse.Namespace, source: ModelSource, search: str, limit: int | None) -> int:
    from nemo_like.models import most_positions
    from nemo_like.planning.devices import device_of
    from nemo_like.planning.predict import answered
    from nemo_like.planning.report import WhatIf, what_if

    args = _with_a_start(args, search, most_positions(source.config))
    job = asked_job(args)
    if args.check:
        from nemo_like.fake_rank import refuse_dry_run

        refuse_dry_run(job)
    if job.offloads_state:
        device_of(job).check_host_rates("--cpu-offload")
    start = time.perf_counter()
    query, step, inputs = traced_step(args, source, job)
    if args.calibrate_from is not None:
        if search:
            raise ValueError("--calibrate-from is of a job that ran, and min or max searches for one. Give numbers.")
        return _answer(_calibrated(args, query), source, search, limit)
    step, query, report = answered(step, search, args.model, args.ac, limit, query)
    say = args.json != "-"
    width = None if args.wide else screen_width()
    if say:
        print(report.text(width, args.explain), flush=True)
        print(_left_out(query, inputs, width), end="", flush=True)
    changes, interrupted = list[WhatIf](), False
    try:
        for change in what_if(step, query, report) if args.what_if else ():
            changes.append(change)
    except KeyboardInterrupt:
        interrupted = True
    report = replace(report, what_if=tuple(changes))
    if say and changes:
        print(f"\n{report.changes_text(width)}", flush=True)
    if say and report.best is None:
        print(f"\n{paragraph(WAYS_OUT, width)}")
    ac = "full" if report.best is None else report.best.ac
    check = _check_rank(args, step.job, step.model, step.input[0], ac) if args.check else None
    head = {
        "model": args.model,
        "input": step.input[1],
        "not_run": query.idle_layers() or None,
        "not_made_up": inputs.missing or None,
        "rates": query.device.rates,
        "check": check,
    }
    print_report(
        args,
        f"\nPlanned in {time.perf_counter() - start:.1f} s.",
        lambda: json.dumps(head | report.to_dict(), indent=1),
    )
    if report.best is not None:
        if args.save:
            report.best.plan.save(args.save)
        write_to(args, step.job, ac=report.best.ac, seq_len=step.seq_len, batch_size=step.batch)
    for reason in report.unmet:
        print(f"nemo-like plan: {reason}", file=sys.stderr)
    if interrupted:
        raise KeyboardInterrupt  # the rows found by then are printed and written
    return 0 if report.best is not None and not report.unmet else 1


def _calibrated(args: argparse.Namespace, query: PlanQuery) -> argparse.Namespace:
    """Write a file of the GPU by ``--calibrate-from``, print that, and return the arguments that plan with it."""
    from nemo_like.planning.calibration import fitted_factor, read_speed, write_gpu
    from nemo_like.planning.model.traced import MODES
    from nemo_like.planning.predict import tokens_of
    from nemo_like.planning.predictions.budget_search import choose

    ac, path = args.ran_with, args.gpu_file or "measured.json"
    seconds = read_speed(args.calibrate_from).seconds(tokens_of(query.traced.sample), query)
    choices = query.uniform(ac) if ac in MODES else choose(query, MemoryBudget.parse(ac, "--ran-with"))
    factor = fitted_factor(query, choices, seconds)
    words = f"a step of {args.model} took {seconds:.4g} s ({args.calibrate_from}): kernels at {factor:.2f} of the rates"
    write_gpu(args.gpu, factor, words, path)
    print(f"{words[0].upper()}{words[1:]} of {args.gpu}. From now on: --gpu {path}\n", flush=True)
    return argparse.Namespace(
        **(vars(args) | {"gpu": path, "calibrate_from": None, "ran_with": None, "gpu_file": None})
    )


WAYS_OUT = (
    "Ways out: more ranks to shard over (--gpus min finds how many), a smaller --batch-size, --loss chunked, "
    "--optimizer adamw-8bit, --tp, --cp or --pp."
)


def _with_a_start(args: argparse.Namespace, search: str, positions: int | None) -> argparse.Namespace:
    """Return `args` with the number where the search begins in place of ``min`` or ``max``.

    positions: the most tokens that the model takes; None: its config does not state it.
    """
    from nemo_like.planning.report import gpu_unit

    starts = {
        "gpus": ("world_size", gpu_unit(args.tp, args.cp, args.ep, args.pp, args.dp_replicate)),
        "seq_len": ("seq_len", min(SEQ_LEN, positions or SEQ_LEN)),
        "batch_size": ("batch_size", BATCH_SIZE),
    }
    return argparse.Namespace(**(vars(args) | dict([starts[search]] if search else [])))


def _left_out(query: PlanQuery, inputs: ModelInput, width: int | None) -> str:
    """Return the paragraph on layers that the input does not run; empty: all run."""
    if not (query.idle_layers() or inputs.missing):
        return ""
    why = f" {inputs.missing[0].upper()}{inputs.missing[1:]}." if inputs.missing else ""
    words = (
        f"Left out: {query.idle_layers() or 'no layer'}. {inputs.words} do not run them, so nothing counts them.{why} "
        "To plan them, give a --model module:function that returns (model, sample)."
    )
    return f"\n{paragraph(words, width)}\n"


def _check_rank(args: argparse.Namespace, job: Job, model: torch.nn.Module, sample: object, ac: str) -> dict[str, Any]:
    """Run `job` on rank 0 and print how far the plan is off; returned in JSON values."""
    from nemo_like.fake_rank import dry_run

    start = time.perf_counter()
    checked = dry_run(model, job.change(ac=ac), sample)
    seconds = time.perf_counter() - start
    off = None if checked.against is None else checked.against - checked.peak_bytes
    if args.json != "-":
        print(
            f"\nRank 0 of {job.ranks} with ac={ac!r}, run without memory in {seconds:.1f} s, peaks at "
            f"{checked.peak_bytes:,} bytes\n({checked.peak_bytes / GIB:.3f} GiB): {checked.at}."
        )
        if checked.against is None or off is None:
            print("No plan is made of that, so nothing is compared.")
        else:
            print(f"The plan has {checked.against:,} bytes: {off:+,}, {off / checked.peak_bytes:+.3%}.")
    return {
        "ac": ac,
        "rank": 0,
        "seconds": seconds,
        "peak_bytes": checked.peak_bytes,
        "at": checked.at,
        "parts": checked.parts,
        "planned_bytes": checked.against,
        "difference_bytes": off,
        "difference": None if off is None else off / checked.peak_bytes,
    }


def _check(args: argparse.Namespace) -> None:
    """Raise for errors that would only show after planning: budgets, and options that nothing reads."""
    for ac in args.ac:
        try:
            parse_ac(ac)
        except (ValueError, TypeError) as error:
            raise ValueError(f"--{error}") from None  # which begins with "ac"
    if args.calibrate_from is None:
        refuse_unread(args, ["ran_with", "gpu_file"], "that takes --calibrate-from.")
    elif args.ran_with is None:
        raise ValueError(
            "--calibrate-from is of a job that ran: give its checkpointing, --ran-with none, selective, full."
        )
    check_step_options(args)
