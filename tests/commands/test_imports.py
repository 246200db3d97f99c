"""Commands import no more than they need: seconds before the first line of a report."""

import json
import subprocess
import sys

import pytest

PARTITIONER = {"torch._functorch.partitioners": "eleven names of operators", "networkx": "the partitioner's"}
PIPELINES = {"torch.distributed.pipelining": "pp alone runs them"}
CACHES = {"torch._inductor.codecache": "nothing is compiled", "torch.export.pt2_archive": "of inductor's caches"}
COMPILER = {"torch._dynamo": "nothing is compiled", "torch._inductor": "nothing is compiled"}
OTHERS = {"transformers": "the model is the caller's"}
TORCH = dict.fromkeys(("torch", "transformers", "numpy"), "a table or a file alone")
HELD = {
    "plan --model job:build --gpus 2 --gpu h100-80gb": PIPELINES | PARTITIONER | CACHES | OTHERS,  # fake tensors have Dynamo
    "layers --model job:build": PIPELINES | PARTITIONER | CACHES | OTHERS | COMPILER,
    "gpus": TORCH,
    "models": TORCH,
    "explain out_of_memory.log": TORCH,
}
"""Modules that a command does not import, with the reason. transformers imports Dynamo itself, so a preset's is not held."""
JOB = """
import torch

def build():
    layers = torch.nn.ModuleList(torch.nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(2))
    return torch.nn.Sequential(*layers), torch.ones(2, 4, 8)
"""
MESSAGE = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of "
    "which 1.00 GiB is free. Of the allocated memory 70.00 GiB is allocated by PyTorch, and 6.00 GiB is reserved by PyTorch "
    "but unallocated."
)


LONG = {"plan": [pytest.mark.long]}


@pytest.mark.parametrize("command", [pytest.param(name, marks=LONG.get(name.split()[0], ())) for name in HELD])
def test_a_command_imports_no_more_than_it_needs(command, tmp_path):
    (tmp_path / "job.py").write_text(JOB)
    (tmp_path / "out_of_memory.log").write_text(MESSAGE)
    program = (
        f"import json, sys\nfrom nemo_like.cli import main\nmain({command.split()})\nprint(json.dumps(list(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) > 2, done.stderr  # the command has printed
    assert not HELD[command].keys() & json.loads(lines[-1])
