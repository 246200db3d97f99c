"""The peak of a whole training step on one rank, and what it is made of.

A step is walked through layer by layer. What is alive at each point is the sum of: parameters, gradients and optimizer
state as they are sharded; what FSDP2 has gathered, fetched ahead or is reducing; what the layers hold between their
forward and backward; and what the running layer, or the stretch between two layers, needs while it runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from nemo_like.options import OffloadConfig
from nemo_like.options.words import write_bytes
from nemo_like.planning.block_memory import BlockMemory
from nemo_like.planning.communication import Communication, StepPoint, StepWalk
from nemo_like.planning.microbatch import Microbatch
from nemo_like.planning.outer import OuterMemory, Stretch
from nemo_like.planning.parts import STAYING, Part
from nemo_like.planning.sharding import Sharding, UnitBytes


@dataclass(frozen=True)
class LayerMemory:
    """One layer call under one choice."""

    held: int
    """Between forward and backward, inputs included where it holds them."""
    inputs: int
    """Those inputs."""
    memory: BlockMemory
    unit: UnitBytes | None
    """Its FSDP2 unit; None where it belongs to the root."""
    moved: int = 0
    """Of `held`, what waits in host memory."""
    grads: int = 0
    """Whole gradients of its parameters; used where they are freed while it runs (`Microbatch.frees`)."""
    experts: UnitBytes | None = None
    """The unit of its experts, inside; None where they are not split."""
    copied: int = 0
    """What its region copies of its buffers while forward runs."""
    copies: tuple[int, ...] = ()
    """What `moved` is made of, in the order in which it is copied out."""


@dataclass(frozen=True)
class Peak:
    """A predicted peak."""

    parts: Mapping[str, int]
    """Bytes by what they are, at the peak."""
    at: str
    """Where in the step."""
    held: int
    """Alive when the model's forward has ended, its output among it, beyond what stays from step to step (`STAYING`);
    bytes."""

    @property
    def total(self) -> int:
        """The peak, bytes."""
        return sum(self.parts.values())

    @property
    def words(self) -> str:
        """Where it is, and the four largest parts: ``"optimizer step: parameters 1.00GiB, ..."``."""
        largest = sorted(self.parts.items(), key=lambda part: -part[1])[:4]
        return f"{self.at}: " + ", ".join(f"{name} {write_bytes(size)}" for name, size in largest)


def step_peak(
    layers: Sequence[LayerMemory], outer: OuterMemory, sharding: Sharding, *, optimizer: tuple[int, int],
    tail_grads: int, root_grads: int, micro: Microbatch = Microbatch(),  # noqa: B008 - frozen
    offload: OffloadConfig = OffloadConfig("none"),
    averaged: int = 0, remembered: int = 0, copies_at_once: bool = False, log: list[StepPoint] | None = None,
) -> Peak:  # fmt: skip
    """Walk through forward and backward of one microbatch and the optimizer step, and return the highest point.

    Args:
        layers: the layer calls in the order in which they run.
        outer: the model around them.
        sharding: units and prefetch depths.
        optimizer: bytes of state, and of the step's temporaries.
        tail_grads, root_grads: whole gradients of the tail's and the root's parameters on one rank, where `outer` has
            them among what is alive.
        micro: which gradients are there already, and what becomes of those that are made.
        offload: how much of what moves to the host is on the device at one time.
        averaged: bytes of the copy of the parameters that the loop averages.
        remembered: bytes that functions of the model keep from step to step.
        copies_at_once: a copy to the host has ended when the next operator runs, as on the CPU; else any may still be on
            its way.
        log: gets every stretch of the step, in order.
    """
    walk = StepWalk(log=log)
    now = walk.now
    outer = outer.counted_once([layer.inputs for layer in layers])
    now[Part.PARAMETERS], now[Part.OPTIMIZER_STATE] = sharding.params, optimizer[0]
    now[Part.GRADIENTS], now[Part.AVERAGED_WEIGHTS] = micro.gradients, averaged
    now[Part.REMEMBERED_TABLES] = remembered
    now[Part.KEPT_OUTPUT] = outer.kept  # the microbatch's before
    comm = Communication(walk, sharding, [layer.unit for layer in layers], micro)
    comm.start()
    walk_forward(walk, comm, layers, outer, offload, copies_at_once=copies_at_once)
    now[Part.KEPT_OUTPUT] = 0  # the output before is gone, and this one is among what is outside of layers
    held = sum(now.values()) - sum(now[part] for part in STAYING)
    now[Part.KEPT_OUTPUT] = outer.kept
    walk_backward(walk, comm, layers, outer, offload, tail_grads, copies_at_once=copies_at_once)
    comm.finish(root_grads)
    now[Part.OUTSIDE_OF_LAYERS] = 0
    walk.phase = "optimizer"
    walk.look("optimizer step", {Part.OPTIMIZER_STEP: optimizer[1]})
    return Peak({part: value for part, value in walk.best.items() if value}, walk.best_at, held)


def walk_forward(
    walk: StepWalk, comm: Communication, layers: Sequence[LayerMemory], outer: OuterMemory, offload: OffloadConfig,
    *, copies_at_once: bool = False,
) -> None:  # fmt: skip
    """One microbatch's forward. At its end, what the layers hold and what is outside of them is among what is alive."""
    now, walk.phase = walk.now, "forward"
    for i, layer in enumerate(layers):
        _stretch(walk, outer.forward[i], f"before layer {i}, forward")
        comm.before_forward(i)
        now[Part.OUTSIDE_OF_LAYERS] = outer.forward[i].left
        comm.before_experts(layer.experts)
        walk.look(f"forward of layer {i}", {Part.RUNNING_LAYER: layer.memory.forward_peak + layer.copied})
        comm.after_experts(layer.experts)
        now[Part.HELD_ACTIVATIONS] = held_bytes(layers[: i + 1], None if copies_at_once else offload)
        walk.upto = i + 1
        comm.after_forward(i)
    comm.before_tail()
    _stretch(walk, outer.head, "forward of the head")
    comm.after_model()


def walk_backward(
    walk: StepWalk, comm: Communication, layers: Sequence[LayerMemory], outer: OuterMemory, offload: OffloadConfig,
    tail_grads: int, *, after_last_layer: int = 0, copies_at_once: bool = False,
) -> None:  # fmt: skip
    """Its backward, with ``"kept output"`` as the caller has set it.

    `tail_grads`: gradients of the tail's parameters. `after_last_layer`: bytes to add to ``"receive buffers"`` once the
    last layer has gone through.
    """
    now, walk.phase = walk.now, "backward"
    now[Part.OUTSIDE_OF_LAYERS] -= outer.kept
    _stretch(walk, _less(outer.loss, outer.kept), "loss")
    holding = [replace(layer, held=0, moved=0) if i in outer.dropped else layer for i, layer in enumerate(layers)]
    bound = None if copies_at_once else offload
    now[Part.HELD_ACTIVATIONS] = held_bytes(holding, bound)
    walk.upto = len(layers)
    if outer.in_chunks:
        comm.before_tail_backward()
    _stretch(walk, _less(outer.middle, outer.kept), "backward of the head")
    comm.after_tail_backward(tail_grads)
    now[Part.OUTSIDE_OF_LAYERS] -= tail_grads  # reduced, or among the gradients
    for i in reversed(range(len(layers))):
        layer, stretch = layers[i], _less(_backward_stretch(outer, len(layers), i), outer.kept)
        waiting = [holding[j] for j in range(len(layers)) if j < i or j in outer.idle]
        walk.upto = i
        after = outer.tail if i == 0 else outer.backward[len(layers) - 1 - i]
        if i in outer.idle:
            now[Part.HELD_ACTIVATIONS] = held_bytes(waiting, bound)
            now[Part.RECEIVE_BUFFERS] += after_last_layer if i == len(layers) - 1 else 0
            _stretch(walk, _less(after, tail_grads + outer.kept), f"after layer {i}")
            continue
        comm.before_backward(i)  # what the layer holds is there still
        now[Part.HELD_ACTIVATIONS] = held_bytes(waiting, bound)
        if copies_at_once:
            now[Part.HELD_ACTIVATIONS] += _fetched_ahead(layers, i, offload)
        now[Part.OUTSIDE_OF_LAYERS] = stretch.left - tail_grads - layer.memory.output_grad
        gathered = comm.gathered_in_backward(layer.experts)
        walk.look(
            f"backward of layer {i}",
            {Part.RUNNING_LAYER: layer.memory.backward_peak + layer.inputs, Part.GATHERED_LAYERS: gathered},
        )
        now[Part.RUNNING_LAYER] = layer.memory.param_grad + layer.memory.input_grad
        grads = layer.memory.param_grad
        if layer.experts is not None:
            whole = layer.experts.whole_grad
            comm.reduce_experts(layer.experts, whole)
            now[Part.RUNNING_LAYER] -= whole
            grads -= whole
        comm.after_backward(i, grads, layer.grads)
        now[Part.RUNNING_LAYER] = 0
        if i == len(layers) - 1:
            now[Part.RECEIVE_BUFFERS] += after_last_layer
        _stretch(walk, _less(after, tail_grads + outer.kept), f"after layer {i}, backward")


def held_bytes(layers: Sequence[LayerMemory], offload: OffloadConfig | None) -> int:
    """What these layers hold on the device while the next one runs.

    `offload`: the copies on their way out, or those that backward fetches ahead, are there still or again. The bound is
    that of many steps: one may be faster. None: none is.
    """
    moved = [layer.moved for layer in layers]
    stays = sum(layer.held for layer in layers) - sum(moved)
    if offload is None:
        return stays
    ahead = sum(moved[max(0, len(moved) - offload.prefetch) :])
    return stays + max(ahead, min(sum(moved), offload.max_inflight_bytes))


def _fetched_ahead(layers: Sequence[LayerMemory], i: int, offload: OffloadConfig) -> int:
    """What comes back for the layers before `i` while its backward runs: it begins when that one fetches its own, with
    what was copied out last, and no other copy begins once there are `OffloadConfig.max_inflight_bytes`."""
    found = 0
    if layers[i].moved:
        for layer in reversed(layers[max(0, i - offload.prefetch) : i]):
            for size in reversed(layer.copies):
                found += size if found < offload.max_inflight_bytes else 0
    return found


def _stretch(walk: StepWalk, stretch: Stretch, where: str) -> None:
    walk.now[Part.OUTSIDE_OF_LAYERS] = 0
    walk.look(where, {Part.OUTSIDE_OF_LAYERS: stretch.peak})
    walk.now[Part.OUTSIDE_OF_LAYERS] = stretch.left


def _less(stretch: Stretch, size: int) -> Stretch:
    return Stretch(stretch.peak - size, stretch.left - size)


def _backward_stretch(outer: OuterMemory, count: int, i: int) -> Stretch:
    return outer.middle if i == count - 1 else outer.backward[count - 2 - i]
