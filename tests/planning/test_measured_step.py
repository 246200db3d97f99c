"""A measured step corrects the rates of a GPU: logs that are read, the factor that comes back, the file, refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_like import Job
from nemo_like.models import text_batch
from nemo_like.planning import calibration
from nemo_like.planning.calibration import Speed, at_factor, fitted_factor, read_speed
from nemo_like.planning.devices import resolve_device
from nemo_like.planning.predictions.seconds import step_seconds
from nemo_like.planning.query import PlanQuery
from tests.models.tiny import made
from tests.planning.queries import Text

LOGS = {
    "torchtitan": (
        "step: {n}  loss: 8.1  memory: 41.6GiB(43.79%)  tps: {value}  mfu: 30.1%",
        "6,120",
        6120.0,
        "tokens",
    ),
    "KempnerForge": ("[step {n}] loss=2.31 lr=3.0e-04 tok/s=7,000 step_time={value}s", "1.25", 1.25, "seconds"),
    "nanotron": (
        "iteration: {n} / 9 | elapsed_time_per_iteration_ms: {value} | lr: 1",
        "1.23K",
        1230.0,
        "milliseconds",
    ),
    "litgpt": (
        "Epoch 1 | iter {n} step {n} | loss: 2.3 | iter time: {value} ms (step)",
        "812.50",
        812.5,
        "milliseconds",
    ),
}


@pytest.mark.parametrize("name", LOGS)
def test_a_log_is_read_but_for_its_first_steps(name: str, tmp_path: Path) -> None:
    (line, usual, value, unit), slow = LOGS[name], "9.1"
    log = tmp_path / "log.txt"
    values = [slow, slow, usual, usual, usual]
    log.write_text("\n".join(line.format(n=n, value=each) for n, each in enumerate(values, start=1)))
    assert read_speed(str(log)) == Speed(value, unit)
    log.write_text("\n".join(line.format(n=n, value=slow) for n in range(3)))
    with pytest.raises(ValueError, match="3 steps with a speed"):
        read_speed(str(log))


def test_numbers_and_what_is_no_speed(tmp_path: Path) -> None:
    assert read_speed("1.83s") == Speed(1.83, "seconds") and read_speed("6,120tok/s") == Speed(6120.0, "tokens")
    assert read_speed("950 ms").seconds(None, _query()) == 0.95
    trainer = tmp_path / "trainer_state.json"
    trainer.write_text('{"log_history": [{"train_runtime": 100.0, "step": 10}]}')
    for given, words in ((str(trainer), "start-up and evaluation"), ("fast", "neither a number"), ("0s", "positive")):
        with pytest.raises(ValueError, match=words):
            read_speed(given)
    with pytest.raises(ValueError, match="takes no text"):
        Speed(5.0, "tokens").seconds(None, _query())


def _query() -> PlanQuery:
    return PlanQuery.from_model(Text(4), text_batch(2, 64), Job.of(gpu="h100-80gb"))


@pytest.mark.parametrize("factor", [0.5, 1.3])
def test_a_known_factor_comes_back(factor: float) -> None:
    device = resolve_device("h100-80gb")
    query = _query()
    query = query.under(query.job.change(gpu=at_factor(device, 1e-4)))  # so slow that launches do not decide
    choices = query.uniform("full")
    seconds = step_seconds(query.under(query.job.change(gpu=at_factor(query.device, factor))), choices).total
    assert fitted_factor(query, choices, seconds) == pytest.approx(factor, rel=2e-3)
    with pytest.raises(ValueError, match="no rates within 4 times"):
        fitted_factor(query, choices, 100 * seconds)


def test_the_command_writes_a_gpu_and_plans_with_it(tmp_path: Path, program: Any) -> None:
    path = tmp_path / "mine.json"
    asked = f"plan --model llama-tiny --gpu h100 --seq-len 2048 --batch-size 64 --no-what-if --gpu-file {path}"
    assert "--ran-with" in program([*asked.split(), "--calibrate-from", "2s"], 2).err
    plain = json.loads((resolve_device("h100").name and (Path("nemo_like/planning/devices.json"))).read_text())[
        "h100-80gb"
    ]
    said = program([*asked.split(), "--calibrate-from", "60ms", "--ran-with", "none"]).out
    made = json.loads(path.read_text())
    factor = made["matmul"] / plain["matmul"]
    assert "From now on: --gpu" in said and f"at {factor:.2f} of the rates" in said and "measured" in made["sources"]
    assert made["bandwidth"] == pytest.approx(plain["bandwidth"] * factor) and resolve_device(path).name == "mine"


def test_a_calibration_takes_the_median_of_the_products_of_an_8b_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the table's rates are. Judge: the linears of transformers' Llama 3 8B."""
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_key_value_heads": 8, "num_hidden_layers": 1}
    layer = made("Llama", device="meta", **sizes).model.layers[0]
    sizes = sorted(module.weight.numel() for module in layer.modules() if isinstance(module, torch.nn.Linear))
    assert sizes[len(sizes) // 2] == (16 * 256) ** 2  # a CPU's is a 16th as wide
    monkeypatch.setattr(calibration, "_seconds", lambda run, limit: 2.0)
    assert calibration._matmul(torch.device("cpu"), torch.float32, 1.0) == 512 * 256**2
