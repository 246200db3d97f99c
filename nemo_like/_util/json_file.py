"""Files of JSON that are written at once."""

import json
import os
from pathlib import Path


def write_json(path: str | Path, value: object) -> None:
    """Write `value` to `path`, indented: a reader finds the old file or the whole new one, never a part.

    Each process writes a file next to it first, so that several may write the same file, the last of which stays. Where
    `value` cannot be written, the old file stays and nothing is left next to it.

    Raises:
        TypeError, ValueError: `value` is not made of JSON values.
        OSError: the file cannot be written.
    """
    text = json.dumps(value, indent=1) + "\n"
    path = Path(path)
    beside = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
