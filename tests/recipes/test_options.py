"""PretrainOptions of the training job: each wrong value is refused with the option, the value and the way out."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from nemo_like.recipes.command_line import parse_options
from nemo_like.recipes.options import PretrainOptions

WRONG = {
    "--strategy fsdp1": r"--strategy is 'fsdp1'; it must be one of fsdp2, ddp, single\. Did you mean 'fsdp2'\?",
    "--ac selectiv": r"--ac: ac is 'selectiv'.*Did you mean 'selective'",
    "--loss chunkd": r"--loss is 'chunkd'; it must be one of model, chunked\. Did you mean 'chunked'\?",
    "--compile inducter": r"--compile is 'inducter'.*Did you mean 'inductor'",
    "--precision int8": r"--precision is 'int8'; it must be a torch dtype",
    "--precision fp16": r"--precision is 'fp16': its small range needs the loss to be scaled.*Use bfloat16",
    "--device tpu": r"--device is 'tpu'; it must be one of auto, cpu, cuda",
    "--schedule step": r"--schedule is 'step'; it must be one of cosine",
    "--resume=maybe": r"--resume is 'maybe'; it must be one of no, must, auto",
    "--resume": r"--resume needs --checkpoint-dir",
    "--steps 0": r"--steps is 0; it must be a finite number >= 1",
    "--lr nan": r"--lr is nan; it must be a finite number",
    "--lr -1": r"--lr is -1.0",
    "--beta2 1": r"--beta2 is 1.0; it must be less than 1",
    "--grad-accum 3": r"--grad-accum is 3, which does not divide --batch-size 8",
    "--json /nowhere/at/all.json": r"--json names a file in '/nowhere/at', which is not an existing folder",
    "--steps many": r"--steps: invalid int value: 'many'",
    "--step-size 3": r"unrecognized arguments: --step-size 3",
}


@pytest.mark.parametrize("line", WRONG)
def test_wrong_option_ends_with_code_2_and_says_why(line: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        parse_options("pretrain", line.split())
    assert ended.value.code == 2
    written = capsys.readouterr()
    assert written.out == ""
    assert re.search(WRONG[line], written.err)


def test_command_line_and_dataclass_are_the_same_options(tmp_path: Path):
    assert parse_options("pretrain", []) == PretrainOptions()
    given = PretrainOptions(
        strategy="ddp", ac="40GiB", steps=7, lr=0.5, sync_save=True, checkpoint_dir=str(tmp_path), resume="must"
    )
    line = f"--strategy DDP --ac 40GiB --steps 7 --lr .5 --sync-save --checkpoint-dir {tmp_path} --resume"
    assert parse_options("pretrain", line.split()) == given


def test_every_option_is_explained(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        parse_options("pretrain", ["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for field in dataclasses.fields(PretrainOptions):
        assert re.search(rf"--{field.name.replace('_', '-')}[ ,\n]", text)
        assert len(field.metadata["help"]) > 10


def test_scope_may_be_several():
    assert PretrainOptions(scope="vision,audio").job().ac_scope == ("vision", "audio")
    assert PretrainOptions(scope="all").job().ac_scope == "all"
