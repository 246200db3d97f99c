"""The training job with `--pp`: the losses of one process, and checkpoints that any number of stages reads."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import pytest
import torch

from nemo_like.recipes.pretrain import main
from tests_distributed.recipes.pretrain_job import LLAMA, run_job
from tests_distributed.spawn import run_ranks

transformers = pytest.importorskip("transformers")


def _names_of(folder: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(str(folder / "model.safetensors"), "pt") as file:
        return list(file.keys())


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("job")
    (folder / "config.json").write_text(json.dumps(LLAMA | {"num_hidden_layers": 4}))
    (folder / "text.txt").write_text("".join(f"{i} bottles of beer on the wall.\n" for i in range(400)))
    line = "--seq-len 16 --batch-size 8 --schedule constant --warmup-steps 1 --eval-samples 6 --eval-every 0"
    return [
        *line.split(),
        "--data",
        str(folder / "text.txt"),
        "--model",
        str(folder / "config.json"),
        "--device",
        "cpu",
    ]


@pytest.mark.long
def test_stages_train_as_one_process_and_resume_on_another_number_of_them(job: list[str], tmp_path: Path) -> None:
    whole = run_job(1, [*job, "--steps", "9"], tmp_path / "whole")
    kept = [*job, "--checkpoint-dir", str(tmp_path / "kept"), "--keep", "9", "--save-every", "3"]
    runs = [
        run_job(2, [*kept, "--steps", "3", "--pp", "2", "--pp-schedule", "zbv", "--ac", "30MiB"], tmp_path / "first"),
        run_job(1, [*kept, "--steps", "6", "--resume"], tmp_path / "second"),
        run_job(
            4,
            [
                *kept,
                "--steps",
                "9",
                "--resume",
                "--pp",
                "2",
                "--cp",
                "2",
                "--ac",
                "full",
                "--loss",
                "chunked",
                "--export",
                str(tmp_path / "folder"),
            ],
            tmp_path / "third",
        ),
    ]
    assert [run["first_step"] for run in runs] == [0, 3, 6]
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "folder")
    assert sorted(dict(exported.named_parameters())) == sorted(_names_of(tmp_path / "folder"))
    found = torch.tensor([loss for run in runs for loss in run["losses"]])
    torch.testing.assert_close(found, torch.tensor(whole["losses"]), rtol=1e-5, atol=0)
    assert runs[-1]["eval_losses"][-1]["loss"] == pytest.approx(whole["eval_losses"][-1]["loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--pp 3", "--pp is 3, which does not divide the 2 rank"),
        ("--pp 2 --grad-accum 1 --batch-size 8 --pack", "--pack is True with --pp 2"),
        ("--pp 2 --pp-schedule dualpipev --grad-accum 2", "--pp, --pp-schedule and --grad-accum: microbatches is 2"),
        ("--pp 2 --strategy ddp", "--strategy is 'ddp' with --pp 2"),
    ],
)
def test_what_a_pipeline_cannot_have(job: list[str], line: str, message: str, tmp_path: Path) -> None:
    codes = run_ranks(2, _refused, [*job, "--steps", "1", *line.split()], str(tmp_path), init_group=False)
    assert codes == [2, 2]
    assert message in (tmp_path / "said-0").read_text()


def _refused(rank: int, world_size: int, arguments: list[str], folder: str) -> int:
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            code = main(arguments)
        except SystemExit as ended:
            code = int(ended.code or 0)
    (Path(folder) / f"said-{rank}").write_text(said.getvalue())
    return code
