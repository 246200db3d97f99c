"""`transformers.Trainer` on two ranks: under `accelerate launch` with FSDP2 bit for bit what it is without us, and ``cp=2``.

Weight decay, clipping, accumulation and evaluation are on. accelerate offers FSDP on accelerators alone. Its own code is
what runs here; only the kind of job that it has found is renamed before it chooses.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from nemo_like import apply_activation_checkpointing
from tests.checks import update
from tests.models import decoders
from tests.models.decoders import batch, build, loss_of
from tests_distributed.spawn import on_ranks, run_ranks

transformers = pytest.importorskip("transformers")

JOB = Path(__file__).with_name("launched_trainer.py")
CONFIG = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
num_machines: 1
num_processes: 2
main_process_port: 0
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_reshard_after_forward: true
  fsdp_cpu_ram_efficient_loading: false
"""
SAVING = dict(
    save_strategy="steps", save_steps=2, load_best_model_at_end=True, metric_for_best_model="eval_loss",
    greater_is_better=True,  # the earlier one, so that there is something to load
)  # fmt: skip
COMPILED = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
MODES = ("full", "selective", "submodule", "sequential", "50%")


def accelerate_launch(folder: Path, config: str) -> list[str]:
    """The words that start a job with FSDP2, whose file is written to `folder`."""
    (folder / "fsdp2.yaml").write_text(CONFIG + config, encoding="utf-8")
    return ["accelerate.commands.launch", "--config_file", str(folder / "fsdp2.yaml")]


def start(*words: str, how: Any = subprocess.Popen, **more: Any) -> Any:
    """Start ``python -m`` with these words, on CPUs alone."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "GLOO_SOCKET_IFNAME": "lo"}
    env |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return how([sys.executable, "-m", *words], env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **more)


def run(*words: str) -> None:
    """The same, to an end that must be good."""
    done = start(*words, how=subprocess.run, timeout=240, check=False)
    assert done.returncode == 0, done.stdout[-6000:]


def launch(folder: Path, config: str, jobs: dict[str, Any]) -> dict[str, Any]:
    """What each job left behind."""
    (folder / "jobs.json").write_text(json.dumps(jobs), encoding="utf-8")
    run(*accelerate_launch(folder, config), str(JOB), str(folder))
    return {name: json.loads((folder / f"{name}.json").read_text(encoding="utf-8")) for name in jobs}


def rows(length: int = 16, kinds: int = 32) -> list[dict[str, torch.Tensor]]:
    """Rows with prompts of several lengths, which do not count: the mean is over the tokens of all ranks."""
    ids = [decoders.batch(1, length, seed=index % kinds)[0] for index in range(32)]
    prompts = [torch.arange(length) < index % 9 for index in range(32)]
    return [{"input_ids": row, "labels": row.masked_fill(prompt, -100)} for row, prompt in zip(ids, prompts)]


def losses(result: dict[str, Any]) -> torch.Tensor:
    """All numbers of the log."""
    return torch.tensor(
        [entry[key] for entry in result["log"] for key in ("loss", "grad_norm", "eval_loss") if key in entry]
    )


def _alone(rank: int, world_size: int, folder: str) -> list[float]:
    from tests_distributed.integrations.launched_trainer import Arguments, Trainer, settings

    trainer = Trainer(
        model=decoders.build("qwen3"), args=Arguments(output_dir=folder, **settings), train_dataset=rows(),
        eval_dataset=rows(), ac="none",
    )  # fmt: skip
    trainer.train()
    return losses({"log": trainer.state.log_history}).tolist()


@pytest.mark.long
def test_settings_change_no_bit_of_a_sharded_trainers_run(tmp_path: Path) -> None:
    """In float32, with sharded state dicts. One test: a launch costs more than all its jobs."""
    saved = str(tmp_path / "saved" / "checkpoint-2")
    jobs: dict[str, Any] = {ac: {"mine": {"ac": ac}} for ac in MODES}
    jobs |= {
        "plain": {},
        "offload": {"mine": {"ac": "full", "activation_offloading": "everything"}},
        "chunked": {"mine": {"ac": "selective", "loss": "chunks of 8"}},
        "cp": {"model": "qwen3", "mine": {"ac": "selective", "cp": 2}},
        "saved bare": {"arguments": SAVING},
        "saved": {"mine": {"ac": "selective"}, "arguments": SAVING},
        # Into the same folder: sharded weights make theirs late, so that what step 2 wrote of the best one is a race's.
        "resumed": {"mine": {"ac": "selective"}, "arguments": SAVING, "resume": saved, "output": "saved"},
        "compiled": {"mine": {"ac": "selective"}, "arguments": COMPILED},
    }
    found = launch(tmp_path, "  fsdp_state_dict_type: SHARDED_STATE_DICT\nmixed_precision: 'no'\n", jobs)

    plain = found["plain"]
    assert len(losses(plain)) == 4 * 2 + 2
    assert [name for name in plain["units"] if "layers." in name] == [f"model.layers.{i}" for i in range(3)]
    (decay, decayed), (none, others) = plain["groups"]
    assert (decay, none) == (0.1, 0.0) and len(decayed) == 3 * 7 + 2 and len(others) == 3 * 2 + 1
    for name in (*MODES, "offload", "compiled"):
        for what in ("log", "groups", "weights") + (() if name == "compiled" else ("units",)):
            assert found[name][what] == plain[what], (name, what)
        assert (found[name]["moved"] > 0) == (name == "offload")

    for name in ("saved", "resumed"):
        for what in ("log", "groups", "units", "weights"):
            assert found[name][what] == found["saved bare"][what], (name, what)
        assert Path(found[name]["best"]).name == Path(found["saved bare"]["best"]).name == "checkpoint-2"
    assert found["saved bare"]["weights"] != plain["weights"]  # those of step 2

    torch.testing.assert_close(losses(found["chunked"]), losses(plain), rtol=1e-6, atol=0)
    assert found["chunked"]["weights"] != plain["weights"]  # it was another sum
    (alone,) = run_ranks(1, _alone, str(tmp_path), init_group=False, timeout=120)
    torch.testing.assert_close(losses(found["cp"]), torch.tensor(alone), rtol=1e-4, atol=0)


@pytest.mark.long
def test_layers_that_accelerate_compiles_in_bfloat16(tmp_path: Path) -> None:
    """With whole state dicts, all by accelerate's own config file."""
    jobs: dict[str, Any] = {
        "plain": {"arguments": SAVING},
        "saved": {"mine": {"ac": "selective"}, "arguments": SAVING},
        "chunked": {"mine": {"ac": "full", "loss": "chunks of 8"}},
    }
    config = "  fsdp_state_dict_type: FULL_STATE_DICT\nmixed_precision: bf16\ndynamo_config:\n"
    config += "  dynamo_backend: AOT_EAGER\n  dynamo_use_regional_compilation: true\n"
    found = launch(tmp_path, config, jobs)
    for what in ("log", "groups", "units", "weights"):
        assert found["saved"][what] == found["plain"][what], what
    whole, chunked = losses(found["plain"]), losses(found["chunked"])
    torch.testing.assert_close(chunked, whole, rtol=2e-2, atol=0)
    assert not torch.equal(chunked, whole)  # the compiled head was not called with all tokens


@pytest.mark.long
def test_what_accelerates_config_file_does_beside_us_is_refused(tmp_path: Path) -> None:
    jobs = {
        "full": {"mine": {"ac": "full"}},
        "callback": {"mine": {"callback": "full"}},
        "chunked": {"mine": {"loss": "chunks of 8"}},
    }
    config = "  fsdp_activation_checkpointing: true\ndynamo_config:\n  dynamo_backend: AOT_EAGER\n"
    found = launch(tmp_path, config, jobs)
    nested = "ValueError: accelerate's config (fsdp_activation_checkpointing: true) and ac= both checkpoint the model"
    assert found["full"].startswith(nested) and found["callback"].startswith(nested)
    assert found["chunked"].startswith("ValueError: accelerate's config (dynamo_backend: aot_eager) compiles the whole")


STEPS = 12


def _curve(rank: int, world_size: int, folder: str, cp: int, loss: str) -> list[float]:
    from nemo_like.integrations.transformers import CheckpointingMixin

    class Trainer(CheckpointingMixin, transformers.Trainer):
        pass

    arguments = transformers.TrainingArguments(
        output_dir=folder, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=STEPS,
        learning_rate=3e-3, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True, logging_steps=1, seed=5,
    )  # fmt: skip
    trainer = Trainer(
        model=decoders.build("qwen3"), args=arguments, train_dataset=rows(15, 4), eval_dataset=rows(15, 4),
        ac="selective", cp=cp, loss=loss,
    )  # fmt: skip
    trainer.train()
    found = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return [*found, trainer.evaluate()["eval_loss"]]


@pytest.mark.few(1)
@pytest.mark.parametrize("loss", ["model", "chunked"])
def test_losses_are_those_of_whole_sequences(tmp_path: Path, loss: str) -> None:
    (whole,) = run_ranks(1, _curve, str(tmp_path), 1, loss, init_group=False, timeout=120)
    assert len(whole) == STEPS + 1 and whole[-2] < whole[0] - 0.5
    for found in run_ranks(2, _curve, str(tmp_path), 2, loss, init_group=False, timeout=120):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(whole), rtol=1e-4, atol=0)


def _prepared(ac: str, **settings: Any) -> tuple[Any, torch.nn.Module, torch.optim.Optimizer]:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
    from accelerate.utils import DistributedType

    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"], **settings,
    )  # fmt: skip
    accelerator = Accelerator(fsdp_plugin=plugin, cpu=True)
    assert accelerator.is_fsdp2
    model = apply_activation_checkpointing(build("llama").eval(), ac)
    return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))


def _train(rank: int, world_size: int, ac: str) -> tuple[list[float], list[str]]:
    accelerator, model, optimizer = _prepared(ac)
    losses = []
    for step in range(3):
        loss = loss_of(model, batch(2, 16, seed=2 * step + rank))
        accelerator.backward(loss)
        update(optimizer)
        losses.append(loss.item())
    return losses, sorted({name for name, module in model.named_modules() if isinstance(module, FSDPModule)})


@pytest.mark.long
def test_every_layer_is_a_unit_in_every_mode() -> None:
    results = {
        ac: run_ranks(2, _train, ac, init_group=False, timeout=150)
        for ac in ("none", "full", "selective", "submodule", "sequential")
    }
    for losses, units in results["none"]:
        assert [name for name in units if "layers." in name] == [f"model.layers.{i}" for i in range(3)]
        assert losses[2] < losses[0]
    for ac, found in results.items():
        assert found == results["none"], ac


@pytest.mark.parametrize("ac", ["selective", "submodule"])
@on_ranks(2, init_group=False, timeout=150)
def test_accelerates_checkpointing_around_ours_is_refused(rank: int, world_size: int, ac: str) -> None:
    _, model, _ = _prepared(ac, activation_checkpointing=True)
    with pytest.raises(ValueError, match=r"fsdp_activation_checkpointing: true.*two recomputations nest"):
        loss_of(model, batch())
