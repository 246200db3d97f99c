"""Sequence parallelism by the own plans of Hugging Face models: the step of one process, for each set of styles."""

import pytest
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel

from nemo_like import parallelize
from nemo_like.options import TensorParallel
from tests.checks import assert_bitwise, assert_near, labelled, refused_unchanged, step
from tests.models import decoders, expert_families
from tests.tools.surveys.tiny_models import build_tiny
from tests_distributed.spawn import on_ranks

pytest.importorskip("transformers", minversion="5.24")

MODES = ("none", "full", "selective")
# One of each set of styles comes first, and the first three run by default.
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


def _step(model: nn.Module) -> dict[str, Tensor]:
    return step(model, **labelled(decoders.batch(2, 12, seed=2) % 60 + 3), use_cache=False)


def _close(found: dict[str, Tensor], wanted: dict[str, Tensor], where: object = "") -> None:
    """Sums over ranks round differently from one sum; a gradient that is zero but for rounding (of the keys' bias) is
    measured against the others."""
    rounding = 1e-2 * max(float(gradient.norm()) for name, gradient in wanted.items() if name != "loss")
    assert_near(found["loss"], wanted["loss"], where=where)
    assert_near({key: found[key] for key in wanted}, wanted, where=where, least=rounding)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("name", "modes"), [(name, MODES[::2] if number < 3 else MODES) for number, name in enumerate(NAMES)]
)
@on_ranks(2, timeout=150)
def test_every_set_of_styles(rank: int, world_size: int, name: str, modes: tuple[str, ...]) -> None:
    wanted, plain = _step(_build(name)), dict[str, Tensor]()
    for ac in modes:
        found = _step(parallelize(_build(name), ac=ac, tp=TensorParallel(2, sequence_parallel=True), device="cpu"))
        plain = plain or found
        assert found.keys() == wanted.keys()
        assert_bitwise(found, plain, ac)
        _close(found, wanted, ac)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3"])
@on_ranks(4, timeout=150)
def test_beside_expert_parallelism(rank: int, world_size: int, name: str) -> None:
    wanted = _step(expert_families.build(name).eval())
    model = expert_families.build(name).eval()
    model = parallelize(model, ac="none", tp=TensorParallel(2, sequence_parallel=True), ep=2, device="cpu")
    found = _step(model)  # all ranks see the same tokens
    # Experts are those of one rank.
    _close(found, {key: wanted[key] for key, gradient in found.items() if gradient.shape == wanted[key].shape})


@on_ranks(2)
def test_what_is_refused_changes_nothing(rank: int, world_size: int) -> None:
    for model, tp, message in (
        (expert_families.build("gpt_oss"), TensorParallel(2, sequence_parallel=True), "cuts nothing in the layer"),
        # Its layers are given four streams, so that what is cut would not be the sequence.
        (build_tiny("Gemma3nForCausalLM"), TensorParallel(2, sequence_parallel=True), "leave sequence_parallel off"),
        (
            decoders.build("llama"),
            TensorParallel(2, {"model.layers.*.mlp.up_proj": ColwiseParallel()}, True),
            "has the style 'ColwiseParallel'.*Name one of colwise",
        ),
    ):
        with refused_unchanged(model, message):
            parallelize(model, tp=tp, device="cpu")
        assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
