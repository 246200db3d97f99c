"""The command-line flag of an option: written once, as metadata of the option's field."""

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from nemo_like._util.field_docs import field_docs
from nemo_like._util.words import setting

FIELDS = object()  # The default of the field.


def same(value: Any) -> Any:
    """Return `value`: it is the same in the field and on the command line."""
    return value


@dataclass(frozen=True)
class Flag:
    """A flag of a job. Its help is the first sentence of its field's documentation."""

    # The commands that take it: ``plan``, ``fit``, ``pretrain``, ``finetune``; ``pins``: ``fit``, as a constraint.
    on: str
    group: str = "parallelism"  # The group of options, in the help, that it belongs to.
    # As a Python name; on the command line ``--name`` with ``_`` written as ``-``. Default: the field's.
    name: str = ""
    default: Any = FIELDS  # Its value where it is not on the command line.
    kind: Callable[[str], Any] = str
    choices: Collection[str] = ()  # The values that it may have; empty: any.
    least: float | None = None  # The smallest number that it may be.
    values: str = ""  # Values that it may have, for its help; default: its choices.
    stages: bool = True  # Plans of the stages of a pipeline have it.
    moves: bool = False  # With another value than its default, tensors go to CPU memory.
    searched: tuple[Any, ...] = ()  # Values that `fit` tries, where none is given; the first is the usual one.
    column: str = ""  # Heading of its column in the table of `fit`; default: its name.
    note: str = ""  # Its help where it means the opposite of its field.
    read: Callable[[Any], Any] = same  # Makes the field's value of the flag's.
    write: Callable[[Any], Any] = same  # Makes the flag's value of the field's.
    # The field of `Job` that it sets, with the field of that: ``"tp.size"``, and the class that has the field;
    # `nemo_like.flags` fills both in.
    field: str = ""
    owner: type = object

    @property
    def word(self) -> str:
        """Return the flag as it is written on the command line."""
        return "--gpus" if self.name == "world_size" else "--" + self.name.replace("_", "-")

    @property
    def help(self) -> str:
        """Return its effect, in a line, of the source of its field; read when it is shown, since that takes time."""
        doc = self.note or field_docs(self.owner).get(self.field.rpartition(".")[2], "")
        text = re.split(r"\.(?= |$)|; None", doc.replace("`", "").replace('"', ""))[0]
        values = self.values or " | ".join(self.choices)
        start = text[:1].lower() if text[1:2].islower() else text[:1]
        return start + text[1:] + (f": {values}" if values else "")


def flagged(
    default: Any, /, on: str = "plan fit", group: str = "parallelism", unit: str = "", called: str = "", **facts: Any
) -> Any:
    """Return a `setting` with a flag; `facts`: other fields of `Flag`."""
    return setting(default, unit=unit, called=called, **facts, flag=Flag(on, group, **facts))
