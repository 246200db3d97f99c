"""Networks unrolled over time: chunks of timesteps as regions, so that memory grows with the chunk and not with time.

Backward through T steps of a cell holds the tensors that every step saves. With chunks of c steps it holds the state at
each of the T / c chunk borders and the steps of one chunk: least for c near sqrt(T), where it is O(sqrt(T)) for one
more forward (Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174, section 4.1).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nemo_like._util.words import a_or_an
from nemo_like.activation_checkpointing.engine import run_region
from nemo_like.activation_checkpointing.policy import FullPolicy

Cell = Callable[[Any, Any], tuple[Any, Any]]  # (input of one step, state) → (output of that step, new state).


def checkpoint_timesteps(
    cell: Cell | nn.RNNCellBase, inputs: Tensor | Sequence[Any], state: object, chunk_size: int | None = None
) -> tuple[Any, Any]:
    """Unroll `cell` over time and recompute it in backward chunk by chunk. Where kernels are deterministic,
    gradients are bitwise those of a plain loop.

    Args:
        cell: ``cell(x_t, state) -> (y_t, state)``; or an `nn.RNNCell`, `nn.GRUCell` or `nn.LSTMCell` as it is, whose
            output is its hidden state. ``y_t`` may be None where only the last state matters.
        inputs: a tensor with time as dim 0, (T, ...), or a list of T steps' inputs of any kind.
        state: the first state, of any kind; None where the cell makes its own.
        chunk_size: timesteps per region; None: the square root of their number.

    Returns:
        (outputs, state): the list of the steps' outputs, or for a tensor of inputs their stack, (T, ...); and the
        state after the last step.

    Raises:
        ValueError: no timesteps, or a `chunk_size` that is not a whole number >= 1.
        TypeError: `inputs` is neither a tensor nor a list, or the cell returns something else than a pair.

    >>> cell = nn.LSTMCell(3, 4)
    >>> zeros = torch.zeros(2, 4)
    >>> outputs, (h, c) = checkpoint_timesteps(cell, torch.randn(100, 2, 3), (zeros, zeros))
    >>> outputs.shape, torch.equal(outputs[-1], h)
    (torch.Size([100, 2, 4]), True)
    """
    if not isinstance(inputs, list | tuple | Tensor):
        raise TypeError(
            f"inputs is {a_or_an(inputs)}; it must be a tensor with time as dim 0, or a list of steps' inputs."
        )
    steps = inputs.unbind(0) if isinstance(inputs, Tensor) else inputs  # whose backward is one stack
    if len(steps) == 0:
        raise ValueError("inputs has 0 timesteps; there must be at least one.")
    chunk_size = max(1, round(len(steps) ** 0.5)) if chunk_size is None else chunk_size
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size!r}; it must be a whole number of timesteps >= 1.")

    def chunk(members: Sequence[Any], state: object) -> tuple[list[Any], Any]:
        outputs = []
        for member in members:
            output, state = _pair(cell, member, state)
            outputs.append(output)
        return outputs, state

    outputs: list[Any] = []
    for first in range(0, len(steps), chunk_size):
        args = steps[first : first + chunk_size], state
        piece, state = run_region(chunk, args, {}, policy=FullPolicy(), name="timesteps", owner=cell)
        outputs += piece
    return (torch.stack(outputs) if isinstance(inputs, Tensor) and outputs[0] is not None else outputs), state


def _pair(cell: Cell | nn.RNNCellBase, member: Any, state: Any) -> tuple[Any, Any]:
    """Return output and state of one step, also of PyTorch's own cells, which return the state alone."""
    result: Any = cell(member, state)
    if isinstance(cell, nn.RNNCellBase):
        return (result[0] if isinstance(cell, nn.LSTMCell) else result), result
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise TypeError(f"The cell returned {a_or_an(result)}; it must return the pair (output, state).")
    return result[0], result[1]
