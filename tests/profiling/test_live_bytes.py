"""What memory is counted by: tensors alive in Python, and the allocator's events."""

import pytest
import torch

from nemo_like import apply_activation_checkpointing
from nemo_like._util.live_bytes import LiveBytes
from nemo_like.activation_checkpointing import is_checkpointed
from tests.allocator_events import AllocatorEvents, cpu_events
from tests.models.decoders import batch, build


def test_the_log_of_a_step_by_hand() -> None:
    weight = torch.ones(4, 4, requires_grad=True)
    with LiveBytes() as counter:
        hidden = weight.view(16) * 2  # a view of what is there is no byte; the product is
        hidden = hidden.exp()  # which autograd keeps; the product goes
        loss = hidden.sum()
        assert counter.live == counter.sizes[counter.number(hidden)] + 4
        assert (counter.take_peak(), counter.take_peak()) == (128, 68)
        del hidden, loss
    assert counter.live == 0 and counter.number(weight) == 0
    assert counter.log == [(1, 64), (2, 64), (1, 0), (3, 4), (2, 0), (3, 0)]


def test_kinds_of_tensors() -> None:
    x = torch.ones(3)
    with LiveBytes() as counter:
        kept = [x.view(3, 1), torch.ones(5, device="meta"), torch.tensor([[1.0, 2.0]])]
        assert counter.live == 8  # neither what was made outside, nor what has no memory
        kept.append(kept[-1].to_sparse())
    assert counter.number(kept[2]) > 0 and counter.number(x) == 0
    outside = counter.identify(x.untyped_storage())
    assert outside == counter.identify(x.untyped_storage()) < 0 == counter.number(x)
    assert counter.identify(kept[2].untyped_storage()) == counter.number(kept[2])


@pytest.mark.parametrize("ac", ["none", "full", "selective"])
def test_what_a_model_holds_is_what_the_allocator_gave_out(ac: str) -> None:
    model = apply_activation_checkpointing(build("llama"), ac)
    ids = batch(2, 8)
    model(input_ids=ids, labels=ids).loss.backward()  # gradients are there from here on
    held: list[torch.Tensor] = []

    def forward() -> None:
        held.append(model(input_ids=ids, labels=ids).loss)

    events = cpu_events(forward)
    held.clear()
    with LiveBytes() as counter:
        forward()
    regions = sum(map(is_checkpointed, model.modules()))
    states = regions * torch.get_rng_state().nbytes  # which the engine keeps, and no operator makes
    assert counter.live + states == events[-1] > 0


@pytest.mark.compat
def test_memory_older_than_the_measurement_does_not_count_whatever_was_measured_before() -> None:
    first = AllocatorEvents()
    first.start()
    blocks = [torch.empty(1 << 13) for _ in range(8)]
    seen = {block.data_ptr() for block in blocks}
    assert max(first.stop()) == 8 * 4 << 13
    del blocks  # the profiler does not see their end
    older = [torch.empty(1 << 13) for _ in range(64)]
    again = [block for block in older if block.data_ptr() in seen]
    if not again:
        pytest.skip("the allocator gave none of the addresses again")
    older = again[:1]
    del again
    second = AllocatorEvents()
    second.start()
    newer = torch.empty(1 << 10)
    older.clear()
    made = torch.empty(1 << 16)
    del newer
    assert second.stop() == [0, 4096, 4096 + (4 << 16), 4 << 16]
    assert made.numel() == 1 << 16
