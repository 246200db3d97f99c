"""The optimizer's step in backward: the weights of the loop that steps behind it, bit by bit, and its bytes as predicted."""

import copy
import functools
from typing import Any

import pytest
import torch
from torch import nn

from nemo_like import FSDP2, DryRun, Job, OptimizerInBackward, StepSpec, dry_run, optimizer_in_backward, parallelize
from nemo_like.fake_rank import SAME
from nemo_like.planning.predictions.rank import parts_at_peak
from nemo_like.planning.query import PlanQuery
from tests.checks import on_meta, same, seeded, update, weights_of
from tests.models.blocks import Stack
from tests.models.tiny import VOCAB, Decoder, Headed, llama
from tests_distributed.spawn import on_ranks

ADAMW: Any = functools.partial(torch.optim.AdamW, lr=1e-2)


def _trained(strategy: str, ac: str, *, in_backward: bool, steps: int = 3) -> tuple[nn.Module, Any]:
    model = parallelize(seeded(Decoder), strategy, ac, device="cpu")
    optimizer: Any = optimizer_in_backward(model, ADAMW) if in_backward else ADAMW(model.parameters())
    for step in range(steps):
        _backward(model, step)
        if not in_backward:
            update(optimizer)
    return model, optimizer


def _backward(model: nn.Module, seed: int) -> None:
    ids = torch.randint(VOCAB, (2, 8), generator=torch.Generator().manual_seed(seed))
    model(ids).float().logsumexp(-1).mean().backward()


def _same(model: nn.Module, other: nn.Module) -> bool:
    return same(weights_of(model), weights_of(other))


@pytest.mark.parametrize("ac", ["none", "full"])
def test_one_process_trains_the_same_weights(ac: str) -> None:
    model, _ = _trained("single", ac, in_backward=True)
    assert _same(model, _trained("single", ac, in_backward=False)[0])
    assert all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize("ac", ["none", "full"])
@on_ranks(2)
def test_shards_are_trained_the_same(rank: int, world: int, ac: str) -> None:
    model, handle = _trained("fsdp2", ac, in_backward=True)
    assert _same(model, _trained("fsdp2", ac, in_backward=False)[0])
    assert all(param.grad is None for param in model.parameters())
    assert list(handle.state_dict()) == [name for name, _ in model.named_parameters()]


@on_ranks(2)
def test_a_parameter_that_no_rank_uses_is_not_stepped(rank: int, world: int) -> None:
    """Judge: the loop that steps behind backward. Momentum and weight decay would move a parameter without a gradient."""
    x = torch.rand(4, 8, generator=torch.Generator().manual_seed(rank))
    kinds: tuple[Any, ...] = (ADAMW, functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1))
    for tasks in (("aaaa", "aaaa"), ("abab", "abab"), ("aabb", "abba")):  # of the two ranks, in four steps
        for build in kinds:
            behind, within = (parallelize(seeded(Headed), "fsdp2", "none", device="cpu") for _ in range(2))
            optimizer = build(behind.parameters())
            optimizer_in_backward(within, build)
            for task in tasks[rank]:
                behind(x, task).square().mean().backward()
                update(optimizer)
                within(x, task).square().mean().backward()
                assert all(param.grad is None for param in within.parameters())
                assert _same(behind, within), (tasks, task)


def test_it_goes_on_from_its_state() -> None:
    model, handle = _trained("single", "none", in_backward=True, steps=2)
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(handle.state_dict())
    _backward(model, 2)
    again, other = _trained("single", "none", in_backward=True, steps=0)
    again.load_state_dict(weights)
    other.load_state_dict(state)
    _backward(again, 2)
    assert _same(model, again)
    with pytest.raises(ValueError, match="state_dict has a state for 'other'"):
        other.load_state_dict(state | {"other": {}})
    other.remove()
    _backward(again, 3)
    assert _same(model, again) and all(param.grad is not None for param in again.parameters())


def test_a_tied_weight_is_stepped_once_and_one_without_a_gradient_not_at_all() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False), "c": nn.Linear(2, 2)})
    model["b"].weight = model["a"].weight
    handle: OptimizerInBackward = optimizer_in_backward(model, ADAMW)
    model["b"](model["a"](torch.ones(1, 2))).sum().backward()
    assert list(handle.optimizers) == ["a.weight", "c.weight", "c.bias"]
    assert [len(each["state"]) for each in handle.state_dict().values()] == [1, 0, 0]
    assert handle.state_dict()["a.weight"]["state"][0]["step"] == 1


WIDTH, LAYERS = 64, 3


def _wide() -> nn.Module:
    """Layers whose weights are nearly all that there is."""
    return Stack((nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)), head=lambda x: x.square().sum())


def _run(optimizer: str, in_backward: bool, **asked: Any) -> DryRun:
    step = StepSpec(optimizer=optimizer, in_backward=in_backward)
    return dry_run(
        on_meta(_wide), Job.of(ac="none", gpu="h100-80gb", step=step, layers="layers.*", **asked), torch.zeros(1, WIDTH)
    )


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("optimizer", "asked"),
    [
        ("adamw", {"ac": "full", "gpu": "h100-80gb"}),
        ("adamw-fused", {"ac": "full", "gpu": "h100-80gb", "world_size": 4, "precision": "bf16"}),
        ("adamw", {"ac": "none", "gpu": "cpu"}),
        ("adamw", {"ac": "full", "gpu": "cpu", "world_size": 4, "dp_replicate": 2}),
    ],
)
def test_a_plan_says_what_the_rank_takes(optimizer: str, asked: dict[str, Any]) -> None:
    ids = torch.zeros(1, 16, dtype=torch.long)
    # The peak is where the weights of a layer are stepped.
    model = on_meta(llama, vocab_size=64, intermediate_size=1024, num_hidden_layers=2)
    job = Job.of(step=StepSpec(optimizer=optimizer, in_backward=True), **asked)
    found = dry_run(model, job, {"input_ids": ids, "labels": ids})
    assert found.against is not None and abs(found.against - found.peak_bytes) <= SAME


def test_gradients_are_freed_one_by_one() -> None:
    behind, within = (_run("adamw-foreach", in_backward) for in_backward in (False, True))
    size = 4 * WIDTH * WIDTH
    # Behind backward: all gradients, and a temporary of each. Within it, both of the one that is stepped.
    assert behind.peak_bytes == behind.against == 5 * LAYERS * size + behind.parts["outside of layers"]
    assert within.parts["gradients"] == within.parts["optimizer"] - 2 * LAYERS * size == size
    with pytest.raises(ValueError, match="in_backward is True with microbatches=2"):
        StepSpec(microbatches=2, in_backward=True)


def test_a_compiled_layer_has_the_temporaries_of_an_update_too() -> None:
    model = on_meta(_wide)
    size, parts = 4 * WIDTH * WIDTH, []
    for compile in (None, "aot_eager"):
        job = Job.of("single", ac="none", compile=compile, gpu="h100-80gb", layers="layers.*",
                     step=StepSpec(optimizer="adamw-foreach", in_backward=True))  # fmt: skip
        query = PlanQuery.from_model(model, torch.zeros(1, WIDTH, device="meta"), job)
        parts.append(parts_at_peak(query, 0, query.uniform("none")))
    # A layer has one weight: its gradient and the temporary of its update, beside the gradients of input and output.
    assert [part["running layer"] for part in parts] == [2 * size + 2 * 4 * WIDTH] * 2


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"pp": 2}, "pp=2: a stage reduces"),
        ({"cp": 2}, "cp=2: it was not tried"),
        ({"ep": 2}, "ep=2: it was not tried"),
        ({"strategy": "ddp"}, "strategy='ddp': gradients are summed"),
        ({"strategy": FSDP2(cpu_offload=True)}, "cpu_offload=True: backward would wait"),
    ],
)
def test_what_it_does_not_go_with_is_refused(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=f"StepSpec.in_backward is True with {said}.*Leave one of the two out"):
        Job.of(step=StepSpec(in_backward=True), world_size=2, **asked)
