"""Buffers that a module changes while it runs: recomputation starts from their values before forward, and changes
nothing.

Delayed FP8 scaling appends to an amax history, batch norm moves its running statistics: with a plain recomputation such
buffers are updated twice, and the second pass may compute with other scales than the first (TransformerEngine#1190).
"""

import contextlib

import torch
from torch import Tensor, nn

from nemo_like.activation_checkpointing.engine.handles import RegionError
from nemo_like.activation_checkpointing.engine.module_state import ModuleState, Own
from nemo_like.activation_checkpointing.engine.random_state import Learned
from nemo_like.torch_compat import is_fake, sparse_parts, version_of

# Bytes up to which a buffer is copied before every forward. State that forward changes is small, as a rule (amax
# histories, running statistics); large buffers (masks, position tables) hardly ever change.
_SMALL = 1 << 16


def copied_in_forward(module: nn.Module) -> int:
    """Return the bytes that a region of `module` copies before every forward, and drops after it if they did not change."""
    buffers = (table[name] for table, name in ModuleState(module).buffers())
    return sum(size for b in buffers if isinstance(b, Tensor) and (size := _bytes(b)) <= _SMALL)


class BufferSnapshot:
    """The buffers that a module changes in its forward, as they were before it.

    The first forward of a module (once for training, once for evaluation mode) copies all its buffers and compares.
    Later ones copy the small buffers and those that were seen to change, and drop the copies of buffers that did not
    change, by identity and version. Modules without buffers, as most transformer layers are, cost nothing.
    """

    __slots__ = ("_before", "_copies", "_first", "_learned")

    def __init__(self, state: ModuleState, learned: Learned) -> None:
        self._learned, self._first = learned, learned.changing is None
        self._before: list[tuple[Own, str, Tensor, int | None, Tensor | None]] = []
        copies: dict[int, Tensor] = {}  # of a buffer that has two names, one
        for table, name in state.buffers():
            buffer = table[name]
            if isinstance(buffer, Tensor):
                changes = self._first or (id(table), name) in (learned.changing or ())
                if id(buffer) not in copies and (changes or _bytes(buffer) <= _SMALL):
                    copies[id(buffer)] = buffer.detach().clone().requires_grad_(buffer.requires_grad)
                self._before.append((table, name, buffer, version_of(buffer), copies.get(id(buffer))))
        self._copies: list[tuple[Own, str, Tensor]] = []

    def forward_done(self) -> bool:
        """Call after forward. Returns whether there is state to put back for recomputation.

        Raises RegionError for a large buffer that changes for the first time after forwards that left it alone.
        Recomputation has no copy of it to start from.
        """
        changing = self._learned.changing = self._learned.changing or set()
        for table, name, buffer, version, copy in self._before:
            now = table.get(name)
            changed = (id(table), name) in changing or now is not buffer or version_of(buffer) != version
            # Writes through `.data` count no version, the values tell; once only, because the host waits for the device.
            changed = changed or (self._first and copy is not None and _differs(now, copy))
            if not changed:
                continue
            changing.add((id(table), name))
            if copy is None and version_of(buffer) != version:
                raise RegionError(
                    f"Buffer {name!r}, of {_bytes(buffer)} bytes, was changed in place inside a checkpointed region, "
                    "and earlier forwards had left it alone, so no copy was made to recompute from. Run this step again "
                    "(the buffer is copied from now on), or change the buffer outside of the layer."
                )
            saved = buffer.detach().requires_grad_(buffer.requires_grad) if copy is None else copy
            self._copies.append((table, name, saved))
        self._before = []
        return bool(self._copies)

    def puts_back(self, owner: dict[str, Tensor | None], name: str) -> bool:
        """Return whether the recomputation gets a copy of this buffer as it was before forward."""
        return any(known is owner and at == name for known, at, _ in self._copies)

    def restore(self, stack: contextlib.ExitStack) -> None:
        """Give the module copies of its earlier buffers to change; when `stack` ends, the present ones are back."""
        clones = {id(copy): copy.clone() for _, _, copy in self._copies}
        for owner, name, copy in self._copies:
            stack.callback(owner.__setitem__, name, owner.get(name))
            owner[name] = clones[id(copy)]


def _parts(tensor: Tensor) -> list[Tensor]:
    return [tensor] if tensor.layout is torch.strided else sparse_parts(tensor)


def _bytes(tensor: Tensor) -> int:
    return tensor.nbytes if tensor.layout is torch.strided else sum(part.nbytes for part in sparse_parts(tensor))


def _differs(now: Tensor | None, before: Tensor) -> bool:
    if now is None or now.shape != before.shape or now.layout != before.layout:
        return True
    if is_fake(now):
        return False
    ours, theirs = _parts(now), _parts(before)
    return len(ours) != len(theirs) or not all(map(torch.equal, ours, theirs))
