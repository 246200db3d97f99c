"""The same random numbers on all ranks of a ``tp`` group, which compute alike on tensors that they hold whole.

Dropout of hidden states must drop the same elements on every rank of a group. Ranks that were seeded apart, as data-parallel
ranks are, would drop others, without an error. DTensor has random numbers for operators on DTensors on an accelerator;
between the linears that are cut, tensors are plain.

Cut tensors (attention weights of a rank's own heads, its part of a sequence) are dropped from the same numbers: each
element as often as it should be, at the same places as on the other ranks.
"""

import random
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import compress
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from nemo_like._util.log import warn_once
from nemo_like._util.plain import inside
from nemo_like._util.rng import Access, access_to, generators
from nemo_like._util.tensors import tensors_in
from nemo_like.distributed.consistency_checks import differing, gather, mesh_groups, number_of, wire_device
from nemo_like.torch_compat import is_fake, unseen


class SharedRandom:
    """Forward hooks of a tensor-parallel model, which have its ranks draw from the states of the group's first one.

    A call that draws is compared in each later call of its mode (which modules train), since a program may seed generators,
    or draw from them, in between. torch's generators are compared in the first call of a mode whether it draws or not.

    Args:
        mesh: the one-dimensional tensor-parallel mesh.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._generators = generators(torch.device(mesh.device_type))
        self._torch = [name for name in self._generators if name not in ("Python", "NumPy")]
        self._modules: list[nn.Module] = []
        # Generators that calls of a mode were seen to draw from, the same on every rank.
        self._drawn: dict[bytes, set[str]] = {}
        # The states with which a call began, and `_lent` those that a first call took from another rank, as they were.
        self._began: dict[bytes, dict[str, Any]] = {}
        self._lent: dict[str, Any] = {}

    def put(self, model: nn.Module) -> None:
        """On `model`, in front of the hooks that are there."""
        model.register_forward_pre_hook(torch.compiler.disable(self._before), prepend=True, with_kwargs=True)
        model.register_forward_hook(torch.compiler.disable(self._after))

    def _before(self, model: nn.Module, args: object, kwargs: object) -> None:
        if any(map(is_fake, tensors_in((args, kwargs)))):
            return
        if not self._modules:
            self._modules = list(model.modules())
            self._generators |= _held_by(model)
        mode = self._mode()
        drawn = self._drawn.get(mode)
        with unseen():
            compared = self._now(self._generators if drawn is None else drawn)
            differ = self._differing(compared)
            if differ:
                first, group = [{name: compared[name] for name in differ}], self._mesh.get_group()
                dist.broadcast_object_list(first, group=group, group_src=0, device=wire_device(group))
                self._put(first[0])
                if drawn is None:
                    self._lent = {name: compared[name] for name in differ if name not in self._torch}
                self._say(model, [name for name in differ if name not in self._lent])
            self._began[mode] = self._now(self._torch if drawn is not None else self._generators)

    def _after(self, model: nn.Module, _args: object, _output: object) -> None:
        mode = self._mode()
        began, known = self._began.pop(mode, None), self._drawn.get(mode)
        if began is None:
            return
        with unseen():
            now = self._now(began)
            drew = [name for name, state in now.items() if state != began[name]]
            if known is None:  # the first call: ranks tell each other
                rows = gather(torch.tensor([int(name in drew) for name in now]), mesh_groups(self._mesh))
                drew = [name for name, used in zip(now, rows.any(0).tolist()) if used]
                self._drawn[mode] = set(drew)
                self._put({name: state for name, state in self._lent.items() if name not in drew})
                self._say(model, [name for name in self._lent if name in drew])
                self._lent = {}
                self._check(
                    model, {name: now[name] for name in drew if name in self._torch}, "drew different amounts of"
                )
            elif new := [name for name in drew if name not in known]:
                self._check(model, {name: began[name] for name in new}, "drew different")
                known.update(new)

    def _mode(self) -> bytes:
        return bytes(map(attrgetter("training"), self._modules))

    def _check(self, model: nn.Module, states: Mapping[str, Any], problem: str) -> None:
        if self._differing(states):
            raise RuntimeError(
                f"Ranks of a tp group {problem} random numbers in a call of this {_kind(model)}, so that tensors they "
                "compute alike were not dropped alike. Seed them alike, have each rank draw the same amount, or set "
                "the probabilities of dropout to 0."
            )

    def _say(self, model: nn.Module, names: list[str]) -> None:
        if names:
            warn_once(
                f"Ranks of a tp group had different states of random numbers ({', '.join(names)}) when this "
                f"{_kind(model)} was called: they go on with that of the group's first rank, in this and in every "
                "later call that draws, so that all drop the same elements. Seed the ranks of a group alike to save this.",
                key="random numbers of tp",
            )

    def _now(self, names: Iterable[str]) -> dict[str, Any]:
        return {name: self._generators[name][0]() for name in self._generators if name in names}

    def _put(self, states: Mapping[str, Any]) -> None:
        for name, state in states.items():
            self._generators[name][1](state)

    def _differing(self, states: Mapping[str, Any]) -> list[str]:
        """The names of states that are not the same on all ranks; alike on every rank. A collective, but for no states."""
        others = differing(list(map(number_of, states.values())), mesh_groups(self._mesh)) if states else []
        return list(compress(states, others))


def _held_by(model: nn.Module) -> dict[str, Access]:
    """The generators that attributes of modules lead to."""
    attributes = (value for module in model.modules() for value in vars(module).values())
    values = {id(item): item for value in attributes for item in inside(value, depth=3)}
    held = [access for access in map(_access, values.values()) if access is not None]
    return {f"generator {number} of the model": access for number, access in enumerate(held)}


def _access(value: Any) -> Access | None:
    """Return the access to a generator; None: `value` is none."""
    if isinstance(value, torch.Generator):
        return access_to(value.get_state, value.set_state)
    if isinstance(value, random.Random):
        return value.getstate, value.setstate
    bits = getattr(value, "bit_generator", None)  # NumPy's
    return None if bits is None else (lambda: bits.state, partial(setattr, bits, "state"))


def _kind(model: nn.Module) -> str:
    return type(model).__name__.removeprefix("FSDP")
