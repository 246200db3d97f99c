"""Seconds of attention, by the kernel that runs. Judges: PyTorch's choice of a kernel, published TFLOPS, a timed call."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from nemo_like import Job
from nemo_like.activation_checkpointing.ops import facts
from nemo_like.fake.cuda_ops import Call, backend
from nemo_like.planning import calibration
from nemo_like.planning.device_table import known_devices
from nemo_like.planning.devices import device_of, resolve_device
from nemo_like.planning.predictions.seconds import step_seconds
from nemo_like.planning.query import PlanQuery
from nemo_like.planning.roofline import OpWork, work_seconds
from tests.models.decoders import build

CUDNN = torch.ops.aten._scaled_dot_product_cudnn_attention.default
FLASH = torch.ops.aten._scaled_dot_product_flash_attention.default


@pytest.mark.parametrize("name", [name for name in known_devices() if name != "cpu"])
def test_the_first_kernel_is_the_one_that_pytorch_picks_and_none_is_above_the_peak(name: str) -> None:
    device = resolve_device(name)
    query = torch.empty(1, 8, 1024, 128, dtype=torch.bfloat16, device="meta", requires_grad=True)
    picked = backend(Call(query, query, query, is_causal=True), device.capability)
    assert next(iter(device.attention_kernels)) == picked
    assert device.attention_kernels[picked][0] == 1.0 and "flash" in device.attention_kernels
    speeds = [speed for both in device.attention_kernels.values() for speed in both]
    assert max(speeds) * device.attention_flops["half"] <= device.peak_flops


def test_an_h100_reaches_the_tflops_of_the_paper() -> None:
    device = resolve_device("h100")
    # arXiv 2407.08608, figures 5 and 6: 128 wide, 8,192 tokens; forward under a causal mask, backward.
    for kernel, op, published in (("", CUDNN, (529, 518)), ("", FLASH, (333, 318)), ("fa3", FLASH, (602, 559))):
        of_kernel = device.with_attention(kernel) if kernel else device
        rates = [of_kernel.attention_flops["half"] * speed / 1e12 for speed in of_kernel.attention_speed(op, half=True)]
        assert rates == pytest.approx(published, rel=0.002)  # the table has three digits


def test_a_call_that_was_timed_takes_these_seconds_at_the_calibrated_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "_seconds", lambda run, most: 0.25)
    rate = calibration._attention(torch.device("cpu"), torch.float32, 1.0)
    query = torch.empty(1, 4, 1024, 64)
    with OpWork() as seen:
        F.scaled_dot_product_attention(query, query, query, is_causal=True)
    (work,) = (each for each in seen.work if facts(each.op).attention)
    device = resolve_device("cpu")
    device = replace(device, attention_flops={"half": rate, "single": rate}, bandwidth=1e30)
    assert work_seconds([work], device)[0] == pytest.approx(0.25)


def test_attention_of_a_job_runs_in_the_kernel_that_is_asked_for() -> None:
    def rate(**job: str) -> float:
        return device_of(Job.of(gpu="h100", **job)).flops_of(CUDNN, half=True)

    assert rate(attention="flash") < rate() == rate(attention="cudnn") < rate(attention="fa3")
    ids = torch.zeros(1, 8192, dtype=torch.long)
    model, seconds = build("llama"), []
    for kernel in ("flash", "fa3"):
        job = Job.of(gpu="h100", precision="bf16", attention=kernel)
        query = PlanQuery.from_model(model, {"input_ids": ids, "labels": ids}, job)
        seconds.append(step_seconds(query, query.uniform("none")).parts["backward"])
    assert seconds[0] > seconds[1]
    with pytest.raises(
        ValueError, match="attention is 'fa3', and its speed on a100-80gb is not known: there is that of flash"
    ):
        device_of(Job.of(gpu="a100-80gb", attention="fa3"))
    with pytest.raises(ValueError, match="attention is 'fa4'"):
        Job.of(attention="fa4")
