"""CPU memory in plans: predicted peaks with `offload=` against a step, budgets beside it, and ``--cpu-offload``."""

import json
import re
from typing import Any

import pytest
import torch

from nemo_like import Job, MemoryBudget, OffloadConfig, PlanSearch, StepSpec, parallelize, plan_for
from nemo_like._util.forwards import step_of
from nemo_like.cli import main
from nemo_like.layers import find_layers
from nemo_like.models import resolve_model
from nemo_like.offload.backends import Backend
from nemo_like.offload.offloader import Offloading, apply_offloading
from nemo_like.planning import BudgetError, apply_plan
from nemo_like.planning.devices import resolve_device
from nemo_like.planning.planner import describe
from nemo_like.planning.predictions.budget_search import choose
from nemo_like.planning.predictions.rank import peak_of
from nemo_like.planning.query import PlanQuery
from nemo_like.planning.selection.layer import Choice
from tests.models.tiny import labelled, llama
from tests.planning.queries import part_of
from tests_distributed.allocated import step_peak_bytes

SMALL = OffloadConfig("boundary", min_bytes=0, max_inflight_bytes=1, prefetch=1)
STEP = StepSpec(optimizer="sgd", zero_grad="zero")
"""With gradients there all the time, the peak is where most is held."""


def _model() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    source = resolve_model("llama-tiny")
    return source.build(), source.sample_input(4, 128)


def _query(offload: OffloadConfig) -> PlanQuery:
    model, sample = _model()
    return PlanQuery.from_model(
        model, sample, Job.of(step=STEP, offload=offload).change(gpu=resolve_device("h100-80gb"))
    )


def test_inputs_on_the_host_leave_the_prediction() -> None:
    plain, moved = _query(OffloadConfig("none")), _query(SMALL)
    full = plain.uniform("full")
    before, after = describe(plain, full, "full"), describe(moved, full, "full")
    (inputs,) = {problem.trace.input_bytes for problem in part_of(plain).problems}
    layers = len(full[0])
    assert after.held_bytes == before.held_bytes - (layers - 1) * inputs  # the last layer's stay
    assert sum(layer.host_bytes for layer in after.layers) == (layers - 1) * inputs
    assert before.peak_bytes - after.peak_bytes == (layers - 2) * inputs  # one is fetched ahead


def test_what_is_kept_moves_with_saved_and_small_tensors_stay() -> None:
    saved = _query(OffloadConfig("saved", min_bytes=0))
    boundary = _query(OffloadConfig("boundary", min_bytes=0))
    choices = saved.uniform("selective")[0]
    assert sum(saved.stages[0].moved(choices)) > sum(boundary.stages[0].moved(choices)) > 0
    assert saved.stages[0].moved(choices)[-1] == 0
    assert not any(_query(OffloadConfig("saved", min_bytes=1 << 40)).stages[0].moved(choices))
    assert not any(saved.stages[0].moved(saved.uniform("none")[0]))


def test_copies_in_flight_are_on_the_device() -> None:
    many = _query(OffloadConfig("boundary", min_bytes=0))
    full = many.uniform("full")  # all of it may be on its way at one time
    assert peak_of(many, full).total == peak_of(_query(OffloadConfig("none")), full).total


@pytest.mark.long
def test_offload_is_advised_only_where_it_would_help() -> None:
    model, sample = _model()
    with pytest.raises(BudgetError) as small:  # its inputs are smaller than what is worth moving
        plan_for(model, ac="1MiB", sample_input=sample, gpu="h100-80gb")
    assert "offload" not in str(small.value)
    source = resolve_model("llama3-8b")
    big, asked = source.build("meta"), {"ac": "1GiB", "gpu": "h100-80gb", "world_size": 8, "precision": "bf16"}
    batch = source.sample_input(4, 8192)
    with pytest.raises(BudgetError) as large:
        plan_for(big, sample_input=batch, **asked)
    assert re.search(r"offload='boundary' \([\d.]+GiB less\)", str(large.value))
    with pytest.raises(BudgetError) as moved:
        plan_for(big, sample_input=batch, offload="boundary", **asked)
    assert "offload='" not in str(moved.value) and moved.value.smallest_bytes < large.value.smallest_bytes


def test_the_front_door_plans_with_it() -> None:
    model, sample = _model()
    model = parallelize(model, "single", "50%", sample_input=sample, offload=SMALL, device="cpu")
    assert any(step_of(module, Offloading) for module in model.modules())
    model(**sample).loss.backward()


def _asked(offload: OffloadConfig, host: bool = False) -> tuple[PlanQuery, torch.Tensor]:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 6, "vocab_size": 256}
    model = llama(num_attention_heads=4, **sizes)
    ids = torch.randint(256, (4, 128))
    setup = Job.of(step=StepSpec(optimizer="sgd", zero_grad="zero", keeps_output=False), offload=offload)
    job = setup.change(gpu=resolve_device("cpu"), search=PlanSearch(host=host))
    return PlanQuery.from_model(model, labelled(ids), job), ids


def _choices(query: PlanQuery, mode: str) -> list[list[Choice]]:
    return choose(query, MemoryBudget.parse(mode), mode) if mode.endswith("%") else query.uniform(mode)


def _measured(model: torch.nn.Module, ids: torch.Tensor) -> int:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    step()
    step()
    return step_peak_bytes(model, optimizer, step)


@pytest.mark.few(1)
@pytest.mark.parametrize("inflight", [1, 1 << 30])
@pytest.mark.parametrize(
    ("mode", "offload"), [("full", "boundary"), ("selective", "boundary"), ("selective", "saved"), ("50%", "saved")]
)
def test_a_step_with_an_offload_peaks_as_predicted_to_the_byte(mode: str, offload: str, inflight: int) -> None:
    config = OffloadConfig(offload, min_bytes=0, max_inflight_bytes=inflight, prefetch=1)
    query, ids = _asked(config)
    model, plan = part_of(query).whole, describe(query, _choices(query, mode), mode)
    apply_plan(model, plan, device_type="cpu")
    apply_offloading(model, [layer.module for layer in find_layers(model)], config, backend=Backend())
    assert plan.peak_bytes == _measured(model, ids)


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", ["selective", "50%"])
def test_a_plan_that_moves_what_it_keeps_peaks_as_predicted_to_the_byte(mode: str) -> None:
    query, ids = _asked(OffloadConfig("none"), host=True)
    kinds = [part_of(query).problems[call.kind] for call in part_of(query).traced.calls]
    choices = [
        kind.choice(["host" if word == "save" else word for word in choice.decisions], choice.label)
        if choice.decisions and not choice.host_bytes
        else choice
        for kind, choice in zip(kinds, _choices(query, mode)[0])
    ]
    assert any(choice.host_bytes for choice in choices)
    plan = describe(query, [choices], mode)
    apply_plan(part_of(query).whole, plan, device_type="cpu", backend=(backend := _NeverWaits()))
    assert plan.peak_bytes == _measured(part_of(query).whole, ids)
    assert backend.copied > 0


class _NeverWaits(Backend):
    """Main memory, whose events nobody waits for on the host."""

    copied = 0

    def record(self, stream: Any) -> Any:
        event = super().record(stream)
        event.synchronize = lambda: pytest.fail("the host waits for a copy")
        return event

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        self.copied += 1
        super().copy(target, source, stream)


_ASKED = "plan --model tests.planning.queries:Text --gpus 2 --seq-len 64 --no-what-if"


def _plan(path, *more: str) -> dict:
    main([*_ASKED.split(), "--json", str(path), *more])
    return json.loads(path.read_text())


@pytest.mark.long
def test_the_device_keeps_none_of_the_state_and_the_host_all_of_it(tmp_path):
    here, there = _plan(tmp_path / "here.json"), _plan(tmp_path / "there.json", "--cpu-offload")
    for own, other in zip(here["rows"][:3], there["rows"][:3]):
        state = {"parameters", "optimizer state", "gradients"}
        assert own["peak_parts"].keys() >= {"parameters", "optimizer state"} and not state & other["peak_parts"].keys()
        # Parameters, gradients and two moments, float32, padded alike; and for each of 28 parameters a counter of steps.
        assert other["host_bytes"] == 4 * own["peak_parts"]["parameters"] + 4 * 28 and own["host_bytes"] == 0
        assert other["peak_bytes"] < own["peak_bytes"] and other["reserved_bytes"] >= other["peak_bytes"]
        assert other["step_seconds"] > own["step_seconds"]
    assert "cpu_offload=True" in there["call"]
    assert not any(
        row["fits"] for row in _plan(tmp_path / "small.json", "--cpu-offload", "--host-memory", "1KiB")["rows"]
    )


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--gpu", "rtx-4090"], "beside rtx-4090 is not known"),
        (["--gpus", "1"], "one rank keeps the model whole"),
        (["--pp", "2"], "--cpu-offload with --pp"),
    ],
)
def test_what_cannot_be_planned_is_refused_by_name(more, message, program):
    assert message in program([*_ASKED.split(), "--cpu-offload", *more], 2).err


def test_on_the_cpu_host_memory_is_the_devices_own(tmp_path):
    here, there = (
        _plan(tmp_path / f"{n}.json", "--gpu", "cpu", *more) for n, more in enumerate(([], ["--cpu-offload"]))
    )
    assert [row["peak_parts"] for row in here["rows"]] == [row["peak_parts"] for row in there["rows"]]
