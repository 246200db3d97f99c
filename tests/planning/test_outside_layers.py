"""What a step holds outside of its layers: optimizers' tensors, a loss in chunks, gradients of a large vocabulary."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from nemo_like import FSDP2, ChunkedLoss, Job, StepSpec, parallelize
from nemo_like._util.live_bytes import LiveBytes
from nemo_like.activation_checkpointing import is_checkpointed
from nemo_like.fake_rank import SAME, dry_run
from nemo_like.options.optimizers import TrainedParameter, optimizer_memory
from nemo_like.planning import BudgetError, plan_for
from nemo_like.planning.devices import resolve_device
from nemo_like.planning.predictions.rank import parts_at_peak, peak_of
from nemo_like.planning.query import PlanQuery
from nemo_like.planning.report import PlanReport, Step, make_report, what_if
from tests.checks import assert_bitwise, seeded, step
from tests.models.tiny import labelled, llama, made, tokens
from tests.planning.queries import held_bytes, part_of, reserved

IDS = torch.randint(4096, (4, 96), generator=torch.Generator().manual_seed(0))
BATCH = labelled(IDS)
CHUNKS = ChunkedLoss(chunk_tokens=16)


def wide() -> nn.Module:
    """A decoder whose logits are most of its step."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return seeded(made, "Llama", vocab_size=4096, use_cache=False, **sizes)


def _query(model: nn.Module, sample: Any = BATCH, loss: ChunkedLoss | None = None) -> PlanQuery:
    return PlanQuery.from_model(model, sample, Job.of(loss=loss, gpu=resolve_device("cpu")))


def test_a_budget_that_only_chunks_meet() -> None:
    plain, chunked = _query(wide()), _query(wide(), loss=CHUNKS)
    least, most = (peak_of(chunked, chunked.uniform(mode)).total for mode in ("full", "none"))
    assert least < most < peak_of(plain, plain.uniform("full")).total
    budget = f"{(least + most) // 2}B"
    options = dict(strategy="single", device="cpu", optimizer="adamw", sample_input=BATCH)
    with pytest.raises(BudgetError, match=r"loss='chunked' \([\d.]+MiB less\)"):
        parallelize(wide(), ac=budget, **options)
    model = parallelize(wide(), ac=budget, loss=CHUNKS, **options)
    assert any(is_checkpointed(module) for module in model.modules())
    whole = parallelize(wide(), ac="none", loss=CHUNKS, strategy="single", device="cpu")
    assert_bitwise(step(model, **BATCH), step(whole, **BATCH))


def test_plan_for_takes_what_parallelize_takes() -> None:
    plans = {
        loss: plan_for(wide(), ac="1TiB", sample_input=BATCH, gpu="cpu", loss=loss) for loss in ("model", "chunked")
    }
    assert plans["chunked"].peak_bytes < plans["model"].peak_bytes
    asleep = plan_for(wide().eval(), ac="1TiB", sample_input=BATCH, gpu="cpu", loss="chunked")
    assert asleep.peak_bytes == plans["chunked"].peak_bytes  # a loaded model is in evaluation mode, and will train
    with pytest.raises(ValueError, match=r"loss is 'chunk'.*chunked"):
        plan_for(wide(), ac="1TiB", sample_input=BATCH, gpu="cpu", loss="chunk")
    with pytest.raises(ValueError, match="needs the output head"):
        plan_for(wide().model, ac="1TiB", sample_input={"input_ids": IDS}, gpu="cpu", loss="chunked")


def test_a_head_that_is_no_plain_linear_is_planned() -> None:
    model = wide()
    model.lm_head.register_forward_hook(lambda module, args, output: output)
    assert _query(model, loss=CHUNKS).stages[0].outside().in_chunks


def test_logits_that_stay_whole_are_planned_whole_and_said(logs: pytest.LogCaptureFixture) -> None:
    plain, asked = _query(wide(), {"input_ids": IDS}), _query(wide(), {"input_ids": IDS}, CHUNKS)
    assert peak_of(plain, plain.uniform("full")) == peak_of(asked, asked.uniform("full"))
    assert "gets whole logits, because it is called without labels" in logs.text
    assert "loss='chunked'" not in _changes(plain, {"input_ids": IDS}, make_report(plain, ["50%"], 1 << 24))


def _changes(query: PlanQuery, sample: dict[str, torch.Tensor], report: PlanReport) -> dict[str, int]:
    """The bytes that each change of the job would need."""
    step = Step(part_of(query).whole, query.job, lambda batch, length: (sample, ""))
    return {change.change: change.row.need.bytes for change in what_if(step, query, report)}


def test_the_report_says_what_chunks_would_buy() -> None:
    plain, chunked = _query(wide()), _query(wide(), loss=ChunkedLoss())
    peaks = [peak_of(query, query.uniform("full")).total for query in (plain, chunked)]
    limit = peaks[1] + chunked.input_bytes
    report = make_report(plain, ["50%"], limit)
    assert report.best is None and report.verdict().startswith("Does not fit: ac='full', the least, takes ")
    bought = _changes(plain, BATCH, report)
    assert bought["loss='chunked'"] <= limit < bought["optimizer='adamw-8bit'"]
    asked = make_report(chunked, ["50%"], limit)
    assert asked.best is not None and "loss='chunked'" in asked.call()
    assert "loss='chunked'" not in _changes(chunked, BATCH, asked)
    sizes = make_report(_query(wide(), loss=CHUNKS), ["50%"], peaks[0])
    assert "loss=ChunkedLoss(chunk_tokens=16)" in sizes.call(sizes.rows[0])


@pytest.mark.few(1)
@pytest.mark.parametrize("tied", [False, True])
def test_a_plan_says_what_the_rank_takes(tied: bool) -> None:
    """The root is gathered again in backward. FSDP2 holds the last gradient of a unit until all are reduced."""
    model = llama(device="meta", vocab_size=2048, num_hidden_layers=1, tie_word_embeddings=tied)
    job = Job.of(strategy=FSDP2(reshard_after_forward=True), ac="full", world_size=2, gpu="cpu")
    found = dry_run(model, job, labelled(tokens(1, 8)))
    assert found.against is not None and abs(found.against - found.peak_bytes) <= SAME


@pytest.mark.parametrize("precision", ["bf16", None])
def test_a_tied_head_has_no_second_gradient_beside_that_of_the_chunks(precision: str | None) -> None:
    model = llama(device="meta", vocab_size=2048, num_hidden_layers=1, tie_word_embeddings=True)
    job = Job.of(loss=ChunkedLoss(chunk_tokens=64), precision=precision, ac="full", world_size=2, gpu="cpu")
    found = dry_run(model, job, labelled(tokens(4, 64)))
    assert found.against == found.peak_bytes


SHAPES = [(64, 64), (512, 64), (7,), (300, 200), (16, 2, 5)]
MATRICES = [shape for shape in SHAPES if len(shape) == 2]


def _described(params, *, in_layer=True):
    return [TrainedParameter(tuple(p.shape), p.numel(), p.element_size(), in_layer) for p in params]


def _measured(make, shapes, dtype):
    """State of the optimizer that `make` makes, and the most that its second step holds beyond that; bytes of tensors."""
    params = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
    optimizer = make(params)
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer.step()
    with LiveBytes() as meter:
        optimizer.step()
    entries = [t for entry in optimizer.state.values() for t in entry.values()]
    return params, sum(t.nbytes for t in entries if isinstance(t, torch.Tensor)), meter.peak


MAKERS = {
    "adamw-loop": lambda params: torch.optim.AdamW(params, foreach=False),
    "adamw-foreach": lambda params: torch.optim.AdamW(params, foreach=True),
    "adamw-fused": lambda params: torch.optim.AdamW(params, fused=True),
    "sgd": lambda params: torch.optim.SGD(params, foreach=False),
    "sgd-momentum": lambda params: torch.optim.SGD(params, momentum=0.9, foreach=False),
    "muon": torch.optim.Muon,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MAKERS)
def test_states_and_temporaries_are_those_of_the_real_step(name, dtype):
    params, state, step = _measured(MAKERS[name], MATRICES if name == "muon" else SHAPES, dtype)
    found = optimizer_memory(_described(params), name, device="cpu")
    assert (found.state, found.step) == (state, step)


def test_muon_leaves_to_adamw_what_is_no_matrix_of_a_layer():
    inside, outside = torch.zeros(32, 48), torch.zeros(100, 32)
    params = [*_described([outside], in_layer=False), *_described([inside, torch.zeros(48)])]
    found = optimizer_memory(params, "muon", device="cuda")
    assert found.states == ((12800, 12800), (6144,), (192, 192))
    # The update, two iterates and two products of the shorter side; AdamW's roots of all else come to 12,992.
    assert found.step == 6144 + 2 * 3072 + 2 * 2048


@pytest.mark.parametrize(("elements", "states"), [
    (4095, (16380, 16380)), (4096, (4096, 4096, 64, 64)), (5000, (5000, 5000, 80, 80)),
])  # fmt: skip
def test_eight_bit_states_come_in_blocks(elements, states):
    found = optimizer_memory([TrainedParameter((elements,), elements, 4)], "adamw-8bit", device="cpu")
    assert found.states == (states,) and found.step == 0


def test_eight_bit_states_are_those_of_bitsandbytes():
    optim = pytest.importorskip("bitsandbytes.optim")
    for elements in (4095, 4096, 5000):
        param = torch.nn.Parameter(torch.zeros(elements))
        param.grad = torch.zeros(elements)
        optimizer = optim.AdamW8bit([param])
        optimizer.init_state(optimizer.param_groups[0], param, 0, 0)
        made = [optimizer.state[param].get(name) for name in ("state1", "state2", "absmax1", "absmax2")]
        found = optimizer_memory(_described([param]), "adamw-8bit", device="cpu")
        assert found.state == sum(t.nbytes for t in made if t is not None)


def test_bfloat16_states_of_float32_parameters():
    assert optimizer_memory([TrainedParameter((10, 10), 100, 4)], "adamw-bf16", device="cpu").states == ((200, 200),)


def _holding(job, device="h100-80gb"):
    model = llama(
        device="meta", hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=256
    )
    sample = labelled(torch.zeros(1, 32, dtype=torch.long))
    return PlanQuery.from_model(model, sample, job.change(gpu=resolve_device(device)))


@pytest.mark.parametrize("ranks", [1, 4])
def test_on_cuda_torch_steps_all_parameters_at_once_sharded_ones_too(ranks):
    from torch.distributed.tensor import DTensor
    from torch.optim import optimizer

    assert DTensor in vars(optimizer).get("_foreach_supported_types", [DTensor])  # where this torch says so
    at_once, in_turn = (
        _holding(Job.of(world_size=ranks), device).stages[0].optimizer.passes[0] for device in ("h100-80gb", "cpu")
    )
    assert at_once.together and not at_once.alone
    assert in_turn.alone and not in_turn.together


def test_an_average_of_the_weights_is_one_more_copy():
    setup = Job.of(world_size=4, precision="bf16")
    plain, averaged = _holding(setup), _holding(replace(setup, step=StepSpec(ema=True)))
    choices = plain.uniform("full")
    before, after = peak_of(plain, choices), peak_of(averaged, choices)
    parts = parts_at_peak(averaged, 0, choices)
    assert parts["averaged weights"] == parts["parameters"] == after.total - before.total
    assert held_bytes(averaged, choices) == held_bytes(plain, choices)
    assert reserved(averaged, choices).tensors == after.total
    with pytest.raises(TypeError, match=r"StepSpec\.ema is 'yes'"):
        StepSpec(ema="yes")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["adamw-8bit", "adamw-bf16", "muon"])
def test_the_replay_has_the_same_step(name):
    query = _holding(Job.of(step=StepSpec(optimizer=name)))
    choices = query.uniform("none")
    assert reserved(query, choices).tensors == peak_of(query, choices).total
