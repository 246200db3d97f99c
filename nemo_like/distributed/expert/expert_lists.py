"""Experts that a model has as a list of modules: stacked into fused weights, and called expert by expert as before.

A block with such a list decides in Python which rows each expert gets. So its forward runs twice over: once to see
every call, which is answered with zeros, and, when all rows have been exchanged at once, a second time to hand the
results out. What the block's other modules compute, they compute once: the second pass gets their first answers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from nemo_like._util.module_tree import bare, bare_modules
from nemo_like._util.rng import rng_state, set_rng_state
from nemo_like._util.tensors import tensors_in
from nemo_like._util.words import a_or_an


def check_list(fqn: str, experts: nn.Module) -> None:
    """Raise ValueError where the modules of the list `fqn` cannot be stacked: they must be of one kind."""
    if type(experts).forward is not nn.ModuleList.forward:
        raise ValueError(
            f"{fqn!r}, {a_or_an(experts)}, is a list of experts with a forward of its own, which is not understood: "
            "keep them in a plain nn.ModuleList that the block calls, or stack their weights. Or use ep=1."
        )
    if tensor := next(iter([*experts._parameters, *experts._buffers]), None):
        raise ValueError(
            f"{fqn!r}, a list of experts, has a tensor of its own, {tensor}, and only its modules are stacked: move it "
            "into the module that has the list, or use ep=1."
        )
    members = [bare(module) for module in experts.children()]
    first = _signature(members[0])
    seen: dict[int, str] = {}
    for number, member in enumerate(members):
        for name, parameter in member.named_parameters():
            other = seen.setdefault(id(parameter), f"expert {number}'s {name}")
            if other != f"expert {number}'s {name}":
                raise ValueError(
                    f"Expert {number} of {fqn!r} shares its {name} with {other}, and stacked, each would have one of its "
                    "own: apply what they share in the module that has the list, or use ep=1."
                )
    for number, member in enumerate(members):
        if type(member) is not type(members[0]) or _signature(member) != first:
            raise ValueError(
                f"The experts of {fqn!r} are not alike: number {number}, {a_or_an(member)}, has other weights than "
                f"number 0, {a_or_an(members[0])}. Split over ranks, they are stacked. Use ep=1."
            )
        if buffer := next((name for name, _ in member.named_buffers()), None):
            raise ValueError(
                f"Expert {number} of {fqn!r} has a buffer, {buffer}, and only weights are stacked: make it a parameter, or "
                "use ep=1."
            )


def _signature(member: nn.Module) -> list[Any]:
    return [(name, p.shape, p.dtype, p.requires_grad) for name, p in member.named_parameters(remove_duplicate=False)]


class StackedExperts(nn.Module):
    """In the place of a list of experts: their weights, (experts, ...) each, and handles that are called as they were.

    Called itself, it takes rows (R, D) and the expert of each (R,), and gives what they make of them, (R, D): so its
    weights are gathered once for all experts.
    """

    def __init__(self, experts: nn.Module, here: int | None = None) -> None:
        """here: how many to stack, of the first; None: all."""
        super().__init__()
        named = dict(experts.named_children())
        members = [bare(module) for module in named.values()][:here]
        self.keys_in_order = tuple(named)
        self.by_key = isinstance(experts, nn.ModuleDict)
        self.names: dict[str, str] = {}
        """Names of parameters here → their names in one expert."""
        for name, parameter in members[0].named_parameters():
            attribute = name.replace(".", "_")
            if attribute in self.names:
                raise ValueError(
                    f"Two parameters of one expert would be called {attribute!r}: rename one of {name!r}'s."
                )
            self.names[attribute] = name
            whole = torch.stack([member.get_parameter(name).detach() for member in members])
            self.register_parameter(attribute, nn.Parameter(whole, parameter.requires_grad))
        # Not registered: its weights are stand-ins. In a tuple, which `nn.Module` does not look into.
        self._one = (copy.deepcopy(members[0]).to("meta"),)
        self.block_pass: _BlockPass | None = None

    def train(self, mode: bool = True) -> StackedExperts:
        self._one[0].train(mode)
        return super().train(mode)

    def piece(self, name: str, number: int) -> str:
        """Return the name that the list has for the weight `name` of expert `number`.

        >>> StackedExperts(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])).piece("weight", 1)
        '1.weight'
        """
        return f"{self.keys_in_order[number]}.{self.names[name]}"

    def forward(self, rows: Tensor, chosen: Tensor) -> Tensor:
        raise RuntimeError("These experts are not split over ranks yet.")  # `SplitExperts` takes its place

    def compute(self, weights: dict[str, Tensor], rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Rows sorted by expert, `counts` of each of this rank's, through the experts' own forward.

        All of them run, some on no rows: so recomputation has the operators of its forward, and each weight a gradient.
        """
        outputs = [
            {self.names[name]: piece for name, piece in zip(weights, pieces)}
            for pieces in zip(*(weight.unbind(0) for weight in weights.values()))
        ]
        outs = [
            torch.func.functional_call(self._one[0], w, (part,)) for w, part in zip(outputs, rows.split(list(counts)))
        ]
        return torch.cat(outs)

    # --- what is left of the list ---------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.keys_in_order)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            return [self[number] for number in range(len(self))[key]]
        number = self.keys_in_order.index(key) if self.by_key else range(len(self))[int(key)]
        return _ExpertHandle(self, number)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.keys_in_order) if self.by_key else (self[number] for number in range(len(self)))

    def __contains__(self, key: object) -> bool:
        return key in self.keys_in_order

    def keys(self) -> tuple[str, ...]:
        return self.keys_in_order

    def values(self) -> list[Any]:
        return [_ExpertHandle(self, number) for number in range(len(self))]

    def items(self) -> list[tuple[str, Any]]:
        return list(zip(self.keys_in_order, self.values()))


class _ExpertHandle:
    """One expert of a stack."""

    def __init__(self, stack: StackedExperts, number: int) -> None:
        self._stack, self._number = stack, number

    def __call__(self, *args: Any, **kwargs: object) -> Tensor:
        rows = (*args, *kwargs.values())
        if self._stack.block_pass is None or len(rows) != 1 or not isinstance(rows[0], Tensor):
            raise NotImplementedError(
                f"Expert {self._number} of a list that ep splits was called "
                + (
                    "outside of its block's forward"
                    if self._stack.block_pass is None
                    else f"with {len(rows)} arguments"
                )
                + ": experts take their rows alone, (..., D) to (..., D), in the forward of the module that has the list."
            )
        return self._stack.block_pass.call(self._number, rows[0])

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"Expert {self._number} of a list that ep splits has no {name!r} here: it may be on another rank. It can be "
            "called with its rows; or use ep=1."
        )


class _BlockPass:
    """The calls of one forward of a block: asked first, answered when all are known."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, Tensor]] = []
        self.answers: list[Tensor] | None = None

    def call(self, number: int, rows: Tensor) -> Tensor:
        if self.answers is None:
            self.calls.append((number, rows))
            return torch.zeros_like(rows)
        if not self.calls or self.calls[0][0] != number or self.calls[0][1].shape != rows.shape:
            raise RuntimeError(
                f"A block with a list of experts that ep splits called expert {number} with rows {tuple(rows.shape)}, "
                "otherwise than when it ran first in the same forward: what it gives an expert must not depend on what "
                "another made, nor on what is not put back (a generator of its own). Use ep=1."
            )
        self.calls.pop(0)
        return self.answers.pop(0)


class BlockOfList:
    """The forward of a module that has a list of experts, which are split."""

    def __init__(self, block: nn.Module, stack: StackedExperts) -> None:
        self._block, self._stack = block, stack
        self._own: Callable[..., Any] = block.forward

    @torch.compiler.disable
    def __call__(self, *args: object, **kwargs: object) -> Any:
        stack, block = self._stack, self._block
        others = {name: _AnsweredOnce(child) for name, child in block._modules.items() if child not in (None, stack)}
        before, buffers = rng_state(), {name: (b, b.clone()) for name, b in block._buffers.items() if b is not None}
        registered: dict[str, Any] = dict(block._modules)
        stack.block_pass = _BlockPass()
        try:
            block._modules.update(others)  # type: ignore[arg-type]
            self._own(*args, **kwargs)
            after = rng_state()
            calls = list(stack.block_pass.calls)
            answers, tie = self._exchanged(calls, tensors_in((args, kwargs))[0])
            stack.block_pass.answers = answers
            for buffer, value in buffers.values():
                if not torch.equal(buffer, value):  # a count that the block keeps: once is right
                    buffer.copy_(value)
            set_rng_state(before)
            for other in others.values():
                other.answering = True
            out = self._own(*args, **kwargs)
            set_rng_state(after)
        finally:
            block._modules.update(registered)
            stack.block_pass = None
        return out if calls else _tied(out, tie)

    def _exchanged(self, calls: Sequence[tuple[int, Tensor]], like: Tensor) -> tuple[list[Tensor], Tensor]:
        """All rows there and back in one exchange: the answers to `calls`, and a zero that comes from it.

        Also without any call: other ranks may have rows for the experts of this one.
        """
        flat = [rows.reshape(-1, rows.shape[-1]) for _, rows in calls] or [like.reshape(-1, like.shape[-1])[:0]]
        sizes = [len(rows) for rows in flat]
        numbers = torch.tensor([number for number, _ in calls] or [0])
        chosen = numbers.repeat_interleave(torch.tensor(sizes)).to(like.device)
        out = self._stack(torch.cat(flat), chosen)
        return [part.view(rows.shape) for part, (_, rows) in zip(out.split(sizes), calls)], out.sum()


def _tied(out: object, zero: Tensor) -> Any:
    """`out` with a zero in its first tensor, through which backward comes to the exchange: all ranks send, or none."""
    if isinstance(out, Tensor):
        return out + zero.to(out.dtype)
    if isinstance(out, tuple | list) and out:
        return type(out)([_tied(out[0], zero), *out[1:]])
    raise NotImplementedError(f"A block with a list of experts that ep splits gives {a_or_an(out)}: use ep=1.")


class _AnsweredOnce:
    """A module of the block, which computes in the first pass, and answers with the same in the second."""

    def __init__(self, module: object) -> None:
        self.__dict__["_module"] = module
        self.__dict__["_answers"] = []
        self.__dict__["answering"] = False

    def __call__(self, *args: object, **kwargs: object) -> Any:
        if self.answering:
            out, state = self._answers.pop(0)
            set_rng_state(state)
            return out
        out = self._module(*args, **kwargs)
        self._answers.append((out, rng_state()))
        return out

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def __setattr__(self, name: str, value: object) -> None:
        if name == "answering":
            self.__dict__[name] = value
        else:
            setattr(self._module, name, value)


# Stacked experts under the names that they have in their list, so that a state dict is that of the bare model.
#
# A rank has the experts that are its own, as views of the stack: what is read into them is in the model.

Pieces = Mapping[str, Sequence[str]]
"""Name of a stacked weight → the names that it has in each expert of the list, in order."""


def list_pieces(model: nn.Module) -> dict[str, list[str]]:
    """The `Pieces` of all stacks in `model`; empty: it has none."""
    return {
        f"{fqn}.{name}": [f"{fqn}.{stack.piece(name, number)}" for number in range(len(stack))]
        for fqn, stack in bare_modules(model)
        if isinstance(stack, StackedExperts)
        for name in stack.names
    }


def own_views(stacked: Tensor) -> dict[int, Tensor]:
    """Number of an expert → this rank's part of its weight, for those that this rank has some of.

    A DTensor over the ranks that share the expert, or a plain tensor where it is whole.
    """
    if not isinstance(stacked, DTensor):
        return dict(enumerate(stacked.unbind(0)))
    local, mesh, names = stacked.to_local(), stacked.device_mesh, stacked.device_mesh.mesh_dim_names or ()
    each = stacked.shape[0] // mesh["ep"].size()
    first = mesh["ep"].get_local_rank() * each
    others = [(name, place) for name, place in zip(names, stacked.placements, strict=True) if name != "ep"]
    rows = [name for name, place in others if getattr(place, "dim", None) == 0]
    if rows:  # whole experts, divided further over ranks
        first += mesh[rows[0]].get_local_rank() * -(-each // mesh[rows[0]].size())
    if rows or not others:
        return {first + at: view for at, view in enumerate(local.unbind(0))}
    rest = mesh[tuple(name for name, _ in others)]
    placements = [place if place.is_replicate() else Shard(place.dim - 1) for _, place in others]  # type: ignore[attr-defined]
    shape = stacked.shape[1:]
    stride = torch.empty(shape, device="meta").stride()
    return {
        first + at: DTensor.from_local(view, rest, placements, run_check=False, shape=shape, stride=stride)
        for at, view in enumerate(local.unbind(0))
    }


def optimizer_apart(state: dict[str, Any], pieces: Pieces) -> dict[str, Any]:
    """An optimizer's state with the names of `pieces` in the place of the stacked ones."""
    made: dict[str, Any] = {}
    for name, entry in state.get("state", {}).items():
        if name not in pieces:
            made[name] = entry
            continue
        views = {key: own_views(value) for key, value in entry.items() if value.ndim}  # a number of steps has none
        for number in next(iter(views.values()), {}):
            made[pieces[name][number]] = {
                key: views[key][number] if key in views else value for key, value in entry.items()
            }
    groups = [
        group | {"params": [name_of_piece for name in group["params"] for name_of_piece in pieces.get(name, [name])]}
        for group in state.get("param_groups", [])
    ]
    return state | ({"state": made, "param_groups": groups} if state else {})


def optimizer_together(state: Mapping[str, Any], pieces: Pieces, like: Mapping[str, Tensor]) -> dict[str, Any]:
    """The opposite of `optimizer_apart`; like: the stacked weights by name."""
    if not state:
        return dict(state)
    merged = dict(state["state"])
    stacked_as = {piece: name for name, owned in pieces.items() for piece in owned}
    for name, owned in pieces.items():
        states = [merged.pop(piece) for piece in owned if piece in merged]
        if states:
            merged[name] = {key: _stack([entry[key] for entry in states], like[name]) for key in states[0]}
    groups = [
        group | {"params": list(dict.fromkeys(stacked_as.get(name, name) for name in group["params"]))}
        for group in state["param_groups"]
    ]
    return dict(state) | {"state": merged, "param_groups": groups}


def _stack(values: Sequence[Any], like: Tensor) -> Any:
    if not isinstance(values[0], Tensor) or values[0].ndim == 0:
        return values[0]
    if len(values) == len(like) and not isinstance(values[0], DTensor):
        return torch.stack(list(values))  # whole
    local = torch.stack([value.to_local() if isinstance(value, DTensor) else value for value in values])
    if not isinstance(like, DTensor):
        return local
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
