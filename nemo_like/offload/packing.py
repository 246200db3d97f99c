"""Decide where one saved tensor goes: to the host, or left where it is, and why."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from nemo_like._util.log import warn_once
from nemo_like._util.words import a_or_an
from nemo_like.offload.backends import Backend, default_backend
from nemo_like.offload.copies import OffloadStats
from nemo_like.offload.handles import (
    ChosenHandle,
    Handle,
    InPlaceGuard,
    KeptHandle,
    SubclassHandle,
    is_wrapper_subclass,
    move_plain,
    take_apart,
)
from nemo_like.offload.mover import Mover
from nemo_like.offload.pool import HostPool
from nemo_like.options import OffloadConfig
from nemo_like.torch_compat import base_of, left_to_python, version_of

LAST_LAYER = "where backward starts (the last layer, or what is left out, and what follows)"
NOT_ASKED = "not a layer's input"


class Packer:
    """Turns saved tensors into handles and back. `Offloader` decides when; this class decides which, and counts."""

    def __init__(
        self,
        config: OffloadConfig,
        *,
        backend: Backend | None = None,
        use_streams: bool = True,
        max_inflight_copies: int | None = None,
    ) -> None:
        """
        Args:
            config: the limits.
            backend: where and how bytes move; None: the accelerator's, else the copying one.
            use_streams: copy while computing.
            max_inflight_copies: see `Mover`.
        """
        self.config = config
        self.stats = OffloadStats()
        self._backend = backend
        self._use_streams = use_streams
        self._max_inflight_copies = max_inflight_copies
        self._mover: Mover | None = None
        self._known = KnownStorages()
        self._inputs: dict[int, torch.UntypedStorage] | None = None
        """The storages that may move; None: any."""
        self._resting = False
        """True: backward will start with what is saved now."""
        self._chosen: weakref.ref[ChosenHandle] | None = None

    @left_to_python
    def pack(self, tensor: torch.Tensor) -> Handle:
        """A handle that replaces `tensor` in the graph: on the host where it may go there, else as it is.

        Raises:
            RuntimeError: the tensor cannot be moved and the configuration has ``on_unsupported="raise"``.
        """
        with torch.no_grad():
            self.start_chosen()
            return self._pack(tensor)

    def to_host(self, tensor: torch.Tensor) -> ChosenHandle:
        """As `pack`, for an operator's output that an engine chose (the engine's `Transfer`)."""
        with torch.no_grad():
            self.start_chosen()
            if self._resting:
                return ChosenHandle(tensor, partial(self._keep, reason=LAST_LAYER))
            handle = ChosenHandle(tensor, partial(self._move_any, version=version_of(tensor), guarded=False))
            self._chosen = weakref.ref(handle)
            return handle

    def start_chosen(self) -> None:
        """Move what was last chosen, if it is still wanted."""
        chosen = self._chosen() if self._chosen is not None else None
        self._chosen = None
        if chosen is not None:
            chosen.start()

    def prefetch(self, handle: Any) -> None:
        """Start the way back of a tensor that `to_host` took."""
        handle.prefetch()

    def before_change(self, handle: Any) -> None:
        """The tensor that `to_host` took is about to be changed in place: what was taken stays as it is."""
        with torch.no_grad():
            handle.before_change()

    @staticmethod
    @left_to_python
    def unpack(handle: Handle) -> torch.Tensor:
        """The tensor that `handle` replaces."""
        return handle.get()

    def _pack(self, tensor: torch.Tensor) -> Handle:
        if torch.compiler.is_compiling():
            return KeptHandle(tensor)
        tensor = _resolved(tensor)
        if self._resting:
            return self._keep(tensor, LAST_LAYER)
        if is_parameter(tensor):
            return self._keep(tensor, PARAMETER)
        if is_autocast_copy(tensor, self._known):
            return self._keep(tensor, AUTOCAST)
        if not self._is_asked_for(tensor):
            return self._keep(tensor, NOT_ASKED)
        return self._move_any(tensor, version_of(tensor), guarded=True)

    def _move_any(self, tensor: torch.Tensor, version: object, *, guarded: bool) -> Handle:
        if is_wrapper_subclass(tensor):
            return self._move_subclass(tensor, (version,), guarded)
        return self._move(tensor, (version,), guarded)

    def _move_subclass(self, tensor: torch.Tensor, version: tuple[Any, ...], guarded: bool) -> Handle:
        """Move what a wrapper subclass is made of, and keep how to put it together again.

        An operator that changes it in place need not show in its inner tensors' versions: the outer ones count too.
        """
        parts, context = take_apart(tensor)
        inner: dict[str, Any] = {}
        for name, value in parts.items():
            if not isinstance(value, torch.Tensor):
                inner[name] = value
                continue
            value = _resolved(value)
            if is_wrapper_subclass(value):
                inner[name] = self._move_subclass(value, (*version, version_of(value)), False)
            else:
                inner[name] = self._move(value, (*version, version_of(value)), False)
        handles = frozenset(name for name, value in parts.items() if isinstance(value, torch.Tensor))
        if all(isinstance(inner[name], KeptHandle) for name in handles):
            return KeptHandle(tensor)
        guard = InPlaceGuard(tensor) if guarded else None
        return SubclassHandle(type(tensor), context, inner, handles, tensor.shape, tensor.stride(), guard)

    def _move(self, tensor: torch.Tensor, version: tuple[Any, ...], guarded: bool) -> Handle:
        """A handle for a plain tensor: on the host, or where it is (counted, with the reason)."""
        problem = unsupported(tensor)
        if problem is not None:
            if self.config.on_unsupported == "raise":
                raise RuntimeError(  # a TypeError inside an operator's method (`@`) would be taken for "not mine"
                    f"Offloading cannot move a saved tensor of shape {list(tensor.shape)}: {problem}. "
                    "Use OffloadConfig(on_unsupported='keep') to leave such tensors on the device."
                )
            warn_once(f"Offloading leaves a saved tensor on the device: {problem}.", key=f"offload-keeps-{problem}")
            return self._keep(tensor, f"unsupported: {problem}")
        mover = self._mover_for(tensor)
        if tensor.numel() == 0:
            return self._keep(tensor, EMPTY)
        if not mover.backend.serves(tensor):
            return self._keep(tensor, ON_HOST if tensor.device.type == "cpu" else f"on {tensor.device}")
        reason = self._known.reason(tensor)
        if reason is None and tensor.untyped_storage().nbytes() < self.config.min_bytes:
            reason = SMALL
        if reason is not None:
            return self._keep(tensor, reason)
        handle = move_plain(tensor, mover, InPlaceGuard(tensor) if guarded else None, version)
        if handle is None:
            assert mover.pool.refusal is not None
            warn_once(
                f"Offloading keeps tensors on the device from here on, where they do not fit: {mover.pool.refusal}.",
                key="offload-refused",
            )
            return self._keep(tensor, "refused by the host: " + mover.pool.refusal.split(" of ")[0])
        return handle

    def _keep(self, tensor: torch.Tensor, reason: str) -> KeptHandle:
        nbytes = sum(plain.untyped_storage().nbytes() for plain in plain_tensors(tensor) if has_storage(plain))
        self.stats.keep(reason, nbytes)
        return KeptHandle(tensor)

    def _is_asked_for(self, tensor: torch.Tensor) -> bool:
        return self._inputs is None or any(key in self._inputs for key in storages_in(tensor))

    def _mover_for(self, tensor: torch.Tensor) -> Mover:
        if self._mover is None:
            config = self.config
            if self._backend is None:
                self._backend = default_backend(pin_memory=config.pin_memory, use_streams=self._use_streams)
            self._mover = Mover(
                self._backend,
                HostPool(self._backend.host_memory, budget_bytes=config.host_budget_bytes),
                max_inflight_bytes=config.max_inflight_bytes,
                max_inflight_copies=self._max_inflight_copies,
                prefetch=config.prefetch,
                stats=self.stats,
            )
        return self._mover


def _resolved(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, or what a functional collective still on its way returns: its bytes are not there before."""
    return tensor.wait() if hasattr(tensor, "trigger_wait") else tensor  # type: ignore[attr-defined]


def storages_in(values: object) -> dict[int, torch.UntypedStorage]:
    """The storages of all tensors in nested tuples, lists and dicts, by id (and referenced, so that the ids stay theirs)."""
    storages: dict[int, torch.UntypedStorage] = {}
    waiting = [values]
    while waiting:
        value = waiting.pop()
        if isinstance(value, torch.Tensor):
            for plain in plain_tensors(value):
                if has_storage(plain):
                    storage = plain.untyped_storage()
                    storages[id(storage)] = storage
        elif isinstance(value, dict):
            waiting.extend(value.values())
        elif isinstance(value, Iterable) and isinstance(value, tuple | list):
            waiting.extend(value)
    return storages


# Which saved tensors stay where they are, and why.
#
# Weights are on the device anyway, so moving them costs bandwidth and frees nothing; with FSDP2 the unsharded weights of
# a whole model would go to the host. They are known by what they are (a `Parameter`, a view of one, a low-precision copy
# that autocast made of one), and by their storage where the model is known.

PARAMETER = "a parameter, or a view of one"
BUFFER = "a buffer of the model"
AUTOCAST = "autocast's copy of a weight"
ON_HOST = "on the host already"
SMALL = "smaller than min_bytes"
EMPTY = "empty"


def plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The plain tensors that `tensor` is made of: itself, or what a wrapper subclass holds, at any depth."""
    if not is_wrapper_subclass(tensor):
        yield tensor
        return
    for inner in take_apart(tensor)[0].values():
        if isinstance(inner, torch.Tensor):
            yield from plain_tensors(inner)


class KnownStorages:
    """Storages that never move, remembered without keeping them alive."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], str]] = {}
        self._shapes: dict[tuple[int, ...], set[torch.dtype]] = {}

    def learn(self, modules: Iterable[nn.Module], *, recurse: bool = True) -> None:
        """Remember the parameters and buffers that `modules` have now (FSDP2 puts others in place around a forward)."""
        for module in modules:
            for parameter in module.parameters(recurse):
                self._add(parameter, PARAMETER)
                self._shapes.setdefault(tuple(sorted(parameter.shape)), set()).add(parameter.dtype)
            for buffer in module.buffers(recurse):
                self._add(buffer, BUFFER)

    def _add(self, tensor: torch.Tensor, reason: str) -> None:
        for plain in plain_tensors(tensor):
            if has_storage(plain):
                storage = plain.untyped_storage()
                self._known[id(storage)] = (weakref.ref(storage), reason)

    def reason(self, tensor: torch.Tensor) -> str | None:
        """Why `tensor`, a plain one with a storage, must stay; None where nothing is known against it."""
        storage = tensor.untyped_storage()
        reference, reason = self._known.get(id(storage), (None, None))
        return reason if reference is not None and reference() is storage else None

    def has_weight_like(self, tensor: torch.Tensor) -> bool:
        """Return whether a known parameter has this shape, transposed or not, in another dtype; for any matrix if none
        is known."""
        if not self._shapes:
            return tensor.dim() == 2
        return bool(self._shapes.get(tuple(sorted(tensor.shape)), set()) - {tensor.dtype})


def has_storage(tensor: torch.Tensor) -> bool:
    """Return whether a plain tensor is dense, strided and has real memory."""
    return tensor.layout == torch.strided and tensor.device.type != "meta" and not tensor.is_mkldnn


def unsupported(tensor: torch.Tensor) -> str | None:
    """Why a plain tensor cannot be rebuilt from bytes; None where it can."""
    if type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer):
        return f"{a_or_an(tensor)}, which does not define how to take it apart (__tensor_flatten__)"
    if tensor.layout != torch.strided:
        return f"its layout is {tensor.layout}"
    if tensor.device.type == "meta":
        return "it has no data (meta)"
    if tensor.is_quantized:
        return "it is quantised by torch.quantize_*"
    if tensor.is_neg():
        return "it is a lazily negated view"
    return None


def is_parameter(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` is a parameter, a view of one, or another leaf that is trained."""
    base = base_of(tensor)
    return any(
        isinstance(candidate, nn.Parameter) or (candidate.is_leaf and candidate.requires_grad)
        for candidate in ((tensor,) if base is None else (tensor, base))
    )


def is_autocast_copy(tensor: torch.Tensor, known: KnownStorages) -> bool:
    """Return whether `tensor` is the low-precision copy of a weight that autocast made for one operator, or a view of
    it.

    A trained weight's copy is known by its graph: a cast, straight from a parameter. A frozen weight's copy has no
    graph, and inside an operator it is not known whether autocast is on. So a 16-bit tensor without a gradient, in the
    shape of a parameter of another dtype, is taken for one.
    """
    source = tensor if base_of(tensor) is None else base_of(tensor)
    assert source is not None
    if source.grad_fn is not None:
        cast = source.grad_fn
        if not cast.name().startswith("ToCopyBackward"):
            return False
        sources = [getattr(node, "variable", None) for node, _ in cast.next_functions]  # of AccumulateGrad: the leaf
        return any(isinstance(leaf, nn.Parameter) for leaf in sources)
    sixteen_bit = tensor.dtype in (torch.bfloat16, torch.float16)
    return sixteen_bit and not tensor.requires_grad and known.has_weight_like(source)
