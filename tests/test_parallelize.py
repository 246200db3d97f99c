"""The front door on one device: what it accepts, what it refuses, and that a refusal changes nothing."""

from __future__ import annotations

import inspect
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.flop_counter import FlopCounterMode

import nemo_like
from nemo_like import CheckpointConfig, CheckpointWrapper, apply_activation_checkpointing, parallelize
from nemo_like._util.log import forget_announcements
from nemo_like.activation_checkpointing import SelectivePolicy, unwrap_checkpoint_wrapper
from nemo_like.activation_checkpointing.policy import TorchPolicy
from nemo_like.job import KEYWORDS, AllKeywords, JobKeywords
from nemo_like.options import FSDP2, Precision
from nemo_like.planning.fit.question import PINS, FitKeywords
from tests.models.decoders import PlainDecoder, batch, build, loss_of


def test_every_keyword_is_documented() -> None:
    assert list(inspect.signature(parallelize).parameters)[:3] == ["model", "strategy", "ac"]
    assert all(f"    {name}: " in parallelize.__doc__ for name in {*KEYWORDS, "mesh", "sample_input"})


def test_keywords_that_a_type_checker_sees_are_those_of_a_job_and_of_a_search() -> None:
    assert {*AllKeywords.__annotations__} == {*KEYWORDS}
    assert {*JobKeywords.__annotations__} == {*KEYWORDS} - {"strategy", "ac"}
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


def test_a_model_without_repeated_layers_is_refused_with_the_way_out() -> None:
    with pytest.raises(ValueError, match="layers="):
        parallelize(nn.Linear(4, 4), "single")
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module"):
        parallelize("llama", "single")  # type: ignore[arg-type]


@pytest.mark.parametrize("first", ["none", "full", "selective", "submodule"])
def test_a_second_call_is_refused(first: str) -> None:
    model = parallelize(PlainDecoder(), "single", first)
    with pytest.raises(ValueError, match="parallelized already"):
        parallelize(model, "single", "selective")
    if first != "none":
        with pytest.raises(ValueError, match="checkpointed already"):
            apply_activation_checkpointing(model, "selective")


def test_the_models_own_checkpointing_is_refused() -> None:
    model = build("llama")
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="gradient_checkpointing_disable"):
        parallelize(model, "single", "full")
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
    with torch.device("meta"):
        model = build("plain")
    parallelize(model, "single", "full", device="cpu")
    with pytest.raises(
        RuntimeError, match=r"on the meta device.*call nemo_like\.distributed\.materialize\(model\) before"
    ):
        model(torch.zeros(1, 8, dtype=torch.long))


def test_one_rank_takes_the_single_path_without_a_process_group_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    forget_announcements()
    with caplog.at_level(logging.INFO, "nemo_like"):
        for strategy in ("fsdp2", "fsdp2", "ddp", "single"):
            model = PlainDecoder()
            assert parallelize(model, strategy) is model
            assert isinstance(model.blocks[0], CheckpointWrapper)
    assert not dist.is_initialized()
    assert caplog.text.count("with one rank") == 2  # once for fsdp2, once for ddp


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
    plain = parallelize(PlainDecoder(), "single", "none", precision=torch.bfloat16)
    assert plain(batch(2)).dtype is torch.bfloat16


def test_a_dtype_that_autocast_would_ignore_is_refused() -> None:
    with pytest.raises(ValueError, match=r"parameters are torch\.bfloat16.*model\.to\(torch\.float32\)"):
        parallelize(PlainDecoder().bfloat16(), "single", precision="fp32")
    parallelize(PlainDecoder(), "single", precision="fp32")


def test_config_objects_and_policies_are_modes_too() -> None:
    policy = SelectivePolicy(drop=["aten.topk.default"])
    model = parallelize(PlainDecoder(), "single", policy)
    assert model.blocks[0].policy is policy
    config = CheckpointConfig(enabled=True, strategy="selective", ops_to_save=["torch.ops.aten.addmm.default"],
                              preserve_rng_state=False, profile_before_apply=False)  # fmt: skip
    model = parallelize(PlainDecoder(), "single", config)
    assert set(model.blocks[0].policy.tracked_ops()) == {torch.ops.aten.addmm.default}
    assert model.blocks[0].preserve_rng_state is False
    assert not isinstance(parallelize(PlainDecoder(), "single", CheckpointConfig()).blocks[0], CheckpointWrapper)


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
        assert not any(isinstance(m, CheckpointWrapper) for m in model.modules())


def test_layers_can_be_named() -> None:
    model = parallelize(PlainDecoder(), "single", "full", layers=["blocks.1"])
    assert [isinstance(b, CheckpointWrapper) for b in model.blocks] == [False, True, False]
    model = PlainDecoder()
    parallelize(model, "single", "full", layers=[model.blocks[2]])
    assert unwrap_checkpoint_wrapper(model.blocks[2]) is not model.blocks[2]


def test_apply_activation_checkpointing_needs_no_process_group() -> None:
    model = apply_activation_checkpointing(build("qwen3"), "SELECTIVE", scope="language")
    loss_of(model, batch(2)).backward()
    assert not dist.is_initialized() and model.config.use_cache is False
    assert isinstance(model.model.layers[0], CheckpointWrapper)


def test_a_copy_of_a_model_in_mixed_precision_runs_its_own_weights() -> None:
    import copy

    model = parallelize(PlainDecoder(), "single", "none", precision="bf16")
    twin = copy.deepcopy(model)
    loss_of(twin, batch(2)).backward()
    assert all(p.grad is None for p in model.parameters()) and all(p.grad is not None for p in twin.parameters())
