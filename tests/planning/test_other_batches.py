"""Batches other than those planned for: longer, past a model's positions, padded, packed, or through other layers."""

import copy
import json
import logging
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_like import Job, cli, fit, parallelize, predict
from nemo_like._util.op_lookup import find_op
from nemo_like.activation_checkpointing.engine.handles import RegionError
from nemo_like.activation_checkpointing.engine.region import Region
from nemo_like.activation_checkpointing.policy import HOST, RECOMPUTE, SAVE, SKIP, DecisionTable
from nemo_like.cli import main
from nemo_like.distributed.documents import keep_documents_apart
from nemo_like.models import check_positions
from nemo_like.planning import plan_for
from nemo_like.planning import report as report_module
from nemo_like.planning.report import FLEX
from tests.checks import assert_bitwise, on_meta, seeded, step
from tests.models.blocks import Operators, checkpoint_region
from tests.models.fit_models import llama
from tests.models.tiny import labelled, made
from tests.models.tiny import llama as tiny_llama
from tests.said import said

transformers = pytest.importorskip("transformers")


def _model():
    return seeded(tiny_llama, num_hidden_layers=2, vocab_size=128, max_position_embeddings=64)


def _ids(rows, width):
    return torch.randint(128, (rows, width), generator=torch.Generator().manual_seed(1))


def _budget():
    return {"strategy": "single", "ac": "40%", "sample_input": labelled(_ids(2, 16))}


def _chosen(ac):
    asked = {"gpus": 1, "gpu": "cpu", "seq_len": 16, "micro_batch": 2, "loss": "model", "offload": "none"}
    best = fit(_model(), ac=ac, **asked).best
    assert f"ac={ac!r}, planned_tokens=32)" in best.call()
    return best.kwargs()


@pytest.mark.parametrize(
    "options", [_budget, lambda: _chosen("full"), lambda: _chosen("selective")], ids=["budget", "full", "selective"]
)
def test_a_larger_batch_than_planned_is_said_once_and_trains_right(logs, options):
    plain = _model()
    planned = parallelize(copy.deepcopy(plain), device="cpu", **options())
    said = []
    for rows, width in ((2, 16), (1, 16), (2, 24), (4, 24)):
        ids = _ids(rows, width)
        for model in (plain, planned):
            model.zero_grad()
            model(input_ids=ids, labels=ids).loss.backward()
        for (name, own), other in zip(plain.named_parameters(), planned.parameters()):
            assert torch.equal(own.grad, other.grad), name
        said.append(sum("A batch is larger" in record.getMessage() for record in logs.records))
    assert said == [0, 0, 1, 1]


@pytest.mark.parametrize("tokens", [0, True, "32"])
def test_planned_tokens_that_no_batch_could_have_are_refused(tokens):
    with pytest.raises(ValueError, match="planned_tokens is"):
        parallelize(_model(), "single", "full", planned_tokens=tokens, device="cpu")


_SAID = (
    "96 tokens are more than the 64 positions of LlamaForCausalLM: predicted as with a longer rotary embedding. Training "
    "needs its rope_scaling: give a config with that."
)
_ONE = {"gpus": 1, "gpu": "cpu", "micro_batch": 1, "tp": 1, "ac": "none", "loss": "model", "offload": "none"}


def _rows(model: torch.nn.Module) -> list[tuple[int, float]]:
    return [(row.need.bytes, row.seconds) for row in predict(model, gpu="cpu", gpus=1, seq_len=96, rows=["60%"]).rows]


def test_a_rotary_model_is_predicted_as_one_with_more_positions(logs: pytest.LogCaptureFixture) -> None:
    model = llama(1)
    rows = _rows(model)
    found = fit(model, seq_len=96, **_ONE).best
    assert [record.message for record in logs.records if record.name == "nemo_like"] == [_SAID]
    longer = llama(1)
    longer.config.max_position_embeddings = 96
    assert rows == _rows(longer) and found.need.bytes > 0


def test_the_command_predicts_it_and_names_the_model(tmp_path: Path, logs: pytest.LogCaptureFixture) -> None:
    llama(1).config.save_pretrained(tmp_path)
    assert (
        main(["plan", "--model", str(tmp_path), "--seq-len", "96", "--no-what-if", "--ac", "60%", "--gpu", "cpu"]) == 0
    )
    assert f"96 tokens are more than the 64 positions of {tmp_path}: predicted as" in logs.text


@pytest.mark.parametrize("ask", [lambda m: predict(m, gpu="cpu", seq_len=96), lambda m: fit(m, seq_len=96, **_ONE)])
def test_learned_positions_stay_refused(ask) -> None:
    with pytest.raises(ValueError, match="requires sequences of 96 tokens, and the model has positions for 64"):
        ask(made("GPT2", "LMHeadModel", "meta", n_embd=16, n_layer=2, n_head=2, vocab_size=64, n_positions=64))


def test_a_step_that_runs_needs_the_positions() -> None:
    with pytest.raises(
        ValueError, match="--seq-len requires sequences of 96 tokens, and the model has positions for 64"
    ):
        check_positions(llama(2).config, "--seq-len", 96)


BATCH, SEQ, VOCAB = 2, 16, 64
_DECODER = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, head_dim=8, num_key_value_heads=2,
    vocab_size=VOCAB, max_position_embeddings=64, use_cache=False, attention_dropout=0.1,
)  # fmt: skip


_llama = partial(made, "Llama", **_DECODER)
MODELS = {
    "llama": _llama,
    "llama eager": partial(_llama, attn_implementation="eager"),
    "gpt2": partial(
        made, "GPT2", "LMHeadModel", n_embd=32, n_layer=3, n_head=4, n_positions=64, vocab_size=VOCAB, use_cache=False
    ),
    "bert": partial(
        made, "Bert", "ForMaskedLM", hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        vocab_size=VOCAB,
    ),
}  # fmt: skip


def _batches():
    ids = torch.randint(VOCAB, (BATCH, SEQ), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(BATCH, SEQ, dtype=torch.long)
    mask[1, -5:] = 0
    packed = torch.cat([torch.arange(6), torch.arange(SEQ - 6)]).expand(BATCH, -1)
    plain = labelled(ids)
    return {
        "plain": plain,
        "padded": plain | {"attention_mask": mask},
        "full mask": plain | {"attention_mask": torch.ones_like(mask)},
        "packed": plain | {"position_ids": packed},
        "one document": plain | {"position_ids": torch.arange(SEQ).expand(BATCH, -1)},
        "longer": labelled(ids.repeat(1, 2)),
    }


def _steps(model, batches):
    return [step(model.train(), seed=seed, **batch) for seed, batch in enumerate(batches)]


@pytest.mark.few(2)
@pytest.mark.parametrize("budget", ["35%", "70%"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("planned", ["plain", "padded", "packed"])
def test_a_run_whose_masks_change_trains_as_without_a_plan(name, planned, budget):
    model, batches = seeded(MODELS[name]), _batches()
    if name == "bert" and planned == "packed":
        pytest.skip("BERT packs nothing")
    order = [batches[planned], *batches.values(), batches[planned]]
    # As `parallelize` trains packed documents: `tests_distributed/fsdp/test_packing.py` compares that with one by one.
    expected = _steps(keep_documents_apart(copy.deepcopy(model)), order)
    planned_model = parallelize(model, strategy="single", ac=budget, sample_input=batches[planned], device="cpu")
    assert_bitwise(_steps(planned_model, order), expected)


def test_a_batch_that_the_plan_does_not_fit_is_said_once(logs):
    batches = _batches()
    model = parallelize(_llama(), strategy="single", ac="30%", sample_input=batches["plain"], device="cpu")
    _steps(model, [batches["plain"]])
    assert not said(logs)
    _steps(model, [batches["packed"], batches["packed"], batches["plain"]])
    # Documents in a row are told of as well.
    (record,) = (each for each in said(logs) if "its plan was made for" in each.getMessage())
    assert record.levelno == logging.WARNING
    assert "model.layers." in record.getMessage() and "sample_input" in record.getMessage()


def _skipping_block(x, weight, mask=None):
    """A product that backward needs only where a mask is used; (T, D) to (T,)."""
    scores = x @ weight
    if mask is not None:
        scores = (scores * mask).sin()
    return (scores.relu().topk(2, dim=-1).values.tanh() * x.sum(-1, keepdim=True)).sum(-1)


@pytest.mark.parametrize("retain", [False, True])
def test_a_replay_that_needs_what_is_skipped_begins_again_and_runs_no_pinned_operator_twice(retain):
    rows = {"aten.mm.default": (SKIP,), "aten.relu.default": (SAVE,), "aten.topk.default": (SAVE,)}
    x, weight = torch.randn(5, 4, requires_grad=True), torch.randn(4, 6, requires_grad=True)
    for mask in (None, torch.randn(5, 6)):
        expected = torch.autograd.grad(_skipping_block(x, weight, mask).sum(), (x, weight))
        out = checkpoint_region(
            _skipping_block, x, weight, mask, policy=DecisionTable(rows, strict=False), name="block"
        )
        for _ in range(1 + retain):
            with Operators() as ran:
                found = torch.autograd.grad(out.sum(), (x, weight), retain_graph=retain)
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
            assert torch.ops.aten.topk.default not in ran.ops
        strict = checkpoint_region(_skipping_block, x, weight, mask, policy=DecisionTable(rows), name="block").sum()
        if mask is None:
            strict.backward()
        else:
            with pytest.raises(RegionError, match="'block': the plan skips"):
                strict.backward()


@pytest.mark.parametrize("place", [SAVE, HOST])
def test_rows_that_do_not_fit_are_computed_again_and_the_others_are_kept(place):
    table = DecisionTable({"aten.exp.default": (place,), "aten.sin.default": (place,)}, strict=False)
    x = torch.randn(4, requires_grad=True)
    decided = {}

    def block(t, times):
        for _ in range(times):
            t = t.sin()
        return t.exp().cos()

    for times in (1, 2, 0):
        expected = torch.autograd.grad(block(x, times).sum(), x)[0]
        region = Region(block, table, "block", None, early_stop=True)
        out = region.forward((x, times), {})
        decided[times] = [(str(entry.op), entry.decision) for entry in region.kept]
        assert torch.equal(torch.autograd.grad(out.sum(), x)[0], expected)
    sin, exp = "aten.sin.default", "aten.exp.default"
    assert decided[1] == [(sin, place), (exp, place)]
    assert decided[2] == [(sin, RECOMPUTE), (sin, RECOMPUTE), (exp, place)]
    assert decided[0] == [(exp, place)]


def test_the_row_of_attention_counts_for_each_of_its_kernels():
    flash, efficient = (
        find_op(f"aten._scaled_dot_product_{name}.default") for name in ("flash_attention", "efficient_attention")
    )
    table = DecisionTable({flash: (SAVE, RECOMPUTE)}, strict=False)
    assert efficient in table.tracked_ops() and efficient not in DecisionTable({flash: (SAVE,)}).tracked_ops()
    decide = table.start()
    assert [decide(efficient, 0), decide(efficient, 1)] == [SAVE, RECOMPUTE]
    assert decide.finish() is None
    decide = table.start()
    assert [decide(efficient, 0), decide(flash, 0), decide(efficient, 1)] == [SAVE, RECOMPUTE, RECOMPUTE]
    assert {flash, efficient} <= decide.finish().ops


def test_a_lenient_table_survives_copying_and_pickling():
    table = DecisionTable({"aten.mm.default": (SAVE,)}, strict=False)
    for copied in (pickle.loads(pickle.dumps(table)), copy.deepcopy(table)):
        assert copied == table and not copied.strict
    assert table != DecisionTable({"aten.mm.default": (SAVE,)})


def test_layers_that_keep_the_same_share_one_policy():
    """Or Dynamo would compile each layer of a model again, up to its limit of recompilations."""
    plan = plan_for(_llama(), ac="30%", sample_input=_batches()["plain"], gpu="cpu")
    policies = [policy for policy in plan.policies().values() if policy is not None]
    assert len(policies) == 3
    assert len({id(policy) for policy in policies}) == len(set(policies)) < 3


def _llava() -> object:
    text = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    vision = {"model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4}
    return transformers.LlavaConfig(
        text_config=text | heads, vision_config=vision | heads | {"image_size": 16, "patch_size": 4},
        image_token_id=63, vision_feature_layer=-1,
    )  # fmt: skip


def _qwen() -> object:
    text = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 64,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
    }
    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "depth": 3,
        "num_heads": 4,
        "out_hidden_size": 32,
        "patch_size": 14,
        "window_size": 56,
        "fullatt_block_indexes": [1],
    }
    return transformers.Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, image_token_id=63, video_token_id=62, vision_start_token_id=61
    )  # fmt: skip


def _whisper() -> object:
    return transformers.WhisperConfig(
        d_model=32, encoder_layers=2, decoder_layers=3, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=48, decoder_ffn_dim=48, vocab_size=64, num_mel_bins=8, max_source_positions=25,
        max_target_positions=16, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip


def _planned(folder: Path, config: object, *more: str) -> list[str]:
    config.save_pretrained(folder)
    return [
        "plan",
        "--model",
        str(folder),
        "--gpu",
        "cpu",
        "--seq-len",
        "32",
        "--gpus",
        "2",
        "--no-what-if",
        "--ac",
        "50%",
        *more,
    ]


# What goes in, and how many layers there are in all towers.
WHOLE = {
    "llava": (_llava, "1 x 32 tokens, 1 picture(s) of 16 x 16 each (16 of the tokens)", 5),
    "qwen2_5_vl": (_qwen, "1 x 32 tokens, 1 picture(s) of 56 x 56 each (4 of the tokens)", 5),
    "whisper": (_whisper, "1 sound(s) of 0.5 s and 1 x 16 tokens", 5),
    "t5": (
        lambda: transformers.T5Config(
            d_model=32, d_kv=8, d_ff=48, num_layers=2, num_decoder_layers=3, num_heads=4, vocab_size=64
        ),
        "1 x 32 tokens",
        5,
    ),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", WHOLE)
def test_the_command_plans_all_towers(name: str, tmp_path: Path, program: Any) -> None:
    make, said, layers = WHOLE[name]
    size = ("--image-size", "56") if name == "qwen2_5_vl" else ()  # of any size: its config names none
    body = json.loads(program(_planned(tmp_path, make(), "--json", "-", *size)).out)
    assert body["input"] == said
    assert body["not_run"] is None and body["not_made_up"] is None
    assert all(sum(row["layers"].values()) == layers for row in body["rows"])


def test_the_command_names_the_towers_that_its_input_does_not_run(tmp_path: Path, program: Any) -> None:
    words = _planned(tmp_path, _llava(), "--images", "0")
    assert "Left out: 3 x CLIPEncoderLayer (vision). 1 x 32 tokens do not run them" in program(words).out
    assert json.loads(program([*words, "--json", "-"]).out)["not_run"] == "3 x CLIPEncoderLayer (vision)"


def test_what_cannot_be_made_up_is_named_with_the_reason(tmp_path: Path, program: Any) -> None:
    config = _qwen()
    config.vision_config.out_hidden_size = 16  # its tower does not fit its language model
    words = _planned(tmp_path, config)
    body = json.loads(program([*words, "--json", "-", "--seq-len", "300"]).out)
    assert body["input"] == "1 x 300 tokens" and body["not_run"] == "3 x Qwen2_5_VLVisionBlock (vision)"
    assert "pixel_values: The forward pass" in body["not_made_up"]
    assert "Image features and image tokens do not match" in body["not_made_up"]
    assert cli.main([*words, "--image-size", "32"]) == 2  # asked for: an error


@pytest.mark.parametrize(
    ("make", "more", "said"),
    [
        (_llava, ("--images", "2"), "2 picture(s) of 16 x 16 each take 34 tokens of a sequence, which has 32"),
        (_llava, ("--images", "-1"), "--images is -1"),
        (_llava, ("--image-size", "24"), "get_image_features failed"),
        (_whisper, ("--audio-seconds", "2"), "--audio-seconds 2: the model has positions for 0.5 s"),
    ],
)
def test_more_than_a_model_takes_is_refused(
    make: Any, more: tuple[str, ...], said: str, tmp_path: Path, program: Any
) -> None:
    assert said in program(_planned(tmp_path, make(), *more), 2).err


def test_a_sample_with_pictures_runs_all_towers(logs: pytest.LogCaptureFixture) -> None:
    model = on_meta(transformers.LlavaForConditionalGeneration, _llava())
    ids = torch.tensor([[63] * 16 + [1] * 4])
    sample = labelled(ids) | {"pixel_values": torch.randn(1, 3, 16, 16)}
    assert len(plan_for(model, ac="60%", sample_input=sample, gpu="cpu").layers) == 5 and "did not run" not in logs.text
    plan_for(model, ac="60%", sample_input=labelled(ids[:, 16:]), gpu="cpu")
    assert "3 x CLIPEncoderLayer (vision) did not run with the sample input" in logs.text


@pytest.mark.parametrize(("cp", "tokens"), [(1, 2048), (4, 4096)])
def test_masks_of_tokens_by_tokens_have_a_way_out_with_its_bytes(
    cp: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Judges: the same model without windows and without documents, whose attention has no mask; and a plain model's
    table, which has no such line. Three plans take over 2 s."""
    monkeypatch.setattr(report_module, "changes", lambda job: ())  # the others are planned elsewhere

    def report(family: str, documents: int, **options: Any) -> tuple[int, dict[str, int]]:
        sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 256}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
        model = made(family, device="meta", **sizes, **heads, **options).bfloat16()
        positions = torch.arange(tokens)[None] % (tokens // documents)
        sample = labelled(torch.ones(1, tokens, dtype=torch.long)) | {"position_ids": positions}
        job = Job.of("fsdp2", gpu="h100-80gb", optimizer="sgd", cp=cp, world_size=4)
        found = predict(model, job, sample_input=sample, what_if=True)
        row = next(row for row in found.rows if row.ac == "none")
        return row.need.bytes, {change.change: change.row.need.bytes for change in found.what_if}

    plain, none = report("Llama", 1)
    assert FLEX not in none
    masked, changes = report("Mistral", 1, sliding_window=256) if cp > 1 else report("Llama", 8)
    assert cp > 1 or plain == changes[FLEX]
    assert masked - changes[FLEX] >= tokens * tokens * 2 // cp // 2
