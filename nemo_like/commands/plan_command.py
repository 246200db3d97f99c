"""``nemo-like plan``: will it fit, and which checkpointing is the fastest that does? No GPU, no weights."""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nemo_like.console import check_picture, check_writable, flag, refuse_unread
from nemo_like.models import resolve_model
from nemo_like.options import (
    FSDP2,
    OPTIMIZERS,
    ChunkedLoss,
    ContextParallel,
    MemoryBudget,
    OffloadConfig,
    PipelineParallel,
    Precision,
    StepSpec,
    parse_bytes,
    parse_dtype,
)
from nemo_like.options.allocator import AllocatorConfig
from nemo_like.options.parallel import check_imbalance

if TYPE_CHECKING:  # the command imports the planner only when it runs
    from nemo_like.planning.devices import Device
    from nemo_like.planning.model_inputs import ModelInput
    from nemo_like.planning.plan_report import PlanReport
    from nemo_like.planning.planner import Planner

HELP = "predict the peak memory of a training step and find the fastest plan that fits, without a GPU"
EXAMPLES = (
    "--model llama3-8b --world-size 64 --seq-len 8192 --gpu h100-80gb",
    "--model llama3-8b --world-size 8 --budget 40GiB --budget 50% --save plan.json",
    "--model llama3-70b --world-size 64 --pp 4 --tp 4 --microbatches 8",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    from nemo_like.planning.devices import known_devices

    add = parser.add_argument
    add("--model", required=True, help="a preset (llama3-8b, ...), a config.json, or module:function")
    add("--gpu", default="h100-80gb", help=f"{' | '.join(known_devices())}, or a JSON file")
    add("--world-size", type=int, default=1, help="ranks in all (default: %(default)s)")
    add("--dp-replicate", type=int, default=1, help="replicas of the sharded model, HSDP (default: %(default)s)")
    add("--tp", type=int, default=1, help="tensor-parallel ranks (default: %(default)s)")
    add("--cp", type=int, default=1, help="ranks that share each sequence, of --seq-len tokens (default: %(default)s)")
    add("--ep", type=int, default=1, help="ranks that each layer's experts are split over (default: %(default)s)")
    add("--imbalance", type=float, help="rows of the fullest rank's experts, 1 (balanced) to --ep (default: 1.5)")
    add(
        "--pp",
        type=int,
        default=1,
        help="ranks of a pipeline (default: %(default)s); each stage is sharded over the others",
    )
    add("--schedule", default=PipelineParallel.schedule, help="of the pipeline (default: %(default)s)")
    add(
        "--balance",
        default="time",
        help="layers of a stage: time | memory | counts such as 8,8,7,7 (default: %(default)s)",
    )
    add("--seq-len", type=int, default=4096, help="tokens per sequence (default: %(default)s)")
    add("--batch-size", type=int, default=1, help="sequences per rank and microbatch (default: %(default)s)")
    add("--input-shape", help="shape of a float input, such as 2,3,224,224, for a model that takes no tokens")
    add(
        "--images",
        type=int,
        default=1,
        help="pictures per sequence, for a model that takes some (default: %(default)s)",
    )
    add("--image-size", type=int, help="pixels per side of a picture (default: the config's, or 448)")
    add("--audio-seconds", type=float, help="of a sound per sequence, for a model that takes some (default: what its config "
        "has positions for, or 30); 0: none")  # fmt: skip
    add("--vocab-size", type=int, help="for a module:function that takes token ids and states no vocab_size")
    add("--dtype", default="fp32", help="parameters as stored (default: %(default)s)")
    add("--param-dtype", default="bf16", help="parameters in forward (default: %(default)s)")
    add("--reduce-dtype", default="fp32", help="gradients while they are reduced (default: %(default)s)")
    add("--optimizer", help=f"{' | '.join(OPTIMIZERS)} (default: {StepSpec.optimizer})")
    add("--loss", default="model", help="model | chunked: head and loss in chunks of tokens (default: %(default)s)")
    add("--microbatches", type=int, default=1, help="forwards and backwards per optimizer step (default: %(default)s)")
    add("--sync", default=StepSpec.sync, help="microbatches that reduce gradients: every | last (default: %(default)s)")
    add("--drop-output", action="store_true", help="the loop drops the model's output (its logits) before backward")
    add(
        "--lora",
        type=int,
        metavar="RANK",
        help="adapters of this rank train, all else is frozen, in --param-dtype (peft)",
    )
    add("--four-bit", action="store_true", help="frozen linear layers in 4 bits with their scales, as QLoRA has them")
    add("--ema", action="store_true", help="the loop keeps a copy of the weights that it averages")
    add("--zero-grad", default=StepSpec.zero_grad, help="gradients between steps: free | zero (default: %(default)s)")
    add(
        "--cpu-offload",
        action="store_true",
        help="parameter shards, gradients and optimizer state in host memory, up to --host-memory",
    )
    add("--no-reshard", action="store_true", help="keep layers gathered after forward")
    add("--prefetch", type=int, default=1, help="layers gathered ahead (default: %(default)s)")
    add(
        "--budget",
        action="append",
        default=[],
        help="also plan for this: 40GiB (peak) or 50%% (activations); repeatable",
    )
    add("--memory", help="what a step may peak at; default: the GPU's memory less a tenth")
    add("--no-skip", action="store_true", help="replay every op, also those that nobody reads")
    add("--host", action="store_true", help="also consider keeping outputs in host memory, over the GPU's link")
    add(
        "--host-memory",
        default="64GiB",
        help="host memory of one rank for that, for --offload or for --cpu-offload (default: %(default)s)",
    )
    add("--offload", help="none | boundary | saved | all: what waits in host memory, as parallelize(offload=) moves it")
    add(
        "--alloc-conf", help="settings of CUDA's caching allocator, as in PYTORCH_ALLOC_CONF (default: that variable's)"
    )
    add("--no-search", action="store_true", help="do not look for the largest micro-batch and the least number of GPUs")
    add("--measure", action="store_true", help="time the ops on the device at hand instead of the GPU's table")
    add("--json", metavar="PATH", help="write the numbers here ('-': standard output)")
    add("--plot", metavar="PATH", help="write a picture here: memory against step time")
    add("--save", metavar="PATH", help="write the recommended plan here (read it with nemo_like.planning.Plan.load)")


def run(args: argparse.Namespace) -> int:
    """Trace, choose, predict, report. Returns 0; 1 where nothing fits."""
    from nemo_like.commands import plan_inputs, plan_stages
    from nemo_like.planning import plan_report
    from nemo_like.planning.devices import calibrated, resolve_device
    from nemo_like.planning.planner import Planner, Setup

    shard_ranks = _shard_ranks(args)
    _check(args)
    if args.cpu_offload and args.pp > 1:
        raise ValueError("--cpu-offload beside --pp is not planned. Leave one of the two out.")
    if args.pp > 1:
        return plan_stages.run(args, shard_ranks, _precision(args), _allocator(args.alloc_conf))
    loop = StepSpec(args.microbatches, args.sync, not args.drop_output, args.zero_grad, ema=args.ema)
    step = StepSpec.of(loop, args.optimizer)
    device = calibrated(resolve_device(args.gpu))
    reshard = False if args.no_reshard else None
    if args.cpu_offload:
        _check_cpu_offload(args, device)
    start = time.perf_counter()
    with _progress(f"Planning {args.model} ..."):
        source = resolve_model(args.model)
        model = _frozen(source.build("meta", parse_dtype("--dtype", args.dtype)), args)
        setup = Setup(
            shard_ranks=shard_ranks,
            replicas=args.dp_replicate,
            step=step,
            precision=_precision(args),
            # One rank keeps the model whole, whatever the strategy, and computes under autocast.
            fsdp=None if args.world_size == 1 else FSDP2(reshard, args.prefetch, args.prefetch, args.cpu_offload),
            tp=args.tp,
            cp=ContextParallel(args.cp),
            ep=args.ep,
            imbalance=args.imbalance,
            loss=ChunkedLoss.of(args.loss),
            offload=OffloadConfig.of(args.offload),
            allocator=_allocator(args.alloc_conf),
        )
        host_memory = parse_bytes(args.host_memory, "--host-memory")

        def plan_with(sample: Any, setup: Setup = setup) -> Planner:
            # A planner cuts the model it traces for as long as it answers.
            own = model if setup.cp.size == 1 else copy.deepcopy(model)
            return Planner(
                own, sample, device=device, setup=setup, skip=False if args.no_skip else None, host=args.host,
                host_memory=host_memory, measure=args.measure,
            )  # fmt: skip

        planner, given = plan_inputs.planner_with_inputs(plan_with, model, source, args)
        ids = given.tensors.get("input_ids", given.tensors.get("labels"))
        result = plan_report.make_report(
            planner, args.budget, parse_bytes(args.memory, "--memory") if args.memory else None,
            dp_replicate=args.dp_replicate, special=args.host or args.no_skip or args.measure,
            # What a smaller number of ranks would hold is not looked for where they share sequences.
            reach=None if args.no_search or args.cp > 1 else plan_inputs.reach(plan_with, planner, model, source, args),
            tokens=None if ids is None else ids.numel(),
        )  # fmt: skip
    result = replace(result, file=args.save or result.file)
    seconds = time.perf_counter() - start
    if args.json != "-":
        _say(args, planner, result, seconds, model, given)
    if args.json:
        head = {
            "model": args.model, "input": given.words, "not_run": planner.idle_layers() or None,
            "not_made_up": given.missing or None, "rates": device.rates,
        }  # fmt: skip
        text = json.dumps(head | plan_report.as_json(result), indent=1) + "\n"
        if args.json == "-":
            sys.stdout.write(text)
        else:
            Path(args.json).write_text(text, encoding="utf-8")
    if args.plot:
        plan_report.plot(planner, result, args.plot)
    if args.save and result.best is not None:
        result.best.plan.save(args.save)
    for reason in result.unmet:
        print(f"nemo-like plan: {reason}", file=sys.stderr)
    return 0 if result.best is not None and not result.unmet else 1


def _say(
    args: argparse.Namespace, planner: Planner, result: PlanReport, seconds: float, model: torch.nn.Module,
    given: ModelInput,
) -> None:  # fmt: skip
    from nemo_like.planning import plan_advice, plan_report

    size = sum(p.numel() for p in model.parameters())
    count = planner.setup.step.microbatches
    microbatches = f"{count} microbatches of " if count > 1 else ""
    print(
        f"{args.model}: {size / 1e9:.2f} B parameters, {len(planner.traced.calls)} layers of {len(planner.problems)} "
        f"kind(s), {microbatches}{given.words} per rank on {args.world_size} x {planner.device.name}, "
        f"{planner.setup.step.optimizer}; a step may peak at {result.limit / 2**30:.2f} GiB. Seconds go by the "
        f"rates of {planner.device.rates}.\n"
    )
    if planner.not_run or given.missing:
        why = f" {given.missing[0].upper()}{given.missing[1:]}." if given.missing else ""
        print(
            f"Left out: {planner.idle_layers() or 'no layer'}. {given.words} do not run them, and the peaks below are those "
            f"of a step without.{why} For what the command cannot make up: plan_for(model, budget, sample_input).\n"
        )
    print(plan_report.table(result))
    print(
        "\nheld, host, peak: GiB per rank. replay: share of a forward. step: layers alone, 1 = no checkpointing. ms: of a "
        "step, tokens/s: of one GPU;\nboth predicted, by the roofline of this GPU's sourced rates, for the operators that "
        f"run on {planner.device.kind}, without communication.\n"
    )
    if any(row.plan.reserved_bytes is not None for row in result.rows):
        print(
            "reserved: GiB per rank that CUDA's caching allocator takes for these tensors and for cuBLAS, by a model of it "
            "that was not compared\nwith a GPU. Where memory is short, it gives free segments back before it fails.\n"
        )
    if result.best is not None:
        print(
            f"Peak of ac={result.best.name!r}, {result.best.plan.peak_at}:\n{plan_report.breakdown(result.best.plan)}\n"
        )
    print(plan_advice.advice(result, "batch"))
    if result.special and result.best is not None and result.best.name not in plan_report.MODES and not args.save:
        print(
            "  # --host, --no-skip and --measure make another plan than parallelize would: write it with --save plan.json"
        )
    print(f"\nPlanned in {seconds:.1f} s.")


def _check(args: argparse.Namespace) -> None:
    """Raise for what would only be found after planning: files, sizes, words, and options that nothing reads."""
    check_writable("--json", args.json)
    check_writable("--save", args.save)
    check_picture("--plot", args.plot)
    for budget in args.budget:
        MemoryBudget.parse(budget)
    for name in ("memory", "host_memory"):
        if getattr(args, name) is not None:
            parse_bytes(getattr(args, name), flag(name))
    offload = OffloadConfig.of(args.offload)
    if args.imbalance is not None:
        check_imbalance("--imbalance", args.imbalance, args.ep)
    if args.pp == 1:
        refuse_unread(args, ["schedule", "balance"], "without --pp above 1 there is no pipeline.")
        if args.microbatches == 1:
            refuse_unread(args, ["sync"], "of one microbatch there is no other. Give --microbatches too.")
        if args.world_size == 1:
            refuse_unread(args, ["no_reshard", "prefetch"], "one rank keeps the model whole. Give --world-size too.")
    if not (args.host or args.cpu_offload) and offload.mode == "none":
        refuse_unread(args, ["host_memory"], "that takes --host, --offload or --cpu-offload.")
    if args.input_shape:
        sizes = ["batch_size", "seq_len", "images", "image_size", "audio_seconds", "vocab_size"]
        refuse_unread(args, sizes, "--input-shape is the whole input.")


def _check_cpu_offload(args: argparse.Namespace, device: Device) -> None:
    if args.world_size == 1:
        raise ValueError(
            "--cpu-offload is FSDP2's, and one rank keeps the model whole. Use more ranks (--world-size), or --host."
        )
    device.check_host_rates("--cpu-offload")


def _frozen(model: torch.nn.Module, args: argparse.Namespace) -> torch.nn.Module:
    """The model as --lora and --four-bit say."""
    from nemo_like.planning.four_bit import four_bit_twin, with_adapters

    if args.four_bit and args.lora is None:
        raise ValueError("--four-bit keeps frozen weights in 4 bits, and all train here: give --lora RANK as well.")
    if args.lora is None:
        return model
    adapted = with_adapters(model.train(), args.lora, parse_dtype("--param-dtype", args.param_dtype))
    return four_bit_twin(adapted) if args.four_bit else adapted


def _allocator(said: str | None) -> AllocatorConfig:
    """What a job that is started here would read."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    return AllocatorConfig.parse(
        next((os.environ[name] for name in names if name in os.environ), "") if said is None else said
    )


def _precision(args: argparse.Namespace) -> Precision:
    """What to cast to; a dtype that the parameters have anyway is no cast."""
    stored = parse_dtype("--dtype", args.dtype)
    param, reduce = parse_dtype("--param-dtype", args.param_dtype), parse_dtype("--reduce-dtype", args.reduce_dtype)
    param = None if param == stored else param
    return Precision(param, None if param is None and reduce == stored else reduce)


def _shard_ranks(args: argparse.Namespace) -> int:
    for name in ("world_size", "dp_replicate", "tp", "cp", "ep", "pp", "seq_len", "batch_size"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be >= 1.")
    if args.prefetch < 0:
        raise ValueError(f"--prefetch is {args.prefetch}; it must be >= 0.")
    rest, left = divmod(args.world_size, args.dp_replicate * args.tp * args.pp)
    if left:
        raise ValueError(
            f"--world-size {args.world_size} is not divisible by --dp-replicate {args.dp_replicate} x --tp {args.tp} x "
            f"--pp {args.pp}."
        )
    if rest % args.cp:
        raise ValueError(f"--cp {args.cp} does not divide the {rest} ranks that parameters are sharded over.")
    if rest * args.tp % args.ep:
        raise ValueError(f"--ep {args.ep} does not divide the {rest * args.tp} ranks that hold one copy of the model.")
    return rest


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
