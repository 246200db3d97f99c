"""The parts of a format's table: kinds of values, and how a file's keys become values of our flags and back."""

import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_like.options import CONTEXT_METHODS, SCHEDULES, NamedLists
from nemo_like.presets import PRESETS

# Read where no flag has the value, written where the key can't have it. None instead: the value changes nothing.
UNKNOWN = object()


@dataclass(frozen=True)
class ValueKind:
    """A kind of value: how it is read, and written."""

    read: Callable[[Any], Any]
    write: Callable[[Any], Any] = lambda value: value


@dataclass(frozen=True)
class Format:
    """The table of one framework's settings file."""

    framework: str
    marks: tuple[str, ...]  # Keys of which a file of this framework has one.
    # By dotted key: the flag that it sets, and its kind. A name with ``_`` in front is for `finish` alone.
    keys: Mapping[str, tuple[str, ValueKind]]
    ignored: tuple[str, ...]  # Patterns of keys that change neither memory nor speed.
    # Values, by dotted key, that the framework documents as its defaults.
    implied: Mapping[str, Any] = field(default_factory=dict)
    # Regular expressions of other spellings of a key, with the one in `keys`.
    renamed: tuple[tuple[str, str], ...] = ()
    # Sets values that several keys decide together, and returns keys that were not understood.
    finish: Callable[[dict[str, Any]], Iterator[str]] = lambda values: iter(())
    # Undoes `finish` before values are written.
    prepare: Callable[[dict[str, Any]], None] = lambda values: None
    # Values, by dotted key, that a written file has in any case.
    fixed: Mapping[str, Any] = field(default_factory=dict)

    def read(self, path: Path, tree: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Return the values by flag, and ``key = value`` of keys that were not understood.

        Raises:
            ValueError: a value that its key can't have.
        """
        values, unknown = dict[str, Any](), list[str]()
        given = {self._key(key): value for key, value in flat(tree) if value is not None}
        for key, value in (dict(self.implied) | given).items():
            if key not in self.keys:
                if not any(fnmatch.fnmatchcase(key, pattern) for pattern in self.ignored):
                    unknown.append(f"{key} = {value}")
                continue
            flag, kind = self.keys[key]
            try:
                read = kind.read(value)
            except ValueError as error:
                raise ValueError(
                    f"{path}: {key} is {value!r}; {error}. Correct the file, or take the line out."
                ) from None
            if read is UNKNOWN:
                unknown.append(f"{key} = {value}" + ("" if key in given else " (the default)"))
            elif read is not None:
                values[flag] = read
        values.pop("", None)
        unknown += self.finish(values)
        share_sizes(values)
        return {name: value for name, value in values.items() if not name.startswith("_")}, tuple(unknown)

    def write(self, values: Mapping[str, Any]) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
        """Return the tables of a file by name (the first one has none), and the values that it does not have."""
        left = dict(values)
        self.prepare(left)
        written = dict(self.fixed)
        for key, (flag, kind) in self.keys.items():
            word = kind.write(left[flag]) if left.get(flag) is not None else UNKNOWN
            if word is not UNKNOWN:
                written[key] = word
                del left[flag]
        tables: dict[str, dict[str, Any]] = {"": {}}
        for key, word in written.items():
            table, _, name = key.rpartition(".")
            tables.setdefault(table, {})[name] = word
        return tables, {name: value for name, value in left.items() if not name.startswith("_")}

    def _key(self, key: str) -> str:
        for pattern, spelling in self.renamed:
            key = re.sub(pattern, spelling, key)
        return key


def flat(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Return the leaves of nested tables with their dotted keys.

    >>> dict(flat({"a": {"b": 1}, "c": [2]}))
    {'a.b': 1, 'c': [2]}
    """
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def whole(*unset: object) -> ValueKind:
    """Return the kind of a whole number from 1 on; `unset`: values that mean none."""

    def read(value: Any) -> int | None:
        if value in unset and not isinstance(value, bool):
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError("it must be a whole number >= 1")
        return value

    return ValueKind(read)


def words(known: Mapping[Any, Any], others: bool = True) -> ValueKind:
    """Return the kind of a word, in small or large letters, that means a value of ours.

    Args:
        known: by word, our value.
        others: other words are not understood; False: they are refused.
    """
    small = {_small(word): meaning for word, meaning in known.items()}

    def read(value: Any) -> Any:
        if isinstance(value, str | bool | int) and _small(value) in small:
            return small[_small(value)]
        if others:
            return UNKNOWN
        raise ValueError(f"it must be {' or '.join(dict.fromkeys(map(_small, known)))}")

    return ValueKind(read, lambda value: next((word for word, meaning in known.items() if meaning == value), UNKNOWN))


def _small(word: object) -> str:
    return str(word).lower()


def switch(on: Any = True, off: Any = False) -> ValueKind:
    """Return the kind of a yes or a no, each of which means a value; None: it changes nothing."""
    return words({True: on, False: off, "yes": on, "no": off}, others=False)


def only(*harmless: Any) -> ValueKind:
    """Return the kind of a key that changes nothing with these values, and is not understood with others."""
    return ValueKind(lambda value: None if value in harmless else UNKNOWN)


def same(*known: str) -> ValueKind:
    """Return the kind of a word that is ours, too."""
    return words({word: word for word in known})


def _names(value: Any) -> list[str]:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) and name.strip() for name in names):
        raise ValueError("it must be a list of names")
    return names


def ac_of(unnamed: str, **names: Iterable[str]) -> str:
    """Return ``ac`` of the lists of names that are not empty; `unnamed`: where all are.

    >>> ac_of("full", save=["attention"], offload=[]), ac_of("full", save=[])
    ('{"save": ["attention"]}', 'full')
    """
    lists = {way: tensors for way, values in names.items() if (tensors := list(values))}
    return NamedLists.of(lists).mode if lists else unnamed


WHOLE, WORD, NAMES = whole(), ValueKind(str), ValueKind(_names)
DTYPE = words(
    {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16"}
    | {"bf16": "bf16", "fp32": "fp32", "fp16": "fp16"}
    | {"torch.bfloat16": "bf16", "torch.float32": "fp32", "torch.float16": "fp16"}
)
# Torch's names of schedules and of the ways of its context parallelism, and ours.
SCHEDULE = words({each.torch_class.removeprefix("Schedule"): name for name, each in SCHEDULES.items()})
ROTATION = words({facts.rotation: name for name, facts in CONTEXT_METHODS.items() if facts.rotation is not None})


def preset(name: Any) -> Any:
    """Read the name of a model on the Hub, or its folder: the preset of the same shape, or an existing folder.

    >>> preset("meta-llama/Llama-3.1-8B-Instruct")
    'llama3-8b'
    """

    word = re.sub(r"(-instruct|-base|-v0\.\d)+$", "", str(name).lower().rpartition("/")[2])
    word = re.sub(r"^(meta-)?llama-3(\.[123])?-", "llama3-", word)
    if word in PRESETS:
        return word
    return str(name) if Path(str(name)).exists() else UNKNOWN


def share_sizes(values: dict[str, Any]) -> None:
    """Set values that the sizes of the axes decide: the number of ranks, and accumulation out of ``global_batch``."""
    others = values.get("tp", 1) * values.get("cp", 1) * values.get("pp", 1)
    replicas = values.get("dp_replicate", 1)
    if values.get("cp", 1) == 1:
        values.pop("cp_method", None)
    if "_data_ranks" in values:
        values["dp_shard"] = max(values["_data_ranks"] // replicas, 1)
    if "dp_shard" in values:
        values.setdefault("world_size", values["dp_shard"] * replicas * others)
    if values.get("reduce_dtype") == "fp32" and values.get("precision") != values.get("dtype", "fp32"):
        del values["reduce_dtype"]  # which the other two mean anyway
    pipelined = values.get("pp", 1) > 1
    each = values.get("world_size", 0) // others * values.get("batch_size", 0)
    each *= values.get("grad_accum", 1) if pipelined else 1
    rounds = values.get("global_batch", 0) / each if each else 0
    if rounds == 1 or (rounds and not pipelined and rounds == int(rounds)):
        del values["global_batch"]
        values |= {} if pipelined else {"grad_accum": int(rounds)}


def cut_batch(values: dict[str, Any]) -> None:
    """Set the micro-batch of a pipeline: a rank's batch is cut into parts of ``_part`` sequences."""
    part = values.pop("_part", 1)
    if values.get("pp", 1) == 1:
        values.pop("pp_schedule", None)
    elif values.get("batch_size", 0) % part == 0 and "batch_size" in values:
        values["grad_accum"], values["batch_size"] = values["batch_size"] // part, part
