"""A folder that is complete, or as it was before."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path


def replace_folder(folder: Path, write: Callable[[Path], object]) -> None:
    """Have `write` fill a new folder, which gets the name `folder` when it is complete on disk.

    A process that is killed in between leaves what was there before, if need be under the name that the next call finds.
    """
    target, old = (folder.with_name(f".{word}-{folder.name}") for word in ("writing", "old"))
    if old.exists() and not folder.exists():  # killed between the two renamings
        old.rename(folder)
    for rest in (target, old):
        shutil.rmtree(rest, ignore_errors=True)
    target.mkdir(parents=True)
    write(target)
    for path in target.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    if folder.exists():
        folder.rename(old)
    target.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
