"""Agreement between the ranks of one job: who failed, and the sum of the numbers that each computed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist

from nemo_like.distributed import launch


class OtherRankError(RuntimeError):
    """Another rank raised, not this one: that rank's message has the reason."""


@dataclass(frozen=True)
class Ranks:
    """This process's place in the job. Every method is a collective: all ranks call it in the same order."""

    rank: int  # From 0 to `world_size` - 1.
    world_size: int
    device: torch.device  # Device that this rank computes on.
    tp: int = 1  # Ranks that share each layer's matmuls, and so read the same samples; neighbours in rank.
    cp: int = 1  # Groups of `tp` that share each sequence, and so read the same samples, too.
    pp: int = 1  # Ranks that hold a pipeline's stages, and so read the same samples; furthest apart in rank.
    # A group of all ranks over CPU tensors, so that agreeing never waits for the accelerator; None with one rank.
    control: dist.ProcessGroup | None = None

    @classmethod
    def of_process(cls, device: torch.device, tp: int = 1, cp: int = 1, pp: int = 1) -> Self:
        """This process's ranks, after `nemo_like.distributed.init_distributed`."""
        control = dist.new_group(backend="gloo") if launch.world_size() > 1 else None
        return cls(launch.rank(), launch.world_size(), device, tp, cp, pp, control)

    @property
    def data_rank(self) -> int:
        """Return the number of the share of each batch that this rank reads."""
        return self.rank % (self.world_size // self.pp) // (self.tp * self.cp)

    @property
    def tp_group(self) -> int:
        """Return the number of this rank's group of `tp`: ranks of one group compute the same, and drop the same."""
        return self.rank // self.tp

    @property
    def data_ranks(self) -> int:
        """Return the number of shares that a batch is cut into."""
        return self.world_size // (self.tp * self.cp * self.pp)

    @contextmanager
    def together(self, doing: str) -> Iterator[None]:
        """Run the block on every rank; where it raises on any rank, raise on all of them, so that none waits forever.

        The block itself must not call a collective that could hang because another rank raised before it.

        Raises:
            OtherRankError: the block raised on another rank; on the rank itself its own error goes on.
        """
        try:
            yield
        except Exception:
            self.any(True)
            raise
        if self.any(False):
            raise OtherRankError(f"Another rank failed while {doing}; its own message has the reason.")

    def any(self, flag: bool) -> bool:
        """Return whether `flag` is true on any rank."""
        return self.largest(int(flag)) > 0

    def largest(self, value: int) -> int:
        """The largest of the ranks' values."""
        return self.largest_later(value)()

    def largest_later(self, value: int) -> Callable[[], int]:
        """A function that returns the largest of the ranks' values: who calls it later does not wait for the others."""
        if self.control is None:
            return lambda: value
        tensor = torch.tensor(value)
        work: Any = dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.control, async_op=True)

        def result() -> int:
            work.wait()
            return int(tensor)

        return result

    def from_first(self, value: Any) -> Any:
        """Rank 0's value, which can be pickled."""
        values = [value]
        if self.control is not None:
            dist.broadcast_object_list(values, 0, group=self.control)
        return values[0]

    def gather(self, value: int) -> list[int]:
        """Every rank's value, in order."""
        tensor = torch.zeros(self.world_size, dtype=torch.int64)
        tensor[self.rank] = value
        return self.sum(tensor).tolist()

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, on the CPU, same shape and dtype."""
        values = values.detach().cpu()
        if self.control is not None:
            dist.all_reduce(values, group=self.control)
        return values
