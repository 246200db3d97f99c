"""``nemo-like fit``: which configuration of a training job is the fastest that fits? No GPU, no weights."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nemo_like._util.console import flag, refuse_unread, tokens
from nemo_like._util.progress import progress
from nemo_like._util.table import screen_width
from nemo_like.commands import (
    FOUR_BIT,
    LORA,
    MODEL,
    NO_CACHE,
    STORED,
    WIDE,
    WITHOUT_LORA,
    print_report,
    settings_options,
)
from nemo_like.commands.early_checks import check_early
from nemo_like.commands.settings_options import write_to
from nemo_like.commands.step_options import refuse_host_memory
from nemo_like.flags import CONFIGURATIONS, FLAGS, SEQ_LEN, flags_of, flags_on, job_of, options_of, pins_of
from nemo_like.options import COMPILE_BACKENDS, OPTIMIZERS, Precision, StepSpec, dtype_word, normalise, parse_dtype

if TYPE_CHECKING:
    from nemo_like.planning.fit.report import FitReport

EXAMPLES = (
    "--model llama3-70b --gpus 256 --gpu h100-80gb --seq-len 8192 --global-batch 512",
    "--model llama3-8b --gpus 8 --tp 1 2 --ac none full plan --explain 1",
    "--model config.json --gpus 16 --seq-len 8192 --json fit.json --save plan.json",
)
_PINS, _JOB = flags_on("pins"), flags_on("fit")


def _words(text: str) -> str | list[str]:
    words = [word.strip() for word in text.split(",")]
    return words[0] if len(words) == 1 else words


OPTIONS: dict[str, dict[str, Any]] = {
    "--model": MODEL,
    "--gpus": {"type": int, "least": 1, "group": "parallelism", "help": "how many there are"},
    **options_of(_JOB),
    "--seq-len": {
        "type": tokens,
        "least": 1,
        "default": SEQ_LEN,
        "help": "tokens of the longest sequence (default: %(default)s)",
    },
    "--global-batch": {
        "type": int,
        "least": 1,
        "help": "sequences of a step over all GPUs (default: as many as are fastest)",
    },
    "--memory": {
        "help": "bytes that a step may take on each GPU (default: all but 5 %% and the memory outside of torch's "
        "allocator)",
    },
    "--dtype": STORED,
    "--lora": {"type": int, "least": 1, "metavar": "RANK", "help": LORA},
    "--four-bit": FOUR_BIT,
    "--precision": {
        "type": _words,
        "group": "training",
        "help": "dtype to compute in (default: bf16 on CUDA); bf16,fp32: either",
    },
    "--optimizer": {
        "type": _words,
        "group": "training",
        "help": f"{' | '.join(OPTIMIZERS)} (default: adamw-fused on CUDA); adamw,adamw-8bit: either",
    },
    "--compile": {
        "type": _words,
        "group": "training",
        "help": f"compiler of each layer: none | {' | '.join(COMPILE_BACKENDS)} (default: none,inductor on CUDA)",
    },
    "--minutes": {
        "type": float,
        "help": "end the search after so many, with the best so far (default: when it is known)",
    },
    "--count": {
        "type": int,
        "least": 1,
        "default": CONFIGURATIONS,
        "help": "configurations to print (default: %(default)s)",
    },
    **pins_of(_PINS),
    **{
        flag(name): {
            "type": int,
            "least": 1,
            "nargs": "+",
            "help": f"fixed: {meaning}; several values: any of them",
        }
        for name, meaning in (
            ("dp_shard", "ranks that parameters are sharded over"),
            ("micro_batch", "sequences per rank and micro-batch"),
        )
    },
    "--ac": {
        "nargs": "+",
        "group": "memory",
        "help": "fixed: none | full | selective | plan (the best for the memory), or lists of names as JSON",
    },
    "--explain": {
        "type": int,
        "nargs": "?",
        "const": 1,
        "metavar": "N",
        "help": "also print where each GiB and each millisecond of the N-th comes from (default: of the first)",
    },
    "--wide": WIDE,
    "--no-cache": NO_CACHE,
    "--calibrate": {
        "action": "store_true",
        "help": "first measure the speeds of the device at hand, and keep them for later plans; alone: nothing else",
    },
    **settings_options.OPTIONS,
    "--as": {
        "dest": "paste_as",
        "choices": ("trainer",),
        "help": "also print the best as arguments of transformers.Trainer",
    },
    "--json": {"metavar": "PATH", "help": "write everything here ('-': standard output)"},
    "--save": {"metavar": "PATH", "help": "write the best one's plan here, where it has one"},
}


def check(args: argparse.Namespace) -> None:
    """Raise ValueError for options that can be refused before torch is imported."""
    if args.calibrate and args.model is None:
        others = sorted(vars(args).keys() - {"command", "run", "parser", "own", "calibrate"})
        refuse_unread(args, others, "--calibrate without --model measures this device and nothing else.")
        return
    for name in ("model", "gpus"):
        if getattr(args, name) is None:
            raise ValueError(f"--{name} is needed: nemo-like fit --model llama3-8b --gpus 8; or --calibrate alone.")
    check_early(args)
    if args.paste_as and args.json == "-":
        raise ValueError("--as prints arguments, and --json - prints JSON alone. Give --json a file.")
    if args.save and args.ac is not None and "plan" not in map(normalise, args.ac):
        raise ValueError(f"--save writes a plan, and --ac is {' '.join(args.ac)}, which makes none. Add plan to --ac.")
    refuse_host_memory(args)
    if args.lora is None:
        refuse_unread(args, ["four_bit"], WITHOUT_LORA)
    if args.explain is not None and not 1 <= args.explain <= args.count:
        raise ValueError(f"--explain is {args.explain}; it must be the number of a printed line, 1 to {args.count}.")


def first_line(args: argparse.Namespace) -> str:
    """Return the line that is printed before torch is imported."""
    if args.calibrate:
        return "Measuring this device ..."
    return f"{args.from_words}Searching for the fastest configuration of {args.model} on {args.gpus} x {args.gpu} ..."


def run(args: argparse.Namespace) -> int:
    """Search and report. Returns 0; 1 where nothing fits."""
    from nemo_like.models import resolve_model
    from nemo_like.planning.fit import fit
    from nemo_like.planning.trace.store import keeping

    if args.calibrate:
        _calibrate()
    if args.model is None:
        return 0
    pins: dict[str, Any] = {name: getattr(args, name) for name in (*_PINS, "dp_shard", "micro_batch", "ac")}
    pins["schedule"] = pins.pop("pp_schedule")
    for name in flags_of("strategy"):  # some of their words are of the command line
        if isinstance(pins.get(name), list):
            pins[name] = [FLAGS[name].read(word) for word in pins[name]]
    config = resolve_model(args.model).config
    with keeping(args.cache, config, args.dtype, args.lora, args.four_bit), progress() as say:
        report = fit(
            args.model,
            gpus=args.gpus,
            seq_len=args.seq_len,
            global_batch=args.global_batch,
            memory=args.memory,
            **_fields(args),
            dtype=parse_dtype("--dtype", args.dtype),
            lora=args.lora,
            four_bit=args.four_bit,
            count=args.count,
            minutes=args.minutes,
            progress=say,
            **pins,
        )
    text = report.text(None if args.wide else screen_width(), args.explain, _paste(args, report))
    print_report(args, text, lambda: json.dumps(report.to_dict(), indent=1))
    if not report.candidates:
        return 1
    best = report.best
    write_to(args, best.job.change(world_size=args.gpus), ac=best.ac, batch_size=best.layout.micro_batch)
    if not args.save:
        return 0
    if best.plan is None:
        print(
            f"nemo-like fit: --save wrote nothing: the fastest has ac={best.ac!r}, which is not a plan. "
            "Pin --ac plan for the fastest that has one.",
            file=sys.stderr,
        )
        return 1
    best.plan.save(args.save)
    return 0


def _paste(args: argparse.Namespace, report: FitReport) -> str:
    """Return the lines of ``--as``; empty without it, and where nothing fits."""
    if args.paste_as is None or not report.candidates:
        return ""
    from nemo_like.settings.paste import trainer_call

    return trainer_call(
        report.best.job.change(world_size=args.gpus),
        ac=report.best.ac,
        batch_size=report.best.layout.micro_batch,
        seq_len=args.seq_len,
        lora=args.lora,
        four_bit=args.four_bit,
        dtype=dtype_word(parse_dtype("--dtype", args.dtype)),
    )


def _fields(args: argparse.Namespace) -> dict[str, Any]:
    """Return the job of the flags, as keywords of `fit`."""
    job = job_of({name: getattr(args, name) for name in _JOB if name not in ("balance", "reduce_dtype")}, ac="none")
    precisions = args.precision if isinstance(args.precision, list) else [args.precision]
    if args.reduce_dtype is not None:
        if precisions == [None]:
            raise ValueError(f"--reduce-dtype is {args.reduce_dtype}, and --precision is not given. Give both.")
        reduced = parse_dtype("--reduce-dtype", args.reduce_dtype)
        precisions = [replace(Precision.of(word), reduce_dtype=reduced) for word in precisions]
    return {
        **{name: getattr(job, name) for name in ("gpu", "attention", "allocator", "search", "strategy")},
        **({} if job.step == StepSpec() else {"step": job.step}),
        "balance": FLAGS["balance"].read(args.balance),
        "imbalance": args.imbalance,
        "precision": precisions,
        "optimizer": args.optimizer,
        "compile": args.compile,
    }


def _calibrate() -> None:
    from nemo_like.planning.calibration import calibrate
    from nemo_like.planning.devices import device_at_hand

    path = calibrate()
    rates = json.loads(path.read_text(encoding="utf-8"))["rates"]
    print(f"{device_at_hand().name}: written to {path}, which later plans for it use", file=sys.stderr)
    for name, rate in rates.items():
        unit = "FLOP/s" if name.startswith(("matmul", "attention")) else "s" if name == "launch_seconds" else "bytes/s"
        print(f"  {name:18} {rate:12.4g} {unit}", file=sys.stderr)
