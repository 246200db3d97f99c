"""What blocks are, of published records and of planted causes."""

from collections.abc import Callable
from itertools import combinations

import pytest

from nemo_like.explaining.explain import explain, explained
from nemo_like.explaining.explanation import Explanation
from nemo_like.explaining.parts import parts_of
from nemo_like.explaining.snapshot import BEFORE, timelines
from nemo_like.explaining.snapshot_file import read_snapshot
from nemo_like.explaining.stacks import CUBLAS_WORKSPACE, Phase
from tests.explaining.made import Recording, frame, real, stack, window

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


def test_free_segments_of_a_stream_that_allocates_no_longer() -> None:
    """``empty_cache()`` gives back whole segments: of 64 and 16 MiB on stream 7 the free one."""
    made = Recording()
    made.make(64 * MIB, "forward", stream=7)
    made.free(made.make(16 * MIB, "forward", stream=7), cached=True)
    for _ in range(4):
        made.free(made.make(400 * MIB, "forward"), phase="backward")
    (found,) = explain(made.snapshot()).unexpected
    assert (found.kind, found.size, found.peak_after) == ("idle streams", 16 * MIB, 464 * MIB)
    assert "empty_cache" in found.change


def test_fragments_have_the_bytes_that_growing_segments_would_not_reserve() -> None:
    """Eight segments of 20 MiB are free when four of 40 are taken: segments that grow would have used them."""
    made = Recording()
    made.free(*[made.make(20 * MIB, "forward", 20 + place) for place in range(8)], cached=True)
    for place in range(4):
        made.make(40 * MIB, "forward", 30 + place)
    explained_one = explain(made.snapshot())
    (found,) = explained_one.unexpected
    assert (found.kind, found.size, found.peak_after) == ("fragmentation", 160 * MIB, 160 * MIB)
    assert found.change == "PYTORCH_ALLOC_CONF=expandable_segments:True"
    assert "320 MiB were reserved, 160 MiB were in use, in 12 segments" in " ".join(str(explained_one).split())
    assert "(reserved 160 MiB instead of 320 MiB)" in str(explained_one)
    snapshot = made.snapshot()
    for segment in snapshot["segments"]:
        segment["is_expandable"] = True  # they grow already
    assert not explain(snapshot).unexpected
    snapshot = made.snapshot()
    snapshot["device_traces"][0] = snapshot["device_traces"][0][-1:]  # free ones from before may be a cache
    assert not explain(snapshot).unexpected


@pytest.mark.parametrize("name", PUBLISHED)
def test_parts_of_a_published_record_have_no_cause_but_fragments(name: str) -> None:
    """Their loops are in order: none of the 15 windows of each record shows a leak. Bytes are the whole record's."""
    (whole,) = timelines(read_snapshot(real(name)))
    places = [len(whole.trace) * number // 5 for number in range(6)]
    for first, end in combinations(places, 2):
        if end - first > 1:
            part = window(whole, first, end - 1)
            assert part.active == whole.active[first : end + 1] and part.reserved == whole.reserved[first : end + 1]
            found = explained(part)
            assert {each.kind for each in found.unexpected} <= {"fragmentation"}, (first, end, found.unexpected)
            assert all(each.size <= found.reserved_bytes - found.in_use_then for each in found.unexpected)
            assert max(found.peaks.values(), default=0) <= found.peak_bytes


def test_cublas_workspace_has_the_size_that_published_stacks_name() -> None:
    """In the three records whose stacks have C++, each block of that size is made by ``getNewWorkspace``, and no other."""
    for name in ("cellular-automaton", "conv3d-nine-epochs", "four-layers-100-three-steps"):
        (whole,) = timelines(read_snapshot(real(name)))
        recorded = [block for block in whole.blocks if block.born > BEFORE]
        by_stack = {block for block in recorded if "getNewWorkspace" in str(block.frames)}
        assert by_stack == {block for block in recorded if block.requested == CUBLAS_WORKSPACE} and by_stack


def test_full_is_offered_where_memory_ran_out_in_forward() -> None:
    """Cut before its first backward, a record shows what the whole one does, less what backward adds."""
    (whole,) = timelines(read_snapshot(real("gpt-medium-512-train")))
    named = parts_of(whole).named
    turn = min(block.born for block, each in named.items() if each.phase is Phase.BACKWARD and each.step == 0)
    cut, complete = (
        next(cure for cure in explained(each).cures if cure.change == "ac='full': layers recomputed")
        for each in (window(whole, 0, turn - 1), whole)
    )
    assert 0.4 < cut.peak_after / max(whole.active) < 0.65 and cut.peak_after <= complete.peak_after


def test_workspaces_are_a_part_and_no_gradients() -> None:
    """CuBLAS makes one in the first forward, one in backward, and keeps both."""
    made = Recording()
    for number in range(3):
        saved = [made.make(4 * MIB, "forward", 20)]
        if not number:
            made.make(8_519_680, "library")
        made.free(*saved, phase="backward")
        if not number:
            made.make(32 * MIB, "", frames=[frame("at::cuda::getNewWorkspace()", "??", 0), *stack("backward")])
        made.free(made.make(MIB, "backward"), phase="zero_grad")
        made.free(made.make(MIB, "optimizer"))
    found = explain(made.snapshot())
    assert found.parts["workspaces of libraries"] == 32 * MIB + 8_519_680 and not found.unexpected
    silent = Recording()
    silent.make(8_519_680, "", recorded=False)  # its size tells it, where no stack was recorded
    silent.make(MIB, "forward")
    assert explain(silent.snapshot()).parts["workspaces of libraries"] == 8_519_680


def test_gradients_from_before_the_recording_are_found_by_their_stacks() -> None:
    made = Recording()
    sizes = [3 * MIB, 5 * MIB, 7 * MIB]
    for size in sizes:
        made.alive[made.make(size, "", recorded=False)] = size, stack("backward"), 0
        made.make(size, "", recorded=False)  # the weight
    for place in range(4):
        made.make(20 * MIB, "forward", 20 + place)
    found = explain(made.snapshot())
    (cause,) = found.unexpected
    assert (cause.kind, cause.size) == ("gradients of the last step", 15 * MIB) and "micro-batches" in cause.words
    assert (found.parts["gradients"], found.parts["weights"]) == (15 * MIB, 15 * MIB)
    assert "from before the recording" not in found.parts


@pytest.mark.parametrize("copies", [4, 5])
def test_a_size_that_occurs_a_fourth_time_is_no_second_model(copies: int) -> None:
    """Weight and two moments of three sizes; of the embedding a fourth block: its gradient. Only all sizes are a copy."""
    made = Recording()
    sizes = [3 * MIB, 5 * MIB, 7 * MIB]
    for size in sizes:
        for _ in range(3 if size < 7 * MIB and copies == 4 else 4):
            made.make(size, "", recorded=False)
    made.free(made.make(30 * MIB, "forward"), phase="backward")
    gradients = [made.make(size, "backward") for size in sizes]
    made.free(made.make(MIB, "optimizer"))
    made.free(*gradients, phase="zero_grad")
    found = explain(made.snapshot())
    assert (found.parts["weights"], found.parts["optimizer state"]) == (15 * MIB, 30 * MIB)
    assert ("a further copy of weights" in found.parts) == (copies == 5)
    assert [cause.size for cause in found.unexpected] == [15 * MIB] * (copies == 5)


def test_steps_of_an_automaton_are_calls() -> None:
    """Forty times the same two weights: no layers, as backward leaves two gradients."""
    made = Recording()
    for _ in range(2):
        saved = [made.make(2 * MIB, "forward", 20 + place) for _ in range(40) for place in range(2)]
        for block in reversed(saved):
            made.free(block, phase="backward")
        gradients = [made.make(size * MIB, "backward") for size in (1, 2)]
        made.free(made.make(MIB, "optimizer"))
        made.free(*gradients, phase="zero_grad")
    found = explain(made.snapshot())
    assert len(found.layers) == 40 and found.layer_words == "calls"
    assert "40 calls of 4 MiB" in str(found) and "ac='full': each call recomputed" in str(found)


def test_a_long_source_line_is_whole() -> None:
    made = Recording()
    name = "a_module_of_a_model_whose_name_is_longer_than_a_column_of_forty.py"
    for line in (31, 32):
        made.make(MIB * line, "", frames=[frame("forward", f"/job/{name}", line)])
    assert f"\n  {name}:31 " in str(explain(made.snapshot()))


def test_gradients_that_zeros_fill_are_found() -> None:
    """``zero_grad(set_to_none=False)``: the gradients stay, and each forward has them."""
    made = Recording()
    made.make(4 * MIB, "build")
    for number in range(3):
        saved = [made.make(40 * MIB, "forward", 20)]
        if not number:
            made.make(4 * MIB, "backward")
        made.free(*saved, phase="backward")
        if not number:
            made.make(4 * MIB, "optimizer")
            made.make(4 * MIB, "optimizer")
        made.free(made.make(MIB, "optimizer"))
    (cause,) = explain(made.snapshot()).unexpected
    assert cause.size == 4 * MIB and "set_to_none=True" in cause.change


def test_a_pipelines_micro_batches_keep_what_their_backward_frees() -> None:
    """One forward one backward: the second micro-batch's forward came before the first one's backward."""
    made = Recording()
    first = made.make(8 * MIB, "forward", 20)
    for _ in range(4):
        second = made.make(8 * MIB, "forward", 20)
        made.free(first, phase="backward")
        made.free(made.make(MIB, "backward"), phase="backward")
        first = second
    assert not explain(made.snapshot()).unexpected


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
    # Weights and state are 16 MiB: the second forward has 33 and 2 more, each backward has 8 of gradients.
    assert {name: size // MIB for name, size in found.peaks.items()} == {
        "forward": 51,
        "backward": 24,
        "the optimizer's step": 24,
    }
    assert dict(found.parts) == {
        "activations": 33 * MIB,
        "weights": 8 * MIB,
        "optimizer state": 8 * MIB,
        "loss": 2 * MIB,
    }
