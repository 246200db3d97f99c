"""Verification: in the first step, the recomputed tensors are compared with those that autograd saved in forward.

Whatever recomputation sees otherwise than forward did, known to us or not, ends in other saved tensors and so in other
gradients. So a region keeps a norm and a signed sum of every tensor that autograd saves in its forward (see `summary`), and
its recomputation is compared with them: tensors that differ raise a `RegionError`.

The first step, for a module, is over with the first recomputation that was compared; for a function that is not a
module, for all of its calls under one name. Until then up to `CALLS` calls are looked at (several forwards may come
before the first backward); from then on none is, and the engine runs not one operator more than without. The
environment variable ``NEMO_LIKE_VERIFY`` is looked at in every call: ``1`` verifies all of them, ``0`` none.

Nothing is verified under `torch.compile` (PyTorch's own checkpoint runs there), on fake tensors, while a CUDA graph is
captured, and where ``preserve_rng_state=False`` requires other random numbers in recomputation, unless the variable is
``1``.
"""

import linecache
import math
import os
from itertools import dropwhile
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from nemo_like._util.code import callers
from nemo_like._util.tensor_summary import summary
from nemo_like.activation_checkpointing.engine.handles import RegionError
from nemo_like.activation_checkpointing.engine.random_state import host_states, learned_of
from nemo_like.torch_compat import is_fake, unseen

VARIABLE = "NEMO_LIKE_VERIFY"
CALLS = 64  # Calls of one module that are looked at while none of them has been recomputed.

# Allowed distance of two runs of a nondeterministic kernel, as a part of a tensor's Euclidean norm.
# Atomic additions in another order differ by some units of the last place of the dtype that they add in. That is
# 6e-8, 5e-4 and 4e-3 of a value, for float32, float16 and bfloat16, and more where terms cancel. The difference
# spreads to everything that is computed after. So the coarsest floating dtype that autograd saved in a region counts
# for all of its tensors. With float32, the tolerance is 1,000 units instead of 4. A difference in its last place
# flips the rounding of matmuls that run in TF32 or under autocast. That is the case for one value in 1e4, by 5e-4 to
# 4e-3, which is 1e-5 to 7e-5 of the norm.
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# The same for every 8-bit float: one value in twenty that is rounded the other way, by an eighth of itself, is 0.03.
_COARSEST = 0.1
_EXACT = {torch.float64: 1e-12}
# With `torch.use_deterministic_algorithms` nothing but the rounding of the summaries themselves is allowed: in
# float32, of float64 in that.
_ROUNDING = 1e-5


class Verification:
    """The summaries of one call of a region."""

    __slots__ = ("_calls", "_drew", "_forward", "_host", "_name", "_rebuilt", "_tolerance")

    def __init__(self, calls: dict[str, int], name: str) -> None:
        self._calls = calls
        self._name = name
        self._forward: list[SavedTensor | None] = []
        self._rebuilt: dict[int, Tensor] = {}
        self._tolerance: float | None = None
        self._host = host_states()  # at the start of forward, then at its end
        self._drew = False

    def forward_done(self) -> None:
        """Call at the end of forward."""
        before, self._host = self._host, host_states()
        self._drew = self._drew or before != self._host

    def saved(self, tensor: Tensor) -> None:
        """Autograd saves `tensor`, the next one, in forward. Waits for no device."""
        look = _look_at(tensor)
        self._forward.append(None if look is None else SavedTensor(tensor, look))
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            self._tolerance = max(self._tolerance or 0.0, _TOLERANCES.get(tensor.dtype.to_real(), _COARSEST))

    def rebuilt(self, index: int, tensor: Tensor) -> None:
        """The recomputation has come to the tensor that was saved as number `index`."""
        if self._forward[index] is not None and (look := _look_at(tensor)) is not None:
            self._rebuilt[index] = look

    def compare_host(self, before: list[Any]) -> None:
        """At the end of the recomputation: raises RegionError if it drew other numbers from Python or NumPy than forward.

        before: states at its start. A layer that seeds its generator draws the same ones, and ends in the same state.
        """
        has_values = any(saved is not None for saved in self._forward)  # not on fake tensors, in a plan
        if has_values and self._drew and (now := host_states()) != before and now != self._host:
            raise RegionError(
                f"Region {self._name!r}: forward draws random numbers from Python's or NumPy's generator, and recomputation "
                "draws other ones. Draw them with torch (torch.rand(())), or outside of the layer."
            )

    def compare(self) -> None:
        """At the end of the recomputation: raises RegionError for the first tensor that is another one."""
        rebuilt, self._rebuilt = self._rebuilt, {}
        every = [saved for saved in self._forward if saved is not None]
        compared = [
            (index, saved)
            for index in sorted(rebuilt)
            if (saved := self._forward[index]) is not None and not unwritten(saved, every)
        ]
        before = _to_host([saved.summary for _, saved in compared])
        after = _to_host([rebuilt[index] for index, _ in compared])
        for (index, saved), then, now in zip(compared, before, after, strict=True):
            if (apart := _difference(then, now)) > (allowed := self._tolerance_of(saved.dtype)):
                raise RegionError(
                    f"Region {self._name!r}: recomputation and forward disagree, and gradients would be wrong.\n"
                    f"The first difference is in tensor {index} that autograd saved: {saved.dtype} of shape "
                    f"{tuple(saved.shape)}, {saved.place()}.\n"
                    f"{_words(then)} in forward, {_words(now)} in recomputation: they differ by {apart:.2g} of the norm, "
                    f"and a nondeterministic kernel explains {allowed:.2g}.\n" + _CAUSES
                )
        if compared:
            self._calls[self._name] = CALLS

    def _tolerance_of(self, dtype: torch.dtype) -> float:
        if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
            return _EXACT.get(dtype, _ROUNDING)
        of_floats = _TOLERANCES[torch.float32] if self._tolerance is None else self._tolerance
        # A mask or an index made from numbers flips where one of them is that close to a threshold: that part of the
        # elements, whose square root is the part of the norm.
        return of_floats if dtype.is_floating_point or dtype.is_complex else math.sqrt(of_floats)


_CAUSES = (
    "Usual causes: a random number from Python's, NumPy's or torch's generator of its own; a context variable set around "
    "forward only; hooks, adapters or requires_grad changed since; a parameter, buffer or argument changed in place; a "
    "counter or global state that the layer reads; memory that was never written (torch.empty).\n"
    "Keep that out of the layer, or register it with nemo_like.activation_checkpointing.engine.global_state.register. "
    f"{VARIABLE}=0 turns this check off."
)


class SavedTensor:
    """Facts about one tensor that autograd saved in forward."""

    __slots__ = ("device", "dtype", "lines", "shape", "summary")

    def __init__(self, tensor: Tensor, look: Tensor) -> None:
        self.summary = look
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device
        self.lines = _lines()

    def place(self) -> str:
        """The line that saved it, in words; that of the caller's code where torch's own calls the operator."""
        code, number = self.lines[-1]
        line = linecache.getline(code.co_filename, number).strip()
        return f"by `{line}` ({code.co_filename}:{number}, in {code.co_qualname})"


_OURS, _TORCHS = os.path.dirname(__file__), os.path.dirname(torch.__file__) + os.sep


def _lines() -> list[tuple[CodeType, int]]:
    """The line that calls the operator that autograd saves a tensor for, and the first one on the way to it outside of
    torch."""
    lines: list[tuple[CodeType, int]] = []
    for frame in dropwhile(lambda frame: os.path.dirname(frame.f_code.co_filename) == _OURS, callers()):
        inside = frame.f_code.co_filename.startswith(_TORCHS)
        if not lines or not inside:
            lines.append((frame.f_code, frame.f_lineno))
        if not inside:
            break
    return lines


def unwritten(saved: SavedTensor, every: list[SavedTensor]) -> bool:
    """Return whether `saved`, one of `every` tensor of the region, may hold memory that its kernel never wrote.

    Such kernels save memory that backward does not read, or reads in part: it may differ without a consequence.
    """
    if saved.lines[0][0] in _PARTLY_WRITTEN:
        return True
    if saved.dtype is torch.uint8 and len(saved.shape) == 1:
        return True  # a workspace in a kernel's own format, as oneDNN and cuDNN have for recurrent layers
    if saved.device.type == "cpu":
        return False
    # Seed and offset of an attention kernel's dropout, which are not set where there is none; or its sums.
    return (saved.dtype in (torch.int64, torch.uint64) and saved.shape.numel() <= 2) or _is_padded(saved, every)


_PARTLY_WRITTEN = {
    torch.nn.functional.ctc_loss.__code__,  # its table of paths, of which longer targets use more
    torch.nn.functional.rrelu.__code__,  # its noise, outside of training
}


def _is_padded(saved: SavedTensor, every: list[SavedTensor]) -> bool:
    """Return whether these may be the sums of memory-efficient attention: (B, H, T), T rounded up to whole blocks of
    32."""
    if saved.dtype is not torch.float32 or len(saved.shape) != 3:
        return False
    batch, heads, padded = saved.shape
    queries = [other.shape for other in every if len(other.shape) == 4 and other.shape[0] == batch]
    tokens = {shape[2] for shape in queries if shape[1] == heads} | {shape[1] for shape in queries if shape[2] == heads}
    return any(count != padded and math.ceil(count / 32) * 32 == padded for count in tokens)


def start(owner: object, name: str, preserve_rng_state: bool) -> Verification | None:
    """Return the `Verification` of this call of `owner` (a module or callable) against its recomputation, or None.

    Raises:
        ValueError: the environment variable ``NEMO_LIKE_VERIFY`` is something else than 0 or 1.
    """
    wanted = os.environ.get(VARIABLE, "")
    if wanted not in ("", "0", "1"):
        raise ValueError(
            f"The environment variable {VARIABLE} is {wanted!r}; it must be 1 (verify every step), 0 (never), or unset "
            "(the first step)."
        )
    if wanted == "0" or (not preserve_rng_state and wanted != "1"):
        return None
    calls = learned_of(owner).verified
    count = calls.get(name, 0)
    # The comparison makes the CPU wait, which a capture refuses.
    if (count >= CALLS and wanted != "1") or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
        return None
    calls[name] = min(count + 1, CALLS)
    return Verification(calls, name)


def _look_at(tensor: Tensor) -> Tensor | None:
    """The summary of `tensor`, computed where no mode sees it; None: it has no values."""
    if is_fake(tensor):
        return None
    with torch.no_grad(), unseen():
        return summary(tensor)


def _to_host(summaries: list[Tensor]) -> list[list[float]]:
    """The numbers of all summaries, with one wait for each device."""
    numbers: dict[int, list[float]] = {}
    with torch.no_grad(), unseen():
        for device in {one.device for one in summaries}:
            here = [one for one in summaries if one.device == device]
            numbers.update(zip(map(id, here), torch.stack(here).tolist(), strict=True))
    return [numbers[id(one)] for one in summaries]


def _difference(then: list[float], now: list[float]) -> float:
    """Return the distance between the summaries of two tensors, as a part of the norm."""
    apart, scale = max(abs(one - other) for one, other in zip(then, now)), max(then[2], now[2])
    if math.isfinite(apart):
        return apart / scale if scale > 0 else 0.0
    return float(any(math.isfinite(one) != math.isfinite(other) for one, other in zip(then, now)))


def _words(numbers: list[float]) -> str:
    return "norm {2:.9g} and signed sums {0:.9g} and {1:.9g}".format(*numbers)
