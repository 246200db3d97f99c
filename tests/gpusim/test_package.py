"""What the package does on an accelerator beside offloading: random states, autocast, verification, meters, recipes."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nemo_like import apply_activation_checkpointing, parallelize
from nemo_like.distributed import materialize
from nemo_like.offload import offload_activations
from nemo_like.options import ChunkedLoss, OffloadConfig
from tests.checks import same
from tests.gpusim import on_device
from tests.models.blocks import Stack
from tests.models.decoders import batch, build
from tests.models.tiny import Block


class Model(Stack):
    """Three blocks with dropout."""

    def __init__(self) -> None:
        super().__init__(Block(norm=False, dropout=0.5) for _ in range(3))


def _step(model: nn.Module, x: torch.Tensor, context: Any) -> list[torch.Tensor]:
    """Return the gradients of one step, and the random states after it."""
    torch.manual_seed(5)
    with context():
        out = model(x)
    torch.rand(3, device=x.device)
    out.float().square().sum().backward()
    return [*(p.grad.cpu() for p in model.parameters()), torch.get_rng_state(), torch.gpusim.get_rng_state()]


def _bitwise(_: Any, mode: str, autocasts: bool) -> bool:
    model, x = Model().to("gpusim"), torch.randn(8, 16, device="gpusim")
    context = (lambda: torch.autocast("gpusim", dtype=torch.bfloat16)) if autocasts else contextlib.nullcontext
    expected = _step(copy.deepcopy(model), x, context)
    return all(map(torch.equal, expected, _step(apply_activation_checkpointing(model, mode), x, context)))


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("autocasts", [False, True])
def test_dropout_and_autocast_are_bitwise(mode: str, autocasts: bool) -> None:
    assert on_device(_bitwise, mode, autocasts)


def _in_bf16(_: Any) -> list[bool]:
    model, x = Model().to("gpusim"), torch.randn(8, 16, device="gpusim")
    steps = [
        _step(
            parallelize(copy.deepcopy(model), "single", ac, precision="bf16", device="gpusim"),
            x,
            contextlib.nullcontext,
        )
        for ac in ("none", "full", "selective")
    ]
    return [all(map(torch.equal, steps[0], step)) for step in steps]


def test_precision_is_bitwise() -> None:
    assert on_device(_in_bf16) == [True] * 3


def _lora(_: Any) -> tuple[bool, int]:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(target_modules=["q_proj", "v_proj"], r=2)
    model, ids = get_peft_model(build("llama"), config).to("gpusim"), batch(2).to("gpusim")
    trained = [p for p in model.parameters() if p.requires_grad]

    def step(context: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model.zero_grad()
        with context:
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return [p.grad.cpu() for p in trained]

    expected = step(contextlib.nullcontext())
    offloader = offload_activations(OffloadConfig(mode="all", min_bytes=0, max_inflight_bytes=1), model=model)
    return all(map(torch.equal, expected, step(offloader))), offloader.stats.reloads


def test_adapters_beside_the_offloading_context() -> None:
    same, reloads = on_device(_lora)
    assert same and reloads > 0


def _losses(_: Any) -> list[float]:
    """Return how far losses in chunks are from the model's own, and their gradients."""
    ids, found = batch(2).to("gpusim"), []
    bare = build("llama").to("gpusim")
    for loss in ("model", ChunkedLoss(chunk_tokens=5, grads_in_float32=False)):
        torch.manual_seed(0)
        model = parallelize(copy.deepcopy(bare), "single", "none", loss=loss, device="gpusim")
        value = model(input_ids=ids, labels=ids).loss
        value.backward()
        found.append([value.detach().cpu(), *(p.grad.cpu() for p in model.parameters())])
    return [max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(each, found[0])) for each in found[1:]]


def test_losses_in_chunks() -> None:
    assert max(on_device(_losses)) < 1e-5  # sums of chunks are in another order


def _materialized(_: Any) -> list[bool]:
    models = [Model().to("meta") for _ in range(2)]
    before = torch.gpusim.get_rng_state()
    for model in models:
        materialize(model, device="gpusim", seed=3)
    same = all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(models[0].parameters(), models[1].parameters()))
    return [same, torch.equal(before, torch.gpusim.get_rng_state())]


def test_weights_are_made_there_and_its_generator_put_back() -> None:
    assert on_device(_materialized) == [True, True]


def _trainer(_: Any, folder: str) -> bool:
    os.environ["ACCELERATE_TORCH_DEVICE"] = "gpusim"
    from tests.integrations.test_trainer import _train

    trained = []
    for number, offload in enumerate(("none", "all")):
        trainer, weights = _train(Path(folder) / str(number), offload=offload, use_cpu=False)
        assert next(trainer.model.parameters()).device.type == "gpusim"
        trained.append({name: value.cpu() for name, value in weights.items()})
    return same(*trained)


def test_the_trainer_offloads(tmp_path: Path) -> None:
    assert on_device(_trainer, str(tmp_path))


def _pretrain(_: Any, folder: str, device: str) -> dict[str, Any]:
    from nemo_like.options import parallel

    parallel.BACKENDS["gpusim"] = "gloo"
    for name in [name for name in sys.modules if name.startswith("nemo_like.recipes")]:
        del sys.modules[name]  # their options name the devices that there are
    from nemo_like.cli import main

    text, result = Path(folder, "text.txt"), Path(folder, f"{device}.json")
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 100)
    sizes = ["--seq-len", "16", "--global-batch", "2", "--steps", "3", "--ac", "full"]
    words = [
        "pretrain",
        "--model",
        "llama-tiny",
        "--data",
        str(text),
        *sizes,
        "--device",
        device,
        "--json",
        str(result),
    ]
    assert main(words) == 0
    return json.loads(result.read_text())


def test_one_device_trains_as_the_cpu_does(tmp_path: Path) -> None:
    cpu, there = (on_device(_pretrain, str(tmp_path), device) for device in ("cpu", "gpusim"))
    # Attention is another kernel there, which sums in another order.
    torch.testing.assert_close(torch.tensor(there["losses"]), torch.tensor(cpu["losses"]), rtol=1e-4, atol=0)
    assert there["peak_bytes_are"] == "bytes of tensors in the GPUSIM caching allocator"
    assert 0 < there["peak_bytes"][0] < 1 << 25


def _commands(_: Any) -> list[str]:
    from nemo_like.cli import main

    sizes = ["--model", "tests.gpusim.test_package:Model", "--input-shape", "8,16", "--device", "gpusim"]
    written = []
    for words in (["profile", *sizes, "--runs", "1", "--modes", "full", "--wide"], ["profile", *sizes]):
        out = Path(f"{os.getpid()}.txt")
        with out.open("w") as file, contextlib.redirect_stdout(file):
            assert main(words) == 0
        written.append(out.read_text())
        out.unlink()
    return written


def test_both_profiles_measure_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    measured, profiled = on_device(_commands)
    assert "a simulated device" in measured.replace("\n", " ") and measured.count("bitwise") == 2
    assert "Model on gpusim:0" in profiled
