"""Experts that a file has one by one, under the names of fused weights that the model has."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

_ONE = re.compile(r"(?P<around>.+\.experts)\.(?P<number>\d+)\.(?P<name>\w+)\.weight")
# Of one expert, by family: Mixtral's files say w1, w3 and w2.
_GATES, _UPS, _DOWNS = ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")
_RENAMED = {".block_sparse_moe.": ".mlp."}


@dataclass(frozen=True)
class FusedWeight:
    """One weight of all experts, made of many of the file: for each expert, what is stacked along its first dim."""

    parts: tuple[tuple[str, ...], ...]
    shape: torch.Size


def fused_weights(shapes: Mapping[str, torch.Size]) -> dict[str, FusedWeight]:
    """The fused weights that a file with tensors of these names has the pieces of, by the name in the model.

    >>> one = torch.Size((8, 4))
    >>> sorted(fused_weights({f"mlp.experts.{e}.{n}.weight": one for e in (0, 1) for n in ("w1", "w3")}))
    ['mlp.experts.gate_up_proj']
    """
    found: dict[str, dict[str, dict[int, str]]] = {}
    for name in shapes:
        match = _ONE.fullmatch(name)
        if match is not None:
            found.setdefault(match["around"], {}).setdefault(match["name"], {})[int(match["number"])] = name
    made: dict[str, FusedWeight] = {}
    for around, by_name in found.items():
        for fused, wanted in (("gate_up_proj", (_GATES, _UPS)), ("down_proj", (_DOWNS,))):
            pieces = [next((by_name[n] for n in names if n in by_name), {}) for names in wanted]
            count = len(pieces[0])
            if not count or any(sorted(piece) != list(range(count)) for piece in pieces):
                continue
            parts = tuple(tuple(piece[e] for piece in pieces) for e in range(count))
            rows = sum(shapes[name][0] for name in parts[0])
            made[f"{in_the_model(around)}.{fused}"] = FusedWeight(
                parts, torch.Size((count, rows, *shapes[parts[0][0]][1:]))
            )
    return made


def in_the_model(name: str) -> str:
    """The name that transformers gives in a model to what its files call `name`."""
    for old, new in _RENAMED.items():
        name = name.replace(old, new)
    return name


def pieces_of(fused: Iterable[FusedWeight]) -> set[str]:
    """The names in the file that `fused` are made of."""
    return {name for weight in fused for part in weight.parts for name in part}
