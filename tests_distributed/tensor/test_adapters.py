"""LoRA adapters under tensor parallelism: the gradients of one process, and clear refusals of what cannot be cut."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from nemo_like import parallelize
from nemo_like.distributed import get_model_state
from nemo_like.options import TensorParallel
from tests.checks import assert_bitwise, gradients_of, mean_over_ranks, seeded
from tests_distributed.spawn import on_ranks, run_ranks
from tests_distributed.tensor.test_tensor_parallel import assert_same_step, batch, build, cut, loss_of, step_of

peft = pytest.importorskip("peft")

COLUMNS = ("q_proj", "v_proj", "gate_proj", "up_proj")
TARGETS = (*COLUMNS, "o_proj", "down_proj")
LARGE = {"init_lora_weights": False}
"""Factors that are not zero."""
ONE_LAYER = {"num_hidden_layers": 1}
BOTH = pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sequence", ""])


def adapted(name: str = "llama", of: dict[str, Any] | None = None, **more: Any) -> nn.Module:
    """In float64: large factors let the rounding of a sum in another order grow."""
    model = build(name, **(of or {})).double()
    config = peft.LoraConfig(**({"r": 4, "target_modules": list(TARGETS)} | LARGE | more))
    return peft.get_peft_model(model, config).double()


def split(model: nn.Module, sequence_parallel: bool = False, **options: Any) -> nn.Module:
    return parallelize(model, tp=TensorParallel(2, sequence_parallel=sequence_parallel), device="cpu", **options)


def whole_parts_differ(model: nn.Module) -> list[str]:
    """Names of gradients of whole parameters that ranks do not agree on to the bit."""
    differ = []
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not isinstance(parameter.grad, DTensor):
            first = parameter.grad.clone()
            torch.distributed.broadcast(first, 0)
            differ += [] if torch.equal(first, parameter.grad) else [name]
    return differ


def _step(rank: int, world_size: int, sequence_parallel: bool, more: dict[str, Any]) -> dict[str, str]:
    model = cut(adapted(**more), sequence_parallel=sequence_parallel)
    assert_same_step(seeded(step_of, model, seed=5), seeded(step_of, adapted(**more), seed=5), str(more))
    assert whole_parts_differ(model) == []
    return {
        name.removeprefix("base_model.model.model.layers.0."): str(p.placements[0])
        if isinstance(p, DTensor)
        else "whole"
        for name, p in model.named_parameters()
    }


ODD: dict[str, Any] = {"use_rslora": True, "r": 3}


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("sequence_parallel", "more"),
    [(False, {"lora_bias": True}), (True, ODD), (True, {"lora_bias": True}), (False, ODD), (False, {}), (True, {})],
)
def test_a_step_is_that_of_one_process(sequence_parallel: bool, more: dict[str, Any]) -> None:
    placed = run_ranks(2, _step, sequence_parallel, more)[0]
    assert placed["self_attn.k_proj.weight"] == "S(0)", "linears without adapters are cut as before"
    for name, base, a, b in [
        ("self_attn.q_proj", "S(0)", "whole", "S(0)"),
        ("self_attn.o_proj", "S(1)", "S(1)", "whole"),
        ("mlp.up_proj", "S(0)", "whole", "S(0)"),
        ("mlp.down_proj", "S(1)", "S(1)", "whole"),
    ]:
        parts = ("base_layer", "lora_A.default", "lora_B.default")
        assert [placed[f"{name}.{part}.weight"] for part in parts] == [base, a, b], name


@pytest.mark.few(1)
@BOTH
def test_dropout_in_front_of_whole_factors_is_that_of_one_process(sequence_parallel: bool) -> None:
    run_ranks(2, _step, sequence_parallel, {"lora_dropout": 0.3, "target_modules": list(COLUMNS)})


@pytest.mark.few(1)
@BOTH
@on_ranks(2)
def test_other_models(rank: int, world_size: int, sequence_parallel: bool) -> None:
    """A head that shares its weight, norms of heads, two adapters, and a model that PEFT has changed without wrapping it."""

    def two() -> nn.Module:
        model: Any = adapted()
        model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj", "o_proj"], **LARGE))
        model.base_model.set_adapter(["default", "other"])
        return model

    config = peft.LoraConfig(r=4, target_modules=list(TARGETS), **LARGE)
    for name, made in {
        "tied head": lambda: adapted("qwen3", target_modules=["q_proj", "o_proj", "lm_head"]),
        "two": two,
        "without wrapping": lambda: peft.inject_adapter_in_model(config, build("llama")),
    }.items():
        model = cut(made(), sequence_parallel=sequence_parallel)
        assert_same_step(step_of(model), step_of(made()), name)
        assert whole_parts_differ(model) == []


@pytest.mark.few(1)
@BOTH
@on_ranks(2)
def test_checkpointing_changes_no_bit(rank: int, world_size: int, sequence_parallel: bool) -> None:
    wanted: dict[str, Tensor] = {}
    for ac in ("none", "full"):
        model = split(adapted(of=ONE_LAYER, lora_dropout=0.2), sequence_parallel, ac=ac)
        torch.manual_seed(5)
        loss_of(model, batch()).backward()
        found = gradients_of(model)
        assert found and all("lora_" in name for name in found), "frozen weights have no gradients"
        wanted = wanted or found
        assert_bitwise(found, wanted, ac)


@pytest.mark.few(1)
@BOTH
@on_ranks(4)
def test_fsdp_times_tp_trains_as_one_process(rank: int, world_size: int, sequence_parallel: bool) -> None:
    reference = adapted(of=ONE_LAYER)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.5)
    model = split(adapted(of=ONE_LAYER), sequence_parallel, ac="full")
    mine = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        for each in (optimizer, mine):
            each.zero_grad()
        found = step_of(model, batch().chunk(2)[rank // 2])
        assert_same_step(found | {"loss": mean_over_ranks(found["loss"])}, step_of(reference), "FSDP2")
        for each in (optimizer, mine):
            each.step()


def _saved(rank: int, world_size: int, folder: str) -> None:
    model = split(adapted(of=ONE_LAYER), True, ac="full")
    with pytest.raises(RuntimeError, match=r"of PeftModel\..*state_dict=state"):
        model.save_pretrained(folder)
    state = get_model_state(model, full=True)
    if rank == 0:
        model.save_pretrained(folder, state_dict=state)


def test_adapters_are_saved_whole(tmp_path: Path) -> None:
    run_ranks(2, _saved, str(tmp_path))
    loaded = peft.PeftModel.from_pretrained(build("llama", **ONE_LAYER).double(), tmp_path)
    assert_bitwise(loaded.state_dict(), adapted(of=ONE_LAYER).state_dict())


@on_ranks(2)
def test_what_cannot_be_cut_is_refused_and_left_untouched(rank: int, world_size: int) -> None:
    q = r"'base_model\.model\.model\.layers\.0\.self_attn\.q_proj'.*: "

    def merged() -> nn.Module:
        model: Any = adapted()
        model.merge_adapter()
        return model

    def tuned(kind: str, **more: Any) -> nn.Module:
        return peft.get_peft_model(build("llama"), getattr(peft, kind)(**more))

    cases: list[tuple[Any, Any, dict[str, Any], str]] = [
        (
            lambda: adapted(use_dora=True),
            None,
            {},
            q + r"DoraLinearVariant \(DoRA .*Leave it out of the adapter's targets",
        ),
        (merged, None, {}, q + "its adapters are merged.*merge_and_unload"),
        (
            lambda: adapted(target_modules=["embed_tokens"]),
            {"model.embed_tokens": "rowwise"},
            {},
            "embed_tokens'.*on an Embedding.*only",
        ),
        (
            lambda: adapted("mixtral", target_parameters=["mlp.experts.gate_up_proj"]).float(),
            None,
            {},
            "experts.*gate_up_proj|experts'.*ParamWrapper",
        ),
        (lambda: adapted(modules_to_save=["lm_head"]), None, {}, "lm_head'.*ModulesToSaveWrapper is not plain LoRA"),
        (lambda: tuned("IA3Config", task_type="CAUSAL_LM"), None, {}, "tuned by IA3, and tp knows LoRA alone.*tp=1"),
        (
            lambda: tuned("PromptTuningConfig", task_type="CAUSAL_LM", num_virtual_tokens=2),
            None,
            {},
            "tuned by PROMPT_TUNING",
        ),
        (
            adapted,
            {"model.layers.*.self_attn.q_proj.weight": "packed_colwise"},
            {},
            q + r"the plan gives .*\.weight' alone",
        ),
        (
            adapted,
            {"base_model.model.model.layers.*.*.q_proj.base_layer": "colwise"},
            {},
            q + "the plan gives 'colwise'",
        ),
        (adapted, {"model.layers.*.self_attn.q_proj": "all_reduce"}, {}, q + "the style 'all_reduce'.*colwise"),
        (
            lambda: adapted(target_modules=["lm_head"]),
            None,
            {"loss_parallel": True},
            "loss_parallel=True, and the output head 'base_model.model.lm_head' has adapters",
        ),
        (lambda: adapted(of={"num_key_value_heads": 1}), None, {}, "num_key_value_heads=1, not divisible by tp=2"),
    ]
    for made, plan, options, message in cases:
        model, before = made(), made()
        with pytest.raises(ValueError, match=message):
            cut(model, plan, **options)
        assert_bitwise(model.state_dict(), before.state_dict(), message)
        assert not any(isinstance(parameter, DTensor) for parameter in model.parameters()), message
        assert not any("forward" in vars(module) for module in model.modules()), message
        assert torch.equal(model(batch()).logits, before(batch()).logits), message
