"""Pipelines on real ranks: every schedule, several model families, against one process."""

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn

from nemo_like import parallelize, predict
from nemo_like.job import Job
from nemo_like.options import FSDP2, SCHEDULES, ChunkedLoss, PipelineParallel, TensorParallel
from nemo_like.torch_compat import fake_ranks
from tests.checks import assert_bitwise, backward, on_meta, refused_unchanged, seeded, whole
from tests.models import families, kv_shared
from tests.models.adapted import with_lora
from tests.models.families import VOCAB, causal, hf
from tests.models.nano_gpt import NanoGPT
from tests.models.tiny import llama
from tests_distributed.context.cut_models import without_dropout
from tests_distributed.spawn import RankDiedError, on_ranks, run_ranks

LAYERS, ROWS, MICROBATCHES = 4, 8, 4


_SMALL = {
    "hidden_size": 32, "intermediate_size": 64, "vocab_size": VOCAB, "use_cache": False, "num_hidden_layers": LAYERS,
}  # fmt: skip
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: llama(num_hidden_layers=LAYERS),
    "llama-tied": lambda: llama(num_hidden_layers=LAYERS, tie_word_embeddings=True),
    "qwen3": causal("Qwen3", **_SMALL, **_HEADS, head_dim=8),
    "mixtral": causal("Mixtral", **_SMALL, **_HEADS, num_local_experts=4),
    "gpt2": hf("GPT2LMHeadModel", "GPT2Config", vocab_size=VOCAB, n_embd=32, n_layer=LAYERS, n_head=4, n_positions=32,
                   resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False),
    "gemma3": causal("Gemma3", "Gemma3TextConfig", **_SMALL, **_HEADS, head_dim=8, sliding_window=6),
    "nanogpt": NanoGPT,
}  # fmt: skip


def _build(name: str) -> nn.Module:
    return without_dropout(seeded(MODELS[name]).float().train())


def _batch(rows: int = ROWS, seed: int = 3) -> dict[str, Tensor]:
    ids = torch.randint(1, 48, (rows, 12), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[0, :5] = -100  # microbatches count differently
    return {"input_ids": ids, "labels": labels}


def _reference(model: nn.Module, batch: dict[str, Tensor], microbatches: int = MICROBATCHES) -> Tensor:
    """One process: the same microbatches one after the other, each divided by the tokens of all."""
    shifted = not isinstance(model, NanoGPT)
    count = int(batch["labels"][:, 1 if shifted else 0 :].ne(-100).sum())
    total = torch.zeros(())
    for ids, labels in zip(batch["input_ids"].chunk(microbatches), batch["labels"].chunk(microbatches)):
        total += backward(
            model(input_ids=ids, labels=labels, num_items_in_batch=count).loss
            if shifted
            else F.cross_entropy(model(ids)[0].flatten(0, 1), labels.flatten(), reduction="sum") / count
        )
    return total


def _staged(model: nn.Module, batch: dict[str, Tensor], schedule: str = "1f1b", stages: int = 2, **options: Any) -> Any:
    """`model` in stages, for batches like `batch`."""
    pp = PipelineParallel(stages, schedule, microbatches=MICROBATCHES)
    return parallelize(model, pp=pp, sample_input={key: value[:2] for key, value in batch.items()}, **options)


def _check_step(pipeline: Any, batch: dict[str, Tensor], loss: Tensor, model: nn.Module, exact: bool, where: str) -> None:
    torch.testing.assert_close(pipeline.step(**batch), loss, rtol=0, atol=1e-6)
    _check(pipeline, model, exact, where)


def _check(pipeline: Any, model: nn.Module, exact: bool, where: str) -> None:
    """Its gradients are the model's; where that has none, it has none either."""
    wanted = dict(model.named_parameters())
    tied = set(pipeline.parts.tied)
    for name, parameter in pipeline.named_parameters():
        want = wanted[name].grad
        assert (parameter.grad is None) == (want is None), (where, name)
        got = None if parameter.grad is None else whole(parameter.grad)
        if got is None or want is None:
            continue
        if exact and name not in tied:  # a tied one adds its two stages' sums, not microbatch by microbatch
            assert torch.equal(got, want), (where, name, (got - want).abs().max())
        else:
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7, msg=f"{where} {name}")


def _forwards(pipeline: Any) -> list[int]:
    """A counter of the calls of each layer that this rank holds, one for all."""
    calls = [0]

    def counted(forward: Callable[..., Any]) -> Callable[..., Any]:  # not a hook, which a recomputation leaves out
        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            return forward(*args, **kwargs)

        return run

    for stage in pipeline.stages:
        names = [pipeline.parts.layers[i] for i in stage.slice.layers]
        for name, module in stage.module.named_modules():
            parent, _, last = name.rpartition(".")
            if parent in names and last in ("input_layernorm", "norm1", "ln_1"):
                module.forward = counted(module.forward)
    return calls


def _schedule(rank: int, world_size: int, schedule: str, name: str, ac: str) -> float:
    model, batch = _build(name), _batch()
    microbatches = 2 * world_size if schedule == "dualpipev" else MICROBATCHES
    loss = _reference(model, batch, microbatches)
    options = PipelineParallel(world_size, schedule, microbatches, loss_mean="tokens" if name == "nanogpt" else None)
    pipeline = parallelize(_build(name), ac=ac, pp=options, sample_input={key: value[:2] for key, value in batch.items()})
    layers = sum(len(stage.slice.layers) for stage in pipeline.stages)
    calls = _forwards(pipeline)
    for _ in range(2):  # the second step knows what the first one learned
        calls[0] = 0
        pipeline.zero_grad()
        _check_step(pipeline, batch, loss, model, exact=True, where=f"{schedule} {name} {ac}")
    torch.testing.assert_close(pipeline.eval_step(**batch), loss, rtol=0, atol=1e-6)
    assert_bitwise(pipeline.full_state_dict(), model.state_dict() if rank == 0 else {})
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    torch.testing.assert_close(pipeline.clip_grad_norm_(1.0), norm, rtol=1e-5, atol=0)
    _check(pipeline, model, exact=False, where="clipped")
    return (calls[0] - layers * microbatches) / (layers * microbatches)  # without those of eval_step


SPLIT = {"interleaved_zero_bubble": [2.5, 3.0], "zbv": [2.5, 3.0], "dualpipev": [2.125, 2.25]}
"""Forwards of a layer: torch's first stage runs its backward in one piece, the others in two, each of which recomputes."""


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "schedule", sorted(SCHEDULES, key=lambda name: name not in ("gpipe", "interleaved_zero_bubble"))
)
def test_every_schedule_recomputes_each_layer_and_gives_the_same_bits(schedule: str) -> None:
    assert run_ranks(2, _schedule, schedule, "llama", "full") == SPLIT.get(schedule, [2.0, 2.0])


@pytest.mark.parametrize(
    ("world_size", "schedule", "name", "ac"),
    [
        (2, "1f1b", "llama-tied", "selective"),
        (2, "1f1b", "nanogpt", "full"),
        pytest.param(2, "zbv", "gemma3", "selective", marks=pytest.mark.long),
        pytest.param(4, "1f1b", "nanogpt", "full", marks=pytest.mark.long),
        *(
            pytest.param(2, *case, marks=pytest.mark.long)
            for case in (
                *(("1f1b", name, ac) for name in MODELS for ac in ("none", "full", "selective", "40%", "1GiB")),
                ("interleaved_zero_bubble", "gemma3", "none"),
                ("zbv", "gemma3", "submodule"),
            )
        ),
    ],
)
def test_families_and_modes(world_size: int, schedule: str, name: str, ac: str) -> None:
    run_ranks(world_size, _schedule, schedule, name, ac, timeout=240)


@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        pytest.param("1f1b", {"strategy": FSDP2(reshard_after_forward=True)}, marks=pytest.mark.long),
        pytest.param("1f1b", {"dp_replicate": 2}, marks=pytest.mark.long),
        ("zbv", {"ac": "none"}),  # a rank's second stage has the first one's layer in its place, sharded and unwrapped
        pytest.param("interleaved_zero_bubble", {}, marks=pytest.mark.long),
        pytest.param("interleaved_1f1b", {"strategy": FSDP2(reshard_after_forward=True)}, marks=pytest.mark.long),
        pytest.param("1f1b", {"tp": 2}, marks=pytest.mark.long),
    ],
)
@on_ranks(4)
def test_stages_that_are_sharded_replicated_or_split(
    rank: int, world_size: int, schedule: str, options: dict[str, Any]
) -> None:
    model = _build("llama")
    batches = [_batch(seed=3), _batch(seed=4)]
    ranks = 1 if "tp" in options else 2
    losses = [_reference(model, batch) for batch in batches[:ranks]]
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad /= ranks
    pipeline = _staged(_build("llama"), batches[0], schedule, **{"ac": "selective", **options})
    mine = rank % 2 if ranks == 2 else 0
    for _ in range(2):
        pipeline.zero_grad()
        _check_step(pipeline, batches[mine], losses[mine], model, exact=False, where=f"{options} {schedule}")
    torch.testing.assert_close(pipeline.eval_step(**batches[mine]), losses[mine], rtol=0, atol=1e-6)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    torch.testing.assert_close(pipeline.clip_grad_norm_(1.0), norm, rtol=1e-5, atol=0)


@pytest.mark.parametrize("schedule", ["zbv", "interleaved_zero_bubble", "dualpipev"])
def test_a_backward_in_two_after_resharding_is_refused(schedule: str) -> None:
    pp = PipelineParallel(2, schedule, microbatches=MICROBATCHES)
    with pytest.raises(
        ValueError, match=r"FSDP2\(reshard_after_forward=True\) with the schedule .* Leave the option out"
    ):
        Job.of(FSDP2(reshard_after_forward=True), pp=pp, world_size=4)
    assert Job.of(FSDP2(reshard_after_forward=True), pp=pp, world_size=2).pp == pp, (
        "a rank for each stage shards nothing"
    )


@on_ranks(2)
def test_chunked_loss_in_the_last_stage(rank: int, world_size: int) -> None:
    model, batch = _build("llama"), _batch()
    loss = _reference(model, batch)
    pipeline = _staged(_build("llama"), batch, ac="full", loss=ChunkedLoss(chunk_tokens=5))
    tokens: list[int] = []
    for stage in pipeline.stages:
        if stage.slice.is_last:
            stage.module.lm_head.register_forward_pre_hook(lambda _, args: tokens.append(args[0].numel() // 32))
    _check_step(pipeline, batch, loss, model, exact=False, where="chunked loss")
    assert max(tokens, default=0) == (5 if rank == 1 else 0), "the head never sees a whole microbatch of 24 tokens"


@on_ranks(2)
def test_what_cannot_be_cut_is_refused_and_left_unchanged(rank: int, world_size: int) -> None:
    sample = {key: value[:2] for key, value in _batch().items()}

    def refused(model: nn.Module, message: str, **options: Any) -> None:
        with refused_unchanged(model, message, (ValueError, TypeError)):
            parallelize(model, **{"pp": 2, "sample_input": sample, "ac": "none"} | options)

    refused(_build("llama"), "pp needs sample_input=", sample_input=None)
    with pytest.raises(ValueError, match=r"schedule is 'own\.csv'; it must be one of gpipe, 1f1b"):
        PipelineParallel(2, "own.csv")
    refused(
        _build("llama"),
        "4 layers cannot be divided over 6 stages",
        pp=PipelineParallel(2, "interleaved_1f1b", stages_per_rank=3),
    )
    refused(_build("llama"), "pp is 2 with strategy='ddp'", strategy="ddp")
    refused(
        _build("llama"), r"balance is \[1, 1\], 2 layers, and the model has 4", pp=PipelineParallel(2, balance=[1, 1])
    )
    refused(_build("llama"), r"Budget .* per rank, and the least .* on rank 0 of the pipeline", ac="1KiB")
    t5, llava = families.FAMILIES["t5"], families.FAMILIES["llava"]
    refused(t5.build(), "pp cannot cut T5.*: encoder and decoder are two chains", sample_input=dict(t5.inputs()))
    refused(
        llava.build(), r"pp cannot cut Llava.*: it has layers in 2 groups \(language, vision\)",
        sample_input=dict(llava.inputs()),
    )  # fmt: skip
    refused(kv_shared.build("gemma3n"), "its layers share keys and values, which stay on one stage")
    router = causal("Mixtral", **_SMALL, **_HEADS, num_local_experts=4, output_router_logits=True)()
    refused(router, "output_router_logits=True")


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("ep is 2, and no experts were found", {"ep": 2}),
        ("asynchronous is True on 'cpu'", {"tp": TensorParallel(2, None, True, asynchronous=True), "compile": True}),
    ],
)
def test_axes_are_refused_as_without_stages_before_one_is_cut(message: str, options: dict[str, Any]) -> None:
    model, sample = _build("llama"), {key: value[:2] for key, value in _batch().items()}
    for stages in (1, 2):
        with fake_ranks(0, 2 * stages), refused_unchanged(model, message):
            parallelize(model, ac="none", pp=stages, sample_input=sample, device="cpu", **options)
        if "ep" in options:
            with pytest.raises(ValueError, match=message):
                predict(model, gpus=2 * stages, pp=stages, sample_input=sample, **options)


def _broken(rank: int, world_size: int, in_head: bool) -> None:
    pipeline = _staged(_build("llama"), _batch(), ac="none")
    if rank == 1:
        module = pipeline.stages[0].module
        (module.lm_head if in_head else module.model.layers[3].mlp).register_forward_pre_hook(_fail)
    pipeline.step(**_batch())


def _fail(*_: Any) -> None:
    raise OSError("the last stage has had enough")


def test_an_error_in_one_stage_ends_all_ranks_with_it() -> None:
    errors = run_ranks(2, _broken, False, timeout=30, return_exceptions=True)
    assert all(isinstance(error, RuntimeError) for error in errors)
    assert "the last stage has had enough" in str(errors[1].__notes__)


def test_an_error_behind_the_layers_is_every_ranks_error() -> None:
    first, last = run_ranks(2, _broken, True, timeout=30, return_exceptions=True)
    assert isinstance(first, ValueError) and "OSError: the last stage has had enough" in str(first)
    assert isinstance(last, OSError)


@on_ranks(2)
def test_states_have_the_names_of_the_whole_model(rank: int, world_size: int) -> None:
    model = _build("llama-tied")
    pipeline = _staged(_build("llama-tied"), _batch(), "zbv", ac="full")
    own, whole = pipeline.state_dict(), model.state_dict()
    assert dict(pipeline.module.named_parameters()).keys() == dict(pipeline.named_parameters()).keys()
    assert all(torch.equal(own[name], whole[name]) for name in own)
    everyone: list[Any] = [None] * world_size
    torch.distributed.all_gather_object(everyone, list(own))
    assert {name for names in everyone for name in names} == whole.keys()
    other = {name: value + 1 for name, value in whole.items()}
    pipeline.load_state_dict(other)
    assert all(torch.equal(value, other[name]) for name, value in pipeline.state_dict().items())


def _saved(rank: int, world_size: int, folder: str) -> None:
    dcp.save({"model": _staged(_build("llama-tied"), _batch(), "zbv", ac="full").module.state_dict()}, checkpoint_id=folder)


def _loaded(rank: int, world_size: int, folder: str) -> None:
    other = MODELS["llama-tied"]()
    for parameter in other.parameters():
        nn.init.zeros_(parameter)
    pipeline = _staged(other, _batch(), ac="full")
    state = {"model": pipeline.module.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    pipeline.module.load_state_dict(state["model"])
    wanted = _build("llama-tied").state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in pipeline.state_dict().items())


def test_four_stages_are_saved_and_loaded_into_two(tmp_path: Path) -> None:
    run_ranks(2, _saved, str(tmp_path))
    run_ranks(2, _loaded, str(tmp_path))


def _from_meta(rank: int, world_size: int, folder: str, schedule: str) -> None:
    model, batch = _build("llama"), _batch()
    loss = _reference(model, batch)
    pipeline = _staged(on_meta(MODELS["llama"]).float().train(), batch, schedule, ac="selective")
    with pytest.raises(ValueError, match="a state_dict or from a checkpoint: give one of the two"):
        pipeline.materialize()
    assert pipeline.materialize(checkpoint=folder) is pipeline
    held = sum(parameter.numel() for parameter in pipeline.parameters())
    assert held < 0.6 * sum(parameter.numel() for parameter in model.parameters())
    _check_step(pipeline, batch, loss, model, exact=not world_size > 2, where="from meta")


@pytest.mark.few(1)
@pytest.mark.parametrize(("world_size", "schedule"), [(2, "zbv"), (4, "1f1b")])
def test_a_model_from_the_meta_device_reads_its_stages_from_safetensors(
    tmp_path: Path, world_size: int, schedule: str
) -> None:
    _build("llama").save_pretrained(tmp_path)
    run_ranks(world_size, _from_meta, str(tmp_path), schedule)


@pytest.mark.few(1)
@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
@on_ranks(2, timeout=120)
def test_adapters(rank: int, world_size: int, compile: bool) -> None:
    model, staged = (with_lora(_build("llama"), ["q_proj", "up_proj"]) for _ in range(2))
    batch = _batch()
    loss = _reference(model, batch)
    pipeline = _staged(staged, batch, ac="full", compile="aot_eager" if compile else False)
    _check_step(pipeline, batch, loss, model, exact=False, where="adapters")


@on_ranks(2, timeout=120)
def test_stages_in_which_nothing_is_trained(rank: int, world_size: int) -> None:
    """Nothing of the first stage is trained: no gradient comes back to it."""

    def build() -> nn.Module:
        model = _build("llama")
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith(("model.layers.3.", "lm_head")))
        return model

    model, batch = build(), _batch()
    loss = _reference(model, batch)
    for schedule, ac in (("1f1b", "full"), ("zbv", "none")):
        _check_step(_staged(build(), batch, schedule, ac=ac), batch, loss, model, exact=True, where=schedule)


@on_ranks(2)
def test_packed_documents(rank: int, world_size: int) -> None:
    model, batch = _build("llama"), _batch()
    batch["position_ids"] = torch.cat([torch.arange(7), torch.arange(5)]).expand(ROWS, 12)
    apart = parallelize(_build("llama"), strategy="single", ac="none")
    count = int(batch["labels"][:, [*range(1, 7), *range(8, 12)]].ne(-100).sum())  # none at a document's first token
    loss = backward(apart(**batch, num_items_in_batch=count).loss)
    _check_step(_staged(model, batch, ac="full"), batch, loss.detach(), apart, exact=False, where="packed")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("options", "schedule"),
    [
        ({"ac": "selective", "offload": "saved"}, "1f1b"),
        ({"ac": "sequential"}, "zbv"),
        ({"ac": "full", "compile": "aot_eager"}, "zbv"),
    ],
)
@on_ranks(2, timeout=120)
def test_options_beside_a_pipeline(rank: int, world_size: int, options: dict[str, Any], schedule: str) -> None:
    model, batch = _build("llama"), _batch()
    loss = _reference(model, batch)
    pipeline = _staged(_build("llama"), batch, schedule, **options)
    _check_step(pipeline, batch, loss, model, exact=True, where=f"{options} {schedule}")
    pipeline.step(**batch)  # a second batch's gradients are added
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad *= 2
    _check(pipeline, model, exact=False, where="two batches")


@pytest.mark.few(1)
@pytest.mark.parametrize("world_size", [2, 4])
@on_ranks()
def test_stages_in_bfloat16(rank: int, world_size: int) -> None:
    model, batch = _build("llama"), _batch()
    loss = _reference(model, batch)
    pipeline = _staged(_build("llama"), batch, ac="full", precision="bf16")
    assert pipeline.parts.hidden_dtype == (torch.bfloat16 if world_size > 2 else torch.float32)  # FSDP2 or autocast
    # Eight bits of mantissa.
    torch.testing.assert_close(pipeline.step(**batch), loss, rtol=2**-8, atol=0)


def _killed(rank: int, world_size: int) -> None:
    pipeline = _staged(_build("llama"), _batch(), ac="none")
    if rank == 0:
        pipeline.stages[0].module.model.layers[1].register_forward_hook(lambda *_: os._exit(9))
    pipeline.step(**_batch())


def test_a_rank_that_dies_in_a_stage_ends_the_others() -> None:
    first, second = run_ranks(2, _killed, timeout=30, return_exceptions=True)
    assert isinstance(first, RankDiedError) and isinstance(second, RuntimeError)
