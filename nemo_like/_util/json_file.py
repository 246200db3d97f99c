"""Files of JSON that are written at once."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path


def write_json(path: str | Path, value: object) -> None:
    """Write `value` to `path`, indented: a reader finds the old file or the whole new one, never a part.

    Each process writes a file next to it first, so that several may write the same file, the last of which stays. Where
    `value` cannot be written, the old file stays and nothing is left next to it.

    Raises:
        TypeError, ValueError: `value` is not made of JSON values.
        OSError: the file cannot be written.
    """
    write_whole(Path(path), json.dumps(value, indent=1) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write `text` to `path` as `write_json` does.

    Raises:
        OSError: the file cannot be written.
    """
    beside = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise


# A folder that is complete, or as it was before.


def replace_folder(folder: Path, write: Callable[[Path], object]) -> None:
    """Have `write` fill a new folder, which gets the name `folder` when it is complete on disk.

    A process that is killed in between leaves the old folder, if need be under the name that the next call finds.
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
