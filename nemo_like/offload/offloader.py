"""Offloading as a context manager, and put on a model's layers for good: saved tensors wait on the host.

>>> weight = torch.randn(64, 64, requires_grad=True)
>>> with offload_activations(OffloadConfig(mode="all", min_bytes=0)) as offloader:
...     loss = (weight @ weight).relu().sum()
>>> loss.backward()
>>> offloader.stats.moved_bytes
16384
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, Self

import torch
from torch import nn

from nemo_like._util.forwards import Forward, Place, is_compiled, step_of
from nemo_like._util.live_bytes import storages_of
from nemo_like._util.log import warn_once
from nemo_like._util.module_tree import check_model
from nemo_like._util.words import a_or_an
from nemo_like.activation_checkpointing.apply import apply_specs
from nemo_like.activation_checkpointing.checkpointed import is_checkpointed, regions_in
from nemo_like.activation_checkpointing.engine import is_recomputing
from nemo_like.activation_checkpointing.legacy import names_in
from nemo_like.activation_checkpointing.policy import HOST, SAVE, Decision, Policy, parts_of
from nemo_like.activation_checkpointing.spec import CheckpointSpec
from nemo_like.offload.backends import Backend
from nemo_like.offload.mover import ChosenHandle, Handle, HostCopy, Mover, OffloadStats, guard_of, kept
from nemo_like.options import OffloadConfig
from nemo_like.torch_compat import (
    OffloadWrapper,
    base_of,
    innermost_saved_tensor_hooks,
    left_to_python,
    version_of,
)

PARAMETER = "a parameter, or a view of one"
LAST_LAYER = "where backward starts (the last layer, or layers left out, and the code after them)"
PART = "less than half of its storage"


class Offloader:
    """Decides where each saved tensor waits, and counts: see `offload_activations`.

    `stats` are live. An engine's HOST decisions go through `to_host` and `before_change` (its `Transfer`).

    The arguments are those of `offload_activations`, `Backend` and `Mover`.
    """

    def __init__(
        self,
        config: OffloadConfig,
        *,
        model: nn.Module | None = None,
        layers: Sequence[nn.Module] = (),
        left_out: Sequence[nn.Module] = (),
        backend: Backend | None = None,
        use_streams: bool = True,
        max_inflight_copies: float = float("inf"),
    ) -> None:
        if model is not None:
            check_model(model)
        self.config, self.model, self.layers, self.left_out = config, model, list(layers), list(left_out)
        self._mover = Mover(backend, config, use_streams, max_inflight_copies)
        self.stats = self._mover.stats
        self._known: weakref.WeakKeyDictionary[torch.UntypedStorage, str] = weakref.WeakKeyDictionary()
        """Storages that never move, with the reason; not kept alive."""
        self._shapes: set[tuple[int, ...]] = set()
        """Sizes of known parameters of more than 16 bits."""
        self._inputs: set[torch.UntypedStorage] | None = None  # the storages that may move; None: any
        self._resting = False  # True: backward will start with tensors saved now.
        self._chosen: Callable[[], ChosenHandle | None] = lambda: None  # the tensor last chosen, if it is still wanted
        self._contexts: list[ExitStack] = []

    @left_to_python
    def pack(self, tensor: torch.Tensor) -> Handle:
        """Return a handle that replaces `tensor` in the graph: on the host where it may go there, else as it is."""
        with torch.no_grad():
            self.start_chosen()
            if torch.compiler.is_compiling():
                return kept(tensor)
            tensor = _resolved(tensor)
            reason = LAST_LAYER if self._resting else self._weight(tensor)
            if reason is None and self._inputs is not None and self._inputs.isdisjoint(storages_of(tensor)):
                reason = "not a layer's input"
            return self._keep(tensor, reason) if reason else self._move(tensor, (version_of(tensor),), guarded=True)

    @staticmethod
    @left_to_python
    def unpack(handle: Handle) -> torch.Tensor:
        """The tensor that `handle` replaces."""
        return handle.get()

    def _learn(self, module: nn.Module) -> None:
        """Remember the parameters and buffers that `module` has now (FSDP2 puts others in place around a forward)."""
        self._shapes.update(tuple(sorted(p.shape)) for p in module.parameters() if p.element_size() > 2)
        for reason, tensors in ((PARAMETER, module.parameters()), ("a buffer of the model", module.buffers())):
            self._known.update((storage, reason) for storage in storages_of(list(tensors)))

    def _weight(self, tensor: torch.Tensor) -> str | None:
        """Return the reason to stay of a parameter, of another leaf that is trained, and of a view of either; of the
        low-precision copy of a weight that autocast made for one operator, and of a view of it.

        A trained weight's copy is known by its graph: a cast, straight from a parameter. A frozen weight's copy has no
        graph, and inside an operator it is not known whether autocast is on. So a 16-bit tensor without a gradient, in
        the shape of a known parameter of more bits, is taken for one; any matrix, where no parameter is known.
        """
        base = base_of(tensor)
        source = tensor if base is None else base
        if any(isinstance(each, nn.Parameter) or (each.is_leaf and each.requires_grad) for each in (tensor, source)):
            return PARAMETER
        cast = source.grad_fn
        if cast is not None:
            leaves = (getattr(node, "variable", None) for node, _ in cast.next_functions)  # AccumulateGrad has its leaf
            copied = cast.name().startswith("ToCopyBackward") and any(isinstance(leaf, nn.Parameter) for leaf in leaves)
        else:
            like_weight = tuple(sorted(source.shape)) in self._shapes if self._known else source.dim() == 2
            copied = tensor.dtype in (torch.bfloat16, torch.float16) and not tensor.requires_grad and like_weight
        return "autocast's copy of a weight" if copied else None

    def _keep(self, tensor: torch.Tensor, reason: str) -> Handle:
        self.stats.kept_bytes[reason] += sum(storage.nbytes() for storage in storages_of(tensor))
        self.stats.kept_count[reason] += 1
        return kept(tensor)

    def _move(self, tensor: torch.Tensor, version: tuple[Any, ...], guarded: bool = False) -> Handle:
        """A handle for `tensor`, whose contents `version` tells from others of its storage (see `Mover.offload`)."""
        if not hasattr(tensor, "__tensor_flatten__"):
            return self._move_plain(tensor, version, guarded)
        # The inner tensors of a wrapper subclass move, and how to put it together again is kept. An operator that
        # changes it in place need not show in its inner tensors' versions: the outer ones count too.
        names, context = tensor.__tensor_flatten__()
        inner = {name: getattr(tensor, name) for name in names}  # tensors, and for a DTensor its mesh
        for name, value in inner.items():
            if isinstance(value, torch.Tensor):
                value = _resolved(value)
                inner[name] = self._move(value, (*version, version_of(value)))
        copies = [copy for value in inner.values() if isinstance(value, Handle) for copy in value.copies]
        if not copies:
            return kept(tensor)
        kind, shape, stride = type(tensor), tensor.shape, tensor.stride()

        def rebuilt(_: Handle) -> torch.Tensor:
            values = {name: value.get() if isinstance(value, Handle) else value for name, value in inner.items()}
            return kind.__tensor_unflatten__(values, context, shape, stride)  # type: ignore[attr-defined]

        handle = Handle(rebuilt, tensor, guard_of(tensor) if guarded else None)
        handle.copies = copies
        return handle

    def _move_plain(self, tensor: torch.Tensor, version: tuple[Any, ...], guarded: bool) -> Handle:
        """A handle for a plain tensor: on the host, or where it is (counted, with the reason)."""
        reason = self._reason_of_part(tensor, version)
        if reason is not None:
            return self._keep(tensor, reason)
        mover, dtype, conjugate = self._mover, tensor.dtype, tensor.is_conj()
        place = tensor.shape, tensor.stride(), tensor.storage_offset()

        def read(handle: Handle) -> torch.Tensor:
            data = mover.fetch(handle.copies[0], handle)
            data = data[: data.numel() - data.numel() % dtype.itemsize].view(dtype)
            # A view, not a new tensor on the storage: a write into it is then seen by the buffer's version counter.
            back = data.as_strided(*place)
            return back.conj() if conjugate else back

        handle = Handle(read, tensor, guard_of(tensor) if guarded else None)
        copy = mover.offload(tensor.untyped_storage(), version, handle)
        if isinstance(copy, HostCopy):
            handle.copies = [copy]
            return handle
        warn_once(
            f"Offloading keeps tensors on the device from here on, where they do not fit: {copy}.",
            key="offload-refused",
        )
        return self._keep(tensor, "refused by the host: " + copy.split(" of ")[0])

    def _reason_of_part(self, tensor: torch.Tensor, version: tuple[Any, ...]) -> str | None:
        if type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer):
            return f"unsupported: {a_or_an(tensor)}, which does not define how to take it apart (__tensor_flatten__)"
        if tensor.layout != torch.strided:
            return f"unsupported: its layout is {tensor.layout}"
        if tensor.is_quantized or tensor.is_neg():
            return "unsupported: it is quantised by torch.quantize_*, or a lazily negated view"
        storage = tensor.untyped_storage()
        if tensor.device != self._mover.backend.device:
            return "on the host already" if tensor.device.type == "cpu" else f"on {tensor.device}"
        if storage in self._known:
            return self._known[storage]
        if storage.nbytes() < max(1, self.config.min_bytes):
            return "smaller than min_bytes"
        return None if spans_half(tensor) or self._mover.find(storage, version) else PART

    @torch.no_grad()
    def to_host(self, tensor: torch.Tensor) -> ChosenHandle:
        """As `pack`, for an operator's output that an engine chose."""
        self.start_chosen()
        keep, version = partial(self._keep, reason=LAST_LAYER), (version_of(tensor),)
        handle = ChosenHandle(tensor, keep if self._resting else partial(self._move, version=version))
        self._chosen = weakref.ref(handle)
        return handle

    @torch.no_grad()
    def start_chosen(self) -> None:
        """Move the tensor last chosen, if it is still wanted."""
        chosen = self._chosen()
        if chosen is not None:
            chosen.start()

    @torch.no_grad()
    def before_change(self, handle: Any) -> None:
        """The tensor that `to_host` took is about to be changed in place: the taken values stay as they are."""
        handle.before_change()

    def __enter__(self) -> Self:
        stack = ExitStack()
        if self.config.mode != "none":
            self.refuse_inside_checkpointing()
            if self.model is not None:
                self._learn(self.model)
            self._resting = False
            self.leave_layer()
            for module in dict.fromkeys([*self.layers, *self.left_out, *([] if self.model is None else [self.model])]):
                stack.callback(module.register_forward_pre_hook(self._enter_module, with_kwargs=True).remove)
            if self.config.mode != "boundary":
                keep_on_host(self.layers, self, stack)
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack))
        self._contexts.append(stack)
        return self

    def __exit__(self, *error: object) -> None:
        self._contexts.pop().close()
        self.leave_layer()
        self.collect()

    def _enter_module(self, module: nn.Module, args: object, kwargs: object) -> None:
        """Be told, within the context, of a call of a layer, of a module left out, or of the model."""
        if torch.compiler.is_compiling():
            return
        if module in self.layers:
            self.enter_layer(module, args, kwargs)
        self._resting = module in self.left_out or (len(self.layers) > 1 and module is self.layers[-1])

    def enter_layer(self, layer: nn.Module, args: object, kwargs: object) -> None:
        """Assign tensors saved from here on to `layer`, which is called with these arguments."""
        self._learn(layer)
        # Outside of regions, "saved" moves more than inputs where a layer is compiled, or checkpointed in pieces: only
        # these tensors are saved then.
        kept_alone = is_compiled(layer) or (not is_checkpointed(layer) and bool(regions_in(layer)))
        everything = self.config.mode == "all" or (self.config.mode == "saved" and kept_alone)
        self._inputs = None if everything else set(storages_of((args, kwargs)))
        self._mover.open_group()

    def leave_layer(self) -> None:
        """Assign tensors saved from here on to no layer."""
        self.start_chosen()
        self._inputs = None if self.config.mode == "all" else set()

    def enclose(self, module: nn.Module) -> None:
        """Take the tensors that `module` saves from now on, and those that regions in it keep."""
        if self.config.mode != "boundary":
            keep_on_host([module], self, ExitStack())
        Offloading(module, self).put()

    def refuse_inside_checkpointing(self) -> None:
        """Raise RuntimeError where a checkpointed region is being run: its own hooks would never be called."""
        hooks = innermost_saved_tensor_hooks()
        module = getattr(hooks[0], "__module__", None) if hooks is not None else None
        if str(module).startswith(("torch.utils.checkpoint", "nemo_like.activation_checkpointing")):
            raise RuntimeError(
                "Offloading was entered inside a checkpointed region. Its hooks would take every saved tensor from the "
                "checkpointing around it, which would then recompute nothing and save no memory. Turn the two around: "
                "offload(checkpoint(module)), not checkpoint(offload(module))."
            )

    def __reduce__(self) -> Any:
        """A copy of a model gets CPU memory of its own: nothing that waits there is copied."""
        return type(self), (self.config,)

    def collect(self) -> OffloadStats:
        """Bring `stats` up to date with graphs that have died since; returns them."""
        self._mover.retire()
        return self.stats


def offload_activations(
    config: OffloadConfig | str | None = None,
    *,
    model: nn.Module | None = None,
    layers: Sequence[nn.Module] = (),
    left_out: Sequence[nn.Module] = (),
    backend: Backend | None = None,
) -> Offloader:
    """A context manager: tensors that autograd saves inside it wait on the host until backward uses them.

    Make it once and enter it each step: it has the counters, and PyTorch keeps pinned CPU memory for the next step.

    Args:
        config: an `OffloadConfig`, or its mode; None: ``"all"``.
        model: its parameters and buffers never move (without it, they are known by type and by graph).
        layers: the repeated blocks, in the order of forward. They are the unit of prefetching, and the last one's
            tensors stay, because backward starts with them. Needed for the modes ``boundary`` and ``saved``.
        left_out: modules (an output head) from whose call on nothing is moved, up to the next call of `model`: backward
            starts there.
        backend: where and how bytes move; None: the accelerator, else the copying one.

    Raises:
        TypeError: `config` is neither. ValueError: an unknown mode; ``boundary`` or ``saved`` without `layers`.

    The context is entered around forward (backward may run inside or outside) and around checkpointing. Entering it
    within a checkpointed region raises RuntimeError.
    """
    config = OffloadConfig.of(config, default="all")
    if config.mode in ("boundary", "saved") and not layers:
        raise ValueError(
            f"Offloading {config.mode!r} moves layer inputs, and was not told the layers. Pass layers=[...] "
            "(nemo_like.layers.find_layers finds them), or use offload='all'."
        )
    return Offloader(config, model=model, layers=layers, left_out=left_out, backend=backend)


def _resolved(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`; where it is the output of a functional collective still on its way, the finished output."""
    return tensor.wait() if hasattr(tensor, "trigger_wait") else tensor  # type: ignore[attr-defined]


def spans_half(tensor: torch.Tensor) -> bool:
    """Return whether a plain strided tensor reaches over half of its storage or more, from its first byte to its last.

    Below that it stays: its storage would go as a whole, and may be alive for other reasons (a batch of a data set).

    >>> table = torch.zeros(8, 4)
    >>> spans_half(table[:4]), spans_half(table[:3]), spans_half(table[:, :1])
    (True, False, True)
    """
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return bool((int(last) + 1) * tensor.element_size() * 2 >= tensor.untyped_storage().nbytes())


class HostPolicy:
    """Another policy whose kept outputs wait on the host instead of on the device."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.keeps_nothing = policy.keeps_nothing
        self.tracked_ops = policy.tracked_ops
        self.learns, self.strict = getattr(policy, "learns", False), getattr(policy, "strict", True)

    def start(self) -> Callable[..., Decision]:
        """The other policy's decisions, with HOST for SAVE."""
        decide = self.policy.start()

        parts = parts_of(decide)

        def moved(ask: Callable[..., Any]) -> Callable[..., Any]:
            def on_host(*call: Any) -> Any:
                return HOST if (decision := ask(*call)) is SAVE else decision

            return on_host

        on_host = moved(decide)
        vars(on_host).update(parts | ({"named": moved(parts["named"])} if "named" in parts else {}))
        return on_host


class HostDecisions(Offloader):
    """Moves the outputs that policies of regions decide to keep on the host, and nothing else: while the device computes,
    and back a layer ahead."""

    def enclose(self, module: nn.Module) -> None:
        """Have the outputs of a call of `module`, a layer, come back together."""
        module.register_forward_pre_hook(self._begin)
        module.register_forward_hook(self._end)

    @left_to_python
    def _begin(self, *_: object) -> None:
        if torch.is_grad_enabled():
            self._mover.open_group()

    @left_to_python
    def _end(self, *_: object) -> None:
        self.start_chosen()


def place_decisions(
    specs: Sequence[CheckpointSpec], layers: Iterable[str], *, backend: Backend | None = None
) -> list[CheckpointSpec]:
    """Return `specs`; where one has a policy with HOST decisions, with a `HostDecisions` for all, and its placements.

    Args:
        specs: the regions in these layers.
        layers: names of the layers.
        backend: see `offload_activations`.
    """
    if not any(getattr(spec.policy, "moves", False) for spec in specs):
        return list(specs)
    transfer = HostDecisions(OffloadConfig("saved", min_bytes=0), backend=backend)
    placements = [CheckpointSpec((name,), policy=None, transfer=transfer) for name in dict.fromkeys(layers)]
    return [replace(spec, transfer=transfer) for spec in specs] + placements


def keep_on_host(layers: Iterable[nn.Module], transfer: Offloader, undo: ExitStack) -> None:
    """Let the layers' regions keep their outputs on the host, until `undo` is closed."""
    for region in regions_in(*layers):
        # A compiled region keeps its tensors through autograd, where hooks around it take them.
        if not region.policy.keeps_nothing and not is_compiled(region.module):
            undo.callback(vars(region).update, policy=region.policy, transfer=region.transfer)
            region.policy, region.transfer = HostPolicy(region.policy), transfer


# Offloading put on a model's layers, for good, as `parallelize(..., offload=...)` does.


class Offloading(Forward):
    """A layer whose saved activations wait on the host: outside checkpointing and `torch.compile`, inside FSDP2's unit."""

    place, word = Place.OFFLOADING, "offloaded"

    def __init__(self, module: nn.Module, offloader: Offloader) -> None:
        check_model(module, "module")
        super().__init__(module)
        self.offloader = offloader

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward; where gradients are on, saved tensors go through the offloader."""
        # A segment of layers calls the module again: there nothing is saved for backward.
        if not torch.is_grad_enabled() or torch.compiler.is_compiling() or is_recomputing():
            return self.call(*args, **kwargs)
        self.offloader.refuse_inside_checkpointing()
        self.offloader.enter_layer(self.module, args, kwargs)
        try:
            with torch.autograd.graph.saved_tensors_hooks(self.offloader.pack, self.offloader.unpack):
                return self.call(*args, **kwargs)
        finally:
            self.offloader.leave_layer()


def apply_offloading(
    model: nn.Module,
    layers: Sequence[nn.Module],
    config: OffloadConfig | str | None = None,
    *,
    backend: Backend | None = None,
) -> Offloader:
    """Make the tensors that `layers` save for backward wait on the host. Changes `model` in place.

    Call it after activation checkpointing and compilation, and before sharding. Of several layers the last one is left
    alone: backward starts with it. Tensors saved outside of layers (embedding, head, loss) are never moved.

    Args:
        model: holds the layers.
        layers: in the order of forward; checkpointed or not, compiled or not.
        config: an `OffloadConfig`, or its mode: ``boundary`` moves the layers' inputs, ``saved`` these and the outputs
            that checkpointing keeps inside, ``all`` everything; None: ``saved``.
        backend: see `offload_activations`.

    Returns:
        the offloader of all layers; its ``stats`` are live.

    Raises:
        TypeError, ValueError: a bad config; a layer that is not in the model, or has offloading already; ``saved``
            where nothing is checkpointed. Nothing has been changed then.
    """
    offloader = Offloader(OffloadConfig.of(config, default="saved"), backend=backend)
    names = names_in(model, layers)
    if offloader.config.mode == "none":
        return offloader
    if not layers:
        raise ValueError("apply_offloading was given no layers; nemo_like.layers.find_layers(model) finds them.")
    if any(isinstance(m, OffloadWrapper) or step_of(m, Offloading) for layer in layers for m in layer.modules()):
        raise ValueError(
            "One of the layers has offloading already: its tensors would be moved twice. Apply offloading once."
        )
    apply_specs(model, _placements(names, offloader, regions_in(*layers)), without_cache=False)
    return offloader


def placed_on_host(
    specs: Sequence[CheckpointSpec],
    layers: Sequence[str],
    config: OffloadConfig,
    *,
    backend: Backend | None = None,
) -> list[CheckpointSpec]:
    """Return `specs`, and a placement for each of `layers` but the last: kept outputs of regions there wait on the host.

    Args:
        specs: the regions in these layers.
        layers: names of all layers, in the order of forward.
        config, backend: see `apply_offloading`.

    Raises:
        ValueError: ``saved`` where nothing is checkpointed.
    """
    return [*specs, *_placements(layers, Offloader(config, backend=backend), specs)]


def _placements(layers: Iterable[str], offloader: Offloader, regions: Sequence[object]) -> list[CheckpointSpec]:
    """All but the last: backward starts with that one, so its tensors would only go and come."""
    if offloader.config.mode == "saved" and not regions:
        raise ValueError(
            "offload='saved' moves tensors that activation checkpointing keeps, and ac is 'none' or leaves every layer out: "
            "no layer is checkpointed. Use ac='selective' (or another mode), or offload='all'."
        )
    names = list(dict.fromkeys(layers))
    moved = names[:-1] if len(names) > 1 else names
    return [CheckpointSpec((name,), policy=None, transfer=offloader) for name in moved]


def offloader_of(model: nn.Module) -> Offloader | None:
    """The offloader that `apply_offloading` put on `model` (for its ``stats``), or None."""
    return next((step.offloader for module in model.modules() if (step := step_of(module, Offloading))), None)
