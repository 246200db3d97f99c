"""Arguments that would be accepted, or ignored, and give something else than was asked for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from nemo_like import MemoryBudget, SelectivePolicy, parallelize, plan_for
from nemo_like.cli import main
from nemo_like.distributed.launch import local_device
from nemo_like.options import FSDP2
from nemo_like.planning.devices import resolve_device
from tests.models.decoders import PlainDecoder, batch


def _refused(message: str, **arguments: object) -> None:
    model = PlainDecoder()
    before = {name: p.clone() for name, p in model.named_parameters()}
    modules = dict(model.named_modules())
    with pytest.raises((ValueError, TypeError), match=message):
        parallelize(model, "single", **arguments)
    assert dict(model.named_modules()) == modules
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_the_meta_device_is_no_place_to_train() -> None:
    _refused("device is 'meta'", device="meta")


def test_a_policy_class_is_not_a_policy() -> None:
    _refused(r"class SelectivePolicy.*SelectivePolicy\(\)", ac=SelectivePolicy)


def test_a_number_of_ranks_is_positive_on_one_rank_too() -> None:
    with pytest.raises(ValueError, match="reshard_after_forward is -1"):
        FSDP2(reshard_after_forward=-1)


class _WithLoss(PlainDecoder):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids).sum()


def test_a_plan_for_fewer_layers_is_refused() -> None:
    plan = plan_for(_WithLoss(layers=2), ac="50%", sample_input=(batch(2),))
    model: nn.Module = _WithLoss(layers=4)
    with pytest.raises(ValueError, match=r"plan has 2 layers.*blocks\.2, blocks\.3"):
        parallelize(model, "single", plan)
    parallelize(model, "single", plan, layers=["blocks.0", "blocks.1"])  # said, it is what was asked for


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (dict(peak_bytes="40GiB"), r"peak_bytes is '40GiB'.*MemoryBudget\.parse\('40GiB'\)"),
        (dict(fraction="50%"), r"fraction is '50%'.*MemoryBudget\.parse\('50%'\)"),
        (dict(peak_bytes=True), "peak_bytes is True"),
        (dict(fraction=float("nan")), "fraction is nan"),
    ],
)
def test_a_budget_of_the_wrong_kind_says_how_to_write_it(fields: dict[str, object], said: str) -> None:
    with pytest.raises((ValueError, TypeError), match=said):
        MemoryBudget(**fields)


@pytest.mark.parametrize("budget", [0.5, None, True])
def test_a_number_is_no_budget(budget: object) -> None:
    with pytest.raises(TypeError, match=r"budget is .*'40GiB' or '50%'"):
        plan_for(_WithLoss(layers=2), ac=budget, sample_input=(batch(2),))


def test_a_device_has_a_short_name_where_only_one_begins_with_it() -> None:
    assert resolve_device("h100") == resolve_device("h100-80gb")
    assert resolve_device("A100").name == "a100-80gb"
    with pytest.raises(ValueError, match="'h' is neither one of"):
        resolve_device("h")


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["bench", "--budgets", "foo"], "'foo'"),
        (["bench", "--compile", "cudagraphs"], "'cudagraphs'"),
        (["coverage", "--only", "nosuch"], "'nosuch'"),
        (["coverage", "--losses", "--only", "LlamaForCausalLLM"], "Did you mean 'LlamaForCausalLM'"),
        (["coverage", "--plan", "--only", "nosuch"], "'nosuch'"),
        (["coverage", "--plan", "--resume"], "--resume"),
        (["profile", "--model", "llama-tiny", "--limit", "-3"], "--limit is -3"),
    ],
)
def test_a_wrong_option_of_a_command_is_named(
    command: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("bench --device tpu", "device is 'tpu'"),
        ("bench --device xla:99", "device is 'xla:99'"),
        ("profile --model llama-tiny --device tpu", "device is 'tpu'"),
        ("trace --device tpu", "device is 'tpu'"),
        (
            "profile --model llama-tiny --input-shape 3,4 --batch-size 1",
            r"failed on the sample input \(float32 \(3, 4\)\)",
        ),
        ("profile --model llama-tiny --input-shape 3,x", "--input-shape is '3,x'"),
        ("plan --model llama-tiny --gpu h100 --input-shape 0,3", "--input-shape is '0,3'"),
        ("plan --model llama-tiny --gpu h100 --vocab-size -4", "--vocab-size is -4"),
        ("plan --model llama-tiny --gpu h100 --seq-len 16 --memory 1KiB", "Budget '1024B'"),
        ("plan --model {bad} --gpu h100", "its config is not a llama.*not a multiple of the number of attention heads"),
        ("trace --ac sequential", "--ac is 'sequential'.*--?ac='full'|ac='full'"),
    ],
)
def test_a_command_says_what_is_wrong_in_one_line(
    words: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "config.json"
    bad.write_text('{"model_type": "llama", "hidden_size": 64, "num_attention_heads": 7}')
    status = main(words.format(bad=bad).split())
    out = capsys.readouterr()
    assert status in (1, 2)
    assert re.search(said, out.err + out.out), out.err + out.out
    assert "Traceback" not in out.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("command", ["bench --device cuda", "profile --model llama-tiny --device cuda"])
def test_a_device_that_is_not_there_is_said_to_be_missing(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command.split()) == 2
    assert "torch sees 0 CUDA device(s)" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_the_recipe_says_that_there_is_no_cuda_device() -> None:
    with pytest.raises(ValueError, match="torch sees no CUDA device here"):
        local_device("cuda")


def test_a_list_of_layers_is_named_by_its_type() -> None:
    with pytest.raises(TypeError, match=r"^model is a list; it must be a torch\.nn\.Module\.$"):
        parallelize(list(PlainDecoder().blocks), "single")  # type: ignore[arg-type]
