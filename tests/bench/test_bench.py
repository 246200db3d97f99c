"""The benchmark's numbers against what is counted otherwise, its times never; published ones within what pages say."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch
from torch import nn

from nemo_like import cli
from nemo_like.bench import BenchOptions, Comparison, compare_modes
from nemo_like.bench.measured_step import compare_gradients, measure_bytes, measure_flops, summarize
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

pytest.importorskip("transformers")
pytest.importorskip("torchao.float8")

OPTIONS = BenchOptions(batch_size=1, seq_len=32, repeats=1, warmup=0, device="cpu", budgets=())


@pytest.fixture(scope="module")
def results() -> Comparison:
    return compare_modes(OPTIONS)


def row(results: Comparison, mode: str) -> dict:
    return next(row for row in results.rows if row["mode"] == mode)


def test_every_mode_gives_the_gradients_of_none_and_less_memory(results):
    names = [row["mode"] for row in results.rows]
    assert names[:5] == ["none", "full", "selective", "submodule", "sequential"]
    assert {"x torch: checkpoint per layer", "x torch: selective, every 2nd matmul"} <= set(names)
    for other in results.rows:
        assert other["gradients"] == "bitwise" or (
            other["mode"] == "chunked loss" and float(other["gradients"]) < 1e-5
        ), other
        if other["mode"] not in ("none", "offload all", "chunked loss"):
            assert other["peak_mb"] < row(results, "none")["peak_mb"]
            assert other["held_mb"] < row(results, "none")["held_mb"]
            assert other["recompute"] > 0
    # Replaying a whole layer costs its forward less the last matmul of each, whichever implementation does it.
    assert row(results, "full")["recompute"] == row(results, "x torch: checkpoint per layer")["recompute"] < 1
    assert row(results, "selective")["recompute"] < row(results, "full")["recompute"]
    assert row(results, "none")["ratio"] == 1 and row(results, "none")["recompute"] == 0


def test_what_is_moved_to_host_memory_is_what_the_device_lacks() -> None:
    names = ("full", "selective", "full + offload boundary", "selective + offload saved", "offload all")
    options = BenchOptions(batch_size=1, seq_len=256, repeats=1, warmup=0, device="cpu", budgets=(), modes=names)
    rows = {row["mode"]: row for row in compare_modes(options).rows}
    # Three of four layers, one input of 256 x 128 float32 each.
    assert rows["full + offload boundary"]["moved_mb"] == pytest.approx(3 * 256 * 128 * 4 / 1e6)
    assert rows["none"]["moved_mb"] is None
    for offloaded, plain in zip(names[2:], ("full", "selective", "none"), strict=True):
        less = rows[plain]["held_mb"] - rows[offloaded]["held_mb"]
        assert less == pytest.approx(rows[offloaded]["moved_mb"], rel=0.02)


def test_results_read_as_table_and_json(results):
    assert "selective" in results.text()
    assert max(map(len, results.text(width=80).splitlines())) <= 80 < max(map(len, results.text().splitlines()))
    values = json.loads(results.to_json())
    assert values["about"]["step"] == "1 x 32 tokens" and len(values["rows"]) == len(results.rows)


def test_bytes_and_flops_are_exact_for_a_linear_layer():
    model = nn.Linear(64, 128, bias=False)
    sample = torch.randn(32, 64)
    held, peak = measure_bytes(model, sample, torch.device("cpu"))
    # The output, saved for the square's backward, and the scalar losses.
    assert held == pytest.approx(32 * 128 * 4, abs=64)
    # ... and in backward the output's gradient, the square's factor and the weight's gradient.
    assert 2 * 32 * 128 * 4 <= peak <= 6 * 32 * 128 * 4
    assert measure_flops(model, sample) == (2 * 32 * 64 * 128, 2 * 2 * 32 * 64 * 128)


def test_gradients_are_compared_by_name_and_value():
    one = {"a": torch.tensor([1.0, 2.0]), "b": torch.zeros(2)}
    assert compare_gradients(one, {name: gradient.clone() for name, gradient in one.items()}) == "bitwise"
    assert compare_gradients(one, one | {"a": torch.tensor([1.0, 2.5])}) == "2.5e-01"
    assert compare_gradients(one, {"a": one["a"]}) == "1 missing (b)"


def test_summaries_are_medians_of_turns():
    assert summarize([10.0, 30.0, 20.0], [10.0, 10.0, 10.0]) == {"step_ms": 20.0, "spread": 1.0, "ratio": 2.0}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"repeats": 0}, "repeats is 0"),
        ({"batch_size": -1}, "batch_size is -1"),
        ({"strategy": "fsdp"}, "strategy is 'fsdp'"),
    ],
)
def test_wrong_options_are_refused(fields, says):
    with pytest.raises(ValueError, match=says):
        BenchOptions(**fields)


def test_an_unknown_mode_is_an_error_naming_the_known_ones():
    with pytest.raises(ValueError, match="Did you mean 'selective'"):
        compare_modes(BenchOptions(modes=("selektive",), device="cpu"))


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
    options = BenchOptions(model="odd_model:make", input_shape=(4, 8), repeats=1, warmup=0, device="cpu", budgets=())
    results = compare_modes(options)
    assert [note for note in results.notes if note.startswith("chunked loss: not run")]  # no head, and no labels
    assert not any("chunked" in row["mode"] for row in results.rows)
    assert row(results, "full")["gradients"] == "bitwise"


def test_the_commands_run(capsys, tmp_path):
    path = tmp_path / "out.json"
    sizes = ["--batch-size", "1", "--seq-len", "16", "--device", "cpu"]
    command = ["bench", *sizes, "--repeats", "1", "--warmup", "0", "--modes", "full", "--json", str(path)]
    assert cli.main(command) == 0
    assert "full" in capsys.readouterr().out
    assert [row["mode"] for row in json.loads(path.read_text())["rows"]] == ["none", "full"]
    assert cli.main(["profile", "--model", "llama-tiny", *sizes, "--runs", "1", "--budget", "1MB"]) == 0
    printed = capsys.readouterr().out
    assert "model.layers.3" in printed and "within 1MB: recompute" in printed
    assert cli.main(["profile", "--model", "llama-tiny", *sizes, "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["model"] == "LlamaForCausalLM"
    assert cli.main(["profile", "--model", "llama-tiny", "--budget", "1 byte"]) == 2
    assert cli.main(["bench", "--input-shape", "a,b"]) == 2


def test_the_device_is_that_of_the_page():
    device = published_device()
    assert device.memory_bytes == 96_000_000_000 and device.bandwidth == pytest.approx(2.4e12 * 0.84)


ROWS = {row.id: row for row in all_rows()}


def test_every_row_of_every_file_is_read() -> None:
    assert Counter(name[0] for name in ROWS) == {"A": 18, "B": 2, "C": 31, "N": 24, "U": 12}
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
