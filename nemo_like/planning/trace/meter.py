"""Count live bytes as a plan does, add gradients as autograd does, and measure op times on the device at hand.

Memory that a kernel takes and gives back within one op is counted where it is known to be large. Workspaces of convolutions
are not: oneDNN and cuDNN choose their algorithms by the device.
"""

from __future__ import annotations

import inspect
import statistics
import sys
import time
from collections.abc import Mapping
from typing import Any

import torch

from nemo_like._util.device_work import wait_for
from nemo_like._util.live_bytes import LiveBytes
from nemo_like._util.op_lookup import find_op
from nemo_like._util.tensors import is_wrapped, map_tensors, tensors_in
from nemo_like.activation_checkpointing.ops import facts
from nemo_like.fake.model_copy import with_state
from nemo_like.fake.run import check_layouts
from nemo_like.planning.trace.block import TraceMismatchError
from nemo_like.planning.trace.kinds import BlockKind
from nemo_like.torch_compat import TorchDispatchMode, storage_use_count, use_count, without_dispatch_modes

_SAFE_SOFTMAX = torch.ops.aten._safe_softmax.default
_FLASH = find_op("aten._scaled_dot_product_flash_attention_for_cpu.default")
_FLASH_BACKWARD = find_op("aten._scaled_dot_product_flash_attention_for_cpu_backward.default")
_SUMS = (torch.ops.aten.sum.default, torch.ops.aten.sum.dim_IntList)


def scratch_bytes(func: Any, args: tuple, kwargs: Mapping[str, Any], out: Any) -> int:
    """Return the most bytes that `func` holds beyond its inputs and its output `out`; 0 where nothing is known."""
    if func is _FLASH:
        return _attention_blocks(args[0], args[1], forward=True)
    if func is _FLASH_BACKWARD:
        return _attention_blocks(args[1], args[2], forward=False)
    if func in _SUMS and out.dtype != args[0].dtype and not args[0].is_floating_point():  # counts of a mask
        return args[0].numel() * out.element_size()
    if (rule := facts(func).scratch) is not None:
        return rule(args, out)
    if (
        func is _SAFE_SOFTMAX
    ):  # which scores are -inf, and which rows are so throughout: attention without a fused kernel
        return out.numel() + out.numel() // max(1, out.shape[-1])
    return 0


def _attention_blocks(query: torch.Tensor, key: torch.Tensor, *, forward: bool) -> int:
    """Return the bytes of the scores that the CPU's kernel keeps of a block of queries and keys for each thread.

    They are in float32; seen in torch 2.13.
    """
    rows, width = query.shape[2], query.shape[3]
    block = 256 if rows >= 768 else 64 if rows >= 192 else 32
    scores = block * min(512, key.shape[2])
    return 4 * torch.get_num_threads() * (scores + block * (width + 2) if forward else 2 * scores)


class TracedBytes(LiveBytes):
    """Counts as a plan does: with `scratch_bytes` in the peak, and no layouts that no plan is made of."""

    def scratch(self, func: Any, args: tuple, kwargs: Mapping[str, Any], out: Any) -> int:
        """Return the bytes that an operator takes and gives back."""
        check_layouts(tensors_in(out))
        return scratch_bytes(func, args, kwargs, out)


class _OpClock(TorchDispatchMode):
    """Time of each op, in order, with its name."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.times: list[tuple[Any, float]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        wait_for(self.device)
        start = time.perf_counter()
        out = func(*args, **(kwargs or {}))
        wait_for(self.device)
        self.times.append((func, time.perf_counter() - start))
        return out


def measured_seconds(
    kind: BlockKind, device: torch.device | str, runs: int = 5, autocast: torch.dtype | None = None
) -> tuple[float, ...]:
    """Return the median time of each computing op of a block over `runs` forward passes with random weights.

    One more pass runs before them, as a warm-up. The block's parameters and inputs are allocated on `device`: this requires
    the memory of one block without checkpointing. Times include the launch, so short ops look as expensive as they are in
    eager mode. `autocast`: the dtype of the autocast that the trace was made under.

    Raises:
        TraceMismatchError: the ops that ran are not those of the block's trace.
    """
    device = torch.device(device)
    assert kind.trace is not None
    wanted = [op.op for op in kind.trace.ops if not op.view]

    def real(value: torch.Tensor) -> torch.Tensor:
        if value.is_floating_point():
            values = torch.randn(value.shape, device=device).mul_(0.02).to(value.dtype)
            return values.requires_grad_(value.requires_grad)
        return torch.zeros(value.shape, dtype=value.dtype, device=device)

    args, kwargs, state = map_tensors(real, (kind.args, kind.kwargs, dict(kind.state)))
    samples: list[list[float]] = []
    for run in range(runs + 1):
        casting = torch.autocast(device.type, autocast, enabled=autocast is not None, cache_enabled=False)
        with _OpClock(device) as clock, casting, with_state(kind.module, state):
            out = kind.run(*args, **kwargs)
        del out
        times = _computing(clock.times, wanted, kind.trace.name)
        if run:  # the first one warms up
            samples.append(times)
    return tuple(statistics.median(column) for column in zip(*samples))


def _computing(times: list[tuple[Any, float]], wanted: list[Any], name: str) -> list[float]:
    """Return the times of the ops in `wanted`, which must occur in this order among all that ran."""
    matched: list[float] = []
    for op, seconds in times:
        if len(matched) < len(wanted) and op is wanted[len(matched)]:
            matched.append(seconds)
    if len(matched) != len(wanted):
        raise TraceMismatchError(
            f"{name}: measuring found {len(matched)} of {len(wanted)} traced ops; the next one, {wanted[len(matched)]}, did "
            "not run on this device in this order. Plan from the device table instead (leave out --measure)."
        )
    return matched


_ADD = torch.ops.aten.add.Tensor
_PUT = torch.ops.aten.index_put.default
_IN_PLACE = {
    _ADD: torch.ops.aten.add_.Tensor,
    torch.ops.aten.scatter_add.default: torch.ops.aten.scatter_add_.default,
    torch.ops.aten.scatter.src: torch.ops.aten.scatter_.src,
    torch.ops.aten.index_add.default: torch.ops.aten.index_add_.default,
    _PUT: torch.ops.aten.index_put_.default,
}
_ENGINE = "torch.autograd.graph"
"""The module whose frame is the caller of whatever autograd's engine runs on the CPU by itself."""


class SumsInPlace(TorchDispatchMode):
    """Mode that adds in place what autograd would.

    Enter it last, so that it sees operators first: what else refers to a tensor is only to be seen from there. Autograd adds
    in place where there are no gradients of gradients and nothing else refers to the first of the two
    (`can_accumulate_inplace` in PyTorch's ``accumulate_grad.h``).
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts = _counts_of_the_last_holder()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch puts a frame of its own between the engine's and ours

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        in_place = _IN_PLACE.get(func)
        if is_wrapped(types):
            in_place = None  # into a tensor made of others (DTensor) autograd adds nothing
        if in_place is not None and self.counts is not None and _by_the_engine(inspect.currentframe()):
            into = args[0]
            # The zeros that the gradient of an index is added to are the engine's own; it writes into a copy of those of
            # what rows were put into.
            alone = len(args) > 3 and args[3] if func is _PUT else _holders(into) == self.counts
            if alone and into.is_contiguous() and (func is not _ADD or _like(into, args[1])):
                return in_place(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _by_the_engine(frame: Any) -> bool:
    """Return whether the engine called the function that `frame` belongs to."""
    caller = None if frame is None else frame.f_back
    return caller is not None and not torch.is_grad_enabled() and caller.f_globals.get("__name__") == _ENGINE


def _holders(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Return how often a tensor, its storage and its Python object are referenced.

    All that Python holds of a tensor (what a hook was given and keeps) is one reference to the tensor. In a real step only
    such a tensor has a Python object; in a fake one each does.
    """
    return use_count(tensor), storage_use_count(tensor), sys.getrefcount(tensor)


def _like(into: Any, other: Any) -> bool:
    return (
        isinstance(into, torch.Tensor)
        and isinstance(other, torch.Tensor)
        and into.shape == other.shape
        and into.dtype == other.dtype
        and into.is_contiguous()
    )


class _CountHolders(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: tuple[int, int, int] | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if func is _ADD and _by_the_engine(inspect.currentframe()):
            into = args[0]
            self.counts = _holders(into)
        return func(*args, **(kwargs or {}))


def _counts_of_the_last_holder() -> tuple[int, int, int] | None:
    """Return the counts of `_holders` for a tensor in a sum of gradients to which nothing else refers.

    They are measured for each run, as the dispatch itself takes references: how many is torch's own affair, and one more
    once a region with a graph break was compiled in this process. A mode of the caller, which may keep what it sees, has no
    part in it.
    """
    with without_dispatch_modes(), _CountHolders() as counting:
        x = torch.ones(2, requires_grad=True) * 2
        torch.autograd.grad((x.exp() + x.sin()).sum(), x)
    return counting.counts
