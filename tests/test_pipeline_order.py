"""The order in which ranks of a pipeline send and receive in an evaluation, where each send waits for its receive."""

import queue
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from nemo_like.distributed.pipeline.pipeline import Pipeline
from nemo_like.distributed.pipeline.schedules import stages_of
from nemo_like.options import PipelineParallel
from nemo_like.options.pipelining import SCHEDULES

SECONDS = 20
"""After which a rank is said to wait forever."""


class Meeting:
    """Sends and receives of threads: each ends when its other side is there, and a rank's run one after the other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.of_thread = threading.local()
        self.sent: dict[tuple[int, int], queue.Queue[Any]] = {}
        self.taken: dict[tuple[int, int], queue.Queue[None]] = {}
        for ends in ((a, b) for a in range(4) for b in range(4)):
            self.sent[ends], self.taken[ends] = queue.Queue(), queue.Queue()
        monkeypatch.setattr(dist, "get_rank", lambda group: self.of_thread.rank)
        monkeypatch.setattr(dist, "isend", self.send)
        monkeypatch.setattr(dist, "recv", self.receive)

    def send(self, tensor: Tensor, group: object, group_dst: int) -> Any:
        ends = self.of_thread.rank, group_dst
        self.sent[ends].put(tensor)
        self.taken[ends].get(timeout=SECONDS)
        return SimpleNamespace(wait=lambda: None)

    def receive(self, tensor: Tensor, group: object, group_src: int) -> None:
        ends = group_src, self.of_thread.rank
        tensor.copy_(self.sent[ends].get(timeout=SECONDS))
        self.taken[ends].put(None)


def _stage(index: int, last: int) -> Any:
    """Adds its number to a micro-batch's; the last one answers with a number."""

    def module(given: Tensor, *, microbatch: Tensor) -> Tensor:
        made = given.double() * 10 + index
        return made.reshape(()) if index == last else made.reshape(1)

    return SimpleNamespace(
        slice=SimpleNamespace(index=index, is_first=index == 0, is_last=index == last), module=module
    )


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_evaluation_ends(schedule: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    options = PipelineParallel(ranks, schedule, microbatches=2 * ranks)
    of_ranks = [stages_of(options, rank) for rank in range(ranks)]
    last = max(index for indices in of_ranks for index in indices)
    meeting, losses = Meeting(monkeypatch), dict[int, Any]()

    def run(rank: int) -> None:
        meeting.of_thread.rank = rank
        form = torch.empty(1, dtype=torch.float64)
        mine = SimpleNamespace(
            options=options, stages=[_stage(index, last) for index in of_ranks[rank]], group=None,
            device=torch.device("cpu"), _received_by=lambda *_: [form],
        )  # fmt: skip
        losses[rank] = Pipeline._forward(mine, (1, 1))  # type: ignore[arg-type]

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS + 5)
    assert len(losses) == ranks, f"ranks {sorted(set(range(ranks)) - losses.keys())} wait for each other"
    (answers,) = [found for found in losses.values() if len(found)]
    digits = int("".join(map(str, range(last + 1))))
    assert [float(one) for one in answers] == [number * 10 ** (last + 1) + digits for number in range(2 * ranks)]
