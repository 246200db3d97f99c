"""The documents say what is so: generated pages, Python blocks, commands, screens and examples.

Every Python block of README.md and docs/ runs as it stands, or the line above it says why it does not. The blocks of one
file run in order, in one namespace. An HTML comment right above a block, which readers of the page do not see, may say one
of two things:

    <!-- given:
    what the reader has by then: a model, a batch
    -->

    <!-- not run: needs a GPU -->

Above a block of another language, ``<!-- file: NAME -->`` writes it to a file that the Python blocks read.
"""

import ast
import contextlib
import functools
import importlib.util
import io
import json
import re
import runpy
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from nemo_like.commands import COMMANDS
from tests.tools.followed import follow, pages, steps
from tests.tools.screens import DOCS, Screen, screens, without_times

ROOT = Path(__file__).resolve().parent.parent


def _api_docs() -> ModuleType:
    spec = importlib.util.spec_from_file_location("api_docs", ROOT / ".ci" / "api_docs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_docstring_becomes_markdown() -> None:
    doc = """Scale ``x``.

    Args:
        x: any
            tensor.
        factor, bias: numbers.

    Raises:
        ValueError: never.

    >>> scale(1)
    2
    """
    assert _api_docs().markdown(doc) == (
        "Scale `x`.\n\n**Args**\n\n- `x`: any\n  tensor.\n- `factor, bias`: numbers.\n\n**Raises**\n\n"
        "- `ValueError`: never.\n\n```pycon\n>>> scale(1)\n2\n```\n"
    )


def test_signatures_are_the_same_on_every_machine() -> None:
    api_docs = _api_docs()

    def call(x: int, *, torch: str = api_docs.torch.__version__, what: object = len) -> dict[str, int]:
        return {}

    expected = (
        "call(x: int, *, torch: str = torch.__version__, what: object = <built-in function len>) -> dict[str, int]"
    )
    assert api_docs.signature("call", call) == f"```text\n{expected}\n```\n"


def test_every_file_that_a_document_names_exists() -> None:
    missing = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = page.read_text(encoding="utf-8")
        named = re.findall(r"`((?:nemo_like|tests|tests_distributed|docs|\.ci)/[\w./-]*)`", text)
        if page.parent.name not in ("evidence", "surveys"):  # which names files of other projects
            short = re.findall(r"`((?:\w+/)*\w+\.py)`", text)
            named += [f"nemo_like/{name}" for name in short if not (ROOT / name).exists()]
        named += [str(page.parent.relative_to(ROOT) / link) for link in re.findall(r"\]\((?!http|#)([\w./-]+)\)", text)]
        missing += [f"{page.name}: {name}" for name in named if not (ROOT / name).exists()]
    assert not missing


def test_no_table_is_cut_by_an_empty_line() -> None:
    """A row after an empty line, without a head of its own, is shown as text."""
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        cut = re.findall(r"\n\n(\|.*)\n(?!\|[-: |]+\|\n)", page.read_text(encoding="utf-8"))
        assert not cut, (page.name, cut)


def test_the_readme_names_every_command_and_every_extra_for_a_user() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert "pip install" in text
    assert not [
        name for name in extras if f"`{name}`" not in text and name not in ("hosts", "torchtitan", "test", "lint")
    ]
    assert not [name for name in COMMANDS if f"nemo-like {name}" not in text]


OF_OTHERS = {
    *("CUDACachingAllocator", "set_per_process_memory_fraction", "quantize_", "dynamo_use_regional_compilation"),
    *("fabric_model", "MixtralExperts", "get_optimizer_state_dict", "x_t", "y_t"),
}
"""Names in the pages that are torch's, of other libraries, or mathematics."""


@functools.cache
def _names_in_code() -> set[str]:
    """Return the names that code defines or uses, and its strings that are names; words of comments are none."""
    files = [
        path for tree in ("nemo_like", "tests", "tests_distributed", ".ci") for path in (ROOT / tree).rglob("*.py")
    ]
    names = {path.stem for path in files} | {"nemo_like", "tests_distributed"}
    for node in (node for path in files for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))):
        for field in ("name", "id", "attr", "arg", "asname", "module"):
            names.update(str(getattr(node, field, None) or "").split("."))
        if isinstance(node, ast.Constant) and re.fullmatch(r"[\w.*/-]+", str(node.value)):
            names.update(re.findall(r"\w+", str(node.value)))
    return names


PAGES = [path for path in (ROOT / "docs").rglob("*.md") if path.parent.name not in ("evidence", "surveys", "api")]
MADE = ("changelog.md", "models.md", "cli.md", "references.md")


@pytest.mark.parametrize("page", [path for path in PAGES if path.name not in MADE], ids=lambda path: path.stem)
def test_every_name_in_a_page_is_in_the_code(page: Path) -> None:
    """Names with an underscore or of classes: words such as ``none`` say nothing, variables in capitals may be others'."""
    quoted = re.findall(r"`([^`\n]+)`", page.read_text(encoding="utf-8"))
    words = {word for text in quoted for word in re.findall(r"[A-Za-z_]\w*", text)}
    named = {word for word in words if re.search(r"_|[a-z][A-Z]", word) and not re.fullmatch(r"[A-Z0-9_]+", word)}
    assert not named - _names_in_code() - OF_OTHERS


def _documented(doc: str) -> set[str]:
    """Return the arguments in the section ``Args:`` of a docstring."""
    section = re.search(r"^Args:\n((?: +.*\n?|\n)*)", f"{doc}\n", re.MULTILINE)
    lines = re.findall(r"^ {4}(\w+(?:, \w+)*):", section[1], re.MULTILINE) if section else []
    return {name for line in lines for name in line.split(", ")} - {"None"}


def _arguments(node: ast.AST) -> set[str] | None:
    """Return the names that a function or a class takes; None: it takes any."""
    if isinstance(node, ast.ClassDef):
        made = [one for one in node.body if isinstance(one, ast.FunctionDef) and one.name in ("__init__", "__call__")]
        found = [_arguments(one) for one in made]
        fields = {ast.unparse(one.target) for one in node.body if isinstance(one, ast.AnnAssign)}
        return None if None in found else fields.union(*found)  # type: ignore[arg-type]
    arguments = node.args  # type: ignore[attr-defined]
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg]
    return None if arguments.kwarg else {argument.arg for argument in every if argument is not None}


def test_every_documented_argument_exists() -> None:
    stale = []
    for path in (ROOT / "nemo_like").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef | ast.ClassDef):
                continue
            documented, taken = _documented(ast.get_docstring(node) or ""), _arguments(node)
            stale += [
                f"{path.stem}.{node.name}: {name}" for name in documented - (documented if taken is None else taken)
            ]
    assert not stale


FILES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"(?:^<!--(?P<comment>(?:(?!-->).)*)-->\n)?^```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"^<!-- file: (?P<name>\S+) -->\n```\w*\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    path: str
    line: int
    code: str
    given: str
    """Code that runs before, from the comment above."""
    reason: str | None
    """Why it is not run; None: it is."""


def blocks(text: str, path: str) -> list[Block]:
    found = []
    for match in BLOCK.finditer(text):
        line = text.count("\n", 0, match.start("code")) + 1
        comment = (match["comment"] or "").strip()
        kind, _, rest = comment.partition(":")
        if comment and kind not in ("given", "not run"):
            raise ValueError(
                f"{path}:{line}: the comment above a block starts with 'given:' or 'not run:', not {kind!r}"
            )
        if kind == "not run" and len(rest.split()) < 2:
            raise ValueError(f"{path}:{line}: 'not run:' without a reason")
        given, reason = (rest, None) if kind == "given" else ("", rest.strip() if comment else None)
        found.append(Block(path, line, match["code"], given, reason))
    if len(found) != len(re.findall(r"^\s*```python", text, re.MULTILINE)):
        raise ValueError(f"{path}: a Python block that is indented or never ends")
    return found


def run(block: Block, namespace: dict) -> None:
    exec(compile(block.given, f"{block.path}:{block.line} (given)", "exec"), namespace)
    # Empty lines in front, so that a traceback names the line of the document.
    exec(compile("\n" * (block.line - 1) + block.code, block.path, "exec"), namespace)


def _with_blocks() -> list[Path]:
    return [path for path in FILES if "```python" in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("path", _with_blocks(), ids=lambda path: str(path.relative_to(ROOT)))
def test_the_blocks_of_a_document_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module = ModuleType("document")
    monkeypatch.setitem(sys.modules, "document", module)  # dataclasses look their module up
    text = path.read_text(encoding="utf-8")
    for file in FILE.finditer(text):
        Path(file["name"]).write_text(file["text"], encoding="utf-8")
    for block in blocks(text, str(path.relative_to(ROOT))):
        if block.reason is None:
            run(block, vars(module))


def test_most_blocks_run() -> None:
    all_blocks = [block for path in _with_blocks() for block in blocks(path.read_text(encoding="utf-8"), str(path))]
    assert sum(block.reason is None for block in all_blocks) >= 9


def test_blocks_are_found_with_what_stands_above_them() -> None:
    text = (
        "a\n<!-- given:\nx = 1\n-->\n```python\ny = x + 1\n```\n\n<!-- not run: needs a GPU -->\n```python\nno()\n```\n"
    )
    first, second = blocks(text, "page.md")
    assert (first.line, first.reason, second.line, second.reason) == (6, None, 11, "needs a GPU")
    namespace: dict = {}
    run(first, namespace)
    assert namespace["y"] == 2


def test_a_failing_block_names_the_line_of_the_document() -> None:
    (block,) = blocks("one\n\n```python\nfine = 1\nraise KeyError(fine)\n```\n", "page.md")
    with pytest.raises(KeyError) as error:
        run(block, {})
    last = error.traceback[-1]
    assert (last.frame.code.raw.co_filename, last.lineno + 1) == ("page.md", 5)


@pytest.mark.parametrize(
    "text",
    [
        "<!-- not run: -->\n```python\n1\n```\n",  # no reason
        "<!-- not run: GPU -->\n```python\n1\n```\n",  # a word is no reason
        "<!-- skip: needs a GPU -->\n```python\n1\n```\n",  # unknown
        "- item\n  ```python\n  1\n  ```\n",  # indented: would be left out silently
        "```python\n1\n",  # never ends
    ],
)
def test_bad_comments_and_blocks_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"page\.md"):
        blocks(text, "page.md")


WITH_COMMANDS = [page for page in pages() if any(step.file is None and step.reason is None for step in steps(page))]


@pytest.mark.long
@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_the_commands_of_a_page_run_as_printed(page: str) -> None:
    for result in follow(page):
        assert result.code == 0, f"{result}\n{result.output[-3000:]}"


@pytest.mark.parametrize(
    "text",
    [
        "<!-- not run: -->\n```bash\nls\n```\n",  # no reason
        "<!-- not run: GPU -->\n```bash\nls\n```\n",  # a word is no reason
        "- item\n  ```bash\n  ls\n  ```\n",  # indented: would be left out silently
        "```bash\nls\n",  # never ends
    ],
)
def test_bad_commands_of_a_page_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"page\.md"):
        steps("page.md", text)


def test_a_page_is_read_in_its_order() -> None:
    text = (
        "<!-- file: a.py -->\n<!-- given:\nx = 1\n-->\n```python\nprint(x)\n```\n\n```bash\npython a.py\n```\n"
        "<!-- given: touch b -->\n```bash\nls b\n```\n\n```console\n$ ls\n```\n<!-- not run: needs a GPU -->\n"
        "```bash\nnvidia-smi\n```\n"
    )
    file, first, second, third = steps("page.md", text)
    assert (file.file, file.text) == ("a.py", "x = 1\n\nprint(x)\n") and first.text == "python a.py\n"
    assert (second.given, second.text, third.reason) == ("touch b", "ls b\n", "needs a GPU")


SCREENS = list(screens())


def _is_like_another(screen: Screen) -> bool:
    """Whether the default run has another screen like it: of a plan within bytes the widest, of others the narrow one."""
    if "--memory 64MiB" in screen.command:
        return screen.columns == 80
    return screen.columns == 120 and any(one.command == screen.command and one.columns == 80 for one in SCREENS)


def test_there_are_screens_of_every_report() -> None:
    seen = {(screen.command.split()[1], screen.columns) for screen in SCREENS}
    assert seen >= {(command, columns) for command in ("plan", "fit", "layers", "pretrain") for columns in (80, 120)}


@pytest.mark.parametrize(
    "screen",
    [pytest.param(one, marks=[pytest.mark.long] if one.is_long or _is_like_another(one) else []) for one in SCREENS],
    ids=str,
)
def test_a_page_prints_what_the_command_does(screen: Screen) -> None:
    assert screen.text and without_times(screen.now()) == without_times(screen.text)
    assert all(
        len(line) <= screen.columns for line in screen.text.splitlines() if not line.startswith(("Paste: ", "Train: "))
    )


def _keys(heading: str) -> set[str]:
    """The keys in the table of docs/reference/reports.md below `heading`."""
    table = (
        (DOCS / "reference" / "reports.md")
        .read_text(encoding="utf-8")
        .split(f"\n{heading}\n", 1)[1]
        .lstrip("\n")
        .split("\n\n")[0]
    )
    return {key for line in table.splitlines()[2:] for key in re.findall(r"`(\w+)`", line.split("|")[1])}


def test_the_page_has_the_keys_of_the_json(program: Any) -> None:
    plan = json.loads(program("plan --model llama-tiny --gpu cpu --seq-len 32 --ac 50% --no-what-if --json -").out)
    assert _keys("`nemo-like plan`:") == set(plan) and _keys("A row:") == set(plan["rows"][0])
    asked = "fit --model llama-tiny --gpus 1 --gpu cpu --seq-len 32 --micro-batch 1 --ac full --json -"
    found = json.loads(program(asked).out)
    assert _keys("`nemo-like fit`:") == set(found) and _keys("A candidate:") == set(found["candidates"][0])


EXAMPLES = Path(__file__).resolve().parent.parent / "docs" / "examples"


def _output(name: str, *arguments: str | Path) -> str:
    """What the example prints. In this process, since a new one takes 4 s to import torch."""
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return printed.getvalue()


def _losses(output: str) -> list[float]:
    return [float(found) for found in re.findall(r"^step \d+: loss ([0-9.]+)", output, re.MULTILINE)]


@pytest.mark.parametrize(
    ("name", "given", "steps", "says", "written"),
    [
        ("plain_pytorch.py", (), 5, (), None),
        ("two_ranks.py", (), 5, (), None),
        (
            "hugging_face.py", ("",), 5,
            (r"layers: model\.layers\.0, model\.layers\.1, model\.layers\.2, model\.layers\.3", "saved and loaded: equal"),
            "model.safetensors",
        ),
        ("training_loop.py", ("weights.pt",), 3, (r"^saved \d+ tensors$",), "weights.pt"),
    ],
)  # fmt: skip
def test_the_loss_of_an_example_falls_and_its_weights_are_written(
    name: str, given: tuple[str, ...], steps: int, says: tuple[str, ...], written: str | None, tmp_path: Path
) -> None:
    output = _output(name, *(tmp_path / each for each in given))
    losses = _losses(output)
    assert len(losses) == steps and losses[-1] < losses[0]
    assert all(re.search(line, output, re.MULTILINE) for line in says), output
    assert written is None or (tmp_path / written).is_file()


def test_a_plan_is_saved_loaded_and_trained_with(tmp_path: Path) -> None:
    output = _output("budget_plan.py", tmp_path / "plan.json")
    none, held = map(float, re.search(r"none would hold ([0-9.]+) MB, the plan holds ([0-9.]+) MB", output).groups())
    assert 0 < held <= none / 2
    losses = _losses(output)
    assert len(losses) == 3 and losses[-1] < losses[0]
    assert (tmp_path / "plan.json").is_file()


def test_offloading_moves_bytes_and_changes_no_gradient() -> None:
    output = _output("offload.py")
    together, alone = map(int, re.findall(r"bytes moved: (\d+)", output))
    assert 0 < together < alone  # checkpointing leaves less to move
    assert "gradients: bitwise equal" in output


def test_every_example_is_listed_short_and_run_here() -> None:
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    source = Path(__file__).read_text(encoding="utf-8")
    for path in sorted(EXAMPLES.glob("*.py")):
        assert f"[{path.name}]({path.name})" in page and f'"{path.name}"' in source
        assert len(path.read_text(encoding="utf-8").splitlines()) < 60
