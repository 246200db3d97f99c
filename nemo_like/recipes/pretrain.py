"""Train a decoder on text, byte by byte: ``python -m nemo_like.recipes.pretrain``, or the same under torchrun.

    torchrun --nproc-per-node 2 -m nemo_like.recipes.pretrain --steps 200

The same options give the same run on any number of ranks, up to the order of sums: the batch size is that of all ranks
together, and weights and data order depend on the seed alone. A run resumed on the same number of ranks repeats the
uninterrupted one to the bit where the device's kernels are deterministic, as they are on a CPU.
"""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from nemo_like.distributed import launch
from nemo_like.extras import MissingExtraError
from nemo_like.recipes.agree import OtherRankError, Ranks
from nemo_like.recipes.job_checkpoint import CheckpointError
from nemo_like.recipes.job_options import Options, parse_options
from nemo_like.recipes.loss import DivergedError
from nemo_like.recipes.progress import memory_peak
from nemo_like.recipes.summary import summarise, write_summary
from nemo_like.recipes.trainer import Trainer

BAD_INPUT = 2
"""Exit code for options, data or checkpoints that cannot be used, and for a loss that is no longer finite."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the job; the process's exit code: 0, `BAD_INPUT`, or 128 + the signal that stopped it."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("nemo_like").setLevel(logging.INFO)
    options = parse_options(arguments)
    try:
        # An error leaves through `joined`, which then waits for no other rank, and is reported outside of it.
        with joined(options) as ranks:
            return train(options, ranks)
    except (ValueError, MissingExtraError, CheckpointError, DivergedError, OtherRankError) as error:
        print(f"[rank {launch.rank()}] error: {error}", file=sys.stderr, flush=True)
        return BAD_INPUT
    except KeyboardInterrupt:
        print(f"[rank {launch.rank()}] interrupted outside of training", file=sys.stderr, flush=True)
        return 128 + signal.SIGINT


def train(options: Options, ranks: Ranks) -> int:
    """Build and run one job on ranks that have joined already."""
    trainer = Trainer(options, ranks)
    trainer.run()
    peaks = ranks.gather(memory_peak(ranks.device))
    if options.json is not None and ranks.rank == 0:
        write_summary(options.json, summarise(trainer, peaks))
    return 128 + trainer.interrupted if trainer.interrupted else 0


@contextmanager
def joined(options: Options) -> Iterator[Ranks]:
    """This process's `Ranks`, with the process group where a launcher started more than one rank."""
    device = launch.init_distributed(None if options.device == "auto" else options.device)
    world_size, rank = launch.world_size(), launch.rank()
    try:
        sizes = {"--pp": options.pp, "--tp": options.tp, "--cp": options.cp}
        sizes["--pp times --cp times --tp"] = options.pp * options.cp * options.tp
        for name, size in sizes.items():
            if world_size % size:
                raise ValueError(f"{name} is {size}, which does not divide the {world_size} rank(s).")
        control = dist.new_group(backend="gloo") if world_size > 1 else None
        yield Ranks(rank, world_size, device, options.tp, options.cp, options.pp, control)
    finally:
        launch.shutdown()


if __name__ == "__main__":
    sys.exit(record(main)())  # torchrun then shows the first failing rank's traceback in its own summary
