"""Plans in float8: of linears that their owner made `Float8Linear`, and of ``precision="fp8"``; emulated on the CPU."""

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from nemo_like import Job, dry_run, parallelize
from nemo_like._util.extras import MissingExtraError
from nemo_like.activation_checkpointing.plan import Plan, PlanError
from nemo_like.options import MemoryBudget, Precision, TensorParallel
from nemo_like.planning.devices import resolve_device
from nemo_like.planning.fit import fit
from nemo_like.planning.planner import plan_for
from nemo_like.planning.predictions.rank import peak_of
from nemo_like.planning.query import PlanQuery
from tests.checks import assert_bitwise, refused, same, seeded, step
from tests.models.fit_models import llama
from tests.models.tiny import labelled
from tests.models.tiny import llama as tiny_llama
from tests.planning.queries import Text, part_of, plan_of
from tests_distributed.allocated import loop_peak_bytes

float8 = pytest.importorskip("torchao.float8")


def _small(**sizes: int) -> Any:
    return seeded(tiny_llama, num_hidden_layers=2, **sizes)


def _model(**sizes: int) -> Any:
    model = _small(**sizes) if sizes else llama()
    config = float8.Float8LinearConfig(emulate=True)
    for layer in model.model.layers:
        float8.convert_to_float8_training(layer, config=config)
    return model


@pytest.mark.few(1)
@pytest.mark.parametrize("ac", ["none", "full", "5MiB"])
def test_the_peak_is_within_one_per_cent(ac: str) -> None:
    sample = _sample()
    query = PlanQuery.from_model(_model(), sample, Job.of(gpu=resolve_device("cpu")))
    plan = plan_of(query, MemoryBudget.parse(ac)) if "MiB" in ac else None
    predicted = peak_of(query, query.uniform(ac)).total if plan is None else plan.peak_bytes
    model = parallelize(_model(), "single", ac=ac if plan is None else plan, device="cpu")
    bare = _model()
    for each in (model, bare):
        each(**sample).loss.backward()
    pairs = zip(model.parameters(), bare.parameters(), strict=True)
    assert all(torch.equal(own.grad, other.grad) for own, other in pairs)
    model.zero_grad()
    measured = loop_peak_bytes(model, sample)
    assert plan is None or 4 << 20 < predicted <= 5 << 20
    assert abs(predicted - measured) <= 0.01 * measured


@pytest.mark.few(1)
@pytest.mark.parametrize("ac", ["none", "full"])
def test_what_an_operator_on_float8_runs_inside_counts(ac: str) -> None:
    """Where the peak is inside a layer: the emulated product makes both operands again, 3 to 4 % of these peaks."""
    sizes = dict(hidden_size=64, intermediate_size=256, vocab_size=32, max_position_embeddings=256)
    sample = labelled(torch.randint(32, (4, 256), generator=torch.Generator().manual_seed(0)))
    query = PlanQuery.from_model(_model(**sizes), sample, Job.of(gpu=resolve_device("cpu")))
    predicted = peak_of(query, query.uniform(ac))
    measured = loop_peak_bytes(parallelize(_model(**sizes), "single", ac=ac, device="cpu"), sample)
    assert abs(predicted.total - measured) <= 0.005 * measured


BUDGETS = {"fp8": "4800KiB", "fp8-rowwise": "4800KiB", "fp8-gather": "4800KiB"}


def _sample() -> dict[str, torch.Tensor]:
    return labelled(torch.randint(512, (4, 64), generator=torch.Generator().manual_seed(0)))


@pytest.mark.long
@pytest.mark.parametrize(
    "word", ["fp8", *(pytest.param(word, marks=pytest.mark.long) for word in ("fp8-rowwise", "fp8-gather"))]
)
def test_a_budget_beside_the_word_gives_the_same_gradients_and_peaks_as_planned(word: str) -> None:
    budget, sample = BUDGETS[word], _sample()
    said = {"precision": word, "device": "cpu"}
    plan = plan_for(llama(), ac=budget, sample_input=sample, **said)
    model = parallelize(llama(), "single", ac=budget, sample_input=sample, **said)
    own = step(model, **sample)
    assert_bitwise(own, step(parallelize(llama(), "single", ac="none", **said), **sample))
    lowered = step(parallelize(llama(), "single", ac="none", precision="bf16", device="cpu"), **sample)
    assert not same(own, lowered), "float8 rounds otherwise"
    model.zero_grad()
    measured = loop_peak_bytes(model, sample)
    bf16 = plan_for(llama(), ac=budget, sample_input=sample, gpu="cpu", precision="bf16")
    assert plan.peak_bytes <= 4800 << 10 and abs(plan.peak_bytes - measured) <= 0.01 * measured
    assert {layer.label for layer in plan.layers} - {"none", "full"}, "a plan that keeps some outputs"
    assert plan.matmuls == ("fp8" if word == "fp8-gather" else word) and bf16.matmuls is None


def test_the_model_that_is_planned_stays_as_it_is() -> None:
    model = llama()
    before = {name: (type(module), id(module)) for name, module in model.named_modules()}
    tensors = [(id(p), p.clone()) for p in model.parameters()]
    plan_for(model, ac="50%", sample_input=_sample(), gpu="cpu", precision="fp8")
    assert {name: (type(module), id(module)) for name, module in model.named_modules()} == before
    assert all(id(p) == n and torch.equal(p, was) for p, (n, was) in zip(model.parameters(), tensors))


def test_a_plan_runs_with_the_precision_that_it_was_made_for_alone(tmp_path: Any) -> None:
    said = {"gpu": "cpu"}
    plan = plan_for(llama(), ac="50%", sample_input=_sample(), precision="fp8", **said)
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again == plan
    model = parallelize(llama(), "single", ac=again, precision="fp8", device="cpu")
    plain = parallelize(llama(), "single", ac="none", precision="fp8", device="cpu")
    assert_bitwise(step(model, **_sample()), step(plain, **_sample()))
    bare = llama()
    for precision in ("fp8-rowwise", "bf16", None):
        with pytest.raises(PlanError, match=r"was made for precision='fp8'.*Make the plan again"):
            parallelize(bare, "single", ac=again, precision=precision, device="cpu")
    other = plan_for(llama(), ac="50%", sample_input=_sample(), precision="bf16", **said)
    with pytest.raises(PlanError, match="linears as they are, and the model is to run with precision='fp8'"):
        parallelize(bare, "single", ac=other, precision="fp8", device="cpu")
    assert not any("Float8" in type(module).__name__ for module in bare.modules())


@pytest.mark.parametrize(
    ("setup", "device", "message"),
    [
        ({"precision": Precision("bf16", matmuls="fp8-gather"), "world_size": 2}, "cpu", "gathers in float8 are not"),
        ({}, "a100-80gb", "a100-80gb has compute capability 8.0; products in float8 need 8.9"),
    ],
)
def test_what_is_not_planned_is_refused(setup: dict[str, Any], device: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made = Job.of(**{"precision": Precision("bf16", matmuls="fp8")} | setup, gpu=resolve_device(device))
        PlanQuery.from_model(llama(), _sample(), made)


def test_without_torchao_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    own = {"precision": "fp8", "gpu": "cpu"}
    for ask in (
        lambda model: plan_for(model, ac="4800KiB", sample_input=_sample(), **own),
        lambda model: parallelize(model, "single", ac="4800KiB", precision="fp8", sample_input=_sample(), device="cpu"),
        lambda model: fit(model, gpus=1, seq_len=64, micro_batch=4, **own),
    ):
        with refused("pip install torchao (in a checkout of nemo_like: pip install '.[fp8]')", MissingExtraError):
            ask(llama())


def test_products_of_layers_count_at_the_rate_of_float8_where_it_is_known() -> None:
    device = resolve_device("h100-80gb")
    for float8 in (True, False):
        rates = {name: rate for name, rate in device.matmul_flops.items() if name != "float8" or float8}
        own, plain = (
            PlanQuery.from_model(
                llama(), _sample(), Job.of(precision=precision, gpu=replace(device, matmul_flops=rates))
            )
            for precision in (Precision("bf16", matmuls="fp8"), Precision("bf16"))
        )
        assert part_of(own).problems[0].device.matmul_flops["half"] == rates["float8" if float8 else "half"]
        assert own.device.matmul_flops == part_of(plain).problems[0].device.matmul_flops == rates


def test_fit_compares_precisions() -> None:
    asked = dict(gpu="h100-80gb", seq_len=64, micro_batch=4, offload="none", loss="model", cp=1, ac="full", gpus=2)
    words = ["fp8", "bf16"]
    report = fit(Text(2), precision=words, pp=[1, 2], schedule="1f1b", global_batch=8, **asked)
    assert {(c.job.precision.matmuls, c.layout.pp) for c in report.candidates} == {
        (word, stages) for word in ("fp8", None) for stages in (1, 2)
    }
    assert "fp8" in report.table().text()
    split = fit(llama(1), precision=words, tp=2, sequence_parallel=False, **asked)
    assert {c.job.precision.matmuls for c in split.candidates} == {"fp8", None}


def test_sequences_are_gathered_in_float8() -> None:
    """On a GPU. A forward has two gathers of sequences and two reduce-scatters of bfloat16, with tp=2."""
    tp, sizes = TensorParallel(2, sequence_parallel=True), {}
    model = _small(hidden_size=64, intermediate_size=128, vocab_size=512)
    for word in ("bf16", "fp8", "fp8-rowwise"):
        job = Job.of(gpu="h100", world_size=2, tp=tp, precision=word, ac="full")
        query = PlanQuery.from_model(model, _sample(), job)
        sizes[word] = [size for size, _ in query.stages[0].part.block(0, compiled=False).pieces]
        assert peak_of(query, query.uniform("full")).total == dry_run(model, job, _sample()).peak_bytes
    hidden = 4 * 64 * 64 * 2
    assert sizes["bf16"] == sizes["fp8-rowwise"] == [hidden] * 4
    assert sizes["fp8"] == [hidden // 2, hidden] * 2
