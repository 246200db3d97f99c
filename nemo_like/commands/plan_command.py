"""``nemo-like plan``: will it fit, and which checkpointing is the fastest that does? No GPU, no weights."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nemo_like._util.console import check_picture, check_writable, refuse_unread
from nemo_like.flags import FLAGS, add_flags, flags_on, job_of
from nemo_like.job import Job
from nemo_like.models import resolve_model
from nemo_like.options import FLOAT8, MemoryBudget, parse_bytes, parse_dtype

if TYPE_CHECKING:  # the command imports the planner only when it runs
    from nemo_like.planning.model_inputs import ModelInput
    from nemo_like.planning.pipeline_report import PipelineReport
    from nemo_like.planning.plan_report import PlanReport
    from nemo_like.planning.planner import Planner
    from nemo_like.planning.stages import PipelinePlanner

HELP = "predict the peak memory of a training step and find the fastest plan that fits, without a GPU"
EXAMPLES = (
    "--model llama3-8b --world-size 64 --seq-len 8192 --gpu h100-80gb",
    "--model llama3-8b --world-size 8 --budget 40GiB --budget 50% --save plan.json",
    "--model llama3-70b --world-size 64 --pp 4 --tp 4 --grad-accum 8",
    "--model llama3-8b --world-size 512 --tp 8 --check",
)
JOB_FLAGS = flags_on("plan")
_NOT_IN_STAGES = ("host", "measure", "sync", "drop_output", "cpu_offload")
"""Flags that no plan of a pipeline's stages knows."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add = parser.add_argument
    add("--model", required=True, help="a preset (llama3-8b, ...), a config.json, or module:function")
    add_flags(parser, JOB_FLAGS, precision="bf16")
    add("--seq-len", type=int, default=4096, help="tokens per sequence (default: %(default)s)")
    add("--batch-size", type=int, default=1, help="sequences per rank and micro-batch (default: %(default)s)")
    add("--input-shape", help="shape of a float input, such as 2,3,224,224, for a model that takes no tokens")
    add(
        "--images",
        type=int,
        default=1,
        help="pictures per sequence, for a model that takes some (default: %(default)s)",
    )
    add("--image-size", type=int, help="pixels per side of a picture (default: the config's, or 448)")
    add(
        "--audio-seconds",
        type=float,
        help="of a sound per sequence, for a model that takes some (default: what its config "
        "has positions for, or 30); 0: none",
    )
    add("--vocab-size", type=int, help="for a module:function that takes token ids and states no vocab_size")
    add("--dtype", default="fp32", help="parameters as stored (default: %(default)s)")
    add(
        "--lora",
        type=int,
        metavar="RANK",
        help="adapters of this rank train, all else is frozen, in the dtype of --precision (peft)",
    )
    add("--four-bit", action="store_true", help="frozen linear layers in 4 bits with their scales, as QLoRA has them")
    add(
        "--budget",
        action="append",
        default=[],
        help="also plan for this: 40GiB (peak) or 50%% (activations); repeatable",
    )
    add("--memory", help="what a step may take; default: the GPU's memory less a tenth")
    add("--no-search", action="store_true", help="do not look for the largest micro-batch and the least number of GPUs")
    add(
        "--check",
        action="store_true",
        help="also run the job on rank 0, without memory and without the other ranks, and "
        "compare its peak with the plan's; by a CPU's rules (gloo's copies, the CPU's attention), whatever --gpu is, and so "
        "is the plan that it is compared with",
    )
    add("--json", metavar="PATH", help="write the numbers here ('-': standard output)")
    add("--plot", metavar="PATH", help="write a picture here: memory against step time")
    add("--save", metavar="PATH", help="write the recommended plan here (read it with nemo_like.Plan.load)")


def run(args: argparse.Namespace) -> int:
    """Trace, choose, predict, report. Returns 0; 1 where nothing fits."""
    from nemo_like.commands import plan_inputs
    from nemo_like.planning.devices import device_of
    from nemo_like.planning.planner import Planner
    from nemo_like.planning.stages import PipelinePlanner

    _check(args)
    job = asked_job(args)
    if args.check:
        from nemo_like.fake_rank import refuse_dry_run

        refuse_dry_run(job)
    if job.fsdp is not None and job.fsdp.cpu_offload:
        device_of(job).check_host_rates("--cpu-offload")
    start = time.perf_counter()
    with _progress(f"Planning {args.model} ..."):
        source = resolve_model(args.model)
        model, source = source.built("meta", parse_dtype("--dtype", args.dtype))
        model = _frozen(model, args, job)

        limit = parse_bytes(args.memory, "--memory") if args.memory else None
        if job.pp.size > 1:
            (staged, sample), given = plan_inputs.planner_with_inputs(
                lambda sample: (PipelinePlanner(model, sample, job), sample), model, source, args
            )
            return _report_stages(args, staged, given, limit, start, model, sample)

        def plan_with(sample: object, job: Job = job) -> Planner:
            return Planner(model, sample, job)

        (planner, sample), given = plan_inputs.planner_with_inputs(
            lambda sample: (plan_with(sample), sample), model, source, args
        )
        ids = given.tensors.get("input_ids", given.tensors.get("labels"))
        # What a smaller number of ranks would hold is not looked for where they share sequences.
        alone = args.no_search or job.cp.size > 1
        reach = None if alone else plan_inputs.reach(plan_with, planner, model, source, args)
        tokens = None if ids is None else ids.numel()
        return _report(args, planner, given, limit, start, model, reach, tokens, sample)


def asked_job(args: argparse.Namespace) -> Job:
    """Return the job that the flags ask about.

    Raises:
        ValueError: a wrong value, or a flag that a pipeline's plans do not know.
    """
    for name in ("seq_len", "batch_size"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be >= 1.")
    said = {name: getattr(args, name) for name in JOB_FLAGS}
    if args.pp > 1:
        for name in _NOT_IN_STAGES:
            if said[name] != FLAGS[name].default:
                raise ValueError(f"{FLAGS[name].word} with --pp is not planned. Leave one of the two out.")
    stored, compute = parse_dtype("--dtype", args.dtype), said["precision"]
    if compute not in FLOAT8 and parse_dtype("--precision", compute) == stored:
        said["precision"] = None  # a dtype that the parameters have anyway is no cast
    return job_of(said, ac="none")


def _report(
    args: argparse.Namespace,
    planner: Planner,
    given: ModelInput,
    limit: int | None,
    start: float,
    model: torch.nn.Module,
    reach: Any,
    tokens: int | None,
    sample: object,
) -> int:
    from nemo_like.planning import plan_report

    result = plan_report.make_report(planner, args.budget, limit, reach=reach, tokens=tokens)
    if args.json != "-":
        _say(args, planner, result, time.perf_counter() - start, model, given)
    best = result.best
    check = _check_rank(args, planner.job, model, sample, None if best is None else best.name) if args.check else None
    head = {
        "model": args.model,
        "input": given.words,
        "not_run": planner.idle_layers() or None,
        "not_made_up": given.missing or None,
        "rates": planner.device.rates,
        "check": check,
    }
    _write_json(args.json, head | plan_report.as_json(result))
    if args.plot:
        plan_report.plot(planner, result, args.plot)
    if args.save and result.best is not None:
        result.best.plan.save(args.save)
    for reason in result.unmet:
        print(f"nemo-like plan: {reason}", file=sys.stderr)
    return 0 if result.best is not None and not result.unmet else 1


def _check_rank(
    args: argparse.Namespace, job: Job, model: torch.nn.Module, sample: object, ac: str | None
) -> dict[str, Any]:
    """Run `job` on rank 0 and say how far the plan is off; returned in JSON values. `ac`: None: nothing fits."""
    from nemo_like.fake_rank import dry_run

    ac = ac or "full"
    start = time.perf_counter()
    found = dry_run(model, job.change(ac=ac), sample)
    seconds, off = time.perf_counter() - start, None if found.against is None else found.against - found.peak_bytes
    if args.json != "-":
        print(
            f"\nRank 0 of {job.ranks} with ac={ac!r}, run without memory by a CPU's rules in {seconds:.1f} s, peaks at "
            f"{found.peak_bytes:,} bytes\n({found.peak_bytes / 2**30:.3f} GiB): {found.at}."
        )
        if found.against is None or off is None:
            print("No plan is made of that, so nothing is compared.")
        else:
            print(
                f"The plan by the same rules says {found.against:,} bytes: {off:+,} bytes, {off / found.peak_bytes:+.3%}."
            )
    return {
        "ac": ac,
        "rank": 0,
        "seconds": seconds,
        "peak_bytes": found.peak_bytes,
        "at": found.at,
        "parts": found.parts,
        "planned_bytes": found.against,
        "difference_bytes": off,
        "difference": None if off is None else off / found.peak_bytes,
    }


def _write_json(path: str | None, body: dict[str, Any]) -> None:
    if path is None:
        return
    text = json.dumps(body, indent=1) + "\n"
    if path == "-":
        sys.stdout.write(text)
    else:
        Path(path).write_text(text, encoding="utf-8")


def _say(
    args: argparse.Namespace,
    planner: Planner,
    result: PlanReport,
    seconds: float,
    model: torch.nn.Module,
    given: ModelInput,
) -> None:
    from nemo_like.planning import plan_advice, plan_report

    size = sum(p.numel() for p in model.parameters())
    count = planner.job.step.microbatches
    microbatches = f"{count} micro-batches of " if count > 1 else ""
    print(
        f"{args.model}: {size / 1e9:.2f} B parameters, {len(planner.traced.calls)} layers of {len(planner.problems)} "
        f"kind(s), {microbatches}{given.words} per rank on {args.world_size} x {planner.device.name}, "
        f"{planner.job.step.optimizer}; a step may take {result.limit / 2**30:.2f} GiB. Seconds go by the "
        f"rates of {planner.device.rates}.\n"
    )
    if planner.not_run or given.missing:
        why = f" {given.missing[0].upper()}{given.missing[1:]}." if given.missing else ""
        print(
            f"Left out: {planner.idle_layers() or 'no layer'}. {given.words} do not run them, and the peaks below are those "
            f"of a step without.{why} For what the command cannot make up: plan_for(model, ac=..., sample_input=...).\n"
        )
    print(plan_report.table(result))
    print(
        "\nheld, host, peak: GiB per rank. replay: share of a forward. step: layers alone, 1 = no checkpointing. ms: of a "
        "step, tokens/s: of one GPU;\nboth predicted, by the roofline of this GPU's sourced rates, for the operators that "
        f"run on {planner.device.kind}, with the collectives that nothing hides.\n"
    )
    if any(row.plan.reserved_bytes is not None for row in result.rows):
        print(
            "reserved: GiB per rank that CUDA's caching allocator takes for these tensors and for cuBLAS, by a model of it "
            "that was not compared\nwith a GPU; it decides what fits.\n"
        )
    if result.best is not None:
        print(
            f"Peak of ac={result.best.name!r}, {result.best.plan.peak_at}:\n{plan_report.breakdown(result.best.plan)}\n"
        )
    print(plan_advice.advice(result, "batch"))
    print(f"\nPlanned in {seconds:.1f} s.")


def _check(args: argparse.Namespace) -> None:
    """Raise for what would only be found after planning: files, sizes, and options that nothing reads."""
    check_writable("--json", args.json)
    check_writable("--save", args.save)
    check_picture("--plot", args.plot)
    for budget in args.budget:
        MemoryBudget.parse(budget)
    if args.memory is not None:
        parse_bytes(args.memory, "--memory")
    if args.pp == 1:
        refuse_unread(args, ["pp_schedule", "balance"], "without --pp above 1 there is no pipeline.")
        if args.grad_accum == 1:
            refuse_unread(args, ["sync"], "of one micro-batch there is no other. Give --grad-accum too.")
        if args.world_size == 1:
            refuse_unread(
                args,
                ["reshard_after_forward", "prefetch", "cpu_offload"],
                "one rank keeps the model whole. Give --world-size too.",
            )
    if args.ep == 1:
        refuse_unread(args, ["imbalance"], "without --ep above 1 every rank has all experts.")
    if not (args.host or args.cpu_offload) and args.offload == "none":
        refuse_unread(args, ["host_memory"], "that takes --host, --offload or --cpu-offload.")
    if args.input_shape:
        sizes = ["batch_size", "seq_len", "images", "image_size", "audio_seconds", "vocab_size"]
        refuse_unread(args, sizes, "--input-shape is the whole input.")


def _report_stages(
    args: argparse.Namespace,
    planner: PipelinePlanner,
    given: ModelInput,
    limit: int | None,
    start: float,
    model: torch.nn.Module,
    sample: object,
) -> int:
    from nemo_like.planning import pipeline_report
    from nemo_like.planning.plan_report import planned_call
    from nemo_like.planning.stage_balance import balanced

    planner = balanced(planner, "full") if planner.pp.balance == "memory" else planner
    report = pipeline_report.pipeline_report(planner, args.budget, limit)
    best = report.best
    call = None if best is None else planned_call(best.planner.job, best.name, "microbatch")
    if args.json != "-":
        _say_stages(args, planner, report, given, call)
        print(f"\nPlanned in {time.perf_counter() - start:.1f} s.")
    check = _check_rank(args, planner.job, model, sample, None if best is None else best.name) if args.check else None
    body = {"model": args.model} | pipeline_report.pipeline_json(report) | {"call": call, "check": check}
    _write_json(args.json, body)
    if args.plot:
        pipeline_report.schedule_plot(best or report.rows[0], args.plot)
    if args.save and best is not None:
        best.plan.save(args.save)
    for reason in report.unmet if args.budget else ():
        print(f"nemo-like plan: {reason}", file=sys.stderr)
    return 0 if best is not None and not (args.budget and report.unmet) else 1


_RESERVED = (
    " (and what CUDA's caching allocator takes for these tensors and for cuBLAS,\nby a model of it that was not compared "
    "with a GPU)"
)


def _say_stages(
    args: argparse.Namespace, planner: PipelinePlanner, report: PipelineReport, given: ModelInput, call: str | None
) -> None:
    from nemo_like.planning import pipeline_report

    best = report.best
    flights = [planner.most_in_flight(index) for index in range(len(planner.stages))]
    print(
        f"{args.model} in {len(planner.counts)} stages on {args.pp} x {planner.device.name} ({planner.pp.schedule}, "
        f"{planner.count} micro-batches of {given.words}), each stage on {args.world_size // args.pp} rank(s).\nLayers per "
        f"stage {planner.counts}, micro-batches in flight {flights}; a rank may take {report.limit / 2**30:.2f} GiB.\n"
    )
    print(pipeline_report.pipeline_table(report, args.batch_size * args.seq_len))
    print(
        f"\nrank: peak in GiB{_RESERVED if report.rows[0].reserved is not None else ''}. replay: share of a forward. "
        "bubble: share of the time in which ranks wait. ms: of a step, tokens/s: of one rank;\n"
        "predicted by the roofline of this GPU's sourced rates, with the collectives that nothing hides.\n"
    )
    if best is None:
        print(pipeline_report.least_help(report))
        return
    worst = max(best.peaks, key=lambda peak: peak.total)
    parts = sorted(worst.parts.items(), key=lambda item: -item[1])
    print(f"Peak of ac={best.name!r}, {best.plan.peak_at}:")
    print("\n".join(f"  {size / 2**30:9.3f} GiB  {name}" for name, size in parts) + f"\n\n  {call}")
    if report.tight is not None:
        print(report.tight.words(best.name))


def _frozen(model: torch.nn.Module, args: argparse.Namespace, job: Job) -> torch.nn.Module:
    """The model as --lora and --four-bit say."""
    from nemo_like.planning.four_bit import four_bit_twin, with_adapters

    if args.four_bit and args.lora is None:
        raise ValueError("--four-bit keeps frozen weights in 4 bits, and all train here: give --lora RANK as well.")
    if args.lora is None:
        return model
    adapted = with_adapters(model.train(), args.lora, job.param_dtype or parse_dtype("--dtype", args.dtype))
    return four_bit_twin(adapted) if args.four_bit else adapted


@contextlib.contextmanager
def _progress(message: str) -> Iterator[None]:
    """A spinner on a terminal, where rich is installed; else nothing."""
    try:
        from rich.console import Console
    except ImportError:
        yield
        return
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(message):
        yield
