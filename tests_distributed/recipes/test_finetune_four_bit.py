"""Adapters beside frozen weights of 4 bits: bytes a rank holds, gradients on two ranks, every mode of checkpointing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from nemo_like.distributed.weights.slots import bare_name
from tests_distributed.recipes.finetune_job import make_model, questions, run_finetune, write_lines
from tests_distributed.spawn import run_ranks

pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")
WIDTHS = {"hidden_size": 64, "intermediate_size": 128}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options of a small job."""
    folder = tmp_path_factory.mktemp("job")
    make_model(folder / "model", **WIDTHS)
    write_lines(folder / "data.jsonl", questions(20))
    line = f"--model {folder / 'model'} --data {folder / 'data.jsonl'} --steps 4 --batch-size 4 --seq-len 32 --qlora"
    line += " --lora-rank 4 --eval-samples 0 --warmup-steps 1 --lr 1e-2 --device cpu --precision float32"
    return line.split()


def test_what_is_packed_is_unpacked_row_by_row() -> None:
    from nemo_like.recipes.quantised import pack_rows, row_bytes, unpack_rows

    weight = torch.randn(6, 128, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.float32, torch.bfloat16):
        packed = pack_rows(weight, dtype)
        assert packed.shape == (6, row_bytes(128) // dtype.itemsize) and row_bytes(128) == 72, "4.5 bits a weight"
        found = unpack_rows(packed, 128, dtype)
        assert torch.equal(pack_rows(weight[2:4], dtype).view(torch.uint8), packed[2:4].view(torch.uint8))
        assert (found - weight).abs().max() < 0.16 * weight.abs().max()


def _first_step(rank: int, world_size: int, arguments: list[str]) -> tuple[dict[str, torch.Tensor], int, int]:
    """Gradients of the adapters, whole; bytes of 4-bit weights on this rank; and of the same in 16 bits on all ranks."""
    from nemo_like.recipes.agree import Ranks
    from nemo_like.recipes.command_line import parse_options
    from nemo_like.recipes.finetune import FineTuning
    from nemo_like.recipes.quantised import PackedLinear

    control = dist.new_group(backend="gloo") if world_size > 1 else None
    job = FineTuning(
        parse_options("finetune", arguments), Ranks(rank, world_size, torch.device("cpu"), control=control)
    )
    with torch.no_grad():
        for name, parameter in job.model.named_parameters():
            if "lora_B" in name:  # they begin as zeros, behind which A has no gradient
                parameter.fill_(0.01)
    job._forward_and_backward()
    named = ((bare_name(name), parameter.grad) for name, parameter in job.model.named_parameters())
    grads = {name: grad for name, grad in named if grad is not None}
    whole = {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in grads.items()}
    linears = [module for module in job.model.modules() if isinstance(module, PackedLinear)]
    local = [w.to_local() if isinstance(w := linear.weight, DTensor) else w for linear in linears]
    return (
        whole,
        sum(tensor.numel() * tensor.element_size() for tensor in local),
        sum(linear.in_features * linear.out_features * 2 for linear in linears),
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", ["selective", "full"])
def test_two_ranks_hold_half_the_bytes_and_have_the_gradients_of_one(
    base: list[str], tmp_path: Path, mode: str
) -> None:
    found = {}
    for ranks, ac in ((1, "none"), (2, "none"), (2, mode)):
        line = [*base, "--ac", ac, "--output", str(tmp_path / f"{ranks}{ac}")]
        found[ranks, ac] = run_ranks(ranks, _first_step, line, timeout=100)
    one, held, in_bf16 = found[1, "none"][0]
    assert len(one) == 2 * 7 * 2 and all(grad.abs().sum() > 0 for grad in one.values())
    assert held == in_bf16 * 4.5 / 16
    for rank in range(2):
        grads, part, _ = found[2, "none"][rank]
        assert part == held / 2
        for name, grad in one.items():
            torch.testing.assert_close(grads[name], grad, rtol=1e-4, atol=1e-7)
        assert all(torch.equal(found[2, mode][rank][0][name], grad) for name, grad in grads.items())


def test_a_run_with_four_bits_falls_and_is_alike_on_one_and_two_ranks(base: list[str], tmp_path: Path) -> None:
    one, two = (
        run_finetune(ranks, [*base, "--steps", "8", "--output", str(tmp_path / str(ranks))], tmp_path / f"{ranks}.json")
        for ranks in (1, 2)
    )
    assert one["losses"][-1] < one["losses"][0] - 0.3
    torch.testing.assert_close(torch.tensor(two["losses"]), torch.tensor(one["losses"]), rtol=1e-4, atol=0)
    assert (tmp_path / "2" / "adapter" / "adapter_model.safetensors").exists()


def test_four_bits_are_close_to_the_weights(base: list[str]) -> None:
    from nemo_like.recipes.quantised import PackedLinear, pack_rows

    torch.manual_seed(0)
    linear = nn.Linear(256, 64).requires_grad_(False)
    packed = PackedLinear(linear, torch.float32)
    packed.weight = nn.Parameter(pack_rows(linear.weight, torch.float32), requires_grad=False)
    x = torch.randn(8, 256, requires_grad=True)
    assert ((packed(x) - linear(x)).norm() / linear(x).norm()) < 0.12
    packed(x).sum().backward()
    wanted = torch.autograd.grad(linear(x).sum(), x)[0]
    assert (x.grad - wanted).norm() / wanted.norm() < 0.12  # type: ignore[operator]
