"""Facts that the first forward of a module shows, and generators of random numbers that its operators are given.

torch's own generators are looked at in every forward (`global_state`). A `torch.Generator` that an operator is given is
noted before it draws. Generators of Python and NumPy are not restored: verification of the first step compares the numbers.
"""

import weakref
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from nemo_like._util.rng import HOST_GENERATORS
from nemo_like.activation_checkpointing.engine.module_state import module_of
from nemo_like.torch_compat import generator_address, unseen


@dataclass(slots=True, eq=False)
class Learned:
    """Facts about the forward of one module, or function; None until its first forward is over."""

    gives_generators: bool | None = None  # Operators are given a generator.
    writes_inputs: bool | None = None  # It writes into tensors that it is given.
    changing: set[tuple[int, str]] | None = None  # Buffers that it writes, by their table and name.
    # By the region's name: calls that were looked at, see `verification`.
    verified: dict[str, int] = field(default_factory=dict)


# Module, or code of a function → facts about its forwards; of a module, in evaluation and in training.
_learned: weakref.WeakKeyDictionary[Any, tuple[Learned, Learned]] = weakref.WeakKeyDictionary()


def learned_of(function: Any) -> Learned:
    """Return the facts learned about the forward of `function`, a module, a method of one, or another function."""
    while not isinstance(function, nn.Module) and hasattr(function, "func"):  # a partial one, made in each call
        function = function.func
    module = module_of(function)
    key = getattr(function, "__code__", None) or type(function) if module is None else module
    known = _learned.get(key)  # and nothing is made for one that is known: this is asked for every region
    if known is None:
        known = _learned[key] = Learned(), Learned()
    return known[module is None or module.training]


class Generators(dict[int, tuple[torch.Generator, torch.Tensor]]):
    """The generators that operators of one region were given, each with its state before the first of them, by address."""

    def note(self, generator: torch.Generator) -> bool:
        """Keep the state of `generator`, unless it is kept; returns whether it is now."""
        address = generator_address(generator)
        if address in self:
            return False
        self[address] = generator, generator.get_state()
        return True

    def restore(self, stack: ExitStack) -> None:
        """Put the states back until `stack` ends."""
        with unseen():
            for generator, state in self.values():
                stack.callback(generator.set_state, generator.get_state())
                generator.set_state(state)


def host_states() -> list[Any]:
    """Return the states of the generators of Python and NumPy, as things to compare."""
    return [read() for read, _ in HOST_GENERATORS.values()]
