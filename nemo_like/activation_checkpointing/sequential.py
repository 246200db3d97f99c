"""Regions that span several calls: a segment of consecutive layers, or a chunk of the calls of one cell.

`torch.utils.checkpoint.checkpoint_sequential` needs a module that is a plain chain. A transformer's layers are called
one by one by the model's own loop, each with masks and position tables. So the members of a segment record their
calls here, and the first tensor that backward uses recomputes all of them in order: an argument that *is* an earlier
output of the segment is recomputed, any other tensor is saved. Each member is called with FSDP2's hooks in the
recomputation, so that members which are sharded one by one gather their parameters.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from nemo_like._util.log import warn_once
from nemo_like._util.named_containers import named_containers
from nemo_like._util.words import a_or_an
from nemo_like.activation_checkpointing.checkpointed import Checkpointed
from nemo_like.activation_checkpointing.engine.containers import map_leaves, refill
from nemo_like.activation_checkpointing.engine.global_state import Surroundings
from nemo_like.activation_checkpointing.engine.inputs import SavedInputs
from nemo_like.activation_checkpointing.engine.module_state import modules_in
from nemo_like.activation_checkpointing.engine.region import Region
from nemo_like.torch_compat import left_to_python, only_fsdp_hooks


class Segment:
    """Members that are called in order; from the first to the last of them is one region."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._open: weakref.ref[_SegmentRegion] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Without the region that may be open: it belongs to this segment's graph, not to a copy's."""
        return self.__dict__ | {"_open": None}

    def call(self, member: SegmentMember, position: int, args: object, kwargs: object) -> Any:
        """Run one member's call as part of the region that is open, or of a new one that begins with its first member."""
        region = self._open() if self._open is not None else None
        if region is None or region.complete or not self.continues(region, position, args, kwargs):
            if region is not None:
                region.end()
            region = _SegmentRegion(member)
            self._open = weakref.ref(region)
        out = region.record(member, position, args, kwargs)
        if self.is_full(region):
            region.end()
        return out

    def continues(self, region: _SegmentRegion, position: int, args: object, kwargs: object) -> bool:
        """Return whether this call belongs to the region: its member comes after those that the region has."""
        return position > region.position_of_last

    def is_full(self, region: _SegmentRegion) -> bool:
        """Return whether the region has had its last call."""
        return region.position_of_last == self._size - 1


class Chunk(Segment):
    """One cell that is called again and again; every `size` calls that pass on their state are one region."""

    def continues(self, region: _SegmentRegion, position: int, args: object, kwargs: object) -> bool:
        return region.hands_on(args) or region.hands_on(kwargs)

    def is_full(self, region: _SegmentRegion) -> bool:
        return len(region.calls) == self._size


class SegmentMember(Checkpointed):
    """A layer in a `Segment`: its call is recorded, and the segment recomputes it."""

    word = "sequential"

    def __init__(self, module: nn.Module, segment: Segment, position: int, **how: Any) -> None:
        """Prepare. `how`: as for `Checkpointed`."""
        super().__init__(module, **how)
        self._segment, self._position, self._again = segment, position, False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward as a part of the segment's region; as a region of its own if a whole model is compiled."""
        if torch.compiler.is_compiling():
            return super().__call__(*args, **kwargs)
        if self._again or not torch.is_grad_enabled() or self._saves_nothing(args, kwargs):
            return self.call(*args, **kwargs)
        self._refuse_cache(args, kwargs)
        return self._segment.call(self, self._position, args, kwargs)

    def again(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module for the recomputation: with FSDP2's hooks, which gather its parameters, and no other ones."""
        self._again = True
        try:
            with only_fsdp_hooks(self.module):
                return self.module(*args, **kwargs)
        finally:
            self._again = False


class _Earlier:
    """Takes the place of an argument that is output tensor `index` of call `call` of the same segment."""

    __slots__ = ("call", "index")

    def __init__(self, call: int, index: int) -> None:
        self.call = call
        self.index = index


class _Call:
    """One member's call: how to make it again."""

    def __init__(self, member: SegmentMember, args: Any, kwargs: Any) -> None:
        self.member, self.module = member, member.module  # which the member itself refers to weakly
        self.requires_grad = [tensor.requires_grad for tensor in _tensors((args, kwargs))]
        # Detached (the version counter stays shared): an argument that was made from an earlier output of this very
        # segment would otherwise close a cycle from the graph through the region back to the graph.
        self.inputs = SavedInputs(*_map(Tensor.detach, (args, kwargs)))
        self.surroundings = Surroundings(self.module, member.preserve_rng_state)
        self.packs = 0  # The number of tensors that autograd had saved in the region at the end of the call.

    def keep_containers(self, stack: contextlib.ExitStack) -> None:
        """Put containers that the member's code shares with others back into the state of now, when `stack` ends."""
        for container in named_containers(map(type, modules_in(self.module))):
            stack.callback(refill, container, copy.copy(container))


class _CallsAgain:
    """The function of the region: every call once more, in order."""

    region: weakref.ref[_SegmentRegion]  # Weakly, because the region holds this.

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls: list[_Call] = []
        self.index = -1

    def __call__(self) -> None:
        region = self.region()
        assert region is not None  # which runs this
        outputs: list[list[Tensor]] = []
        for index, call in enumerate(self.calls):
            self.index = index
            args, kwargs = call.inputs.get(self.name)
            flags = iter(call.requires_grad)
            fresh = _map(lambda tensor: tensor.detach().requires_grad_(next(flags)), (args, kwargs))  # noqa: B023
            args, kwargs = _map(lambda mark: outputs[mark.call][mark.index], fresh, _Earlier)
            with contextlib.ExitStack() as region.tail:
                call.surroundings.restore(region.tail, region)
                with call.surroundings.looker():
                    outputs.append(_tensors(call.surroundings.run(self.name, call.member.again, *args, **kwargs)))


class _SegmentRegion(Region):
    """A region whose forward comes in several calls. Saves the tensors that enter from outside, and the outputs that
    its policy chooses."""

    def __init__(self, first: SegmentMember) -> None:
        self._again = _CallsAgain(first.name)
        super().__init__(
            self._again, first.policy, first.name, first.transfer, True, first.preserve_rng_state, first.module
        )
        self._again.region = weakref.ref(self)
        self.calls = self._again.calls
        self.inputs = SavedInputs((), {})
        self.surroundings = Surroundings(None, False)  # each call has its own
        self.position_of_last = -1
        self.tail = contextlib.ExitStack()  # Ends with the call that is recomputed.
        # id of a tensor that a call returned → itself (weakly), its version then, and which it is.
        self._outputs: dict[int, tuple[weakref.ref[Tensor], int, _Earlier]] = {}
        # Tensors in objects that came in from outside, which the first call's arguments hold.
        self._entered: set[int] = set()

    def check_again(self) -> None:
        for call in self.calls:
            call.surroundings.check_again(self.name)

    def stop_unless_waited_for(self) -> None:
        """Stop early in the last call only: a layer that FSDP gathered for its recomputation must get to its end."""
        if self._again.index == len(self.calls) - 1:
            super().stop_unless_waited_for()

    @left_to_python
    def repack(self, tensor: Tensor) -> int:
        index = super().repack(tensor)
        call = self.calls[self._again.index]
        # Other regions stop here, so the operators from here on run once, in forward.
        if index == call.packs - 1:
            call.keep_containers(self.tail)
        return index

    def hands_on(self, value: object) -> bool:
        return any(self._earlier(tensor) is not None for tensor in _tensors(value))

    @left_to_python
    def record(self, member: SegmentMember, position: int, args: Any, kwargs: Any) -> Any:
        """Make one call, with autograd keeping handles in the place of tensors."""
        marked_args, marked_kwargs = map_leaves(self._marked, (args, kwargs))
        call = _Call(member, marked_args, marked_kwargs)
        self.position_of_last = position
        self.calls.append(call)  # now, and not at its end: the member may take a gradient itself, which recomputes
        try:
            around = call.surroundings.in_forward(self, self.forward_mode, None)
            with saved_tensors_hooks(self.pack, self.unpack), around:
                out = member.call(*args, **kwargs)
        except BaseException:
            self.drop()
            self.complete = True
            raise
        if self.verification is not None:
            self.verification.forward_done()
        call.packs = len(self.handles)
        copied = call.surroundings.forward_done()
        # After each call, and not at the end alone, which may never come: a saved output keeps its graph, and that keeps
        # the region.
        self.cut_kept()
        # Recomputation runs with copies of changed buffers, whose versions start again.
        self.watch_versions = self.watch_versions and not copied and not self.keeps_on_host()
        for index, tensor in enumerate(_tensors(out)):
            self._outputs[id(tensor)] = (weakref.ref(tensor), tensor._version, _Earlier(len(self.calls) - 1, index))
        return out

    def _marked(self, leaf: object) -> Any:
        """Return a mark for an argument that is an output of the region, else the argument itself."""
        if isinstance(leaf, Tensor):
            return self._earlier(leaf) or leaf
        inside = [v for v in getattr(leaf, "__dict__", {}).values() if isinstance(v, Tensor) and v.grad_fn is not None]
        if not self.calls:
            self._entered.update(map(id, inside))
        elif not self._entered.issuperset(map(id, inside)):
            warn_once(
                f"Layers hand {a_or_an(leaf)} on that holds an output of an earlier layer of the same segment: "
                "where no backward follows a forward, its memory is never freed. Make it a dataclass, pass the tensor "
                "itself, use ac='full', or run such forwards under torch.no_grad()."
            )
        return leaf

    def end(self) -> None:
        """No call comes any more: forget the outputs that no recomputation can reach."""
        if self.complete:
            return
        if self.forward_mode is not None:
            self.forward_mode.finish()
        self.drop_unreachable()
        self.forward_mode = None
        self.complete = True

    def _earlier(self, tensor: Tensor) -> _Earlier | None:
        """Return which output of the region `tensor` is; None if it is not one, or was changed in place since."""
        reference, version, mark = self._outputs.get(id(tensor), (None, None, None))
        return mark if reference is not None and reference() is tensor and version == tensor._version else None


def _map(function: Callable[[Any], Any], value: object, kind: type = Tensor) -> Any:
    return map_leaves(lambda leaf: function(leaf) if isinstance(leaf, kind) else leaf, value)


def _tensors(value: object) -> list[Tensor]:
    tensors: list[Tensor] = []
    _map(tensors.append, value)
    return tensors
