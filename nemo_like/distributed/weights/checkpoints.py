"""Checkpoints of a job that a killed run cannot damage, on torch.distributed.checkpoint (DCP).

A folder ``step-00000100`` has DCP's own files, one or more per rank, and ``manifest.json`` with the size and checksum
of each, written last (DCP reads a flipped bit without an error). It is written under another name (``.writing-...``),
synced to disk and renamed: a folder of the first name is complete, or was damaged afterwards. Any number of ranks reads
it.
"""

import contextlib
import json
import os
import shutil
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor

from nemo_like._util.log import say_once, warn_once
from nemo_like._util.tensors import tensors_in
from nemo_like._util.words import write_bytes
from nemo_like.distributed.ranks import Ranks
from nemo_like.distributed.weights.checked_files import CheckedPlanner, CheckedReader

# DCP's error where any rank failed is not a subclass of Exception (torch 2.13 and 2.14).
_ANY_ERROR = (Exception, dcp.CheckpointException)
_COMPLETE, _WRITING, _DELETING, _DAMAGED, _MANIFEST = "step-", ".writing-", ".deleting-", ".damaged-", "manifest.json"


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; the message has the folder, the reason and the way out."""


@contextlib.contextmanager
def writing(what: str) -> Iterator[None]:
    """Raise `CheckpointError`, which states that checkpoints are complete, where the code inside fails."""
    try:
        yield
    except _ANY_ERROR as error:
        kept = "Checkpoints before it are untouched: free space or give another folder, and run again with --resume."
        raise CheckpointError(f"Writing {what} failed: {_first_line(error)}. {kept}") from error


class CheckpointStore:
    """The checkpoints of one run in `folder`, on storage that all nodes share. All but `steps`, `path` are collectives.

    keep: complete checkpoints to keep (>= 1). background: a thread writes, during training, a copy in CPU memory.
    """

    def __init__(self, folder: str | os.PathLike[str], ranks: Ranks, *, keep: int = 2, background: bool = True):
        self.folder = Path(folder).absolute()
        self._ranks, self._keep, self._background = ranks, keep, background
        # On an accelerator: its page-locked memory is taken at the first save and stays for all later ones.
        pinned = background and ranks.device.type != "cpu"
        self._pinned = DefaultStager(StagingOptions(True, False, False, True)) if pinned else None
        # A new thread is on device 0, where DCP would synchronise a stream, and so take memory of another rank's GPU.
        set_device = torch.get_device_module(ranks.device).set_device
        self._thread = ThreadPoolExecutor(1, "checkpoint", set_device, (ranks.device,))
        self._writing: Future[None] | None = None
        # The thread agrees with its like during the training's own collectives, so it requires a group of its own.
        group = None if ranks.control is None else torch.distributed.new_group(backend="gloo")
        self._apart = Ranks(ranks.rank, ranks.world_size, ranks.device, control=group)
        self._where: dict[str, Any] = {"process_group": group, "no_dist": group is None}
        if group is None:  # DCP warns at each call that there is one process; here that is meant
            warnings.filterwarnings("ignore", message=".*torch.distributed is disabled, unavailable or uninitialized")
        with ranks.together(f"making {self.folder}"), writing(f"to --checkpoint-dir {os.fspath(folder)!r}"):
            self.folder.mkdir(parents=True, exist_ok=True)

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, the newest first."""
        return sorted((int(path.name[-8:]) for path in self.folder.glob(f"{_COMPLETE}{'[0-9]' * 8}")), reverse=True)

    def path(self, step: int) -> Path:
        """Return the place of the checkpoint of `step`, once complete."""
        return self.folder / f"{_COMPLETE}{step:08d}"

    def save(self, step: int, state: dict[str, Any], about: Mapping[str, Any]) -> None:
        """Write `state` (dicts of tensors) and `about` (JSON). CheckpointError: this save or the one before failed."""
        self.wait()
        stager = self._pinned or DefaultStager(StagingOptions(False, False, False, False))
        if self._pinned is not None:
            size = write_bytes(self._ranks.largest(copied_bytes(state)))
            say_once(f"Checkpoints are copied to {size} of CPU memory on each rank.", key="copies of checkpoints")
        with self._ranks.together(f"preparing the checkpoint of step {step}"):
            if self._ranks.rank == 0:  # leftovers of killed saves
                for rest in [*self.folder.glob(f"{_WRITING}*"), *self.folder.glob(f"{_DELETING}*")]:
                    shutil.rmtree(rest)
            copy: Any = stager.stage(state) if self._background else state
        if self._pinned is None:
            stager.close()  # lets go of the copy, which is freed once written: the model trains in this memory, too
        self._writing = self._thread.submit(self._write, step, copy, about)
        if not self._background:
            self.wait()

    def wait(self) -> None:
        """Return when the last save is complete on disk; CheckpointError: it failed, those before it are untouched."""
        last, self._writing = self._writing, None
        if last is not None:
            with self._ranks.together("writing a checkpoint"):
                last.result()

    def load(self, state: dict[str, Any], check: Callable[[Mapping[str, Any]], None]) -> int | None:
        """Fill `state` in place from the newest sound checkpoint whose `about` passes `check`: its step; None: none.

        CheckpointError: none can be read, or it has moments of parameters that are frozen now.
        """
        problems: dict[int, str] = {}
        # Rank 0's listing decides: on a network file system the ranks may see different ones for a while.
        for step in self._ranks.from_first(self.steps()):
            with self._attempt(step, problems):
                about, reader = self._check_files(self.path(step))["about"], CheckedReader(self.path(step))
            if step not in problems:
                with self._ranks.together("comparing the checkpoint with this run"):
                    check(about)
                    _refuse_dropped_moments(reader, state)
                with self._attempt(step, problems):
                    dcp.load(state, storage_reader=reader, planner=CheckedPlanner(), **self._where)
            if step not in problems:
                # Set aside: they would be in the way of this run's own, and count as some of those to keep.
                with self._ranks.together("setting damaged checkpoints aside"):
                    for damaged, problem in problems.items() if self._ranks.rank == 0 else ():
                        warn_once(f"{problem} Going on from step {step}; the other is set aside as {_DAMAGED}*.")
                        aside = self.folder / f"{_DAMAGED}{damaged:08d}"
                        shutil.rmtree(aside, ignore_errors=True)  # one from before
                        self.path(damaged).rename(aside)
                return step
        if problems:
            raise CheckpointError(" ".join([*problems.values(), "None is left to resume from; start again elsewhere."]))
        return None

    @contextlib.contextmanager
    def _attempt(self, step: int, problems: dict[int, str]) -> Iterator[None]:
        """Note in `problems` of every rank the errors inside on any."""
        try:
            yield
        except _ANY_ERROR as error:  # whatever a reader raises, this checkpoint is of no use; it is reported
            problems[step] = _first_line(error)
        if self._ranks.any(step in problems):
            reason = problems.get(step, "another rank cannot read it")
            problems[step] = f"Checkpoint {self.path(step)} cannot be read: {reason}."

    def _check_files(self, folder: Path) -> Mapping[str, Any]:
        """Return the manifest; raise where a file is not as it was written. The ranks share the reading."""
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        if manifest.get("format") != 1:
            raise CheckpointError(f"its format is {manifest.get('format')!r}, and this version reads 1")
        for name, wanted in sorted(manifest["files"].items())[self._ranks.rank :: self._ranks.world_size]:
            if (contents := _size_and_sum(folder / name)) != wanted:
                raise CheckpointError(f"{name} has {contents} as bytes and CRC-32, and was written with {wanted}")
        return manifest

    def _write(self, step: int, state: dict[str, Any], about: Mapping[str, Any]) -> None:
        """Write the checkpoint; on rank 0, complete it and delete old ones. Where DCP fails on a rank, all raise."""
        target, ranks = self.folder / f"{_WRITING}{step:08d}", self._apart
        with writing(f"the checkpoint of step {step} to {self.folder}"):
            # Copying ahead, DCP's loader waits for training's stream each 10 MB, also where all tensors are on the CPU.
            writer = dcp.FileSystemWriter(target, overwrite=False, per_thread_copy_ahead=0)
            dcp.save(state, storage_writer=writer, **self._where)
            with ranks.together("reading the files it wrote"):
                of_ranks = [{path.name: _size_and_sum(path) for path in target.glob(f"__{ranks.rank}_*")}]
            if ranks.control is not None:
                of_ranks = of_ranks * ranks.world_size
                torch.distributed.all_gather_object(of_ranks, of_ranks[0], group=ranks.control)
            if ranks.rank:
                return
            files = {name: sums for each in of_ranks for name, sums in each.items()}
            if unseen := files.keys() - {path.name for path in target.iterdir()}:
                raise ValueError(f"rank 0 does not see {min(unseen)}: --checkpoint-dir must be on shared storage")
            files |= {p.name: _size_and_sum(p) for p in target.iterdir() if p.name not in files}  # DCP's metadata
            text = json.dumps({"format": 1, "step": step, "about": about, "files": files})
            (target / _MANIFEST).write_text(text, encoding="utf-8")
            _sync(target / _MANIFEST, target)
            target.rename(self.path(step))
            _sync(self.folder)
            for old in self.steps()[self._keep :]:  # renamed first: killed in between, none looks complete that is not
                shutil.rmtree(self.path(old).rename(self.folder / f"{_DELETING}{old:08d}"))


def _refuse_dropped_moments(reader: CheckedReader, state: dict[str, Any]) -> None:
    """Raise where a frozen parameter has moments in the checkpoint: DCP reads only entries that `state` has to fill."""
    optimizer = state.get("optimizer", {})
    listed = {name for group in optimizer.get("param_groups", ()) for name in group["params"]}
    frozen = (listed & state.get("model", {}).keys()) - optimizer.get("state", {}).keys()
    paths = reader.read_metadata().planner_data.values() if frozen else ()  # of all ranks, so not read for nothing
    if dropped := frozen & {path[2] for path in paths if path[:2] == ("optimizer", "state")}:
        raise CheckpointError(
            f"{reader.path} has moments of {min(dropped)}, which is frozen now ({len(dropped)} parameters in all), and "
            "would not read them. Freeze it after loading, or leave it out of the optimizer."
        )


def _size_and_sum(path: Path) -> list[int]:
    """Return the file's size and CRC-32: against damage, not against forgery."""
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            value = zlib.crc32(chunk, value)
        return [file.tell(), value]


def _sync(*paths: Path) -> None:
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _first_line(error: BaseException) -> str:
    """Return the innermost reason, on one line; DCP's own exceptions hold one per rank."""
    for cause, _ in (getattr(error, "failures", None) or {}).values():
        return _first_line(cause)
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0]}"


def copied_bytes(state: dict[str, Any]) -> int:
    """Return the CPU memory that a save in the background takes on this rank: one copy of its own shards."""
    local = (each.to_local() if isinstance(each, DTensor) else each for each in tensors_in(state))
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in local}.values())
