"""What test_launch.py starts with torchrun: object collectives, and then one of several ways to end."""

import sys
import time

import torch
import torch.distributed as dist

from nemo_like.distributed.launch import init_distributed, shutdown


def hold_the_group() -> None:
    """Shut down with the group in somebody's hands, as DDP and FSDP2 have it, and be busy until the interpreter ends."""
    global held
    init_distributed("cpu")
    held = dist.group.WORLD
    dist.all_reduce(torch.ones(1))
    shutdown()
    sys.setswitchinterval(10)  # no other thread gets the GIL from here on
    until = time.monotonic() + 0.1
    while time.monotonic() < until:
        pass


def main(ending: str) -> None:
    if ending == "holds the group":
        hold_the_group()
        return
    init_distributed("cpu")
    try:
        for _ in range(3):
            said = ["hello" if dist.get_rank() == 0 else None]
            dist.broadcast_object_list(said, src=0)
            heard: list[object] = [None] * dist.get_world_size()
            dist.all_gather_object(heard, (dist.get_rank(), said[0]))
            assert heard == [(rank, "hello") for rank in range(dist.get_world_size())]
        if ending == "one fails" and dist.get_rank() == 1:
            raise ValueError("rank 1 has had enough")
        if ending == "one fails":
            dist.all_reduce(torch.ones(1))  # never answered
    finally:
        if ending != "forgets":
            shutdown()
    assert ending == "forgets" or not dist.is_initialized()


if __name__ == "__main__":
    main(sys.argv[1])
