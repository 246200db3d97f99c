"""Budgets for models that stay whole: they compute under autocast, and so does their plan."""

from __future__ import annotations

import copy
import json
import logging

import pytest
import torch

from nemo_like import cli, parallelize
from nemo_like._util.log import forget_announcements
from nemo_like._util.tensors import tensors_in
from nemo_like.layers import find_layers
from nemo_like.models import resolve_model
from nemo_like.options import Precision
from nemo_like.planning import plan_for
from nemo_like.planning.model.capture import trace_model
from nemo_like.planning.trace.block import record
from tests.checks import assert_bitwise, step
from tests.models.decoders import batch, build
from tests.said import said

pytest.importorskip("transformers")


def _sample() -> dict[str, torch.Tensor]:
    return {"input_ids": batch(2), "labels": batch(2)}


@pytest.mark.few(2)
@pytest.mark.parametrize("precision", ["bf16", Precision("bf16", output_dtype="float32")])
@pytest.mark.parametrize("budget", ["45%", "80%"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_a_whole_model_in_mixed_precision_fits_its_plan(
    name: str, budget: str, precision: str | Precision, caplog: pytest.LogCaptureFixture
) -> None:
    forget_announcements()
    options = dict(precision=precision, device="cpu", sample_input=_sample())
    expected = step(parallelize(build(name), "single", "none", **options), seed=3, **_sample())
    model = parallelize(build(name), "single", budget, **options)
    with caplog.at_level(logging.WARNING, "nemo_like"):
        found = step(model, seed=3, **_sample())
    assert not said(caplog), "each region runs the operators of its plan"
    assert_bitwise(found, expected)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_trace_of_a_layer_under_autocast_is_what_runs(name: str) -> None:
    model = build(name)
    layers = find_layers(model)
    traced = trace_model(model, layers, _sample(), autocast=torch.bfloat16)
    caught = []
    handle = layers[0].module.register_forward_pre_hook(
        lambda module, args, kwargs: caught.append((args, kwargs)), with_kwargs=True
    )
    with torch.autocast("cpu", torch.bfloat16):
        model(**_sample(), use_cache=False)
    handle.remove()
    args, kwargs = caught[0]
    shared = {id(t) for t in tensors_in((args[1:], kwargs)) if t.dtype != torch.float32 or t.shape[0] != 2}
    inputs = tensors_in((args, kwargs))

    def call():
        with torch.autocast("cpu", torch.bfloat16):
            return layers[0].module(*args, **kwargs)

    real, _ = record(
        call, name="real", params=[*layers[0].module.parameters(), *layers[0].module.buffers()],
        inputs={(0, i): t for i, t in enumerate(inputs) if id(t) not in shared},
        shared=[t for t in inputs if id(t) in shared],
    )  # fmt: skip
    (planned,) = traced.traces()
    planned.check(real)
    assert planned.none_bytes == real.none_bytes


@pytest.mark.long
def test_the_command_plans_one_rank_as_it_will_run(capsys: pytest.CaptureFixture[str]) -> None:
    """With one rank there is no FSDP2: `precision=` is autocast, and the line of code that is advised asks for it."""
    words = ["plan", "--model", "llama-tiny", "--gpu", "cpu", "--seq-len", "32", "--batch-size", "2"]
    assert cli.main([*words, "--json", "-"]) == 0
    rows = {row["ac"]: row["saved_bytes"] for row in json.loads(capsys.readouterr().out)["rows"]}
    source = resolve_model("llama-tiny")
    model, sample = source.build("meta"), source.sample_input(2, 32)
    whole, sharded = (
        plan_for(
            model,
            ac="100%",
            sample_input=sample,
            gpu="cpu",
            precision=Precision("bf16"),
            **more,
        )
        for more in ({}, dict(world_size=2))
    )
    assert rows["none"] == whole.none_bytes != sharded.none_bytes
    assert rows["full"] == whole.full_bytes
    assert cli.main(words) == 0
    assert "precision='bf16'" in capsys.readouterr().out
    assert cli.main([*words, "--precision", "fp32"]) == 0
    assert "precision=" not in capsys.readouterr().out


def test_precision_counts_in_the_plan_of_a_whole_model() -> None:
    """Weights stay float32, unlike FSDP2's; autograd keeps the bfloat16 copies that autocast makes of them."""
    model = build("llama")
    plain, whole, sharded = (
        plan_for(copy.deepcopy(model), ac="100%", sample_input=_sample(), gpu="cpu", **more)
        for more in ({}, dict(precision="bf16"), dict(precision="bf16", world_size=2))
    )
    assert sharded.none_bytes < whole.none_bytes
    assert plain.peak["parameters"] == whole.peak["parameters"]
