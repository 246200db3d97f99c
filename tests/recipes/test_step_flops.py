"""FLOPs of a step by hand, and by PyTorch's counter; and what share of which device they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from nemo_like.options import Precision
from nemo_like.planning.devices import device_at_hand, rates_file, resolve_device
from nemo_like.recipes.agree import Ranks
from nemo_like.recipes.command_line import parse_options
from nemo_like.recipes.loop import run_job
from nemo_like.recipes.pretrain import Pretraining
from nemo_like.recipes.quantised import quantise_layers
from nemo_like.recipes.step_flops import StepFlops, Utilisation

transformers = pytest.importorskip("transformers")
SHAPE: dict[str, Any] = {
    "vocab_size": 48, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "use_cache": False, "attn_implementation": "eager",
}  # fmt: skip
TOKENS = 7


def _llama(**more: Any) -> torch.nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE | more))


def _counted(model: torch.nn.Module) -> int:
    """Forward and backward of two rows, by PyTorch; without the product of positions and frequencies."""
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(2, TOKENS, dtype=torch.int64)).logits.sum().backward()
    found = counter.get_flop_counts()
    rotary = sum(sum(ops.values()) for name, ops in found.items() if name.endswith("rotary_emb"))
    return counter.get_total_flops() - rotary


@pytest.mark.parametrize("tied", [False, True])
def test_a_step_that_trains_everything_has_the_flops_that_pytorch_counts(tied: bool) -> None:
    model = _llama(tie_word_embeddings=tied)
    flops = StepFlops.count(model)
    matrices = 2 * (32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 64) + 32 * 48
    assert flops == StepFlops(6 * matrices, ((None, 12 * 32),) * 2)  # 12 L H Q T, as PaLM has it
    assert flops.of([TOKENS] * 2) == _counted(model)


def test_frozen_layers_before_what_trains_run_forward_alone() -> None:
    model = _llama().requires_grad_(False)
    model.get_output_embeddings().requires_grad_(True)
    assert StepFlops.count(model).of([TOKENS] * 2) == _counted(model)


def test_adapters_leave_out_the_gradients_of_frozen_weights() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(_llama(num_hidden_layers=1), peft.LoraConfig(r=2, target_modules=["up_proj"]))
    attention, gate, up, down, head = 32 * 32 * 2 + 32 * 16 * 2, 32 * 64, 32 * 64, 32 * 64, 32 * 48
    first, second = 2 * 32, 2 * 64  # A's input needs no gradient: nothing before it trains
    expected = 2 * (attention + gate + up) + 4 * (first + down + head) + 6 * second
    assert StepFlops.count(model) == StepFlops(expected, ((None, 12 * 32),))


def test_weights_of_four_bits_count_as_the_numbers_they_are() -> None:
    pytest.importorskip("bitsandbytes")
    with torch.device("meta"):
        model = _llama(hidden_size=64).requires_grad_(False)
    before = StepFlops.count(model)
    assert quantise_layers(model, torch.bfloat16) == 14 and StepFlops.count(model) == before


def test_a_token_goes_through_the_experts_that_are_chosen() -> None:
    config = transformers.MixtralConfig(**SHAPE | {"num_local_experts": 4, "num_experts_per_tok": 2})
    model = transformers.MixtralForCausalLM(config)
    layer = 32 * 32 * 2 + 32 * 16 * 2 + 4 * 32 + 2 * 3 * 32 * 64  # attention, router, two experts
    assert StepFlops.count(model).per_token == 6 * (2 * layer + 32 * 48)


def test_a_window_bounds_what_a_token_sees() -> None:
    config = transformers.Gemma3TextConfig(
        **SHAPE | {"head_dim": 8, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
    )
    flops = StepFlops.count(transformers.Gemma3ForCausalLM(config))
    assert flops.per_pair == ((4, 12 * 32), (None, 12 * 32))
    assert flops.of([10, 3]) == flops.per_token * 13 + 12 * 32 * (40 + 100 + 9 + 9)


def test_what_has_other_flops_is_not_counted() -> None:
    with pytest.raises(ValueError, match="kind 'linear_attention' are not known"):
        StepFlops.count(_llama(layer_types=["linear_attention", "full_attention"]))
    with pytest.raises(ValueError, match="Linear has no config"):
        StepFlops.count(torch.nn.Linear(2, 2))


def test_the_share_is_of_a_known_speed_or_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, half = _llama(), Precision("bf16")
    known = resolve_device("h100")
    found = Utilisation.of(model, type(known)(**vars(known) | {"known_as": "h100-80gb"}), half)
    assert found.peak == 989.4e12 and "989.4 TFLOP/s" in found.words and "data sheet" in found.words
    unknown = Utilisation.of(model, known, half)  # as `device_at_hand` has a GPU that the table does not know
    assert unknown.flops is None and "MFU is left out" in unknown.words and "--calibrate" in unknown.words
    monkeypatch.setenv("NEMO_LIKE_CACHE", str(tmp_path))
    assert Utilisation.of(model, device_at_hand("cpu"), half).flops is None
    _calibrate()
    assert Utilisation.of(model, device_at_hand("cpu"), half).peak == 5e9
    assert Utilisation.of(model, device_at_hand("cpu"), Precision(None)).peak == 2e9
    strange = Utilisation.of(torch.nn.Linear(2, 2), device_at_hand("cpu"), half)
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
    line = (
        f"--model {tmp_path}/config.json --data {tmp_path}/text.txt --steps 3 --batch-size 2 --seq-len 16 --device cpu"
    )
    line += f" --eval-samples 0 --log-every 1 --json {tmp_path}/run.json"
    assert run_job(Pretraining(parse_options("pretrain", line.split()), Ranks(0, 1, torch.device("cpu")))) == 0
    run, said = json.loads((tmp_path / "run.json").read_text()), capsys.readouterr().out
    flops = StepFlops.count(_llama(vocab_size=256)).of([16])
    assert run["mfu"] == pytest.approx(run["tokens_per_second"] / 16 * flops / 2e9, rel=1e-9)
    assert f"MFU {run['mfu']:.1%}" in said and "MFU is of the 0.002 TFLOP/s of large matrix products" in said
