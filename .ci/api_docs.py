"""Write the generated pages of docs/reference: api/ from the docstrings of the public names, cli.md from every ``--help``.

The fields of `Job` are keywords of `parallelize`, and their documentation is written into its docstring, too.

    python .ci/api_docs.py [--check]      with --check: fail where a page is not current

Public is what `nemo_like.__all__` names, and the `__all__` of each folder that users import.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import enum
import functools
import importlib
import inspect
import io
import os
import pkgutil
import re
import shutil
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from nemo_like._util.field_docs import attribute_docs, field_docs
from nemo_like.cli import make_parser
from nemo_like.commands import COMMANDS
from nemo_like.job import Job

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ROOT / "docs" / "reference"
NOT_PUBLIC = {"cli", "commands", "comparison", "recipes", "torch_compat"}
"""Programs, and the private names of torch."""
FIRST = (
    "parallelize",
    "Job",
    "StepSpec",
    "predict",
    "plan_for",
    "fit",
    "dry_run",
    "explain",
    "Plan",
    "CheckpointConfig",
    "materialize",
)
"""The names that people need, in the order of a first job."""

INTEGRATIONS = ("transformers", "lightning", "torchtitan")

MADE = "Made by `python .ci/api_docs.py`: change the {source}, then run that."
SECTION = re.compile(r"^(Args|Returns|Raises|Yields|Attributes|Examples?|Shapes?|Notes?):$")
ADDRESS = re.compile(r" at 0x[0-9a-f]+")
ITEM = re.compile(r"^([\w*`., ]+): (.*)$")


def pages() -> dict[Path, str]:
    """Return every generated page by its path."""
    package, *others = rooms()
    lines = [
        f"# The public names\n\n{MADE.format(source='docstring')} What is not named here may change without a word in the",
        "[changelog](../../changelog.md).\n\n## Read first\n",
        *(f"- [`{name}`](nemo_like.md#{name.lower()}): {summary(getattr(package, name))}" for name in FIRST),
        "\n## Every name\n",
    ]
    written, seen = {}, {}
    for room in [package, *others]:
        file = f"{room.__name__.removeprefix('nemo_like.')}.md"
        lines.append(f"- [`{room.__name__}`]({file}): {' '.join(first_paragraph(room).split())}")
        written[REFERENCE / "api" / file] = room_page(room, seen)
    written[REFERENCE / "api" / "README.md"] = "\n".join(lines) + "\n"
    written[REFERENCE / "cli.md"] = command_page()
    return written


def room_page(room: ModuleType, seen: dict[Any, str]) -> str:
    """Return the page of one module; `seen`: the names on pages before it, which are not described again."""
    parts = [f"# `{room.__name__}`\n\n{first_paragraph(room)}\n"]
    again = []
    for module, name in public_names(room):
        value = getattr(module, name)
        key = id(value) if inspect.isclass(value) or inspect.isroutine(value) else (module.__name__, name)
        if key in seen:
            again.append(f"`{name}`")
            continue
        seen[key] = name
        title = f"{module.__name__.rpartition('.')[2]}.{name}" if module is not room else name
        parts.append(f"\n## `{title}`\n\n{entry(module, name, value)}")
    if again:
        parts.append(textwrap.fill(f"\nAlso importable from here: {', '.join(again)}.", 120) + "\n")
    return "".join(parts)


def public_names(room: ModuleType) -> list[tuple[ModuleType, str]]:
    """Return the names of a page, each with its module: the integrations are modules that are imported one by one."""
    first = [name for name in FIRST if room.__name__ == "nemo_like"]
    names = [(room, name) for name in dict.fromkeys([*first, *room.__all__])]
    if room.__name__ == "nemo_like.integrations":
        modules = [importlib.import_module(f"{room.__name__}.{each}") for each in INTEGRATIONS]
        names = [(module, name) for module in modules for name in module.__all__] + names
    return names


def summary(value: Any) -> str:
    """Return the first sentence of a docstring."""
    return re.split(r"(?<=[.:]) ", one_line(inspect.getdoc(value) or ""))[0].rstrip(":")


def command_page() -> str:
    """Return the page with the help of every command."""
    os.environ["COLUMNS"] = "100"
    parts = [f"# Commands\n\n{MADE.format(source='help')} `nemo-like COMMAND --help` prints the same.\n"]
    for name in COMMANDS:
        shown = io.StringIO()
        with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
            make_parser(name).parse_args([name, "--help"])
        parts.append(f"\n## {name}\n\n```text\n{shown.getvalue()}```\n")
    return "".join(parts)


def rooms() -> list[ModuleType]:
    """`nemo_like` first, then every room that says what is public in it."""
    package = importlib.import_module("nemo_like")
    found = [package]
    for info in sorted(pkgutil.iter_modules(package.__path__), key=lambda info: info.name):
        if info.name in NOT_PUBLIC or info.name.startswith("_"):
            continue
        module = importlib.import_module(f"nemo_like.{info.name}")
        if hasattr(module, "__all__"):
            found.append(module)
    return found


def entry(room: ModuleType, name: str, value: Any) -> str:
    """One public name: its signature, its docstring, and of a class the fields and public methods."""
    if inspect.isclass(value):
        return class_entry(name, value)
    if callable(value):
        return f"{signature(name, value)}\n{markdown(value.__doc__)}"
    text = attribute_docs(inspect.getsource(defining_module(room, name)), None).get(name, "")
    if isinstance(value, dict) and any(map(dataclasses.is_dataclass, value.values())):  # a registry: its words
        return f"```text\n{name}: {', '.join(map(repr, value))}\n```\n\n{markdown(text)}"
    return f"```text\n{name} = {value!r}\n```\n\n{markdown(text)}"


def class_entry(name: str, cls: type) -> str:
    """A class, an enumeration or a dataclass."""
    own = cls.__doc__ or ""
    if dataclasses.is_dataclass(cls) and own.startswith(f"{cls.__name__}("):
        own = ""  # the signature, which dataclasses put there where no docstring stands
    parts = [
        f"```text\nclass {name}({', '.join(m.name for m in cls)})\n```\n"
        if issubclass(cls, enum.Enum)
        else signature(name, cls)
    ]
    parts.append("\n" + markdown(own))
    init = vars(cls).get("__init__")
    if init is not None and init.__doc__ and not dataclasses.is_dataclass(cls):
        parts.append("\n" + markdown(init.__doc__))
    documented = attribute_docs(inspect.getsource(cls), cls.__name__)
    if documented:
        parts.append("\n")
        parts += [f"- `{field}`: {one_line(text)}\n" for field, text in documented.items()]
    methods = [(n, m) for n, m in vars(cls).items() if not n.startswith("_") and documented_method(m)]
    for method_name, method in methods:
        if isinstance(method, property | functools.cached_property):
            parts.append(f"\n**`{name}.{method_name}`** (property): {markdown(inspect.getdoc(method))}")
            continue
        function = method.__func__ if isinstance(method, classmethod | staticmethod) else method
        call = signature(f"{name}.{method_name}", function, bound=not isinstance(method, staticmethod))
        parts.append(f"\n{call}\n{markdown(function.__doc__)}")
    return "".join(parts)


def documented_method(member: Any) -> bool:
    """Whether `member` of a class is a method or property with a docstring of its own."""
    kinds = property | functools.cached_property | classmethod | staticmethod
    return (inspect.isfunction(member) or isinstance(member, kinds)) and bool(inspect.getdoc(member))


class Annotation(str):
    """An annotation that `inspect` prints without quotation marks."""

    def __repr__(self) -> str:
        return str(self)


def signature(name: str, value: Any, bound: bool = False) -> str:
    """The call in a block of its own, one argument a line where it is long. `bound`: without ``self`` or ``cls``."""
    try:
        found = inspect.signature(value)
    except (ValueError, TypeError):  # a Protocol, an abstract class without a constructor
        return f"```text\n{name}\n```\n"
    parameters = [p.replace(annotation=bare(p.annotation)) for p in found.parameters.values()]
    found = inspect.Signature(parameters[1:] if bound else parameters, return_annotation=bare(found.return_annotation))
    text = name + same_everywhere(found)
    if len(text) > 110:
        result = "" if found.return_annotation is found.empty else f" -> {found.return_annotation!r}"
        text = f"{name}(\n{textwrap.indent(arguments(found), '    ')}\n){result}"
    return f"```text\n{text}\n```\n"


def bare(value: Any) -> Any:
    """Return an annotation as a source writes it, whether the module evaluates its annotations or not."""
    if value is inspect.Parameter.empty:
        return value
    text = value if isinstance(value, str) else inspect.formatannotation(value)
    text = re.sub(r"(\*?)<class '([\w.]+)'>", lambda found: f"Unpack[{found[2]}]" if found[1] else found[2], text)
    text = text.replace("torch.nn.modules.module.", "nn.")
    text = re.sub(r"\b(?:collections\.abc|typing|nemo_like(?:\.\w+)*|torch(?:\.\w+)+)\.(?=[A-Z])", "", text)
    return Annotation(text)


def same_everywhere(value: Any) -> str:
    """The text of a signature or parameter without what differs between machines: addresses, the torch installed."""
    return ADDRESS.sub("", str(value)).replace(repr(torch.__version__), "torch.__version__")


def arguments(found: inspect.Signature) -> str:
    """The parameters one a line, with the ``*`` before those that are keywords only."""
    result: list[str] = []
    starred = False
    for parameter in found.parameters.values():
        starred = starred or parameter.kind is parameter.VAR_POSITIONAL
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            result.append("*,")
            starred = True
        result.append(same_everywhere(parameter) + ",")
    return "\n".join(result)


def defining_module(room: ModuleType, name: str) -> ModuleType:
    """The module that a room took a constant from: the one whose source assigns it."""
    for node in ast.parse(inspect.getsource(room)).body:
        if isinstance(node, ast.ImportFrom) and node.module and any(a.name == name for a in node.names):
            return importlib.import_module(node.module)
    return room


def first_paragraph(module: ModuleType) -> str:
    return inspect.cleandoc(module.__doc__ or "").split("\n\n")[0]


def one_line(text: str) -> str:
    return " ".join(inspect.cleandoc(text).split()).replace("``", "`")


def markdown(doc: str | None) -> str:
    """A docstring as Markdown: sections become bold words, their items a list, examples a block of code."""
    out: list[str] = []
    state = "text"  # text, section (inside Args and the like) or example
    for line in inspect.cleandoc(doc or "").splitlines():
        if line.lstrip().startswith(">>>") and state != "example":
            out += ["", "```pycon"]
            state = "example"
        if state == "example":
            if line.strip():
                out.append(line.strip())
                continue
            out += ["```", ""]
            state = "text"
            continue
        if SECTION.match(line):
            out += ["", f"**{line[:-1]}**", ""]
            state = "section"
        elif state == "section" and line.strip():
            out.append(section_line(line))
        elif line.strip():
            state = "text"
            out.append(line.replace("``", "`"))
        else:
            out.append("")
    if state == "example":
        out.append("```")
    text = "\n".join(out).strip("\n")
    return re.sub(r"\n{3,}", "\n\n", text) + "\n"


def section_line(line: str) -> str:
    """A line below ``Args:``: the start of an item, or the rest of one."""
    indent = len(line) - len(line.lstrip())
    text = line.strip().replace("``", "`")
    item = ITEM.match(text) if indent == 4 else None
    if item:
        return f"- `{item[1]}`: {item[2]}" if "`" not in item[1] else f"- {text}"
    return f"  {text}"


PARALLELIZE = ROOT / "nemo_like" / "parallelizer.py"
FIELDS = re.compile(r"^        strategy: .*?(?=^        optimizer: )", re.DOTALL | re.MULTILINE)
"""The paragraphs of the docstring that are written."""


def with_fields(source: str) -> str:
    """Return the source of `parallelize` with a paragraph for each field of `Job` that a caller can give."""
    docs = field_docs(Job)
    texts = [f"{each.name}: {docs[each.name]}" for each in dataclasses.fields(Job) if each.repr and each.name in docs]
    lines = [textwrap.fill(text, 118, initial_indent=" " * 8, subsequent_indent=" " * 12) + "\n" for text in texts]
    written, count = FIELDS.subn(lambda _: "".join(lines), source)
    assert count == 1, f"the docstring of parallelize has {count} places for the fields of Job"
    return written


def main() -> int:
    """Write the page, or with ``--check`` say whether it is current (exit status 1 where it is not)."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where the page is not current")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    source = PARALLELIZE.read_text(encoding="utf-8")
    if with_fields(source) != source and not options.check:
        PARALLELIZE.write_text(with_fields(source), encoding="utf-8")
        os.execv(sys.executable, [sys.executable, *sys.argv])  # the page has the new docstring
    written = pages() | {PARALLELIZE: with_fields(source)}
    if not options.check:
        shutil.rmtree(REFERENCE / "api", ignore_errors=True)
        (REFERENCE / "api").mkdir()
        for path, text in written.items():
            path.write_text(text, encoding="utf-8")
        return 0
    stale = [
        path.name for path, text in written.items() if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    if stale:
        print(f"{', '.join(stale)}: not current. Run: python .ci/api_docs.py", file=sys.stderr)
    return bool(stale)


if __name__ == "__main__":
    sys.exit(main())
