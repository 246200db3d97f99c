"""Train a decoder on text, byte by byte: ``python -m nemo_like.recipes.pretrain``, or the same under torchrun.

    torchrun --nproc-per-node 2 -m nemo_like.recipes.pretrain --steps 200

The same options give the same run on any number of ranks, up to the order of sums: the batch size is that of all ranks
together, and weights and data order depend on the seed alone. A run resumed on the same number of ranks repeats the
uninterrupted one to the bit where the device's kernels are deterministic, as they are on a CPU.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.errors import record

from nemo_like.recipes.agree import Ranks
from nemo_like.recipes.job_options import Options, parse_options
from nemo_like.recipes.run_job import run_job, run_on_ranks
from nemo_like.recipes.trainer import Trainer


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the job; the process's exit code, see `run_on_ranks`."""
    return run_on_ranks(parse_options(arguments), train)


def train(options: Options, ranks: Ranks) -> int:
    """Build and run one job on ranks that have joined already, and write its result where that was asked for."""
    return run_job(Trainer(options, ranks))


if __name__ == "__main__":
    sys.exit(record(main)())  # torchrun then shows the first failing rank's traceback in its own summary
