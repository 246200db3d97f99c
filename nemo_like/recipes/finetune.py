"""Fine-tune a Hugging Face model: ``python -m nemo_like.recipes.finetune``, or the same under torchrun.

    torchrun --nproc-per-node 2 -m nemo_like.recipes.finetune --model DIR --data FILE.jsonl --lora

The same options give the same run on any number of ranks, up to the order of sums. docs/how-to/fine-tune.md tells the whole.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.errors import record

from nemo_like.recipes.agree import Ranks
from nemo_like.recipes.finetune_options import FinetuneOptions, parse_finetune_options
from nemo_like.recipes.finetuner import FineTuner
from nemo_like.recipes.run_job import run_job, run_on_ranks


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the job; the process's exit code, see `run_on_ranks`."""
    return run_on_ranks(parse_finetune_options(arguments), tune)


def tune(options: FinetuneOptions, ranks: Ranks) -> int:
    """Build and run one job on ranks that have joined already, and write its result."""
    return run_job(FineTuner(options, ranks))


if __name__ == "__main__":
    sys.exit(record(main)())  # torchrun then shows the first failing rank's traceback in its own summary
