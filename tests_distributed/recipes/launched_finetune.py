"""Start `nemo-like finetune` with accelerate's FSDP2 on CPUs, where accelerate offers it on accelerators alone.

The kind of job that accelerate has found is renamed before it chooses how to shard; all else is its own code.
"""

import sys
from typing import Any

from accelerate.state import AcceleratorState, DistributedType, PartialState

from nemo_like.recipes import finetune


def main() -> int:
    """Run the job; its exit code."""
    make = finetune._arguments

    def renamed(*given: Any) -> Any:
        AcceleratorState._reset_state()
        arguments = make(*given)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        return arguments

    finetune._arguments = renamed
    return finetune.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
