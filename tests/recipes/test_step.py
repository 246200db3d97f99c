"""Steps of the training job in numbers: their FLOPs, what an evaluation takes, what to change where memory ran out."""

import functools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from nemo_like import parallelize
from nemo_like._util.option_fields import parse_options
from nemo_like._util.words import write_bytes
from nemo_like.distributed.ranks import Ranks
from nemo_like.losses.model_loss import LossHooks
from nemo_like.models import resolve_model
from nemo_like.options import ChunkedLoss, MemoryBudget, Precision
from nemo_like.planning.advise import smaller_budget
from nemo_like.planning.devices import device_at_hand, rates_file, resolve_device
from nemo_like.planning.planner import peak_under, plan_for
from nemo_like.planning.utilisation import StepFlops, Utilisation
from nemo_like.recipes.auto import AdvisedStep, MemoryRanOutError, advice_on_memory
from nemo_like.recipes.data import Batch
from nemo_like.recipes.loss import MeanLoss
from nemo_like.recipes.options import PretrainOptions
from nemo_like.recipes.pretrain import run_job
from tests.checks import seeded
from tests.models.blocks import Operators
from tests.models.families import hf
from tests.models.tiny import llama, made

SHAPE: dict[str, Any] = {
    "vocab_size": 48, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "use_cache": False, "attn_implementation": "eager",
}  # fmt: skip
TOKENS = 7


def _llama(**more: Any) -> torch.nn.Module:
    return made("Llama", **SHAPE | more)


def _counted(model: torch.nn.Module) -> int:
    """Forward and backward of two rows, by PyTorch; without the product of positions and frequencies."""
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(2, TOKENS, dtype=torch.int64)).logits.sum().backward()
    rotary = sum(sum(ops.values()) for name, ops in counter.get_flop_counts().items() if name.endswith("rotary_emb"))
    return counter.get_total_flops() - rotary


@pytest.mark.parametrize("tied", [False, True])
def test_a_step_that_trains_everything_has_the_flops_that_pytorch_counts(tied: bool) -> None:
    model = _llama(tie_word_embeddings=tied)
    flops = StepFlops.count(model)
    matrices = 2 * (32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 64) + 32 * 48
    assert flops == StepFlops(6 * matrices, ((None, 12 * 32),) * 2)  # 12 L H Q T, as PaLM has it
    assert 2 * flops.of(TOKENS) == _counted(model)


def test_frozen_layers_before_what_trains_run_forward_alone() -> None:
    model = _llama().requires_grad_(False)
    model.get_output_embeddings().requires_grad_(True)
    assert 2 * StepFlops.count(model).of(TOKENS) == _counted(model)


def test_adapters_leave_out_the_gradients_of_frozen_weights() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(_llama(num_hidden_layers=1), peft.LoraConfig(r=2, target_modules=["up_proj"]))
    attention, gate, up, down, head = 32 * 32 * 2 + 32 * 16 * 2, 32 * 64, 32 * 64, 32 * 64, 32 * 48
    first, second = 2 * 32, 2 * 64  # A's input needs no gradient: nothing before it trains
    expected = 2 * (attention + gate + up) + 4 * (first + down + head) + 6 * second
    assert StepFlops.count(model) == StepFlops(expected, ((None, 12 * 32),))


def test_a_token_goes_through_the_experts_that_are_chosen() -> None:
    model = made("Mixtral", **SHAPE, num_local_experts=4, num_experts_per_tok=2)
    layer = 32 * 32 * 2 + 32 * 16 * 2 + 4 * 32 + 2 * 3 * 32 * 64  # attention, router, two experts
    assert StepFlops.count(model).per_token == 6 * (2 * layer + 32 * 48)


def test_a_window_bounds_what_a_token_sees() -> None:
    model = hf(
        "Gemma3ForCausalLM", "Gemma3TextConfig", **SHAPE, head_dim=8, sliding_window=4,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    flops = StepFlops.count(model())
    assert flops.per_pair == ((4, 12 * 32), (None, 12 * 32))
    assert (
        flops.of(10) == flops.per_token * 10 + 12 * 32 * (40 + 100)
        and flops.of(3) == flops.per_token * 3 + 12 * 32 * 18
    )


def test_what_has_other_flops_is_not_counted() -> None:
    with pytest.raises(ValueError, match="kind 'linear_attention' are not known"):
        StepFlops.count(_llama(layer_types=["linear_attention", "full_attention"]))
    with pytest.raises(ValueError, match="Linear has no config"):
        StepFlops.count(torch.nn.Linear(2, 2))


def test_the_share_is_of_a_known_speed_or_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, half = _llama(), Precision("bf16")
    known = resolve_device("h100")
    found = Utilisation.for_model(model, type(known)(**vars(known) | {"known_as": "h100-80gb"}), half)
    assert found.peak == 989.4e12 and "989.4 TFLOP/s" in found.words and "data sheet" in found.words
    unknown = Utilisation.for_model(model, known, half)  # as `device_at_hand` has a GPU that the table does not know
    assert unknown.flops is None and "MFU is left out" in unknown.words and "--calibrate" in unknown.words
    monkeypatch.setenv("NEMO_LIKE_CACHE", str(tmp_path))
    assert Utilisation.for_model(model, device_at_hand("cpu"), half).flops is None
    _calibrate()
    assert Utilisation.for_model(model, device_at_hand("cpu"), half).peak == 5e9
    assert Utilisation.for_model(model, device_at_hand("cpu"), Precision(None)).peak == 2e9
    strange = Utilisation.for_model(torch.nn.Linear(2, 2), device_at_hand("cpu"), half)
    assert strange.flops is None and "MFU is left out: Linear has no config" in strange.words


def _calibrate() -> None:
    """As if the CPU had been measured."""
    path = rates_file(resolve_device("cpu"))
    path.parent.mkdir(parents=True, exist_ok=True)
    rates = {"matmul_half": 5e9, "matmul_single": 2e9}
    path.write_text(json.dumps({"measured": "2026-01-01", "torch": "2.13.0", "rates": rates}))


def test_a_run_says_its_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("NEMO_LIKE_CACHE", str(tmp_path))
    _calibrate()
    (tmp_path / "text.txt").write_text("What is counted here is known. " * 200)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"} | SHAPE | {"vocab_size": 256}))
    line = f"--model {tmp_path}/config.json --data {tmp_path}/text.txt --steps 3 --global-batch 2 --seq-len 16 --device cpu"
    line += f" --eval-samples 0 --log-every 1 --json {tmp_path}/run.json"
    assert run_job(parse_options(PretrainOptions, line.split()), Ranks(0, 1, torch.device("cpu"))) == 0
    run, said = json.loads((tmp_path / "run.json").read_text()), capsys.readouterr().out
    flops = StepFlops.count(_llama(vocab_size=256)).of(16)
    assert run["mfu"] == pytest.approx(run["tokens_per_second"] / 16 * flops / 2e9, rel=1e-9)
    assert f"MFU {run['mfu']:.1%}" in said and "MFU is of the 0.002 TFLOP/s of large matrix products" in said


ROWS, LENGTH, VOCABULARY, CHUNK = 4, 32, 2048, 32


def _model(loss: Any) -> torch.nn.Module:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "max_position_embeddings": LENGTH}
    return parallelize(seeded(llama, vocab_size=VOCABULARY, **sizes), ac="full", loss=loss, device="cpu")


def _batch() -> Batch:
    ids = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return Batch(ids[:, :-1], ids[:, 1:].clone())


def _evaluated(loss: Any) -> tuple[torch.Tensor, int]:
    model = _model(loss).eval()
    with torch.no_grad(), Operators() as largest:
        total = MeanLoss(chunked=loss != "model").total(model, _batch())
    assert not model.training
    return total, largest.most


def test_the_sum_of_a_chunked_loss_is_that_of_whole_logits_and_no_more_than_a_chunk_is_there() -> None:
    whole, all_logits = _evaluated("model")
    chunked, largest = _evaluated(ChunkedLoss(chunk_tokens=CHUNK))
    assert whole.dtype == chunked.dtype == torch.float64
    torch.testing.assert_close(chunked, whole, rtol=1e-6, atol=0)
    assert all_logits == ROWS * LENGTH * VOCABULARY * 4
    assert largest == CHUNK * VOCABULARY * 4 == all_logits // 4


def test_the_last_stage_of_a_pipeline_evaluates_in_chunks() -> None:
    model, batch = _model("model").eval(), _batch()
    hooks = LossHooks(
        model, ChunkedLoss(chunk_tokens=CHUNK), in_evaluation=True
    )  # which a stage calls around its forward
    asked = {"input_ids": batch.inputs, "labels": batch.targets, "shift_labels": batch.targets}
    with torch.no_grad(), Operators() as largest:
        hooks.before(model, (), asked)
        output = hooks.after(model, (), model(**asked))
    assert output.logits is None and largest.most == CHUNK * VOCABULARY * 4
    with torch.no_grad():
        torch.testing.assert_close(output.loss, model(**asked).loss, rtol=1e-6, atol=0)


def test_outside_of_an_evaluation_a_model_in_evaluation_mode_returns_logits() -> None:
    model, batch = _model("chunked").eval(), _batch()
    with torch.no_grad():
        MeanLoss(chunked=True).total(model, batch)
        output = model(batch.inputs, labels=batch.targets, shift_labels=batch.targets)
    assert output.logits.shape == (ROWS, LENGTH, VOCABULARY)


CPU = resolve_device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(llama(num_hidden_layers=2).config.to_dict()))
    return str(path)


def _step(options: PretrainOptions, ranks: Ranks) -> AdvisedStep:
    return AdvisedStep(resolve_model(options.model), options, ranks, CPU)


def _total(step: AdvisedStep, options: PretrainOptions) -> int:
    return peak_under(step.query(options)).total


def _peak(options: PretrainOptions, budget: str) -> int:
    """What `parallelize` would plan for one rank."""
    sample = options.planned_input(options.rows(1))
    bare = resolve_model(options.model).build("meta", torch.float32)
    step, loss = options.job().step, options.loss
    return plan_for(bare, ac=budget, sample_input=sample, gpu=CPU, step=step, precision="bf16", loss=loss).peak_bytes


@pytest.mark.few(1)
@pytest.mark.parametrize("budget", ["60%", "auto"])
def test_a_budget_counts_as_what_it_was_planned_to(model: str, budget: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # With nothing left to change but the budget, which is what takes long to plan.
    said = {"loss": "chunked", "precision": "bfloat16", "global_batch": 8, "grad_accum": 8}
    options = PretrainOptions(model=model, ac=budget, seq_len=128, **said)
    step = _step(options, Ranks(0, 1, torch.device("cpu")))
    monkeypatch.setattr(step, "query", functools.cache(step.query))
    now, full = _total(step, options), _total(step, replace(options, ac="full"))
    assert full < now
    ways = step.ways_out()
    assert ways[0] == f"--ac full ({write_bytes(now - full)} less)"
    if budget == "auto":  # a tenth less of the device changes nothing here
        assert now == _peak(options, budget) and len(ways) == 1
    else:
        smaller = _peak(options, "30%")
        assert smaller == _total(step, replace(options, ac="30%")) < now
        assert ways[1:] == [f"--ac 30% ({write_bytes(now - smaller)} less)"]


def test_the_changes_are_flags_that_can_be_given_and_are_tried_together(model: str) -> None:
    options = PretrainOptions(model=model, ac="none", seq_len=128, global_batch=8)
    step = _step(options, Ranks(0, 1, torch.device("cpu")))
    *alone, together = step.ways_out()
    flags = [way.partition(" (")[0] for way in alone]
    assert {"--ac full", "--loss chunked", "--grad-accum 2"} <= {*flags}
    assert all(re.fullmatch(r"--[a-z-]+( \S+)? \(\S+ less\)", way) for way in alone)
    changed = parse_options(PretrainOptions, f"--model {model} --ac none --seq-len 128 {' '.join(flags[::-1])}".split())
    now, best = (write_bytes(_total(step, each)) for each in (options, changed))
    assert together.startswith(f"a peak of {best} in place of {now} with --")


def test_the_budget_to_try_next() -> None:
    found = {asked: smaller_budget(MemoryBudget.parse(asked), CPU) for asked in ("50%", "10MiB", "40GiB", "auto")}
    assert found == {"50%": "25%", "10MiB": "9.00MiB", "40GiB": "36.00GiB", "auto": "12.96GiB"}  # 0.9 of 0.9 of 16 GiB


def test_ranks_and_axes_of_the_job_are_those_of_the_plan(model: str) -> None:
    options = PretrainOptions(model=model, ac="full", seq_len=64, global_batch=8, tp=2, cp=2)
    alone = PretrainOptions(model=model, ac="full", seq_len=64, global_batch=8)
    one = _total(_step(alone, Ranks(0, 1, torch.device("cpu"))), alone)
    split = _total(_step(options, Ranks(0, 8, torch.device("cpu"), tp=2, cp=2)), options)
    assert split < one / 3, "half of the rows, half of their tokens, a quarter of the weights"


def test_what_cannot_be_planned_says_so(model: str) -> None:
    options = PretrainOptions(model=model, ac="full", seq_len=64, global_batch=8, pp=2)
    step = _step(options, Ranks(0, 2, torch.device("cpu"), pp=2))
    reasons = r"no space.*no plan can be made.*nemo-like plan --pp.*larger --grad-accum"
    with pytest.raises(MemoryRanOutError, match=reasons), advice_on_memory(step):
        raise torch.OutOfMemoryError("no space left on the device.\nand more")
    with pytest.raises(RuntimeError, match=r"^something else$"), advice_on_memory(step):
        raise RuntimeError("something else")
