"""Random numbers that forward draws: states of the generators at its start, put back for the recomputation.

torch's own generators are looked at in every forward, and so is a `torch.Generator` among attributes and arguments. Other
sources are looked at in the first forward of a module or function, and in later ones if that one drew from them: a
`torch.Generator` that an operator is given, and the generators of Python and NumPy that their functions share.
"""

import random
import sys
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import CellType
from typing import Any

import torch
from torch import nn

from nemo_like.activation_checkpointing.engine.module_state import module_of
from nemo_like.torch_compat import generator_address, unseen

# --- facts shown by the first forward of a module or function --------------------------------------------------------


@dataclass(slots=True, eq=False)
class Learned:
    """Facts about the forward of one module, or function; None until its first forward is over."""

    draws_on_host: bool | None = None  # It draws from the generators of Python or NumPy.
    gives_generators: bool | None = None  # Operators are given a generator.
    writes_inputs: bool | None = None  # It writes into tensors that it is given.
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


# --- generators of a region's own, and those of Python and NumPy -----------------------------------------------------


class Generators:
    """The generators that one region was seen to use, each with its state of the moment when it was first seen.

    values: arguments, attributes and others; those that are generators are noted at once.
    """

    __slots__ = ("_host", "_learned", "_states")

    def __init__(self, learned: Learned, values: Iterable[object]) -> None:
        self._learned = learned
        self._states: dict[int, tuple[torch.Generator, torch.Tensor]] = {}
        self._host: HostRandom | None = HostRandom(learned)
        for value in values:
            self.note(value)

    def note(self, generator: object) -> bool:
        """Keep the state of `generator`, unless it is none or was seen before; returns whether it is saved now."""
        if not isinstance(generator, torch.Generator) or generator_address(generator) in self._states:
            return False
        self._states[generator_address(generator)] = generator, generator.get_state()
        return True

    def forward_done(self) -> bool:
        """Call at the end of forward: drops generators that were not drawn from. Returns whether any is left."""
        with unseen():
            self._states = {
                key: (g, state) for key, (g, state) in self._states.items() if not torch.equal(g.get_state(), state)
            }
        if self._host is not None and not self._host.was_drawn_from():
            self._host = None
        if self._learned.draws_on_host is None:
            self._learned.draws_on_host = self._host is not None
        return bool(self._states or self._host)

    def restore(self, stack: ExitStack) -> None:
        """Put the states back until `stack` ends."""
        for generator, state in self._states.values():
            stack.callback(generator.set_state, generator.get_state())
            generator.set_state(state)
        if self._host is not None:
            stack.callback(HostRandom(self._learned).put)
            self._host.put()


def closure_of(function: Any) -> list[Any]:
    """Return the variables around the definition of `function` that it uses."""
    cells = getattr(function, "__closure__", None) or ()
    return [cell.cell_contents for cell in cells if cell != CellType()]  # one without contents is equal to an empty one


class HostRandom:
    """The state of Python's generator, and of NumPy's where it has been imported; nothing where these are not used."""

    __slots__ = ("_states",)

    def __init__(self, learned: Learned) -> None:
        generators = [] if learned.draws_on_host is False else _host_generators()
        self._states = [(read(), read, put) for read, put in generators]

    def was_drawn_from(self) -> bool:
        """Return whether a number was drawn since."""
        return not all(is_same_state(read(), state) for state, read, _ in self._states)

    def put(self) -> None:
        """Put the states back."""
        for state, _, put in self._states:
            put(state)


def _host_generators() -> list[tuple[Callable[[], Any], Callable[[Any], None]]]:
    numpy_random: Any = sys.modules.get("numpy.random")
    # While NumPy is being imported its module is there, and not yet whole.
    if not hasattr(numpy_random, "set_state"):
        return [(random.getstate, random.setstate)]
    return [(random.getstate, random.setstate), (lambda: numpy_random.get_state(legacy=False), numpy_random.set_state)]


def is_same_state(a: Any, b: Any) -> bool:
    """Return whether two states of one generator are equal; there are tensors or arrays in them."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return all(is_same_state(a[key], b[key]) for key in a)
    return a.tobytes() == b.tobytes() if hasattr(a, "tobytes") else bool(a == b)
