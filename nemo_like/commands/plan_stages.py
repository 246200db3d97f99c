"""``nemo-like plan --pp``: each rank's peak under a pipeline's schedule, and a plan for each stage."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from nemo_like.models import resolve_model
from nemo_like.options import (
    FSDP2,
    ChunkedLoss,
    ContextParallel,
    OffloadConfig,
    PipelineParallel,
    Precision,
    StepSpec,
    parse_bytes,
    parse_dtype,
)
from nemo_like.options.allocator import AllocatorConfig

_RESERVED = (
    " (and what CUDA's caching allocator takes for these tensors and for cuBLAS,\nby a model of it that was not compared "
    "with a GPU)"
)


def run(args: argparse.Namespace, shard_ranks: int, precision: Precision, allocator: AllocatorConfig) -> int:
    """Trace each stage, predict each rank, report. Returns 0; 1 where nothing fits."""
    from nemo_like.planning import pipeline_report
    from nemo_like.planning.devices import calibrated, resolve_device
    from nemo_like.planning.planner import Setup
    from nemo_like.planning.stage_balance import balanced
    from nemo_like.planning.stages import PipelinePlanner

    _refuse(args)
    pp = _pipeline(args)
    start = time.perf_counter()
    source = resolve_model(args.model)
    model = source.build("meta", parse_dtype("--dtype", args.dtype))
    sample = source.sample_input(args.batch_size, args.seq_len)
    whole = args.world_size == args.pp
    setup = Setup(
        shard_ranks=shard_ranks, replicas=args.dp_replicate, precision=precision, tp=args.tp,
        cp=ContextParallel(args.cp), ep=args.ep, imbalance=args.imbalance,
        step=StepSpec.of(StepSpec(zero_grad=args.zero_grad), args.optimizer), loss=ChunkedLoss.of(args.loss),
        fsdp=None if whole else FSDP2(reshard_after_forward=False), offload=OffloadConfig.of(args.offload),
        allocator=allocator,
    )  # fmt: skip
    planner = PipelinePlanner(
        model,
        sample,
        pp=pp,
        device=calibrated(resolve_device(args.gpu)),
        setup=setup,
        skip=False if args.no_skip else None,
    )
    planner = balanced(planner, "full") if pp.balance == "memory" else planner
    limit = parse_bytes(args.memory, "--memory") if args.memory else None
    report = pipeline_report.pipeline_report(planner, args.budget, limit)
    best = report.best
    call = None if best is None else pipeline_report.pipeline_call(best, args.dp_replicate)
    if args.json != "-":
        flights = [planner.most_in_flight(index) for index in range(len(planner.stages))]
        print(
            f"{args.model} in {len(planner.counts)} stages on {args.pp} x {planner.device.name} ({pp.schedule}, "
            f"{planner.count} microbatches of {args.batch_size} x {args.seq_len} tokens), each stage on "
            f"{args.world_size // args.pp} rank(s).\nLayers per stage {planner.counts}, microbatches in flight {flights}; a "
            f"rank may peak at "
            f"{report.limit / 2**30:.2f} GiB.\n"
        )
        print(pipeline_report.pipeline_table(report, args.batch_size * args.seq_len))
        print(
            f"\nrank: peak in GiB{_RESERVED if report.rows[0].reserved is not None else ''}. replay: share of a forward. "
            "bubble: share of the time in which ranks wait. ms: of a step, tokens/s: of one rank;\n"
            "predicted by the roofline of this GPU's sourced rates, without communication.\n"
        )
        if best is not None:
            worst = max(best.peaks, key=lambda peak: peak.total)
            parts = sorted(worst.parts.items(), key=lambda item: -item[1])
            print(f"Peak of ac={best.name!r}, {best.plan.peak_at}:")
            print("\n".join(f"  {size / 2**30:9.3f} GiB  {name}" for name, size in parts) + f"\n\n  {call}")
            if report.tight is not None:
                print(report.tight.words(best.name))
        else:
            print(pipeline_report.least_help(report))
        print(f"\nPlanned in {time.perf_counter() - start:.1f} s.")
    if args.json:
        body = {"model": args.model} | pipeline_report.pipeline_json(report) | {"call": call}
        text = json.dumps(body, indent=1) + "\n"
        if args.json == "-":
            sys.stdout.write(text)
        else:
            Path(args.json).write_text(text, encoding="utf-8")
    if args.plot:
        pipeline_report.schedule_plot(best or report.rows[0], args.plot)
    if args.save and best is not None:
        best.plan.save(args.save)
    for reason in report.unmet if args.budget else ():
        print(f"nemo-like plan: {reason}", file=sys.stderr)
    return 0 if best is not None and not (args.budget and report.unmet) else 1


def _pipeline(args: argparse.Namespace) -> PipelineParallel:
    balance: str | tuple[int, ...] = args.balance
    if args.balance not in ("time", "memory"):
        try:
            balance = tuple(int(word) for word in args.balance.split(","))
        except ValueError:
            raise ValueError(
                f"--balance is {args.balance!r}; it must be time, memory, or how many layers each stage gets, such as 8,8."
            ) from None
    return PipelineParallel(
        args.pp,
        schedule=args.schedule,
        microbatches=args.microbatches if args.microbatches > 1 else None,
        balance=balance,
    )


def _refuse(args: argparse.Namespace) -> None:
    for name, given in (("--host", args.host), ("--measure", args.measure), ("--input-shape", bool(args.input_shape))):
        if given:
            raise ValueError(f"{name} beside --pp is not planned. Leave one of the two out.")
