"""Sources of weights: a state dict in memory, a DCP folder, safetensors, or a file of torch.save.

A source tells the shapes it has, and fills tensors by name. A rank never keeps more than one whole tensor at a time
that was not in memory before.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from nemo_like._util.extras import require
from nemo_like._util.words import a_or_an
from nemo_like.distributed.expert.expert_lists import copy_own_experts, own_experts
from nemo_like.distributed.weights.slots import Slot, copy_whole, in_boxes, list_names


class CheckpointUnreadableError(RuntimeError):
    """A checkpoint is absent, damaged or of no known kind."""


class Source(Protocol):
    """Named tensors that can be read into a model's."""

    @property
    def label(self) -> str:
        """Return the name of the source, for messages."""

    @property
    def shapes(self) -> Mapping[str, torch.Size]:
        """The global shape of each tensor it has, by name."""

    def fill(self, targets: Mapping[str, Tensor]) -> None:
        """Copy the named tensors into `targets`, each rank its part. A collective for DCP folders."""

    def get(self, name: str) -> Tensor:
        """One whole tensor (to compare tied ones)."""


class StateDictSource:
    """Tensors in memory (or mapped into it), the same on every rank; DTensors are gathered one by one."""

    def __init__(self, state: Mapping[str, Any], label: str = "state_dict") -> None:
        self.label = label
        for name, value in state.items():
            if not isinstance(value, Tensor):
                raise TypeError(f"{label}[{name!r}] is {a_or_an(value)}; every value must be a tensor.")
            if value.is_meta:
                raise ValueError(f"{label}[{name!r}] is on the meta device: it has no values to copy.")
        self._state = state
        self.shapes = {name: value.shape for name, value in state.items()}

    def get(self, name: str) -> Tensor:
        value = self._state[name]
        return value.full_tensor() if isinstance(value, DTensor) else value

    def fill(self, targets: Mapping[str, Tensor]) -> None:
        for name, target in targets.items():
            copy_whole(target, self.get(name))


class SafetensorsSource:
    """A Hugging Face folder or file: tensors are read one at a time, and of experts only those that this rank holds.

    Files have most mixtures of experts expert by expert (`fused_names`); here they have the names and shapes of the model.
    """

    def __init__(self, path: Path, apart: Collection[str] = ()) -> None:
        """apart: names that the model has as the files do, and that are not to be fused."""
        self.label = str(path)
        self._open = require("safetensors", "hf", "to read safetensors files").safe_open
        self._file_of: dict[str, Path] = {}
        shapes: dict[str, torch.Size] = {}
        index = path / "model.safetensors.index.json"
        if path.is_file():
            files = [path]
        elif index.exists():
            files = [path / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
        else:
            files = sorted(path.glob("*.safetensors"))
        for file in files:
            with self._open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118  (a safe_open is not a mapping)
                    self._file_of[name] = file
                    shapes[name] = torch.Size(opened.get_slice(name).get_shape())
        self._fused = fused_weights({name: shape for name, shape in shapes.items() if name not in apart})
        pieces = pieces_of(self._fused.values())
        self._stored = {in_the_model(name) if self._fused else name: name for name in shapes if name not in pieces}
        self.shapes = {name: shapes[stored] for name, stored in self._stored.items()}
        self.shapes |= {name: weight.shape for name, weight in self._fused.items()}

    def get(self, name: str) -> Tensor:
        return self.rows(name, slice(None))

    def rows(self, name: str, rows: slice) -> Tensor:
        """Return those rows of dim 0 of one tensor, and nothing else of it."""
        if name not in self._fused:
            return self._read(self._stored[name], rows)
        parts = self._fused[name].parts[rows]
        return torch.stack([torch.cat([self._read(piece, slice(None)) for piece in part]) for part in parts])

    def _read(self, stored: str, rows: slice) -> Tensor:
        with self._open(self._file_of[stored], framework="pt") as opened:
            return opened.get_tensor(stored) if rows == slice(None) else opened.get_slice(stored)[rows]

    def fill(self, targets: Mapping[str, Tensor]) -> None:
        for name, target in targets.items():
            rows = own_experts(target)
            if rows is None:
                copy_whole(target, self.get(name))
            else:
                assert isinstance(target, DTensor)
                copy_own_experts(target, self.rows(name, rows))


class DCPSource:
    """A folder of `torch.distributed.checkpoint`: each rank reads the bytes of its shards.

    The weights may be at the top, or under ``"model"`` as training checkpoints have them.
    """

    def __init__(self, path: Path) -> None:
        self.label = str(path)
        self._path = path
        metadata = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        shapes = {name: entry.size for name, entry in metadata.items() if isinstance(entry, TensorStorageMetadata)}
        self._prefix = "model." if any(key.split(".")[0] in ("optimizer", "optim") for key in metadata) else ""
        cut = len(self._prefix)
        self.shapes = {name[cut:]: size for name, size in shapes.items() if name.startswith(self._prefix)}

    def get(self, name: str) -> Tensor:
        whole = torch.empty(self.shapes[name])
        self._load({self._prefix + name: whole})
        return whole

    def fill(self, targets: Mapping[str, Tensor]) -> None:
        self._load({self._prefix + name: in_boxes(tensor.detach()) for name, tensor in targets.items()})

    def _load(self, state: dict[str, Any]) -> None:
        reader = dcp.FileSystemReader(self._path)
        dcp.load(state, storage_reader=reader, no_dist=not (dist.is_available() and dist.is_initialized()))


class LayeredSource:
    """Several sources as one, each under names of its own: a tensor comes from the first that has it.

    Args:
        layers: (source, names): `names` gives for a name of the model the source's own, or None where it has none.
    """

    def __init__(self, layers: Sequence[tuple[Source, Callable[[str], str | None]]], names: Iterable[str]) -> None:
        self.label = " and ".join(source.label for source, _ in layers)
        self._place: dict[str, tuple[Source, str]] = {}
        for name in names:
            for source, rename in layers:
                stored = rename(name)
                if stored is not None and stored in source.shapes:
                    self._place[name] = (source, stored)
                    break
        self.shapes = {name: source.shapes[stored] for name, (source, stored) in self._place.items()}

    def get(self, name: str) -> Tensor:
        source, stored = self._place[name]
        return source.get(stored)

    def fill(self, targets: Mapping[str, Tensor]) -> None:
        by_source: dict[int, tuple[Source, dict[str, Tensor]]] = {}
        for name, target in targets.items():
            source, stored = self._place[name]
            by_source.setdefault(id(source), (source, {}))[1][stored] = target
        for source, wanted in by_source.values():
            source.fill(wanted)


class ListedSource:
    """Another source, which has experts one by one, for a model that has them stacked: each rank reads its own."""

    def __init__(self, source: Source, pieces: Mapping[str, Sequence[str]]) -> None:
        """pieces: name of a stack → the names of its experts' weights, in order."""
        self.label, self._source = source.label, source
        self._pieces = {
            name: of_weight for name, of_weight in pieces.items() if all(one in source.shapes for one in of_weight)
        }
        single = {one for of_weight in self._pieces.values() for one in of_weight}
        self.shapes = {name: shape for name, shape in source.shapes.items() if name not in single}
        for name, of_weight in self._pieces.items():
            self.shapes[name] = torch.Size((len(of_weight), *source.shapes[of_weight[0]]))

    def get(self, name: str) -> Tensor:
        if name not in self._pieces:
            return self._source.get(name)
        return torch.stack([self._source.get(one) for one in self._pieces[name]])

    def fill(self, targets: Mapping[str, Tensor]) -> None:
        self._source.fill({name: target for name, target in targets.items() if name not in self._pieces})
        for name, target in targets.items():
            if name not in self._pieces:
                continue
            rows = own_experts(target)
            if rows is None:
                copy_whole(target, self.get(name))
            else:
                assert isinstance(target, DTensor)
                copy_own_experts(target, torch.stack([self._source.get(one) for one in self._pieces[name][rows]]))


def open_source(
    checkpoint: Mapping[str, Any] | str | os.PathLike[str] | LayeredSource, apart: Collection[str] = ()
) -> Source:
    """A state dict, a path to a DCP folder, a folder or file of safetensors, or a file of ``torch.save``.

    apart: names of experts' weights that the model has one by one, as the files of safetensors do.

    Raises:
        CheckpointUnreadableError: nothing is there, or what is there cannot be read.
    """
    if isinstance(checkpoint, LayeredSource):
        return checkpoint
    if isinstance(checkpoint, Mapping):
        return StateDictSource(checkpoint)
    path = Path(checkpoint)
    try:
        if not path.exists():
            raise FileNotFoundError("there is no such file or folder")
        if path.is_dir():
            if (path / ".metadata").exists():
                return DCPSource(path)
            if any(path.glob("*.safetensors")):
                return SafetensorsSource(path, apart)
            inside = ", ".join(sorted(entry.name for entry in path.iterdir())[:5]) or "nothing"
            raise FileNotFoundError(f"it has neither .metadata nor *.safetensors, but {inside}")
        if path.suffix == ".safetensors":
            return SafetensorsSource(path, apart)
        return StateDictSource(torch.load(path, map_location="cpu", mmap=True, weights_only=True), str(path))
    except ImportError:
        raise
    except Exception as error:  # whatever a reader raises on damaged bytes: the caller needs the path
        raise CheckpointUnreadableError(
            f"The checkpoint {path} cannot be read: {type(error).__name__}: {error}"
        ) from error


def check_names(slots: list[Slot], source: Source, strict: bool) -> None:
    """Raise `ValueError` where `source` does not fit a model's tensors: names, shapes, ties. Changes nothing."""
    missing = [slot.name for slot in slots if slot.saved and not any(name in source.shapes for name in slot.names)]
    if missing:
        raise ValueError(
            f"{source.label} lacks {len(missing)} of the model's tensors: {list_names(missing)}. "
            f"It has {list_names(source.shapes) or 'none at all'}."
        )
    unknown = set(source.shapes) - {name for slot in slots for name in slot.names}
    if unknown and strict:
        raise ValueError(
            f"{source.label} has {len(unknown)} tensor(s) that the model does not have: {list_names(unknown)}. "
            "Pass strict=False to leave them out."
        )
    for slot in [slot for slot in slots if slot.saved]:
        names = [name for name in slot.names if name in source.shapes]
        for name in names:
            if source.shapes[name] != slot.tensor.shape:
                raise ValueError(
                    f"{source.label} has {name} with shape {tuple(source.shapes[name])}; "
                    f"the model's has {tuple(slot.tensor.shape)}."
                )
        for name in names[1:]:
            if not torch.equal(source.get(names[0]), source.get(name)):
                raise ValueError(
                    f"{names[0]} and {name} are one tied parameter in the model, and differ in {source.label}: "
                    "untie them in the model, or drop one of the two from the source."
                )


# Experts that a file has one by one, under the names of fused weights that the model has.

_ONE = re.compile(r"(?P<around>.+\.experts)\.(?P<number>\d+)\.(?P<name>\w+)\.weight")
# Of one expert, by family: Mixtral's files name w1, w3 and w2.
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
    weights: dict[str, dict[str, dict[int, str]]] = {}
    for name in shapes:
        match = _ONE.fullmatch(name)
        if match is not None:
            weights.setdefault(match["around"], {}).setdefault(match["name"], {})[int(match["number"])] = name
    made: dict[str, FusedWeight] = {}
    for around, by_name in weights.items():
        for fused, wanted in (("gate_up_proj", (_GATES, _UPS)), ("down_proj", (_DOWNS,))):
            pieces = [next((by_name[n] for n in names if n in by_name), {}) for names in wanted]
            count = len(pieces[0])
            if not count or any(sorted(piece) != list(range(count)) for piece in pieces):
                continue
            parts = tuple(tuple(piece[expert] for piece in pieces) for expert in range(count))
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
