"""Pages followed as a reader follows them. ``python -m tests.tools.followed [PAGE ...]`` prints what ran.

Each page of docs/start/ and docs/how-to/ begins in an empty folder, and its ``bash`` blocks run top to bottom as printed.
An HTML comment in front of a block, which readers of the page do not see, may say one of these:

    <!-- file: train.py -->             the page tells the reader to save the block below under this name
    <!-- given: commands -->            what the reader has by then, in front of a bash block: it runs first
    <!-- not run: needs eight GPUs -->  a bash block that is not run, and why

A file of Python may have a ``given:`` of its own (tests/test_documents.py): the file begins with it.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
LIMIT = 300
"""Seconds that a page may take, on a busy machine."""
_STEP = re.compile(
    r"(?:^<!-- file: (?P<name>\S+) -->\n+)?(?:^<!-- ?(?P<kind>given|not run):(?P<rest>(?:(?!-->).)*)-->\n)?"
    r"^```(?P<language>\w+)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Step:
    """One block of a page: a file to write, or commands to run."""

    page: str
    line: int
    text: str
    file: str | None = None
    """The name to write `text` under; None: `text` is commands."""
    given: str = ""
    """Commands that run before, from the comment above."""
    reason: str | None = None
    """Why the commands are not run; None: they are."""

    @property
    def command(self) -> str:
        """The block in one line."""
        return " ".join(self.text.replace("\\\n", " ").split())

    def __str__(self) -> str:
        return f"{self.page}:{self.line} {self.command[:80]}"


@dataclass(frozen=True)
class Result:
    """How the commands of a step ended."""

    step: Step
    seconds: float
    code: int
    output: str

    def __str__(self) -> str:
        outcome = "ok" if self.code == 0 else f"failed with {self.code}"
        return f"{self.step}  {self.seconds:.1f} s  {outcome}"


def pages() -> list[str]:
    """Return the names of all pages to follow, as docs/ has them."""
    found = [path for folder in ("start", "how-to") for path in sorted((DOCS / folder).glob("*.md"))]
    return [str(path.relative_to(DOCS)) for path in found]


def steps(page: str, text: str | None = None) -> list[Step]:
    """Return the files and commands of a page, in order.

    >>> steps("a.md", "<!-- not run: needs a GPU -->\\n```bash\\nnvidia-smi\\n```\\n")[0].reason
    'needs a GPU'
    """
    text = (DOCS / page).read_text(encoding="utf-8") if text is None else text
    steps_of_page = []
    for block in _STEP.finditer(text):
        line = text.count("\n", 0, block.start("text")) + 1
        rest = (block["rest"] or "").strip()
        if block["name"]:
            given = f"{rest}\n\n" if rest and block["kind"] == "given" else ""
            steps_of_page.append(Step(page, line, given + block["text"], file=block["name"]))
        elif block["language"] == "bash":
            if block["kind"] == "not run" and len(rest.split()) < 2:
                raise ValueError(f"{page}:{line}: 'not run:' without a reason")
            given = rest if block["kind"] == "given" else ""
            steps_of_page.append(
                Step(page, line, block["text"], given=given, reason=rest if block["kind"] == "not run" else None)
            )
    if sum(step.file is None for step in steps_of_page) != len(re.findall(r"^\s*```bash", text, re.MULTILINE)):
        raise ValueError(f"{page}: a bash block that is indented or never ends")
    return steps_of_page


def _run(commands: str, folder: Path, limit: float) -> tuple[int, str]:
    """Run `commands` in `folder`; 124 and what was printed where they take longer than `limit` seconds."""
    scripts = str(Path(sys.executable).parent)
    env = {
        **os.environ,
        "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "NEMO_LIKE_CACHE": str(folder.parent / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    with (folder.parent / "output").open("w+", encoding="utf-8") as output:
        process = subprocess.Popen(
            ["bash", "-e", "-o", "pipefail", "-c", commands],
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the ranks too
            process.wait()
            code = 124
        output.seek(0)
        return code, output.read()


def follow(page: str) -> Iterator[Result]:
    """Follow a page in an empty folder. It ends at the first command that fails."""
    left = float(LIMIT)
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "folder"
        folder.mkdir()
        for step in steps(page):
            if step.file is not None:
                (folder / step.file).write_text(step.text, encoding="utf-8")
            elif step.reason is None:
                begin = time.monotonic()
                code, output = _run(f"{step.given}\n{step.text}", folder, left)
                seconds = time.monotonic() - begin
                left -= seconds
                yield Result(step, seconds, code, output)
                if code:
                    return


def main(names: list[str]) -> int:
    """Follow the named pages, or all; 1 where a command failed."""
    unknown = [name for name in names if not any(name in page for page in pages())]
    if unknown:
        raise SystemExit(f"No page of docs/start/ and docs/how-to/ has {unknown[0]!r} in its name.")
    failed = False
    for page in pages():
        if names and not any(name in page for name in names):
            continue
        begin = time.monotonic()
        for result in follow(page):
            print(result, flush=True)
            if result.code:
                failed = True
                print(result.output[-3000:], flush=True)
        print(f"{page}: {time.monotonic() - begin:.0f} s", flush=True)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
