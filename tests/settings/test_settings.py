"""Settings files of other frameworks become our flags, name what they do not have, and are written back."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from nemo_like.cli import make_parser
from nemo_like.commands.step_options import asked_job
from nemo_like.job import Job
from nemo_like.options import ContextParallel, Precision, TensorParallel
from nemo_like.settings import Settings, read_settings, write_settings

TITAN = """
[model]
name = "llama3"
flavor = "70B"
[training]
local_batch_size = 4
global_batch_size = 128
seq_len = 4096
[parallelism]
data_parallel_shard_degree = 8
data_parallel_replicate_degree = 2
tensor_parallel_degree = 4
context_parallel_degree = 2
fsdp_reshard_after_forward = "never"
[activation_checkpoint]
mode = "full"
[compile]
enable = true
components = ["model", "loss"]
[metrics]
log_freq = 3
[mystery]
box = 1
"""
ACCELERATE = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: bf16
num_processes: 8
main_training_function: main
fsdp_config:
  fsdp_version: 2
  fsdp_activation_checkpointing: true
  fsdp_offload_params: true
  fsdp_reshard_after_forward: false
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_mystery: 5
parallelism_config:
  parallelism_config_dp_shard_size: 2
  parallelism_config_tp_size: 2
  parallelism_config_cp_size: 2
  parallelism_config_cp_comm_strategy: alltoall
"""
AXOLOTL = """
base_model: someone/Meta-Llama-3.1-8B-Instruct
load_in_4bit: true
adapter: qlora
lora_r: 16
lora_alpha: 32
lora_target_modules: [q_proj]
sequence_len: 2048
micro_batch_size: 2
gradient_accumulation_steps: 4
optimizer: adamw_torch_fused
bf16: auto
fp16:
gradient_checkpointing: offload
dp_shard_size: 4
tensor_parallel_size: 2
liger_fused_linear_cross_entropy: true
fsdp_version: 2
fsdp_config:
  offload_params: false
  reshard_after_forward: true
datasets: [{path: some/data, type: alpaca}]
"""
AUTOMODEL = """
step_scheduler: {global_batch_size: 32, local_batch_size: 4, max_steps: 5}
model:
  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained
  pretrained_model_name_or_path: Qwen/Qwen3-30B-A3B
  torch_dtype: bf16
  backend: {attn: te}
distributed:
  strategy: fsdp2
  dp_size: 4
  dp_replicate_size: 2
  tp_size: 2
  ep_size: 4
  sequence_parallel: true
  activation_checkpointing: selective
peft: {dim: 8, alpha: 32}
packed_sequence: {packed_sequence_size: 1024}
optimizer: {_target_: torch.optim.Adam, lr: 1.0e-5}
"""


def _read(folder: Path, text: str, name: str = "settings") -> Settings:
    (folder / name).write_text(text, encoding="utf-8")
    return read_settings(folder / name)


def _same(settings: Settings, **expected: Any) -> None:
    assert dict(settings.values) == expected


def test_torchtitan(tmp_path: Path) -> None:
    settings = _read(tmp_path, TITAN)
    assert settings.framework == "torchtitan"
    assert settings.not_understood == ("mystery.box = 1", "compile.components = loss")
    axes = dict(dp_replicate=2, dp_shard=8, tp=4, cp=2, pp=1, ep=1, world_size=128)
    batch = dict(batch_size=4, seq_len=4096, grad_accum=2)
    split = dict(sequence_parallel=True, loss_parallel=True)
    more = dict(optimizer="adamw-fused", compile="inductor", alloc_conf="expandable_segments:True")
    sharding = dict(reshard_after_forward="no", ac="full", precision="bf16")
    _same(settings, model="llama3-70b", **axes, **batch, **split, **more, **sharding)


def test_the_defaults_of_torchtitan_are_named_where_no_flag_has_them(tmp_path: Path) -> None:
    settings = _read(tmp_path, "[parallelism]\ntensor_parallel_degree = 1\n")
    assert settings.not_understood == ("activation_checkpoint.selective_ac_option = 2 (only some layers)",)
    assert (settings.values["seq_len"], settings.values["batch_size"]) == (2048, 8)
    assert "world_size" not in settings.values and "ac" not in settings.values


def test_a_batch_of_torchtitan_is_cut_for_its_pipeline(tmp_path: Path) -> None:
    text = """[training]
local_batch_size = 8
[parallelism]
data_parallel_shard_degree = 2
pipeline_parallel_degree = 4
pipeline_parallel_schedule = "Interleaved1F1B"
pipeline_parallel_microbatch_size = 2
[model]
converters = ["quantize.linear.float8"]
[quantize.linear.float8]
recipe_name = "rowwise"
"""
    values = _read(tmp_path, text).values
    assert (values["batch_size"], values["grad_accum"], values["pp_schedule"]) == (2, 4, "interleaved_1f1b")
    assert (values["precision"], values["world_size"]) == ("fp8-rowwise", 8)


def test_accelerate(tmp_path: Path) -> None:
    settings = _read(tmp_path, ACCELERATE)
    assert (settings.framework, settings.not_understood) == ("accelerate", ("fsdp_config.fsdp_mystery = 5",))
    axes = dict(dp_shard=2, tp=2, cp=2, cp_method="ring", world_size=8)
    precision = dict(precision="bf16", reduce_dtype="bf16")
    _same(settings, **axes, **precision, ac="full", cpu_offload=True, reshard_after_forward="no")


def test_axolotl(tmp_path: Path) -> None:
    settings = _read(tmp_path, AXOLOTL)
    assert (settings.framework, settings.not_understood) == ("axolotl", ("lora_target_modules = ['q_proj']",))
    model = dict(model="llama3-8b", lora=16, four_bit=True, loss="chunked", optimizer="adamw-fused")
    batch = dict(batch_size=2, seq_len=2048, grad_accum=4)
    memory = dict(ac="full", offload="boundary", cpu_offload=False, reshard_after_forward="yes")
    precision = dict(precision="bf16", reduce_dtype="bf16")
    _same(settings, **model, **batch, **memory, **precision, dp_shard=4, tp=2, world_size=8)


def test_automodel(tmp_path: Path) -> None:
    settings = _read(tmp_path, AUTOMODEL)
    assert (settings.framework, settings.not_understood) == ("NeMo Automodel", ("model.backend.attn = te",))
    axes = dict(dp_replicate=2, dp_shard=2, tp=2, cp=1, pp=1, ep=4, world_size=8, sequence_parallel=True)
    batch = dict(batch_size=4, seq_len=1024, grad_accum=2)
    precision = dict(dtype="bf16", precision="bf16", reduce_dtype="fp32")
    _same(settings, model="qwen3-30b-a3b", **axes, **batch, **precision, ac="selective", lora=8, optimizer="adamw")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[parallelism]\ntensor_parallel_degree = 0\n", "parallelism.tensor_parallel_degree is 0; it must be a whole"),
        (
            "distributed_type: FSDP\nfsdp_config: {fsdp_offload_params: 3}",
            "fsdp_offload_params is 3; it must be true or",
        ),
        ("[parallelism]\nbroken\n", "is not valid TOML: Expected '=' after a key in a key/value pair (at line 2"),
        ("base_model: a\n  b: [\n", "is not valid YAML: mapping values are not allowed here (at line 2, column 4)"),
        (
            "name: x\n",
            "has the keys name, and is of no framework that is read here. These are recognised: torchtitan by",
        ),
        ("- 1\n", "has no keys: it is list. Give a settings file."),
    ],
)
def test_a_wrong_file_is_refused(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as refused:
        _read(tmp_path, text)
    assert words in str(refused.value)


def test_an_absent_file_and_an_absent_package_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: Any
) -> None:
    assert (
        "none.toml', which is not there. Give an existing file."
        in program(["plan", "--from", str(tmp_path / "none.toml")], 2).err
    )
    monkeypatch.setitem(sys.modules, "yaml", None)
    (tmp_path / "a").write_text(ACCELERATE)
    assert "pip install pyyaml" in program(["plan", "--from", str(tmp_path / "a")], 2).err
    assert (
        "whose suffix is of no format that is written here"
        in program(["plan", "--model", "llama-tiny", "--to", str(tmp_path / "a.ini")], 2).err
    )


def test_a_format_without_mxfp8_names_it(tmp_path: Path) -> None:
    assert write_settings(tmp_path / "a.toml", Job.of(precision="mxfp8", ac="none"), dtype="fp32") == (
        "precision = mxfp8",
    )


JOBS = {
    "axes": Job.of(ac="full", tp=TensorParallel(2, None, True, True), cp=2, world_size=16, dp_replicate=2),
    "stages": Job.of(
        ac="none", pp=2, world_size=8, precision="fp8-gather", optimizer="adamw-fused", compile="inductor"
    ),
    "selective": Job.of(ac="selective", precision="bf16", world_size=4),
}


@pytest.mark.parametrize("name", JOBS)
def test_torchtitan_read_back_has_the_same_values(name: str, tmp_path: Path) -> None:
    job, path = JOBS[name], tmp_path / "out.toml"
    assert write_settings(path, job, model="llama3-8b", seq_len=1024, batch_size=2, dtype="fp32") == ()
    settings = read_settings(path)
    values = settings.values
    assert settings.not_understood == ()
    assert (values["model"], values["seq_len"], values["batch_size"]) == ("llama3-8b", 1024, 2)
    assert (values["tp"], values["cp"], values["pp"]) == (job.tp.size, job.cp.size, job.pp.size)
    assert (values["dp_replicate"], values["world_size"]) == (job.dp_replicate, job.world_size)
    assert values["ac"] == getattr(job.ac, "mode", "none")
    assert values["precision"] == {"axes": "fp32", "stages": "fp8-gather", "selective": "bf16"}[name]
    assert values.get("compile") == job.compile
    assert values["optimizer"] == {"adamw": "adamw-foreach"}.get(job.step.optimizer, job.step.optimizer)
    assert values["grad_accum"] == (4 if job.pp.size > 1 else 1)
    assert values.get("loss_parallel", False) == job.tp.loss_parallel


def test_accelerate_read_back_has_the_same_values(tmp_path: Path) -> None:
    job = Job.of(
        ac="full",
        tp=2,
        cp=ContextParallel(2, "ring"),
        world_size=8,
        precision=Precision("bf16", "bf16"),
        offload="boundary",
    )
    path = tmp_path / "out.yaml"
    assert write_settings(path, job) == ()
    settings = read_settings(path)
    assert settings.not_understood == ()
    axes = dict(dp_replicate=1, dp_shard=2, tp=2, cp=2, cp_method="ring", world_size=8)
    memory = dict(ac="full", offload="boundary", cpu_offload=False, reshard_after_forward="yes")
    _same(settings, **axes, **memory, precision="bf16", reduce_dtype="bf16")


def test_what_a_format_does_not_have_is_named(tmp_path: Path) -> None:
    job = Job.of(ac="40GiB", world_size=2, loss="chunked", precision="bf16")
    assert write_settings(tmp_path / "a.yaml", job, ac="40GiB", seq_len=64, lora=8) == (
        "ac = 40GiB (written as full, which needs least)",
        "loss = chunked",
        "reduce_dtype = fp32",
        "seq_len = 64",
        "lora = 8",
    )


@pytest.mark.parametrize("strategy", ["ddp", "single"])
def test_settings_are_of_fsdp2(strategy: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"strategy is '{strategy}', and settings are those of FSDP2"):
        write_settings(tmp_path / "job.toml", Job.of(strategy=strategy, world_size=2))
    assert not list(tmp_path.iterdir())


def test_torchtitan_has_no_tensor_parallelism_without_split_sequences(tmp_path: Path) -> None:
    job = Job.of(ac="none", tp=2, pp=2, world_size=4, optimizer="sgd")
    left = write_settings(tmp_path / "a.toml", job, model="mixtral-8x7b")
    assert set(left) == {"optimizer = sgd", "sequence_parallel = no", "model = mixtral-8x7b"}


def _job(*words: str) -> Job:
    argv = ["plan", *words]
    return asked_job(make_parser("plan", argv).parse_args(argv))


def test_the_command_line_wins(tmp_path: Path) -> None:
    file = str(tmp_path / "t.toml")
    Path(file).write_text(TITAN)
    assert (_job("--from", file).tp.size, _job("--from", file).world_size) == (4, 128)
    assert _job("--tp", "1", "--gpus", "16", f"--from={file}").tp == TensorParallel()
    parse = make_parser("fit", ["fit", "--from", file]).parse_args
    args = parse(["fit", "--from", file])
    assert (args.tp, args.micro_batch, args.dp_shard, args.gpus, args.ac) == ([4], [4], [8], 128, ["full"])
    assert parse(["fit", "--from", file, "--tp", "2", "8"]).tp == [2, 8]
    argv = ["fit", "--from", file, "--gpus", "64"]
    assert make_parser("fit", argv).parse_args(argv).dp_shard is None


TINY = """[training]
local_batch_size = 1
seq_len = 32
[parallelism]
data_parallel_shard_degree = 1
[activation_checkpoint]
mode = "none"
"""


MODEL = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 32,
}


@pytest.mark.parametrize(
    ("line", "written", "printed", "said", "expected"),
    [
        (
            "plan --model {folder}/config.json --gpu cpu --no-what-if --ac 50% --batch-size 2", "o.toml",
            "2 x 32 tokens",
            (
                "of torchtitan: --batch-size 1 --seq-len 32", "--ac none",
                "{folder}/o.toml does not have: model = {folder}/config.json",
            ),
            {"batch_size": 2, "seq_len": 32, "ac": "none"},
        ),
        (
            "fit --model llama-tiny --gpu cpu --loss model --no-cpu-offload --offload none", "o.yaml",
            "sequences of 32 tokens", ("of torchtitan: --micro-batch 1", "does not have: ", "seq_len = 32"),
            {"ac": "none", "world_size": 1, "tp": 1},
        ),
    ],
    ids=["plan", "fit"],
)  # fmt: skip
def test_a_command_reads_and_writes(
    line: str, written: str, printed: str, said: tuple[str, ...], expected: dict[str, Any], tmp_path: Path, program: Any
) -> None:
    (tmp_path / "t.toml").write_text(TINY)
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    ran = program(f"{line} --from {{folder}}/t.toml --to {{folder}}/{written}".format(folder=tmp_path))
    out, err = (" ".join(text.split()) for text in ran)
    assert printed in out
    for text in said:
        assert text.format(folder=tmp_path) in err
    values = read_settings(tmp_path / written).values
    assert {name: values[name] for name in expected} == expected
