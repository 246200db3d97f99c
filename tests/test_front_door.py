"""The front door on one device: what it accepts and refuses; and one `Job` for every front, which all say the same of it."""

import functools
import inspect
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, assume, given, seed, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.flop_counter import FlopCounterMode

import nemo_like
from nemo_like import Job, apply_activation_checkpointing, fit, flags, parallelize
from nemo_like._util.help_parser import HelpParser
from nemo_like._util.option_fields import Options
from nemo_like.activation_checkpointing import (
    SelectivePolicy,
    is_checkpointed,
)
from nemo_like.activation_checkpointing.policy import TorchPolicy
from nemo_like.commands.early_checks import check_early
from nemo_like.job import KEYWORDS, AllKeywords, JobKeywords
from nemo_like.models import text_batch
from nemo_like.options import FSDP2, CheckpointConfig, ChunkedLoss, PipelineParallel, Precision, StepSpec
from nemo_like.options.flag import flagged
from nemo_like.planning.fit.fitting import FitKeywords
from nemo_like.planning.fit.question import PINS
from nemo_like.planning.query import PlanQuery
from nemo_like.planning.report import make_report
from nemo_like.recipes import options as recipe_options
from tests.models.decoders import PlainDecoder, batch, build, loss_of
from tests.models.tiny import llama


def test_every_keyword_is_documented() -> None:
    assert list(inspect.signature(parallelize).parameters)[:3] == ["model", "strategy", "ac"]
    assert all(f"    {name}: " in parallelize.__doc__ for name in {*KEYWORDS, "mesh", "sample_input"})


def test_keywords_that_a_type_checker_sees_are_those_of_a_job_and_of_a_search() -> None:
    assert {*AllKeywords.__annotations__} == {*KEYWORDS}
    assert {*JobKeywords.__annotations__} == {*KEYWORDS} - {"strategy", "ac", "pp"}
    assert {*FitKeywords.__annotations__} == {*KEYWORDS, *PINS, "imbalance", "host_memory", "balance"}


_USER = """
import torch
from nemo_like import fit, parallelize, plan_for

model = parallelize(torch.nn.Linear(2, 2), ac="full", tp=2)
parallelize(model, activation_checkpointing=True)
parallelize(model, dp_replicate="two")
plan_for(model, ac="40GiB", world_sise=8)
fit(model, gpus=8, micro_batchs=2)
"""


# A process of its own that reads torch's stubs (15 s); the types are those of every call.
@pytest.mark.long
def test_a_type_checker_finds_a_misspelt_keyword_and_a_wrong_type(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "user.py").write_text(_USER)
    run = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--ignore-missing-imports", "--follow-imports=silent", "user.py"],
        cwd=tmp_path,
        env=os.environ | {"MYPYPATH": str(Path(nemo_like.__file__).parent.parent)},
        capture_output=True,
        text=True,
    )
    lines = sorted({int(line.split(":")[1]) for line in run.stdout.splitlines() if line.startswith("user.py")})
    assert lines == [6, 7, 8, 9], run.stdout + run.stderr


@pytest.mark.parametrize("first", ["none", "full", "selective", "submodule"])
def test_a_second_call_is_refused(first: str) -> None:
    model = parallelize(PlainDecoder(), "single", first)
    with pytest.raises(ValueError, match="parallelized already"):
        parallelize(model, "single", "selective")
    if first != "none":
        with pytest.raises(ValueError, match="checkpointed already"):
            apply_activation_checkpointing(model, "selective")


def test_the_models_own_checkpointing_stays_without_ours() -> None:
    """Beside ours it is refused (`tests/test_unchanged.py`)."""
    model = build("llama")
    model.gradient_checkpointing_enable()
    assert parallelize(model, "single", "none") is model, "nothing would be replayed twice"


def test_the_method_that_switches_checkpointing_off_is_the_models_own() -> None:
    """As diffusers calls it."""
    model: Any = build("plain")
    model.gradient_checkpointing = True
    model.disable_gradient_checkpointing = lambda: None
    with pytest.raises(ValueError, match=r"Call model\.disable_gradient_checkpointing\(\) first"):
        parallelize(model, "single", "full")


def test_one_rank_checks_a_number_of_ranks_as_many_do() -> None:
    with pytest.raises(ValueError, match=r"reshard_after_forward is 3; as a number of .* the shard axis of 1 ranks"):
        parallelize(build("plain"), FSDP2(reshard_after_forward=3), device="cpu")


def test_fp16_says_that_losses_are_to_be_scaled(caplog: pytest.LogCaptureFixture) -> None:
    parallelize(build("plain"), "single", precision="fp16", device="cpu")
    assert "precision is fp16" in caplog.text and "torch.amp.GradScaler" in caplog.text


def test_weights_that_are_not_there_are_asked_for_on_one_rank() -> None:
    model = parallelize(build("plain").to("meta"), "single", "full", device="cpu")
    with pytest.raises(
        RuntimeError, match=r"on the meta device.*call nemo_like\.distributed\.materialize\(model\) before"
    ):
        model(torch.zeros(1, 8, dtype=torch.long))


def test_one_rank_takes_the_single_path_without_a_process_group_and_says_so(logs: pytest.LogCaptureFixture) -> None:
    logs.set_level("INFO", "nemo_like")
    for strategy in ("fsdp2", "fsdp2", "ddp", "single"):
        model = PlainDecoder()
        assert parallelize(model, strategy) is model
        assert is_checkpointed(model.blocks[0])
    assert not dist.is_initialized()
    assert logs.text.count("with one rank") == 2  # once for fsdp2, once for ddp


def test_generate_with_a_cache_is_unchanged() -> None:
    prompt = batch(2, length=5)
    tokens = []
    for ac in (None, "none", "full", "selective", "submodule"):
        model = build("llama").eval()
        if ac is not None:
            parallelize(model, "single", ac)
        tokens.append(model.generate(prompt, max_new_tokens=6, do_sample=False, use_cache=True, pad_token_id=0))
    assert all(torch.equal(tokens[0], other) for other in tokens[1:])


def test_output_dtype_and_param_dtype_on_one_device() -> None:
    model = parallelize(build("llama"), "single", "full", precision=Precision("bf16", output_dtype="fp32"))
    output = model(batch(2), labels=batch(2))
    assert output.logits.dtype is torch.float32 and output["logits"].dtype is torch.float32
    assert all(p.dtype is torch.float32 for p in model.parameters())
    assert parallelize(PlainDecoder(), "single", "none", precision=torch.bfloat16)(batch(2)).dtype is torch.bfloat16


def test_a_dtype_that_autocast_would_ignore_is_refused() -> None:
    with pytest.raises(ValueError, match=r"parameters are torch\.bfloat16.*model\.to\(torch\.float32\)"):
        parallelize(PlainDecoder().bfloat16(), "single", precision="fp32")
    parallelize(PlainDecoder(), "single", precision="fp32")


def test_config_objects_and_policies_are_modes_too() -> None:
    policy = SelectivePolicy(drop=["aten.topk.default"])
    model = parallelize(PlainDecoder(), "single", policy)
    assert model.blocks[0].forward.policy is policy
    config = CheckpointConfig(enabled=True, strategy="selective", ops_to_save=["torch.ops.aten.addmm.default"],
                              preserve_rng_state=False, profile_before_apply=False)  # fmt: skip
    model = parallelize(PlainDecoder(), "single", config)
    assert set(model.blocks[0].forward.policy.tracked_ops()) == {torch.ops.aten.addmm.default}
    assert model.blocks[0].forward.preserve_rng_state is False
    assert not is_checkpointed(parallelize(PlainDecoder(), "single", CheckpointConfig()).blocks[0])


def test_a_users_own_policy_function_is_a_mode() -> None:
    # Known failure 35, from the front: what the function sends to the host is taken back from there, not computed again.
    mm = torch.ops.aten.addmm.default
    seen = []

    def policy_fn(context, op, *args, **kwargs):
        seen.append(op)
        return CheckpointPolicy.MUST_CPU_OFFLOAD if op is mm else CheckpointPolicy.PREFER_RECOMPUTE

    def backward_flops(ac: object) -> tuple[int, list[torch.Tensor]]:
        model = parallelize(build("plain").eval(), "single", ac)
        loss = loss_of(model, batch(2))
        with FlopCounterMode(display=False) as counter:
            loss.backward()
        return counter.get_flop_counts()["Global"].get(mm.overloadpacket, 0), [p.grad for p in model.parameters()]

    (flops, grads), (plain_flops, expected) = backward_flops(TorchPolicy(policy_fn)), backward_flops("none")
    assert mm in seen and flops == plain_flops
    assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))
    assert backward_flops("full")[0] > plain_flops


def test_a_reentrant_layer_cannot_be_compiled() -> None:
    config = CheckpointConfig(enabled=True, strategy="full", use_reentrant=True, profile_before_apply=False)
    for apply in (apply_activation_checkpointing, parallelize):
        model = PlainDecoder()
        with pytest.raises(ValueError, match="use_reentrant is True and compile is on"):
            apply(model, ac=config, compile=True)
        assert not any(is_checkpointed(m) for m in model.modules())


def test_layers_can_be_named() -> None:
    model = parallelize(PlainDecoder(), "single", "full", layers=["blocks.1"])
    assert [is_checkpointed(b) for b in model.blocks] == [False, True, False]
    model = PlainDecoder()
    parallelize(model, "single", "full", layers=[model.blocks[2]])
    assert is_checkpointed(model.blocks[2])


def test_apply_activation_checkpointing_needs_no_process_group() -> None:
    model = apply_activation_checkpointing(build("qwen3"), "SELECTIVE", scope="language")
    loss_of(model, batch(2)).backward()
    assert not dist.is_initialized() and model.config.use_cache is False
    assert is_checkpointed(model.model.layers[0])


def test_a_copy_of_a_model_in_mixed_precision_runs_its_own_weights() -> None:
    import copy

    model = parallelize(PlainDecoder(), "single", "none", precision="bf16")
    twin = copy.deepcopy(model)
    loss_of(twin, batch(2)).backward()
    assert all(p.grad is None for p in model.parameters()) and all(p.grad is not None for p in twin.parameters())


GPU, ROWS, TOKENS = "h100-80gb", 2, 64


@functools.cache
def _model() -> nn.Module:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": TOKENS}
    return llama(device="meta", **sizes, **heads)


def _sample(rows: int) -> dict[str, torch.Tensor]:
    return text_batch(rows, TOKENS)


@st.composite
def jobs(draw: Any) -> Job:
    """Jobs of which plans are made and which `fit` searches."""
    pp = draw(st.sampled_from([1, 1, 2]))
    tp, cp, replicas, shards = (draw(st.sampled_from([1, 2])) for _ in range(4))
    ac = draw(st.sampled_from(["none", "full", "selective"]))
    offload = draw(st.sampled_from(["none", "boundary"])) if ac != "none" else "none"
    optimizer = draw(st.sampled_from(["adamw", "sgd", "adamw-8bit"]))
    micro = draw(st.sampled_from([1, 2, 4]))
    reshard = draw(st.sampled_from([None, True, False]))
    loss = draw(st.sampled_from([None, ChunkedLoss()]))
    precision = draw(st.sampled_from([None, "bf16"]))
    assume(not (loss is not None and tp > 1))
    more: dict[str, Any] = {"pp": PipelineParallel(2, "1f1b", max(micro, 2))} if pp > 1 else {}
    step = StepSpec(optimizer=optimizer, microbatches=1 if pp > 1 else micro, sync="every")
    return Job.of(
        strategy=FSDP2(reshard), ac=ac, offload=offload, loss="model" if loss is None else loss, precision=precision,
        tp=tp, cp=cp, dp_replicate=replicas, world_size=pp * tp * cp * replicas * shards, step=step, gpu=GPU, **more,
    )  # fmt: skip


def _planned(query: PlanQuery, limit: int) -> tuple[Any, ...]:
    """What ``nemo-like plan`` has in the row of the job's mode."""
    row = next(row for row in make_report(query, [], limit).rows if row.ac == query.job.ac.mode)
    return row.plan.peak_bytes, row.need.reserved, row.plan.step_seconds, row.fits


def _searched(job: Job, limit: int) -> tuple[Any, ...]:
    """What `fit` says of it, pinned to every choice of it."""
    sharded = job.strategy if isinstance(job.strategy, FSDP2) else FSDP2()
    pins: dict[str, Any] = {
        "dp_replicate": job.dp_replicate, "dp_shard": job.dp_shard, "tp": job.tp.size, "cp": job.cp.size, "pp": job.pp.size,
        "micro_batch": ROWS, "grad_accum": (job.pp.microbatches if job.pp.size > 1 else job.step.microbatches),
        "reshard_after_forward": [sharded.reshard_after_forward], "cpu_offload": sharded.cpu_offload,
        "sequence_parallel": job.tp.sequence_parallel, "loss_parallel": job.tp.loss_parallel, "cp_method": job.cp.method,
        "ac": job.ac.mode, "loss": "model" if job.loss is None else "chunked", "offload": job.offload.mode,  # type: ignore[union-attr]
    }  # fmt: skip
    if job.pp.size > 1:
        pins["schedule"] = job.pp.schedule
    found = fit(
        _model(), gpus=job.world_size or 1, gpu=GPU, seq_len=TOKENS, memory=limit, sample=_sample, count=1,
        precision=job.precision, optimizer=job.step.optimizer, sync=job.step.sync, compile="none", **pins,
    )  # fmt: skip
    if not found.candidates:
        return (None, None, None, False)
    best = found.best
    return best.peak_bytes, best.reserved, best.step_seconds, best.fits


def _check_fronts(job: Job, share: float) -> None:
    """``plan``, and `fit` fixed to the job: the same bytes, milliseconds and verdict."""
    query = PlanQuery.from_model(_model(), _sample(ROWS), job)
    free = _planned(query, 1 << 36)
    limit = int((free[1] or free[0]) * share)
    planned, searched = _planned(query, limit), _searched(job, limit)
    assert planned[3] == searched[3], (planned, searched)
    if searched[3]:  # seconds are sums, which two fronts add up in another order
        assert planned[:3] == (*searched[:2], pytest.approx(searched[2], rel=1e-12, abs=0))


@settings(
    max_examples=1, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, phases=[Phase.generate]
)
@given(job=jobs(), share=st.sampled_from([0.5, 2.0]))
def test_every_front_says_the_same_of_a_job(job: Job, share: float) -> None:
    _check_fronts(job, share)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(10))
def test_every_front_says_the_same_of_300_jobs(part: int) -> None:
    @seed(part)
    @settings(
        max_examples=30, deadline=None, database=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate]
    )
    @given(job=jobs(), share=st.sampled_from([0.5, 2.0]))
    def check(job: Job, share: float) -> None:
        _check_fronts(job, share)

    check()


@settings(max_examples=200, deadline=None, derandomize=True)
@given(job=jobs())
def test_the_line_of_a_job_makes_it_again(job: Job) -> None:
    made: list[Job] = []
    names = {name: getattr(nemo_like, name) for name in nemo_like.__all__}
    exec(
        job.as_call(sample="batch"),
        names
        | {
            "parallelize": lambda model, **asked: made.append(
                Job.of(**{n: v for n, v in asked.items() if n != "sample_input"})
            ),
            "model": None,
            "batch": None,
        },
    )
    assert made[0].words() == job.words()


@pytest.mark.parametrize("name", ["sequence_parallel", "ema", "prefetch", "reshard_after_forward"])
def test_a_flag_means_the_same_with_and_without_stages(name: str) -> None:
    values = {"sequence_parallel": True, "ema": True, "prefetch": 2, "reshard_after_forward": "no"}
    for pp in (1, 2):
        job = flags.job_of({name: values[name], "pp": pp, "tp": 2, "world_size": 4, "grad_accum": 2})
        kind, _, field = flags.FLAGS[name].field.partition(".")
        got = getattr(getattr(job, kind), field)
        assert got == {"no": False}.get(values[name], values[name])  # type: ignore[call-overload]


def test_accumulation_counts_in_the_step_or_in_the_pipeline() -> None:
    one, staged = flags.job_of({"grad_accum": 4}), flags.job_of({"grad_accum": 4, "pp": 2, "world_size": 2})
    assert one.step.microbatches == 4
    assert (staged.step.microbatches, staged.pp.microbatches) == (1, 4)


@dataclass(frozen=True)
class ToyOptions:
    size: int = flagged(1, "plan pins pretrain", "memory", name="toys", kind=int, least=1)
    """Toys that share a box. A box has a lid."""


@dataclass(frozen=True)
class ToyJob:
    toy: ToyOptions = ToyOptions()


def test_a_flag_is_one_edit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The field alone makes the option of a command, of a search and of a job, its help, its group and its check."""
    for module in (flags, recipe_options):
        monkeypatch.setattr(module, "FLAGS", {flag.name: flag for flag in flags._flags(ToyJob)})
    assert flags.flags_on("plan") == flags.flags_on("pins") == ("toys",)
    parser, search = HelpParser(), HelpParser()
    for each, of in ((parser, flags.options_of), (search, flags.pins_of)):
        each.add_options(of(["toys"]))
    given = parser.parse_args(["--toys", "3"]), parser.parse_args([]), search.parse_args(["--toys", "3", "4"])
    assert list(map(vars, given)) == [{"toys": 3}, {"toys": 1}, {"toys": [3, 4]}]
    assert "memory:\n  --toys N    toys that share a box (default: 1)" in parser.format_help()
    options = recipe_options.with_flags("pretrain")(type("ToyRecipe", (Options,), {"__annotations__": {}}))
    assert options(toys=3).toys == 3 and options().toys == 1
    for refuse in (options, lambda toys: check_early(SimpleNamespace(toys=toys, own=parser))):
        with pytest.raises(ValueError, match=r"--toys is 0; it must be a (finite|whole) number >= 1"):
            refuse(toys=0)


def test_the_part_of_a_job_is_read_of_its_flag() -> None:
    assert flags.job_of({"pp": 2, "pp_schedule": "interleaved_1f1b", "stages_per_rank": 3}).pp.stages_per_rank == 3
