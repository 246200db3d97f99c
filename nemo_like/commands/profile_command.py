"""`nemo-like profile`: the measured bytes and times of each layer of a model, or of training modes side by side."""

import argparse
import contextlib
import re
from typing import Any

from nemo_like._util.console import refuse_unread
from nemo_like._util.table import paragraph, screen_width
from nemo_like.commands import VOCAB_SIZE, WIDE, print_report
from nemo_like.options import parse_bytes, parse_dtype

EXAMPLES = (
    "--model llama-small --seq-len 256 --budget 20MB",
    "--model mymodels:build --input-shape 8,3,32,32 --device cuda",
    "--model llama-small --modes",
    "--model llama-small --modes full,50%,selective+offload=saved,torch-selective --json modes.json",
)
MODES = "full,selective,submodule,sequential,50%,none+loss=chunked,torch-full,torch-selective"


OPTIONS: dict[str, dict[str, Any]] = {
    "--model": {"required": True, "help": "a preset, a config.json or its folder, or module:function"},
    "--batch-size": {"type": int, "least": 1, "default": 1, "help": "samples per step and rank (default: 1)"},
    "--seq-len": {"type": int, "least": 1, "default": 256, "help": "tokens per sample (default: 256)"},
    "--vocab-size": {"type": int, "least": 1, "help": VOCAB_SIZE},
    "--input-shape": {"help": "without tokens: the shape of the float input, such as 8,3,32,32"},
    "--layers": {"nargs": "+", "help": "names (globs) of the layers, instead of those found"},
    "--device": {"help": "cpu, or a CUDA device (default: this rank's GPU if there is one)"},
    "--dtype": {"help": "dtype of parameters and float inputs (default: float32)"},
    "--modes": {
        "nargs": "?",
        "const": MODES,
        "help": "compare modes with none, instead of layers: words of ac= with commas between them, with +keyword=word of "
        f"parallelize behind one, and PyTorch's own (without words: {MODES.replace('%', '%%')})",
    },
    "--strategy": {
        "group": "parallelism",
        "choices": ("single", "fsdp2", "ddp"),
        "default": "single",
        "help": "of --modes",
    },
    "--runs": {"type": int, "least": 1, "default": 3, "help": "measured steps, of each mode (default: 3)"},
    "--budget": {"help": "also print layers to recompute for this peak, such as 2GB"},
    "--wide": WIDE,
    "--json": {"metavar": "PATH", "help": "write everything here, as JSON ('-': standard output)"},
}


def first_line(args: argparse.Namespace) -> str:
    """Return the line that is printed before torch is imported."""
    return f"Measuring {args.model} ..."


def run(args: argparse.Namespace) -> int:
    """Measure; of the ranks that a launcher started, the first one prints."""
    import torch

    from nemo_like._util.tensors import describe, split_sample
    from nemo_like.activation_checkpointing.kv_sharing import disable_cache
    from nemo_like.commands.plan_inputs import sample_for
    from nemo_like.comparison import compare, keywords_of
    from nemo_like.distributed.launch import checked_device, init_distributed, local_device, rank, shutdown, world_size
    from nemo_like.job import Job
    from nemo_like.models import resolve_model
    from nemo_like.profiling import MemoryProfiler

    dtype = parse_dtype("--dtype", args.dtype)
    budget = None if args.budget is None else parse_bytes(args.budget, "--budget")
    modes = [] if args.modes is None else re.split(r",(?![^\[{]*[\]}])", args.modes)  # not within lists of names
    for unread, names, why in (
        (args.input_shape is not None, ["batch_size", "seq_len", "vocab_size"], "--input-shape is the whole input."),
        (args.json == "-", ["budget", "wide"], "--json - prints everything, and nothing else."),
        (not modes, ["strategy"], "layers are measured on one device."),
        (modes, ["layers", "budget"], "--modes measures whole steps."),
    ):
        if unread:
            refuse_unread(args, names, why)
    for mode in modes:
        Job.of(args.strategy, **keywords_of(mode))
    device = local_device() if args.device is None else checked_device(args.device)
    with contextlib.ExitStack() as stack:
        if modes and world_size() > 1:
            device = init_distributed(device.type)
            stack.callback(shutdown)
        source = resolve_model(args.model)
        torch.manual_seed(0)
        model, source = source.built(device=device, dtype=dtype)
        sample = sample_for(source, args, str(device), dtype)
        disable_cache(model)  # training does not use a key-value cache; it would count as activations
        step = describe(*split_sample(sample))
        width = None if args.wide else screen_width()
        try:
            if not modes:
                profiler = MemoryProfiler(model, device, layers=args.layers)
                report = profiler.profile(sample, args.runs)
                to_json, text = report.to_json, report.table(width)
            else:
                compared = compare(model, sample, modes, device, args.strategy, args.runs)
                compared.about.update(model=args.model, step=step)
                to_json, text = compared.to_json, compared.text(width)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError, IndexError) as error:
            raise ValueError(
                f"a step of {args.model} failed on the sample input ({step}): {error}. Give its input with --seq-len and "
                "--batch-size, or --input-shape."
            ) from error
        if rank() == 0:
            print_report(args, text, to_json)
            if budget is not None:
                names = profiler.recommend_layers(budget / 1e6)
                peak = report.unit.word(report.predict_peak_bytes(names))
                call = f"model = parallelize(model, ac='full', layers={names})" if names else "ac='none'"
                words = (
                    f"For a peak of activations within {args.budget}: recompute {len(names)} of {len(report)} layers. "
                    f"Predicted: {peak}. Paste: {call}"
                )
                print(f"\n{paragraph(words, width)}")
    return 0
