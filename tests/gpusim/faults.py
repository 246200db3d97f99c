"""Faults put on purpose into the offloading code, and the training steps in which the simulated device finds each.

A scenario trains a few layers and returns what it gave: gradients, on the CPU. A fault changes a method, in the process
of the simulated device only; most edit one line of it, and fail where that line is not there any more.
"""

from __future__ import annotations

import contextlib
import inspect
import random
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from nemo_like.activation_checkpointing import apply_selective_checkpointing_to_layers
from nemo_like.activation_checkpointing.apply import apply_specs
from nemo_like.activation_checkpointing.policy import HOST, DecisionTable, SelectivePolicy
from nemo_like.activation_checkpointing.spec import CheckpointSpec
from nemo_like.offload import Offloader, apply_offloading, mover, offload_activations, offloader_of, place_decisions
from nemo_like.offload.backends import Backend
from nemo_like.offload.mover import HostCopy, Mover
from nemo_like.options import OffloadConfig
from tests.checks import same
from tests.gpusim.device import NAME, Device, RaceError
from tests.gpusim.streams import Event, host
from tests.offload.cases import Stack, stack_of

WIDTH, ROWS = 16, 64
UNLIMITED = 1 << 30

# Scenarios: called with offloading, and without it for what is right.

Results = dict[str, Any]
Scenario = Callable[[bool], Results]


def _wave(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (x * scale).sin() * x


def _model(
    offload: bool, mode: str = "all", inflight: int = 1, layer: Callable[..., torch.Tensor] = _wave, **options: bool
) -> Stack:
    """Return the layers; with `offload` they have it."""
    model = stack_of(layer, count=3, width=WIDTH).to(NAME)
    backend = Backend(torch.device(NAME, 0), **options)
    if offload and mode == "decided":
        names, table = [f"layers.{n}" for n in range(3)], DecisionTable({"aten.sin.default": (HOST, HOST)})
        specs = [CheckpointSpec((name,), table) for name in names]
        apply_specs(model, place_decisions(specs, names, backend=backend))
    elif offload:
        if mode == "saved":
            policy = SelectivePolicy(every_nth_matmul=None)
            apply_selective_checkpointing_to_layers(model, model.layers, False, policy=policy)  # type: ignore[arg-type]
        settings = OffloadConfig(mode=mode, min_bytes=0, max_inflight_bytes=inflight)
        apply_offloading(model, list(model.layers), settings, backend=backend)
    return model


def _input(step: int = 0) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step)).to(NAME)


def _gradients(model: nn.Module, step: int = 0) -> Results:
    """Return the gradients, which the model then has no more."""
    found = {
        f"{name}, {step}": None if parameter.grad is None else parameter.grad.cpu()
        for name, parameter in model.named_parameters()
    }
    model.zero_grad()
    return found


def _training(offload: bool, mode: str = "all", inflight: int = 1, layer: Callable[..., torch.Tensor] = _wave) -> Results:
    model, results = _model(offload, mode, inflight, layer), Results()
    for step in range(2):
        model(_input(step)).sum().backward()
        results |= _gradients(model, step)
    return results


def _two_versions(offload: bool) -> Results:
    """Save a storage, change it, and save it again; the graph of the first one lives on, and backward leaves it out."""
    others = []

    def layer(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        product = x * scale
        others.append(product.sin())
        host.synchronize()  # no one reads that copy, so the change need not wait for it
        return product.add_(1).cos()

    return _training(offload, layer=layer)


class _Writes(torch.autograd.Function):
    """Writes into its saved tensor in backward, as some fused losses do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return ctx.saved_tensors[0].zero_().add_(1) * gradient


def _written(offload: bool) -> Results:
    """Let the first reader of a storage write into what it is given, in the layers that are offloaded."""
    writes = iter((offload, offload, False))

    def layer(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        product = x * scale
        return product.sin() + (_Writes.apply(product) if next(writes) else product * 1)

    model = _model(offload, layer=layer)
    loss = model(_input()).sum()
    if offload:
        host.synchronize()
        offloader_of(model).collect()  # type: ignore[union-attr]  # no original is left, which it would write into
    loss.backward()
    return _gradients(model)


def _noticed(offload: bool) -> Results:
    """Change what was saved: autograd refuses."""
    model, results = _model(offload), Results()
    hidden = model.layers[0](_input())
    loss = model.layers[1](hidden).sum()
    with torch.no_grad():
        hidden.mul_(2)
    try:
        loss.backward()
    except RuntimeError as error:
        results["refused"] = "modified by an inplace operation" in str(error)
    return results


def _both_ways(offload: bool) -> Results:
    """Bring everything back at once, as if no original were left.

    Otherwise an original dies only when the host knows that its copy has ended, so that the copy back need not wait.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostCopy, "original", lambda _: None)
        return _training(offload, inflight=UNLIMITED)


def _retained(offload: bool) -> Results:
    """Go through one graph twice, with another step between."""
    model = _model(offload)
    first = model(_input(0)).sum()
    first.backward(retain_graph=True)
    second = model(_input(1)).sum()
    first.backward()
    second.backward()
    return _gradients(model)


def _halves(model: Stack, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what is between the layers, and the gradient there."""
    hidden = Stack(list(model.layers[:1]))(x)
    loss = Stack(list(model.layers[1:]))(hidden).sum()
    return hidden, torch.autograd.grad(loss, hidden, retain_graph=True)[0]


def _ends_early(offload: bool) -> Results:
    """Drop a graph whose tensors are on their way back, then train on."""
    model, results = _model(offload), Results()
    hidden, gradient = _halves(model, _input(0))
    del hidden
    if offload:
        offloader_of(model).collect()  # type: ignore[union-attr]  # the mover hears of what was dropped
    torch.gpusim.reuse()  # type: ignore[attr-defined]
    results["gradient"] = gradient.cpu()
    model(_input(1)).sum().backward()
    return results | _gradients(model, 1)


def _side_reader(offload: bool) -> Results:
    """Run the second half of backward on another stream, for which the first one brought tensors back."""
    model, side = _model(offload), torch.gpusim.Stream()  # type: ignore[attr-defined]
    hidden, gradient = _halves(model, _input(0))
    side.wait_stream(host.streams[0])
    with host.on(side):
        hidden.backward(gradient, retain_graph=True)
    _model(False)(_input(1)).sum().backward()  # other work of the first stream
    host.synchronize()
    return _gradients(model)


def _side_originals(offload: bool) -> Results:
    """Run backward on another stream before anything has left the device, then let go of it."""
    model, side = _model(offload, inflight=UNLIMITED), torch.gpusim.Stream()  # type: ignore[attr-defined]
    loss = model(_input(0)).sum()
    side.wait_stream(host.streams[0])
    with host.on(side):
        loss.backward(retain_graph=True)
    offloader = offloader_of(model)
    if offloader is not None:
        for event, *_ in offloader._mover._inflight:  # type: ignore[union-attr]
            event.synchronize()
        offloader.collect()
    _model(False)(_input(1)).sum().backward()  # other work of the first stream
    host.synchronize()
    return _gradients(model)


def _read_twice(offload: bool) -> Results:
    """Go through one graph twice on a stream, then save on another one, which does not wait for it."""
    model, side = _model(offload), torch.gpusim.Stream()  # type: ignore[attr-defined]
    parameters, inputs = list(model.parameters()), [_input(0), _input(1)]
    host.synchronize()
    with host.on(side):
        loss = model(inputs[0]).sum()
        kept = [torch.autograd.grad(loss, parameters, retain_graph=True), torch.autograd.grad(loss, parameters)]
        del loss
    kept.append(torch.autograd.grad(model(inputs[1]).sum(), parameters))
    host.synchronize()
    return {f"{step} {n}": g.cpu() for step, each in enumerate(kept) for n, g in enumerate(each)}


def _in_turn(offload: bool) -> Results:
    """Take steps on two streams, which do not wait for each other."""
    model = _model(offload)
    inputs, streams, kept = [_input(n) for n in range(4)], [torch.gpusim.Stream() for _ in range(2)], []  # type: ignore[attr-defined]
    host.synchronize()
    for step, x in enumerate(inputs):
        with host.on(streams[step % 2]):
            kept.append(torch.autograd.grad(model(x).sum(), list(model.parameters())))
    host.synchronize()
    return {f"{step} {n}": g.cpu() for step, each in enumerate(kept) for n, g in enumerate(each)}


def _no_streams(offload: bool) -> Results:
    """Copy on the first stream, which is not the one that backward runs on."""
    model = _model(offload, use_streams=False)
    side = torch.gpusim.Stream()  # type: ignore[attr-defined]
    loss = model(_input()).sum()
    side.wait_stream(host.streams[0])
    with host.on(side):
        loss.backward(retain_graph=True)
    host.synchronize()
    return _gradients(model)


def _goes_away(offload: bool) -> Results:
    """Drop graph and offloader after forward."""
    x = _input().requires_grad_()
    with offload_activations(OffloadConfig(mode="all" if offload else "none", min_bytes=0, max_inflight_bytes=UNLIMITED)):
        loss = (x * 2).sin().exp().sum()
    value = loss.detach()
    del loss
    torch.gpusim.reuse()  # type: ignore[attr-defined]
    return {"loss": value.cpu()}


def _goes_away_in_backward(offload: bool) -> Results:
    """Drop the model, too, whose tensors are on their way back; then use the memory."""
    model = _model(offload)
    hidden, gradient = _halves(model, _input(0))
    results = Results(gradient=gradient.cpu())
    del model, hidden, gradient
    _model(False)(_input(1)).sum().backward()
    return results


SCENARIOS: dict[str, Scenario] = {
    **{
        f"{mode}, {inflight} bytes on their way": partial(_training, mode=mode, inflight=inflight)
        for mode, inflight in (("boundary", 1), ("all", 1), ("all", 1 << 13), ("all", UNLIMITED))
    },
    # The outputs that a plan or a list of names moves, and nothing else.
    "decided": partial(_training, mode="decided"),
    # Change in place, inside of the region, what the policy keeps.
    "saved": partial(_training, mode="saved", inflight=UNLIMITED, layer=lambda x, scale: x.tanh_() * scale),
    # Save overlapping parts of one storage, each over half of it or more, but for the last, which is there already.
    "slices": partial(_training, layer=lambda x, scale: torch.cat([(x[0:40] * x[24:64]), x[20:44] * scale])),
    "another version": _two_versions,
    "a reader that writes": _written,
    "a change in place": _noticed,
    "copies back while those to the host are on their way": _both_ways,
    "two graphs": _retained,
    "a backward that ends early": _ends_early,
    "a reader on a side stream": _side_reader,
    "originals read on a side stream": _side_originals,
    "a graph read twice, then another stream": _read_twice,
    "streams in turn": _in_turn,
    "no streams, and another one for backward": _no_streams,
    "an offloader that goes away": _goes_away,
    "an offloader that goes away during backward": _goes_away_in_backward,
}


def all_right(device: Device, seeds: Sequence[int | None]) -> list[str]:
    """Run all scenarios with each seed, without a fault; return those that give other results."""
    wrong = []
    expected = {name: function(False) for name, function in SCENARIOS.items()}
    for seed in seeds:
        host.seed = None if seed is None else random.Random(seed)
        for name, function in SCENARIOS.items():
            try:
                if not same(function(True), expected[name]):
                    wrong.append(f"{name}, seed {seed}")
                device.check()
            except RaceError as error:
                error.add_note(f"in {name!r} with seed {seed}")
                raise
    return wrong


# Faults.

PutIn = Callable[[pytest.MonkeyPatch], None]


class Fault(NamedTuple):
    """How a fault is put in, the scenario that shows it, and how it shows."""

    put_in: PutIn
    scenario: str
    shows_as: str


def edited(owner: Any, name: str, *changes: tuple[str, str]) -> PutIn:
    """A fault that replaces text in the source of a method, each once."""

    def put_in(patch: pytest.MonkeyPatch) -> None:
        source = textwrap.dedent(inspect.getsource(getattr(owner, name)))
        for old, new in changes:
            assert source.count(old) == 1, f"{owner.__name__}.{name} has {old!r} {source.count(old)} times"
            source = source.replace(old, new)
        scope: dict[str, Any] = {}
        code = compile(source, f"<{name} with a fault>", "exec", annotations.compiler_flag)
        exec(code, vars(inspect.getmodule(getattr(owner, name))), scope)
        patch.setattr(owner, name, scope[name])

    return put_in


def how_it_shows(device: Device, name: str) -> str:
    """Return how the fault shows: as a race, in the bytes, or not at all."""
    fault = FAULTS[name]
    run = SCENARIOS[fault.scenario]
    right = run(False)
    assert same(run(True), right)
    device.check()
    with pytest.MonkeyPatch.context() as patch:
        fault.put_in(patch)
        try:
            results = run(True)
            device.reuse()
        except RaceError:
            shows = "race"
        else:
            shows = "nothing" if same(results, right) else "bytes"
    with contextlib.suppress(RaceError):  # what the fault has left: bytes that a copy still writes to
        device.reuse()
    device.settle()
    device.memory.accesses.races, device.pinned.accesses.races = [], []
    return shows


def replaced(owner: Any, name: str, value: Callable[..., Any]) -> PutIn:
    """A fault that gives `owner` another function of that name."""
    return lambda patch: patch.setattr(owner, name, value)


def _copy_back_on_another_stream(patch: pytest.MonkeyPatch) -> None:
    other, copy_back = torch.gpusim.Stream(), Mover._copy_back  # type: ignore[attr-defined]

    def on_the_other(self: Mover, copy: HostCopy) -> torch.Tensor:
        with pytest.MonkeyPatch.context() as streams:
            streams.setattr(self.backend, "copies", other)
            return copy_back(self, copy)

    patch.setattr(Mover, "_copy_back", on_the_other)


def _two_copies(patch: pytest.MonkeyPatch) -> None:
    given: dict[int, torch.Tensor] = {}
    new = Backend.host_memory
    patch.setattr(Backend, "host_memory", lambda self, n: given[n] if n in given else given.setdefault(n, new(self, n)))


def _one_version(patch: pytest.MonkeyPatch) -> None:
    offload = Mover.offload
    patch.setattr(Mover, "offload", lambda self, storage, version, reader: offload(self, storage, (0,), reader))


def _one_number(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(mover, "id", lambda _: 0, raising=False)
    edited(Mover, "find", ("copy.original() is storage", "True"))(patch)


ONE = "all, 1 bytes on their way"
COPY = "backend.copy(host, bytes_of(storage), backend.copies)"
WAIT = "backend.copies.wait_event(backend.record(stream))"
WRITTEN = "copy.written = backend.record(backend.copies)"
READY = "copy.ready = backend.record(backend.copies)"
READ = "copy.buffer = None  # all have read"
FAULTS: dict[str, Fault] = {
    # Copy to the host without waiting for the operator that makes the bytes.
    "copy_out_waits_for_no_operator": Fault(
        edited(Mover, "offload", ("backend.copies.wait_event(backend.record(copy.stream))", "pass")), ONE, "race"
    ),
    # Read what comes back before it is there.
    "reader_does_not_wait": Fault(edited(Mover, "fetch", ("stream.wait_event(copy.ready)", "pass")), ONE, "race"),
    # Take an event of the current stream for the end of a copy to the host.
    "copy_out_is_recorded_on_the_wrong_stream": Fault(
        edited(Mover, "offload", (WRITTEN, "copy.written = backend.record(copy.stream)")), ONE, "race"
    ),
    # Take an event of the current stream for the end of a copy back.
    "copy_back_is_recorded_on_the_wrong_stream": Fault(
        edited(Mover, "_copy_back", (READY, "copy.ready = backend.record(stream)")), ONE, "race"
    ),
    # Record the end of a copy to the host before it.
    "copy_out_is_recorded_too_early": Fault(
        edited(Mover, "offload", (WRITTEN, "pass"), (COPY, f"{WRITTEN}; {COPY}")), ONE, "race"
    ),
    # Record the end of a copy back before it.
    "copy_back_is_recorded_too_early": Fault(
        edited(Mover, "_copy_back", (READY, "pass"), (WAIT, f"{WAIT}; {READY}")), ONE, "race"
    ),
    # Hold no storage that a copy to the host reads.
    "source_is_let_go_at_once": Fault(
        edited(Mover, "offload", ("self._inflight.append((copy.written, storage, nbytes))", "pass")), ONE, "race"
    ),
    # Go on where the host is to wait for a copy, and let go of what it reads.
    "host_never_waits": Fault(edited(Mover, "retire", ("held[0][0].synchronize()", "pass")), ONE, "race"),
    # Take every copy for done.
    "every_event_has_happened": Fault(
        edited(Mover, "retire", ("held[0][0].query()", "True")), "all, 8192 bytes on their way", "race"
    ),
    # Lend no memory to the stream that reads it.
    "reader_is_not_told_to_the_allocator": Fault(
        replaced(Backend, "lend", lambda *_: None), "a reader on a side stream", "race"
    ),
    # Lend only what comes back, and not what never left.
    "reader_of_an_original_is_not_told_to_the_allocator": Fault(
        edited(Mover, "fetch", ("backend.lend(whole, stream, copy.stream)", "pass")),
        "originals read on a side stream",
        "race",
    ),
    # Write to a buffer whose memory earlier operators of the current stream may use.
    "copy_back_waits_for_no_earlier_work": Fault(
        edited(Mover, "_copy_back", (WAIT, "pass")), ONE, "race"
    ),
    # Bring back what may not be on the host yet.
    "copy_back_is_on_another_stream": Fault(
        _copy_back_on_another_stream, "copies back while those to the host are on their way", "race"
    ),
    # Change in place what is being copied to the host.
    "change_does_not_wait_for_the_copy_out": Fault(
        edited(Mover, "part_from_source", ("self.backend.current_stream().wait_event(copy.written)", "pass")),
        "saved",
        "race",
    ),
    # Take a source that was changed in place for what was saved.
    "changed_source_is_read": Fault(
        edited(Mover, "part_from_source", ("copy.storage = lambda: None", "pass")), "saved", "bytes"
    ),
    # Keep no CPU memory when the copy to it has been started.
    "host_memory_is_let_go_after_the_copy_out": Fault(
        edited(Mover, "offload", (WRITTEN, f"{WRITTEN}; copy.host = backend.host_memory(nbytes)")), ONE, "bytes"
    ),
    # Keep no CPU memory when all readers have had it once, and bring it back in the second round.
    "host_memory_is_let_go_after_one_backward": Fault(
        edited(Mover, "fetch", (READ, f"copy.host = backend.host_memory(copy.host.numel()); {READ}")), "two graphs", "bytes"
    ),
    # Give the same CPU memory out for all copies of one size.
    "host_memory_has_two_copies": Fault(_two_copies, "streams in turn", "bytes"),
    # Take what a storage held before a change in place for what it holds after it.
    "copy_of_another_version_is_shared": Fault(_one_version, "another version", "bytes"),
    # Take the copy of a storage that is gone for that of the next one with its number; all have one here.
    "copy_of_a_storage_that_is_gone_is_shared": Fault(_one_number, ONE, "bytes"),
    # Give the next reader what an earlier one wrote into.
    "write_into_a_buffer_is_not_noticed": Fault(
        edited(Mover, "fetch", ("version_of(copy.buffer) != copy.version", "False")), "a reader that writes", "bytes"
    ),
    # Read each view from the start of its storage.
    "part_is_read_from_the_wrong_place": Fault(
        edited(Offloader, "_move_plain", ("*place)", "*place[:2], 0)")), "slices", "bytes"
    ),
    # Compare no version counter when a tensor is asked for.
    "change_in_place_is_not_noticed": Fault(
        replaced(mover, "_refuse_change", lambda *_: None), "a change in place", "bytes"
    ),
    # Let a mover go away while its copies read storages that it holds.
    "end_of_copies_is_not_awaited": Fault(
        replaced(mover, "_end_of_copies", lambda *_: None), "an offloader that goes away", "race"
    ),
    # Let a mover go away while copies write to buffers that it holds.
    "end_of_copies_back_is_not_awaited": Fault(
        edited(mover, "_end_of_copies", ("(*inflight, *dead)", "inflight")),
        "an offloader that goes away during backward",
        "race",
    ),
    # Drop a buffer that is being brought back without waiting for the copy.
    "unread_buffer_is_dropped_at_once": Fault(
        edited(Mover, "retire", ("held.append((ready, buffer, 0))", "pass")), "a backward that ends early", "race"
    ),
    # Wait for nothing where copies are on the user's stream, which may have changed since.
    "one_stream_needs_no_wait": Fault(
        replaced(Backend, "record", lambda *_: Event()), "no streams, and another one for backward", "race"
    ),
}
