"""Sources of weights: a state dict in memory, a DCP folder, safetensors, or a file of torch.save.

A source tells the shapes it has, and fills tensors by name. Of stored tensors, a rank reads its own part into place; of
a state dict of DTensors, it keeps one whole tensor at a time.
"""

import json
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    FileSystemReader,
    HuggingFaceStorageReader,
    LoadPlan,
    ReadItem,
)
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor

from nemo_like._util.extras import require
from nemo_like._util.words import a_or_an
from nemo_like.distributed.weights.checked_files import CheckedReader, CheckpointUnreadableError, check_inside
from nemo_like.distributed.weights.tensor_locations import Box, Slot, boxes_of, copy_whole, list_names


class StateDictSource:
    """Tensors in memory (or mapped into it), the same on every rank; DTensors are gathered one by one.

    A source has a `label` for messages and the whole `shapes` of its tensors by name.
    """

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
        """One whole tensor (to compare tied ones)."""
        value = self._state[name]
        return value.full_tensor() if isinstance(value, DTensor) else value

    def fill(self, targets: Mapping[str, Tensor]) -> None:
        """Copy the named tensors into `targets`, each rank its part; no communication."""
        for name, target in targets.items():
            copy_whole(target, self.get(name))


class StoredSource:
    """A folder or file that `torch.distributed.checkpoint` has a reader for: each rank reads the bytes of its own part.

    Weights may be at the top, or under ``"model"`` as training checkpoints have them. Files of Hugging Face have most
    MoE blocks expert by expert (`fused_weights`); here they have the names and shapes of the model.

    Args:
        apart: names that the model has as the files do, and that are not to be fused.
    """

    def __init__(self, path: Path, reader: FileSystemReader, apart: Collection[str] = ()) -> None:
        self.label, self._reader = str(path), reader
        metadata = reader.read_metadata()
        reader.set_up_storage_reader(metadata, is_coordinator=True)
        entries = metadata.state_dict_metadata
        prefix = "model." if any(name.split(".")[0] in ("optimizer", "optim") for name in entries) else ""
        self._saved = {
            name.removeprefix(prefix): entry
            for name, entry in entries.items()
            if isinstance(entry, TensorStorageMetadata) and name.startswith(prefix)
        }
        self._prefix = prefix
        self._fused = fused_weights({name: entry.size for name, entry in self._saved.items() if name not in apart})
        pieces = {name for weight in self._fused.values() for part in weight.parts for name in part}
        self._stored = {in_the_model(name) if self._fused else name: name for name in self._saved if name not in pieces}
        self.shapes = {name: self._saved[stored].size for name, stored in self._stored.items()}
        self.shapes |= {name: weight.shape for name, weight in self._fused.items()}

    def get(self, name: str) -> Tensor:
        stored = self._fused[name].parts[0][0] if name in self._fused else self._stored[name]
        whole = torch.empty(self.shapes[name], dtype=self._saved[stored].properties.dtype)
        self.fill({name: whole})
        return whole

    def fill(self, targets: Mapping[str, Tensor]) -> None:
        wanted: dict[str, list[Box]] = {}
        for name, target in targets.items():
            for box in boxes_of(target.detach()):
                for stored, piece in self._pieces(name, *box):
                    wanted.setdefault(self._prefix + stored, []).append(piece)
        items: list[ReadItem] = []
        for stored, boxes in wanted.items():
            entry = self._saved[stored.removeprefix(self._prefix)]
            items += create_read_items_for_chunk_list(stored, entry, [chunk for chunk, _ in boxes])
        # Not by `dcp.load`, which would read the metadata again, and have ranks wait for each other.
        try:
            self._reader.read_data(LoadPlan(items), _Boxes(wanted)).wait()
        except Exception as error:  # whatever a reader raises on damaged bytes
            raise CheckpointUnreadableError(f"Reading {self.label} failed: {type(error).__name__}: {error}") from error

    def _pieces(self, name: str, chunk: ChunkStorageMetadata, view: Tensor) -> Iterator[tuple[str, Box]]:
        """Cut a box of the tensor `name` at the tensors that it is stored as: yield their names, and boxes of those."""
        if name not in self._fused:
            yield self._stored[name], (chunk, view)
            return
        (expert, begin, *rest), (experts, rows, *sizes) = chunk.offsets, chunk.sizes
        for part, into in zip(self._fused[name].parts[expert : expert + experts], view):
            at = 0  # the row of the expert's weight that a piece begins at
            for stored in part:
                end = at + self._saved[stored].size[0]
                first, last = max(at, begin), min(end, begin + rows)
                if first < last:
                    box = ChunkStorageMetadata(torch.Size((first - at, *rest)), torch.Size((last - first, *sizes)))
                    yield stored, (box, into[first - begin : last - begin])
                at = end


class _Boxes(DefaultLoadPlanner):
    """Tells a reader where each box goes."""

    def __init__(self, boxes: Mapping[str, Sequence[Box]]) -> None:
        super().__init__()
        self._boxes = boxes

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        assert index.index is not None
        return self._boxes[index.fqn][index.index][1]


class _Files(FileSystem):
    """A folder of which only these files are read: torch's reader lists the folder, and knows no index (2.13 to 2.15)."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = [str(file) for file in files]

    def ls(self, path: str | os.PathLike[str]) -> list[str]:
        return self._files


def _safetensors(path: Path) -> HuggingFaceStorageReader:
    """Return a reader of one file, of those in the index of a folder, or of all in it."""
    require("safetensors", "hf", "to read safetensors files")
    index = path / "model.safetensors.index.json"
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    if index.exists():
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        check_inside(index, names)
        files = [path / name for name in sorted(set(names))]
    reader = HuggingFaceStorageReader(str(path))
    reader.fs = _Files(files)
    return reader


def open_source(
    checkpoint: Mapping[str, Any] | str | os.PathLike[str], apart: Collection[str] = ()
) -> StateDictSource | StoredSource:
    """A state dict, a path to a DCP folder, a folder or file of safetensors, or a file of ``torch.save``.

    apart: names of experts' weights that the model has one by one, as the files of safetensors do.

    Raises:
        CheckpointUnreadableError: nothing is there, or it cannot be read.
    """
    if isinstance(checkpoint, Mapping):
        return StateDictSource(checkpoint)
    path = Path(checkpoint)
    try:
        if not path.exists():
            raise FileNotFoundError("there is no such file or folder")
        if path.is_dir():
            if (path / ".metadata").exists():
                return StoredSource(path, CheckedReader(path), apart)
            if any(path.glob("*.safetensors")):
                return StoredSource(path, _safetensors(path), apart)
            inside = ", ".join(sorted(entry.name for entry in path.iterdir())[:5]) or "nothing"
            raise FileNotFoundError(f"it has neither .metadata nor *.safetensors, but {inside}")
        if path.suffix == ".safetensors":
            return StoredSource(path, _safetensors(path), apart)
        return StateDictSource(torch.load(path, map_location="cpu", mmap=True, weights_only=True), str(path))
    except (ImportError, CheckpointUnreadableError):
        raise
    except Exception as error:  # whatever a reader raises on damaged bytes: the caller needs the path
        raise CheckpointUnreadableError(
            f"The checkpoint {path} cannot be read: {type(error).__name__}: {error}"
        ) from error


def check_names(slots: list[Slot], source: StateDictSource | StoredSource, strict: bool) -> None:
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


@dataclass(frozen=True)
class FusedWeight:
    """One weight of all experts, made of many of the file: for each expert, the names to stack along its first dim."""

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
        if (match := _ONE.fullmatch(name)) is not None:
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
    """Return the name in transformers' model of the tensor called `name` in its files."""
    return name.replace(".block_sparse_moe.", ".mlp.")
