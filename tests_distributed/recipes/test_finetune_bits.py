"""Fine-tuning in few bits, emulated on CPU: matmuls in float8, and adapters beside frozen weights of 4 bits."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from nemo_like import parallelize
from nemo_like.distributed import get_model_state
from nemo_like.distributed.weights.slots import bare_name
from nemo_like.recipes.agree import Ranks
from nemo_like.recipes.command_line import parse_options
from nemo_like.recipes.finetune import FineTuning
from nemo_like.recipes.quantised import PackedLinear, pack_rows, row_bytes, unpack_rows
from tests.models import decoders
from tests_distributed.recipes.finetune_job import make_model, questions, run_finetune, run_several, write_lines
from tests_distributed.spawn import on_ranks, run_ranks

pytest.importorskip("torchao.float8")
pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options of a small job."""
    folder = tmp_path_factory.mktemp("job")
    make_model(folder / "model", hidden_size=64, intermediate_size=128)
    write_lines(folder / "data.jsonl", questions(20))
    text = f"--model {folder / 'model'} --data {folder / 'data.jsonl'} --steps 4 --batch-size 4 --seq-len 32"
    return f"{text} --eval-samples 0 --warmup-steps 1 --lr 1e-2 --device cpu".split()


@pytest.fixture
def adapting(job: list[str]) -> list[str]:
    """The same beside weights of 4 bits."""
    return [*job, "--qlora", "--lora-rank", "4", "--precision", "float32"]


def test_weights_that_are_gathered_in_float8_are_saved_as_they_are(job: list[str], tmp_path: Path) -> None:
    gather = [*job, "--sync-save", "--save-every", "2", "--precision", "fp8-gather"]
    short = run_several(2, {"on": [*gather, "--steps", "2"]}, tmp_path)["on"]
    assert short["losses"] != [] and (tmp_path / "on" / "model" / "model.safetensors").exists()
    more = {"on": [*gather, "--resume"]}
    resumed = run_several(2, more, tmp_path)["on"]
    assert resumed["first_step"] == 2
    alone = run_several(1, {"on": [*gather, "--steps", "5", "--resume", "--ac", "none"]}, tmp_path)["on"]
    assert alone["first_step"] == 4
    model = transformers.AutoModelForCausalLM.from_pretrained(str(tmp_path / "on" / "model"))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert len(short["losses"] + resumed["losses"]) == 4


class _Sent(torch.utils._python_dispatch.TorchDispatchMode):
    """Bytes that each collective of c10d gives to this rank or reduces."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[str, list[int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            tensor = args[0][0] if isinstance(args[0], list) else args[0]
            self.sizes.setdefault(func._schema.name.split("::")[1], []).append(tensor.nbytes)
        return func(*args, **(kwargs or {}))


def _scales(model: torch.nn.Module) -> list[float]:
    parts = [p._local_tensor for p in model.parameters() if isinstance(p, DTensor)]
    return [float(part._precomputed_scale) for part in parts if hasattr(part, "_precomputed_scale")]


@pytest.mark.few(1)
@pytest.mark.parametrize("modes", [("none", "selective"), ("none", "full")])
@on_ranks(2, timeout=120)
def test_what_is_gathered_in_float8(rank: int, world_size: int, modes: tuple[str, ...]) -> None:
    """Bytes of the gathers, collectives of scales, and gradients of every mode."""
    import torchao.float8
    import torchao.float8.fsdp_utils as gathering

    calls = []
    compute = torchao.float8.precompute_float8_dynamic_scale_for_fsdp
    torchao.float8.precompute_float8_dynamic_scale_for_fsdp = lambda model: calls.append("forward") or compute(model)

    def of_one_weight(*args: Any, **kwargs: Any) -> None:
        raise AssertionError(
            "a gather, of forward or of backward, computed a scale by itself, in a collective of its own"
        )

    gathering.hp_tensor_to_float8_dynamic = of_one_weight
    found: dict[str, Any] = {}
    for word, ac in [(word, ac) for word in ("fp8", "fp8-gather") for ac in modes]:
        torch.manual_seed(0)
        model = parallelize(decoders.build("llama"), ac=ac, precision=word)
        ids = decoders.batch(2, 16, seed=rank)
        losses, grads, scales = [], [], []
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(2):
            with _Sent() as sent:
                loss = model(input_ids=ids, labels=ids).loss
                loss.backward()
            scales.append(_scales(model))
            grads.append({n: p.grad.to_local().clone() for n, p in model.named_parameters()})
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        state = get_model_state(model)
        assert {type(t.to_local()) for t in state.values() if isinstance(t, DTensor)} == {torch.Tensor}
        found[f"{word} {ac}"] = losses, grads, scales, sent.sizes
    assert calls == ["forward"] * 2 * len(modes), "once a step"
    sent = {word: found[f"{word} none"][3] for word in ("fp8", "fp8-gather")}
    layer = {word: Counter(sizes["_allgather_base_"]).most_common(1)[0][0] for word, sizes in sent.items()}
    assert layer["fp8-gather"] < 0.55 * layer["fp8"], "a byte a weight in place of two; norms stay bfloat16"
    for word in sent:
        losses, grads, scales, _ = found[f"{word} none"]
        for ac in modes:
            others = found[f"{word} {ac}"]
            assert others[0] == losses and others[2] == scales
            for one, two in zip(grads, others[1], strict=True):
                assert all(torch.equal(two[name], grad) for name, grad in one.items()), (word, ac)
    first, second = found["fp8-gather none"][2]
    assert len(first) == 3 * 7 and first != second, "new weights, new scales"


def test_what_is_packed_is_unpacked_row_by_row() -> None:
    weight = torch.randn(6, 128, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.float32, torch.bfloat16):
        packed = pack_rows(weight, dtype)
        assert packed.shape == (6, row_bytes(128) // dtype.itemsize) and row_bytes(128) == 72, "4.5 bits a weight"
        found = unpack_rows(packed, 128, dtype)
        assert torch.equal(pack_rows(weight[2:4], dtype).view(torch.uint8), packed[2:4].view(torch.uint8))
        assert (found - weight).abs().max() < 0.16 * weight.abs().max()


def _first_step(rank: int, world_size: int, arguments: list[str]) -> tuple[dict[str, torch.Tensor], int, int]:
    """Gradients of the adapters, whole; bytes of 4-bit weights on this rank; and of the same in 16 bits on all ranks."""
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
    adapting: list[str], tmp_path: Path, mode: str
) -> None:
    found = {}
    for ranks, ac in ((1, "none"), (2, "none"), (2, mode)):
        line = [*adapting, "--ac", ac, "--output", str(tmp_path / f"{ranks}{ac}")]
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


def test_a_run_with_four_bits_falls_and_is_alike_on_one_and_two_ranks(adapting: list[str], tmp_path: Path) -> None:
    one, two = (
        run_finetune(
            ranks, [*adapting, "--steps", "8", "--output", str(tmp_path / str(ranks))], tmp_path / f"{ranks}.json"
        )
        for ranks in (1, 2)
    )
    assert one["losses"][-1] < one["losses"][0] - 0.3
    torch.testing.assert_close(torch.tensor(two["losses"]), torch.tensor(one["losses"]), rtol=1e-4, atol=0)
    assert (tmp_path / "2" / "adapter" / "adapter_model.safetensors").exists()


def test_four_bits_are_close_to_the_weights() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(256, 64).requires_grad_(False)
    packed = PackedLinear(linear, torch.float32)
    packed.weight = nn.Parameter(pack_rows(linear.weight, torch.float32), requires_grad=False)
    x = torch.randn(8, 256, requires_grad=True)
    assert ((packed(x) - linear(x)).norm() / linear(x).norm()) < 0.12
    packed(x).sum().backward()
    wanted = torch.autograd.grad(linear(x).sum(), x)[0]
    assert (x.grad - wanted).norm() / wanted.norm() < 0.12  # type: ignore[operator]
