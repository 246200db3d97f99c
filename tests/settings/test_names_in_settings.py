"""Lists of names in settings files of torchtitan, Megatron and MaxText become values of ``ac``."""

import json
from pathlib import Path
from typing import Any

import pytest

from nemo_like.options import CheckpointConfig, NamedLists, parse_ac
from nemo_like.settings import Settings, read_settings

TITAN = """
[model]
name = "llama3"
flavor = "8B"
[parallelism]
data_parallel_shard_degree = 8
[activation_checkpoint]
mode = "selective"
save_regions = ["attention.qkv", "attention.inner_attention", "moe.router"]
save_region_depth = 2
"""
MEGATRON = """
tensor_model_parallel_size: 2
pipeline_model_parallel_size: 4
context_parallel_size: 2
expert_model_parallel_size: 8
sequence_parallel: true
micro_batch_size: 1
global_batch_size: 512
seq_length: 4096
recompute_granularity: selective
recompute_modules: [core_attn, moe_act, layernorm, mla_up_proj, attn_out]
fine_grained_activation_offloading: true
offload_modules: [attn_norm, expert_fc1, fused_group_mlp]
moe_token_dispatcher_type: alltoall
"""
BRIDGE = """
model:
  _target_: megatron.bridge.models.llama.Llama3ModelProvider
  tensor_model_parallel_size: 2
  seq_length: 8192
  recompute_granularity: full
  recompute_method: uniform
  recompute_num_layers: 1
  recompute_modules: [core_attn]
train: {micro_batch_size: 2, global_batch_size: 64, train_iters: 100}
checkpoint: {save: /results}
"""
MAXTEXT = """
base_config: base.yml
run_name: small
model_name: llama3.1-8b
max_target_length: 4096
remat_policy: custom
decoder_layer_input: offload
context: device
mlpwi_0: offload
mlpwi_1: offload
mlpwo: remat
query_proj: device
key_proj: remat
out_proj: host
"""
MINIMAL = ["attention", "self_attn.*_proj", "mlp.*_proj"]
MLP = ["mlp.gate_proj", "mlp.up_proj"]
QKV = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
WORDS = "attn_proj, mlp_norm, moe_act, qkv_linear"
FULL_OFFLOAD = "recompute_granularity: full\noffload_modules: [core_attn]\n"


def _read(folder: Path, text: str) -> Settings:
    """Read settings; the mode of `parse_ac` for their `ac` is `ac` itself."""
    (folder / "settings").write_text(text, encoding="utf-8")
    settings = read_settings(folder / "settings")
    if "ac" in settings.values:
        parsed = parse_ac(settings.values["ac"])
        assert isinstance(parsed, NamedLists | CheckpointConfig) and parsed.mode == settings.values["ac"]
    return settings


def _lists(**names: list[str]) -> str:
    return json.dumps(names)


def test_regions_of_torchtitan(tmp_path: Path) -> None:
    settings = _read(tmp_path, TITAN)
    assert (settings.framework, settings.values["model"]) == ("torchtitan", "llama3-8b")
    assert settings.values["ac"] == _lists(save=[*QKV, "attention", "moe.router"])
    assert settings.not_understood == ("activation_checkpoint.save_region_depth = 2",)


@pytest.mark.parametrize(
    ("lines", "ac", "unknown"),
    [
        ('save_regions = ["*.w[13]", "attention.wo"]', _lists(save=[*MLP, "self_attn.o_proj"]), []),
        ('save_regions = ["attention.qkv", "attention.*"]', _lists(save=[*QKV, "attention", "self_attn.o_proj"]), []),
        ("save_regions = []", "full", []),
        ('mode = "full"\nsave_regions = ["attention.wo"]', "full", ["save_regions = attention.wo (mode is not selective)"]),
        ('selective_ac_option = "2"', None, ["selective_ac_option = 2 (only some layers)"]),
    ],
    ids=["glob", "twice", "none", "mode", "no regions"],
)  # fmt: skip
def test_other_regions_of_torchtitan(lines: str, ac: str | None, unknown: list[str], tmp_path: Path) -> None:
    settings = _read(tmp_path, f"[activation_checkpoint]\n{lines}\n")
    assert settings.values.get("ac") == ac
    assert settings.not_understood == tuple(f"activation_checkpoint.{each}" for each in unknown)


def test_megatron(tmp_path: Path) -> None:
    settings = _read(tmp_path, MEGATRON)
    assert settings.framework == "Megatron"
    lists = dict(recompute=["mlp.experts.act_fn", "*norm*", "self_attn.*_b_proj"])
    axes = dict(tp=2, pp=4, cp=2, ep=8, sequence_parallel=True)
    batch = dict(batch_size=1, global_batch=512, seq_len=4096)
    assert dict(settings.values) == dict(ac=_lists(**lists), **axes, **batch)
    assert settings.not_understood == (
        "moe_token_dispatcher_type = alltoall",
        "recompute_modules = core_attn: attention's kernel is fused, and keeps only its output",
        "recompute_modules = attn_out",
        "offload_modules = attn_norm",  # in no module that is recomputed, so that a list can't have it beside them
        "offload_modules = expert_fc1",
        "offload_modules = fused_group_mlp",
    )


def test_megatron_bridge(tmp_path: Path) -> None:
    settings = _read(tmp_path, BRIDGE)
    assert (settings.framework, settings.not_understood) == ("Megatron", ())
    assert dict(settings.values) == dict(tp=2, seq_len=8192, ac="full", batch_size=2, global_batch=64)


@pytest.mark.parametrize(
    ("text", "ac", "unknown"),
    [
        (FULL_OFFLOAD, _lists(offload=["attention.q", "attention.k", "attention.v"]), ()),
        (f"{FULL_OFFLOAD}fine_grained_activation_offloading: false", "full", ()),
        ("recompute_modules: [mlp, moe, shared_experts]", _lists(recompute=["mlp", "mlp.shared_experts"]), ()),
        ("model: {recompute_granularity: selective, recompute_modules: []}", "none", ()),
        ("recompute_granularity: null", "none", ()),
        (
            f"recompute_granularity:\noffload_modules: [{WORDS}]",
            _lists(
                offload=["self_attn.o_proj.input", "post_attention_layernorm.input", "experts.1", "self_attn.q_proj.input"]
            ),
            (f"offload_modules = {WORDS} (there the rest of a layer is kept, and here it is recomputed)",),
        ),
        (
            "recompute_granularity: full\nrecompute_method: block\nrecompute_num_layers: 4",
            "full",
            ("recompute_method = block", "recompute_num_layers = 4"),
        ),
    ],
    ids=["full and offload", "switched off", "modules", "no module", "null", "offload", "some layers"],
)
def test_other_settings_of_megatron(text: str, ac: str, unknown: tuple[str, ...], tmp_path: Path) -> None:
    settings = _read(tmp_path, text)
    assert (dict(settings.values), settings.not_understood) == ({"ac": ac}, unknown)


def test_maxtext(tmp_path: Path) -> None:
    settings = _read(tmp_path, MAXTEXT)
    ac = _lists(save=["attention", "self_attn.q_proj"], offload=MLP)
    assert (settings.framework, dict(settings.values)) == ("MaxText", dict(ac=ac, offload="boundary", seq_len=4096))
    assert settings.not_understood == ("model_name = llama3.1-8b", "out_proj = host")


@pytest.mark.parametrize(
    ("text", "values", "unknown"),
    [
        ("full\ncontext: device\ndecoder_layer_input: offload", {"ac": "full"}, ()),
        ("minimal", {"ac": _lists(save=MINIMAL[1:])}, ()),
        ("minimal_flash", {"ac": _lists(save=MINIMAL)}, ()),
        ("minimal_offloaded", {"ac": _lists(offload=MINIMAL[1:])}, ()),
        ("save_dot_except_mlp", {"ac": _lists(save=["self_attn.*_proj"])}, ()),
        ("save_qkv_proj", {"ac": _lists(save=QKV)}, ()),
        ("custom", {"ac": "full"}, ()),
        (
            "custom\nqkv_proj: offload\nvalue_proj: device\nmlpwi: device",
            {"ac": _lists(save=["mlp.*", QKV[2]], offload=QKV[:2])},
            (),
        ),
        ("save_nothing", {}, ("remat_policy = save_nothing",)),
    ],
    ids=["full", "minimal", "flash", "offloaded", "dots", "qkv", "custom", "overlapping", "unknown"],
)
def test_policies_of_maxtext(text: str, values: dict[str, Any], unknown: tuple[str, ...], tmp_path: Path) -> None:
    settings = _read(tmp_path, f"remat_policy: {text}\n")
    assert (dict(settings.values), settings.not_understood) == (values, unknown)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("recompute_modules: 3", "recompute_modules is 3; it must be a list of names. Correct the file"),
        ("recompute_modules: ['']", "recompute_modules is ['']; it must be a list of names. Correct the file"),
        ("recompute_granularity: some", "recompute_granularity is 'some'; it must be full or selective. Correct"),
        ("box: 1", "; Megatron by recompute_granularity or recompute_modules or model.recompute_granularity or"),
        ("box: 1", "; MaxText by remat_policy. Give a file with one of these keys."),
    ],
)
def test_a_wrong_file_is_refused(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as refused:
        _read(tmp_path, text)
    assert words in str(refused.value)
