"""Checkpoints that a killed run cannot damage, on torch.distributed.checkpoint (DCP).

A folder holds ``step-00000100``, ``step-00000200``, ...; each has DCP's own files, one or more per rank, and
``manifest.json`` with every file's size and checksum, written last (DCP itself reads a flipped bit without an error). A
checkpoint is written under another name (``.writing-...``), synced to disk and then renamed, so a folder of the first
name is complete, or was damaged afterwards: its manifest tells. DCP reads the shards of any number of ranks back onto
any other number of ranks.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import os
import shutil
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.tensor import DTensor

from nemo_like._util.log import say_once, warn_once
from nemo_like._util.tensors import tensors_in
from nemo_like._util.words import write_bytes
from nemo_like.distributed import launch
from nemo_like.distributed.weights.checked_files import CheckedPlanner, CheckedReader
from nemo_like.recipes.agree import Ranks

# What DCP raises where any rank failed is not a subclass of Exception (torch 2.13 and 2.14).
_ANY_ERROR = (Exception, dcp.CheckpointException)
_MANIFEST = "manifest.json"
_FORMAT = 1
_SUMS = "sums-of-rank-"  # one per rank, until rank 0 has put them together in the manifest
_COMPLETE, _WRITING, _DELETING, _DAMAGED = "step-", ".writing-", ".deleting-", ".damaged-"
_SHARED = "/dev/shm"


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; the message has the folder, the reason and the way out."""


@contextlib.contextmanager
def writing(what: str) -> Iterator[None]:
    """Raise `CheckpointError`, which states that checkpoints are complete, where the file system refuses inside."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"Writing {what} failed: {error}. Checkpoints are untouched: free space or give another folder, and run again "
            "with --resume."
        ) from error


class ProcessWriter(dcp.FileSystemWriter):
    """A writer of files that is sent to a process of its own, once per save."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        # In that process. Launchers and terminals signal whole process groups; a save under way is to go on.
        os.setpgrp()
        # From the second save on: DCP tells four things in each, and a mesh that its process groups are not there.
        logging.getLogger().setLevel(logging.WARNING)
        logging.getLogger("torch.distributed.device_mesh").setLevel(logging.ERROR)
        self.__dict__.update(state)


class CheckpointStore:
    """The checkpoints of one run in `folder`. Every method but `steps` is a collective.

    Args:
        folder: created if absent; on storage that all hosts share.
        keep: complete checkpoints to keep (>= 1); older ones are deleted after a newer one is complete.
        background: write during training. The tensors are copied to CPU memory before `save` returns.
        process: write in the background in a process of its own for each rank, so that training does not wait for the
            interpreter's lock. It takes about 300 MB, and the first save waits for its start. None: where several ranks
            train on accelerators. `_copies` has what it requires.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        ranks: Ranks,
        *,
        keep: int = 2,
        background: bool = True,
        process: bool | None = None,
    ):
        self.folder = Path(folder).absolute()
        self._ranks = ranks
        self._keep = keep
        self._background = background
        self._accelerated = ranks.device.type != "cpu"
        self._process = ranks.control is not None and (self._accelerated if process is None else process)
        self._stager: DefaultStager | None = None
        self._writing: Future[None] | None = None
        self._writing_step = -1
        self.best: int | None = None
        """A step whose checkpoint is kept in addition to the newest ones, from the next `save` on; None: no such."""
        # DCP's writer thread runs collectives during the training's own, so it requires a group of its own.
        self._group = None if ranks.control is None else dist.new_group(backend="gloo")
        if self._group is None:  # DCP warns at each call that there is one process; here that is meant
            warnings.filterwarnings("ignore", message=".*torch.distributed is disabled, unavailable or uninitialized")
        with ranks.together(f"making the folder {self.folder}"):
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise CheckpointError(f"--checkpoint-dir {os.fspath(folder)!r} cannot be a folder: {error}.") from error

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, the newest first."""
        names = (path.name.removeprefix(_COMPLETE) for path in self.folder.glob(f"{_COMPLETE}*"))
        return sorted((int(name) for name in names if name.isdecimal()), reverse=True)

    def path(self, step: int) -> Path:
        """Return the place of the checkpoint of `step`, once complete."""
        return self.folder / f"{_COMPLETE}{step:08d}"

    def save(self, step: int, state: dict[str, Any], about: Mapping[str, Any]) -> None:
        """Write `state` (nested dicts of tensors) and `about` (JSON) as the checkpoint of `step`.

        Waits for the save before it.

        Raises:
            CheckpointError: this write, or the one before it in the background, failed on some rank.
        """
        self.wait()
        target = self.folder / f"{_WRITING}{step:08d}"
        with self._ranks.together(f"clearing {target}"):
            if self._ranks.rank == 0:
                for rest in [*self.folder.glob(f"{_WRITING}*"), *self.folder.glob(f"{_DELETING}*")]:
                    shutil.rmtree(rest)
        self._writing_step = step
        copies = self._copies(state) if self._background else {}
        writer = (ProcessWriter if self._process else dcp.FileSystemWriter)(target, overwrite=False)
        common: dict[str, Any] = {"storage_writer": writer} | self._where()
        if self._background:
            written = dcp.async_save(state, **common, **copies)
        else:
            written = Future()
            try:
                written.set_result(dcp.save(state, **common))
            except _ANY_ERROR as error:  # handed to `wait`, which raises it on every rank
                written.set_exception(error)
        self._writing = Future()
        completed = self._writing
        # As they are now: when this checkpoint is complete in the background, a later step may be the best one.
        about, best = copy.deepcopy(about), self.best

        def complete(done: Future[Any]) -> None:
            try:
                done.result()  # raises on every rank where one failed
                self._sum_own_files(target)
                if self._ranks.rank == 0:
                    self._complete(target, step, about, best)
                completed.set_result(None)
            except BaseException as error:  # noqa: BLE001  (handed to `wait`, which raises it on every rank)
                completed.set_exception(error)

        assert isinstance(written, Future)
        written.add_done_callback(complete)
        if not self._background:
            self.wait()

    def _copies(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return how an asynchronous save copies `state` and who writes the copy, in keywords of DCP.

        On an accelerator the copy is in page-locked memory, is made at the first save and stays for all later ones. A
        process that writes shares that memory; where /dev/shm is too small, a thread of this process writes.
        """
        if not (self._accelerated or self._process):
            return {}  # a copy that is freed once written: the CPU's memory is also what the model trains in
        if self._stager is None:
            size = self._ranks.largest(copied_bytes(state))
            of_host = size * launch.local_world_size()
            if self._process:
                launch.allow_open_files(self._ranks.world_size, len(tensors_in(state)))
                room = -self._ranks.largest(-shutil.disk_usage(_SHARED).free)
                self._process = of_host <= room
                if not self._process:
                    warn_once(
                        f"{_SHARED} has {write_bytes(room)} free and a checkpoint's copies take {write_bytes(of_host)} on "
                        "this node, so a thread of the training process writes checkpoints, which slows steps down. Make "
                        f"{_SHARED} larger: --shm-size of a container, or a Memory volume there in Kubernetes."
                    )
            each, whole = write_bytes(size), write_bytes(of_host)
            say_once(f"Checkpoints are copied to {each} of CPU memory on each rank, {whole} on a node.")
            pinned = self._accelerated
            self._stager = DefaultStager(StagingOptions(pinned, self._process, False, pinned))
        kind = AsyncCheckpointerType.PROCESS if self._process else AsyncCheckpointerType.THREAD
        return {"async_stager": self._stager, "async_checkpointer_type": kind}

    def wait(self) -> None:
        """Return when the last save is complete on disk.

        Raises:
            CheckpointError: it failed on some rank; the checkpoints before it are untouched.
        """
        if self._writing is None:
            return
        writing, self._writing = self._writing, None
        with self._ranks.together(f"writing the checkpoint of step {self._writing_step}"):
            try:
                writing.result()
            except _ANY_ERROR as error:
                raise CheckpointError(
                    f"Writing the checkpoint of step {self._writing_step} to {self.folder} failed: "
                    f"{_first_line(error)}. Checkpoints before it are untouched."
                ) from error

    def load_step(self, step: int, state: dict[str, Any]) -> None:
        """Fill `state`'s tensors in place from the checkpoint of `step`.

        Raises:
            CheckpointError: it is not there, or damaged.
        """
        _, problem = self._attempt(self._read_manifest, step)
        if problem is None:
            _, problem = self._attempt(self._read, step, state)
        if problem is not None:
            raise CheckpointError(f"Checkpoint {self.path(step)} cannot be read: {problem}.")

    def load(self, state: dict[str, Any], check: Callable[[Mapping[str, Any]], None]) -> int | None:
        """Fill `state`'s tensors in place from the newest usable checkpoint; its step, or None where there is none.

        Args:
            check: called with the checkpoint's `about` before any tensor is read; raises where it does not fit the run.

        Raises:
            CheckpointError: there are checkpoints, and none can be read.
        """
        problems: dict[int, str] = {}
        for step in self._steps_of_rank_zero():
            manifest, problem = self._attempt(self._read_manifest, step)
            if problem is None:
                with self._ranks.together("comparing the checkpoint with this run"):
                    check(manifest["about"])
                _, problem = self._attempt(self._read, step, state)
            if problem is None:
                self._set_aside(problems)
                for message in problems.values():
                    warn_once(f"{message} Going on from step {step}; the other is set aside as {_DAMAGED}*.")
                return step
            problems[step] = f"Checkpoint {self.path(step)} cannot be read: {problem}."
        if problems:
            reasons = " ".join(problems.values())
            raise CheckpointError(f"{reasons} None is left to resume from; start anew in another folder.")
        return None

    def _set_aside(self, steps: Iterable[int]) -> None:
        """Rename what cannot be read: it would be in the way of this run's own, and count as one of those to keep."""
        with self._ranks.together("setting damaged checkpoints aside"):
            if self._ranks.rank == 0:
                for step in steps:
                    shutil.rmtree(self.folder / f"{_DAMAGED}{step:08d}", ignore_errors=True)  # one from before
                    self.path(step).rename(self.folder / f"{_DAMAGED}{step:08d}")

    def _steps_of_rank_zero(self) -> Iterator[int]:
        # Rank 0's listing decides: on a network file system the ranks may see different ones for a while.
        listed = self.steps() if self._ranks.rank == 0 else []
        for i in range(self._ranks.from_first(len(listed))):
            yield self._ranks.from_first(listed[i] if listed else 0)

    def _attempt(self, action: Callable[..., Any], *arguments: object) -> tuple[Any, str | None]:
        """Return what `action` returned, and what went wrong with it on any rank, or None."""
        result, problem = None, None
        try:
            result = action(*arguments)
        except _ANY_ERROR as error:  # whatever a reader raises, this checkpoint is of no use; it is reported
            problem = _first_line(error)
        if self._ranks.any(problem is not None) and problem is None:
            problem = "another rank cannot read it"
        return result, problem

    def _read_manifest(self, step: int) -> Mapping[str, Any]:
        path = self.path(step)
        manifest = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
        if manifest.get("format") != _FORMAT:
            raise CheckpointError(f"its format is {manifest.get('format')!r}, and this version reads {_FORMAT}")
        for i, (name, (size, checksum)) in enumerate(sorted(manifest["files"].items())):
            found = (path / name).stat().st_size if (path / name).exists() else 0
            if found != size:
                raise CheckpointError(f"{name} should have {size} bytes and has {found}")
            # The ranks share the reading; `_attempt` tells all of them what one finds.
            if i % self._ranks.world_size == self._ranks.rank and _checksum(path / name) != checksum:
                raise CheckpointError(f"{name} has other contents than were written")
        return manifest

    def _read(self, step: int, state: dict[str, Any]) -> None:
        dcp.load(state, storage_reader=CheckedReader(self.path(step)), planner=CheckedPlanner(), **self._where())

    def _where(self) -> dict[str, Any]:
        return {"process_group": self._group, "no_dist": self._group is None}

    def _sum_own_files(self, target: Path) -> None:
        """Leave the checksums of this rank's files for rank 0; return when every rank has done so."""
        try:
            files = sorted(target.glob(f"__{self._ranks.rank}_*"))
            _write_synced(target / f"{_SUMS}{self._ranks.rank}", json.dumps(_describe(files)))
        finally:  # also where it failed: rank 0 then misses this file, and no rank waits for this one
            if self._group is not None:
                dist.barrier(self._group)

    def _complete(self, target: Path, step: int, about: Mapping[str, Any], best: int | None) -> None:
        """On rank 0: check that each rank's files are here, list them, and give the folder its name.

        best: a step whose checkpoint stays.
        """
        files: dict[str, Any] = {}
        for rank in range(self._ranks.world_size):
            sums = target / f"{_SUMS}{rank}"
            if not sums.exists():
                raise CheckpointError(
                    f"rank 0 does not see rank {rank}'s files: --checkpoint-dir must be on storage that all hosts share"
                )
            files |= json.loads(sums.read_text(encoding="utf-8"))
            sums.unlink()
        # Metadata, and whatever another torch names otherwise.
        files |= _describe([path for path in target.iterdir() if path.name not in files])
        # As it is on disk, which is what a later run reads.
        metadata = CheckedReader(target).read_metadata()
        missing = {info.relative_path for info in metadata.storage_data.values()} - files.keys()
        if missing:
            raise CheckpointError(f"{sorted(missing)} were written and are not there")
        _write_synced(target / _MANIFEST, json.dumps({"format": _FORMAT, "step": step, "about": about, "files": files}))
        _sync_folder(target)
        target.rename(self.path(step))
        _sync_folder(self.folder)
        for old in [step for step in self.steps()[self._keep :] if step != best]:
            # Renamed first: a run killed while deleting leaves nothing that looks complete.
            doomed = self.path(old).rename(self.folder / f"{_DELETING}{old:08d}")
            shutil.rmtree(doomed)


def copied_bytes(state: dict[str, Any]) -> int:
    """Bytes of CPU memory that an asynchronous save of `state` takes on this rank: one copy of its own shards."""
    local = (each.to_local() if isinstance(each, DTensor) else each for each in tensors_in(state))
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in local}.values())


def _describe(paths: Iterable[Path]) -> dict[str, tuple[int, int]]:
    """Size and checksum by name."""
    return {path.name: (path.stat().st_size, _checksum(path)) for path in paths}


def _checksum(path: Path) -> int:
    """CRC-32 of the file: against damage, not against forgery."""
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            value = zlib.crc32(chunk, value)
    return value


def _write_synced(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _first_line(error: BaseException) -> str:
    """The innermost reason, on one line; DCP's own exceptions hold one per rank."""
    failures = getattr(error, "failures", None)
    if isinstance(failures, Mapping) and failures:
        error = next(iter(failures.values()))[0]
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
