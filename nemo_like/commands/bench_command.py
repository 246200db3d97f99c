"""`nemo-like bench`: the cost and savings of each mode, for your model on this machine; also under torchrun."""

import argparse
import sys

from nemo_like._util.console import check_writable, refuse_unread, write_text
from nemo_like._util.table import screen_width
from nemo_like._util.words import field_names
from nemo_like.bench.options import BenchOptions
from nemo_like.options import MemoryBudget, normalise, parse_dtype, parse_shape

EXAMPLES = (
    "--model llama-small --batch-size 1 --seq-len 256",
    "--model mymodels:build --input-shape 8,3,32,32 --modes none full selective",
    '--model llama-small --modes full "offload all" "chunked loss" --budgets --json modes.json',
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    defaults = BenchOptions()
    parser.add_argument(
        "--model", default=defaults.model, help="a preset, a config.json or its folder, or module:function"
    )
    parser.add_argument("--batch-size", type=int, default=defaults.batch_size, help="samples per step and rank")
    parser.add_argument("--seq-len", type=int, default=defaults.seq_len, help="tokens per sample")
    parser.add_argument("--input-shape", help="without tokens: the shape of the float input, such as 8,3,32,32")
    parser.add_argument("--device", help="cpu, or a CUDA device (default: this rank's GPU if there is one)")
    parser.add_argument("--dtype", help="dtype of the parameters (default: float32)")
    parser.add_argument(
        "--strategy", group="parallelism", choices=("single", "fsdp2", "ddp"), default=defaults.strategy
    )
    parser.add_argument("--modes", nargs="+", help="names of the modes (default: all that can run)")
    parser.add_argument("--budgets", nargs="*", default=list(defaults.budgets), help="such as 50%% or 2GB")
    parser.add_argument(
        "--compile", group="training", nargs="*", default=[], metavar="BACKEND", help="inductor, aot_eager"
    )
    parser.add_argument("--no-peers", action="store_true", help="our own modes only")
    parser.add_argument("--repeats", type=int, default=defaults.repeats, help="measured steps per mode")
    parser.add_argument("--warmup", type=int, default=defaults.warmup, help="steps per mode before those")
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument("--json", metavar="PATH", help="also write everything here, as JSON ('-': standard output)")
    parser.add_argument("--wide", action="store_true", help="print all columns, however narrow the screen is")


def first_line(args: argparse.Namespace) -> str:
    """Return the line that is printed before torch is imported."""
    return f"Measuring {args.model} ..."


def run(args: argparse.Namespace) -> int:
    """Measure, then print and write the comparison."""
    from nemo_like.bench import compare_modes
    from nemo_like.distributed.launch import init_distributed, rank, shutdown, world_size

    options = options_of(args)
    launched = world_size() > 1
    if launched:
        init_distributed(None if args.device is None else args.device.split(":")[0])
    try:
        comparison = compare_modes(options)
        if rank() == 0:
            if args.json != "-":
                sys.stdout.write(comparison.text(None if args.wide else screen_width()) + "\n")
            write_text(args.json, comparison.to_json())
    finally:
        if launched:
            shutdown()
    return 0


def options_of(args: argparse.Namespace) -> BenchOptions:
    """Return the options of the command line.

    Raises:
        ValueError: a file that could not be written after the measurement, or an option that nothing reads.
    """
    check_writable("--json", args.json)
    for budget in args.budgets:
        MemoryBudget.parse(budget, "--budgets")
    if args.input_shape is not None:
        refuse_unread(args, ["batch_size", "seq_len"], "--input-shape is the whole input.")
    if args.modes is not None and args.budgets != args.own.get_default("budgets"):
        modes = {normalise(mode) for mode in args.modes}
        unread = [budget for budget in args.budgets if normalise(f"budget {budget}") not in modes]
        if unread:
            raise ValueError(
                f"--budgets has {unread[0]!r}, and nothing reads it: --modes leaves 'budget {unread[0]}' out. Add that to "
                "--modes, or leave --budgets out."
            )
    words = {name: getattr(args, name) for name in field_names(BenchOptions) if name != "peers"}
    words |= {name: tuple(words[name]) for name in ("modes", "budgets", "compile") if words[name] is not None}
    words |= {"dtype": parse_dtype("--dtype", args.dtype), "peers": not args.no_peers}
    if args.input_shape is not None:
        words["input_shape"] = parse_shape("--input-shape", args.input_shape)
    return BenchOptions(**words)
