"""The counter of live bytes against those that it replaces: one log, the same levels."""

from __future__ import annotations

import gc

import pytest
import torch

from nemo_like import apply_activation_checkpointing
from nemo_like._util import live_bytes
from nemo_like.planning.trace import meter
from nemo_like.planning.trace.scratch import scratch_bytes
from nemo_like.profiling import CpuMeter, StorageRegistry
from tests.models.decoders import batch, build
from tests.models.live_bytes import LiveBytes as TestsOwn


class _WithScratch(live_bytes.LiveBytes):
    def scratch(self, func, args, kwargs, out):
        return scratch_bytes(func, args, kwargs, out)


@pytest.mark.parametrize("ac", ["none", "full", "selective"])
def test_the_new_counter_and_the_old_ones_are_one(ac: str) -> None:
    def numbers(make, live_of) -> tuple[list, object]:
        model = apply_activation_checkpointing(build("llama"), ac)
        ids = batch(2, 8)
        model(input_ids=ids, labels=ids).loss.backward()  # gradients are there from here on
        counter = make([*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters()), ids])
        seen = []
        for module in model.modules():
            module.register_forward_hook(lambda *_: seen.append(live_of(counter)))
        gc.collect()
        gc.disable()
        try:
            with counter:
                loss = model(input_ids=ids, labels=ids).loss
                seen.append(live_of(counter))
                loss.backward()
                del loss
                seen.append(live_of(counter))
        finally:
            gc.enable()
        return seen, counter

    def registered(known):
        registry = StorageRegistry()
        registry.ignore(known)
        return CpuMeter(registry)

    levels, new = numbers(live_bytes.LiveBytes, lambda counter: counter.live)
    assert len(set(levels)) > 5
    older, cpu = numbers(registered, lambda counter: counter.live)
    assert older == levels and cpu.take_peak() == new.take_peak()
    assert numbers(TestsOwn, lambda counter: counter.count())[0] == levels
    older, planned = numbers(meter.LiveBytes, lambda counter: counter.live)
    newer, ours = numbers(_WithScratch, lambda counter: counter.live)
    assert older == newer == levels
    assert planned.log == ours.log and planned.sizes == ours.sizes and planned.peak == ours.peak


def test_kinds_of_tensors() -> None:
    x = torch.ones(3)
    with live_bytes.LiveBytes() as counter:
        x.view(3, 1)  # made outside
        torch.ones(5, device="meta")
        sparse = torch.eye(4).to_sparse()
        made = torch.tensor([1.0, 2.0])
        counter.take_peak()
    assert torch.is_tensor(sparse * 2) and counter.number(made) > 0 and counter.number(x) == 0
    outside = counter.identify(x.untyped_storage())
    assert outside < 0 and counter.identify(x.untyped_storage()) == outside and counter.number(x) == 0
    assert counter.identify(made.untyped_storage()) == counter.number(made)
