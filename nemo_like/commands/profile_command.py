"""`nemo-like profile`: the measured bytes and times of each layer of a model, from real runs of it."""

import argparse
import sys

from nemo_like._util.console import check_writable, refuse_unread, write_text
from nemo_like._util.table import paragraph, screen_width
from nemo_like._util.words import check_whole
from nemo_like.commands import VOCAB_SIZE
from nemo_like.options import parse_bytes, parse_dtype

EXAMPLES = (
    "--model llama-small --seq-len 256 --budget 20MB",
    "--model mymodels:build --input-shape 8,3,32,32 --device cuda",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="a preset, a config.json or its folder, or module:function")
    parser.add_argument("--batch-size", type=int, default=1, help="samples (default: 1)")
    parser.add_argument("--seq-len", type=int, default=256, help="tokens per sample (default: 256)")
    parser.add_argument("--vocab-size", type=int, help=VOCAB_SIZE)
    parser.add_argument("--input-shape", help="without tokens: the shape of the float input, such as 8,3,32,32")
    parser.add_argument("--layers", nargs="+", help="names (globs) of the layers, instead of those found")
    parser.add_argument("--device", default="cpu", help="cpu, or a CUDA device (default: cpu)")
    parser.add_argument("--dtype", default=None, help="dtype of parameters and float inputs (default: float32)")
    parser.add_argument("--runs", type=int, default=3, help="measured runs (default: 3)")
    parser.add_argument("--budget", help="also print layers to recompute for this peak, such as 2GB")
    parser.add_argument("--limit", type=int, help="print only so many of the largest layers")
    parser.add_argument("--wide", action="store_true", help="print all columns, however narrow the screen is")
    parser.add_argument("--json", metavar="PATH", help="write the whole profile here, as JSON ('-': standard output)")


def first_line(args: argparse.Namespace) -> str:
    """Return the line that is printed before torch is imported."""
    return f"Measuring {args.model} ..."


def run(args: argparse.Namespace) -> int:
    import torch

    from nemo_like._util.tensors import describe, split_sample
    from nemo_like.activation_checkpointing.kv_sharing import disable_cache
    from nemo_like.commands.plan_inputs import sample_for
    from nemo_like.distributed.launch import checked_device
    from nemo_like.models import resolve_model
    from nemo_like.profiling import MemoryProfiler, recommend

    dtype = parse_dtype("--dtype", args.dtype)
    budget = None if args.budget is None else parse_bytes(args.budget, "--budget")
    if args.limit is not None:
        check_whole("--limit", args.limit, 1)
    check_whole("--runs", args.runs, 1)
    if args.input_shape is not None:
        refuse_unread(args, ["batch_size", "seq_len", "vocab_size"], "--input-shape is the whole input.")
    check_writable("--json", args.json)
    if args.json == "-":
        refuse_unread(args, ["limit", "budget", "wide"], "--json - prints the whole profile, and nothing else.")
    checked_device(args.device)
    source = resolve_model(args.model)
    torch.manual_seed(0)
    model, source = source.built(device=args.device, dtype=dtype)
    sample = sample_for(source, args, args.device, dtype)
    disable_cache(model)  # training does not use a key-value cache; it would count as activations
    profiler = MemoryProfiler(model, args.device, layers=args.layers)
    try:
        report = profiler.profile(sample, args.runs)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, IndexError) as error:
        raise ValueError(
            f"a step of {args.model} failed on the sample input ({describe(*split_sample(sample))}): {error}. Give its "
            "input with --seq-len and --batch-size, or --input-shape."
        ) from error
    width = None if args.wide else screen_width()
    write_text(args.json, report.to_json())
    if args.json == "-":
        return 0
    last = f"Next: nemo-like bench --model {args.model}, which measures every mode."
    if budget is not None:
        names = recommend(report, budget / 1e6)
        layers = f"recompute {len(names)} of {len(report)} layers" if names else "recompute nothing"
        peak = report.unit.word(report.predict_peak_bytes(names))
        print(paragraph(f"For a peak of activations within {args.budget}: {layers}. Predicted peak: {peak}.", width))
        last = f"Paste: model = parallelize(model, ac='full', layers={names})" if names else "Paste: ac='none'"
    sys.stdout.write(f"{report.table(args.limit, width)}\n\n{paragraph(last, width)}\n")
    return 0
