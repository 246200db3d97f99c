"""Count what makes text and code hard to read, and fail where a count is above its limit.

python .ci/words.py            every count beside its limit; exit status 1 where one is above
python .ci/words.py --pages    for each page: sentences, words in one, the share of long ones, long paragraphs
python .ci/words.py --list WORD   every place that a count is of, for example: --list docstring
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LONG_SENTENCE, LONG_PARAGRAPH = 35, 6
"""Words, and lines of a page."""
FIRST_WORDS = {"What", "Of", "Those", "Whether", "Where", "Not", "How", "Which"}
"""A docstring begins with a verb, or names the thing."""
FILLERS = {"found", "own", "made", "given", "asked", "said", "e", "s", "each", "known", "kept", "left", "held"}
"""Names that do not say what a thing is."""
NOT_WRITTEN = re.compile(
    r"(?<![\w.'\"-])(?:replay(?:s|ed|ing)?|microbatch(?:es)?|says?|said|beside|asks|stands?|lies|dealt|twins?|"
    r"(?:no|some|any)body(?:'s)?|(?:has|have|had) not got|room for|"
    r"(?<!there )(?:is|are|was|were) no (?!longer\b|more\b|less\b|other\b|such\b|need\b)[a-z]+)"
    r"(?![\w='\"-]|:| is\b)",
    re.IGNORECASE,
)
"""Words of docstrings and messages in whose place the field has its own: recompute, micro-batch, states, next to, uses, is,
is stored, divided over, no one, does not have, is not a ...; not where they are names in code (``microbatches=``)."""
OLD_WORDS = re.compile(
    r"\b(?:host memory|bare models?|bit for bit|to the bit|mixtures? of experts|anew|towers?|twins?|goes? with|dealt out|"
    r"hand(?:s|ed)? (?:over|on)|no ?body|some ?body)\b",
    re.IGNORECASE,
)
"""The field has its own: CPU memory, original model, bitwise, MoE, again, encoder, local model, compatible, pass on."""
WHAT = re.compile(r"\bwhat\b", re.IGNORECASE)
"""Mostly without its noun: "what fits", "what waits"."""
LIMITS = {
    "share of long sentences on the worst page, percent": 6,
    "paragraphs of pages above six lines": 0,
    "docstrings that begin with a question word, outside of planning": 0,
    "docstrings that begin with a question word, in planning": 0,
    "fmt: skip outside of planning": 0,
    "fmt: skip in planning": 0,
    "filler names, per thousand": 14,
    "words that are not written, outside of planning": 0,
    "old words in pages": 0,
    "old words in docstrings, comments and messages": 0,
    "'what' in pages": 6,
    "'what' in docstrings, comments and messages": 3,
}
"""They may only fall."""


def prose(text: str) -> str:
    """Return the running text of a page: without code, tables, headings, comments, and with links as their words."""
    text = re.sub(r"<!--.*?-->|```.*?```", "\n\n", text, flags=re.S)
    lines = [line for line in text.splitlines() if not re.match(r"\s{4,}|\s*\||#|!\[", line)]
    text = re.sub(r"^\s*(?:[-*]|\d+\.)\s+", "\n\n", "\n".join(lines), flags=re.M)
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)


def paragraphs(text: str) -> list[str]:
    """Return the paragraphs of a page's running text."""
    return [part.strip() for part in re.split(r"\n\s*\n", prose(text)) if part.strip()]


def sentences(text: str) -> list[list[str]]:
    """Return the sentences of a page, each as its words.

    >>> sentences("It runs `a.b`. It ends (see c).")
    [['It', 'runs', 'x'], ['It', 'ends', 'see', 'c']]
    """
    split = []
    for paragraph in paragraphs(text):
        plain = re.sub(r"`[^`]*`", "x", paragraph)
        for sentence in re.split(r"(?<=[.!?:;])\s+(?=[A-Z`(\d])", plain):
            if words := re.findall(r"[\w'+-]+", sentence):
                split.append(words)
    return split


def pages() -> list[Path]:
    """Return the pages that people wrote."""
    every = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in every if page.name not in ("models.md", "cli.md") and page.parent.name != "api"]


def modules() -> list[Path]:
    """Return the package's files."""
    return sorted((ROOT / "nemo_like").rglob("*.py"))


def in_planning(path: Path) -> bool:
    """Return whether a file is in `nemo_like/planning/`."""
    return "planning" in path.relative_to(ROOT).parts


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the first word of each docstring, those behind fields included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            value = getattr(statement, "value", None)
            if isinstance(statement, ast.Expr) and isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield statement.lineno, (re.findall(r"[\w']+", value.value) or [""])[0]


def unwritten(path: Path, words: re.Pattern[str] = NOT_WRITTEN) -> Iterator[tuple[int, str]]:
    """Yield the line and the word of each match of `words` in docstrings, comments and messages.

    A string without a space is a name, as is text between backticks; examples (``>>>``) are code.
    """
    source = path.read_text(encoding="utf-8")
    nodes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant))
    texts = [(node.lineno, node.value) for node in nodes if isinstance(node.value, str) and " " in node.value.strip()]
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    texts += [(token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT]
    for line, text in texts:
        plain = re.sub(r"`[^`]*`|^ *(?:>>>|\.\.\.) .*$", lambda code: re.sub(r".", "`", code[0]), text, flags=re.M)
        for match in words.finditer(plain):
            yield line + plain.count("\n", 0, match.start()), match[0]


def names(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each variable that is stored, and of each argument."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id


def places(what: str) -> Iterator[str]:
    """Yield every place that a count is of; `what`: sentence, paragraph, docstring, skip, filler, word, old or what."""
    if what in ("sentence", "paragraph"):
        for page in pages():
            text, name = page.read_text(encoding="utf-8"), page.relative_to(ROOT)
            if what == "sentence":
                for words in sentences(text):
                    if len(words) > LONG_SENTENCE:
                        yield f"{name}: {len(words)} words: {' '.join(words[:12])} ..."
            else:
                for paragraph in paragraphs(text):
                    if paragraph.count("\n") >= LONG_PARAGRAPH:
                        yield f"{name}: {paragraph.count(chr(10)) + 1} lines: {paragraph[:60]} ..."
        return
    for path in modules():
        name = path.relative_to(ROOT)
        if what == "docstring":
            yield from (f"{name}:{line}: {word}" for line, word in docstrings(path) if word in FIRST_WORDS)
        elif what in ("old", "what"):
            words = OLD_WORDS if what == "old" else WHAT
            yield from (f"{name}:{line}: {word}" for line, word in unwritten(path, words))
        elif what == "word":
            if not in_planning(path):
                yield from (f"{name}:{line}: {word}" for line, word in unwritten(path))
        elif what == "filler":
            yield from (f"{name}:{line}: {word}" for line, word in names(path) if word in FILLERS)
        else:
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                if "# fmt: skip" in line:
                    yield f"{name}:{number}"


def counts() -> dict[str, float]:
    """Return every count by the key of `LIMITS`."""
    worst, long_paragraphs = 0.0, 0
    for page in pages():
        text = page.read_text(encoding="utf-8")
        every = sentences(text)
        if len(every) >= 10:
            worst = max(worst, 100 * sum(len(words) > LONG_SENTENCE for words in every) / len(every))
        long_paragraphs += sum(paragraph.count("\n") >= LONG_PARAGRAPH for paragraph in paragraphs(text))
    found: dict[str, float] = dict.fromkeys(LIMITS, 0)
    for kind, words in (("old words", OLD_WORDS), ("'what'", WHAT)):
        found[f"{kind} in pages"] = sum(len(words.findall(prose(page.read_text(encoding="utf-8")))) for page in pages())
        found[f"{kind} in docstrings, comments and messages"] = sum(
            1 for path in modules() for _ in unwritten(path, words)
        )
    stored = fillers = 0
    for path in modules():
        where = "in planning" if in_planning(path) else "outside of planning"
        questions = sum(word in FIRST_WORDS for _, word in docstrings(path))
        found[f"docstrings that begin with a question word, {where}"] += questions
        found[f"fmt: skip {where}"] += path.read_text(encoding="utf-8").count("# fmt: skip")
        if not in_planning(path):
            found["words that are not written, outside of planning"] += sum(1 for _ in unwritten(path))
        every_name = [name for _, name in names(path)]
        stored, fillers = stored + len(every_name), fillers + sum(name in FILLERS for name in every_name)
    found["share of long sentences on the worst page, percent"] = round(worst, 1)
    found["paragraphs of pages above six lines"] = long_paragraphs
    found["filler names, per thousand"] = round(1000 * fillers / stored, 1)
    return found


_KINDS = ("sentence", "paragraph", "docstring", "skip", "filler", "word", "old", "what")


def main() -> int:
    """Print what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", action="store_true", help="print a line for each page")
    parser.add_argument("--list", choices=_KINDS, dest="what")
    options = parser.parse_args()
    if options.what:
        print("\n".join(places(options.what)))
        return 0
    if options.pages:
        for page in pages():
            text = page.read_text(encoding="utf-8")
            every = sentences(text)
            if not every:
                continue
            share = sum(len(words) > LONG_SENTENCE for words in every) / len(every)
            length = sum(map(len, every)) / len(every)
            high = sum(paragraph.count("\n") >= LONG_PARAGRAPH for paragraph in paragraphs(text))
            lines = text.count("\n")
            print(
                f"{len(every):5} sentences {length:5.1f} words {share:6.1%} long {high:3} paragraphs {lines:5} lines  "
                f"{page.relative_to(ROOT)}"
            )
        return 0
    above = False
    for name, count in counts().items():
        above |= count > LIMITS[name]
        print(f"{count:8g} of {LIMITS[name]:6g}  {name}")
    return int(above)


if __name__ == "__main__":
    sys.exit(main())
