"""Claims of the pages that no screen has, each run on a tiny model or compared with the file that it comes from."""

import ast
import dataclasses
import io
import json
import re
import shlex
import tomllib
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch

from nemo_like import Job, parallelize, predict
from nemo_like._util.table import percent
from nemo_like.cli import main
from nemo_like.models import text_batch
from nemo_like.planning.accuracy import accuracy_words
from nemo_like.planning.devices import resolve_device
from nemo_like.planning.planner import plan_for
from nemo_like.planning.roofline import RankGroup, exchange_seconds, gather_seconds
from tests.models import decoders
from tests.tools import combines, mutations
from tests.tools.screens import without_times

ROOT = Path(__file__).parents[1]
EVIDENCE = ROOT / "docs" / "evidence"


def _text(page: str) -> str:
    return " ".join((ROOT / page).read_text(encoding="utf-8").split())


# Set-up


def test_both_commands_of_set_up_are_in_readme() -> None:
    """The judge of the tests' command is the page for contributors, of the job's the page on installing."""
    run = r"^bash \.ci/with-venv test pytest -n 2 .+$|^bash \.ci/with-venv train torchrun .+$"
    readme, install, contributing = (
        set(re.findall(run, (ROOT / page).read_text(encoding="utf-8"), re.M))
        for page in ("README.md", "docs/start/install.md", "docs/CONTRIBUTING.md")
    )
    assert len(readme) == 2 and readme == install and contributing <= readme and len(contributing) == 1


def test_every_extra_of_a_page_is_in_pyproject() -> None:
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"])
    named = dict[str, str]()
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        if path.name == "changelog.md":  # which names extras that are gone
            continue
        text = path.read_text(encoding="utf-8")
        tables = re.findall(r"^\| extra \|.*\n\|[-| ]+\n((?:\|.*\n)+)", text, re.M)
        cells = [row.split("|")[1] for table in tables for row in table.splitlines()]
        words = [word for cell in cells for word in re.findall(r"`([\w-]+)`", cell)]
        words += re.findall(r"\bextra `([\w-]+)`", text)
        words += [word for names in re.findall(r"'\.\[([a-z0-9,-]+)\]'", text) for word in names.split(",")]
        named |= dict.fromkeys(words, path.name)
    assert {"hf", "train", "qlora", "wandb"} <= named.keys()
    assert {word: page for word, page in named.items() if word not in extras} == {}


# What combines with what


def test_each_fault_of_the_mutation_tool_has_one_place() -> None:
    """Here, since no fault is judged by this file: with a fault in, its text has no place."""
    for fault in mutations.FAULTS:
        assert mutations._changed(fault, mutations.ROOT)


def test_the_page_of_combinations_has_every_pair_both_ways() -> None:
    marks = combines.written()
    assert set(marks) == {pair for one, other in combines.pairs() for pair in ((one, other), (other, one))}
    assert all(mark == marks[other, one] for (one, other), mark in marks.items())
    assert combines.TAKEN not in marks.values() and combines.FAILS not in marks.values()


OTHERS = [
    "`single`",
    pytest.param("`compile`", marks=pytest.mark.long),
    "`loss` chunked",
    "`bf16`",
    "`fp8`",
]  # which takes 10 s


@pytest.mark.parametrize("other", OTHERS)
def test_offloading_what_is_saved_goes_with(other: str) -> None:
    one, other = sorted(("`offload` saved", other), key=list(combines.OPTIONS).index)
    assert combines.cell(one, other) == (combines.written()[one, other], "") == (combines.EQUAL, "")


def test_what_a_job_refuses_is_what_the_page_says() -> None:
    """Of every pair: what `Job.of` refuses is ``no``."""
    for pair in combines.pairs():
        try:
            combines.asked(*pair)
        except (ValueError, NotImplementedError):
            assert combines.written()[pair] == combines.REFUSED, pair


# Float8


@pytest.mark.parametrize("axis", ["tp", "ep"])
@pytest.mark.parametrize("recipe", ["fp8", "fp8-rowwise", "fp8-gather"])
def test_float8_with_split_weights_and_experts(axis: str, recipe: str) -> None:
    fields = {axis: 2, "precision": recipe, "world_size": 2, "gpu": "h100-80gb", "ac": "full"}
    if (axis, recipe) == ("tp", "fp8-gather"):
        with pytest.raises(ValueError, match=r"'fp8-gather' with tp=2"):
            Job.of(**fields)
    else:
        assert Job.of(**fields).precision.matmuls == recipe
    assert '`precision="fp8-gather"` is refused with `tp`; the other' in _text("docs/changelog.md")
    assert '`"fp8-gather"` with `tp` is refused' in _text("docs/reference/how-it-works/planned-inputs.md")


# Seconds


def test_links_inside_a_host_count() -> None:
    device = resolve_device("h100-80gb")
    slow = dataclasses.replace(device, nvlink=device.nvlink / 100)
    inside, between = RankGroup(8, 8), RankGroup(16, 1)
    for seconds in (gather_seconds, exchange_seconds):
        assert seconds(10**9, inside, slow) > 50 * seconds(10**9, inside, device)
        assert seconds(10**9, between, device) > 5 * seconds(10**9, inside, device)


def test_the_seconds_of_a_plan_have_what_communication_adds() -> None:
    device = resolve_device("h100-80gb")
    slow = dataclasses.replace(device, nvlink=device.nvlink / 1e7)
    usual, slower = (
        plan_for(decoders.build("llama").to("meta"), Job.of(ac="50%", world_size=2, gpu=gpu), sample_input=text_batch(2, 16))
        for gpu in (device, slow)
    )
    assert slower.step_seconds > 1.5 * usual.step_seconds


# The evidence


def test_the_accuracy_is_that_of_the_public_table() -> None:
    page = (EVIDENCE / "public-numbers.md").read_text(encoding="utf-8")
    known = json.loads((ROOT / "nemo_like" / "planning" / "accuracy.json").read_text(encoding="utf-8"))
    stated = {"Memory": known["peaks"], "Speed, calibrated": known["calibrated"]}
    stated |= {f"Speed of {kind}": errors for kind, errors in known["kinds"].items()}
    for line, errors in stated.items():
        rows, median = re.search(rf"^- {line}: (\d+) rows, .*median ([\d.]+)%", page, re.MULTILINE).groups()  # type: ignore[union-attr]
        assert (errors["rows"], errors["median"]) == (int(rows), round(float(median) / 100, 6))
    words = accuracy_words().removeprefix("Off by: ").removesuffix(".")
    assert words.replace("published peaks", "published peaks are") in _text("README.md").replace("`", "")


def test_the_summary_has_the_numbers_of_the_pages() -> None:
    """Every count of the summary that a page begins with or has in a row ``all``."""
    summary = _text("docs/evidence/README.md")
    cells = re.search(
        r"^\| all \| (\d+) \| \d+ \| \d+ \| (\d+) \|", (EVIDENCE / "dry-run.md").read_text(), re.MULTILINE
    )
    assert cells is not None
    assert f"{cells[2]} of {cells[1]} cells within 0.5 %" in summary
    public = (EVIDENCE / "public-numbers.md").read_text(encoding="utf-8")
    memory = re.search(r"^- Memory: (\d+) rows, (\d+) within 5%.* median ([\d.]+)%", public, re.MULTILINE)
    speed = re.search(r"^- Speed: (\d+) rows, .*, (\d+) within 15%; median ([\d.]+)%", public, re.MULTILINE)
    assert memory is not None and speed is not None
    assert f"memory of {memory[1]} public steps" in summary
    assert f"median {memory[3]} % off, within 5 % on {memory[2]}" in summary
    assert f"per second of {speed[1]} public steps | median {speed[3]} % off, within 15 % on {speed[2]}" in summary


def test_evidence_is_short_begins_with_a_result_and_names_no_commit() -> None:
    pages = {path.name: path.read_text(encoding="utf-8") for path in EVIDENCE.glob("*.md")}
    assert sum(len(text.splitlines()) for text in pages.values()) <= 900
    for name, text in pages.items():
        first = text.split("\n\n## How near\n" if name == "public-numbers.md" else "\n\n")[1]
        assert re.search(r"\d", first.strip().split("\n\n")[0]) or name == "README.md", name
        assert not re.search(r"\bcommit\b|`[0-9a-f]{7,8}`|\bat [0-9a-f]{7}\b", text), name


def test_bitwise_is_claimed_where_kernels_are_deterministic_or_for_the_cpu() -> None:
    """Judge: PyTorch's notes on reproducibility; attention's backward on a GPU is not deterministic by default."""
    pages = ["README.md", "docs/faq.md", "docs/CONTRIBUTING.md", *(ROOT / "docs").glob("*/*.md")]
    for page in (ROOT / page for page in pages):
        if page.parent != EVIDENCE:  # whose pages say that all was run on CPUs
            for part in page.read_text(encoding="utf-8").split("\n\n"):
                if re.search(r"[Gg]radients.*bitwise|bitwise.*gradients", part, re.S):
                    assert re.search(r"deterministic|CPU|gloo", part), (page, part)
    lines = ("use_deterministic_algorithms(True)", "CUBLAS_WORKSPACE_CONFIG", "warn_only=True attention stays")
    assert all(line in _text("docs/faq.md") for line in lines)


# How it is built


def test_execution_imports_of_planning_what_the_design_says() -> None:
    found = set()
    for name in ("parallelizer", "pipelined", "resolve"):
        for node in ast.walk(ast.parse((ROOT / "nemo_like" / f"{name}.py").read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nemo_like.planning"):
                found.update(alias.name for alias in node.names)
    assert found == {"plan_for", "balance_for_memory"}
    line = (
        _text("docs/reference/how-it-works/design.md")
        .split("imports prediction (`planning`) for ")[1]
        .split(" alone")[0]
    )
    assert all(f"`{name}`" in line for name in found)


def test_a_flag_is_the_edits_that_the_page_has() -> None:
    package = ROOT / "nemo_like"
    names = [path for path in package.rglob("*.py") if re.search(r"\basync_tp\b", path.read_text(encoding="utf-8"))]
    inside = sorted(str(path.relative_to(package)) for path in names)
    steps = _text("docs/reference/how-it-works/extending.md").split("## A flag")[1]
    assert inside[0] == "options/parallel.py"
    assert len(inside) == 3 and all(name.startswith("settings/") for name in inside[1:])
    assert "`--async-tp` is in three files" in steps


@pytest.mark.parametrize(("option", "most"), [("reshard_after_forward", 8), ("cpu_offload", 10)])
def test_an_option_is_named_in_few_files(option: str, most: int) -> None:
    files = [path for path in (ROOT / "nemo_like").rglob("*.py") if re.search(rf"\b{option}\b", path.read_text())]
    assert len(files) <= most, files


# README


def test_an_optimizer_built_before_trains_on_one_process() -> None:
    """On several ranks it is refused: tests_distributed/fsdp has that half."""
    model = decoders.build("plain")
    optimizer = torch.optim.AdamW(model.parameters())
    before = [parameter.detach().clone() for parameter in model.parameters()]
    model = parallelize(model, strategy="fsdp2", ac="selective")
    model(decoders.batch()).sum().backward()
    optimizer.step()
    assert not any(map(torch.equal, before, model.parameters()))


def _first_screen() -> tuple[str, str]:
    block = re.search(
        r"^```console\n\$ (nemo-like plan [^\n]*)\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S
    )
    assert block is not None
    return block[1], block[2]


def test_the_first_screen_is_about_an_8b_on_8_gpus() -> None:
    command, lines = _first_screen()
    assert command == "nemo-like plan --model llama3-8b --gpus 8 --seq-len 8192"
    assert lines.startswith("Fits with ac=") and len(lines.splitlines()) == 6


@pytest.mark.long  # 10 s
def test_the_first_screen_and_its_picture_are_what_the_command_reports(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    command, lines = _first_screen()
    monkeypatch.setenv("COLUMNS", "80")
    out, report = io.StringIO(), tmp_path / "plan.json"
    with redirect_stdout(out):
        main([*shlex.split(command)[1:], "--json", str(report)])
    printed, (first, last) = without_times(out.getvalue()), without_times(lines).split("...\n")
    assert printed.startswith(first) and last in printed
    rows = {row["ac"]: row for row in json.loads(report.read_text())["rows"]}
    picture = re.findall(r"^(\S+) +(\d+\.\d)  (s+a+l+)  +(.*)$", (ROOT / "README.md").read_text(), re.M)
    assert [each[0] for each in picture] == ["none", "64.1GiB", "selective", "full"]
    for name, peak, letters, cost in picture:
        parts = rows[name]["peak_parts"]
        saved, outside = parts["saved activations"], parts["outside of layers"] + parts["kept output"]
        sizes = rows[name]["peak_bytes"] - saved - outside, saved, outside
        assert letters == "".join(letter * round(size / 2**30) for letter, size in zip("sal", sizes))
        assert peak == f"{rows[name]['peak_bytes'] / 2**30:.1f}"
        assert cost == (f"{percent(rows[name]['slower'])} slower" if rows[name]["fits"] else "does not fit")


@pytest.mark.long  # 10 s
def test_prices_of_lists_are_those_that_a_plan_has() -> None:
    """The README's and the how-to page's, by one report; the planner's judges are dry runs and brute forces."""
    pages = [(ROOT / "README.md").read_text(), (ROOT / "docs" / "how-to" / "names.md").read_text()]
    readme = {ac: (ms, gib) for ac, ms, gib in re.findall(r"^\| `([{\"].*?)` \| ([\d,]+) \| ([\d.]+) \|$", pages[0], re.M)}
    page = re.findall(r"^\| `([{\"].*?)` \| ([\d.]+) \| [\d.]+ \| ([\d,]+) \|$", pages[1], re.M)
    written = {ac: (ms, gib) for ac, gib, ms in page}
    assert len(readme) == 4 and len(written) == 8 and readme.items() <= written.items()
    asked = [ac for ac in written if ac.startswith("{")]
    report = predict("llama3-8b", gpu="h100-80gb", gpus=8, seq_len=8192, loss="chunked", rows=asked)
    rows = {row.ac: (f"{1e3 * row.seconds:,.0f}", f"{row.need.bytes / 2**30:.1f}") for row in report.rows}
    assert {ac: rows[ac.strip('"')] for ac in written} == written
    # The price of core attention that the page quotes from the log: the difference of two whole steps, a layer.
    with_it, full = (next(row for row in report.rows if row.ac == ac) for ac in ('{"save": ["attention"]}', "full"))
    size, seconds = with_it.plan.held_bytes - full.plan.held_bytes, full.seconds - with_it.seconds
    assert f"costs {size / 32 / 2**20:.2f}MiB a layer and buys {1e3 * seconds / 32:.2g} ms" in pages[1].replace("\n", " ")
    assert size == 32 * (8192 * (4096 * 2 + 32 * 4) + 16)  # 16 bits, sums in float32, the state of a generator


def test_the_readme_has_rows_of_the_page_of_modes() -> None:
    def rows(text: str) -> list[list[str]]:
        table = text.split("| mode | step / none |", 1)[1].split("\n\n")[0]
        return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]

    page = (EVIDENCE / "memory.md").read_text(encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "peak MiB" in readme and "peak MB" not in readme
    known = {row[0]: row for row in rows(page)}
    assert all(row == known[row[0]] for row in rows(readme))
    command = "nemo-like profile --model llama-small --runs 5 --modes"
    assert command in page and command in readme
    saved = {name: row[-2] for name, row in known.items()}
    theirs = next(value for name, value in saved.items() if "torch-selective" in name)
    assert f"{saved['`selective`']} and {theirs} MiB" in _text("docs/evidence/README.md")
