"""What blocks are, of published records and of planted causes."""

from collections.abc import Callable
from typing import Any

import pytest

from nemo_like.explaining.explain import explain
from nemo_like.explaining.explanation import Explanation
from nemo_like.explaining.parts import parts_of
from nemo_like.explaining.snapshot import read_snapshot, timelines
from tests.explaining.made import Recording, real

MIB = 1 << 20
PUBLISHED = {
    # peak and reserved MiB, share that has a name, layers
    "cellular-automaton": (18_661, 21_166, 0.998, 0),
    "conv3d-nine-epochs": (103, 128, 0.774, 0),
    "four-layers-100-three-steps": (651, 750, 1.0, 4),
    "gpt-2.7b-128-train": (52_527, 58_280, 0.9999, 32),
    "gpt-2.7b-forward": (32_776, 49_448, 0.36, 0),  # compiled, and no backward
    "gpt-medium-512-inference": (1_861, 1_890, 0.127, 24),
    "gpt-medium-512-train": (11_853, 12_074, 0.998, 24),
    "gpt-small-windows-python-stacks": (13_283, 13_524, 0.924, 12),
    "state-only-2": (8_152, 15_484, 0.0, 0),
    "tinyllama-8bit-lora": (5_615, 6_172, 0.812, 22),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_records(name: str) -> None:
    peak, reserved, share, layers = PUBLISHED[name]
    made = explain(real(name))
    assert round(made.peak_bytes / MIB) == peak and abs(made.reserved_bytes / MIB - reserved) < 1
    assert made.named_bytes >= share * made.peak_bytes
    assert sum(made.parts.values()) == made.peak_bytes
    (only,) = timelines(read_snapshot(real(name)))
    assert (parts_of(only).layer_count or 0) == layers and len(made.layers) in (0, layers)
    assert all(len(line) <= 120 for line in str(made).splitlines())


# --- planted causes ---------------------------------------------------------------------------------------------------


def _late_zero_grad() -> Recording:
    """``zero_grad()`` behind the forward."""
    made = Recording()
    gradients: list[int] = []
    for number in range(3):
        saved = [made.make(8 * MIB, "forward", 20 + place) for _ in range(2) for place in range(2)]
        if number:
            made.free(*gradients, phase="zero_grad")
        made.free(*saved, phase="backward")
        gradients = [made.make(4 * MIB, "backward") for _ in range(2)]
        if not number:
            made.make(MIB, "optimizer")
        made.free(made.make(MIB, "optimizer"))
    return made


def _kept_outputs() -> Recording:
    """A list of outputs that grows."""
    made = Recording()
    for _ in range(3):
        saved = [made.make(8 * MIB, "forward", 20 + place) for _ in range(2) for place in range(2)]
        made.make(6 * MIB, "forward", 99)
        made.free(*saved, phase="backward")
        made.free(*[made.make(4 * MIB, "backward") for _ in range(2)], phase="zero_grad")
        made.free(made.make(MIB, "optimizer"))
    return made


def _waiting_frees() -> Recording:
    """Another stream still uses what was freed."""
    made = Recording()
    late = made.make(16 * MIB, "forward", 50, stream=1)
    made.ask(late)
    for place in range(3):
        made.make(8 * MIB, "forward", 60 + place)
    made.free(made.make(4 * MIB, "backward"))
    return made


def _growing_script() -> Recording:
    """Each step leaves something that the script made."""
    made = Recording()
    for _ in range(4):
        made.make(8 * MIB, "script")
        made.free(made.make(8 * MIB, "forward"), phase="backward")
        made.free(made.make(4 * MIB, "backward"), phase="zero_grad")
    return made


def _half_empty(stream: int) -> dict[str, Any]:
    """Return a segment of 64 MiB, of which 16 are free."""
    blocks = [(48 * MIB, "active_allocated"), (16 * MIB, "inactive")]
    return {
        "device": 0, "address": (1 << 40) + (stream << 32), "total_size": 64 * MIB, "stream": stream,
        "blocks": [{"size": size, "requested_size": size, "state": state} for size, state in blocks],
    }  # fmt: skip


def test_free_bytes_of_a_stream_that_allocates_no_longer() -> None:
    made = Recording()
    made.free(made.make(4 * MIB, "forward", stream=7))
    for _ in range(4):
        made.free(made.make(400 * MIB, "forward"), phase="backward")
    snapshot = made.snapshot()
    snapshot["segments"].append(_half_empty(7))
    (found,) = explain(snapshot).unexpected
    assert (found.kind, found.size) == ("idle streams", 16 * MIB) and "empty_cache" in found.change


def test_fragments_are_said_with_what_growing_segments_would_reserve() -> None:
    made = Recording()
    made.free(made.make(8 * MIB, "forward"))
    snapshot = made.snapshot()
    snapshot["segments"] += [_half_empty(0)]
    (found,) = explain(snapshot).unexpected
    # The peak is at the 8 MiB, and 64 are reserved at the end; in growing segments of 2 or 20 MiB they are 60.
    assert (found.kind, found.size, found.peak_after) == ("fragmentation", 16 * MIB, 60 * MIB)
    assert found.change == "PYTORCH_ALLOC_CONF=expandable_segments:True"


def test_what_is_in_use_beside_the_allocator() -> None:
    made = Recording()
    made.make(8 * MIB, "build")
    (found,) = explain(made.snapshot(), used=3000 * MIB).unexpected
    assert (found.kind, found.size) == ("outside of the allocator", 2992 * MIB) and "set_device" in found.words
    assert not explain(made.snapshot(), used=1000 * MIB).unexpected  # a context and NCCL take as much


@pytest.mark.parametrize(
    ("cause", "kind", "size", "less"),
    [
        (_late_zero_grad, "gradients of the last step", 8, 8),
        (_kept_outputs, "outputs of an earlier step", 12, 12),
        (_waiting_frees, "frees that wait for streams", 16, 16),
        (_growing_script, "growth", 24, 24),
    ],
)
def test_a_planted_cause_is_the_first_that_is_said(
    cause: Callable[[], Recording], kind: str, size: int, less: int
) -> None:
    made: Explanation = explain(cause().snapshot())
    first = made.unexpected[0]
    assert (first.kind, first.size // MIB) == (kind, size), made.unexpected
    assert (made.peak_bytes - first.peak_after) // MIB == less
    assert "should not be there" in str(made)


def test_a_plain_step_has_nothing_unexpected() -> None:
    made = Recording()
    weights = [made.make(4 * MIB, "build") for _ in range(2)]
    for number in range(2):
        saved = [made.make(MIB, "forward", 10)]
        saved += [made.make(8 * MIB, "forward", 20 + place) for _ in range(2) for place in range(2)]
        saved.append(made.make(2 * MIB, "loss"))
        made.free(*saved, phase="backward")
        gradients = [made.make(4 * MIB, "backward") for _ in range(2)]
        if not number:
            made.make(8 * MIB, "optimizer")
        made.free(*gradients, phase="zero_grad")
    assert weights
    found = explain(made.snapshot())
    assert not found.unexpected and found.layers == (16 * MIB, 16 * MIB)
    assert dict(found.parts) == {
        "activations": 33 * MIB,
        "weights": 8 * MIB,
        "optimizer state": 8 * MIB,
        "loss": 2 * MIB,
    }
