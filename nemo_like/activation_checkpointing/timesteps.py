"""Networks unrolled over time: chunks of timesteps as regions, so that memory grows with the chunk and not with time.

Backward through T steps of a cell holds what every step saves. With chunks of c steps it holds the state at each of
the T / c chunk borders and the steps of one chunk: least for c near sqrt(T), where it is O(sqrt(T)) for one more
forward (Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174, section 4.1). Two levels of
chunks hold O(T^(1/3)) for two more forwards (section 4.4 there).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nemo_like._util.words import a_or_an
from nemo_like.activation_checkpointing.engine import run_region
from nemo_like.activation_checkpointing.policy import FullPolicy
from nemo_like.torch_compat import tree_flatten, tree_map, tree_unflatten

Cell = Callable[[Any, Any], tuple[Any, Any]]
"""(input of one step, state) → (output of that step, new state)."""

TWO_LEVELS_FROM = 10_000
"""From so many timesteps on, the default is two levels of chunks."""


def checkpoint_timesteps(
    cell: Cell | nn.RNNCellBase,
    inputs: object,
    state: object,
    chunk_size: int | None = None,
    *,
    levels: int | None = None,
    lengths: Tensor | None = None,
    preserve_rng_state: bool = True,
    name: str = "timesteps",
) -> tuple[Any, Any]:
    """Unroll `cell` over time and recompute it in backward chunk by chunk. Gradients are bitwise those of a plain loop.

    Args:
        cell: ``cell(x_t, state) -> (y_t, state)``; or an `nn.RNNCell`, `nn.GRUCell` or `nn.LSTMCell` as it is, whose
            output is its hidden state. ``y_t`` may be None where only the last state matters.
        inputs: a tensor or a pytree of tensors with time as dim 0, (T, ...), or a list of T steps' inputs.
        state: the first state, any pytree; None where the cell makes its own.
        chunk_size: timesteps per region; None: T ** (1 / 2), or T ** (1 / 3) where there are two levels.
        levels: 1: chunks; 2: chunks of chunks. None: 1 below `TWO_LEVELS_FROM` timesteps, else 2.
        lengths: (B,) integers: sample b has ``lengths[b]`` steps. After its end its state stays as it is and its
            outputs are zero. Every tensor of output and state then has the batch as dim 0.
        preserve_rng_state: recompute with the forward's random numbers (dropout, stochastic spikes).
        name: the regions' name in errors.

    Returns:
        (outputs, state): outputs stacked over time, (T, ...), as a pytree like ``y_t`` (a list where `inputs` is one);
        and the state after the last step.

    Raises:
        ValueError: no timesteps; inputs that differ in length; `chunk_size`, `levels` or `lengths` that do not fit.
        TypeError: `inputs` holds no tensor, or the cell returns something else than a pair.

    >>> cell = nn.LSTMCell(3, 4)
    >>> zeros = torch.zeros(2, 4)
    >>> outputs, (h, c) = checkpoint_timesteps(cell, torch.randn(100, 2, 3), (zeros, zeros))
    >>> outputs.shape, torch.equal(outputs[-1], h)
    (torch.Size([100, 2, 4]), True)
    """
    steps = _steps_of(inputs)
    levels = (1 if len(steps) < TWO_LEVELS_FROM else 2) if levels is None else levels
    if levels not in (1, 2):
        raise ValueError(f"levels is {levels!r}; it must be 1 (chunks) or 2 (chunks of chunks).")
    chunk_size = default_chunk_size(len(steps), levels) if chunk_size is None else chunk_size
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size!r}; it must be a whole number of timesteps >= 1.")
    step = _pairs(cell)
    if lengths is not None:
        _check_lengths(lengths, len(steps))
        step = _stops_at(step, lengths)

    def region(fn: Callable[..., Any], *args: object) -> Any:
        return run_region(
            fn, args, {}, policy=FullPolicy(), name=name, preserve_rng_state=preserve_rng_state, owner=cell
        )

    def chunk(start: int, members: list[Any], state: object) -> tuple[list[Any], Any]:
        outputs = []
        for offset, member in enumerate(members):
            output, state = step(start + offset, member, state)
            outputs.append(output)
        return outputs, state

    def chunk_of_chunks(start: int, members: list[Any], state: object) -> tuple[list[Any], Any]:
        outputs: list[Any] = []
        for first in range(0, len(members), chunk_size):
            piece, state = region(chunk, start + first, members[first : first + chunk_size], state)
            outputs += piece
        return outputs, state

    outer, size = (chunk, chunk_size) if levels == 1 else (chunk_of_chunks, chunk_size * chunk_size)
    outputs: list[Any] = []
    for first in range(0, len(steps), size):
        piece, state = region(outer, first, steps[first : first + size], state)
        outputs += piece
    return (outputs if isinstance(inputs, list) else _stack(outputs)), state


def default_chunk_size(steps: int, levels: int = 1) -> int:
    """The chunk that holds least where a step saves about as much as a state: the (levels + 1)-th root of `steps`.

    >>> default_chunk_size(1000), default_chunk_size(1000, levels=2)
    (32, 10)
    """
    return max(1, round(steps ** (1 / (levels + 1))))


class UnrolledCell(nn.Module):
    """A cell unrolled over time as a module: ``forward(inputs, state=None, lengths=None) -> (outputs, state)``.

    `CheckpointConfig.snn_timestep_checkpoint` sets `checkpoint` and `chunk_size` on every one of these in a model.
    """

    def __init__(self, cell: nn.Module, *, checkpoint: bool = True, chunk_size: int | None = None) -> None:
        super().__init__()
        self.cell = cell
        self.checkpoint = checkpoint
        """False: the plain loop."""
        self.chunk_size = chunk_size
        """Timesteps per region; None: the square root of their number."""

    def forward(self, inputs: object, state: object = None, lengths: Tensor | None = None) -> tuple[Any, Any]:
        """See `checkpoint_timesteps`."""
        if self.checkpoint:
            return checkpoint_timesteps(self.cell, inputs, state, self.chunk_size, lengths=lengths)
        return unroll(self.cell, inputs, state, lengths=lengths)


def unroll(
    cell: Cell | nn.RNNCellBase, inputs: object, state: object, *, lengths: Tensor | None = None
) -> tuple[Any, Any]:
    """The plain loop: `checkpoint_timesteps` without a region."""
    steps = _steps_of(inputs)
    step = _pairs(cell)
    if lengths is not None:
        _check_lengths(lengths, len(steps))
        step = _stops_at(step, lengths)
    outputs = []
    for index, member in enumerate(steps):
        output, state = step(index, member, state)
        outputs.append(output)
    return (outputs if isinstance(inputs, list) else _stack(outputs)), state


def _steps_of(inputs: object) -> list[Any]:
    """The input of each step. Tensors are split by `unbind`, whose backward is one stack (indexing: one sum a step)."""
    if isinstance(inputs, list):
        if not inputs:
            raise ValueError("inputs is an empty list; there must be at least one timestep.")
        return inputs
    leaves, tree = tree_flatten(inputs)
    if not leaves or not all(isinstance(leaf, Tensor) and leaf.dim() > 0 for leaf in leaves):
        raise TypeError(
            f"inputs is {a_or_an(inputs)}; it must be a tensor or a pytree of tensors with time as dim 0, or a "
            "list of the steps' inputs."
        )
    counts = {leaf.shape[0] for leaf in leaves}
    if len(counts) > 1 or 0 in counts:
        raise ValueError(f"inputs has {sorted(counts)} timesteps (dim 0); there must be one number of them, above 0.")
    return [tree_unflatten(list(step), tree) for step in zip(*(leaf.unbind(0) for leaf in leaves))]


def _stack(outputs: Sequence[Any]) -> Any:
    leaves, trees = zip(*(tree_flatten(output) for output in outputs))
    stacked = [torch.stack(column) if isinstance(column[0], Tensor) else list(column) for column in zip(*leaves)]
    return tree_unflatten(stacked, trees[0])


def _pairs(cell: Cell | nn.RNNCellBase) -> Callable[[int, Any, Any], tuple[Any, Any]]:
    """``step(index, x_t, state)``, with PyTorch's own cells made to return (output, state) too."""
    if isinstance(cell, nn.LSTMCell):

        def step(index: int, member: Any, state: Any) -> tuple[Any, Any]:
            hidden = cell(member, state)
            return hidden[0], hidden
    elif isinstance(cell, nn.RNNCellBase):

        def step(index: int, member: Any, state: Any) -> tuple[Any, Any]:
            hidden = cell(member, state)
            return hidden, hidden
    else:

        def step(index: int, member: Any, state: Any) -> tuple[Any, Any]:
            pair = cell(member, state)
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise TypeError(f"The cell returned {a_or_an(pair)}; it must return the pair (output, state).")
            return pair[0], pair[1]

    return step


def _check_lengths(lengths: Tensor, steps: int) -> None:
    if lengths.dim() != 1 or lengths.is_floating_point() or lengths.dtype is torch.bool:
        raise ValueError(f"lengths is {lengths.dtype} of shape {tuple(lengths.shape)}; it must be integers, (B,).")
    if lengths.numel() == 0 or int(lengths.min()) < 0 or int(lengths.max()) > steps:
        raise ValueError(f"lengths is {lengths.tolist()}; each must lie between 0 and the {steps} timesteps.")


def _stops_at(
    step: Callable[[int, Any, Any], tuple[Any, Any]], lengths: Tensor
) -> Callable[[int, Any, Any], tuple[Any, Any]]:
    """`step` that leaves a sample's state alone, and puts out zeros, from its length on."""

    def stopping(index: int, member: Any, state: object) -> tuple[Any, Any]:
        running = index < lengths
        output, after = step(index, member, state)

        def pick(new: object, old: Any) -> Any:
            if not isinstance(new, Tensor):
                return new
            if new.dim() == 0 or new.shape[0] != lengths.shape[0]:
                raise ValueError(
                    f"lengths has {lengths.shape[0]} samples, but a tensor of the cell's output or state has the shape "
                    f"{tuple(new.shape)}; its dim 0 must be the batch."
                )
            return torch.where(running.view(-1, *[1] * (new.dim() - 1)), new, old)

        if state is None:  # the cell made its own first state: every sample's rest state is what zero steps leave
            state = tree_map(torch.zeros_like, after)
        return tree_map(lambda new: pick(new, new.new_zeros(())), output), tree_map(pick, after, state)

    return stopping
