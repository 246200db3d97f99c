"""Values that `materialize(seed=)` draws: transformers' own initialisation, and an eager build, are the judges."""

import pytest
import torch
from torch import nn

from nemo_like import parallelize
from nemo_like.distributed.weights.materialize import materialize
from tests.checks import assert_bitwise, on_meta, whole
from tests.tools.surveys.initial_values import differences, initialized, survey, survey_one
from tests.tools.surveys.layers import model_types
from tests.tools.surveys.tiny_models import build_tiny
from tests_distributed.spawn import on_ranks

# A parent sets tensors of its children in each: the residual scale, attention, sinusoids, a convolution, a gate.
FAMILIES = {
    "gpt2": "GPT2LMHeadModel",
    "t5": "T5ForConditionalGeneration",
    "whisper": "WhisperForConditionalGeneration",
    "mamba2": "Mamba2ForCausalLM",
    "clip": "CLIPVisionModel",
    "recurrent_gemma": "RecurrentGemmaForCausalLM",
    "siglip": "SiglipVisionModel",
    "mt5": "MT5ForConditionalGeneration",
    "llama": "LlamaForCausalLM",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_built_on_meta_has_the_values_of_transformers_own_initialisation(family: str) -> None:
    row = survey_one(family, FAMILIES[family])
    assert row.verdict == "equal", row


@pytest.mark.long(reason="every model type of transformers, 15 minutes")
@pytest.mark.parametrize("part", range(8))
def test_no_model_type_has_other_values(part: int) -> None:
    rows = list(survey(model_types()[part::8]))
    assert [row for row in rows if row.verdict == "different"] == []
    assert sum(row.verdict == "equal" for row in rows) > 30


# 4 to 12 s with the start of the ranks: sharded values of three families, each by another kind of parent.
@on_ranks(2, timeout=100)
def test_ranks_have_the_values_of_one_process(rank: int, world_size: int) -> None:
    for family in ("gpt2", "t5", "whisper"):
        model = parallelize(on_meta(build_tiny, FAMILIES[family]), strategy="fsdp2", ac="full", device="cpu")
        materialize(model, seed=0)
        eager = build_tiny(FAMILIES[family])
        assert any(hasattr(parameter, "full_tensor") for parameter in model.parameters())
        single = materialize(on_meta(build_tiny, FAMILIES[family]), seed=0)
        assert_bitwise({n: whole(p).detach() for n, p in model.named_parameters()}, dict(single.named_parameters()))
        assert list(differences(eager, single)) == []


class _Scaled(nn.Module):
    """Halves its children's weights after they have drawn them, and fills a row of one."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for linear in (self.one, self.two):
            linear.reset_parameters()
            with torch.no_grad():
                linear.weight.mul_(0.5)
        nn.init.ones_(self.one.weight[0])


@pytest.mark.parametrize("make", [_Scaled, lambda: nn.MultiheadAttention(8, 2), lambda: nn.Transformer(8, 2, 1, 1, 8)])
def test_constructors_of_parents_are_followed(make: type[nn.Module]) -> None:
    """The judge: what each module's constructor calls, run on a CPU in the same order."""
    model = on_meta(make)
    materialize(model, seed=1)
    eager = make()
    torch.manual_seed(1)
    for module in _children_first(eager):
        reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if reset is not None:
            reset()
    assert_bitwise(dict(model.named_parameters()), dict(eager.named_parameters()))


def _children_first(module: nn.Module) -> list[nn.Module]:
    return [each for child in module.children() for each in _children_first(child)] + [module]


def test_an_init_fn_reaches_modules_without_tensors() -> None:
    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Sequential):
            module[0].weight.data.mul_(0.1)

    eager = nn.Sequential(nn.Linear(3, 3), nn.GELU())
    model = on_meta(lambda: nn.Sequential(nn.Linear(3, 3), nn.GELU()))
    materialize(model, init, seed=2)
    torch.manual_seed(2)
    with torch.no_grad():
        eager.apply(init)
    assert_bitwise(model.state_dict(), eager.state_dict())


def test_known_values_are_kept_by_a_parents_initializer() -> None:
    eager, model = build_tiny(FAMILIES["gpt2"]), on_meta(build_tiny, FAMILIES["gpt2"])
    for name in ("wte", "h.0.mlp.c_proj"):
        at = model.transformer.get_submodule(name)
        at.weight = nn.Parameter(eager.transformer.get_submodule(name).weight.detach().clone())
    model.tie_weights()
    # Its bias is on the meta device, so that its own initializer is called, and would draw the weight, too.
    with pytest.raises(
        ValueError, match=r"h\.0\.mlp\.c_proj\.weight is not on the meta device, and begins with \[-?0\.0"
    ):
        materialize(model, seed=0)
    at.weight._is_hf_initialized = True
    materialize(model, seed=0)
    for name in ("wte", "h.0.mlp.c_proj"):
        assert torch.equal(*(m.transformer.get_submodule(name).weight for m in (model, eager)))
    other = initialized(eager, 3).transformer.h[1].mlp.c_proj.weight.std()
    assert abs(model.transformer.h[1].mlp.c_proj.weight.std() / other - 1) < 0.1


def test_a_tensor_that_the_constructor_made_outside_of_meta_is_refused_and_initialized_after_to_meta() -> None:
    model = on_meta(build_tiny, "XLNetModel")  # torch.FloatTensor(n)
    with pytest.raises(ValueError, match=r"mask_emb is not on the meta device.*call model\.to\('meta'\)"):
        materialize(model, seed=0)
    assert list(differences(build_tiny("XLNetModel"), materialize(model.to("meta"), seed=0))) == []
