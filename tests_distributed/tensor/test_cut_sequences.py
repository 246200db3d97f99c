"""Sequence parallelism by the own plans of Hugging Face models: the step of one process, for each set of styles."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel

from nemo_like import parallelize
from nemo_like.options import TensorParallel
from tests.models import decoders, expert_families
from tests.surveys.tiny_models import build_tiny
from tests_distributed.spawn import on_ranks

pytest.importorskip("transformers", minversion="5.24")

# One of each set of styles comes first, which runs by default.
NAMES = (
    "DeepseekV2",  # colwise, mla_kv_a_proj, moe_tp_experts, packed_colwise, rowwise
    "experts.qwen3_moe",  # colwise, moe_tp_experts, packed_colwise, replicated_with_grad_allreduce, rowwise
    "Olmo2",  # colwise_gather_output, rowwise_split_input; a norm over all heads, and a layer that ends in a norm
    "GraniteMoeSWA",  # local_params
    "Qwen3Next",  # a mixer that the plan leaves whole
    "experts.llama4",  # packed_rowwise; output that is changed in place
    "experts.deepseek_v3",
    "experts.glm4_moe",
    "experts.mixtral",
    "experts.olmoe",
    "decoders.gemma3",
    "decoders.llama",
    "decoders.mixtral",
    "decoders.qwen3",
    "DeepseekV4",  # matrices beside attention: the layer sees the whole sequence
    "GPTNeoX",
    "Jamba",
    "LongcatFlash",  # moe_identity_expert
    "Phi3",
)


def _build(name: str) -> nn.Module:
    kind, _, short = name.rpartition(".")
    build = {"decoders": decoders.build, "experts": expert_families.build}.get(kind)
    model = build(short) if build is not None else build_tiny(f"{name}ForCausalLM")
    return model.eval()  # ranks would draw dropout for their own parts


def _step(model: nn.Module) -> tuple[float, dict[str, Tensor]]:
    ids = decoders.batch(2, 12, seed=2) % 60 + 3
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.item(), {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in gradients.items()}


@pytest.mark.few(5)
@pytest.mark.parametrize("name", NAMES)
@on_ranks(2, timeout=150)
def test_every_set_of_styles(rank: int, world_size: int, name: str) -> None:
    expected, wanted = _step(_build(name))
    # One that is zero but for rounding (of the keys' bias) is measured against the others.
    rounding = 1e-2 * max(float(gradient.norm()) for gradient in wanted.values())
    plain: dict[str, Tensor] = {}
    for ac in ("none", "full", "selective"):
        tp = TensorParallel(2, sequence_parallel=True)
        loss, found = _step(parallelize(_build(name), ac=ac, tp=tp, device="cpu"))
        plain = plain or found
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[key], gradient) for key, gradient in plain.items()), ac
        # Sums over ranks round differently from one sum.
        assert loss == pytest.approx(expected, rel=1e-5)
        for key, gradient in wanted.items():
            assert (found[key] - gradient).norm() <= 1e-5 * max(float(gradient.norm()), rounding), (ac, key)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3"])
@on_ranks(4, timeout=150)
def test_beside_expert_parallelism(rank: int, world_size: int, name: str) -> None:
    expected, wanted = _step(expert_families.build(name).eval())
    model = expert_families.build(name).eval()
    model = parallelize(model, ac="none", tp=TensorParallel(2, sequence_parallel=True), ep=2, device="cpu")
    loss, found = _step(model)  # all ranks see the same tokens
    assert loss == pytest.approx(expected, rel=1e-5)
    rounding = 1e-2 * max(float(gradient.norm()) for gradient in wanted.values())
    for key, gradient in found.items():
        if gradient.shape == wanted[key].shape:  # else: the experts of one rank
            assert (gradient - wanted[key]).norm() <= 1e-5 * max(float(wanted[key].norm()), rounding), key


@on_ranks(2)
def test_what_is_refused_changes_nothing(rank: int, world_size: int) -> None:
    plan = {"model.layers.*.mlp.up_proj": ColwiseParallel()}
    for model, tp, message in (
        (expert_families.build("gpt_oss"), TensorParallel(2, sequence_parallel=True), "cuts nothing in the layer"),
        # Its layers are given four streams, so that what is cut would not be the sequence.
        (build_tiny("Gemma3nForCausalLM"), TensorParallel(2, sequence_parallel=True), "leave sequence_parallel off"),
        (
            decoders.build("llama"),
            TensorParallel(2, plan, True),
            "has the style 'ColwiseParallel'.*Name one of colwise",
        ),
    ):
        before = dict(model.named_modules())
        with pytest.raises(ValueError, match=message):
            parallelize(model, tp=tp, device="cpu")
        assert dict(model.named_modules()) == before
        assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
