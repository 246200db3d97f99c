"""Plans of frozen weights in 4 bits, against bitsandbytes on the CPU: bytes of the weights, and the peak of a step."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn

from nemo_like import Job, parallelize
from nemo_like.models import text_batch
from nemo_like.options import StepSpec
from nemo_like.planning.model.traced import with_adapters
from nemo_like.planning.predictions.rank import peak_of
from nemo_like.planning.query import PlanQuery
from tests_distributed.allocated import bytes_of, step_peak_bytes

pytest.importorskip("bitsandbytes")

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


def _loaded(folder: Path, *, double: bool, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A model as transformers loads it in 4 bits, with peft's adapters."""
    how = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=double,
        bnb_4bit_compute_dtype=dtype,
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, quantization_config=how)
    adapters = peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(model, adapters).train()


def _scales(model: nn.Module) -> list[torch.Tensor]:
    """All that bitsandbytes keeps next to its weights."""
    states = [p.quant_state for p in model.parameters() if type(p).__name__ == "Params4bit"]
    every = [state for state in (*states, *(state.state2 for state in states)) if state is not None]
    return [t for state in every for t in vars(state).values() if isinstance(t, torch.Tensor)]


def _query(model: nn.Module, job: Job = SINGLE, gpu: str = "cpu", tokens: int = 8) -> PlanQuery:
    return PlanQuery.from_model(model, text_batch(1, tokens), job.change(gpu=gpu))


@pytest.mark.parametrize("double", [True, False])
def test_planned_weights_have_the_bytes_of_bitsandbytes(folder: Path, double: bool) -> None:
    model = _loaded(folder, double=double)
    assert _query(model).stages[0].sharding.params == bytes_of([*model.parameters(), *_scales(model)])


def test_a_model_by_name_has_the_bytes_of_the_one_that_is_loaded(folder: Path) -> None:
    with torch.device("meta"):
        named = transformers.AutoModelForCausalLM.from_config(CONFIG).train()
    named = with_adapters(named, 8, torch.bfloat16, four_bit=True)
    loaded = _loaded(folder, double=True, dtype=torch.bfloat16)
    assert _query(named).stages[0].sharding.params == bytes_of([*loaded.parameters(), *_scales(loaded)])


@pytest.mark.parametrize(("ac", "double"), [("none", False), ("full", True)])
def test_the_peak_of_a_step(folder: Path, ac: str, double: bool) -> None:
    model = _loaded(folder, double=double)
    query = _query(model)
    model, kept, batch = parallelize(model, SINGLE.change(ac=ac)), list[Any](), text_batch(1, 8)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], foreach=False)

    def step() -> None:
        kept[:] = [model(**batch)]
        kept[0].loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    measured = step_peak_bytes(model, optimizer, step, lambda: [_scales(model), kept])
    assert peak_of(query, query.uniform(ac)).total == pytest.approx(measured, abs=256)
