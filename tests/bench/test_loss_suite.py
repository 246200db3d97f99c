"""The loss suite's counted numbers: one chunk of logits, and no error beyond that of whole logits."""

import torch

from nemo_like.bench.loss import CHUNK, OURS, WHOLE, run_loss


def test_ours_holds_one_chunk_and_is_as_exact_as_whole_logits():
    rows = {row["variant"]: row for row in run_loss(2 * CHUNK, 2000, torch.device("cpu"), torch.float32, 1, 0)}
    assert rows[OURS]["chunks"] <= 1.1 < rows[WHOLE]["chunks"]
    for key in ("loss_error", "gradient_error"):
        assert rows[OURS][key] <= 2 * rows[WHOLE][key] + 1e-7
        assert all(row[key] < 1e-5 for row in rows.values())
    torchs = rows.get("x torch: linear_cross_entropy")  # not in every torch
    assert torchs is None or rows[OURS]["chunks"] <= torchs["chunks"]
