"""Verification: in the first step, what recomputation rebuilds is compared with what autograd saved in forward.

Whatever recomputation sees otherwise than forward did, known to us or not, ends in other saved tensors and so in other
gradients. So a region keeps a summary of every tensor that autograd saves in its forward (some numbers, see
`summaries`), and its recomputation is compared with them: tensors that differ raise a `RegionError`.

The first step, for a module, is over with the first recomputation that was compared; for a function that is not a
module, for all of its calls under one name. Until then up to `CALLS` calls are looked at (several forwards may come
before the first backward); from then on none is, and the engine runs not one operator more than without. The
environment variable ``NEMO_LIKE_VERIFY`` is looked at in every call: ``1`` verifies all of them, ``0`` none.

Nothing is verified under `torch.compile` (PyTorch's own checkpoint runs there), on fake tensors, while a CUDA graph is
captured, and where ``preserve_rng_state=False`` requires other random numbers in recomputation, unless the variable is
``1``.
"""

from __future__ import annotations

import functools
import inspect
import linecache
import math
import os
import random
import weakref
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn

from nemo_like.activation_checkpointing.engine.handles import RegionError
from nemo_like.activation_checkpointing.engine.module_state import module_of
from nemo_like.torch_compat import is_fake, sparse_parts, unseen

VARIABLE = "NEMO_LIKE_VERIFY"
# `os.environ` raises and catches an error for each variable that is not set, which is asked here for every region.
_ENVIRONMENT: Any = getattr(os.environ, "_data", os.environ)
_KEY: Any = VARIABLE if _ENVIRONMENT is os.environ else os.environ.encodekey(VARIABLE)
CALLS = 64
"""Calls of one module that are looked at while none of them has been recomputed."""

_calls: weakref.WeakKeyDictionary[Any, dict[str, int]] = weakref.WeakKeyDictionary()
"""Module, or code of a function → name of the region → calls that were looked at; `CALLS` once one was compared."""

_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Allowed distance of two runs of a nondeterministic kernel, as a part of a tensor's Euclidean norm.

Atomic additions in another order differ by some units of the last place of the dtype that they add in. That is 6e-8,
5e-4 and 4e-3 of a value, for float32, float16 and bfloat16, and more where terms cancel. The difference spreads to
everything that is computed after. So the coarsest floating dtype that autograd saved in a region counts for all of its
tensors. With float32, the tolerance is 1,000 units instead of 4. A difference in its last place flips the rounding of
matmuls that run in TF32 or under autocast. That is the case for one value in 1e4, by 5e-4 to 4e-3, which is 1e-5 to
7e-5 of the norm.
"""
_COARSEST = 0.1
"""The same for every 8-bit float: one value in twenty that is rounded the other way, by an eighth of itself, is 0.03."""
_EXACT = 1e-12
"""With `torch.use_deterministic_algorithms` nothing but the rounding of the summaries themselves is allowed."""


class Verification:
    """The summaries of one call of a region."""

    __slots__ = ("_calls", "_forward", "_name", "_rebuilt", "_tolerance")

    def __init__(self, calls: dict[str, int], name: str) -> None:
        self._calls = calls
        self._name = name
        self._forward: list[SavedTensor | None] = []
        self._rebuilt: dict[int, list[Tensor]] = {}
        self._tolerance: float | None = None

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

    def compare(self) -> None:
        """At the end of the recomputation: raises RegionError for the first tensor that is another one."""
        rebuilt, self._rebuilt = self._rebuilt, {}
        every = [saved for saved in self._forward if saved is not None]
        compared = [
            (index, saved)
            for index in sorted(rebuilt)
            if (saved := self._forward[index]) is not None and not unwritten(saved, every)
        ]
        before = _to_host([saved.summaries for _, saved in compared])
        after = _to_host([rebuilt[index] for index, _ in compared])
        for (index, saved), then, now in zip(compared, before, after, strict=True):
            tolerance = self._tolerance_of(saved.dtype)
            worst = _difference(then, now)
            if worst > tolerance:
                self._raise(index, saved, then, now, worst, tolerance)
        if compared:
            self._calls[self._name] = CALLS

    def _tolerance_of(self, dtype: torch.dtype) -> float:
        if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
            return _EXACT
        of_floats = _TOLERANCES[torch.float32] if self._tolerance is None else self._tolerance
        if dtype.is_floating_point or dtype.is_complex:
            return of_floats
        # A mask or an index made from numbers flips where one of them is that close to a threshold: that part of the
        # elements, whose square root is the part of the norm.
        return math.sqrt(of_floats)

    def _raise(
        self,
        index: int,
        saved: SavedTensor,
        then: list[list[float]],
        now: list[list[float]],
        worst: float,
        tolerance: float,
    ) -> None:
        raise RegionError(
            f"Region {self._name!r}: recomputation and forward disagree, and gradients would be wrong without a word. "
            f"The first difference is in tensor {index} that autograd saved, {saved.dtype} of shape "
            f"{tuple(saved.shape)}, at {saved.place()}.\n"
            f"Values: {_words(then)} in forward, {_words(now)} in recomputation. They differ by {worst:.2g} of the norm; "
            f"a nondeterministic kernel explains {tolerance:.2g}.\n"
            "Usual causes: random numbers from a generator that isn't torch's default one (Python's, NumPy's, a "
            "torch.Generator); a context variable or other context that was set around forward only; hooks, adapters, "
            "training flags or requires_grad changed since; a parameter, buffer or argument changed in place; a counter "
            "or global state that the region reads; memory that was never written (torch.empty).\n"
            "Keep that out of the region, or register it with "
            "nemo_like.activation_checkpointing.engine.ambient.register.\n"
            f"{VARIABLE}=0 turns this check off."
        )


class SavedTensor:
    """Facts about one tensor that autograd saved in forward."""

    __slots__ = ("device", "dtype", "places", "shape", "summaries")

    def __init__(self, tensor: Tensor, found: list[Tensor]) -> None:
        self.summaries = found
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        self.device = tensor.device
        self.places = _places()

    def place(self) -> str:
        """The call that saved it, in words."""
        return ", called by ".join(_call_text(code, instruction) for code, instruction in self.places)


def unwritten(saved: SavedTensor, every: list[SavedTensor]) -> bool:
    """Return whether `saved`, one of `every` tensor of the region, may hold memory that its kernel never wrote.

    Such kernels save what backward does not read, or reads in part: it may differ without a consequence.
    """
    if any(code in _PARTLY_WRITTEN for code, _ in saved.places):
        return True
    if saved.dtype is torch.uint8 and len(saved.shape) == 1:
        return True  # a workspace in a kernel's own format, as oneDNN and cuDNN have for recurrent layers
    if saved.device.type == "cpu":
        return False
    if saved.dtype in _SEEDS and saved.shape.numel() <= 2:
        return True  # seed and offset of an attention kernel's dropout, which are not set where there is none
    return _is_padded(saved, every)


_SEEDS = {torch.int64, torch.uint64}
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
    """Return what compares this call of `owner` (a module or another callable) with its recomputation; None: nothing
    does.

    Raises:
        ValueError: the environment variable ``NEMO_LIKE_VERIFY`` is something else than 0 or 1.
    """
    wanted = os.environ.get(VARIABLE, "") if _KEY in _ENVIRONMENT else ""
    if wanted not in ("", "0", "1"):
        raise ValueError(
            f"The environment variable {VARIABLE} is {wanted!r}; it must be 1 (verify every step), 0 (never), or unset "
            "(the first step)."
        )
    if wanted == "0" or (not preserve_rng_state and wanted != "1"):
        return None
    calls = _calls.setdefault(_identity(owner), {})
    count = calls.get(name, 0)
    if count >= CALLS and wanted != "1":
        return None
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return None  # the comparison makes the host wait, which a capture refuses
    calls[name] = min(count + 1, CALLS)
    return Verification(calls, name)


def _identity(owner: object) -> Any:
    """Return what stays the same from step to step, where functions and partial objects are made anew for each call."""
    while not isinstance(owner, nn.Module) and hasattr(owner, "func"):
        owner = owner.func
    module = module_of(owner)
    if module is not None:
        return module
    return getattr(getattr(owner, "__func__", owner), "__code__", None) or type(owner)


def _look_at(tensor: Tensor) -> list[Tensor] | None:
    """The summaries of `tensor`, computed where no mode sees it; None: it has no values."""
    if is_fake(tensor):
        return None
    with torch.no_grad(), unseen():
        return summaries(tensor) or None


def _to_host(pieces: list[list[Tensor]]) -> list[list[list[float]]]:
    """The numbers of all summaries, with one wait for each device."""
    numbers: dict[int, list[float]] = {}
    every = [summary for group in pieces for summary in group]
    with torch.no_grad(), unseen():
        for device in {summary.device for summary in every}:
            here = [summary for summary in every if summary.device == device]
            numbers.update(zip(map(id, here), torch.stack(here).tolist(), strict=True))
    return [[numbers[id(summary)] for summary in group] for group in pieces]


def _difference(then: list[list[float]], now: list[list[float]]) -> float:
    """Return the distance between the summaries of two tensors, as a part of the norm."""
    if len(then) != len(now):  # a sparse tensor that lost all of its values, or got its first
        return math.inf
    return max(map(_difference_of_parts, then, now))


def _difference_of_parts(then: list[float], now: list[float]) -> float:
    first, second, square, odd, odd_sum = then
    first_now, second_now, square_now, odd_now, odd_sum_now = now
    norm, norm_now = math.sqrt(square), math.sqrt(square_now)
    apart = max(abs(first - first_now), abs(second - second_now), abs(norm - norm_now))
    odd_apart = max(abs(odd - odd_now), abs(odd_sum - odd_sum_now))
    scale, odd_scale = max(norm, norm_now), max(odd, odd_now)
    return max(apart / scale if scale > 0 else 0.0, math.sqrt(odd_apart / odd_scale) if odd_scale > 0 else 0.0)


def _words(numbers: list[list[float]]) -> str:
    """Summaries as an error shows them."""
    return " and ".join(
        f"norm {math.sqrt(square):.9g}, signed sums {first:.9g} and {second:.9g}"
        + (f", {int(odd)} not finite" if odd else "")
        for first, second, square, odd, _ in numbers
    )


_OURS, _TORCHS = os.path.dirname(__file__), os.path.dirname(torch.__file__) + os.sep


def _places() -> list[tuple[CodeType, int]]:
    """The call that autograd saves a tensor for, and the first one on the way to it that is not in torch."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None and os.path.dirname(frame.f_code.co_filename) == _OURS:
        frame = frame.f_back
    places: list[tuple[CodeType, int]] = []
    while frame is not None:
        inside = frame.f_code.co_filename.startswith(_TORCHS)
        if not places or not inside:
            places.append((frame.f_code, frame.f_lasti))
        if not inside:
            break
        frame = frame.f_back
    return places


def _call_text(code: CodeType, instruction: int) -> str:
    """An instruction of some code as its source has it, with file, line and function."""
    positions = list(code.co_positions())
    line, last_line, column, last_column = positions[min(instruction // 2, len(positions) - 1)]
    text = linecache.getline(code.co_filename, line or 0).rstrip("\n")
    if line == last_line and column is not None:
        text = text.encode()[column:last_column].decode(errors="replace")
    return f"`{text.strip()}` ({code.co_filename}:{line}, in {code.co_qualname})"


# A tensor as a few float64 numbers: enough to tell that another one differs, without holding either.
#
# Each element is multiplied by a fixed sign, which depends on its position, and the products are summed. Between two
# tensors such a signed sum differs by about the Euclidean norm of their difference, however many elements there are:
# another dropout mask moves it by a good part of the tensor's norm, rounding by some 1e-7 of it. A plain sum would
# mostly cancel, and would not see elements that changed places. (The idea is that of Alon, Matias and Szegedy's sketch
# of the second moment, STOC 1996.)

_COLUMNS, _ROWS = 1024, 2048
_PIECE = _COLUMNS * _ROWS
"""Elements that are looked at together: up to four float64 copies of them, 64 MiB, in addition to the tensor itself."""
_NAN, _INF = 1.0, 2.0
"""Stand-ins for a value that is not finite in the signed sum of those."""


@functools.cache
def _signs(device: torch.device) -> Tensor:
    """(2, _ROWS) of 1 and -1, without a structure that a tensor could share."""
    bits = random.Random(1996)
    signs = [[1.0 - 2.0 * bits.getrandbits(1) for _ in range(_ROWS)] for _ in range(2)]
    return torch.tensor(signs, dtype=torch.float64, device=device)


def summaries(tensor: Tensor) -> list[Tensor]:
    """One summary, (5,) in float64 on the tensor's own device, for each plain tensor that `tensor` is made of.

    Its numbers: two signed sums and the sum of squares of the finite elements; how many are not finite; the signed sum
    of those. Waits for no device. A DTensor is this rank's part of it; a sparse tensor is its indices and values.
    Empty where there are no numbers: no elements, a meta tensor, a type that does not tell what it is made of.
    """
    return [_summary(part) for part in _plain_parts(tensor) if part.numel() > 0]


def _plain_parts(tensor: Tensor) -> Iterator[Tensor]:
    kind = type(tensor)
    if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
        wait = getattr(tensor, "trigger_wait", None)  # the output of a collective that is still under way
        flatten = getattr(tensor, "__tensor_flatten__", None)
        if wait is not None:
            yield from _plain_parts(wait())
        elif flatten is not None:
            parts = (getattr(tensor, name) for name in flatten()[0])
            for part in parts:
                if isinstance(part, Tensor):  # a DTensor names its mesh together with them
                    yield from _plain_parts(part)
    elif tensor.is_meta:
        return
    elif tensor.layout is torch.strided:
        yield _real(tensor)
    elif tensor.is_mkldnn:
        yield tensor.to_dense()
    else:
        for part in sparse_parts(tensor):
            yield _real(part)


def _real(tensor: Tensor) -> Tensor:
    """`tensor` in a dtype that converts to float64."""
    tensor = tensor.detach()
    if tensor.is_quantized:
        return tensor.int_repr()
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj())
    if tensor.dtype in _PACKED:
        return tensor.view(torch.uint8)
    # Apple's GPUs have no float64.
    return tensor.cpu() if tensor.device.type == "mps" else tensor


_PACKED = {torch.float4_e2m1fn_x2}
"""Two numbers in one byte, and no conversion."""


def _summary(tensor: Tensor) -> Tensor:
    total: Tensor | None = None
    for number, piece in enumerate(_pieces(tensor)):
        numbers = _of_piece(piece.reshape(-1), number)
        total = numbers if total is None else total + numbers
    assert total is not None  # an empty tensor has no summary
    return total


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """`tensor` in pieces of at most _PIECE elements, cut by its shape alone: strides may differ in recomputation."""
    if tensor.numel() <= _PIECE:
        yield tensor
        return
    inner = tensor.numel() // tensor.shape[0]
    for part in tensor.split(max(1, _PIECE // inner)):
        yield from _pieces(part[0] if part.shape[0] == 1 else part)


def _of_piece(flat: Tensor, number: int) -> Tensor:
    values = flat.to(torch.float64).contiguous()  # (n,)
    odd = values.new_zeros(2)
    square = values.dot(values)
    # On a CPU the answer is at hand; elsewhere asking for it would make the host wait.
    if flat.is_floating_point() and not (flat.device.type == "cpu" and math.isfinite(square.item())):
        finite = values.isfinite()
        codes = values.nan_to_num(_NAN, _INF, -_INF).masked_fill_(finite, 0.0)
        values = values.where(finite, 0.0)
        square = values.dot(values)
        odd = torch.stack([(~finite).sum(dtype=torch.float64), _signed_sums(codes)[0]])
    sums = _signed_sums(values) * _signs(values.device)[:, number % _ROWS]
    return torch.cat([sums, square.reshape(1), odd])


def _signed_sums(values: Tensor) -> Tensor:
    """(n,) to (2,). An element's sign is that of its column times that of its row, in rows of _COLUMNS elements."""
    signs = _signs(values.device)
    rows = values.numel() // _COLUMNS
    head, tail = values[: rows * _COLUMNS].view(rows, _COLUMNS), values[rows * _COLUMNS :]
    sums = ((head @ signs[:, :_COLUMNS].T) * signs[:, :rows].T).sum(0)  # (rows, 2) to (2,)
    if tail.numel() > 0:
        sums = sums + (signs[:, : tail.numel()] @ tail) * signs[:, rows % _ROWS]
    return sums
