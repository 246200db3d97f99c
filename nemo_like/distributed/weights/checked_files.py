"""Read the metadata in a checkpoint's folder, without running code that a stranger put there."""

import io
import pickle
from collections.abc import Iterable
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, LoadPlan, Metadata, ReadItem
from torch.distributed.checkpoint.metadata import StorageMeta

from nemo_like._util.words import a_or_an
from nemo_like.torch_compat import checkpoint_globals


class CheckpointUnreadableError(RuntimeError):
    """A checkpoint is absent, damaged or of no known kind."""


class CheckedReader(FileSystemReader):
    """torch's reader of a folder, which takes no more from the pickle ``.metadata`` than classes of plain data."""

    def read_metadata(self, *args: Any, rank: int | None = None, **kwargs: Any) -> Metadata:
        """Return the metadata of the folder, or those that `rank` wrote of its own files.

        Raises:
            CheckpointUnreadableError: the file refers to anything else, or to files outside of the folder.
        """
        path = Path(self.path) / f"{'' if rank is None else f'__{rank}'}.metadata"
        with path.open("rb") as file:
            metadata = _Unpickler(file, path).load()
        if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
            raise CheckpointUnreadableError(
                f"{path} holds {a_or_an(metadata)}, not the metadata of a checkpoint. Give the folder that dcp.save wrote."
            )
        check_inside(path, (info.relative_path for info in metadata.storage_data.values()))
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class CheckedPlanner(DefaultLoadPlanner):
    """torch's planner, which reads objects as it reads tensors: plain data alone.

    A parameter that had no gradient before the checkpoint was written may have no moments there: those of the state to
    fill stay.
    """

    def create_local_plan(self) -> LoadPlan:
        """Plan to read the tensors that the checkpoint has."""
        assert self.metadata is not None
        in_file = self.metadata.state_dict_metadata
        stepped = {name.rpartition(".")[0] for name in in_file}  # parameters that have moments there
        moments = [n for n, v in self.state_dict.items() if isinstance(v, Tensor) and n.startswith("optimizer.")]
        for name in {name for name in moments if name.rpartition(".")[0] not in stepped}.difference(in_file):
            del self.state_dict[name]
        return super().create_local_plan()

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put an object in its place.

        Raises:
            pickle.UnpicklingError: it is not plain data.
        """
        torch.load(value, weights_only=True)
        value.seek(0)
        super().load_bytes(read_item, value)  # reads the same bytes again, with weights_only=False


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BufferedReader, path: Path) -> None:
        super().__init__(file)
        self._path, self._allowed = path, checkpoint_globals()

    def find_class(self, module: str, name: str) -> Any:
        allowed = self._allowed.get(f"{module}.{name}")
        if allowed is None:
            raise CheckpointUnreadableError(
                f"{self._path} refers to {module}.{name}, which the metadata of a checkpoint never does and which could run "
                "code, so it was not loaded. Take the checkpoint from its author again, or take safetensors instead."
            )
        return allowed


def check_inside(listing: Path, names: Iterable[object]) -> None:
    """Raise `CheckpointUnreadableError` where `listing` names a file outside of its folder."""
    for name in names:
        if not isinstance(name, str) or PurePath(name).is_absolute() or ".." in PurePath(name).parts:
            raise CheckpointUnreadableError(
                f"{listing} names the file {name!r}, which is not in its folder. Write names relative to that folder."
            )
