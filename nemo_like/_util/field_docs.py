"""The documentation of a dataclass's fields: written once, behind each, for docstrings, flags and the reference."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import textwrap


@functools.cache
def field_docs(cls: type) -> dict[str, str]:
    """Return the string behind each field of `cls`, in one line, by the field's name; empty without the source file."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError):
        return {}
    body = tree.body[0].body  # type: ignore[attr-defined]
    docs = {}
    for field, text in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            docs[ast.unparse(field.target)] = " ".join(str(text.value.value).split())
    return docs


def described(cls: type, indent: str) -> str:
    """Return a paragraph for each documented field that a caller can give, as a docstring has it."""
    lines = []
    for field in dataclasses.fields(cls):
        if field.repr and field.name in field_docs(cls):
            text = f"{field.name}: {field_docs(cls)[field.name]}"
            lines.append(textwrap.fill(text, 118, initial_indent=indent, subsequent_indent=indent + "    "))
    return "\n".join(lines) + "\n"
