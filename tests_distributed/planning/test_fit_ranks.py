"""What `fit` recommends for several ranks runs on them, as printed too, and peaks as predicted; all ranks get one report."""

import json
import re
import shlex
from pathlib import Path

import pytest
import torch

from nemo_like import FSDP2, parallelize
from nemo_like.models import resolve_model
from nemo_like.options import PipelineParallel, TensorParallel
from nemo_like.planning.fit import fit
from nemo_like.planning.fit.report import recipe
from nemo_like.recipes import pretrain
from tests.checks import labelled
from tests.models.fit_models import llama
from tests_distributed.allocated import loop_peak_bytes, pipeline_peak_bytes
from tests_distributed.counting import heard
from tests_distributed.spawn import run_ranks


def _run(rank, world_size, limit, pins):
    best = fit(llama(), gpus=world_size, gpu="cpu", seq_len=64, global_batch=8, memory=limit, **pins).best
    model = parallelize(llama(), device="cpu", **best.kwargs())
    batch = labelled(torch.randint(512, (best.layout.micro_batch, 64)))
    return best.call(), best.peak_bytes, loop_peak_bytes(model, batch, microbatches=best.layout.grad_accum)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "pins",
    [
        {"ac": "plan", "micro_batch": 4, "offload": "none", "cp": 1, "tp": 1},
        {"ac": "full", "cp": 2, "micro_batch": 4, "offload": "none", "loss": "model", "sync": "every"},
    ],
)
def test_the_best_for_two_ranks_runs_and_peaks_as_predicted(pins):
    found = run_ranks(2, _run, 3 << 20, pins, timeout=280)
    assert len({call for call, _, _ in found}) == 1
    for call, predicted, measured in found:
        assert predicted <= 3 << 20
        assert abs(predicted - measured) <= 0.01 * measured, (call, predicted, measured)


def _run_stages(rank, world_size, limit, pins):
    best = fit(llama(4), gpus=world_size, gpu="cpu", seq_len=64, global_batch=8, memory=limit, pp=2, **pins).best
    pipeline = parallelize(llama(4), device="cpu", **best.kwargs())
    peak = pipeline_peak_bytes(pipeline, labelled(torch.randint(512, (8, 64), generator=torch.Generator().manual_seed(0))))
    return best.call(), best.peak_bytes, peak, _train_on_more(pipeline)


def _train_on_more(pipeline):
    """Two steps on batches of more rows than were planned for; how often each said so, and the largest difference between a
    gradient of the second and the whole model's."""
    lines, whole, said = heard(), llama(4), []
    params = dict(pipeline.named_parameters())
    ids = torch.randint(512, (16, 64), generator=torch.Generator().manual_seed(1))
    for rows in (8, 16, 16):
        for param in params.values():
            param.grad = None
        pipeline.step(input_ids=ids[:rows], labels=ids[:rows])
        said.append(sum("A batch is larger" in line for line in lines))
    whole(input_ids=ids, labels=ids).loss.backward()
    grads = {name: param.grad for name, param in whole.named_parameters()}
    return said, max(float((grads[name] - param.grad).abs().max()) for name, param in params.items())


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "pins",
    [
        {"micro_batch": 2, "schedule": "1f1b", "ac": "full", "loss": "model", "offload": "none"},
        # Plans of layers, which are searched for some seconds, and several schedules.
        {"micro_batch": 2, "schedule": "1f1b", "ac": "plan", "loss": "model", "offload": "none"},
        {"micro_batch": 1, "schedule": ["interleaved_1f1b", "zbv"], "ac": "full", "loss": "model"},
    ],
)
def test_the_best_pipeline_for_two_ranks_runs_and_peaks_as_predicted(pins):
    found = run_ranks(2, _run_stages, 3 << 20, pins, timeout=280)
    (call, predicted, _, _), worst = found[0], max(measured for _, _, measured, _ in found)
    assert {other for other, *_ in found} == {call} and re.search(r"pp=(2|PipelineParallel\(size=2)", call)
    assert [said for *_, (said, _) in found] == [[0, 1, 1], [0, 0, 0]]  # once, on rank zero
    assert all(off < 1e-6 for *_, (_, off) in found)
    assert predicted <= 3 << 20
    assert abs(predicted - worst) <= 0.01 * worst, (call, predicted, worst)


TINY = {
    "model_type": "llama", "hidden_size": 48, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 64, "use_cache": False,
    "architectures": ["LlamaForCausalLM"],
}  # fmt: skip
ONE = [
    {"ac": "plan", "loss": "chunked", "micro_batch": 2, "memory": "3MiB"},
    {"ac": "selective", "loss": "model", "micro_batch": 4, "precision": "bf16", "offload": "boundary"},
]
TWO = [
    {"ac": "full", "loss": "model", "micro_batch": 2, "reshard_after_forward": False, "cpu_offload": True, "tp": 1,
     "cp": 1},
    {"ac": "selective", "loss": "chunked", "micro_batch": 4, "tp": 2, "cp": 1},
    {"ac": "full", "loss": "model", "micro_batch": 2, "pp": 2, "schedule": "1f1b"},
]  # fmt: skip


def _run_lines(rank, world_size, config, data, asked):
    """Losses of the recipe's two steps, and of one step of the pasted line."""
    said = {"gpus": world_size, "gpu": "cpu", "seq_len": 64, "global_batch": 8, "offload": "none"} | asked
    report = fit(config, **said)
    best = report.best
    ids = torch.randint(256, (best.layout.micro_batch, 64), generator=torch.Generator().manual_seed(1))
    names = {each.__name__: each for each in (parallelize, FSDP2, PipelineParallel, TensorParallel)}
    names |= {"model": resolve_model(config).build(), "batch": {"input_ids": ids, "labels": ids}}
    exec(best.call(), names)
    model, whole = names.get("pipeline", names["model"]), ids.repeat(best.layout.grad_accum, 1)
    staged = best.layout.pp > 1
    pasted = model.step(input_ids=whole, labels=whole) if staged else model(input_ids=ids, labels=ids).loss
    command, out = recipe(report, best), Path(data).parent / "run.json"
    begin, words = re.split(r"-m nemo_like\.recipes\.pretrain ", command)
    more = ["--data", data, "--steps", "2", "--device", "cpu", "--eval-samples", "0", "--json", str(out)]
    assert pretrain.main([*shlex.split(words), *more]) == 0, command
    assert (begin == "python ") == (world_size == 1) and f"--global-batch {best.layout.sequences}" in words
    return command, float(pasted.detach()), json.loads(out.read_text())["losses"] if rank == 0 else None


def _check_lines(command, pasted, losses, asked):
    assert len(losses) == 2 and all(0 < loss < 10 for loss in [pasted, *losses]), (command, pasted, losses)
    if "reshard_after_forward" in asked:
        assert "--reshard-after-forward no" in command and "--cpu-offload" in command
    if "plan" in asked.values():
        assert re.search(r"--ac [\d.]+[KMG]iB", command)


def _inputs(folder):
    (folder / "config.json").write_text(json.dumps(TINY))
    (folder / "text.txt").write_text("a text that is learned, " * 400)
    return str(folder / "config.json"), str(folder / "text.txt")


@pytest.mark.few(1)
@pytest.mark.parametrize("asked", ONE[::-1])
def test_both_lines_run_on_one_device(tmp_path, asked):
    _check_lines(*_run_lines(0, 1, *_inputs(tmp_path), asked), asked)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "asked",
    [
        pytest.param(TWO[0], id="kept gathered, on the host"),
        pytest.param(TWO[1], id="tp", marks=pytest.mark.long),
        pytest.param(TWO[2], id="stages"),
    ],
)
def test_both_lines_run_on_two_ranks(tmp_path, asked):
    _check_lines(*run_ranks(2, _run_lines, *_inputs(tmp_path), asked, timeout=280)[0], asked)
