"""No pipeline that the search leaves out by a bound could have won: bounds against pipelines that are cut and traced."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nemo_like import Job
from nemo_like.options import Precision, StepSpec
from nemo_like.planning.devices import resolve_device
from nemo_like.planning.fit.fitting import Traces, make_search
from nemo_like.planning.fit.question import Question, read_pins

transformers = pytest.importorskip("transformers")


def _dense(trains="all"):
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=5, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=2048, use_cache=False,
        )
    ).train()  # fmt: skip
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trains in name or trains == "all")
    return model


def _experts():
    return transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(
            hidden_size=64, intermediate_size=128, moe_intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2, vocab_size=512, use_cache=False,
            tie_word_embeddings=True,
        )
    ).train()  # fmt: skip


def _search(model, precision="bf16", **pins):
    device = replace(resolve_device("h100-80gb"), gpus_per_host=2)
    free = {"micro_batch": 1, "offload": "none", "tp": 1, "cp": 1, "ac": "none", "loss": "model"}
    question = Question(
        Job.of(gpu=device, precision=Precision.of(precision)),
        gpus=4,
        seq_len=64,
        limit=1 << 40,
        global_batch=16,
        pins=read_pins(free | pins),
    )
    return make_search(model, question)[0]


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "pins"),
    [
        (_dense, {"pp": [2, 4], "schedule": ["1f1b", "zbv"], "ac": ["full", "selective"]}),
        (_dense, {"pp": 2, "schedule": ["gpipe", "interleaved_1f1b"], "cp": 2, "loss": "chunked", "precision": None}),
        (lambda: _dense("norm"), {"pp": 2, "schedule": "zbv", "ac": ["none", "full"]}),
        (_dense, {"pp": 2, "tp": 2, "schedule": ["1f1b", "interleaved_1f1b"], "ac": ["none", "full"]}),
        (_experts, {"pp": 2, "ep": 2, "schedule": ["1f1b", "zbv"], "ac": "full"}),
    ],
    ids=["schedules", "parts of sequences", "norms train", "split weights", "experts"],
)
def test_no_pipeline_takes_less_than_what_the_whole_model_says_of_it(model, pins):
    search, looked = _search(model(), **pins), 0
    for key in search.by_shape:
        shape = search._traced(key)
        for layout in search.by_shape[key]:
            for variant in search._variants(shape, layout):
                least = search._least_pipeline(shape, variant)
                resolved = search._resolve(shape, variant)
                step, peak = search.question.per_token(resolved.seconds.total, layout), resolved.peak.total
                alive = search.bounds.pipeline(key).bytes(variant, variant.mode)
                assert 0.8 * step < least <= step and 0.4 * peak < alive <= peak, variant
                looked += 1
    assert looked >= 2


@pytest.mark.long
def test_where_nothing_fits_the_pipeline_that_needs_least_is_found():
    pins = {"pp": 2, "dp_shard": 2, "schedule": ["1f1b", "zbv"], "ac": ["none", "full"]}
    search, peaks, bounds = _search(_dense(), **pins), [], []
    for key in search.by_shape:
        shape = search._traced(key)
        for _, (variant, _) in list(search._entries(key)):
            peaks.append(search._resolve(shape, variant).peak.total)
            bounds.append(search.bounds.pipeline(key).bytes(variant, variant.mode))
    again = _search(_dense(), **pins)
    again.question = replace(again.question, limit=int(1.2 * min(bounds)))
    found = again.run()
    assert not found.best and found.nearest.peak_bytes == min(peaks) and found.nearest.layout.pp == 2


def test_questions_that_differ_in_the_optimizer_trace_a_shape_once():
    traces, model = dict[Precision, Traces](), _dense()
    asked = {
        "gpus": 2,
        "seq_len": 64,
        "limit": 1 << 40,
        "pins": read_pins({"micro_batch": 1, "tp": 1}),
    }
    shapes = []
    for name in ("adamw", "adamw-8bit"):
        question = Question(Job.of(step=StepSpec(optimizer=name), gpu="h100-80gb"), **asked)
        search, _, _ = make_search(model, question, None, traces)
        key, layouts = next(iter(search.by_shape.items()))
        layout = next(one for one in layouts if one.dp_shard == 2)
        shapes.append((search._traced(key), make_search(model, question)[0]._traced(key), layout))
    assert shapes[0][0].whole.part is shapes[1][0].whole.part
    for shared, alone, layout in shapes:
        full = layout.change(ac="full")
        peaks = [shape.peak(full, shape.choices(full)) for shape in (shared, alone)]
        assert peaks[0] == peaks[1]
