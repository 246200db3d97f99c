"""The table of MaxText's YAML."""

from collections.abc import Iterator
from typing import Any

from nemo_like.settings.formats import WHOLE, Format, ac_of, words

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
DOTS, MLP = "self_attn.*_proj", "mlp.*_proj"
POLICIES = {
    "full": ac_of("full"),
    "minimal_offloaded": ac_of("full", offload=[DOTS, MLP]),
    "save_dot_with_context_except_mlp": ac_of("full", save=["attention", DOTS]),
    "save_dot_except_mlpwi": ac_of("full", save=[DOTS, "mlp.down_proj"]),
    "save_dot_except_mlp": ac_of("full", save=[DOTS]),
    "save_qkv_proj": ac_of("full", save=QKV),
    "qkv_proj_offloaded": ac_of("full", offload=QKV),
    "save_out_proj": ac_of("full", save=["self_attn.o_proj"]),
    "minimal": ac_of("full", save=[DOTS, MLP]),
    **dict.fromkeys(("minimal_with_context", "minimal_flash"), ac_of("full", save=["attention", DOTS, MLP])),
}
# By key that the policy ``custom`` reads: the tensors of a layer. The first key with a value decides on a tensor.
TENSORS = {
    "context": ("attention",),
    "mlpwi_0": ("mlp.gate_proj",),
    "mlpwi_1": ("mlp.up_proj",),
    "mlpwi": ("mlp.*",),
    "mlpwo": ("mlp.down_proj",),
    "query_proj": QKV[:1],
    "key_proj": QKV[1:2],
    "value_proj": QKV[2:],
    "out_proj": ("self_attn.o_proj",),
    "qkv_proj": QKV,
}
WAY = words({"device": "save", "offload": "offload", "remat": None})


def _finish(values: dict[str, Any]) -> Iterator[str]:
    if values.get("ac") == "custom":
        ways = dict[str, str]()
        for key, names in TENSORS.items():
            for name in names if f"_{key}" in values else ():
                ways.setdefault(name, values[f"_{key}"])
        lists = {way: [name for name in ways if ways[name] == way] for way in ("save", "offload")}
        values["ac"] = ac_of("full", **lists)
        if values.get("_decoder_layer_input") == "offload":
            values["offload"] = "boundary"
    return iter(())


# Keys: src/maxtext/configs/base.yml. Policies: ``get_remat_policy`` in src/maxtext/layers/decoders.py.
TABLE = Format(
    framework="MaxText",
    marks=("remat_policy",),
    keys={
        "remat_policy": ("ac", words(POLICIES | {"custom": "custom"})),
        "decoder_layer_input": ("_decoder_layer_input", WAY),
        **{key: (f"_{key}", WAY) for key in TENSORS},
        "max_target_length": ("seq_len", WHOLE),
    },
    ignored=(
        "base_config",
        "base_output_directory",
        "dataset_*",
        "hf_*",
        "learning_rate*",
        "run_name",
        "steps",
        "tokenizer_*",
    ),
    finish=_finish,
)
