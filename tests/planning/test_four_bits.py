"""Plans of frozen weights in 4 bits, against bitsandbytes on the CPU: bytes of the weights, and the peak of a step."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn

from nemo_like import Job, dry_run, parallelize
from nemo_like.models import text_batch
from nemo_like.options import StepSpec
from nemo_like.planning.model.traced import with_adapters
from nemo_like.planning.predictions.rank import peak_of
from nemo_like.planning.predictions.seconds import step_seconds
from nemo_like.planning.query import PlanQuery
from nemo_like.planning.utilisation import StepFlops
from tests_distributed.allocated import bytes_of, step_peak_bytes

bitsandbytes = pytest.importorskip("bitsandbytes")

# One wide linear made whole is the peak of a step of so few tokens.
CONFIG = transformers.LlamaConfig(
    hidden_size=64,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=32,
)
SINGLE = Job.of(strategy="single", ac="none", step=StepSpec(optimizer="adamw"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    transformers.AutoModelForCausalLM.from_config(CONFIG).save_pretrained(path)
    return path


def loaded(
    folder: Path,
    *,
    double: bool,
    dtype: torch.dtype = torch.float32,
    targets: str = "all-linear",
    quant_storage: torch.dtype = torch.uint8,
) -> nn.Module:
    """A model as transformers loads it in 4 bits, with peft's adapters."""
    how = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=double,
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_quant_storage=quant_storage,
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, quantization_config=how)
    adapters = peft.LoraConfig(r=8, target_modules=targets, task_type="CAUSAL_LM")
    return peft.get_peft_model(model, adapters).train()


def scales_of(weights: Iterable[Any]) -> list[torch.Tensor]:
    """All that bitsandbytes keeps next to its weights."""
    states = [weight.quant_state for weight in weights]
    every = [state for state in (*states, *(state.state2 for state in states)) if state is not None]
    return [t for state in every for t in vars(state).values() if isinstance(t, torch.Tensor)]


def _scales(model: nn.Module) -> list[torch.Tensor]:
    return scales_of(p for p in model.parameters() if type(p).__name__ == "Params4bit")


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer of the adapters that makes no copies of all of them at once."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], foreach=False)


def _named(*, four_bit: bool = True, dtype: torch.dtype = torch.bfloat16, **sizes: int) -> nn.Module:
    """The model on the meta device, with adapters, as a command makes it."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**CONFIG.to_dict() | sizes))
    return with_adapters(model.train(), 8, dtype, four_bit=four_bit)


def query_of(model: nn.Module, job: Job = SINGLE, gpu: str = "cpu", tokens: int = 8) -> PlanQuery:
    """A query for one sequence."""
    return PlanQuery.from_model(model, text_batch(1, tokens), job.change(gpu=gpu))


@pytest.mark.parametrize("double", [True, False])
def test_planned_weights_have_the_bytes_of_bitsandbytes(folder: Path, double: bool) -> None:
    model = loaded(folder, double=double)
    assert query_of(model).stages[0].sharding.params == bytes_of([*model.parameters(), *_scales(model)])


def test_a_model_by_name_has_the_bytes_of_the_one_that_isloaded(folder: Path) -> None:
    model = loaded(folder, double=True, dtype=torch.bfloat16)
    assert query_of(_named()).stages[0].sharding.params == bytes_of([*model.parameters(), *_scales(model)])


# Of one adapter behind all other linears, none of these has a backward: the peak is in forward.
@pytest.mark.parametrize(
    ("ac", "double", "targets"),
    [("none", False, "all-linear"), ("full", True, "all-linear"), ("none", True, r".*layers\.1.*down_proj")],
)
def test_the_peak_of_a_step(folder: Path, ac: str, double: bool, targets: str) -> None:
    model = loaded(folder, double=double, targets=targets)
    query = query_of(model)
    model, kept, batch = parallelize(model, SINGLE.change(ac=ac)), list[Any](), text_batch(1, 8)
    optimizer = adamw(model)

    def step() -> None:
        kept[:] = [model(**batch)]
        kept[0].loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    measured = step_peak_bytes(model, optimizer, step, lambda: [_scales(model), kept])
    assert peak_of(query, query.uniform(ac)).total == pytest.approx(measured, abs=256)


def test_weights_that_are_quantised_later_are_planned_as_they_are_then() -> None:
    """On its way to a device, bitsandbytes quantises a weight."""
    linears = [bitsandbytes.nn.Linear4bit(128, 192, bias=False, quant_type="nf4") for _ in range(2)]
    model = nn.Sequential(*(nn.Sequential(linear, nn.Linear(192, 128)) for linear in linears))
    job, sample = SINGLE.change(gpu="cpu", layers=("0", "1")), torch.zeros(2, 128)
    waiting = PlanQuery.from_model(model, sample, job).stages[0].sharding.params
    moved = model.to("cpu")
    assert waiting == bytes_of([*moved.parameters(), *_scales(moved)])


def test_a_dry_run_on_two_ranks_has_the_peak_of_the_plan() -> None:
    job = Job.of(world_size=2, precision="bf16", ac="full", gpu="h100-80gb", step=StepSpec(optimizer="adamw"))
    found = dry_run(_named(), job, text_batch(1, 8), layers=None)
    assert found.peak_bytes == pytest.approx(found.against, abs=256)


def test_linears_in_4_bits_have_less_than_a_third_of_the_bytes_of_16_and_take_the_time_to_unpack_them() -> None:
    """Half a byte a number and a scale for 64: unpacked to two bytes at the bandwidth of the data sheet, in each product."""
    wide = {"hidden_size": 4096, "intermediate_size": 8192, "num_attention_heads": 32}
    models = [_named(four_bit=four_bit, **wide) for four_bit in (False, True)]
    queries = [query_of(model, SINGLE.change(precision="bf16"), "h100-80gb", tokens=1024) for model in models]
    assert StepFlops.count(models[0]) == StepFlops.count(models[1])
    linears = {name: p.numel() for name, p in models[0].named_parameters() if "proj.base_layer" in name}
    halves, packed = (query.stages[0].sharding.params for query in queries)
    rest = halves - 2 * sum(linears.values())
    assert 0.25 < (packed - rest) / (halves - rest) < 0.3
    before, after = (step_seconds(query, query.uniform("full")).parts for query in queries)
    # No gradient is needed below the first adapters. Recomputation ends before the last matmul.
    idle = {"backward": r"layers.0.self_attn.[qkv]_proj", "replay": "down_proj"}
    for part in ("forward", "backward", "replay"):
        unpacked = sum(n for name, n in linears.items() if part not in idle or not re.search(idle[part], name))
        assert after[part] - before[part] > unpacked * 2.5 / 3350e9, part


@pytest.mark.parametrize(
    ("asked", "dtype", "words"),
    [
        ({"tp": 2, "world_size": 2}, torch.bfloat16, "tp=2 would split its packed bytes"),
        ({"precision": "fp8"}, torch.bfloat16, "precision='fp8' would cast its packed bytes"),
        ({"precision": "bf16", "world_size": 2}, torch.float32, "bnb_4bit_quant_storage=torch.bfloat16"),
    ],
)
def test_packed_bytes_are_no_matrix(asked: dict[str, Any], dtype: torch.dtype, words: str) -> None:
    with pytest.raises(ValueError, match=f"q_proj.base_layer.weight' has 4 bits .*{words}"):
        query_of(_named(dtype=dtype), Job.of(**asked), "h100-80gb")
