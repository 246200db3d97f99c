"""``precision="mxfp8"``: torchao's own gradients by emulation, any number of tokens, and plans as steps run."""

import functools
import sys
from typing import Any

import pytest
import torch
from torch import nn

from nemo_like import Job, dry_run, parallelize
from nemo_like._util.extras import MissingExtraError
from nemo_like.activation_checkpointing.ops import facts
from nemo_like.mxfp8 import BLOCK, TORCHAO, MXFP8Linear, mxfp8_linear, mxfp8_linears
from nemo_like.options import Precision
from nemo_like.planning.predictions.rank import peak_of
from nemo_like.planning.query import PlanQuery
from nemo_like.planning.roofline import kernel_seconds
from tests.checks import assert_bitwise, refused, step
from tests.models.mxfp8 import converted, wide_llama
from tests.models.tiny import labelled
from tests.planning.queries import part_of
from tests_distributed.allocated import loop_peak_bytes

EMULATED: dict[str, Any] = {"precision": "mxfp8-emulated", "device": "cpu"}


def _sample(tokens: int) -> dict[str, torch.Tensor]:
    return labelled(torch.randint(64, (1, tokens), generator=torch.Generator().manual_seed(0)))


def test_gradients_are_those_of_torchao_in_every_mode() -> None:
    """Four models in PyTorch's own operators, which take over 2 s."""
    expected = step(converted(), **_sample(64))
    for ac in ("none", "full", "selective"):
        model = parallelize(wide_llama(torch.bfloat16), "single", ac=ac, **EMULATED)
        assert_bitwise(step(model, **_sample(64)), expected, ac)
    kinds = {type(tensor) for tensor in model.state_dict().values()}
    assert kinds == {torch.Tensor} and [type(module) for module in model.modules()].count(MXFP8Linear) == 2 * 7


def _linear() -> Any:
    torch.manual_seed(0)
    mxfp8_linears([linear := nn.Linear(32, 64, dtype=torch.bfloat16)], emulated=True)
    return linear


def _results(linear: Any, tokens: int, padding: int = 0) -> list[torch.Tensor]:
    """The output of a linear and three gradients, for `tokens` and as many zeros behind them."""
    torch.manual_seed(0)
    rows = nn.functional.pad(torch.randn(tokens, 32).bfloat16(), (0, 0, 0, padding)).requires_grad_()
    output = linear(rows)
    output[:tokens].square().sum().backward()
    return [output[:tokens], rows.grad[:tokens], linear.weight.grad, linear.bias.grad]


@pytest.mark.parametrize("tokens", [0, 1, 33])  # none: an expert that gets no token
def test_tokens_are_padded_to_a_multiple_of_32(tokens: int) -> None:
    """Also in the operator of a GPU, with torchao's emulation in the place of its kernels."""
    padded, operator = _results(_linear(), tokens, -tokens % 32), _linear()
    assert_bitwise(_results(_linear(), tokens), padded)
    operator.emulate = functools.partial(mxfp8_linear, kernels="emulated")
    assert_bitwise(_results(operator, tokens), padded)


def test_a_linear_with_another_side_or_class_stays() -> None:
    layer = nn.ModuleList([nn.Linear(64, 48), type("Own", (nn.Linear,), {})(64, 64), nn.Linear(64, 32)])
    mxfp8_linears(layer, emulated=True, ranks=2)
    assert [type(module).__name__ for module in layer] == ["Linear", "Own", "Linear"]


def test_a_plan_counts_the_emulation() -> None:
    """Which takes 5 s: an emulated step has 2,000 operators."""
    sample, job = _sample(101), Job.of(gpu="cpu", precision="mxfp8-emulated", ac="none")
    query = PlanQuery.from_model(wide_llama(), sample, job)
    model = parallelize(wide_llama(), "single", ac="none", **EMULATED)
    assert peak_of(query, query.uniform("none")).total == loop_peak_bytes(model, sample)


def test_a_plan_for_a_gpu_counts_its_casts_and_its_rate() -> None:
    """Which takes 5 s, of a dry run."""
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    sample, job = _sample(101), Job.of(gpu="b200", precision="mxfp8", ac="full")
    query = PlanQuery.from_model(wide_llama(), sample, job)
    assert peak_of(query, query.uniform("full")).total == dry_run(wide_llama(), job, sample).peak_bytes
    problem, rows, weight = part_of(query).problems[0], torch.ones(64, 32), torch.ones(96, 32)
    # Judge: the bytes of both operands as torchao casts them.
    forward: Any = facts(torch.ops.nemo_like.mxfp8_linear.default).scratch
    cast = [part for each in (rows, weight) for part in to_mx(each.bfloat16(), torch.float8_e4m3fn, BLOCK)]
    assert forward((rows, weight), None) == sum(part.nbytes for part in cast)
    assert (
        facts(torch.ops.nemo_like.mxfp8_linear_backward.default).scratch((rows @ weight.t(), rows, weight), None)
        == (2 * 6144 + 2048 + 3072) * 33 // 32
    )
    assert problem.device.matmul_flops["half"] == query.device.matmul_flops["float8"]
    op = next(op for op in problem.trace.ops if "mxfp8" in str(op.op))
    casts = 3 * (128 * 64 + 64 * 64) / problem.device.bandwidth  # of the rows, padded, and of the weight
    assert kernel_seconds(op, problem.device) == pytest.approx(casts + problem.device.launch_seconds)


def test_devices_without_its_kernels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with refused(
        "precision is 'mxfp8', and h100-80gb has compute capability 9.0; products in MXFP8 need 10.0. Use preci"
    ):
        PlanQuery.from_model(wide_llama(), _sample(64), Job.of(gpu="h100-80gb", precision="mxfp8"))
    with refused(
        "Precision.matmuls is 'mxfp8' and param_dtype is torch.float32: torchao's matmuls in MXFP8 return bfloa"
    ):
        Precision("float32", matmuls="mxfp8")
    monkeypatch.setitem(sys.modules, TORCHAO, None)
    with refused("pip install torchao (in a checkout of nemo_like: pip install '.[fp8]')", MissingExtraError):
        parallelize(wide_llama(), "single", **EMULATED)
