"""Keep results of runs on fake tensors in files, so that the next question about a model makes none of them again.

1. Only the commands keep, and only for a model of a config: its code is transformers' alone. A ``module:function``, and a
   process of the caller, may have changed any function, which no key can tell.
2. A file is of one model in one local shape, by a digest of all that decides its numbers: each installed distribution, the
   sources of this package and of the model, Python, the environment, the config, the sample.
3. Entries are lists of numbers and words. `_KINDS` has the records that they are made into; nothing else is. Never pickle.
4. A result that depends on a function of the caller, or that was logged about, is not kept.
5. A file is written aside and renamed. One that is damaged is not there. The oldest uses go at `MOST_BYTES`.
"""

import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from nemo_like._util.folders import cache_folder
from nemo_like._util.json_file import write_whole
from nemo_like._util.log import times_said, warn_once
from nemo_like._util.op_lookup import find_op
from nemo_like._util.tensors import tensors_in
from nemo_like.planning.trace.block import BlockTrace, OpRecord, TracedRegion
from nemo_like.planning.trace.kinds import KindFacts
from nemo_like.planning.trace.records import BackwardCall, BlockEvents, ForwardCall, OuterEvents, Work
from nemo_like.torch_compat import HigherOrderOperator, OpOverload

MOST_BYTES = 200 << 20
_RECORDS = (BackwardCall, BlockEvents, BlockTrace, ForwardCall, KindFacts, OpRecord, OuterEvents, TracedRegion, Work)
_KINDS: dict[str, Any] = {kind.__name__: kind for kind in _RECORDS}
_SEQUENCES: dict[str, Any] = {"tuple": tuple, "list": list, "frozenset": frozenset}
# Beginnings of variables of the environment that decide which code runs; folders of caches do not.
_READ = ("ATEN_", "HF_", "KMP_", "MKL_", "NEMO_LIKE_", "OMP_", "PYTHON", "TORCH", "PYTORCH", "TRANSFORMERS_", "USE_")
Result = TypeVar("Result")


class Store:
    """The kept results for one model."""

    def __init__(self, folder: Path, about: object) -> None:
        """Read nothing yet; `about`: words on the model."""
        self.folder, self.about = folder, digest(about, _versions())
        self._files: dict[str, dict[str, Any]] = {}
        self._new: dict[str, dict[str, Any]] = {}

    def get(self, about: object, key: object, make: Callable[[], Result]) -> Result:
        """Return the result that is kept under `key`; else that of `make`, which is kept then.

        about: words on the local shape; those of one share a file.
        """
        name, entry = self.about and digest(self.about, about), digest(key)
        file = self._file(name)
        if entry in file:
            with suppress(ValueError, TypeError, KeyError, IndexError):
                return cast("Result", _read(file[entry]))
        before = times_said()
        result = make()
        if name and entry and times_said() == before:
            with suppress(TypeError):
                self._new.setdefault(name, {})[entry] = file[entry] = _written(result)
        return result

    def _file(self, name: str) -> dict[str, Any]:
        if name not in self._files:
            self._files[name] = self._entries(name) if name else {}
        return self._files[name]

    def _entries(self, name: str) -> dict[str, Any]:
        """Return the entries of a file; none of one that is not there, or damaged."""
        path = self.folder / f"{name}.json"
        with suppress(OSError, ValueError, TypeError):
            check, _, text = path.read_text(encoding="utf-8").partition("\n")
            if check == digest(text):
                with suppress(OSError):  # it may be another user's, who keeps it for all
                    os.utime(path)
                return dict(json.loads(text))
        return {}

    def save(self) -> None:
        """Write the new results. Where that cannot be, it is logged."""
        try:
            for name, new in self._new.items():
                self.folder.mkdir(parents=True, exist_ok=True)
                text = json.dumps(self._entries(name) | new, separators=(",", ":"))
                write_whole(self.folder / f"{name}.json", f"{digest(text)}\n{text}")
            if self._new:
                _make_room(self.folder)
        except OSError as error:
            warn_once(
                f"Traces are not kept ({error}), so the next question takes as long. Set NEMO_LIKE_CACHE to another folder, "
                "or to off."
            )


def _make_room(folder: Path) -> None:
    """Remove the files that were not used for longest, until `MOST_BYTES` remain; also parts of files that ended early."""
    stats = dict[Path, os.stat_result]()
    for path in folder.iterdir():
        with suppress(FileNotFoundError):  # of another command that makes room
            if _OURS.fullmatch(path.name):
                stats[path] = path.stat()
    size = sum(stat.st_size for stat in stats.values())
    for path in sorted(stats, key=lambda path: stats[path].st_mtime):
        if size > MOST_BYTES:
            path.unlink(missing_ok=True)
            size -= stats[path].st_size


_OURS = re.compile(r"[0-9a-f]{32}\.json(\.\d+\.partial)?")


def contents_of_integers(sample: Any) -> str:
    """Return a digest of the values that a model may decide by: those of integers and flags that are there."""
    tensors = [t for t in tensors_in(sample) if not t.is_meta and not t.is_floating_point()]
    return digest([hashlib.sha256(t.contiguous().numpy().tobytes()).hexdigest() for t in tensors])


def digest(*parts: object) -> str:
    """Return a short word for `parts`, which their `repr` tells; empty: some are told by their address alone."""
    words = repr(parts)
    return "" if " at 0x" in words else hashlib.sha256(words.encode()).hexdigest()[:32]


def _versions() -> list[object]:
    """Return all that decides the numbers besides the question."""
    installed = {
        name for place in sys.path if os.path.isdir(place) for name in os.listdir(place) if ".dist-info" in name
    }
    root = Path(__file__).parents[2]
    sources = _files(sorted(root.rglob("*.py")))
    read = sorted(item for item in os.environ.items() if item[0].startswith(_READ) and "CACHE" not in item[0])
    return [sys.version, torch.__version__, torch.get_num_threads(), sorted(installed), sources, read]


def _files(paths: Iterable[Path]) -> list[tuple[str, int, int]]:
    """Return name, bytes and time of files: another content has another one of these."""
    stats = [(str(path), path.stat()) for path in paths]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]


def _code_of(config: Any) -> list[tuple[str, int, int]]:
    """Return the files of the model's package, which may be changed in place or linked, without another version."""
    package = sys.modules[type(config).__module__.partition(".")[0]]
    return _files(sorted(Path(str(package.__file__)).parent.rglob("*.py")))


def _written(value: Any) -> Any:
    """Return `value` in JSON values.

    Raises:
        TypeError: it has something inside that is not read again.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, OpOverload | HigherOrderOperator):
        if find_op(str(value)) is not value:
            raise TypeError(f"{value} is not found by its name")
        return {"op": str(value)}
    name = type(value).__name__
    if _KINDS.get(name) is type(value):
        fields = value if isinstance(value, tuple) else (getattr(value, field) for field in value.__match_args__)
        return {name: [_written(item) for item in fields]}
    if isinstance(value, dict):
        return {"dict": [[_written(key), _written(item)] for key, item in value.items()]}
    if name not in _SEQUENCES:
        raise TypeError(f"a {name} is not kept")
    if (
        value
        and isinstance(value, tuple)
        and all(type(item) is tuple and list(map(type, item)) == [int, int] for item in value)
    ):
        return {"log": [number for item in value for number in item]}
    return {name: [_written(item) for item in value]}


def _read(value: Any) -> Any:
    """Return the value that `_written` was given."""
    if not isinstance(value, dict):
        return value
    ((name, inside),) = value.items()
    if name == "op":
        if (op := find_op(inside)) is None:
            raise ValueError(f"no operator {inside}")
        return op
    if name == "log":
        return tuple(zip(inside[::2], inside[1::2]))
    if name == "dict":
        return {_read(key): _read(item) for key, item in inside}
    items = map(_read, inside)
    return _SEQUENCES[name](items) if name in _SEQUENCES else _KINDS[name](*items)


_current: ContextVar[Store | None] = ContextVar("kept traces", default=None)


def current_store() -> Store | None:
    """Return the store of the command that runs; None: nothing is kept."""
    return _current.get()


@contextmanager
def keeping(wanted: bool, config: Any, *about: object) -> Iterator[None]:
    """Keep results within it, in `cache_folder`; they are written at its end.

    Args:
        wanted: as the caller has it; without a folder nothing is kept either.
        config: the model's, of transformers; None: its code is the caller's, and nothing is kept.
        about: more on the model: dtypes, adapters.
    """
    folder = cache_folder()
    if not wanted or config is None or folder is None:
        yield
        return
    store = Store(folder / "traces", (sorted(config.to_dict().items()), _code_of(config), about))
    token = _current.set(store)
    try:
        yield
    finally:
        _current.reset(token)
        store.save()
