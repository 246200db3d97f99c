"""The order of copies: the journal shows no hazard, and every fault that is put in shows one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from nemo_like.offload import Offloader, offload_activations
from nemo_like.offload.mover import Mover
from tests.offload.cases import assert_same, config, gradients, journaled, no_hazards, stack_of
from tests.offload.journal import Entry, Journal, JournaledCopying, Region, find_hazards

A, B = Region("a", 0, 8), Region("b", 0, 8)


def _journal(*entries: Entry) -> Journal:
    return Journal(list(entries))


def test_an_event_orders_two_streams() -> None:
    write, read = Entry("copy", "s", writes=A), Entry("copy", "t", reads=A)
    assert [h.kind for h in find_hazards(_journal(write, read))] == ["read after write"]
    assert find_hazards(_journal(write, Entry("record", "s", 0), Entry("wait", "t", 0), read)) == []


def test_an_event_recorded_too_early_orders_nothing() -> None:
    write, read = Entry("copy", "s", writes=A), Entry("copy", "t", reads=A)
    entries = (Entry("record", "s", 0), write, Entry("wait", "t", 0), read)
    assert [(h.first, h.second) for h in find_hazards(_journal(*entries))] == [(1, 3)]


def test_a_wait_for_an_event_that_is_recorded_later_orders_nothing() -> None:
    write, read = Entry("copy", "s", writes=A), Entry("copy", "t", reads=A)
    entries = (write, Entry("wait", "t", 0), read, Entry("record", "s", 0))
    assert len(find_hazards(_journal(*entries))) == 1


def test_order_is_transitive_and_what_the_host_has_seen_orders_everything_later() -> None:
    write = Entry("copy", "s", writes=A)
    chain = (Entry("record", "s", 0), Entry("wait", "t", 0), Entry("record", "t", 1), Entry("wait", "u", 1))
    assert find_hazards(_journal(write, *chain, Entry("copy", "u", reads=A))) == []
    seen = (Entry("record", "s", 0), Entry("seen", "host", 0), Entry("copy", "u", reads=A))
    assert find_hazards(_journal(write, *seen)) == []


def test_kinds_and_ranges() -> None:
    read, write = Entry("copy", "s", reads=A), Entry("copy", "t", writes=A)
    assert [h.kind for h in find_hazards(_journal(read, write))] == ["write after read"]
    assert [h.kind for h in find_hazards(_journal(write, Entry("copy", "s", writes=A)))] == ["write after write"]
    assert find_hazards(_journal(read, Entry("copy", "t", reads=A))) == []
    other = Entry("copy", "t", writes=Region("a", 8, 9))
    assert find_hazards(_journal(read, other)) == []
    assert find_hazards(_journal(read, Entry("copy", "t", writes=B))) == []
    assert len(find_hazards(_journal(read, Entry("copy", "t", writes=Region("a", 7, 9))))) == 1


def test_a_held_buffer_may_be_released() -> None:
    use, release = Entry("use", "t", reads=A), Entry("release", "s", writes=A)
    assert len(find_hazards(_journal(use, release))) == 1
    assert find_hazards(_journal(use, Entry("hold", "t", reads=A), release)) == []


# --------------------------------------------------------------------------------------------------- the mover itself


class NoWaitForProducer(JournaledCopying):
    """Forgets that the copy to the host must wait for the operator that makes the bytes."""

    def wait(self, stream: Any, event: Any) -> None:
        if not (stream is self.copy_out and event.queue is self.stream):
            super().wait(stream, event)


class NoWaitForCopyOut(JournaledCopying):
    """Starts the way back without waiting for the way out."""

    def wait(self, stream: Any, event: Any) -> None:
        if not (stream is self.copy_back and event.queue is self.copy_out):
            super().wait(stream, event)


class NoWaitForReload(JournaledCopying):
    """Computes before the bytes are back."""

    def wait(self, stream: Any, event: Any) -> None:
        if not (stream is self.stream and event.queue is self.copy_back):
            super().wait(stream, event)


class NoWaitForBuffer(JournaledCopying):
    """Copies into device memory that earlier operators may still use."""

    def wait(self, stream: Any, event: Any) -> None:
        if not (stream is self.copy_back and event.queue is self.stream):
            super().wait(stream, event)


class NoWaitBeforeReuse(JournaledCopying):
    """Writes into a host block that is still being read."""

    def wait(self, stream: Any, event: Any) -> None:
        if not (stream is self.copy_out and event.queue is self.copy_back):
            super().wait(stream, event)


class EarlyRecord(JournaledCopying):
    """Records the copy's event before the copy."""

    def __init__(self) -> None:
        super().__init__(lazy=True)
        self.early: dict[int, Any] = {}

    def copy(self, target: Any, source: Any, stream: Any) -> None:
        self.early[id(stream)] = super().record(stream)
        super().copy(target, source, stream)

    def record(self, stream: Any) -> Any:
        return self.early.pop(id(stream), None) or super().record(stream)


def _train(offloader: Offloader, steps: int = 2) -> tuple[nn.Module, list[Any]]:
    model = stack_of(lambda x, scale: (x * scale).exp(), count=3)
    losses = []
    for _ in range(steps):
        with offloader:
            loss = model(torch.full((4, 16), 0.1)).sum()
        loss.backward()
        losses.append(gradients(model))
    return model, losses


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("prefetch", [0, 1])
def test_training_shows_no_hazard(lazy: bool, prefetch: int) -> None:
    offloader = offload_activations(config(max_inflight_bytes=1, prefetch=prefetch), backend=journaled(lazy))
    _train(offloader)
    no_hazards(offloader)
    journal = offloader._backend.journal
    assert len(journal.of_kind("copy")) == offloader.stats.copies + offloader.stats.reloads > 10
    assert len(journal.of_kind("release")) > 10


@pytest.mark.parametrize(
    ("backend", "kind"),
    [
        (NoWaitForProducer, "read after write"),
        (NoWaitForReload, "read after write"),
        (EarlyRecord, "read after write"),
    ],
)
def test_a_missing_wait_is_caught(backend: type[JournaledCopying], kind: str) -> None:
    faulty = backend() if backend is EarlyRecord else backend(lazy=True)
    _train(offload_activations(config(max_inflight_bytes=1), backend=faulty))
    assert kind in {hazard.kind for hazard in find_hazards(faulty.journal)}


def test_a_missing_wait_also_shows_in_the_gradients() -> None:
    # What makes the lazy back end a test of its own: bytes that nobody waited for are not there.
    _, expected = _train(offload_activations("none"), steps=1)
    _, good = _train(offload_activations(config(max_inflight_bytes=1), backend=journaled(lazy=True)), steps=1)
    assert_same(good[0], expected[0])
    _, bad = _train(offload_activations(config(max_inflight_bytes=1), backend=NoWaitForReload(lazy=True)), steps=1)
    assert any(not torch.equal(bad[0][name], value) for name, value in expected[0].items())


def test_reading_a_block_back_before_it_is_written_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    # Held sources are let go only when the host has seen their copies end, which orders the way back too: without
    # that, the wait between the two copy streams is what is left.
    monkeypatch.setattr(Mover, "_hold_until", lambda self, event, storage, nbytes: None)
    for backend, kinds in ((JournaledCopying(), {"write after read"}), (NoWaitForCopyOut(), {"read after write"})):
        _train(offload_activations(config(), backend=backend), steps=1)
        hazards = [h for h in find_hazards(backend.journal) if h.region.space.startswith("slab") or len(kinds) == 1]
        assert kinds <= {h.kind for h in hazards}
        assert ("read after write" in {h.kind for h in hazards}) == (type(backend) is NoWaitForCopyOut)


@pytest.mark.parametrize("backend", [JournaledCopying, NoWaitBeforeReuse])
def test_reusing_a_host_block_across_streams(backend: type[JournaledCopying]) -> None:
    # On one stream the readers' waits order the next writer too; from another stream, only the wait before reuse does.
    chosen = backend()
    offloader = offload_activations(config(), backend=chosen)
    weights = [torch.randn(8, 8, requires_grad=True) for _ in range(2)]
    main, side = chosen.stream, type(chosen.stream)("side")
    with offloader:
        loss = (weights[0] * 2).sin().sum()
    chosen.stream = side
    loss.backward()
    del loss
    chosen.stream = main
    with offloader:
        (weights[1] * 2).sin().sum()
    found = {h.kind for h in find_hazards(chosen.journal) if h.region.space.startswith("slab")}
    assert found == ({"write after read"} if backend is NoWaitBeforeReuse else set())


def test_reusing_a_buffer_without_waiting_is_caught() -> None:
    faulty = NoWaitForBuffer(lazy=True)
    offloader = offload_activations(config(max_inflight_bytes=1), backend=faulty)
    _train(offloader)
    # The memory of a buffer was last used on the compute stream by what was released from it: say which, as CUDA's
    # allocator would, by giving every device allocation of one size the same name.
    journal = faulty.journal
    shared = Journal([_in_one_space(entry) for entry in journal.entries])
    assert "write after write" in {hazard.kind for hazard in find_hazards(shared)}


def _in_one_space(entry: Entry) -> Entry:
    def rename(region: Region | None) -> Region | None:
        if region is None or not region.space.startswith("device"):
            return region
        return Region("device", region.lo, region.hi)

    return Entry(entry.kind, entry.stream, entry.event, rename(entry.reads), rename(entry.writes))


def test_letting_go_of_the_source_before_its_copy_ends_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mover, "_hold_until", lambda self, event, storage, nbytes: None)
    backend = journaled()
    offloader = offload_activations(config(), backend=backend)
    weight = torch.randn(8, 8, requires_grad=True)
    with offloader:
        out = (weight * 2).sin()  # the product dies here, and nobody has seen its copy end
    assert out.grad_fn is not None
    hazards = find_hazards(backend.journal)
    assert [hazard.kind for hazard in hazards] == ["write after read"]


def test_a_prefetched_buffer_that_nobody_reads_is_released_behind_its_copy() -> None:
    x = torch.randn(8, 8, requires_grad=True)
    offloader = offload_activations(config(max_inflight_bytes=1 << 20), backend=journaled())
    with offloader:
        left, right = (x * 2).sin(), (x * 3).sin()
    right.sum().backward()  # prefetches left's tensor too
    assert offloader.stats.prefetched == 1
    del left, right
    offloader.collect()
    no_hazards(offloader)
    assert offloader.stats.host_live_bytes == 0


@pytest.mark.parametrize("lazy", [False, True])
def test_backward_on_another_stream_than_forward(lazy: bool) -> None:
    backend = journaled(lazy)
    offloader = offload_activations(config(max_inflight_bytes=1), backend=backend)
    x = torch.randn(8, 8, requires_grad=True)
    main, side = backend.stream, type(backend.stream)("side")
    with offloader:
        y = (x * 2).sin()
        backend.stream = side
        z = (x * 3).sin() * y.detach()
        backend.stream = main
    expected = [torch.autograd.grad((x * 2).sin().sum(), x)[0], (3 * x.detach()).cos() * y.detach() * 3]
    del y
    backend.stream = side
    grads = torch.autograd.grad(z.sum(), x)
    backend.stream = main
    assert torch.equal(grads[0], expected[1])
    # What the user's own streams do to each other is theirs to order: the journal knows no wait between them.
    entries = backend.journal.entries
    for hazard in find_hazards(backend.journal):
        for entry in (entries[hazard.first], entries[hazard.second]):
            assert entry.kind != "copy" and entry.stream in ("compute", "side")


def test_host_memory_is_released_when_the_copies_back_have_ended() -> None:
    offloader = offload_activations(config(max_inflight_bytes=1), backend=journaled(lazy=True))
    _train(offloader, steps=1)
    assert offloader.release_host_memory() > 0
    entries = offloader._backend.journal.entries
    copied = {entry.stream: number for number, entry in enumerate(entries) if entry.kind == "copy"}
    ended = {entry.event for entry in entries if entry.kind == "seen"}
    assert len(copied) == 2, "to the host and back"
    for stream, last in copied.items():
        behind = {entry.event for entry in entries[last:] if entry.kind == "record" and entry.stream == stream}
        assert behind & ended, "the CPU has waited for the last copy"
