"""What compiled layers read and write, and what backward multiplies, of blocks of a few operators."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from nemo_like.planning.choose.layer_seconds import backward_times, fused
from nemo_like.planning.trace.block import BlockTrace, trace_block

ROWS, WIDTH = 16, 32
BYTES, WEIGHT = 4 * ROWS * WIDTH, 4 * WIDTH * WIDTH


class Block(nn.Module):
    """A product of what `_before` makes of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.one((x.sin() + x).exp())


class Twice(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.one(x.sin().exp()) + self.other(x.sin().exp())


def _traced(block: nn.Module, *, needs_grad: bool = True) -> BlockTrace:
    return trace_block(block, (torch.empty(ROWS, WIDTH, requires_grad=needs_grad),))


def _moved(trace: BlockTrace, compiled: bool) -> dict[str, list[int]]:
    moved: dict[str, list[int]] = {}
    for op in fused(trace.ops) if compiled else trace.ops:
        if not op.view:
            moved.setdefault(op.op.name().removeprefix("aten::"), []).append(op.moved)
    return moved


def test_a_row_of_operators_reads_once_and_writes_what_is_read_behind_it() -> None:
    trace = _traced(Block())
    assert _moved(trace, compiled=False) == {
        "sin": [2 * BYTES],
        "add.Tensor": [3 * BYTES],
        "exp": [2 * BYTES],
        "mm": [2 * BYTES + WEIGHT],
    }
    # Backward needs the input and the output of exp: the latter is written, and the sum lives in registers.
    assert _moved(trace, compiled=True) == {
        "sin": [BYTES],
        "add.Tensor": [0],
        "exp": [BYTES],
        "mm": [2 * BYTES + WEIGHT],
    }


def test_what_is_computed_twice_is_computed_once() -> None:
    trace = _traced(Twice())
    assert _moved(trace, compiled=True) == {
        "sin": [BYTES, 0],
        "exp": [BYTES, 0],
        "mm": [2 * BYTES + WEIGHT] * 2,
        "add.Tensor": [3 * BYTES],
    }


def test_numbers_that_are_drawn_twice_are_drawn_twice() -> None:
    class Noisy(Block):
        def forward(self, x: Tensor) -> Tensor:
            return self.one(torch.rand_like(x) * x) + self.other(torch.rand_like(x) * x)

    assert not any(op.twin is not None for op in _traced(Noisy()).ops)


def test_what_was_changed_in_between_is_no_twin() -> None:
    class Changed(Block):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            first = y.sin()
            y.add_(1)
            return self.one(first) + self.other(y.sin())

    assert not any(op.twin is not None for op in _traced(Changed()).ops)


@pytest.mark.parametrize(
    ("frozen", "needs_grad", "times"), [((), True, [2, 2]), (("one",), True, [1, 2]), (("one", "other"), False, [0, 0])]
)
def test_backward_has_a_product_for_each_input_that_needs_a_gradient(
    frozen: tuple[str, ...], needs_grad: bool, times: list[int]
) -> None:
    block = Twice()
    for name in frozen:
        block.get_submodule(name).requires_grad_(False)
    products = [op for op in _traced(block, needs_grad=needs_grad).ops if op.flops]
    assert [backward_times(op) for op in products] == times
