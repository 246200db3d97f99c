"""Sources of weights: a state dict in memory, a DCP folder, safetensors, or a file of torch.save.

A source tells the shapes it has, and fills tensors by name. Of stored tensors, a rank reads its own part into place; of
a state dict of DTensors, it keeps one whole tensor at a time.
"""

import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    FileSystemReader,
    HuggingFaceStorageReader,
    LoadPlan,
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
from nemo_like._util.table import grouped
from nemo_like._util.words import a_or_an
from nemo_like.distributed.weights.checked_files import CheckedReader, CheckpointUnreadableError, check_inside
from nemo_like.distributed.weights.tensor_locations import Box, Slot, boxes_of, copy_whole, list_names
from nemo_like.transformers_compat import Conversion, NamesInModel


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

    @torch.no_grad()
    def fill(self, targets: Mapping[str, Tensor]) -> None:
        """Copy the named tensors into `targets`, each rank its part; a collective for DTensors that are cut otherwise."""
        for name, target in targets.items():
            value = self._state[name]
            if (
                isinstance(value, DTensor)
                and isinstance(target, DTensor)
                and value.device_mesh == target.device_mesh
                and value.placements == target.placements
            ):
                target.copy_(value)
            else:
                copy_whole(target, self.get(name))


# From the names in a file of Hugging Face to the model's.
Naming = Callable[[Collection[str]], NamesInModel]


class StoredSource:
    """A folder or file that `torch.distributed.checkpoint` has a reader for: each rank reads the bytes of its own part.

    Weights may be at the top, or under ``"model"`` as training checkpoints have them. Tensors that transformers makes of
    several in its files are made one after the other of whole ones, but stacked experts are read as the rank has them.

    Args:
        naming: transformers' mapping from the names in its files; None: the file has the model's.
    """

    def __init__(self, path: Path, reader: FileSystemReader, naming: Naming | None = None) -> None:
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
        names = NamesInModel({name: [name] for name in self._saved}) if naming is None else naming(self._saved)
        self._stored = {name: stored for stored, known in names.renamed.items() for name in known}
        self.shapes = {name: self._saved[stored].size for name, stored in self._stored.items()}
        self._made: dict[str, tuple[Conversion, str]] = {}
        for conversion in names.converted:
            for made, tensor in conversion.convert(partial(self._empty, device="meta")).items():
                for name in conversion.names.get(made, [made]):
                    self._made[name], self.shapes[name] = (conversion, made), tensor.shape

    def _empty(self, stored: str, device: str) -> Tensor:
        entry = self._saved[stored]
        return torch.empty(entry.size, dtype=entry.properties.dtype, device=device)

    def _read(self, stored: str) -> Tensor:
        whole = self._empty(stored, "cpu")
        self._fill_boxes([(stored, box) for box in boxes_of(whole)])
        return whole

    def get(self, name: str) -> Tensor:
        """One whole tensor (to compare tied ones)."""
        if name in self._made:
            conversion, made = self._made[name]
            return conversion.convert(self._read)[made]
        return self._read(self._stored[name])

    def fill(self, targets: Mapping[str, Tensor]) -> None:
        """Read the named tensors into `targets`, each rank its part; no communication."""
        boxes = [
            (self._stored[n], box) for n, t in targets.items() if n in self._stored for box in boxes_of(t.detach())
        ]
        makers = {name: self._made[name] for name in targets if name in self._made}
        boxes += [
            piece
            for name, (conversion, _) in makers.items()
            if conversion.parts
            for box in boxes_of(targets[name].detach())
            for piece in self._expert_pieces(name, *box)
        ]
        self._fill_boxes(boxes)
        at_once = grouped((id(conversion), name) for name, (conversion, _) in makers.items() if not conversion.parts)
        for names in at_once.values():
            tensors = makers[names[0]][0].convert(self._read)
            for name in names:
                copy_whole(targets[name], tensors[makers[name][1]])

    def _expert_pieces(self, name: str, chunk: ChunkStorageMetadata, view: Tensor) -> Iterator[tuple[str, Box]]:
        """Split a box of stacked experts at the tensors in the file: yield their names, and boxes of those."""
        (expert, begin, *rest), (experts, rows, *sizes) = chunk.offsets, chunk.sizes
        for part, into in zip(self._made[name][0].parts[expert : expert + experts], view):
            at = 0  # the row of the expert's weight that a piece begins at
            for stored in part:
                end = at + self._saved[stored].size[0]
                first, last = max(at, begin), min(end, begin + rows)
                if first < last:
                    box = ChunkStorageMetadata(torch.Size((first - at, *rest)), torch.Size((last - first, *sizes)))
                    yield stored, (box, into[first - begin : last - begin])
                at = end

    def _fill_boxes(self, targets: Iterable[tuple[str, Box]]) -> None:
        wanted = grouped((self._prefix + stored, box) for stored, box in targets)
        items = [
            item
            for stored, boxes in wanted.items()
            for item in create_read_items_for_chunk_list(
                stored, self._saved[stored.removeprefix(self._prefix)], [chunk for chunk, _ in boxes]
            )
        ]
        # Not by `dcp.load`, which would read the metadata again, and have ranks wait for each other.
        try:
            self._reader.read_data(LoadPlan(items), _Boxes(wanted)).wait()
        except Exception as error:  # whatever a reader raises on damaged bytes
            raise CheckpointUnreadableError(f"Reading {self.label} failed: {type(error).__name__}: {error}") from error


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
    checkpoint: Mapping[str, Any] | str | os.PathLike[str], naming: Naming | None = None
) -> StateDictSource | StoredSource:
    """A state dict, a path to a DCP folder, a folder or file of safetensors, or a file of ``torch.save``.

    naming: from the names in files of safetensors to those of the model.

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
                return StoredSource(path, CheckedReader(path))
            if any(path.glob("*.safetensors")):
                return StoredSource(path, _safetensors(path), naming)
            inside = ", ".join(sorted(entry.name for entry in path.iterdir())[:5]) or "nothing"
            raise FileNotFoundError(f"it has neither .metadata nor *.safetensors, but {inside}")
        if path.suffix == ".safetensors":
            return StoredSource(path, _safetensors(path), naming)
        return StateDictSource(torch.load(path, map_location="cpu", mmap=True, weights_only=True), str(path))
    except (ImportError, CheckpointUnreadableError):
        raise
    except Exception as error:  # whatever a reader raises on damaged bytes: the caller needs the path
        raise CheckpointUnreadableError(
            f"The checkpoint {path} cannot be read: {type(error).__name__}: {error}"
        ) from error


def check_names(slots: Sequence[Slot], source: StateDictSource | StoredSource, strict: bool) -> None:
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
