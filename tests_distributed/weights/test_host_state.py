"""Parameters, gradients and optimizer state in CPU memory (``FSDP2(cpu_offload=True)``): what is left on the device.

Without a GPU the device is played: each copy that FSDP2 makes between host and device becomes one, and what lies in
storages that the host has is not counted.
"""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from nemo_like import Job, parallelize
from nemo_like._util.tensors import tensors_in
from nemo_like.options import FSDP2, Precision
from nemo_like.planning.devices import resolve_device
from nemo_like.planning.predictions.rank import parts_at_peak, peak_of
from nemo_like.planning.query import PlanQuery
from nemo_like.planning.sharding import ParameterForms, sharding_of
from tests.checks import labelled
from tests.models.fit_models import llama
from tests.planning.queries import part_of
from tests_distributed.allocated import loop_peak_bytes
from tests_distributed.spawn import on_ranks, run_ranks


class DeviceBytes(TorchDispatchMode):
    """Of what operators make, the most bytes alive at a time that are not the host's."""

    def __init__(self, *existing: torch.Tensor) -> None:
        super().__init__()
        self.existing = {StorageWeakRef(t.untyped_storage()).cdata for t in existing}
        self.made: dict[int, StorageWeakRef] = {}
        self.on_host: dict[int, StorageWeakRef] = {}
        self.making_for_host, self.peak = False, 0

    def is_host(self, storage: torch.UntypedStorage) -> bool:
        key = StorageWeakRef(storage).cdata
        return key in self.existing or (key in self.on_host and not self.on_host[key].expired())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.making_for_host:
            return result
        # A view of what no operator made is of a collective's copy: gloo makes them, a GPU's collectives do not.
        given = {StorageWeakRef(t.untyped_storage()).cdata for t in tensors_in((args, kwargs or {}))}
        for leaf in tensors_in(result):
            reference = StorageWeakRef(leaf.untyped_storage())
            if reference.cdata not in given and not self.is_host(leaf.untyped_storage()):
                self.made[reference.cdata] = reference
        self.peak = max(self.peak, self.now())
        return result

    def now(self) -> int:
        found = 0
        for key, reference in list(self.made.items()):
            storage = None if reference.expired() else torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                del self.made[key]
            elif not self.is_host(storage):
                found += storage.nbytes()  # FSDP2 frees what it has gathered by making the storage empty
        return found


def copies_between(device: DeviceBytes) -> tuple[Callable[..., torch.Tensor], list[int]]:
    """`torch.Tensor.to`, but that FSDP2's copies from one memory to the other, which do nothing on the CPU, make one; and
    what they copied, bytes."""
    plain, sizes = torch.Tensor.to, list[int]()

    def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if "non_blocking" not in kwargs:
            return plain(tensor, *args, **kwargs)
        device.making_for_host = not device.is_host(tensor.untyped_storage())
        copy = tensor.clone()
        sizes.append(copy.untyped_storage().nbytes())
        if device.making_for_host:
            reference = StorageWeakRef(copy.untyped_storage())
            device.on_host[reference.cdata] = reference
        device.making_for_host = False
        return copy

    return to, sizes


def _played(rank: int, world_size: int, precision: str | None, tokens: int) -> list[Any]:
    fsdp, cast = FSDP2(cpu_offload=True), Precision.of(precision)
    ids = torch.randint(512, (1, tokens), generator=torch.Generator().manual_seed(rank))
    sample = {"input_ids": ids, "labels": ids}
    query = PlanQuery.from_model(
        llama(2), sample, Job.of(strategy=fsdp, world_size=world_size, precision=cast, gpu=resolve_device("cpu"))
    )
    stage, part = query.stages[0], part_of(query)
    forms = ParameterForms(part.model, part.layers, whole=False, trained=part.trained)
    stage.__dict__["sharding"] = sharding_of(forms, shard_ranks=world_size, precision=cast, fsdp=fsdp, host=True)
    predicted = peak_of(query, query.uniform("full"))
    model = parallelize(llama(2), fsdp, ac="full", precision=precision, device="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    peaks = []
    with DeviceBytes(*(p.to_local() for p in model.parameters()), *model.buffers(), ids) as device:
        for _ in range(5):
            device.peak = 0
            to, copied = copies_between(device)
            with mock.patch.object(torch.Tensor, "to", to):
                out = model(**sample)
                out.loss.backward()
            optimizer.zero_grad()
            peaks.append(device.peak)
    # The first step has no output of a step before it. Now and then a thread of gloo drops a buffer late.
    units = stage.sharding.all
    sizes = sum(
        unit.host_shard * (2 if unit.reshard and unit.kind != "embedding" else 1) + unit.host_grad for unit in units
    )
    return [predicted.total, min(peaks[1:]), sizes, sum(copied), parts_at_peak(query, 0, query.uniform("full"))]


@pytest.mark.few(1)
@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("tokens", [8, 64])
def test_what_is_on_the_device_is_what_was_gathered_and_computed(precision: str | None, tokens: int) -> None:
    ranks = run_ranks(2, _played, precision, tokens, timeout=120)
    predicted, _, sizes, copied, parts = ranks[0]
    assert not {"parameters", "optimizer state", "gradients"} & parts.keys()
    assert predicted == min(measured for _, measured, *_ in ranks) and sizes == copied, (ranks, parts)


@on_ranks(2, timeout=120)
def test_on_the_cpu_nothing_is_left_out(rank: int, world_size: int) -> None:
    """There, host and device memory are one."""
    fsdp = FSDP2(cpu_offload=True)
    sample = labelled(torch.randint(512, (4, 64), generator=torch.Generator().manual_seed(rank)))
    query = PlanQuery.from_model(
        llama(2), sample, Job.of(strategy=fsdp, world_size=world_size, gpu=resolve_device("cpu"))
    )
    model = parallelize(llama(2), fsdp, ac="full", device="cpu")
    predicted, measured = peak_of(query, query.uniform("full")).total, loop_peak_bytes(model, sample)
    assert abs(predicted - measured) <= 0.01 * measured
