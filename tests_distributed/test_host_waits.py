"""Where the host waits for the device in a step that is like the ones before.

Reading a number of a tensor waits until all that was queued has run. What waits is allowed by name, with its reason; the
CPU's ranks show it, since the same operators run. What the host has made itself (numbers of micro-batches) is no wait.
"""

from __future__ import annotations

import ast
import inspect
import sys
import traceback
from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from nemo_like import ContextParallel, PipelineParallel, parallelize, torch_compat
from nemo_like.distributed.context import whole_loss
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
        """What `tolist` reads on the CPU is no operator."""
        self._tolist = Tensor.tolist

        def tolist(tensor: Tensor) -> Any:
            self.seen[_caller()] += 1
            return self._tolist(tensor)

        Tensor.tolist = tolist
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        Tensor.tolist = self._tolist


def _caller() -> str:
    """The innermost function of the package, else of transformers."""
    frames = (frame for frame, _ in traceback.walk_stack(sys._getframe(2)))
    names = [f"{frame.f_globals.get('__name__', '')}.{frame.f_code.co_qualname}" for frame in frames]
    of = [name for prefix in ("nemo_like.", "transformers.") for name in names if name.startswith(prefix)]
    return of[0].partition(".<locals>")[0] if of else "torch"


TRANSFORMERS = {"transformers.masking_utils.find_packed_sequence_indices"}  # reads positions where there is no mask
DOCUMENTS = "nemo_like.distributed.documents.PackedCalls._numbers"  # a mask may number documents: other kernels then
RESTARTS = "nemo_like.distributed.context.parts.documents_of"  # positions may restart: the same
SCATTERED, APART = (
    f"nemo_like.distributed.{name}" for name in ("documents.refuse_scattered", "documents.PackedCalls._apart")
)
PACKED = TRANSFORMERS | {RESTARTS, SCATTERED, APART}
# On an accelerator the device stops instead, and nobody waits; losses look at values on the CPU alone.
ON_THE_CPU = {
    "nemo_like.torch_compat.stop_unless",
    "nemo_like.losses.rows.CrossEntropyRows.check",
    "nemo_like.losses.rows._some_do_not_count",
    "nemo_like.losses.cross_entropy.LossInForward.backward",
}
PIPELINE = {
    "nemo_like.distributed.pipeline.cut.StageForward.__call__",  # the number of a micro-batch, on the host
    "nemo_like.distributed.pipeline.cut.StageForward._output",
    "nemo_like.distributed.pipeline.loss_mean._ignored",  # labels that count, before the first stage begins
    "nemo_like.distributed.pipeline.loss_mean.LossMean._shares",
    "nemo_like.distributed.pipeline.loss_mean.LossMean.check",
}
ROUTING = {  # who sends how many tokens to whom: one wait a layer, in `route`; the numbers are on the host from there on
    "nemo_like.distributed.expert.exchange.route",
    "nemo_like.distributed.expert.exchange.Exchange.send",
}
RANDOM = {"nemo_like.distributed.tensor.shared_random.SharedRandom._differing"}  # states of generators, of the hosts
CASES: dict[str, tuple[str, str, dict[str, Any], set[str]]] = {
    "dense": ("llama", "", {}, TRANSFORMERS),
    "a mask of ones": ("llama", "mask", {}, {DOCUMENTS, "nemo_like.distributed.documents._MaskOfDocuments.__call__"}),
    "positions": ("llama", "positions", {}, TRANSFORMERS | {RESTARTS}),
    "packed": ("llama", "packed", {}, PACKED),
    "chunked": ("llama", "", {"loss": "chunked"}, TRANSFORMERS),
    "cp": ("llama", "", {"cp": 2}, set()),
    "cp, divided": ("llama", "items", {"cp": 2}, set()),
    "ring": ("llama", "", {"cp": ContextParallel(2, "ring")}, set()),
    "ulysses": ("llama", "", {"cp": ContextParallel(2, "ulysses")}, set()),
    "cp, packed": ("llama", "packed", {"cp": 2}, PACKED - TRANSFORMERS),
    "tp with dropout": ("llama", "dropout", {"tp": 2}, TRANSFORMERS | RANDOM),
    "ep": ("mixtral", "", {"ep": 2}, TRANSFORMERS | ROUTING),
    "pp": ("llama", "", {"pp": PipelineParallel(2, microbatches=2)}, PIPELINE),
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
    assert set(seen.seen) - ON_THE_CPU == allowed, seen.seen
    assert all(number == 1 for by, number in seen.seen.items() if by == DOCUMENTS or by in TRANSFORMERS), seen.seen


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


def test_a_message_that_cuda_refuses_at_the_call_is_refused_on_every_device() -> None:
    """Judge: `_assert_async_msg_cuda` takes fewer than 255 characters, MPS fewer than 250 (aten/src/ATen/native)."""
    for device in ("cpu", "meta"):
        with pytest.raises(ValueError, match="message has 250 characters"):
            torch_compat.stop_unless(torch.ones((), dtype=torch.bool, device=device), "x" * 250)
    tree = ast.parse(inspect.getsource(whole_loss))
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "stop_unless"]
    assert len(calls) == 2
    for call in calls:  # a literal by its name
        assert len(getattr(whole_loss, ast.unparse(call.args[1]))) < 250
