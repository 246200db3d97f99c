"""Plans of models as people call them: with a cache in their config, and with an autocast of their own."""

import functools

import pytest
import torch
import transformers
from torch import nn

from nemo_like import Job, dry_run, parallelize, predict
from tests.checks import assert_bitwise, step
from tests.models.blocks import Stack, mean_square
from tests.models.tiny import labelled, llama


def _casts(device: str, *, enabled: bool) -> nn.Module:
    """A model that casts by itself."""

    def run(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=enabled):
            return functools.reduce(lambda x, layer: x + layer(x), layers, x)

    layers = (nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4))
    return Stack(layers, run=run, head=mean_square)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_an_autocast_of_the_models_own(device: str) -> None:
    # Without a GPU torch turns that of CUDA off, and layers are traced outside of the model's forward.
    def run(*, enabled: bool) -> tuple[int, int | None]:
        job = Job.of(strategy="single", ac="none", gpu="h100-80gb")
        ran = dry_run(_casts(device, enabled=enabled), job, torch.randn(512, 64))
        return ran.peak_bytes, ran.against

    (cast, planned), (whole, planned_whole) = run(enabled=True), run(enabled=False)
    assert (planned, planned_whole) == (cast + 4, whole + 4)  # the loss of the step before, which a plan keeps
    assert cast < 0.8 * whole


def _cached() -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    model = llama()
    model.config.use_cache = True
    return model


def test_a_training_step_without_checkpointing_makes_no_cache() -> None:
    # The config of every decoder of transformers has it on. A cache would hold keys and values of all layers.
    batch = labelled(torch.arange(64).reshape(2, 32) % 32)
    ran = dry_run(_cached(), Job.of(strategy="single", ac="none", gpu="h100-80gb"), batch)
    assert ran.peak_bytes == ran.against
    model = parallelize(_cached(), "single", "none")
    assert model(**batch).past_key_values is None and model.config.use_cache
    with torch.no_grad():
        assert model(**batch).past_key_values is not None
    assert_bitwise(*(step(parallelize(_cached(), "single", ac), **batch) for ac in ("none", "full")))
    assert predict(_cached(), strategy="single", sample_input=batch).rows[0].ac == "none"
