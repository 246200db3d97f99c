"""What FSDP2 allocates: gathered parameters, flat buffers, reduced gradients.

After ``torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py`` and ``_fsdp_param_group.py`` (PyTorch 2.13): the flat
buffer of an all-gather and the cast copy that it reads are made on a stream of their own (``all_gather_copy_in_stream``),
the gathered parameters copied out of it on the computing stream, one by one; the input of a reduce-scatter on the computing
stream, its output, which the gradients are views of, on the stream of the reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from nemo_like.activation_checkpointing.plan import Part
from nemo_like.options import StepSpec
from nemo_like.planning.program.readers import GATHER, REDUCE, Storages
from nemo_like.planning.sharding import Sharding, UnitBytes

ROOT, TAIL = "root", "tail"


@dataclass(frozen=True)
class Pass:
    """What one micro-batch does with its gradients."""

    accumulates: bool = False
    """Autograd adds to a parameter's gradient that is there, so that a layer's new gradients are never all alive."""
    reduces: bool = True
    """FSDP2: reduces over the ranks; else each rank keeps whole gradients."""
    adds: bool = False
    """What is reduced is added to what is there."""
    frees: bool = False
    """DDP: whole gradients are there; each goes once it is in its bucket."""
    waits: bool = False
    """A second half of backward, which FSDP2 does not see: it casts these gradients in the next first half."""


def passes_of(step: StepSpec, *, sharded: bool, ddp: bool, cast: bool, first: bool) -> list[Pass]:
    """The micro-batches of a step. After the third they repeat.

    Args:
        step: how many there are, and whether gradients stay between steps.
        sharded: by FSDP2.
        ddp: gradients are views of buckets that stay, whatever `step` frees.
        cast: FSDP2 computes in another dtype than it reduces in, so that gradients are added up outside of autograd.
        first: the first step of all.
    """
    count = min(step.microbatches, 3)
    stays = step.zero_grad == "zero" and not first
    once = step.sync == "last" and count > 1
    if sharded and once:
        # Where backward ends without a reduction, whole gradients stay.
        before = [Pass(accumulates=n > 0 and not cast, reduces=False) for n in range(count - 1)]
        return [*before, Pass(accumulates=not cast, adds=stays)]
    if sharded:
        return [Pass(adds=stays or n > 0) for n in range(count)]
    if ddp and once and step.zero_grad == "free":
        # Without a reduction there is no bucket for a gradient to become a view of: both are there until the last backward.
        return [Pass(accumulates=n > 0, frees=n == count - 1) for n in range(count)]
    if ddp:
        return [Pass(accumulates=True)] * count
    return [Pass(accumulates=stays or n > 0) for n in range(count)]


class Units:
    """The collectives of FSDP2's units, and the gradients that it reduces."""

    def __init__(self, storages: Storages, sharding: Sharding) -> None:
        self.e, self.s = storages, sharding
        self.flat: dict[Hashable, int] = {}
        """Flat buffers of units that are fetched and not copied out yet."""
        self.open: dict[Hashable, list[int]] = {}
        """Gathered parameters."""
        self.kept = 0
        """The flat buffer that forward copied out last: freed after the next copy-out."""
        self.reducing = 0
        """The input of the last reduce-scatter."""
        self.summed: list[int] = []
        """What was summed over replicas, which FSDP2 holds until backward ends (`FSDPParamGroup._all_reduce_state`)."""
        self.grads: list[int] = []
        """Reduced gradients."""
        self.whole: dict[Hashable, list[int]] = {}
        """Whole gradients that wait for the last micro-batch."""

    def fetch(self, key: Hashable, unit: UnitBytes | None) -> None:
        if unit is None or key in self.flat or key in self.open:
            return
        part = _gathered(key)
        self.e.mark("gathering")
        cast = self.e.make(unit.gather_input, part, GATHER)
        self.flat[key] = self.e.make(unit.flat, part, GATHER)
        self.e.blip(self._copied_by_gloo(unit, unit.gathered), part)
        self.e.drop(cast)

    def copy_out(self, key: Hashable, unit: UnitBytes | None, *, forward: bool) -> None:
        if unit is None or key in self.open:
            return
        self.fetch(key, unit)
        self.e.mark("copying out")
        part = _gathered(key)
        self.open[key] = [self.e.make(size, part) for size in unit.each_gathered]
        self.e.blip(unit.copied, part)
        flat = self.flat.pop(key)
        if forward:
            self.let_go()  # `FSDPParamGroup.wait_for_unshard` has a name for it until it returns
            self.kept = flat
        else:
            self.e.drop(flat)

    def let_go(self) -> None:
        """Of the flat buffer that was copied out last."""
        self.e.drop(self.kept)
        self.kept = 0

    def reshard(self, key: Hashable) -> None:
        """After its forward."""
        self.e.drop_all(self.open.pop(key, ()))

    def close(self, key: Hashable) -> None:
        """After its backward."""
        self.reshard(key)

    def reduce(self, key: Hashable, unit: UnitBytes | None, grads: Sequence[int], turn: Pass) -> None:
        """`grads`: whole gradients that backward made, with one holder."""
        e = self.e
        if unit is None or not unit.reduce_input:
            e.drop_all(grads)
            return
        if not turn.reduces:
            if key in self.whole or turn.accumulates:
                e.drop_all(grads)
            else:
                self._keep_whole(key, unit, grads)
            return
        e.drop(self.reducing)
        e.mark("copying gradients")
        self.reducing = e.make(unit.reduce_input, Part.REDUCE_BUFFERS)
        grads = [*grads, *self.whole.pop(key, ())]
        held = [e.make(unit.held_in_reduce, Part.REDUCE_BUFFERS)]
        if grads and not unit.cut_last:  # `foreach_reduce` has a name for it until it returns
            held.append(e.hold(grads[-1]))
        e.drop_all(grads)
        e.mark("reducing gradients")
        out = e.make(unit.reduce_output, Part.REDUCE_BUFFERS, REDUCE)
        copy = e.make(self._copied_by_gloo(unit, unit.reduce_input), Part.REDUCE_BUFFERS)
        if self.s.replicas > 1:
            self.summed.append(e.hold(out))
        made = unit.grad or unit.host_grad
        if made != unit.reduce_output:
            cast = e.make(made, Part.GRADIENTS, REDUCE)
            e.drop(out)
            out = cast
        e.drop(copy)
        e.drop_all(held)
        if turn.adds or not unit.grad:  # or it is copied to the host
            e.drop(out)
        else:
            e.retag(out, Part.GRADIENTS)
            self.grads.append(out)

    def _keep_whole(self, key: Hashable, unit: UnitBytes, grads: Sequence[int]) -> None:
        """In the dtype of the reduction, one by one."""
        sizes = [self.e.sizes.get(grad, 0) for grad in grads]
        if sum(sizes) == unit.whole_grad:
            for grad in grads:
                self.e.retag(grad, Part.GRADIENTS)
            self.whole[key] = list(grads)
            return
        whole = self.whole[key] = []
        left = unit.whole_grad
        for grad, size in zip(grads, sizes):
            cast = min(left, size * unit.whole_grad // max(1, sum(sizes)))
            whole.append(self.e.make(cast, Part.GRADIENTS))
            left -= cast
            self.e.drop(grad)
        whole.append(self.e.make(left, Part.GRADIENTS))

    def start_with_gradients(self, sizes: Iterable[int]) -> None:
        """Reduced ones of the step before are there."""
        self.grads += [self.e.make(size, Part.GRADIENTS) for size in sizes]

    def settle(self, key: Hashable, unit: UnitBytes | None) -> None:
        """Nothing waits."""

    def close_all(self) -> None:
        """Nothing is gathered any more."""
        for key in list(self.open):
            self.close(key)
        self.e.drop_all(self.flat.values())
        self.flat.clear()

    def finish(self) -> None:
        """The last reduction has ended."""
        self.e.drop_all(self.summed)
        self.summed.clear()
        self.e.drop(self.reducing)
        self.reducing = 0

    def _copied_by_gloo(self, unit: UnitBytes, size: int) -> int:
        """What gloo receives into, or reduces."""
        return size if self.s.gloo and unit.gathered != unit.shard_gathered else 0


class GatheredOnce(Units):
    """Those of a stage of a pipeline: gathered until `end`, which reduces their gradients."""

    def __init__(self, storages: Storages, sharding: Sharding) -> None:
        super().__init__(storages, sharding)
        self.waiting: dict[Hashable, list[int]] = {}
        """Gradients of second halves of backward (`Pass.waits`)."""

    def reduce(self, key: Hashable, unit: UnitBytes | None, grads: Sequence[int], turn: Pass) -> None:
        if not turn.waits:
            waiting = self.waiting.pop(key, [])
            turn = Pass(reduces=False) if waiting else turn
            super().reduce(key, unit, [*waiting, *grads], turn)
            return
        for grad in grads:
            self.e.retag(grad, Part.GRADIENTS)
        self.waiting.setdefault(key, []).extend(grads)

    def settle(self, key: Hashable, unit: UnitBytes | None) -> None:
        """FSDP2 sees what waits."""
        if key in self.waiting:
            self.reduce(key, unit, [], Pass(reduces=False))

    def close(self, key: Hashable) -> None:
        """Not yet."""

    def close_all(self) -> None:
        """Not yet."""

    def finish(self) -> None:
        """Not yet."""

    def end(self, units: Sequence[tuple[Hashable, UnitBytes | None]], turn: Pass) -> None:
        """Gradients are reduced, unit by unit, and nothing is gathered any more."""
        for key, unit in units:
            self.settle(key, unit)
            super().close(key)
            self.reduce(key, unit, [], turn)
        super().close_all()
        super().finish()


def _gathered(key: Hashable) -> Part:
    return Part.GATHERED_ROOT if key == ROOT else Part.GATHERED_LAYERS
