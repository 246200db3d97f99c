"""Predicted peaks with `offload=` against a measured step: host memory lies outside of what the allocator counts."""

from __future__ import annotations

import pytest
import torch

from nemo_like import Job, MemoryBudget, OffloadConfig, PlanSearch, StepSpec
from nemo_like.layers import find_layers
from nemo_like.offload.backends import Backend
from nemo_like.offload.layer_offload import apply_offloading
from nemo_like.planning import apply_plan
from nemo_like.planning.answers.within import choose
from nemo_like.planning.choose.layer import Choice
from nemo_like.planning.devices import resolve_device
from nemo_like.planning.planner import describe
from nemo_like.planning.query import PlanQuery
from tests.planning.queries import part_of
from tests_distributed.allocated import step_peak_bytes

hf = pytest.importorskip("transformers", reason="needs the extra 'hf'")


class _OtherHost(Backend):
    """Its host memory is Python's, which torch's allocator knows nothing of."""

    def host_memory(self, nbytes: int) -> torch.Tensor:
        return torch.frombuffer(bytearray(nbytes), dtype=torch.uint8)


class _Away:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.bytes = torch.frombuffer(bytearray(tensor.numel() * tensor.element_size()), dtype=tensor.dtype)
        self.bytes = self.bytes.view(tensor.shape).copy_(tensor.detach())
        self.stride = tensor.stride()

    def get(self) -> torch.Tensor:
        return torch.empty_strided(self.bytes.shape, self.stride, dtype=self.bytes.dtype).copy_(self.bytes)


class _OtherHostTransfer:
    """The engine's plainest transfer, with that host memory."""

    def to_host(self, tensor: torch.Tensor) -> _Away:
        return _Away(tensor)

    def prefetch(self, handle: _Away) -> None:
        pass


def _query(offload: OffloadConfig, host: bool = False) -> tuple[PlanQuery, torch.Tensor]:
    torch.manual_seed(0)
    model = hf.LlamaForCausalLM(hf.LlamaConfig(
        hidden_size=64, intermediate_size=160, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=256, use_cache=False,
    )).train()  # fmt: skip
    ids = torch.randint(256, (4, 128))
    setup = Job.of(step=StepSpec(optimizer="sgd", zero_grad="zero", keeps_output=False), offload=offload)
    sample = {"input_ids": ids, "labels": ids}
    return PlanQuery.of(model, sample, setup.change(gpu=resolve_device("cpu"), search=PlanSearch(host=host))), ids


def _choices(query: PlanQuery, mode: str) -> list[list[Choice]]:
    return choose(query, MemoryBudget.parse(mode), mode)[0] if mode.endswith("%") else query.uniform(mode)


def _measured(model: torch.nn.Module, ids: torch.Tensor) -> int:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    step()
    step()
    return step_peak_bytes(model, optimizer, step)


def _peaks(mode: str, offload: str, inflight: int) -> tuple[int, int]:
    """Predicted and measured."""
    config = OffloadConfig(offload, min_bytes=0, max_inflight_bytes=inflight, prefetch=1)
    query, ids = _query(config)
    model, plan = part_of(query).whole, describe(query, _choices(query, mode), mode)
    apply_plan(model, plan, device_type="cpu")
    apply_offloading(model, [layer.module for layer in find_layers(model)], config, backend=_OtherHost())
    return plan.peak_bytes, _measured(model, ids)


@pytest.mark.few(1)
@pytest.mark.parametrize("inflight", [1, 1 << 30])
@pytest.mark.parametrize(
    ("mode", "offload"), [("full", "boundary"), ("selective", "boundary"), ("selective", "saved"), ("50%", "saved")]
)
def test_a_step_with_an_offload_peaks_as_predicted_to_the_byte(mode: str, offload: str, inflight: int) -> None:
    predicted, measured = _peaks(mode, offload, inflight)
    assert predicted == measured


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", ["selective", "50%"])
def test_a_plan_that_moves_what_it_keeps_peaks_as_predicted_to_the_byte(mode: str) -> None:
    query, ids = _query(OffloadConfig("none"), host=True)
    kinds = [part_of(query).problems[call.kind] for call in part_of(query).traced.calls]
    choices = [
        kind.on_host(choice) if choice.decisions and not choice.host_bytes else choice
        for kind, choice in zip(kinds, _choices(query, mode)[0])
    ]
    assert any(choice.host_bytes for choice in choices)
    plan = describe(query, [choices], mode)
    apply_plan(part_of(query).whole, plan, device_type="cpu", transfer=_OtherHostTransfer())
    assert plan.peak_bytes == _measured(part_of(query).whole, ids)
