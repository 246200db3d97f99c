"""Read training samples from files, one by one: lines of JSONL files here, Parquet and saved data sets by `datasets`.

A file stays on disk; what is stored in memory is where each line begins, 8 bytes a line.
"""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from nemo_like._util.extras import require

MAX_LINE_BYTES = 4 * 2**20
"""A longer line is refused: it is a file that lost its line ends, or a book that should be cut where it makes sense."""
_CHUNK = 1 << 20
_PARQUET = (".parquet", ".pq")
_SEEN = 32  # rows at the beginning and at the end that a data set is recognised by


class BadSampleError(ValueError):
    """A sample cannot be used; the message is the reason, without the place."""


class SampleFiles(Protocol):
    """Samples by number, read when asked for."""

    fingerprint: str
    """Changes with the data: recognises it when a run resumes."""

    def __len__(self) -> int: ...

    def read(self, index: int) -> dict[str, Any] | None:
        """The sample; None for an empty line. Raises BadSampleError."""

    def where(self, index: int) -> str:
        """For people: file and line."""


class JsonLines:
    """The lines of JSONL files, in the order of the files' names."""

    def __init__(self, paths: list[Path]):
        self._paths = paths
        self._files: list[array[int]] = []
        digest = hashlib.sha256()
        for path in paths:
            starts = _line_starts(path)
            self._files.append(starts)
            # Not its name: a copy under another one has the same samples.
            digest.update(f"{len(starts)}\0".encode() + starts.tobytes())
            with path.open("rb") as file:
                digest.update(file.read(8192))
        self.fingerprint = digest.hexdigest()[:16]
        self._first = [0]
        for starts in self._files:
            self._first.append(self._first[-1] + len(starts) - 1)

    def __len__(self) -> int:
        return self._first[-1]

    def where(self, index: int) -> str:
        file, line = self._place(index)
        return f"{self._paths[file]}, line {line + 1}"

    def read(self, index: int) -> dict[str, Any] | None:
        file, line = self._place(index)
        start, end = self._files[file][line], self._files[file][line + 1]
        if end - start > MAX_LINE_BYTES:
            raise BadSampleError(
                f"the line has {end - start:,} bytes, more than {MAX_LINE_BYTES:,}. Cut long texts into several lines"
            )
        with self._paths[file].open("rb") as opened:
            opened.seek(start)
            raw = opened.read(end - start)
        if len(raw) < end - start:
            raise RuntimeError(f"{self._paths[file]} became shorter in mid-run; keep the data unchanged during a run.")
        try:
            text = raw.decode("utf-8-sig" if start == 0 else "utf-8")
        except UnicodeDecodeError as error:
            raise BadSampleError(f"it is not UTF-8: {error.reason} at byte {error.start}") from error
        if not text.strip():
            return None
        try:
            sample = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise BadSampleError(f"it is not JSON: {error}") from error
        if not isinstance(sample, dict):
            raise BadSampleError(f"it is a JSON {type(sample).__name__}, not an object with keys")
        _check_characters(text, sample)
        return sample

    def _place(self, index: int) -> tuple[int, int]:
        file = bisect_right(self._first, index) - 1
        return file, index - self._first[file]


class ArrowRows:
    """The rows of a data set of the package `datasets`, which maps them from disk."""

    def __init__(self, rows: Any, name: str):
        self._rows = rows
        self._name = name
        seen = f"{len(rows)}{rows.features}{rows[:_SEEN]}{rows[-_SEEN:]}"
        self.fingerprint = hashlib.sha256(seen.encode(errors="surrogateescape")).hexdigest()[:16]

    def __len__(self) -> int:
        return len(self._rows)

    def where(self, index: int) -> str:
        return f"{self._name}, row {index + 1}"

    def read(self, index: int) -> dict[str, Any] | None:
        # Arrow's columns are those of all rows: what a row does not have is None in it.
        row: dict[str, Any] = {key: value for key, value in self._rows[index].items() if value is not None}
        return row or None


def open_samples(flag: str, data: str) -> SampleFiles:
    """The samples at `data`: a ``.jsonl`` file, Parquet, or a folder of either, or one that ``save_to_disk`` wrote.

    Raises:
        ValueError: nothing is there, or nothing that can be read; it begins with the option `flag`.
        MissingExtraError: it takes `datasets`, which is not installed.
    """
    path = Path(data)
    if not path.exists():
        raise ValueError(f"{flag} is {data!r}, and nothing exists there.")
    if path.is_dir() and (path / "dataset_info.json").exists():
        datasets = require("datasets", "finetune", f"to read {data}, which it saved")
        return ArrowRows(_loaded(flag, data, lambda: datasets.load_from_disk(data)), data)
    if path.is_dir() and (path / "dataset_dict.json").exists():
        splits = sorted(entry.name for entry in path.iterdir() if entry.is_dir())
        raise ValueError(f"{flag} is {data!r}, which has several splits: give the folder of one, {', '.join(splits)}.")
    files = list(_files(path))
    parquet = [file for file in files if file.suffix in _PARQUET]
    if parquet and len(parquet) == len(files):
        datasets = require("datasets", "finetune", f"to read Parquet ({parquet[0]})")
        names = [str(file) for file in parquet]
        return ArrowRows(_loaded(flag, data, lambda: datasets.Dataset.from_parquet(names)), data)
    if parquet:
        raise ValueError(f"{flag} is {data!r}, which has both Parquet and JSONL in it; give a folder of one kind.")
    if not files:
        raise ValueError(f"{flag} is {data!r}, a folder without any .jsonl or .parquet file in it.")
    try:
        return JsonLines(files)
    except OSError as error:
        raise ValueError(f"{flag}: {error}.") from error


def _loaded(flag: str, data: str, load: Any) -> Any:
    try:
        return load()
    except Exception as error:  # pyarrow and datasets have many kinds of error for a damaged file
        raise ValueError(f"{flag} is {data!r}, which datasets cannot read: {' '.join(str(error).split())}") from error


def _files(path: Path) -> Iterator[Path]:
    if not path.is_dir():
        yield path
        return
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(folder, name) for name in sorted(names) if name.endswith((".jsonl", ".ndjson", *_PARQUET)))


def _check_characters(text: str, sample: dict[str, Any]) -> None:
    """Raise BadSampleError where a JSON escape of `text` is half a character, which no tokenizer takes."""
    if "\\ud" not in text.lower():
        return
    try:
        json.dumps(sample, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise BadSampleError(f"it has {half!r}, one half of a surrogate pair, which is not a character") from error


def _line_starts(path: Path) -> array[int]:
    """Return where each line of the file begins, and last the file's size."""
    starts = array("q", [0])
    size = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            at = chunk.find(b"\n")
            while at >= 0:
                starts.append(size + at + 1)
                at = chunk.find(b"\n", at + 1)
            size += len(chunk)
    if starts[-1] != size:
        starts.append(size)
    return starts
