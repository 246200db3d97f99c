"""A call that is refused says what was given and why, and leaves the model untouched: one table of calls."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from nemo_like import FSDP2, MemoryBudget, PlanSearch, StepSpec, apply_activation_checkpointing, parallelize, plan_for
from nemo_like.activation_checkpointing import CheckpointWrapper, SelectivePolicy
from nemo_like.distributed import set_gradient_sync
from nemo_like.losses.model_loss import chunk_model_loss
from nemo_like.offload import Offloading, offload_activations
from nemo_like.options import CheckpointConfig, ChunkedLoss, ExpertParallel, OffloadConfig, Precision, TensorParallel
from nemo_like.profiling import MemoryProfiler
from tests.models.blocks import Stack
from tests.models.decoders import DecoderWithLoss, PlainDecoder, batch, build

IDS = batch(2)
BAD_SAMPLE = {"no_such": IDS}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks")


def everything_of(model: nn.Module) -> list[Any]:
    """All that a call could have changed, as values that compare."""
    rows: list[Any] = []
    for name, module in model.named_modules():
        hooks = [(kind, tuple(getattr(module, kind))) for kind in _HOOKS]
        attributes = sorted(key for key in vars(module) if not key.startswith("_"))
        rows.append((name, id(module), type(module), module.training, hooks, attributes, id(vars(module).get("forward"))))
    for name, p in model.named_parameters():
        rows.append((name, id(p), p.dtype, p.device, p.requires_grad, p._version, p.grad is None))
    rows += [(name, id(b), b.dtype, b.device, b._version) for name, b in model.named_buffers()]
    config = getattr(model, "config", None)
    rows.append(None if config is None else config.to_dict())
    return rows


def _own_checkpointing() -> nn.Module:
    model = build("llama")
    model.gradient_checkpointing_enable()
    return model


def _timms_checkpointing() -> nn.Module:
    model = PlainDecoder()
    model.grad_checkpointing = True
    return model


def _plan_of_another() -> dict[str, Any]:
    return dict(ac=plan_for(build("llama"), ac="100%", sample_input={"input_ids": IDS, "labels": IDS}, gpu="h100-80gb"))


def _config(**fields: Any) -> CheckpointConfig:
    return CheckpointConfig(enabled=True, profile_before_apply=False, **fields)


Refused = tuple[dict[str, Any] | Callable[[], dict[str, Any]], str]
"""Arguments of `parallelize`, or what makes them, and the message. `apply_activation_checkpointing` is called, too, where it
has all of them."""

_MODES = r"it must be one of none, full, selective, submodule, sequential, or a budget such as '40GiB', '50%' or 'auto'"
_KINDS = (
    r"it must be None, a bool, one of none, full, .*, a MemoryBudget, a Plan, a policy object or a CheckpointConfig"
)
_NO_SAMPLE = r"a memory budget: bytes depend on batch and sequence\. Pass sample_input="
_SAMPLE = r"The forward pass of PlainDecoder failed on the sample input \({}.*Give what one step of one rank gives"
_NO_LAYERS = r"^No repeated layers were found in this"

ON_A_PLAIN_DECODER: dict[str, Refused] = {
    # ac
    "mode": (dict(ac="selectiv"), f"^ac is 'selectiv'; {_MODES}. Did you mean 'selective'"),
    "empty mode": (dict(ac=""), f"^ac is ''; {_MODES}"),
    "two words": (dict(ac="sub module"), f"^ac is 'sub module'; {_MODES}. Did you mean 'submodule'"),
    "negative bytes": (dict(ac="-5GiB", sample_input=IDS), f"^ac is '-5GiB'; {_MODES}"),
    "share in words": (dict(ac="ten%", sample_input=IDS), f"^ac is 'ten%'; {_MODES}"),
    "no unit": (dict(ac="40GiBB", sample_input=IDS), "'40GiBB', which is not a number of bytes; write it like '40GiB'"),
    "share above all": (dict(ac="120%", sample_input=IDS), "^Budget '120%' is not a percentage from 0% to 100%"),
    "no bytes": (dict(ac="0GiB", sample_input=IDS), r"^MemoryBudget\.peak_bytes is 0; it must be > 0"),
    "mode is a number": (dict(ac=3), f"^ac is 3, an int; {_KINDS}"),
    "mode is a fraction": (dict(ac=3.5), f"^ac is 3.5, a float; {_KINDS}"),
    "mode is a list": (dict(ac=["full"]), rf"^ac is \['full'\], a list; {_KINDS}"),
    "mode is a list of one": (dict(ac=["full"]), r"a list; it must be .* or a CheckpointConfig \(or its fields as a dict\)"),
    "mode is bytes": (dict(ac=b"full"), f"^ac is b'full', a bytes; {_KINDS}"),
    "mode is an object": (dict(ac=object()), f"^ac is <object object at .*>, an object; {_KINDS}"),
    "class of a policy": (dict(ac=SelectivePolicy), r"^ac is the class SelectivePolicy; .*: ac=SelectivePolicy\(\)"),
    "class of a config": (dict(ac=CheckpointConfig), r"^ac is the class CheckpointConfig; .*: ac=CheckpointConfig\(\)"),
    "budget without a sample": (dict(ac="50%"), f"^ac is 50%, {_NO_SAMPLE}"),
    "bytes without a sample": (dict(ac="40GiB"), _NO_SAMPLE),
    "auto without a sample": (dict(ac="auto"), f"^ac is auto, {_NO_SAMPLE}"),
    "MemoryBudget without a sample": (dict(ac=MemoryBudget(fraction=0.5)), f"^ac is 50%, {_NO_SAMPLE}"),
    "budget that nothing meets": (
        dict(ac="1KiB", sample_input=IDS), r"^Budget '1\.00KiB' is 1\.00KiB per rank, and the least that any plan peaks at"
    ),
    "share that nothing meets": (
        dict(ac="0%", sample_input=IDS), r"^Budget '0%' allows 0B of activations, .*Ask for at least 5\.5%"
    ),
    "half a per cent": (dict(ac="0.5%", sample_input=IDS), r"^Budget '0\.5%' allows .*Ask for at least 5\.5%"),
    "sample with another name": (dict(ac="50%", sample_input=BAD_SAMPLE), _SAMPLE.format("no_such: int64")),
    "sample of a wrong dtype": (dict(ac="50%", sample_input=torch.ones(2, 16)), _SAMPLE.format("float32")),
    "sample that is text": (dict(ac="50%", sample_input="text"), _SAMPLE.format("str")),
    "sample of a measured config": (
        dict(ac=CheckpointConfig(enabled=True), sample_input=BAD_SAMPLE), "unexpected keyword argument 'no_such'"
    ),
    "sample of segments": (dict(ac="sequential", sample_input=BAD_SAMPLE), "unexpected keyword argument 'no_such'"),
    "plan for another model": (_plan_of_another, r"^The plan was made for a LlamaForCausalLM with a layer .*Make the plan"),
    "more segments than layers": (
        dict(ac=_config(strategy="sequential", sequential_segments=9)), "^segments is 9; .* from 1 to 3, the layers"
    ),
    "no such class": (
        dict(ac=_config(layer_classes=["LlamaDecoderLayer"])), r"layer_classes is \['LlamaDecoderLayer'\].*nowhere in the"
    ),
    "no such include": (
        dict(ac=_config(include_patterns=["layers.*"])), r"include_patterns holds 'layers\.\*', which matches no layer"
    ),
    "no such exclude": (
        dict(ac=_config(exclude_patterns=["layers.*"])), r"exclude_patterns holds 'layers\.\*', which matches no layer"
    ),
    "no timesteps": (
        dict(ac=_config(snn_timestep_checkpoint=True)), "snn_timestep_checkpoint is True, and the PlainDecoder has no nn."
    ),
    "operators as one word": (
        lambda: dict(ac=SelectivePolicy(save_ops="mm")), r"save_ops is 'mm'; it must be a list of .*: \['mm'\]"
    ),
    "operators as a number": (lambda: dict(ac=SelectivePolicy(drop=3)), r"SelectivePolicy\.drop is 3; it must be a list of"),
    "no such operator": (
        lambda: dict(ac=SelectivePolicy(extra=["torch.ops.aten.mmm"])),
        r"^SelectivePolicy\.extra has 'torch\.ops\.aten\.mmm', which is not an operator of this torch .*'aten\.mm'",
    ),
    "no such operator of a config": (
        lambda: dict(ac=_config(ops_to_save=["torch.ops.aten.mmm"])), r"^CheckpointConfig\.ops_to_save has 'torch\.ops"
    ),
    # layers and scope
    "layers: no such name": (dict(layers=["layers.*"]), r"^layers= names 'layers\.\*', which matches no module of this Pl"),
    "layers: foreign module": (dict(layers=[nn.Linear(2, 2)]), "not part of this PlainDecoder; pass modules of the very"),
    "layers: overlap": (dict(layers=["blocks.0", "blocks.0.mlp"]), "both 'blocks.0' and 'blocks.0.mlp', .*not overlap"),
    "layers: number": (dict(layers=[3]), r"layers= holds 3, an int; it must hold names \(str\) or modules"),
    "scope": (dict(ac_scope="langauge"), "^scope 'langauge' is unknown; .*Did you mean 'language'"),
    "scope: nothing there": (dict(ac_scope="vision"), "^scope 'vision' selects no layer; this model has 3 language"),
    "scope: empty": (dict(ac_scope=[]), "^scope is empty; it must name at least one of all, multimodal"),
    "scope: number": (dict(ac_scope=3), "^scope is 3; it must be one of all, multimodal, language, vision, audio, other"),
    # compile, precision, loss, step, optimizer
    "compile": (dict(compile="inducter"), "^compile is 'inducter'; .*Did you mean 'inductor'"),
    "compile: number": (dict(compile=3), "^compile is 3; it must be a bool or one of inductor, aot_eager, eager"),
    "reentrant and compiled": (
        dict(ac=_config(strategy="full", use_reentrant=True), compile=True), "use_reentrant is True and compile is on"
    ),
    "precision": (dict(precision="bf17"), "^precision is 'bf17'; it must be a torch dtype or one of float32, .*fp8-gather"),
    "precision: integer": (dict(precision=torch.int8), r"^precision is torch\.int8; it must be a floating-point dtype"),
    "precision: number": (dict(precision=16), "^precision is 16; it must be a dtype such as 'bf16', a Precision or a Mi"),
    "precision: mxfp8": (dict(precision="mxfp8", device="cpu"), "^precision is 'mxfp8', and cpu has no kernels .*'mxfp8-em"),
    "precision: not autocast's": (dict(precision=torch.float64), r"^param_dtype is torch\.float64, and without FSDP2"),
    "precision: policy": (
        dict(precision=MixedPrecisionPolicy(param_dtype=torch.float64)), r"^param_dtype is torch\.float64, and without FS"
    ),
    "cast_forward_inputs": (
        lambda: dict(precision=Precision(cast_forward_inputs="no")), "cast_forward_inputs is 'no'; it must be True or Fal"
    ),
    "loss": (dict(loss="chunkd"), "loss is 'chunkd'.*Did you mean 'chunked'"),
    "tokens of a chunk": (lambda: dict(loss=ChunkedLoss(chunk_tokens=0)), "chunk_tokens is 0"),
    "loss that fails": (
        lambda: dict(ac="50%", sample_input=IDS, step=StepSpec(loss_fn=lambda out: {}["loss"])),
        r"StepSpec\.loss_fn failed on the model's output .*: KeyError: 'loss'",
    ),
    "step": (dict(step=4), "^step is 4; it must be a StepSpec"),
    "optimizer": (dict(optimizer="adamm"), "^optimizer is 'adamm'; it must be one of adamw, .*Did you mean 'adamw'"),
    # strategy, mesh, axes
    "strategy": (dict(strategy="fsdp3"), "^strategy is 'fsdp3'; it must be one of fsdp2, ddp, single. Did you mean 'fsdp2'"),
    "strategy: number": (dict(strategy=2), r"^strategy is 2; it must be one of fsdp2, ddp, single, or an FSDP2\(\.\.\.\)"),
    "strategy: None": (dict(strategy=None), "^strategy is None; it must be one of"),
    "option of FSDP2 beside ddp": (dict(strategy="ddp", forward_prefetch=2), "forward_prefetch"),
    "mesh": (dict(mesh="dp"), "^mesh is 'dp', a str; it must be a torch DeviceMesh"),
    "dp_replicate on one rank": (dict(dp_replicate=2), "^dp_replicate is 2, but this job has one rank. Start more with to"),
    "no replicas": (dict(dp_replicate=0), "^dp_replicate is 0; it must be a whole number >= 1"),
    "replicas in words": (dict(dp_replicate="2"), "^dp_replicate is '2'; it must be a whole number"),
    "replicas beside pp": (dict(dp_replicate=0, pp=2), "^dp_replicate is 0; it must be a whole"),
    "tp on one rank": (dict(tp=2), "^tp is 2, but this job has one rank. Start more with torchrun, or leave tp out"),
    "tp beside ddp": (dict(strategy="ddp", tp=2), "^tp is 2: it splits weights .*Use strategy='fsdp2'"),
    "tp: zero": (dict(tp=0), "^tp is 0; it must be a whole number of ranks >= 1"),
    "tp: fraction": (dict(tp=1.5), r"^tp is 1\.5; it must be a whole number of ranks >= 1"),
    "tp: sequence parallel alone": (
        lambda: dict(tp=TensorParallel(sequence_parallel=True)), r"sequence_parallel=True splits tensors .*and tp is 1"
    ),
    "tp: loss parallel alone": (
        lambda: dict(tp=TensorParallel(loss_parallel=True)), r"loss_parallel=True splits tensors .*and tp is 1"
    ),
    # offload
    "offload": (dict(offload="disk"), r"^OffloadConfig\.mode is 'disk'; it must be one of none, boundary, saved, all"),
    "offload: number": (dict(offload=3), "^offload is 3, an int; it must be an OffloadConfig, or one of none, boundary"),
    "offload saved of nothing": (dict(offload="saved", ac="none"), "^offload='saved' moves tensors .*and ac is 'none'"),
    "offload config of nothing": (dict(offload=OffloadConfig("saved"), ac="none"), "^offload='saved' moves tensors"),
    "pin_memory": (
        lambda: dict(offload=OffloadConfig(pin_memory="no")), r"OffloadConfig\.pin_memory is 'no'; it must be True or"
    ),
    # device
    "device": (dict(device="tpu"), "^device is 'tpu'; write it like 'cpu', 'cuda' or 'cuda:1'"),
    "device: meta": (dict(device="meta"), "^device is 'meta', which holds no weights: a model cannot train there"),
    "device: no cuda": (dict(device="cuda:99"), r"^device is 'cuda:99', and torch sees \d+ CUDA device"),
    "device: no mps": (dict(device="mps"), "^device is 'mps', and torch sees 0 MPS device"),
    "device: no xpu": (dict(device="xpu"), "^device is 'xpu', and torch sees 0 XPU device"),
    "device: number": (dict(device=3.5), r"^device is 3\.5; write it like 'cpu'"),
}  # fmt: skip


def _refuse(call: Callable[..., Any], model: nn.Module, arguments: Any, message: str) -> None:
    """Call with `arguments`, or what makes them: an error with this message, and the model as it was."""
    before = everything_of(model)
    with pytest.raises((ValueError, TypeError), match=message):
        call(model, **(arguments() if callable(arguments) else arguments))
    assert everything_of(model) == before


@pytest.mark.parametrize("name", ON_A_PLAIN_DECODER)
def test_a_refused_call_names_it_and_changes_nothing(name: str) -> None:
    arguments, message = ON_A_PLAIN_DECODER[name]
    _refuse(parallelize, PlainDecoder(), arguments, message)
    if (
        not callable(arguments)
        and arguments.keys() <= inspect.signature(apply_activation_checkpointing).parameters.keys()
    ):
        _refuse(apply_activation_checkpointing, PlainDecoder(), arguments, message)


ON_OTHER_MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "submodule of linear layers": (  # repeated layers without an MLP, attention or norm of their own
        lambda: Stack(nn.Linear(4, 4) for _ in range(3)),
        dict(ac="submodule"),
        rf"{_NO_LAYERS} Stack: .*\n  layers: 3 x Linear\nName"),
    "no layers": (
        lambda: nn.Linear(4, 4), dict(ac="full"),
        rf"{_NO_LAYERS} Linear, which holds no list of modules; .*for example layers=\['name_of_child'\]",
    ),
    "checkpoints itself": (_own_checkpointing, dict(ac="selective"), r"Call model\.gradient_checkpointing_disable\(\)"),
    "checkpoints itself as timm's do": (_timms_checkpointing, dict(ac="full"), r"set_grad_checkpointing\(False\)"),
    "checkpointed already": (
        lambda: apply_activation_checkpointing(PlainDecoder(), "submodule"), dict(ac="full"), "is checkpointed already"
    ),
}  # fmt: skip


@pytest.mark.parametrize("call", [parallelize, apply_activation_checkpointing])
@pytest.mark.parametrize("name", ON_OTHER_MODELS)
def test_a_model_that_cannot_be_taken_is_named_and_unchanged(name: str, call: Callable[..., Any]) -> None:
    build_model, arguments, message = ON_OTHER_MODELS[name]
    _refuse(call, build_model(), arguments, message)


OTHER_CALLS: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "profiler's loss": (
        lambda m: MemoryProfiler(m, loss_fn=lambda out: 1.0).profile((IDS,)),
        r"loss_fn returned 1\.0; it must return a tensor of one number that has a gradient",
    ),
    "profiler's loss is not a function": (lambda m: MemoryProfiler(m, loss_fn=3), "loss_fn is 3; it must be a function"),
    "profiler's device": (lambda m: MemoryProfiler(m, "tpu"), "device is 'tpu'; write it like 'cpu', 'cuda'"),
    "autocast": (
        lambda m: apply_activation_checkpointing(m, "full", autocast="int8"),
        "^autocast is 'int8'; it must be a torch dtype or one of float32",
    ),
    "imbalance above ep": (
        lambda m: plan_for(m, ac="50%", sample_input=(IDS,), ep=ExpertParallel(2, imbalance=2.5)),
        r"imbalance is 2\.5; it must be a number from 1 \(balanced\) to the number of ranks that share the experts, 2",
    ),
    "CPU memory": (
        lambda m: plan_for(m, ac="50%", sample_input=(IDS,), search=PlanSearch(host_memory="much")),
        "host_memory is 'much', which is not a number of bytes",
    ),
    "inputs of unknown layers": (lambda m: offload_activations("boundary"), "was not told the layers"),
    "what unknown layers keep": (lambda m: offload_activations("saved"), "was not told the layers"),
    "chunks without a head": (
        lambda m: chunk_model_loss(nn.Sequential(nn.Linear(3, 4)), ChunkedLoss()), "needs the output head of Sequential"
    ),
    "sync": (lambda m: set_gradient_sync(m, "x"), "enabled is 'x'; it must be True or False"),
    "a wrapper around TorchScript": (
        lambda m: CheckpointWrapper(torch.jit.script(nn.Sequential(nn.Linear(2, 2)))), "module is a TorchScript module"
    ),
    "an offloading wrapper around a word": (
        lambda m: Offloading("x", offload_activations("all")), "module is a str; it must be a torch.nn.Module"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("call", "message"), OTHER_CALLS.values(), ids=OTHER_CALLS)
def test_a_wrong_argument_is_named_and_the_model_is_as_it_was(call: Callable[[nn.Module], Any], message: str) -> None:
    _refuse(call, DecoderWithLoss(layers=2), {}, message)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FSDP2(reshard_after_forward="yes"), "reshard_after_forward is 'yes'"),
        (lambda: FSDP2(reshard_after_forward=-1), "reshard_after_forward is -1"),
        (lambda: FSDP2(forward_prefetch=-1), "forward_prefetch is -1"),
        (lambda: FSDP2(backward_prefetch=True), "backward_prefetch is True"),
        (lambda: FSDP2(cpu_offload=1), "cpu_offload is 1"),
        (lambda: FSDP2(frozen_sharding="nowhere"), "frozen_sharding is 'nowhere'"),
        (lambda: ChunkedLoss(compile="tvm"), r"compile is 'tvm'; it must be None or one of inductor"),
        (lambda: ChunkedLoss(z_loss=-1), r"z_loss is -1; it must be a weight >= 0\."),
        (lambda: TensorParallel(0), "tp is 0|size is 0"),
        (lambda: TensorParallel(2, plan="auto"), "plan is 'auto'"),
        (lambda: TensorParallel(2, sequence_parallel=1), "sequence_parallel is 1"),
        (lambda: Precision("bf17"), "'bf17'"),
        (lambda: Precision(reduce_dtype=torch.int32), "reduce_dtype is torch.int32"),
        (lambda: OffloadConfig("disk"), "mode is 'disk'"),
        (lambda: MemoryBudget(), "MemoryBudget"),
        (lambda: MemoryBudget(1, 0.5), "MemoryBudget"),
        (lambda: MemoryBudget(peak_bytes="40GiB"), r"peak_bytes is '40GiB'.*MemoryBudget\.parse\('40GiB'\)"),
        (lambda: MemoryBudget(fraction="50%"), r"fraction is '50%'.*MemoryBudget\.parse\('50%'\)"),
        (lambda: MemoryBudget(peak_bytes=True), "peak_bytes is True"),
        (lambda: MemoryBudget(fraction=float("nan")), "fraction is nan"),
        (lambda: MemoryBudget(fraction=1.5), "fraction is 1.5"),
        (lambda: MemoryBudget(peak_bytes=0), "peak_bytes is 0"),
        (lambda: MemoryBudget(device_share=2), "device_share is 2"),
        (lambda: CheckpointConfig(policy=SelectivePolicy), "policy is .*SelectivePolicy.*must be a policy object"),
        (lambda: CheckpointConfig(strategy="full", policy=SelectivePolicy()), "policy"),
        (lambda: CheckpointConfig(policy=SelectivePolicy(), ops_to_save=["aten.mm"]), "ops_to_save"),
        (lambda: CheckpointConfig(True, "full", ops_to_save=["aten.mm.default"]), "CheckpointConfig"),
        (
            lambda: CheckpointConfig(True, include_patterns=["layers.*"], exclude_patterns=["layers.*"]),
            "CheckpointConfig",
        ),
        (lambda: CheckpointConfig(True, "full", sequential_segments=2), "CheckpointConfig"),
    ],
)
def test_options_check_themselves_when_they_are_made(make: Callable[[], Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        make()
