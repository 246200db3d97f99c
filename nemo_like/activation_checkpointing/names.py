"""Tensors by name: a module's output by its path in the layer, an operator's by a word, any other by `name`.

1. Hooks on the named modules, and calls of `name`, tell the running forward of a region, or a trace of the planner, that a
   tensor has a name. Its storage leads to the operator that made it, whose output is kept. Nothing else looks at names.
2. A region looks at all its operators in its first call, and learns which kinds make named tensors; from then on it looks at
   these alone. A named tensor of another kind has it look at all of them in the next call again.
3. In that call it also learns which operators neither backward nor another recomputed one reads (`engine.liveness`): the
   following calls leave them out of recomputation, as a plan does (SKIP). A call of other operators leaves none out.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from nemo_like._util.log import say_once
from nemo_like._util.module_tree import bare_modules, glob_to_regex
from nemo_like._util.op_lookup import Op
from nemo_like._util.tensors import tensors_in
from nemo_like._util.words import did_you_mean
from nemo_like.activation_checkpointing import ops
from nemo_like.activation_checkpointing.policy import HOST, RECOMPUTE, SAVE, SKIP, Decision, Misfit
from nemo_like.options.names import NUMBERED, WORDS, NamedList, NamedLists
from nemo_like.torch_compat import local_part, module_of_node

_here = threading.local()  # The listener of this thread: no context variable, which a recomputation would restore.


class Listener(Protocol):
    """Something that notes the names of tensors: the forward of a region, or a trace."""

    def named(self, tensor: Tensor, label: str) -> None:
        """Note that `tensor` has the name `label`."""


def name(tensor: Tensor, label: str) -> Tensor:
    """Return `tensor`, which lists of names (``ac={"save": [label]}``) know as `label` from now on.

    Call it in the forward of a layer, on a tensor that an operator of that layer has just made. It changes nothing. In
    compiled code it is left out, and ``ac`` with the label needs a ``sample_input``.

    >>> q = name(torch.ones(2), "q_rotated")
    """
    if not torch.compiler.is_compiling() and (listener := getattr(_here, "listener", None)) is not None:
        listener.named(tensor, label)
    return tensor


@contextmanager
def heard_by(listener: Listener | None) -> Iterator[None]:
    """Within it `listener` hears of names in this thread, and no other."""
    before, _here.listener = getattr(_here, "listener", None), listener
    try:
        yield
    finally:
        _here.listener = before


def _tell_output(label: str, module: nn.Module, args: Any, output: Any) -> None:
    for tensor in tensors_in(output)[:1]:
        name(tensor, label)


def _tell_input(label: str, module: nn.Module, args: Any, kwargs: Any) -> None:
    for tensor in tensors_in((args, kwargs))[:1]:
        name(tensor, label)


def watch_modules(layer: nn.Module, wanted: Callable[[str], object], within: str = "") -> list[Any]:
    """Have the modules below `within` of a layer tell the names of their outputs and inputs, if `wanted`; return handles."""
    handles = []
    for path, module in bare_modules(layer):
        if path and (not within or path.startswith(f"{within}.")):
            if wanted(path):
                handles.append(module.register_forward_hook(functools.partial(_tell_output, path)))
            if wanted(label := f"{path}.input"):
                hook = functools.partial(_tell_input, label)
                handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
    return handles


def matches(pattern: str, label: str) -> bool:
    """Return whether a glob over names has `label`."""
    return glob_to_regex(pattern).fullmatch(label) is not None


_RANGE = re.compile(r"(\[\d+-\d+\])")


def matches_layer(glob: str, layer: str) -> bool:
    """Return whether a glob over names of layers has `layer`.

    >>> matches_layer("model.layers.[7-31]", "model.layers.12"), matches_layer("model.layers.[7-31]", "model.layers.5")
    (True, False)
    """
    parts = _RANGE.split(glob)
    ranges = [range(int(a), int(b) + 1) for a, b in (part[1:-1].split("-") for part in parts[1::2])]
    pattern = "".join(r"(\d+)" if at % 2 else glob_to_regex(part).pattern for at, part in enumerate(parts))
    match = re.fullmatch(pattern, layer)
    return match is not None and all(int(number) in span for number, span in zip(match.groups(), ranges, strict=True))


_ADD = torch.ops.aten.add.Tensor
_SMALL = 64  # A statistic has at most this part of the bytes of the layer's input.


@functools.cache
def _word_of_kind(op: Op) -> str:
    return next((word for word in ("attention", "matmuls", *NUMBERED) if op in ops.named_ops(word)), "")


class Hidden(NamedTuple):
    """Shape and bytes of a layer's first input, on this rank."""

    shape: torch.Size
    nbytes: int

    @classmethod
    def of(cls, inputs: Any) -> Hidden | None:
        """Return those of the first tensor of numbers among `inputs`; None: there is none."""
        first = next((local_part(t) for t in tensors_in(inputs) if t.is_floating_point()), None)
        return None if first is None else cls(first.shape, first.nbytes)


def words_of(op: Op, nth: int, args: tuple[Any, ...], out: Any, hidden: Hidden | None) -> tuple[str, ...]:
    """Return the words for the output of the n-th call of an operator, out of `WORDS`."""
    word = _word_of_kind(op)
    if word or hidden is None:
        return (word, f"{word}.{nth + 1}") if word in NUMBERED else (word,) if word else ()
    if op is _ADD and all(isinstance(t, Tensor) and local_part(t).shape == hidden.shape for t in args[:2]):
        return ("residual",)
    size = sum(local_part(tensor).nbytes for tensor in tensors_in(out))
    return ("statistics",) if 0 < size * _SMALL <= hidden.nbytes and not ops.facts(op).random else ()


def operands_of(op: Op, nth: int, args: tuple[Any, ...]) -> list[tuple[Tensor, str]]:
    """Return the named operands of the n-th call of an operator."""
    word = _word_of_kind(op)
    if word == "attention":
        return list(zip(args, ("attention.q", "attention.k", "attention.v")))
    return [(args[0], f"{word}.{nth + 1}.input")] if word in NUMBERED else []


class NamedPolicy:
    """Policy that keeps the outputs with the names of a list; the rest of a region is recomputed.

    Each region has one, which learns of it (rules 2 and 3); those of compiled layers share one, which learns nothing.
    """

    keeps_nothing, strict, word = False, False, "named"

    def __init__(self, names: NamedList, compiled: bool = False) -> None:
        self.names, self.learns, self.moves = names, not compiled, bool(names.offload)
        self.met: set[str] = set()  # Names that tensors had in a forward.
        self.stay: set[str] = set()  # Those of them that were kept.
        self.tracked: frozenset[Op] | None = None  # Kinds of operators that it looks at; None: all.
        self.left_out: Mapping[Op, frozenset[int]] = {}  # By kind, which of its calls recomputation leaves out.
        self.counts: Mapping[Op, int] = {}  # Calls of these kinds in the call that was learned from.
        self.misfits = 0
        self._kinds: set[Op] = set()
        self._inputs: set[str] = set()  # Names of tensors that no operator of the layer makes.
        self._decisions: dict[str, Decision | None] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.names, not self.learns)

    def decision(self, label: str) -> Decision | None:
        """Return the decision on tensors of this name; None: no list has it."""
        if label not in self._decisions:
            lists = ((self.names.save, SAVE), (self.names.offload, HOST))
            matching = (decision for names, decision in lists if any(matches(pattern, label) for pattern in names))
            self._decisions[label] = next(matching, None)
        return self._decisions[label]

    def of_op(self, op: Op, labels: Iterable[str]) -> Decision:
        """Return the decision on an output with these names."""
        decision = next((d for label in labels if (d := self.decision(label)) is not None), None)
        return decision or (SAVE if ops.facts(op).pinned else RECOMPUTE)

    def tracked_ops(self) -> frozenset[Op] | None:
        """Return the kinds that were learned; None: all."""
        return self.tracked

    def start(self) -> Any:
        """Return a decision function for one region call."""
        return NamedRun(self)

    # --- learning -------------------------------------------------------------------------------------------------

    def learn(self, label: str, op: Op | None) -> None:
        """Note the kind of operator that made a named tensor; None: none that was looked at."""
        self.met.add(label)
        if op is not None:
            self._kinds.add(op)
        elif self.tracked is None:
            self._inputs.add(label)
        elif label not in self._inputs:
            self.tracked = None  # one that was not looked at

    def settle(self, left_out: Mapping[Op, frozenset[int]], counts: Mapping[Op, int]) -> None:
        """End a call in which all operators were looked at: look at some from now on, and leave out `left_out`."""
        self.left_out = left_out if self.misfits < _MOST_MISFITS else {}
        self.counts = {op: counts[op] for op in self.left_out}
        words = {word.partition(".")[0] for word in WORDS if self.decision(word) is not None}
        readers = [op for word in words for op in ops.named_ops(word)]
        self.tracked = frozenset((*self._kinds, *readers, *ops.pinned_ops(), *self.left_out))


def named_policy(policy: object) -> NamedPolicy | None:
    """Return the `NamedPolicy` that a policy is, or is around; None: it is another one."""
    inner = getattr(policy, "inner", getattr(policy, "policy", policy))  # `KeepRouting`, `HostPolicy`
    return inner if isinstance(inner, NamedPolicy) else None


# Lists of names on the layers of a model.


def check_lists(
    layers: Mapping[str, nn.Module], lists: NamedLists, compiler: str | None = None, *, part: bool = False
) -> dict[NamedList, list[str]]:
    """Return the names of the layers of each list: each has the first that matches it.

    Args:
        layers: the layers in scope, by name.
        lists: the lists.
        compiler: compiles the layers; of graphs that a partitioner cuts only matmuls and attention have names.
        part: the layers are some of those that were checked: check nothing.

    Raises:
        ValueError: a list without layers; a name that none of its layers has, or that is in no region.
    """
    of_list: dict[NamedList, list[str]] = {names: [] for names in lists.lists}
    for fqn in layers:
        first = (n for n in lists.lists if not n.layers or any(matches_layer(glob, fqn) for glob in n.layers))
        if (names := next(first, None)) is not None:
            of_list[names].append(fqn)
    for names, fqns in () if part else of_list.items():
        if not fqns:
            raise ValueError(
                f"ac has a list for layers={list(names.layers)}, and no layer is left for it: lists before it have them, or "
                f"there is no such name. The layers are {', '.join(list(layers)[:4])}, ..."
            )
        _check_names(names, [layers[fqn] for fqn in fqns], compiler)
    return of_list


def _check_names(names: NamedList, layers: Sequence[nn.Module], compiler: str | None) -> None:
    paths = {path: module for layer in layers for path, module in bare_modules(layer) if path}
    every = [*WORDS, *paths, *(f"{path}.input" for path in paths)]
    regions = {region for layer in layers for region in regions_of(names, layer)}
    for pattern in (*names.names, *(names.recompute or ())):
        labels, more = (every, "; and labels of nemo_like.name()") if pattern in names.names else (list(paths), "")
        matching = [label for label in labels if matches(pattern, label)]
        if not matching and not (is_label(pattern) and pattern in names.names):
            raise ValueError(
                f"ac has the name {pattern!r}, which these layers do not have. They have {', '.join(labels)}{more}."
                + did_you_mean(pattern, labels)
            )
        inside = any(
            label in WORDS or not region or label.startswith(f"{region}.") for label in matching for region in regions
        )
        if matching and pattern in names.names and not inside:
            raise ValueError(
                f"ac has the name {pattern!r}, which is in no module of recompute={list(names.recompute or ())}: it stays "
                "anyway. Leave it out, or recompute the module that it is in."
            )
        linears = (
            () if compiler == "eager" else [path for path, module in paths.items() if isinstance(module, nn.Linear)]
        )
        followed = all(label in _IN_GRAPHS or label in linears for label in matching)
        if compiler and pattern in names.names and not (matching and followed):
            raise ValueError(
                f"ac has the name {pattern!r} and compile is {compiler!r}, whose graphs know {', '.join(_IN_GRAPHS)}"
                f"{' and linears' if linears else ''} alone by name. Give sample_input=, by which a plan finds the others."
            )


_IN_GRAPHS = ("attention", "matmuls", "experts")


def regions_of(names: NamedList, layer: nn.Module) -> list[str]:
    """Return the paths of the regions in a layer, outermost ones alone; empty path: the layer itself."""
    if names.recompute is None:
        return [""]
    paths = [path for path, _ in bare_modules(layer) if path and any(matches(glob, path) for glob in names.recompute)]
    return [path for path in paths if not any(path.startswith(f"{other}.") for other in paths)]


class FirstForward:
    """Forward hook of a model, which looks in the first forward with gradients whether all names were met and kept."""

    def __init__(self, policies: Iterable[NamedPolicy], labels: bool) -> None:
        """Keep the policies of a model's regions; `labels`: raise where a label of `name` was not met."""
        self.labels, self.done = labels, False
        self.by_list: dict[NamedList, list[NamedPolicy]] = {}
        for policy in policies:
            self.by_list.setdefault(policy.names, []).append(policy)

    def __call__(self, *_: object) -> None:
        if self.done or not torch.is_grad_enabled():
            return
        self.done = True
        for names, policies in self.by_list.items():
            met, stay = (set[str]().union(*(getattr(p, part) for p in policies)) for part in ("met", "stay"))
            for pattern in names.names:
                if pattern in WORDS or any(matches(pattern, label) for label in stay):
                    continue
                if any(matches(pattern, label) for label in met):
                    say_once(
                        f"ac keeps {pattern!r}, and that keeps nothing: no recomputation reaches it, or no operator of the "
                        "layer makes it. Leave it out."
                    )
                elif self.labels and is_label(pattern):
                    raise ValueError(
                        f"ac has the name {pattern!r}, and no tensor had it in the first forward: it is not a module of the "
                        f"layers, and no call nemo_like.name(tensor, {pattern!r}) ran in one of them."
                    )


def is_label(pattern: str) -> bool:
    """Return whether a pattern can be a label of `name`: a word without dots and wildcards."""
    return pattern.isidentifier()


_MOST_MISFITS = 2  # Calls of other operators, as of experts that no token went to, after which nothing is left out.


class NamedRun:
    """One region call under a `NamedPolicy`."""

    needs_call = True

    def __init__(self, policy: NamedPolicy) -> None:
        self.policy = policy
        self.learns = policy.learns and policy.tracked is None
        self.settle = policy.settle
        self.hidden: Hidden | None = None
        self._counts: dict[Op, int] = {}

    def begin(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Note the layer's first input, by which sums and statistics are told."""
        self.hidden = Hidden.of((args, kwargs))

    def __call__(self, op: Op, index: int, args: Any, kwargs: Any, out: Any) -> Decision:
        policy = self.policy
        self._counts[op] = index + 1
        words = words_of(op, index, args, out, self.hidden)
        decision = policy.of_op(op, words)
        if words and decision is not RECOMPUTE:
            policy.learn(words[0], op)
        if decision is RECOMPUTE and not policy.learns:
            decision = policy.of_op(op, _labels_of_node(op))
        return SKIP if decision is RECOMPUTE and index in policy.left_out.get(op, ()) else decision

    def named(self, label: str, op: Op | None) -> Decision | None:
        """Return the decision on a tensor of this name, which a call of `op` made; None: none that was looked at."""
        decision = self.policy.decision(label)
        if decision is not None:
            self.policy.learn(label, op)
        return decision

    def tell(self, labels: Iterable[str]) -> None:
        """Note the names of the tensors that are kept after the forward."""
        self.policy.stay.update(labels)

    def finish(self) -> Misfit | None:
        """Return why nothing is left out in this call, if its operators are not those that were learned from."""
        policy = self.policy
        if self.learns:
            return None
        wrong = [op for op, count in policy.counts.items() if self._counts.get(op, 0) != count]
        if not wrong:
            return None
        policy.misfits, policy.tracked = policy.misfits + 1, None
        policy.left_out, policy.counts = {}, {}
        return Misfit(frozenset(), f"{wrong[0]} ran {self._counts.get(wrong[0], 0)} times, and another number before")


def _labels_of_node(op: Op) -> list[str]:
    """Return names of the output of an operator in a graph that is being made: the module that runs, for a matmul of it."""
    pieces = module_of_node().split(".") if op in ops.named_ops("matmuls") else []
    return [".".join(pieces[at:]) for at in range(len(pieces))]
