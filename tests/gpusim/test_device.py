"""The simulated device itself: numbers, memory, streams, and the races that it reports."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from nemo_like import parallelize
from nemo_like.options import FSDP2, OffloadConfig, parallel
from tests.checks import seeded
from tests.gpusim import on_device, on_devices
from tests.gpusim.device import Device, RaceError
from tests.gpusim.faults import FAULTS, all_right, how_it_shows
from tests.gpusim.streams import host
from tests.gpusim.test_package import Model
from tests.tools.branch_finder import Branch, find, package
from tests.tools.branch_reasons import REASONS
from tests.tools.branches import judge

WIDTH = 64


def _numbers(device: Device) -> None:
    values = torch.randn(4, 4)
    there = values.to("gpusim")
    assert there.device == torch.device("gpusim", 0) and type(there) is torch.Tensor
    assert torch.equal(((there @ there).relu() + 1).cpu(), (values @ values).relu() + 1)
    assert torch.equal(there[1:3].t().reshape(-1).cpu(), values[1:3].t().reshape(-1))
    assert there.untyped_storage().nbytes() == 64
    module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))
    moved = copy.deepcopy(module).to("gpusim")
    module(values).sum().backward()
    moved(there).sum().backward()
    for parameter, other in zip(module.parameters(), moved.parameters()):
        assert torch.equal(parameter.grad, other.grad.cpu())


def _freed(device: Device) -> tuple[list[int], bool]:
    first = torch.ones(WIDTH, device="gpusim")
    address = first.data_ptr()
    del first
    second = torch.empty(WIDTH, device="gpusim")
    return [address, second.data_ptr()], bool(second.isnan().all())


def test_freed_memory_is_nan_and_handed_out_again_at_once() -> None:
    addresses, is_nan = on_device(_freed)
    assert addresses[0] == addresses[1] and is_nan


def _random(device: Device) -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    torch.gpusim.manual_seed(3)
    state = torch.gpusim.get_rng_state()
    drawn = torch.randn(8, device="gpusim")
    assert torch.equal(torch.get_rng_state(), before)
    torch.gpusim.set_rng_state(state)
    assert torch.equal(torch.randn(8, device="gpusim").cpu(), drawn.cpu())


def _late(device: Device) -> list[float]:
    source, target = torch.ones(4, device="gpusim"), torch.zeros(4, pin_memory=True)
    side = torch.gpusim.Stream()
    side.wait_stream(torch.gpusim.current_stream())
    with torch.gpusim.stream(side):
        target.copy_(source, non_blocking=True)
    early = target[0].item()
    side.synchronize()
    return [early, target[0].item()]


def test_with_a_seed_a_copy_may_run_early() -> None:
    assert [on_device(_late, seed=seed) for seed in (0, 4)] == [[0.0, 1.0], [1.0, 1.0]]


def _events(device: Device) -> None:
    side, event = torch.gpusim.Stream(), torch.gpusim.Event()
    event.record(side)
    assert event.query()  # nothing was given
    with torch.gpusim.stream(side):
        made = torch.ones(4, device="gpusim")
    event.record(side)
    assert not event.query()
    torch.gpusim.current_stream().wait_event(event)
    assert not event.query()  # the host does not know yet
    assert made.sum().item() == 4
    assert event.query()


def _copied(device: Device, wait: bool, lend: bool, keep: bool) -> float:
    """Copy what was computed to the host on a side stream, and let go of it."""
    side, target = torch.gpusim.Stream(), torch.zeros(WIDTH, pin_memory=True)
    source = torch.ones(WIDTH, device="gpusim") * 2
    if wait:
        side.wait_stream(torch.gpusim.current_stream())
    with torch.gpusim.stream(side):
        target.copy_(source, non_blocking=True)
    if lend:
        source.record_stream(side)
    kept = source if keep else None
    del source
    others = [torch.zeros(WIDTH, device="gpusim") for _ in range(2)]  # take the same memory, if they can
    side.synchronize()
    del kept, others
    return target.sum().item()


def _not_waited(device: Device) -> None:
    side = torch.gpusim.Stream()
    with torch.gpusim.stream(side):
        made = torch.ones(4, device="gpusim")
    made.add_(1)  # on the first stream


def _two_readers(device: Device) -> float:
    side, made = torch.gpusim.Stream(), torch.ones(4, device="gpusim")
    side.wait_stream(torch.gpusim.current_stream())
    made.record_stream(side)
    with torch.gpusim.stream(side):
        one = made.sum()
    other = made.sum()
    torch.gpusim.current_stream().wait_stream(side)
    return (one + other).item()


def _pinned_again(device: Device, wait: bool) -> float:
    side, slab = torch.gpusim.Stream(), torch.zeros(4, pin_memory=True)
    back, ones = torch.empty(4, device="gpusim"), torch.ones(4, device="gpusim")
    slab.copy_(ones, non_blocking=True)
    event = torch.gpusim.current_stream().record_event()
    if wait:
        side.wait_event(event)
    with torch.gpusim.stream(side):
        slab.copy_(torch.zeros(4, device="gpusim"), non_blocking=True)
    side.synchronize()
    del back
    return slab.sum().item()


def _cycle(device: Device) -> int:
    made = [torch.ones(4, device="gpusim")]
    made.append(made)  # type: ignore[arg-type]
    del made
    gc.collect()
    assert not host.queues[0]
    return torch.gpusim.memory_allocated()


def _used_before(device: Device, wait: bool) -> float:
    side, source = torch.gpusim.Stream(), torch.zeros(WIDTH, pin_memory=True)
    (torch.ones(WIDTH, device="gpusim") * 2).sum()
    target = torch.empty(WIDTH, device="gpusim")  # the bytes of what was summed, maybe is being summed
    if wait:
        side.wait_stream(torch.gpusim.current_stream())
    with torch.gpusim.stream(side):
        target.copy_(source, non_blocking=True)
    torch.gpusim.current_stream().wait_stream(side)
    return target.sum().item()


def _refused(device: Device) -> None:
    def refuse(packed: torch.Tensor) -> torch.Tensor:
        raise KeyError("from a hook")

    leaf = torch.ones(WIDTH, device="gpusim", requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, refuse):
        loss = leaf.sin().sum()
    loss.backward()


@pytest.mark.parametrize(
    ("function", "given", "result"),
    [
        pytest.param(_numbers, (), None, id="operators give the bits of the CPU"),
        pytest.param(_random, (), None, id="the device has a generator of its own"),
        pytest.param(_late, (), [0.0, 1.0], id="a copy waits until somebody waits for it"),
        pytest.param(_events, (), None, id="the host knows what it waited for"),
        pytest.param(_copied, (True, True, False), 2.0 * WIDTH, id="memory that is lent is right"),
        pytest.param(_copied, (True, False, True), 2.0 * WIDTH, id="memory that is kept is right"),
        pytest.param(_two_readers, (), 8.0, id="two streams may read"),
        pytest.param(_pinned_again, (True,), 0.0, id="pinned memory is used again after a wait"),
        pytest.param(_cycle, (), 0, id="what a cycle held is freed"),
        pytest.param(_used_before, (True,), 0.0, id="device memory is used again after a wait"),
    ],
)
def test_on_the_device(function: Callable[..., Any], given: tuple[Any, ...], result: Any) -> None:
    assert on_device(function, *given) == result


_UNORDERED = r"a copy from gpusim to cpu on stream 1.*: nothing orders them"


@pytest.mark.parametrize(
    ("function", "given", "error", "match"),
    [
        pytest.param(_copied, (False, True, False), RaceError, _UNORDERED, id="a copy without a wait"),
        pytest.param(_copied, (True, False, False), RaceError, _UNORDERED, id="memory that is not lent"),
        pytest.param(
            _not_waited, (), RaceError, r"write by aten\.add_\.Tensor on stream 0 and write by aten\.fill_",
            id="a result of another stream without a wait",
        ),
        pytest.param(
            _pinned_again, (False,), RaceError, "write by a copy from gpusim to cpu on stream 1 and write by a copy",
            id="pinned memory without a wait",
        ),
        pytest.param(
            _used_before, (False,), RaceError,
            "a copy from cpu to gpusim on stream 1 and write by what had these bytes before",
            id="memory that was used before without a wait",
        ),
        pytest.param(_refused, (), KeyError, "from a hook", id="an exception of a hook arrives"),
    ],
)  # fmt: skip
def test_what_the_device_raises(
    function: Callable[..., Any], given: tuple[Any, ...], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        on_device(function, *given)


SOURCE = """
def f(x, kind, items, module):
    if x.device.type == "cpu":
        return 1
    if x.type != "cpu" and items:
        x.a()
    else:
        x.b()
    if not (kind in ("cuda", "mps")):
        x.c()
    wide = None if x.is_cuda else x
    if torch.accelerator.is_available():
        pass
    many = [each for each in items if each.type == "cuda"]
    pinned = kind != "cpu"
    either = kind == "cpu" or items
    if hasattr(module, "max_memory_allocated"):
        x.d()
    if x.type != "meta" or kind == "layer":
        x.e()
    return torch.cuda.is_initialized()
"""


def test_finds_each_kind_of_branch():
    assert [(each.line, each.form, each.wanted, each.side) for each in find(SOURCE, "f.py")] == [
        (3, "if", False, (5, 8)),
        (5, "if", True, (6, 6)),
        (9, "if", True, None),
        (11, "conditional", True, None),
        (12, "if", True, (13, 13)),
        (14, "comprehension", True, None),
        (15, "value", True, None),
        (16, "operand", False, None),
        (17, "if", True, (18, 18)),
        (21, "value", True, None),
    ]


@pytest.mark.parametrize(
    ("seen", "result"),
    [
        ([], "not reached"),
        ([(3,), (3, 7, True)], "CPU side only"),
        ([(3,), (3, 7, False)], "CPU side only"),  # raised in between
        ([(3,), (3, 7, True), (3, 7, False), (5,)], "ran"),
        ([(3,), (5,)], "ran"),  # the comparison could not be evaluated
    ],
)
def test_says_what_ran(seen: list[tuple[object, ...]], result: str):
    branch: Branch = find(SOURCE, "/f.py")[0]
    judge([branch], {("/f.py", *each) for each in seen})
    assert branch.result == result


def test_reasons_name_branches():
    assert set(REASONS) <= {(branch.file, branch.condition) for branch in package()}


def _gradients(_: Any, jobs: list[dict[str, Any]]) -> list[bool]:
    """Return for each job whether its gradients of three steps are those of the first."""
    parallel.BACKENDS["gpusim"] = "gloo"
    rank = torch.distributed.get_rank()
    found: list[list[torch.Tensor]] = []
    bare, x = seeded(Model).to("gpusim"), torch.randn(8, 16).to("gpusim") * (1 + rank)
    for job in jobs:
        model: nn.Module = parallelize(copy.deepcopy(bare), device="gpusim", **job)
        optimizer, grads = torch.optim.SGD(model.parameters(), lr=0.01), []
        for step in range(3):
            seeded(model, x, seed=step).square().mean().backward()
            grads += [p.grad.full_tensor().cpu() for p in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
        found.append(grads)
    return [all(map(torch.equal, found[0], grads)) for grads in found]


MOVES = OffloadConfig(mode="all", min_bytes=0, max_inflight_bytes=1)
JOBS = {
    "checkpointing": [{"ac": "full"}, {"ac": "selective"}],
    "parameters on the host": [{"strategy": FSDP2(cpu_offload=True)}],
    "offloading": [{"ac": "none", "offload": MOVES}, {"ac": "selective", "offload": MOVES}],
    "prefetch": [{"strategy": FSDP2(forward_prefetch=ahead, backward_prefetch=ahead)} for ahead in (0, 2)],
    "kept gathered": [{"ac": "full", "strategy": FSDP2(reshard_after_forward=False)}],
}


@pytest.mark.few(3)
@pytest.mark.parametrize("name", JOBS)
def test_two_ranks_are_bitwise_and_nothing_races(name: str) -> None:
    jobs = [{"ac": "none"}, *JOBS[name]]
    assert on_devices(2, _gradients, jobs) == [[True] * len(jobs)] * 2


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name: str) -> None:
    assert on_device(how_it_shows, name) in FAULTS[name].shows_as.split(" or ")


@pytest.mark.parametrize("seeds", [[None, 0], pytest.param([1, 2, 3, 4], marks=pytest.mark.long)])
def test_without_a_fault_all_is_equal_and_nothing_races(seeds: list[int | None]) -> None:
    assert on_device(all_right, seeds) == []
