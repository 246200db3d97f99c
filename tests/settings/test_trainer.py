"""Arguments of transformers.Trainer and of TRL become our flags, and a job becomes such arguments."""

import json
from pathlib import Path
from typing import Any

import pytest

from nemo_like.job import Job
from nemo_like.options import FSDP2, Precision, StepSpec
from nemo_like.settings import Settings, read_settings, write_settings
from nemo_like.settings.paste import trainer_call

FULL = {
    "output_dir": "out",
    "learning_rate": 1e-4,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "max_length": 2048,
    "optim": "adamw_bnb_8bit",
    "bf16": True,
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": False},
    "torch_compile": True,
    "fsdp": "full_shard auto_wrap offload",
    "fsdp_config": {"fsdp_version": 2, "reshard_after_forward": False, "transformer_layer_cls_to_wrap": "Block"},
    "peft_config": {"r": 16, "lora_alpha": 32},
    "load_in_4bit": True,
    "deepspeed": "zero3.json",
}


def _read(folder: Path, **tree: Any) -> Settings:
    path = folder / "args.json"
    path.write_text(json.dumps({"gradient_accumulation_steps": 1} | tree), encoding="utf-8")
    return read_settings(path)


def _values(settings: Settings) -> dict[str, Any]:
    """Return what was read but for what every Trainer does: its `compute_loss` drops the output."""
    values = dict(settings.values)
    assert values.pop("drop_output") is True
    return values


def test_arguments_that_a_person_wrote(tmp_path: Path) -> None:
    settings = _read(tmp_path, **FULL)
    assert settings.framework == "transformers.Trainer"
    assert settings.not_understood == ("load_in_4bit = True", "deepspeed = zero3.json")
    batch = dict(batch_size=2, grad_accum=4, sync="last", seq_len=2048, lora=16)
    step = dict(optimizer="adamw-8bit", precision="bf16", reduce_dtype="bf16", compile="inductor", ac="full")
    assert _values(settings) == batch | step | dict(strategy="fsdp2", reshard_after_forward="no", cpu_offload=True)


@pytest.mark.parametrize(
    ("tree", "values", "unknown"),
    [
        ({"fsdp": True}, dict(strategy="fsdp2", reshard_after_forward="yes", cpu_offload=False), ()),
        ({"fsdp": ["shard_grad_op"]}, dict(strategy="fsdp2", reshard_after_forward="no", cpu_offload=False), ()),
        (
            {"fsdp": True, "fsdp_config": {"activation_checkpointing": True, "version": 1}},
            dict(strategy="fsdp2", reshard_after_forward="yes", cpu_offload=False, ac="full"),
            ("fsdp_config.version = 1",),
        ),
        (
            {"fsdp": "hybrid_shard auto_wrap"},
            dict(strategy="fsdp2", reshard_after_forward="yes", cpu_offload=False),
            ("fsdp = hybrid_shard",),
        ),
        ({"fsdp": [], "fsdp_config": {"min_num_params": 0, "xla": False, "cpu_offload": True}}, {}, ()),
        ({"fsdp": ""}, {}, ()),
        ({"parallelism_config": {"tp_size": 2, "dp_shard_size": 4}}, dict(tp=2, dp_shard=4, world_size=8), ()),
        ({"gradient_accumulation_steps": 2}, dict(grad_accum=2, sync="last"), ()),
        ({"gradient_checkpointing": True, "ac": "40GiB", "offload": "none"}, dict(ac="40GiB"), ()),
        ({"gradient_checkpointing": True, "ac": "none", "loss": "model", "cp": 1}, dict(ac="full"), ()),
        (
            {"ac": "selective", "ac_scope": "language", "loss": "chunked", "cp": 2, "offload": "saved"},
            dict(ac="selective", scope="language", loss="chunked", cp=2, offload="saved"),
            (),
        ),
        ({"fp16": True, "max_length": 64}, dict(precision="fp16", seq_len=64), ()),
        ({"max_length": 64}, dict(precision="bf16", seq_len=64), ()),
        ({"model_init_kwargs": {"dtype": "bfloat16"}}, dict(dtype="bf16", precision="bf16"), ()),
        (
            {"optim": "galore_adamw", "use_liger_kernel": True, "torch_compile_mode": "max-autotune"},
            {"optimizer": None},
            ("optim = galore_adamw", "use_liger_kernel = True", "torch_compile_mode = max-autotune"),
        ),
        ({"optim": "adamw_torch", "box": 1}, dict(optimizer="adamw"), ("box = 1",)),
    ],
)
def test_single_arguments(
    tree: dict[str, Any], values: dict[str, Any], unknown: tuple[str, ...], tmp_path: Path
) -> None:
    settings = _read(tmp_path, **tree)
    usual = dict(batch_size=8, grad_accum=1, optimizer="adamw-fused", precision="fp32")
    assert _values(settings) == {name: value for name, value in (usual | values).items() if value is not None}
    assert {*settings.not_understood} == {*unknown}


@pytest.mark.parametrize(
    ("library", "kind", "asked", "values"),
    [
        ("transformers", "TrainingArguments", {}, {"ac": "none"}),
        (
            "transformers",
            "TrainingArguments",
            {
                "fsdp": True,
                "fsdp_config": {"reshard_after_forward": False, "cpu_offload": True, "activation_checkpointing": True},
            },
            {"ac": "full", "strategy": "fsdp2", "reshard_after_forward": "no", "cpu_offload": True},
        ),
        ("trl", "SFTConfig", {"bf16": False}, {"ac": "full", "seq_len": 1024}),
    ],
    ids=["transformers", "sharded", "TRL"],
)
def test_a_dump_has_no_unknown_defaults(
    library: str, kind: str, asked: dict[str, Any], values: dict[str, Any], tmp_path: Path
) -> None:
    args = getattr(pytest.importorskip(library), kind)(output_dir=str(tmp_path / "out"), use_cpu=True, **asked)
    settings = _read(tmp_path, **json.loads(args.to_json_string()))
    assert settings.not_understood == ()
    assert _values(settings) == dict(batch_size=8, grad_accum=1, optimizer="adamw-fused", precision="fp32") | values


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"gradient_accumulation_steps": 0}', "gradient_accumulation_steps is 0; it must be a whole number >= 1"),
        ('{"gradient_accumulation_steps": 1,}', "is not valid JSON: "),
        ('{"gradient_accumulation_steps": 1, "loss": "big"}', "loss is 'big'; it must be model or chunked"),
        ('{"gradient_accumulation_steps": 1, "fsdp": 3}', "fsdp is 3; it must be true, false, or words such as full"),
        ("[1]", "has no keys: it is list. Give a settings file."),
    ],
)
def test_a_wrong_file_is_refused(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError) as refused:
        read_settings(tmp_path / "a.json")
    assert words in str(refused.value)


def test_a_job_read_back_has_the_same_values(tmp_path: Path) -> None:
    job = Job.of(
        ac="40GiB",
        world_size=8,
        precision=Precision("bf16", "bf16"),
        loss="chunked",
        offload="saved",
        optimizer="adamw-fused",
    )
    path = tmp_path / "out.json"
    assert write_settings(path, job, ac="40GiB", seq_len=64, batch_size=2) == ("world_size = 8",)
    assert json.loads(path.read_text()) == {
        "gradient_checkpointing": False,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "max_length": 64,
        "bf16": True,
        "optim": "adamw_torch_fused",
        "fsdp": True,
        "fsdp_config": {"version": 2, "reshard_after_forward": True},
        "ac": "40GiB",
        "loss": "chunked",
        "offload": "saved",
    }
    batch = dict(batch_size=2, grad_accum=1, seq_len=64, optimizer="adamw-fused")
    precision = dict(precision="bf16", reduce_dtype="bf16")
    sharding = dict(strategy="fsdp2", reshard_after_forward="yes", cpu_offload=False)
    settings = read_settings(path)
    assert _values(settings) == batch | precision | sharding | dict(ac="40GiB", loss="chunked", offload="saved")
    assert settings.not_understood == ()


def test_what_a_trainer_does_not_have_is_named(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    job = Job.of(ac="40GiB", tp=2, cp=2, world_size=8, precision="fp8", loss="chunked", compile="inductor")
    assert {*write_settings(path, job, ac="40GiB", model="llama3-8b", lora=8)} == {
        "ac = 40GiB (written as full, which needs least)",
        "dp_shard = 2",
        "world_size = 8",
        "tp = 2",
        "precision = fp8",
        "compile (of each layer) = inductor",
        "model = llama3-8b",
        "lora = 8",
    }
    written = json.loads(path.read_text())
    assert (written["ac"], written["cp"], written["optim"]) == ("full", 2, "adamw_torch")
    assert "bf16" not in written and "torch_compile" not in written


@pytest.mark.parametrize("sync", ["every", "last"])
def test_rounds_that_reduce_gradients_read_back(sync: str, tmp_path: Path) -> None:
    job = Job.of(ac="none", world_size=2, step=StepSpec(microbatches=4, sync=sync))
    assert write_settings(tmp_path / "out.json", job) == ("world_size = 2",)
    written = json.loads((tmp_path / "out.json").read_text())
    every = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    assert written.get("accelerator_config") == (every if sync == "every" else None)
    assert read_settings(tmp_path / "out.json").values["sync"] == sync


def test_one_gpu_is_not_sharded(tmp_path: Path) -> None:
    path, plain = tmp_path / "out.json", {"gradient_checkpointing": False, "bf16": False, "optim": "adamw_torch"}
    assert write_settings(path, Job.of(ac="none", compile="inductor")) == ()
    assert json.loads(path.read_text()) == plain | {"gradient_accumulation_steps": 1, "torch_compile": True}
    assert write_settings(path, Job.of(ac="none", strategy=FSDP2(cpu_offload=True))) == ()
    config = {"version": 2, "reshard_after_forward": True, "cpu_offload": True}
    assert json.loads(path.read_text()) == plain | {"gradient_accumulation_steps": 1, "fsdp": True, "fsdp_config": config}


def test_a_job_as_python() -> None:
    job = Job.of(ac="full", tp=2, world_size=4, precision=Precision("bf16", "bf16"), loss="chunked")
    assert trainer_call(job, batch_size=2, seq_len=64).splitlines() == [
        "Trainer: TrainingArguments(per_device_train_batch_size=2, gradient_accumulation_steps=1, bf16=True,",
        'optim="adamw_torch", fsdp=True, fsdp_config={"version": 2, "reshard_after_forward": True})',
        'CheckpointingArguments: ac="full", loss="chunked"',
        "In an SFTConfig, too: max_length=64, gradient_checkpointing=False",
        "Not in a Trainer: tp = 2; dp_shard = 2",
    ]


def test_fit_prints_arguments_of_a_trainer(program: Any) -> None:
    pins = ["--ac", "full", "--micro-batch", "2", "--loss", "model", "--no-cpu-offload", "--offload", "none"]
    words = ["--model", "llama-tiny", "--gpus", "1", "--gpu", "cpu", "--seq-len", "32", "--compile", "none", *pins]
    lines = program(["fit", *words, "--as", "trainer"]).out.split("\n\n")[0].split("\nTrain: ")[1].splitlines()
    assert lines[1:] == [
        "Trainer: TrainingArguments(per_device_train_batch_size=2, gradient_accumulation_steps=1, bf16=False,",
        'optim="adamw_torch")',
        'CheckpointingArguments: ac="full"',
        "In an SFTConfig, too: max_length=32, gradient_checkpointing=False",
    ]
    assert (
        "--as prints arguments, and --json - prints JSON alone. Give --json a file."
        in program(["fit", *words, "--as", "trainer", "--json", "-"], 2).err
    )
