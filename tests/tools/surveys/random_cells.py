"""Random programs x axes x modes on two gloo ranks, compared with the original model that each rank trains by hand.

    python -m tests.tools.surveys.random_cells --seeds 0:200 [--only KIND] [--weighted] [--json FILE]

A seed draws one cell: a program (`PLAIN` and `LIBRARY`), an axis (`AXES`), a mode (`MODES`) and options; with
``--weighted``, most have `compile`, tp or adapters. Both sides take
three AdamW steps and an evaluation; losses, gradients, weights and buffers are compared. By hand, gradients are averaged by
an all-reduce; a parameter that no rank used has no gradient and is not decayed. Verdicts: equal (bitwise), close (1e-5 of
the norm: tp, cp, ep and pp sum in other orders, clipping sums shards, DDP averages what is averaged; 3e-2 in bf16; 1e-4 and
0.15 for gradients behind a step), refused (raised in nemo_like), WRONG, DIED (raised elsewhere), HUNG (60 s), void (the
original model fails, too).
"""

from __future__ import annotations

import argparse
import json
import random
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import register_fsdp_forward_method

from nemo_like import DDP, FSDP2, ContextParallel, ExpertParallel, PipelineParallel, TensorParallel, parallelize
from tests.tools.surveys.random_programs import PLAIN
from tests.tools.surveys.random_training import batch_of, build, train
from tests_distributed.spawn import RanksTimedOutError, run_ranks

LIBRARY = dict.fromkeys(("t5", "bert", "vit", "whisper", "mamba", "gpt2", "clip"), ())
LIBRARY |= dict.fromkeys(("lora", "llama", "qwen3", "gemma3_text"), ("tp", "cp", "pp"))
LIBRARY |= {"gpt2": ("pp",), "qwen3_moe": ("ep", "tp", "cp"), "mixtral": ("ep", "tp")}
AXES = ("fsdp2", "fsdp2", "keep", "free", "hsdp", "ddp")
MODES = ("none", "full", "full", "selective", "selective", "submodule", "sequential", "60%")
CLASSES = {
    "decoders of transformers, LoRA": ("llama", "qwen3", "gemma3_text", "gpt2", "lora"),
    "other models of transformers": ("t5", "bert", "vit", "whisper", "clip"),
    "experts": ("qwen3_moe", "mixtral", "experts", "routed"),
    "recurrent and state-space": ("mamba", "recurrent", "state_space", "memory"),
    "layers hand lists, dicts or tuples on": (
        *("uvit", "dict_state", "list_outputs", "tuples", "dict_output", "conditioned"),
    ),
    "state on modules, set inside or from outside": (
        *("auxiliary", "batch_norm", "running_mean", "attribute", "outside_tensor", "hooks"),
    ),
    "random numbers": ("dropout", "noise"),
    "ranks use different parts": ("heads", "languages", "tower", "vision", "layer_drop"),
    "several passes, losses or calls in a step": (
        *("gan", "two_losses", "two_forwards", "looped", "shared_block", "method"),
    ),
    "marked, tied, frozen or normed parameters": ("tied", "marks", "thaw", "frozen_half", "weight_norm"),
}
"""Kinds by what is hard about them; any other kind is a plain model."""
VERDICTS = ("equal", "close", "refused", "WRONG", "DIED", "HUNG", "void")
WEIGHTED = ("lora", "lora", "lora", "llama", "qwen3", "gemma3_text", "gpt2", "qwen3_moe")
NO_DDP = (
    "method",
    "thaw",
)  # DDP averages what goes through its forward, and parameters that required gradients at first
ROUTED = ("qwen3_moe", "mixtral", "experts", "routed")


def drawn(seed: int, weighted: bool = False) -> dict[str, Any]:
    """Return the cell of `seed`."""
    draw, kinds = random.Random(seed), [*PLAIN, *LIBRARY]
    kind = kinds[seed % len(kinds)]
    kind = draw.choice(WEIGHTED) if weighted and draw.random() < 0.7 else kind
    own = LIBRARY.get(kind, ())
    own = ("tp", "tp", *own) if weighted and "tp" in own else own
    axis = draw.choice(own) if own and draw.random() < 0.6 else draw.choice(AXES[: -1 if kind in NO_DDP else None])
    cell = {"seed": seed, "kind": kind, "axis": axis, "ac": draw.choice(MODES), "accumulate": draw.choice((1, 1, 2))}
    cell |= {"sync": draw.choice(("every", "last")), "prefetch": (draw.randrange(3), draw.randrange(3))}
    cell |= {"variant": draw.randrange(3) if axis in ("tp", "cp", "ep", "pp") else 0}
    rare = {"late": 0.3, "between": 0.3, "clip": 0.2, "bf16": 0.12, "cpu_offload": 0.1, "boundary": 0.1, "extra": 0.3}
    cell |= {name: draw.random() < share for name, share in rare.items()}
    whole = axis in ("tp", "cp", "pp")
    cell["bf16"] &= not whole and axis != "ep" and kind not in (*ROUTED, "method")  # routing would flip
    cell["cpu_offload"] &= axis != "ddp" and not whole
    cell["accumulate"] = 1 if axis == "pp" else cell["accumulate"]
    # A hook inside of a compiled layer is called again in recomputation: docs/how-to/hooks.md.
    cell["compile"] = "aot_eager" if weighted and draw.random() < 0.6 and kind != "hooks" else None
    return cell


def compare(expected: list[Any], actual: list[Any], cell: dict[str, Any]) -> tuple[bool, list[str]]:
    """Return whether all is bitwise equal, and what differs by more than the tolerance."""
    exact, wrong = True, [] if len(expected) == len(actual) else [f"{len(actual)} records, not {len(expected)}"]
    floor = 0.3 if cell["bf16"] else 1e-2
    for (what, wanted), (_, given) in zip(expected, actual):
        first, later = (3e-2, 0.15) if cell["bf16"] else (1e-5, 1e-4)
        tolerance = later if what in ("gradient 1", "gradient 2") else first
        if not isinstance(wanted, dict):
            wanted, given = {"": wanted}, {"": given}
        names = wanted.keys() & given.keys() if cell["axis"] == "pp" else wanted.keys() | given.keys()
        scale = max([v.float().norm().item() for v in wanted.values() if v is not None], default=0.0) * floor
        for name in sorted(names):
            a, b = wanted.get(name), given.get(name)
            if a is None or b is None or a.shape != b.shape:
                tell = lambda t: "None" if t is None else f"{tuple(t.shape)}, norm {t.float().norm():.3g}"  # noqa: E731
                wrong += [] if a is b else [f"{what} {name}: {tell(b)}, not {tell(a)}"]
            elif not torch.equal(a, b.to(a.dtype)):
                exact, error = False, (a.float() - b.float()).norm().item() / max(a.float().norm().item(), scale, 1e-12)
                wrong += [f"{what} {name}: off by {error:.2g}"] if not error <= tolerance else []
    return exact, wrong


def run_cell(rank: int, world_size: int, cell: dict[str, Any]) -> tuple[bool, list[str]]:
    """Train both on one rank. An exception says whether nemo_like raised it."""
    stage = "void"
    try:
        expected = train(build(cell), cell, rank, bare=True)
        stage, axis, (ahead, back) = "parallelize", cell["axis"], cell["prefetch"]
        reshard = {"keep": False, "free": True}.get(axis)
        strategy: Any = FSDP2(reshard, ahead, back, cell["cpu_offload"])
        strategy = DDP(find_unused_parameters=True) if axis == "ddp" else strategy
        other, sample = cell["variant"], batch_of(cell, 0, 0, 0)
        more: dict[str, Any] = {
            "tp": {"tp": TensorParallel(2, sequence_parallel=other == 1)},
            "cp": {"cp": ContextParallel(2, method=("all_gather", "ulysses", "ring")[other])},
            "ep": {"ep": ExpertParallel(2)},
            "pp": {"pp": PipelineParallel(2, schedule=("1f1b", "gpipe")[other % 2], microbatches=2)},
            "hsdp": {"dp_replicate": 2},
        }.get(axis, {})
        sample = {k: v[:2] for k, v in sample.items()} if axis == "pp" else sample
        more |= {"compile": cell["compile"]} if cell["compile"] else {}
        more |= {"precision": "bf16"} if cell["bf16"] else {}
        more |= {"offload": "boundary"} if cell["boundary"] and cell["ac"] != "none" else {}
        more |= {"sample_input": sample} if axis == "pp" or "%" in cell["ac"] else {}
        model = parallelize(build(cell), strategy=strategy, ac=cell["ac"], device="cpu", **more)
        if cell["kind"] == "method" and axis != "ddp":
            register_fsdp_forward_method(model, "score")
        stage = "training"
        return compare(expected, train(model, cell, rank, bare=False), cell)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        verdict = "void" if stage == "void" else "refused" if "/nemo_like/" in frames[-1].filename else "DIED"
        path = " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in frames[::-1][:6])
        raise RuntimeError(f"{verdict}: in {stage}: {type(error).__name__}: {error} [{path}]") from error


def verdict_of(cell: dict[str, Any]) -> tuple[str, str]:
    """Run `cell` on two ranks; the verdict and what to know about it."""
    try:
        ranks = run_ranks(2, run_cell, cell, timeout=60)
    except RanksTimedOutError as error:
        return "HUNG", "\n".join([str(error), *getattr(error, "__notes__", [])])
    except Exception as error:  # noqa: BLE001  (it is the finding)
        return (str(error).split(":")[0] if ": in " in str(error) else "DIED"), str(error)
    wrong = [f"rank {rank}: {text}" for rank, (_, texts) in enumerate(ranks) for text in texts]
    return ("WRONG" if wrong else "equal" if all(same for same, _ in ranks) else "close"), "; ".join(wrong[:6])


def main() -> None:
    parser = argparse.ArgumentParser(description="Random programs on two ranks, compared with the original model.")
    parser.add_argument("--seeds", default="0:200", help="FIRST:END, or numbers with commas")
    parser.add_argument("--only", help="a kind of program")
    parser.add_argument("--weighted", action="store_true", help="most cells with compile, tp or adapters")
    parser.add_argument("--json", type=Path, help="write a line per cell")
    args = parser.parse_args()
    seeds = range(*map(int, args.seeds.split(":"))) if ":" in args.seeds else map(int, args.seeds.split(","))
    counts: dict[str, Counter[str]] = {}
    start = time.monotonic()
    for cell in (drawn(seed, args.weighted) for seed in seeds):
        if args.only not in (None, cell["kind"]):
            continue
        began = time.monotonic()
        verdict, text = verdict_of(cell)
        where = next((name for name, kinds in CLASSES.items() if cell["kind"] in kinds), "plain layers")
        for row in (where, f"axis `{cell['axis']}`", f"mode `{cell['ac']}`", "all"):
            counts.setdefault(row, Counter())[verdict] += 1
        flags = " ".join(f"{k}={v}" for k, v in cell.items() if v and k not in ("seed", "kind", "axis", "ac"))
        line = f"{cell['seed']:4} {verdict:8} {cell['kind']} {cell['axis']} {cell['ac']} {flags}"
        print(
            f"{line} ({time.monotonic() - began:.1f} s) {text[:600] if verdict not in ('equal', 'close') else ''}",
            flush=True,
        )
        if args.json:
            with args.json.open("a") as file:
                file.write(json.dumps({**cell, "verdict": verdict, "text": text}) + "\n")
    print("| programs | cells |", " | ".join(VERDICTS), "|\n|---|---|" + "---|" * len(VERDICTS))
    for row in (*CLASSES, "plain layers", *sorted(name for name in counts if "`" in name), "all"):
        count = counts.pop(row, Counter())
        if count:
            print(f"| {row} | {count.total()} |", " | ".join(str(count[verdict] or "") for verdict in VERDICTS), "|")
    print(f"{time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    from tests.tools.surveys.random_cells import main as run  # ranks find `run_cell` by its module's name

    run()
