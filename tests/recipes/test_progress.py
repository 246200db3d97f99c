"""What a run shows, and what it counts as memory."""

from __future__ import annotations

import io
import re
import sys

import pytest
import torch

from nemo_like.recipes.progress import Progress, memory_peak, memory_used

CPU = torch.device("cpu")


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_without_a_terminal_it_prints_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.delenv("COLUMNS", raising=False)
    progress = Progress(200, CPU)
    progress.say("hello")
    progress.step(10, 2.5, 3e-4, 1234.4)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "hello"
    assert lines[1].startswith("step  10/200  loss 2.5000  lr 3.00e-04  1,234 tokens/s  memory ")
    assert "peak" in lines[1] and len(lines) == 2


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_what_matters_most_fits_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch, columns: int):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", terminal := _Terminal())
    progress = Progress(2000, CPU)
    progress.step(10, 12.5, 3e-4, 123456.4, 0.4)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue()).replace("\r", "\n")
    line = next(line.rstrip() for line in text.splitlines() if "loss" in line)
    assert len(line) <= columns and "…" not in line
    assert re.match(r"(step )? +10/2000 .*loss 12.5000 .*123,456 tokens/s .*peak \d+\.\d\d GiB", line), line
    assert ("MFU 40.0%" in line) is (columns == 120), line


def test_only_rank_zero_speaks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("RANK", "1")
    progress = Progress(200, CPU)
    progress.say("hello")
    progress.step(10, 2.5, 3e-4, 1234.4)
    assert capsys.readouterr().out == ""


def test_memory_counts_resident_bytes_of_this_process():
    before, peak = memory_used(CPU), memory_peak(CPU)
    assert 2**24 < before <= peak + 2**20  # an interpreter with torch; the two counters are read a moment apart
    size = 2**28
    held = torch.ones(size, dtype=torch.uint8)
    # Pages of other objects come and go meanwhile, by far less than this tolerance of a sixteenth.
    assert abs(memory_used(CPU) - before - size) < size // 16
    assert memory_peak(CPU) >= before + size - size // 16
    del held
    assert memory_used(CPU) < before + size // 16 <= memory_peak(CPU)


def test_a_line_has_what_the_caching_allocator_reserved(monkeypatch, capsys):
    monkeypatch.delenv("COLUMNS", raising=False)
    for name, size in (("memory_allocated", 1), ("max_memory_allocated", 2), ("max_memory_reserved", 3)):
        monkeypatch.setattr(torch.cuda, name, lambda device, size=size: size << 30)
    Progress(10, torch.device("cuda")).step(1, 2.0, 1e-3, 1000.0)
    assert "memory 1.00 GiB  peak 2.00 GiB  reserved 3.00 GiB" in capsys.readouterr().out
    Progress(10, torch.device("cpu")).step(1, 2.0, 1e-3, 1000.0)
    assert "reserved" not in capsys.readouterr().out
