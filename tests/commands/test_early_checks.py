"""Wrong input is refused in a line, before torch is imported, and what is near to it is named."""

import json
import re
import subprocess
import sys

import pytest

WRONG = {
    "plann": "invalid choice: 'plann'.*Did you mean 'plan'?",
    "plan": "the following arguments are required: --model",
    "plan --model llama-tiny --seqlen 3": "unrecognized arguments: --seqlen 3. Did you mean '--seq-len'?",
    "plan --model llama-tyny": "or 'module:function'. Did you mean 'llama-tiny'?",
    "plan --model meta-llama/Llama-3.1-8B": "looks like a Hub name, and nothing is downloaded here",
    "plan --model llama-tiny --gpus 8 --tp 3": "--tp 3 does not divide --gpus 8. Use --tp 1, --tp 2, --tp 4 or --tp 8.",
    "plan --model llama-tiny --batch-size -1": "--batch-size is -1; it must be a whole number >= 1.",
    "plan --model llama-tiny --seq-len many": "'many' is neither a whole number nor max",
    "plan --model llama-tiny --gpu h200x": "nor a file. Did you mean 'h200'?",
    "plan --model llama-tiny --precision int3": "--precision is 'int3'; it must be a torch dtype or one of",
    "fit --gpus 8": "--model is needed",
    "fit --model llama-tiny --gpus 8 --pp 3": "--pp 3 does not divide --gpus 8",
    "fit --model llama-tiny --gpus 0": "--gpus is 0; it must be a whole number >= 1.",
    "profile --model nothere.json": "'nothere.json' is not a preset",
    "finetune --data x": "--model is needed: --model DIR --data FILE.jsonl.",
    "finetune --model m --data nowhere.jsonl": "--data is 'nowhere.jsonl', and nothing exists there.",
    "pretrain --tp 3": "--tp 3 does not divide the 1 rank(s). Use --tp 1.",
    "pretrain --lr -1": "--lr is -1.0",
}
PROGRAM = """
import contextlib, io, json, sys
from nemo_like.cli import main
results = []
for line in json.loads(sys.argv[1]):
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            code = main(line.split())
        except SystemExit as ended:
            code = ended.code
    results.append((code, said.getvalue()))
print(json.dumps([results, "torch" in sys.modules]))
"""


@pytest.fixture(scope="module")
def refused() -> dict[str, tuple[int, str]]:
    """The exit code of each line, and what it wrote; torch is not imported for any."""
    command = [sys.executable, "-c", PROGRAM, json.dumps(list(WRONG))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    results, torch_is_there = json.loads(done.stdout)
    assert not torch_is_there and len(results) == len(WRONG)
    return dict(zip(WRONG, map(tuple, results)))


@pytest.mark.parametrize("line", WRONG)
def test_wrong_input_is_refused_in_a_line_without_torch(refused: dict[str, tuple[int, str]], line: str) -> None:
    code, said = refused[line]
    assert code == 2 and len(said.splitlines()) == 1
    assert WRONG[line] in said or re.search(WRONG[line].replace("?", r"\?"), said), said


def test_lists_and_the_overview_need_no_torch() -> None:
    """Every line of help fits 80 columns; the lists have what the errors name."""
    program = (
        "import sys\nfrom nemo_like.cli import main\nfor line in ([], ['gpus'], ['models']):\n    main(line)\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert max(map(len, done.stdout.splitlines())) <= 80
    words = ("without a GPU:", "measure:", "train:", "h100-80gb", "llama3-8b", "989.4 TFLOP/s")
    assert not [word for word in words if word not in done.stdout]
