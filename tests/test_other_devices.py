"""Accelerators that are none of CUDA's: named, or refused, and never left for the CPU without a word.

Judge: torch's own answers of such a machine, put in the place of this one's.
"""

import types
from typing import Any

import pytest
import torch
from torch import nn

from nemo_like import parallelize
from nemo_like.distributed import launch
from nemo_like.offload.backends import Backend
from nemo_like.planning.devices import device_at_hand, resolve_device
from tests.test_unchanged import everything_of


@pytest.fixture
def intel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with eight GPUs of Intel's."""
    there = types.SimpleNamespace(is_available=lambda: True, device_count=lambda: 8, current_device=lambda: 0)
    monkeypatch.setattr(torch, "xpu", there)


def _model() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)))


@pytest.mark.usefixtures("intel")
def test_a_model_that_trains_on_the_cpu_beside_an_accelerator_says_so_once(logs: pytest.LogCaptureFixture) -> None:
    logs.set_level("INFO", "nemo_like")
    for _ in range(2):
        model = parallelize(_model(), "single", "full")
    assert next(model.parameters()).device.type == "cpu"
    said = [line for line in logs.messages if "XPU" in line]
    assert said == ["torch sees XPU here, and training was tried on CUDA (ROCm included) and CPUs alone: this is the CPU."]


def test_parameters_on_another_accelerator_are_not_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model()
    before = everything_of(model)
    weight = model[0][0].weight  # type: ignore[index]
    place = types.SimpleNamespace(device=types.SimpleNamespace(type="npu"))
    monkeypatch.setattr(model, "parameters", lambda: iter([place, weight]))
    with pytest.raises(ValueError, match=r"Parameters are on 'npu', device is left out.*Move it there first, with model.to"):
        parallelize(model, "single", "full")
    monkeypatch.undo()
    assert everything_of(model) == before


def test_a_device_without_streams_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's module of Apple's GPUs, which has neither streams nor properties."""
    monkeypatch.setattr(torch.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "device_count", lambda: 1)
    model = _model()
    before = everything_of(model)
    for options in ({}, {"offload": "boundary"}, {"ac": "50%"}):
        with pytest.raises(ValueError, match=r"device is 'mps', and torch.mps has no Stream.*use device='cpu'"):
            parallelize(model, "single", device="mps", **options)  # type: ignore[arg-type]
    assert everything_of(model) == before
    for call in (lambda: Backend(torch.device("mps", 0)), lambda: device_at_hand("mps")):
        with pytest.raises(ValueError, match=r"device is 'mps', and torch.mps has no Stream"):
            call()


def test_a_kind_that_no_list_has_is_found_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "new", types.SimpleNamespace(is_available=lambda: True), raising=False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: types.SimpleNamespace(type="new"))
    said: list[str] = []
    monkeypatch.setattr(launch, "say_once", said.append)
    assert launch.pick_device_type() == "cpu" and "torch sees NEW here" in said[0]


def test_a_plan_for_amd_says_whose_kernels_it_counts() -> None:
    assert "Attention kernels, and their temporaries, are those of NVIDIA GPUs" in resolve_device("mi300x").about
    assert resolve_device("h100").about == "rates of the table."


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("NVIDIA H100", "h100-80gb"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA A10G", "a10"),
        ("NVIDIA A100-PCIE-40GB", "a100-40gb"),
        ("NVIDIA GeForce RTX 3090", "rtx-3090"),
        ("NVIDIA RTX A6000", "a6000"),
        ("NVIDIA H200", "h200"),
        ("Tesla V100", ""),
    ],
)
def test_a_card_is_found_by_the_longest_name(name: str, known: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Judge: bytes over the bandwidth and FLOPs over the peak of NVIDIA's data sheets, which no rate is above."""
    about = types.SimpleNamespace(name=name, total_memory=80 << 30, major=9, minor=0)
    module: Any = types.SimpleNamespace(Stream=None, get_device_properties=lambda device: about, current_device=lambda: 0)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    device = device_at_hand("cuda")
    assert device.known_as == known
    sheets = {"h100-pcie": (756e12, 2.04e12), "h100-nvl": (835.5e12, 3.94e12), "h100-80gb": (989.4e12, 3.35e12)}
    if known in sheets:
        assert device.matmul_flops["half"] < sheets[known][0] and device.bandwidth < sheets[known][1]
