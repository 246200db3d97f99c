"""Several recordings in one table: before and after a change, or the ranks of a job."""

import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_like._util.table import Column, Table
from nemo_like._util.words import MIB
from nemo_like.explaining.explain import explained_source
from nemo_like.explaining.explanation import Explanation

_COLUMNS = 4  # Files that have a column each; of more, the least and the most of each part are named.
_SNAPSHOTS = (".pickle", ".pkl", ".gz")


@dataclass(frozen=True)
class Explanations:
    """Recordings and the parts of each, by the name of its file."""

    of: Mapping[str, Explanation]

    def to_dict(self) -> dict[str, Any]:
        """Return it for JSON; bytes are whole numbers."""
        return {name: explanation.to_dict() for name, explanation in self.of.items()}

    def __str__(self) -> str:
        explained = tuple(self.of.values())
        parts = dict.fromkeys(part for explanation in explained for part in explanation.parts)
        sizes = {part: [explanation.parts.get(part, 0) for explanation in explained] for part in parts}
        rows = {
            "peak": [explanation.peak_bytes for explanation in explained],
            **dict(sorted(sizes.items(), key=lambda item: -max(item[1]))),
            "most reserved": [explanation.reserved_bytes for explanation in explained],
        }
        lines = [f"{name}: peak in {explanation.where or 'no recording'}" for name, explanation in self.of.items()]
        table = _by_file(rows, tuple(self.of)) if len(explained) <= _COLUMNS else _by_extremes(rows, tuple(self.of))
        return "\n".join([*(lines if len(explained) <= _COLUMNS else ()), table.text()])

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def _by_file(rows: Mapping[str, Sequence[int]], names: Sequence[str]) -> Table:
    """Return the table with a column for each file, and of two the difference."""
    two = len(names) == 2
    columns = [Column("MiB", left=True), *map(Column, names), *([Column("more")] if two else [])]
    return Table(
        tuple(columns),
        tuple(
            (
                part,
                *(f"{size / MIB:,.0f}" for size in sizes),
                *([f"{(sizes[1] - sizes[0]) / MIB:+,.0f}"] if two else []),
            )
            for part, sizes in rows.items()
        ),
    )


def _by_extremes(rows: Mapping[str, Sequence[int]], names: Sequence[str]) -> Table:
    """Return the table with the least and the most of each part, and the files that have them."""
    columns = (
        Column("MiB", left=True),
        Column("least"),
        Column("in", left=True),
        Column("most"),
        Column("in", left=True),
    )
    cells = []
    for part, sizes in rows.items():
        least, most = min(sizes), max(sizes)
        cells.append(
            (part, *(word for size in (least, most) for word in (f"{size / MIB:,.0f}", names[sizes.index(size)])))
        )
    return Table(columns, tuple(cells))


def explain_files(paths: Iterable[str | Path], *, device: int | None = None) -> Explanations:
    """Return the explanations of several snapshots, or of all in a folder, by the names of their files.

    Raises:
        SnapshotError: as `nemo_like.explain`.
        ValueError: a folder has no snapshot (.pickle, .pkl, .gz).
        OSError: a file cannot be read.
    """
    files = [file for path in paths for file in _files_of(Path(path))]
    ends = [{file.parts[-depth:] for file in files} for depth in range(1, max(len(file.parts) for file in files) + 1)]
    depth = next((number for number, names in enumerate(ends, 1) if len(names) == len(files)), len(ends))
    return Explanations({"/".join(file.parts[-depth:]): explained_source(file, device=device) for file in files})


def _files_of(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    snapshots = sorted(
        (file for file in path.iterdir() if file.suffix in _SNAPSHOTS), key=lambda file: (len(file.name), file)
    )
    if not snapshots:
        raise ValueError(
            f"{str(path)!r} has no snapshot ({', '.join(_SNAPSHOTS)}). Give the folder that the ranks wrote to."
        )
    return snapshots
