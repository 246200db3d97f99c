"""Where the host waits for the device in a step that is like the ones before.

Reading a number of a tensor waits until all that was queued has run. What waits is allowed by name, with its reason; the
CPU's ranks show it, since the same operators run. What the host has made itself (numbers of micro-batches) is no wait.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import nemo_like
from nemo_like import ContextParallel, PipelineParallel, parallelize, torch_compat
from nemo_like.distributed.pipeline import Pipeline
from nemo_like.distributed.pipeline.loss_mean import LossMean
from nemo_like.distributed.ranks import Ranks
from nemo_like.torch_compat import TorchDispatchMode
from tests.models.families import FAMILIES, HEADED, causal
from tests_distributed.spawn import on_ranks

WAITS = ("_local_scalar_dense", "equal", "is_nonzero", "nonzero", "_unique2", "unique_dim", "masked_select", "bincount")


class HostWaits(TorchDispatchMode):
    """Counts operators whose result the host reads, by the function that called them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in WAITS:
            self.seen[_caller()] += 1
        return func(*args, **(kwargs or {}))

    def __enter__(self) -> HostWaits:
        """On the CPU `tolist` and `cpu` are no operators."""
        self._tolist = Tensor.tolist

        self._cpu = Tensor.cpu

        def tolist(tensor: Tensor) -> Any:
            self.seen[_caller()] += 1
            return self._tolist(tensor)

        def cpu(tensor: Tensor) -> Tensor:
            self.seen[f"{_caller()}: cpu"] += 1
            return self._cpu(tensor)

        Tensor.tolist, Tensor.cpu = tolist, cpu  # type: ignore[method-assign]
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        Tensor.tolist, Tensor.cpu = self._tolist, self._cpu  # type: ignore[method-assign]


def _caller() -> str:
    """The innermost function of the package, else of transformers."""
    frames = (frame for frame, _ in traceback.walk_stack(sys._getframe(2)))
    names = [f"{frame.f_globals.get('__name__', '')}.{frame.f_code.co_qualname}" for frame in frames]
    of = [name for prefix in ("nemo_like.", "transformers.") for name in names if name.startswith(prefix)]
    return of[0].partition(".<locals>")[0] if of else "torch"


DOCUMENTS = "nemo_like.distributed.documents.PackedCalls._numbers"  # a mask may number documents: other kernels then
RESTARTS = "nemo_like.distributed.context.parts.documents_of"  # positions may restart: the same
SCATTERED, APART = (
    f"nemo_like.distributed.{name}" for name in ("documents.refuse_scattered", "documents.PackedCalls._apart")
)
PACKED = {RESTARTS, SCATTERED, APART}
# On an accelerator the device stops instead, and nobody waits; losses look at values on the CPU alone.
ON_THE_CPU = {
    "nemo_like.torch_compat.stop_unless",
    "nemo_like.losses.rows.CrossEntropyRows.check",
    "nemo_like.losses.rows._some_do_not_count",
    "nemo_like.losses.cross_entropy.LossInForward.backward",
}
MICROBATCH = "nemo_like.distributed.pipeline.cut.StageForward.__call__"  # the number of one, on the host
SHARES = "nemo_like.distributed.pipeline.loss_mean.LossMean._shares"  # labels that count, of a batch given on the host
LOOKS = {  # in the first calls, and then in every 16th
    "nemo_like.distributed.pipeline.loss_mean._ignored",
    "nemo_like.distributed.pipeline.loss_mean.LossMean.check",
    "nemo_like.distributed.consistency_checks.gather: cpu",
}
ROUTE = "nemo_like.distributed.expert.exchange.route"
ROUTING = {  # who sends how many tokens to whom: one wait a layer; the numbers are on the host from there on
    *(ROUTE, f"{ROUTE}: cpu"),
    "nemo_like.distributed.expert.exchange.Exchange.send",
}
RANDOM = {  # states of generators, of the hosts
    "nemo_like.distributed.consistency_checks.differing",
    "nemo_like.distributed.consistency_checks.gather: cpu",
}
# What the host itself has made, or was given: no device is waited for.
ON_THE_HOST = {MICROBATCH, SHARES, *(LOOKS - {"nemo_like.distributed.pipeline.loss_mean._ignored"})}
ON_THE_HOST |= RANDOM | ROUTING - {f"{ROUTE}: cpu"}
CASES: dict[str, tuple[str, str, dict[str, Any], set[str]]] = {
    "dense": ("llama", "", {}, set()),
    "a mask of ones": ("llama", "mask", {}, {DOCUMENTS, "nemo_like.distributed.documents._MaskOfDocuments.__call__"}),
    "positions": ("llama", "positions", {}, {RESTARTS}),
    "packed": ("llama", "packed", {}, PACKED),
    "chunked": ("llama", "", {"loss": "chunked"}, set()),
    "cp": ("llama", "", {"cp": 2}, set()),
    "cp, divided": ("llama", "items", {"cp": 2}, set()),
    "ring": ("llama", "", {"cp": ContextParallel(2, "ring")}, set()),
    "ulysses": ("llama", "", {"cp": ContextParallel(2, "ulysses")}, set()),
    "cp, packed": ("llama", "packed", {"cp": 2}, PACKED),
    "tp with dropout": ("llama", "dropout", {"tp": 2}, RANDOM),
    "ep": ("mixtral", "", {"ep": 2}, ROUTING),
    "pp": ("llama", "", {"pp": PipelineParallel(2, microbatches=2)}, {MICROBATCH, SHARES} | LOOKS),
}


def _batch(kind: str, rows: int = 4, length: int = 32) -> dict[str, Any]:
    ids = torch.randint(1, 48, (rows, length), generator=torch.Generator().manual_seed(0))
    index = torch.arange(length).expand(rows, -1)
    more: dict[str, dict[str, Any]] = {
        "mask": {"attention_mask": torch.ones_like(ids)},
        "positions": {"position_ids": index},
        "packed": {"position_ids": index.remainder(8)},
        "items": {"num_items_in_batch": torch.tensor(rows * length)},
    }
    return {"input_ids": ids, "labels": ids} | more.get(kind, {})


def _written() -> dict[str, int]:
    """Return the waits of the table in `design.md`: its model has two layers."""
    page = Path(nemo_like.__file__).parents[1] / "docs/reference/how-it-works/design.md"
    text = page.read_text(encoding="utf-8").partition("| step | waits |")[2].partition("\n\n")[0]
    rows = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("| `")]
    numbers = {names: int(number.split()[0]) * (2 if "a layer" in number else 1) for names, number in rows}
    return {name: number for names, number in numbers.items() for name in re.findall("`(.*?)`", names)}


@pytest.mark.parametrize("name", CASES)
@on_ranks(2)
def test_the_host_waits_where_it_is_allowed_to(rank: int, world_size: int, name: str) -> None:
    family, kind, options, allowed = CASES[name]
    batch, seen = _batch(kind), HostWaits()
    pipelined = "pp" in options
    sample = {"sample_input": {key: value[:2] for key, value in batch.items()}} if pipelined else {}
    built = causal("Llama", **HEADED, attention_dropout=0.1)() if kind == "dropout" else FAMILIES[family].build()
    model = parallelize(built.train(), ac="selective", **options, **sample)
    for step in range(3):  # the first two compare what later steps take for known
        with seen if step == 2 else nullcontext():
            if pipelined:
                model.step(**batch)  # type: ignore[operator]
            else:
                model(**batch).loss.backward()
        model.zero_grad()
    waits = {by: number for by, number in seen.seen.items() if by not in ON_THE_CPU}
    assert set(waits) == allowed, waits
    assert sum(number for by, number in waits.items() if by not in ON_THE_HOST) == _written()[name], waits
    assert all(number == 1 for by, number in seen.seen.items() if by == DOCUMENTS), seen.seen


@pytest.mark.parametrize("microbatches", [2, 64])
@on_ranks(2)
def test_a_pipeline_reads_no_number_of_the_device_for_its_microbatches(
    rank: int, world_size: int, microbatches: int
) -> None:
    """One read of labels a step, which were given on the host, and nothing is gathered. Judge: twice the micro-batches."""
    pp = PipelineParallel(2, microbatches=microbatches)
    batch, seen = _batch("", rows=microbatches, length=8), HostWaits()
    model = parallelize(
        FAMILIES["llama"].build().train(), "single", pp=pp, sample_input={key: value[:1] for key, value in batch.items()}
    )
    for _ in range(4):
        model.step(**batch)
    with seen, mock.patch.object(dist, "all_gather", wraps=dist.all_gather) as gathered:
        model.step(**batch)
    assert seen.seen[SHARES] == 1 and set(seen.seen) <= {MICROBATCH, SHARES}, seen.seen
    assert not gathered.called


def test_labels_are_counted_before_they_go_to_the_device() -> None:
    """Judge: nothing can be read on the meta device, which is this pipeline's."""
    batch = _batch("", rows=4)
    batch["labels"][3] = -100
    forward: Any = SimpleNamespace(whole_batch=lambda batch: batch)
    options = PipelineParallel(2, microbatches=2, loss_mean="tokens")
    pipeline: Any = SimpleNamespace(
        stages=[SimpleNamespace(forward=forward)],
        loss_mean=LossMean(nn.Linear(1, 1), options),
        options=options,
        device=torch.device("meta"),
        sequence_parts=list,
    )
    assert Pipeline._cut(pipeline, batch) == (2, 32)
    assert forward.shares == [64 / 96, 32 / 96]
    assert {value.device.type for part in forward.microbatches for value in part.values()} == {"meta"}


@on_ranks(2)
def test_a_signal_of_another_rank_is_not_waited_for(rank: int, world_size: int) -> None:
    """Judge: rank 1 asks only once rank 0 has gone on."""
    ranks, store = Ranks.of_process(torch.device("cpu")), dist.distributed_c10d._get_default_store()
    if rank:
        store.wait(["gone on"])
    largest = ranks.largest_later(5 + rank)
    store.set("gone on", "")
    assert largest() == 6


def test_a_condition_is_not_waited_for_on_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device gets the condition and the words; the CPU raises."""
    given: list[Any] = []
    monkeypatch.setattr(torch, "_assert_async", lambda *args: given.append(args))
    on_device = torch.zeros((), dtype=torch.bool, device="meta")
    torch_compat.stop_unless(on_device, "why")
    assert given == [(on_device, "why")]
    torch_compat.stop_unless(torch.tensor(True), "why")
    with pytest.raises(NotImplementedError, match="why"):
        torch_compat.stop_unless(torch.tensor(False), "why")
