"""Lists of names as `ac=`: the tensors of a layer to save or to offload, the modules to recompute, or both."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from nemo_like._util.words import did_you_mean, field_names

NUMBERED = ("experts", "exchanges")  # Words of which the first, second and third call of a layer have names, too.
WORDS = (
    *("attention", "matmuls", *NUMBERED, "statistics", "residual", "attention.q", "attention.k", "attention.v"),
    *(f"{word}.{call}{operand}" for word in NUMBERED for call in (1, 2, 3) for operand in ("", ".input")),
)
"""Names that every model has. Results of attention's kernel, of plain matmuls, of grouped ones, and of exchanges of tokens
between ranks; of the last two also by number. Results of at most a 64th of the bytes of the layer's input, such as means of
norms. Sums of two tensors of that input's shape. Operands of these kernels."""


@dataclass(frozen=True)
class NamedList:
    """Names within a layer, as globs (``*`` within a segment, ``**`` across).

    A name is a module's path in its layer (of its output), ``PATH.input`` (of the tensor it is called with), one of `WORDS`,
    or a label of `nemo_like.name`.
    """

    save: tuple[str, ...] = ()
    """Tensors that stay on the device."""
    offload: tuple[str, ...] = ()
    """Tensors that wait in CPU memory."""
    recompute: tuple[str, ...] | None = None
    """Modules that are regions, each by itself; None: the whole layer is one; empty: nothing is recomputed."""
    layers: tuple[str, ...] = ()
    """Names of the layers (globs; ``[7-31]`` is a range of numbers); empty: all that no list before it has."""

    def __post_init__(self) -> None:
        for field in field_names(NamedList):
            value = getattr(self, field)
            if value is None and field == "recompute":
                continue
            names = (value,) if isinstance(value, str) else value
            if not isinstance(names, Iterable) or not all(isinstance(name, str) and name.strip() for name in names):
                raise TypeError(f"ac has {field}={value!r}; it must be a list of names, such as ['attention'].")
            object.__setattr__(self, field, tuple(dict.fromkeys(names)))
        every = [*self.save, *self.offload, *(self.recompute or ())]
        if twice := [name for name in dict.fromkeys(every) if every.count(name) > 1]:
            raise ValueError(f"ac has {twice[0]!r} in two of save, offload and recompute. Keep it in one of them.")

    @property
    def names(self) -> tuple[str, ...]:
        """The names of tensors, in both lists."""
        return (*self.save, *self.offload)

    @property
    def words(self) -> dict[str, Any]:
        """Its fields that are set, as lists."""
        values = {field: getattr(self, field) for field in ("layers", *field_names(NamedList))}
        return {field: list(v) for field, v in values.items() if v or (field == "recompute" and v is not None)}


NO_NAMES = NamedList()


@dataclass(frozen=True)
class NamedLists:
    """Value of `ac=`: for each layer the first list that has it.

    >>> NamedLists.of([{"layers": "model.layers.[0-6]", "save": ["attention"]}, {"save": []}]).words
    [{'layers': ['model.layers.[0-6]'], 'save': ['attention']}, {}]
    """

    lists: tuple[NamedList, ...]

    @classmethod
    def of(cls, value: Any) -> NamedLists:
        """Read one list as a mapping, or several.

        Raises:
            TypeError: names that are not strings.
            ValueError: an unknown key, or a name in two lists.
        """
        entries = [value] if isinstance(value, Mapping) else list(value)
        fields = field_names(NamedList)
        for key in (key for entry in entries for key in entry if key not in fields):
            if key == "budget":
                raise ValueError("ac has a budget next to several lists; a budget takes one list, for all layers.")
            raise ValueError(f"ac has {key!r}; lists have {', '.join(fields)}." + did_you_mean(str(key), fields))
        return cls(tuple(NamedList(**entry) for entry in entries))

    @property
    def words(self) -> Any:
        """The lists as `of` reads them: a mapping, or several."""
        entries = [names.words for names in self.lists]
        return entries[0] if len(entries) == 1 and entries[0] else entries

    @property
    def mode(self) -> str:
        """The lists as ``--ac`` takes them."""
        return json.dumps(self.words)

    @property
    def whole(self) -> bool:
        """True where no list has regions inside of layers."""
        return not any(names.recompute for names in self.lists)

    def __str__(self) -> str:
        return self.mode


def are_lists(value: object) -> bool:
    """Return whether a value of `ac` is lists of names, and no fields of a `CheckpointConfig`."""
    if isinstance(value, list | tuple):
        return bool(value) and all(isinstance(entry, Mapping) for entry in value)
    return isinstance(value, Mapping) and bool({"save", "offload", "recompute", "budget", "layers"} & set(value))


def read_json(text: str) -> Any:
    """Return the lists that a command line has.

    Raises:
        ValueError: it is not JSON.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f'ac is {text!r}, which is not JSON: {error}. Write {{"save": ["attention"]}}.') from None
