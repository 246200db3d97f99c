"""When memory runs out: which options would have lowered the peak, and by how much, from the planner."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from nemo_like.models import ModelSource
from nemo_like.options import FSDP2, ChunkedLoss, OffloadConfig, Precision, parse_dtype
from nemo_like.planning.devices import device_at_hand
from nemo_like.planning.planner import Planner, Setup
from nemo_like.recipes.agree import Ranks
from nemo_like.recipes.finetune_options import FinetuneOptions
from nemo_like.recipes.tuned_model import build_on_meta

_GIB = 2**30


class MemoryRanOutError(RuntimeError):
    """A step does not fit; the message has what would lower its peak."""


@contextmanager
def advice_on_memory(source: ModelSource, options: FinetuneOptions, ranks: Ranks, width: int) -> Iterator[None]:
    """Where memory runs out inside, raise with what to change. `width`: tokens of the longest row."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        # The CPU's allocator has no error class of its own.
        if not isinstance(error, torch.OutOfMemoryError) and "DefaultCPUAllocator: can't allocate memory" not in reason:
            raise
        try:
            ways = ways_out(source, options, ranks, width)
        except (ValueError, NotImplementedError, RuntimeError) as problem:
            ways = [f"no plan can be made of this model ({problem}); try --ac full and a larger --grad-accum"]
        raise MemoryRanOutError(f"Memory ran out: {reason} What lowers the peak: {'; '.join(ways)}.") from error


def ways_out(source: ModelSource, options: FinetuneOptions, ranks: Ranks, width: int) -> list[str]:
    """Changes of options that lower the predicted peak of a rank, the largest first; then all of them together."""
    now = predicted_peak(source, options, ranks, width)
    found: dict[str, int] = {}
    changes = dict(_changes(options, ranks))
    for said, changed in changes.items():
        saved = now - predicted_peak(source, replace(options, **changed), ranks, width)
        if saved > 0:
            found[said] = saved
    ways = [f"-{_size(saved)} with {said}" for said, saved in sorted(found.items(), key=lambda item: -item[1])]
    if len(found) > 1:
        every = {name: value for said in found for name, value in changes[said].items()}
        peak = predicted_peak(source, replace(options, **every), ranks, width)
        ways.append(f"a peak of {_size(peak)} in place of {_size(now)} with all of these")
    return ways or ["a smaller --seq-len, or more ranks to shard over"]


def predicted_peak(source: ModelSource, options: FinetuneOptions, ranks: Ranks, width: int) -> int:
    """Bytes that a step of one rank peaks at: of ``--ac full``, ``selective`` or, for any other, ``none``."""
    rows = options.batch_size // (options.passes * ranks.data_ranks)
    sharded = options.strategy == "fsdp2" and ranks.world_size > 1
    setup = Setup(
        shard_ranks=ranks.data_ranks // options.dp_replicate if sharded else 1,
        step=options.step_spec,
        precision=Precision(parse_dtype("--precision", options.compute)),
        fsdp=FSDP2(cpu_offload=options.cpu_offload) if sharded else None,
        ddp=options.strategy == "ddp" and ranks.world_size > 1,
        offload=OffloadConfig.of(None if options.offload == "none" else options.offload),
        loss=ChunkedLoss.of(options.loss),
    )
    with Planner(
        build_on_meta(source, options), options.planned_input(rows, width), device=device_at_hand(), setup=setup
    ) as planner:
        mode = options.ac if options.ac in ("full", "selective") else "none"
        return int(planner.peak(planner.uniform(mode)).total)


def _changes(options: FinetuneOptions, ranks: Ranks) -> Iterator[tuple[str, dict[str, Any]]]:
    """What to write on the command line, and the same as options."""
    if options.ac != "full":
        yield "--ac full", {"ac": "full"}
    if options.loss != "chunked":
        yield "--loss chunked", {"loss": "chunked"}
    if options.batch_size % (2 * options.grad_accum * ranks.data_ranks) == 0:
        yield f"--grad-accum {2 * options.grad_accum}", {"grad_accum": 2 * options.grad_accum}
    if parse_dtype("--precision", options.compute) is torch.float32:
        yield "--precision bf16", {"precision": "bfloat16"}
    if not options.lora:
        yield "--lora", {"lora": True, "train": None}
    if options.strategy == "ddp" and ranks.world_size > 1:
        yield "--strategy fsdp2", {"strategy": "fsdp2"}


def _size(count: int) -> str:
    return f"{count / _GIB:.1f} GiB" if count >= _GIB / 10 else f"{count / 2**20:.1f} MiB"
