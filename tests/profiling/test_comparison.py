"""The numbers of a comparison of modes against what is counted otherwise, its times never; published ones."""

import json
from collections import Counter

import pytest
import torch
from torch import nn

from nemo_like import cli
from nemo_like.commands.profile_command import MODES
from nemo_like.comparison import Comparison, compare, keywords_of
from nemo_like.models import resolve_model
from nemo_like.profiling.measured_step import compare_gradients, measure_bytes, measure_flops
from tests.tools.benchmarks.__main__ import make_parser
from tests.tools.benchmarks.public_numbers import (
    OOM,
    all_rows,
    compared,
    page,
    published_device,
    published_speed,
    summary,
)


def tiny(tokens: int, *modes: str, batch_size: int = 1) -> Comparison:
    source = resolve_model("llama-tiny")
    return compare(source.build(), source.sample_input(batch_size, tokens), modes, torch.device("cpu"), runs=1)


@pytest.fixture(scope="module")
def results() -> Comparison:
    return tiny(32, *MODES.split(","))


def row(results: Comparison, mode: str) -> dict:
    return next(row for row in results.rows if row["mode"] == mode)


def test_every_mode_gives_the_gradients_of_none_and_less_memory(results):
    assert [row["mode"] for row in results.rows] == ["none", *MODES.split(",")] and not results.notes
    for other in results.rows:
        assert other["gradients"] == "bitwise" or (
            "chunked" in other["mode"] and float(other["gradients"]) < 1e-5
        ), other
        if keywords_of(other["mode"]).get("ac") != "none" or "torch" in other["mode"]:
            assert other["peak_bytes"] < row(results, "none")["peak_bytes"]
            assert other["saved_bytes"] < row(results, "none")["saved_bytes"]
            assert other["recompute"] > 0 or other["mode"] == "50%"
    # Replaying a whole layer costs its forward less the last matmul of each, whichever implementation does it.
    assert row(results, "full")["recompute"] == row(results, "torch-full")["recompute"] < 1
    assert row(results, "selective")["recompute"] < row(results, "full")["recompute"]
    assert row(results, "none")["ratio"] == 1 and row(results, "none")["recompute"] == 0


def test_what_is_moved_to_host_memory_is_what_the_device_lacks() -> None:
    names = ("full", "selective", "full+offload=boundary", "selective+offload=saved", "none+offload=all")
    rows = {row["mode"]: row for row in tiny(256, *names, batch_size=8).rows}
    # Three of four layers, one input of 8 x 256 x 128 float32 each.
    assert rows["full+offload=boundary"]["moved_bytes"] == 3 * 8 * 256 * 128 * 4
    assert "moved_bytes" not in rows["none"]
    for offloaded, plain in zip(names[2:], ("full", "selective", "none"), strict=True):
        less = rows[plain]["saved_bytes"] - rows[offloaded]["saved_bytes"]
        assert less == pytest.approx(rows[offloaded]["moved_bytes"], rel=0.02)


def test_results_read_as_table_and_json(results):
    assert "selective" in results.text()
    assert max(map(len, results.text(width=80).splitlines())) <= 80 < max(map(len, results.text().splitlines()))
    values = json.loads(results.to_json())
    assert values["about"]["runs"] == 1 and len(values["rows"]) == len(results.rows)


def test_bytes_and_flops_are_exact_for_a_linear_layer():
    model = nn.Sequential(nn.Linear(64, 128, bias=False), nn.ReLU())
    sample = torch.randn(32, 64)
    held, peak = measure_bytes(model, sample, torch.device("cpu"))
    # The output, saved for the backward of relu, and the loss.
    assert held == pytest.approx(32 * 128 * 4, abs=64)
    # ... and in backward the output's gradients and the weight's.
    assert 2 * 32 * 128 * 4 <= peak <= 6 * 32 * 128 * 4
    assert measure_flops(model, sample) == (2 * 32 * 64 * 128, 2 * 2 * 32 * 64 * 128)


def test_gradients_are_compared_by_name_and_value():
    one = {"a": torch.tensor([1.0, 2.0]), "b": torch.zeros(2)}
    assert compare_gradients(one, {name: gradient.clone() for name, gradient in one.items()}) == "bitwise"
    assert compare_gradients(one, one | {"a": torch.tensor([1.0, 2.5])}) == "2.5e-01"
    assert compare_gradients(one, {"a": one["a"]}) == "1 missing (b)"


def test_a_mode_that_cannot_run_is_a_note_and_no_row(tmp_path, monkeypatch):
    (tmp_path / "odd_model.py").write_text(
        "from torch import nn\n"
        "class Block(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)\n"
        "    def forward(self, x):\n"
        "        return x + self.linear(self.norm(x))\n"
        "def make():\n"
        "    return nn.Sequential(Block(), Block())\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    model = resolve_model("odd_model:make").build()
    results = compare(model, torch.randn(4, 8), ["none+loss=chunked", "full"], torch.device("cpu"), runs=1)
    assert results.notes[0].startswith("none+loss=chunked: not run")  # no head, and no labels
    assert [row["mode"] for row in results.rows] == ["none", "full"]
    assert row(results, "full")["gradients"] == "bitwise"


def test_the_commands_run(program, tmp_path):
    path = tmp_path / "out.json"
    sizes = ["--batch-size", "1", "--seq-len", "16", "--device", "cpu"]
    command = ["profile", "--model", "llama-tiny", *sizes, "--runs", "1", "--modes", "full", "--json", str(path)]
    assert "full" in program(command).out
    assert [row["mode"] for row in json.loads(path.read_text())["rows"]] == ["none", "full"]
    printed = program(["profile", "--model", "llama-tiny", *sizes, "--runs", "1", "--budget", "1MB"]).out
    assert "model.layers.3" in printed and "within 1MB: recompute" in printed
    assert (
        json.loads(program(["profile", "--model", "llama-tiny", *sizes, "--json", "-"]).out)["model"]
        == "LlamaForCausalLM"
    )
    assert cli.main(["profile", "--model", "llama-tiny", "--budget", "1 byte"]) == 2
    assert cli.main(["profile", "--model", "llama-tiny", "--input-shape", "a,b", "--modes"]) == 2


def test_the_device_is_that_of_the_page():
    device = published_device()
    assert device.memory_bytes == 96_000_000_000 and device.bandwidth == pytest.approx(2.4e12 * 0.84)


ROWS = {row.id: row for row in all_rows()}


def test_every_row_of_every_file_is_read() -> None:
    assert Counter(name[0] for name in ROWS) == {"A": 18, "B": 2, "C": 31, "N": 24, "U": 12, "V": 14}
    assert sum(row.memory_kind == OOM for row in ROWS.values()) == 6
    assert all(row.dp_replicate * row.dp_shard * row.tp * row.cp * row.pp == row.gpus for row in ROWS.values())


def test_a_row_with_flops_is_turned_into_tokens() -> None:
    # 400 TFLOP/s over 6 x 405.85e9 + 6 x 126 x 16,384 x 8,192 FLOPs for a token.
    assert published_speed(ROWS["C24"]) == pytest.approx(400e12 / (6 * 405.853e9 + 6 * 126 * 16_384 * 8192), rel=1e-3)


def test_a_compiled_step_and_one_that_ran_out_of_memory() -> None:
    lines = [compared(ROWS[name]) for name in ("A2", "N5")]
    # torchtitan's embedding was in one unit with norm and head then, and stayed gathered: 1 GiB more.
    assert abs(lines[0]["memory_off"]) < 0.06 and abs(lines[0]["speed_off"]) < 0.05
    assert lines[1]["verdict"] == "too large"
    assert "Out of memory: 1 of 1 said." in summary(lines) and "| A2 |" in page(lines)


def test_a_row_that_is_refused_is_in_the_table() -> None:
    def refuse(row: object) -> None:
        raise ValueError("no such step")

    line = compared(ROWS["A2"], refuse)  # type: ignore[arg-type]
    assert line["refused"] == "ValueError: no such step" and line["published_gib"] == 77.0


def test_the_measuring_program_reads_its_arguments() -> None:
    given = make_parser().parse_args(["public", "--json", "numbers.json"])
    assert (given.suite, given.json, given.jobs) == ("public", "numbers.json", 100)
