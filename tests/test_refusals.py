"""Arguments that would be accepted, or ignored, and give something else than was asked for."""

import re
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nemo_like import MemoryProfiler, SelectiveCheckpointer, apply_activation_checkpointing, materialize, parallelize
from nemo_like._util.option_fields import parse_options
from nemo_like.activation_checkpointing import is_checkpointed
from nemo_like.cli import main, make_parser
from nemo_like.distributed import get_model_state, get_optimizer_state, set_gradient_sync, set_model_state
from nemo_like.distributed.launch import local_device
from nemo_like.layers import find_layers
from nemo_like.losses import chunked_cross_entropy, chunked_log_probs
from nemo_like.offload import apply_offloading, offload_activations
from nemo_like.options import ExpertParallel
from nemo_like.planning import Plan, plan_for
from nemo_like.planning.devices import resolve_device
from nemo_like.planning.fit import fit
from nemo_like.recipes.options import FinetuneOptions, PretrainOptions
from tests.models.decoders import DecoderWithLoss, PlainDecoder, batch, build


def test_a_plan_for_fewer_layers_is_refused() -> None:
    plan = plan_for(DecoderWithLoss(layers=2), ac="50%", sample_input=(batch(2),))
    model: nn.Module = DecoderWithLoss(layers=4)
    with pytest.raises(ValueError, match=r"plan has 2 layers.*blocks\.2, blocks\.3"):
        parallelize(model, "single", plan)
    parallelize(model, "single", plan, layers=["blocks.0", "blocks.1"])  # said, it is what was asked for


@pytest.mark.parametrize(
    ("budget", "error", "said"),
    [
        (0.5, TypeError, "ac is 0.5, a float"),
        (None, ValueError, "ac is 'none'; a plan needs"),
        (True, ValueError, "'full'"),
    ],
)
def test_what_is_no_budget_is_refused(budget: object, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=rf"{said}.*'40GiB'"):
        plan_for(DecoderWithLoss(layers=2), ac=budget, sample_input=(batch(2),))


def test_a_device_has_a_short_name_where_only_one_begins_with_it() -> None:
    assert resolve_device("h100") == resolve_device("h100-80gb")
    assert resolve_device("H100").name == "h100-80gb"
    with pytest.raises(ValueError, match=r"'A100' is neither one of a100-80gb, a100-40gb"):  # of two sizes
        resolve_device("A100")
    with pytest.raises(ValueError, match="'h' is neither one of"):
        resolve_device("h")


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["profile", "--model", "llama-tiny", "--modes", "full,selektive"], "Did you mean 'selective'"),
        (["profile", "--model", "llama-tiny", "--modes", "full+compile=cudagraphs"], "'cudagraphs'"),
    ],
)
def test_a_wrong_option_of_a_command_is_named(
    command: list[str], said: str, program: Any
) -> None:
    assert said in program(command, 2).err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("profile --model llama-tiny --modes full --device xla:99", "device is 'xla:99'"),
        ("profile --model llama-tiny --device tpu", "device is 'tpu'"),
        (
            "profile --model llama-tiny --input-shape 3,4 --batch-size 1",
            r"failed on the sample input \(float32 \(3, 4\)\)",
        ),
        ("profile --model llama-tiny --input-shape 3,x", "--input-shape is '3,x'"),
        ("plan --model llama-tiny --gpu h100 --input-shape 0,3", "--input-shape is '0,3'"),
        ("plan --model llama-tiny --gpu h100 --vocab-size -4", "--vocab-size is -4"),
        (
            "plan --model llama-tiny --gpu h100 --seq-len 16 --memory 1KiB --ac 50% --no-what-if",
            "Does not fit: ac=.* of 1.00 KiB",
        ),
        ("plan --model {bad} --gpu h100", "its config is not a llama.*not a multiple of the number of attention heads"),
    ],
)
def test_a_command_says_what_is_wrong_in_one_line(
    words: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "config.json"
    bad.write_text('{"model_type": "llama", "hidden_size": 64, "num_attention_heads": 7}')
    status = main(words.format(bad=bad).split())
    out = capsys.readouterr()
    assert status in (1, 2)
    assert re.search(said, out.err + out.out), out.err + out.out
    assert "Traceback" not in out.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("command", ["profile --model llama-tiny --device cuda"])
def test_a_device_that_is_not_there_is_said_to_be_missing(command: str, program: Any) -> None:
    assert "torch sees 0 CUDA device(s)" in program(command, 2).err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_the_recipe_says_that_there_is_no_cuda_device() -> None:
    with pytest.raises(ValueError, match="torch sees no CUDA device here"):
        local_device("cuda")


# ------------------------------------------------------------------------------------- one table: call, message, no change

# As module:function of commands.


def takes_an_argument(layers: int) -> nn.Module:
    return DecoderWithLoss(layers=layers)


def plain_decoder() -> nn.Module:
    return DecoderWithLoss(layers=2)


_HERE = "tests.test_refusals"
_HIDDEN, _LABELS = torch.randn(4, 8), torch.tensor([1, 2, 3, 4])


class _WithScriptedPart(PlainDecoder):
    def __init__(self) -> None:
        super().__init__()
        self.extra = torch.jit.script(nn.Linear(2, 2))


def _head() -> nn.Module:
    return nn.Linear(8, 16)


_NO_MODULE = {
    "parallelize": lambda x: parallelize(x),
    "apply": lambda x: apply_activation_checkpointing(x, "full"),
    "plan_for": lambda x: plan_for(x, ac="50%", sample_input=(batch(2),)),
    "fit": lambda x: fit(x, gpus=1, gpu="cpu") if not isinstance(x, str) else find_layers(x),
    "find_layers": find_layers,
    "profiler": MemoryProfiler,
    "materialize": materialize,
    "state": get_model_state,
    "set_state": lambda x: set_model_state(x, {}),
    "optimizer": lambda x: get_optimizer_state(x, torch.optim.SGD([nn.Parameter(torch.ones(1))])),
    "sync": lambda x: set_gradient_sync(x, True),
    "offloading": lambda x: apply_offloading(x, []),
    "offload": lambda x: offload_activations("all", model=x),
    "checkpointer": lambda x: SelectiveCheckpointer({"enabled": True}).apply(x),
}
"""What takes a model."""


@pytest.mark.parametrize("call", _NO_MODULE.values(), ids=_NO_MODULE)
def test_what_is_not_a_module_or_a_torchscript_one_is_named(call: Callable[[Any], Any]) -> None:
    kinds = (("x", "a str"), (3, "an int"), (OrderedDict(), "an OrderedDict"), (list(PlainDecoder().blocks), "a list"))
    for wrong, words in kinds:
        with pytest.raises(TypeError, match=rf"^model is {words}; it must be a torch\.nn\.Module\.$"):
            call(wrong)
    traced = torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2))
    scripted = torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    for module, has in ((scripted, "is"), (traced, "is"), (_WithScriptedPart(), "has")):
        with pytest.raises(
            TypeError, match=f"^model {has} a TorchScript module .*Give the nn.Module that it was made from"
        ):
            call(module)


def test_a_bad_sample_of_a_hugging_face_model_is_named_with_the_models_own_reason() -> None:
    model = build("llama")
    for sample, reason in (
        ({"foo": 1}, r"\(foo: int.*You must specify exactly one of input_ids or inputs_embeds"),
        (
            {"input_ids": torch.ones(2, 3)},
            r"\(input_ids: float32 \(2, 3\).*(indices must be of|argument #1 .indices.)",
        ),
        (3, r"\(int"),
    ):
        with pytest.raises(ValueError, match=f"forward pass of LlamaForCausalLM failed on the sample input {reason}"):
            parallelize(model, "single", ac="50%", sample_input=sample)
        assert not any(is_checkpointed(module) for module in model.modules())


_ALONE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "ignore_index": (
        lambda _: chunked_cross_entropy(_HIDDEN, _head(), _LABELS, ignore_index=-1.5),
        r"ignore_index is -1\.5; it must be a whole number",
    ),
    "ignore_index of log-probabilities": (
        lambda _: chunked_log_probs(_HIDDEN, _head(), _LABELS, ignore_index=True), "ignore_index is True"
    ),
    "num_items": (
        lambda _: chunked_cross_entropy(_HIDDEN, _head(), _LABELS, num_items=0),
        "num_items is 0; it must be finite and > 0: the sum of the losses is divided by it",
    ),
    "num_items in words": (
        lambda _: chunked_cross_entropy(_HIDDEN, _head(), _LABELS, num_items="4"), "num_items is '4'; it must be a number"
    ),
    "num_items in a tensor": (
        lambda _: chunked_cross_entropy(_HIDDEN, _head(), _LABELS, num_items=torch.tensor(0)), "num_items is 0; it must be"
    ),
    "shift": (lambda _: chunked_cross_entropy(_HIDDEN, _head(), _LABELS, shift="x"), "shift is 'x'; it must be True or"),
    "shift of log-probabilities": (
        lambda _: chunked_log_probs(_HIDDEN, _head(), _LABELS, shift=1), "shift is 1; it must be True or False"
    ),
    "several num_items": (
        lambda _: chunked_cross_entropy(_HIDDEN, _head(), _LABELS, num_items=torch.ones(2)), "a tensor of one number"
    ),
    "logit_scale": (
        lambda _: chunked_cross_entropy(_HIDDEN, _head(), _LABELS, logit_scale=float("nan")), "logit_scale is nan"
    ),
    "imbalance": (
        lambda _: ExpertParallel(4, imbalance=0.5),
        r"ExpertParallel\.imbalance is 0\.5; it must be a number from 1 \(balanced\) to .*, 4",
    ),
    "imbalance in words": (lambda _: ExpertParallel(4, imbalance="2"), r"ExpertParallel\.imbalance is '2'"),
    "a plan of another kind": (
        lambda folder: Plan.load(_file(folder, "plan.json", "{}")),
        r"^Plan file .*plan\.json: It is not a plan\. Plans are written by plan\.save",
    ),
    "a plan that is not text": (
        lambda folder: Plan.load(_file(folder, "plan.json", b"\xff\xfe")), r"^Plan file .*plan\.json is not text"
    ),
    "a plan that is a list": (
        lambda folder: Plan.load(_file(folder, "plan.json", "[1]")), r"^Plan file .*plan\.json is damaged or not a plan"
    ),
    "imbalance of fit": (
        lambda _: fit(DecoderWithLoss(layers=2), gpus=2, gpu="cpu", imbalance=0.5), r"imbalance is 0\.5; it must be a number"
    ),
    "imbalance without experts": (
        lambda _: fit(build("llama"), gpus=2, gpu="cpu", seq_len=16, imbalance=2.0),
        r"imbalance is 2\.0, and LlamaForCausalLM has no experts",
    ),
}  # fmt: skip


def _file(folder: Path, name: str, text: str | bytes) -> Path:
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder / name


@pytest.mark.parametrize(("call", "said"), _ALONE.values(), ids=_ALONE)
def test_a_wrong_value_is_named(call: Callable[[Path], Any], said: str, tmp_path: Path) -> None:
    with pytest.raises((ValueError, TypeError), match=said):
        call(tmp_path)


_TINY = "--model llama-tiny"
_COMMANDS = {
    f"layers --model {_HERE}:takes_an_argument": f"Model '{_HERE}:takes_an_argument' is called without arguments, and it "
    "takes some: missing a required argument: 'layers'. Name a function that returns the model by itself",
    **{
        f"{command} --model meta-llama/Llama-3.1-8B": "'meta-llama/Llama-3.1-8B' looks like a Hub name, and nothing is "
        "downloaded here. Get its config first: hf download meta-llama/Llama-3.1-8B config.json --local-dir DIR, then "
        "--model DIR."
        for command in ("layers", "plan", "fit --gpus 1", "profile")
    },
    f"layers --model {Path(__file__).parent}": f"{Path(__file__).parent}' is a folder without a config.json",
    "layers --model missing/config.json": "is not a preset",
    "layers --model math:pi": "Model 'math:pi' is a float; it must be a function",
    # Lengths, sizes, words.
    f"profile {_TINY} --seq-len 200000": "--seq-len requires sequences of 200000 tokens",
    f"fit {_TINY} --gpus 2 --imbalance 0.5": "--imbalance is 0.5; it must be a finite number >= 1",
    f"fit {_TINY} --gpus 2 --imbalance 1.5 --ep 1": "imbalance is 1.5, and ep is 1: every rank has all experts",
    f"plan {_TINY} --imbalance 0.5 --ep 2 --gpus 2": "--imbalance is 0.5; it must be a finite number >= 1",
    f"plan {_TINY} --imbalance 1.5": "imbalance is 1.5, and ep is 1: every rank has all experts",
    f"plan {_TINY} --memory much": "--memory is 'much', which is not a number of bytes",
    f"plan {_TINY} --host --host-memory much": "--host-memory is 'much', which is not a number of bytes",
    f"plan {_TINY} --ac much": "--ac is 'much'; it must be one of none, full",
    f"plan {_TINY} --ac 40": "--ac is '40', without a unit. Write '40GiB' or '40%'.",
    f"plan {_TINY} --ac 42949672960": "--ac is '42949672960', without a unit. Write '42949672960B'.",
    f"plan {_TINY} --memory 40": "--memory is '40', without a unit. Write '40GiB'.",
    f"plan {_TINY} --host --host-memory 64": "--host-memory is '64', without a unit. Write '64GiB'.",
    f"fit {_TINY} --gpus 1 --memory 70": "memory is '70', without a unit. Write '70GiB'.",
    f"profile {_TINY} --budget 2": "--budget is '2', without a unit. Write '2GiB'.",
    f"profile {_TINY} --modes 40": "'40', without a unit. Write '40GiB' or '40%'.",
    f"profile {_TINY} --budget much": "--budget is 'much', which is not a number of bytes",
    f"profile {_TINY} --runs 0": "--runs is 0; it must be a whole number >= 1",
    # Files that are written late.
    **{
        f"{command} {option} /nonexistent/x.json": f"{option} names a file in '/nonexistent', which is not an existing"
        for command, options in (
            (f"plan {_TINY}", ("json", "save")), (f"plan {_TINY} --pp 2 --gpus 2", ("json", "save")),
            (f"fit {_TINY} --gpus 1", ("json", "save")), (f"profile {_TINY}", ("json",)),
        )
        for option in (f"--{name}" for name in options)
    },
    f"plan {_TINY} --json {{folder}}": "--json is '{folder}', which is a folder",
    # Options that nothing reads.
    f"fit {_TINY} --gpus 1 --ac none full --save {{folder}}/x": "--save writes a plan, and --ac is none full",
    f"profile {_TINY} --modes none,full --budget 2GB": "--budget is '2GB', and nothing reads it: --modes measures whole",
    f"profile {_TINY} --strategy ddp": "--strategy is 'ddp', and nothing reads it: layers are measured on one device",
    f"plan {_TINY} --balance memory": "--balance is 'memory', and nothing reads it: without --pp above 1",
    f"plan {_TINY} --pp-schedule gpipe": "--pp-schedule is 'gpipe', and nothing reads it",
    f"plan {_TINY} --sync last": "--sync is 'last', and nothing reads it",
    f"plan {_TINY} --reshard-after-forward no": "--reshard-after-forward is 'no', and nothing reads it: one rank keeps",
    f"plan {_TINY} --prefetch 2": "--prefetch is 2, and nothing reads it",
    f"plan {_TINY} --host-memory 1GiB": "--host-memory is '1GiB', and nothing reads it: that takes --cpu-offload",
    f"plan {_TINY} --input-shape 2,3 --seq-len 8": "--seq-len is 8, and nothing reads it: --input-shape is the whole input",
    f"plan {_TINY} --vocab-size 8": "--vocab-size is 8, and nothing reads it: llama-tiny states its own, 256",
    f"plan {_TINY} --image-size 8": "--image-size is 8, and nothing reads it: llama-tiny takes text alone",
    f"plan --model {_HERE}:plain_decoder --vocab-size 8 --images 2": "--images is 2, and nothing reads it",
    f"profile {_TINY} --json - --budget 3GB": "--budget is '3GB', and nothing reads it: --json - prints everything",
    f"profile {_TINY} --input-shape 2,3 --batch-size 4": "--batch-size is 4, and nothing reads it",
    "fit --calibrate --gpus 8": "--gpus is 8, and nothing reads it: --calibrate without --model",
    f"fit {_TINY} --gpus 2 --offload none --no-cpu-offload --host-memory 1GiB": "--host-memory is '1GiB', and nothing",
}  # fmt: skip


@pytest.mark.parametrize("line", _COMMANDS)
def test_a_command_refuses_it_before_any_work(line: str, tmp_path: Path, program: Any) -> None:
    words = line.format(folder=tmp_path).split()
    begun = make_parser(words[0]).parse_args(words)
    start = time.process_time()
    said = program(words, 2)
    *first, refused = said.err.splitlines()
    assert said.out == "" and first in ([], [begun.first_line(begun)])  # nothing, where torch is not imported yet
    assert refused.startswith(f"nemo-like {words[0]}: ") and _COMMANDS[line].format(folder=tmp_path) in refused
    assert time.process_time() - start < 60 and list(tmp_path.iterdir()) == []


_JOBS = {
    "pretrain --lr-floor 2": "--lr-floor is 2.0; it is a share of the peak rate, and must be from 0 to 1",
    "pretrain --warmup-steps 500 --steps 10": "--warmup-steps is 500, and the run has 10 steps",
    "pretrain --vocab-size 300": "--vocab-size is 300, and without --tokenizer bpe nothing reads it",
    "pretrain --pp-schedule gpipe": "--pp-schedule is 'gpipe', and without --pp above 1 nothing reads it",
    "pretrain --keep 3": "--keep is 3, and without --checkpoint-dir nothing reads it. Add that, or leave --keep out",
    "pretrain --sync-save": "--sync-save is True, and without --checkpoint-dir",
    "pretrain --save-every 3": "--save-every is 3, and without --checkpoint-dir",
    "pretrain --schedule constant --lr-floor 0.5": "--lr-floor is 0.5, and without another --schedule",
    "pretrain --strategy ddp --cpu-offload": "--cpu-offload is True, and without --strategy fsdp2",
    "pretrain --strategy ddp --reshard-after-forward yes": "--reshard-after-forward is 'yes', and without --strategy fsdp2",
    "pretrain --ac 40": "--ac: ac is '40', without a unit. Write '40GiB' or '40%'.",
    "pretrain --export /dev/null/x": "--export is '/dev/null/x', and in '/dev/null' this user can make no folder",
    "pretrain --json {folder}": "--json is '{folder}', which is a folder",
    "finetune --lora-rank 8": "--lora-rank is 8, and without --lora nothing reads it",
    "finetune --lora-alpha 8": "--lora-alpha is 8.0, and without --lora",
    "finetune --lora-dropout 0.5": "--lora-dropout is 0.5, and without --lora",
    "finetune --lora-targets q_proj": "--lora-targets is 'q_proj', and without --lora",
    "finetune --lora --lora-alpha -1": "--lora-alpha is -1.0; it must be a finite number >= 0",
    "finetune --merge": "--merge is True, and without --lora nothing reads it",
    "finetune --grad-accum 0": "--grad-accum is 0; it must be a finite number >= 1",
    "finetune --fit-memory 1GiB": "--fit-memory is '1GiB', and without --fit nothing reads it",
    "finetune --precision fp4": "--precision is 'fp4'; it must be one of bfloat16, float32",
    "finetune --epochs 0": "--steps and --epochs are both 0: nothing would be trained",
}


@pytest.mark.parametrize("line", _JOBS)
def test_a_job_refuses_it_before_any_work(line: str, tmp_path: Path, ending: Any) -> None:
    job, *options = line.format(folder=tmp_path).split()
    more = ["--model", "m", "--data", "d"] if job == "finetune" else []
    said = ending(parse_options, FinetuneOptions if job == "finetune" else PretrainOptions, [*options, *more]).err
    assert _JOBS[line].format(folder=tmp_path) in said and len(said.splitlines()) == 1


def test_a_short_run_warms_up_within_its_steps() -> None:
    assert (
        parse_options(PretrainOptions, []).warmup == 20 and parse_options(PretrainOptions, ["--steps", "4"]).warmup == 4
    )
    assert parse_options(PretrainOptions, ["--steps", "4", "--warmup-steps", "3"]).warmup == 3


def test_fit_says_where_its_fastest_has_no_plan_to_save(tmp_path: Path, program: Any) -> None:
    line = f"fit {_TINY} --gpus 1 --gpu h100-80gb --seq-len 32 --micro-batch 1 --loss model --offload none"
    assert (
        "--save wrote nothing: the fastest has ac='none', which is not a plan. Pin --ac plan"
        in program([*line.split(), "--ac", "none", "plan", "--save", str(tmp_path / "plan.json")], 1).err
    )
    assert list(tmp_path.iterdir()) == []
