"""The documentation of a dataclass's fields: written once, behind each, for docstrings, flags and the reference."""

import ast
import functools
import inspect
import itertools
import textwrap


def attribute_docs(source: str, cls: str | None) -> dict[str, str]:
    """Return names with the string below their assignment: at the top level, or in the class `cls`."""
    body: list[ast.stmt] = ast.parse(textwrap.dedent(source)).body
    if cls is not None:
        body = next(node.body for node in body if isinstance(node, ast.ClassDef) and node.name == cls)
    docs = {}
    for node, after in itertools.pairwise(body):
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            docs[target.id] = str(after.value.value)
    return docs


@functools.cache
def field_docs(cls: type) -> dict[str, str]:
    """Return the string behind each field of `cls`, in one line, by the field's name; empty without the source file."""
    try:
        source = inspect.getsource(cls)
    except (OSError, TypeError):
        return {}
    return {name: " ".join(text.split()) for name, text in attribute_docs(source, cls.__name__).items()}
