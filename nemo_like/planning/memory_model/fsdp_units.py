"""Allocations of FSDP2: gathered parameters, flat buffers, reduced gradients.

The rules follow ``torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py`` and ``_fsdp_param_group.py`` (PyTorch 2.13).
The flat buffer of an all-gather and the cast copy that it reads are made on a stream of their own
(``all_gather_copy_in_stream``). The gathered parameters are copied out of it on the computing stream, one by one. The input
of a reduce-scatter is made on the computing stream. Its output, which the gradients are views of, is made on the stream of
the reduce-scatter.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from nemo_like.activation_checkpointing.plan import Part
from nemo_like.options import StepSpec
from nemo_like.options.optimizers import UpdateInBackward
from nemo_like.planning.memory_model.storages import GATHER, REDUCE, Storages
from nemo_like.planning.sharding import Sharding, UnitBytes

ROOT, TAIL, EMBEDDING = "root", "tail", "embedding"


@dataclass(frozen=True)
class GradientRule:
    """Rule by which one micro-batch treats its gradients."""

    # Autograd adds to a parameter's existing gradient, or steps with it, so that a layer's new gradients are never
    # all alive.
    accumulates: bool | UpdateInBackward = False
    reduces: bool = True  # FSDP2 reduces over the ranks; else each rank keeps whole gradients.
    adds: bool | UpdateInBackward = False  # Reduced gradients are added to existing ones, or stepped with.
    frees: bool = False  # Under DDP, whole gradients exist; each is freed once it is in its bucket.
    # Gradients of a second half of backward, which FSDP2 does not see: it casts them in the next first half.
    waits: bool = False


def rules_of(
    step: StepSpec, *, sharded: bool, views: bool, cast: bool, first: bool, device: str = "cpu"
) -> list[GradientRule]:
    """Return the rules of the micro-batches of a step. After the third they repeat.

    Args:
        step: how many micro-batches there are, and whether gradients stay between steps.
        sharded: parameters are sharded by FSDP2.
        views: gradients are views of DDP's buckets, which stay, whatever `step` frees.
        cast: FSDP2 computes in another dtype than it reduces in, so that gradients are added up outside of autograd.
        first: the first step of all.
        device: the kind of device that parameters are on.
    """
    if step.in_backward:
        update = UpdateInBackward(step.optimizer, device)
        return [GradientRule(adds=update) if sharded else GradientRule(accumulates=update)]
    count = min(step.microbatches, 3)
    stays = step.zero_grad == "zero" and not first
    once = step.sync == "last" and count > 1
    if sharded and once:
        # Where backward ends without a reduction, whole gradients stay.
        before = [GradientRule(accumulates=n > 0 and not cast, reduces=False) for n in range(count - 1)]
        return [*before, GradientRule(accumulates=not cast, adds=stays)]
    if sharded:
        return [GradientRule(adds=stays or n > 0) for n in range(count)]
    if views and once and step.zero_grad == "free":
        # Without a reduction there is no bucket for a gradient to become a view of: both are there until the last backward.
        return [GradientRule(accumulates=n > 0, frees=n == count - 1) for n in range(count)]
    if views:
        return [GradientRule(accumulates=True)] * count
    return [GradientRule(accumulates=stays or n > 0) for n in range(count)]


class FsdpBuffers:
    """Buffers that the collectives of FSDP2's units make and free, and the gradients that they reduce."""

    def __init__(self, storages: Storages, sharding: Sharding) -> None:
        self.storages, self.sharding = storages, sharding
        self.flat: dict[Hashable, int] = {}  # Flat buffers of units that are gathered and not copied out yet.
        self.gathered: dict[Hashable, list[int]] = {}
        # Parts of resharded parameters that wait for backward, where fewer ranks share them till then.
        self.kept: dict[Hashable, list[int]] = {}
        self.last_flat = 0  # The flat buffer that forward copied out last: freed after the next copy-out.
        self.reducing = 0  # The input of the last reduce-scatter.
        # Gradients that were summed over replicas.
        # FSDP2 has references to them until backward ends (`FSDPParamGroup._all_reduce_state`).
        self.summed: list[int] = []
        self.grads: list[int] = []  # Reduced gradients.
        # Whole gradients that wait for the last micro-batch.
        self.whole_grads: dict[Hashable, list[int]] = {}

    def gather(self, key: Hashable, unit: UnitBytes | None) -> None:
        if unit is None or key in self.flat or key in self.gathered:
            return
        part = _gathered(key)
        self.storages.mark("gathering")
        # Parts that wait are of the dtype to compute in, and are copied all the same where shards are cast.
        copied = sum(unit.each_kept) if unit.gather_input and not unit.host_shard else 0
        cast = self.storages.make(copied if key in self.kept else unit.gather_input, part, GATHER)
        self.flat[key] = self.storages.make(unit.flat, part, GATHER)
        self.storages.make_and_drop(self._copied_by_gloo(unit, unit.gathered), part)
        self.storages.drop(cast)

    def copy_out(self, key: Hashable, unit: UnitBytes | None, *, forward: bool) -> None:
        if unit is None or key in self.gathered:
            return
        self.gather(key, unit)
        self.storages.mark("copying out")
        part = _gathered(key)
        self.gathered[key] = [self.storages.make(size, part) for size in unit.each_gathered]
        self.storages.make_and_drop(unit.copied, part)
        self.storages.drop_all(self.kept.pop(key, ()))
        flat = self.flat.pop(key)
        if forward:
            self.drop_flat()  # `FSDPParamGroup.wait_for_unshard` has a name for it until it returns
            self.last_flat = flat
        else:
            self.storages.drop(flat)

    def drop_flat(self) -> None:
        """Free the flat buffer that was copied out last."""
        self.storages.drop(self.last_flat)
        self.last_flat = 0

    def reshard(self, key: Hashable, unit: UnitBytes | None = None) -> None:
        """Free a unit's parameters after its forward, but for the bytes of each that it keeps till backward."""
        gathered = self.gathered.pop(key, ())
        if unit is None or not unit.each_kept:
            self.storages.drop_all(gathered)
            return
        parts = self.kept[key] = []
        for storage, size in zip(gathered, unit.each_kept):
            parts.append(self.storages.make(size, _gathered(key)))
            self.storages.drop(storage)

    def close(self, key: Hashable) -> None:
        """Free a unit's parameters after its backward."""
        self.reshard(key)

    def reduce(self, key: Hashable, unit: UnitBytes | None, grads: Sequence[int], rule: GradientRule) -> None:
        """Reduce the gradients of a unit.

        `grads`: whole gradients that backward made, with one holder.
        """
        storages = self.storages
        if unit is None or not unit.reduce_input:
            storages.drop_all(grads)
            return
        if not rule.reduces:
            if key in self.whole_grads or rule.accumulates:
                storages.drop_all(grads)
            else:
                self._keep_whole(key, unit, grads)
            return
        storages.drop(self.reducing)
        storages.mark("copying gradients")
        self.reducing = storages.make(unit.reduce_input, Part.REDUCE_BUFFERS)
        grads = [*grads, *self.whole_grads.pop(key, ())]
        buffers = [storages.make(unit.held_in_reduce, Part.REDUCE_BUFFERS)]
        if grads and not unit.cut_last:  # `foreach_reduce` has a name for it until it returns
            buffers.append(storages.hold(grads[-1]))
        storages.drop_all(grads)
        storages.mark("reducing gradients")
        out = storages.make(unit.reduce_output, Part.REDUCE_BUFFERS, REDUCE)
        copy = storages.make(self._copied_by_gloo(unit, unit.reduce_input), Part.REDUCE_BUFFERS)
        if self.sharding.replicas > 1:
            self.summed.append(storages.hold(out))
        result_bytes = unit.grad or unit.host_grad
        if result_bytes != unit.reduce_output:
            cast = storages.make(result_bytes, Part.GRADIENTS, REDUCE)
            storages.drop(out)
            out = cast
        storages.drop(copy)
        if isinstance(rule.adds, UpdateInBackward):  # `foreach_reduce` calls the hooks
            for param in unit.trained:
                storages.make_and_drop(rule.adds.temporaries(param), Part.OPTIMIZER_STEP, REDUCE)
        storages.drop_all(buffers)
        if rule.adds or not unit.grad:  # or it is copied to the host
            storages.drop(out)
        else:
            storages.relabel(out, Part.GRADIENTS)
            self.grads.append(out)

    def _keep_whole(self, key: Hashable, unit: UnitBytes, grads: Sequence[int]) -> None:
        """Keep whole gradients, in the dtype of the reduction, one by one."""
        sizes = [self.storages.sizes.get(grad, 0) for grad in grads]
        if sum(sizes) == unit.whole_grad:
            for grad in grads:
                self.storages.relabel(grad, Part.GRADIENTS)
            self.whole_grads[key] = list(grads)
            return
        whole = self.whole_grads[key] = []
        remaining = unit.whole_grad
        for grad, size in zip(grads, sizes):
            cast = min(remaining, size * unit.whole_grad // max(1, sum(sizes)))
            whole.append(self.storages.make(cast, Part.GRADIENTS))
            remaining -= cast
            self.storages.drop(grad)
        whole.append(self.storages.make(remaining, Part.GRADIENTS))

    def add_waiting(self, key: Hashable, unit: UnitBytes | None) -> None:
        """Add waiting gradients to those that FSDP2 reduces. Here none wait."""

    def close_all(self) -> None:
        """Free all units."""
        for key in list(self.gathered):
            self.close(key)
        for storages in (self.flat.values(), *self.kept.values()):
            self.storages.drop_all(storages)
        self.flat.clear()
        self.kept.clear()

    def finish(self) -> None:
        """Free the buffers of the last reduction."""
        self.storages.empty(self.summed)
        self.storages.drop(self.reducing)
        self.reducing = 0

    def _copied_by_gloo(self, unit: UnitBytes, size: int) -> int:
        """Return the bytes that gloo receives into, or reduces."""
        return size if self.sharding.gloo and unit.gathered != unit.shard_gathered else 0


class GatheredOnce(FsdpBuffers):
    """Buffers of a stage of a pipeline: gathered until `end`, which reduces their gradients."""

    def __init__(self, storages: Storages, sharding: Sharding) -> None:
        super().__init__(storages, sharding)
        # Gradients of second halves of backward (`GradientRule.waits`).
        self.waiting: dict[Hashable, list[int]] = {}

    def reduce(self, key: Hashable, unit: UnitBytes | None, grads: Sequence[int], rule: GradientRule) -> None:
        if not rule.waits:
            waiting = self.waiting.pop(key, [])
            rule = GradientRule(reduces=False) if waiting else rule
            super().reduce(key, unit, [*waiting, *grads], rule)
            return
        for grad in grads:
            self.storages.relabel(grad, Part.GRADIENTS)
        if grads:
            self.waiting.setdefault(key, []).extend(grads)

    def add_waiting(self, key: Hashable, unit: UnitBytes | None) -> None:
        """Let FSDP2 see the gradients that wait."""
        if key in self.waiting:
            self.reduce(key, unit, [], GradientRule(reduces=False))

    def close(self, key: Hashable) -> None:
        """Keep the unit: a stage stays gathered until `end`."""

    def close_all(self) -> None:
        """Keep all units until `end`."""

    def finish(self) -> None:
        """Reduce nothing before `end`."""

    def end(self, units: Sequence[tuple[Hashable, UnitBytes | None]], rule: GradientRule) -> None:
        """Reduce gradients, unit by unit, and free all gathered parameters."""
        for key, unit in units:
            self.add_waiting(key, unit)
            super().close(key)
            self.reduce(key, unit, [], rule)
        super().close_all()
        super().finish()


def _gathered(key: Hashable) -> Part:
    return Part.GATHERED_ROOT if key in (ROOT, EMBEDDING) else Part.GATHERED_LAYERS
