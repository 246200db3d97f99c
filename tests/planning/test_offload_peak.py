"""Predicted peaks with `offload=` against a measured step: host memory lies outside of what the allocator counts."""

from __future__ import annotations

import pytest
import torch

from nemo_like import OffloadConfig, StepSpec
from nemo_like.layers import find_layers
from nemo_like.offload.backends import CopyingBackend
from nemo_like.offload.layer_offload import apply_offloading
from nemo_like.planning import Planner, Setup, apply_plan
from nemo_like.planning.devices import resolve_device
from tests_distributed.allocated import step_peak_bytes

hf = pytest.importorskip("transformers", reason="needs the extra 'hf'")


class _OtherHost(CopyingBackend):
    """Its host memory is Python's, which torch's allocator knows nothing of."""

    def host_memory(self, nbytes: int) -> torch.Tensor:
        return torch.frombuffer(bytearray(nbytes), dtype=torch.uint8)


def _peaks(mode: str, offload: str, lazy: bool) -> tuple[int, int]:
    """Predicted and measured; with `lazy`, copies wait as long as the events let them."""
    torch.manual_seed(0)
    model = hf.LlamaForCausalLM(hf.LlamaConfig(
        hidden_size=64, intermediate_size=160, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=256, use_cache=False,
    )).train()  # fmt: skip
    ids = torch.randint(256, (4, 128))
    config = OffloadConfig(offload, min_bytes=0, max_inflight_bytes=1, prefetch=1)
    setup = Setup(fsdp=None, step=StepSpec(optimizer="sgd", zero_grad="zero", keeps_output=False), offload=config)
    planner = Planner(model, {"input_ids": ids, "labels": ids}, device=resolve_device("cpu"), setup=setup)
    plan = planner.describe(planner.uniform(mode), mode)
    apply_plan(model, plan, device_type="cpu")
    apply_offloading(model, [layer.module for layer in find_layers(model)], config, backend=_OtherHost(lazy=lazy))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    step()
    step()
    return plan.peak_bytes, step_peak_bytes(model, optimizer, step)


@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize("offload", ["boundary", "saved"])
def test_inputs_on_the_host_peak_as_predicted(offload: str, lazy: bool) -> None:
    predicted, measured = _peaks("full", offload, lazy)
    assert abs(predicted - measured) <= 0.001 * measured


@pytest.mark.parametrize(("offload", "above"), [("boundary", 0.02), ("saved", 0.13)])
def test_what_is_kept_inside_never_peaks_above_the_prediction(offload: str, above: float) -> None:
    """Prefetched tensors come as they are asked for; the prediction has all of a layer's at once."""
    predicted, measured = _peaks("selective", offload, lazy=True)
    assert measured <= predicted <= (1 + above) * measured
