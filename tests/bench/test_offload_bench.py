"""The benchmark suite ``offload`` runs, and its bytes agree with what is known of the modes."""

from __future__ import annotations

import json

import pytest

from nemo_like.bench import SUITES, BenchOptions

run = SUITES["offload"].measure


def test_bytes_of_the_modes() -> None:
    pytest.importorskip("transformers", reason="the presets need the extra 'hf'")
    table = run(BenchOptions(model="llama-tiny", batch_size=1, seq_len=256, repeats=1, warmup=0, device="cpu"))
    rows = {row["mode"]: row for row in json.loads(table.to_json())["rows"]}
    assert next(iter(rows)) == "none" and "x torch: save_on_cpu" in rows
    assert all(row["gradients"] == "bitwise" for row in rows.values())
    # Three of four layers, one input of 256 x 128 float32 each.
    assert rows["full + boundary"]["moved_mb"] == pytest.approx(3 * 256 * 128 * 4 / 1e6)
    assert rows["none"]["moved_mb"] == 0
    assert rows["full + boundary"]["moved_mb"] < rows["selective + saved"]["moved_mb"] < rows["all"]["moved_mb"]
    for offloaded, plain in (("full + boundary", "full"), ("selective + saved", "selective"), ("all", "none")):
        less = rows[plain]["held_mb"] - rows[offloaded]["held_mb"]
        assert less == pytest.approx(rows[offloaded]["moved_mb"], rel=0.02)  # what is moved is what the device lacks
    # Each storage once, and no weights: far less than each saved tensor by itself.
    assert rows["all"]["moved_mb"] < 0.6 * rows["x torch: save_on_cpu"]["moved_mb"]
    assert "save_on_cpu" in table.table()


def test_unknown_modes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"no mode 'al' here.* Did you mean 'all'"):
        run(BenchOptions(modes=("al",), device="cpu"))
    with pytest.raises(ValueError, match="strategy 'single'"):
        run(BenchOptions(strategy="fsdp2"))
