"""What the tests of the training job share: its model, and a run of it on several ranks."""

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nemo_like.recipes.pretrain import main
from tests_distributed.spawn import run_ranks

LLAMA = {
    "model_type": "llama", "vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip


def run_main(rank: int, world_size: int, arguments: list[str]) -> int:
    """The job on one rank; its exit code."""
    return main(arguments)


def run_job(world_size: int, arguments: list[str], summary: Path) -> dict[str, Any]:
    """The job on all ranks, which must end well; what it wrote to `summary`."""
    codes = run_ranks(world_size, run_main, [*arguments, "--json", str(summary)], init_group=False, timeout=200)
    assert codes == [0] * world_size
    return json.loads(summary.read_text())


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Return once the condition holds; fail where the process ends before."""
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, process.communicate(timeout=60)[0]
        assert time.monotonic() < deadline, "torchrun is too slow"
        time.sleep(0.005)


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    """Process ids of the launcher's children, by rank."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    environments = {int(pid): Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") for pid in children}
    ranks = {pid: next((v[5:] for v in env if v.startswith(b"RANK=")), None) for pid, env in environments.items()}
    return sorted((pid for pid, rank in ranks.items() if rank is not None), key=lambda pid: int(ranks[pid]))
