"""Comparisons of the first step take less memory than the step, whatever its length."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from nemo_like import ContextParallel, PipelineParallel, parallelize
from nemo_like._util.live_bytes import LiveBytes
from nemo_like.distributed.context import whole_loss
from nemo_like.distributed.pipeline.loss_mean import LossMean
from tests.checks import labelled
from tests.models.families import HEADED, causal
from tests_distributed.spawn import run_ranks

VOCAB, HIDDEN = 4096, 64
CASES: dict[str, tuple[dict[str, Any], int, int, bool]] = {  # options, rows, tokens of a row, whether in chunks
    "cp=2": ({"cp": 2}, 1, 2048, False),
    "cp=2 at 8k": ({"cp": 2}, 1, 8192, False),
    "ring": ({"cp": ContextParallel(2, "ring")}, 1, 2048, False),
    "cp=2, chunked": ({"cp": 2}, 1, 2048, True),
    "pp=2": ({"pp": PipelineParallel(2, microbatches=4)}, 4, 1024, False),
    "pp=2, chunked": ({"pp": PipelineParallel(2, microbatches=4)}, 4, 1024, True),
}


def bytes_of_check_and_step(rank: int, world_size: int, name: str) -> tuple[int, int]:
    """The most bytes alive in the check of the first step, and in the third step; of what each makes."""
    options, rows, length, chunked = CASES[name]
    shape = {"vocab_size": VOCAB, "max_position_embeddings": length, "hidden_size": HIDDEN, "num_hidden_layers": 4}
    batch = labelled(torch.randint(1, VOCAB, (rows, length), generator=torch.Generator().manual_seed(0)))
    sample = {"sample_input": {key: value[:1] for key, value in batch.items()}} if "pp" in options else {}
    loss = {"loss": "chunked"} if chunked else {}
    model = parallelize(causal("Llama", **HEADED | shape)().train(), ac="full", **options, **sample, **loss)
    checks: list[int] = []
    with pytest.MonkeyPatch.context() as patch, LiveBytes() as live:

        def watched(owner: Any, attribute: str) -> None:
            check: Callable[..., Any] = getattr(owner, attribute)

            def run(*args: Any, **kwargs: Any) -> Any:
                before, live.peak = live.live, live.live
                check(*args, **kwargs)
                checks.append(live.peak - before)

            patch.setattr(owner, attribute, run)

        watched(whole_loss, "verify_cut")
        watched(LossMean, "_compare")
        for _ in range(3):
            before, live.peak = live.live, live.live
            if "pp" in options:
                model.step(**batch)  # type: ignore[operator]
            else:
                model(**batch).loss.backward()
            step = live.peak - before
            model.zero_grad()
    assert len(checks) == 1
    return checks[0], step


@pytest.mark.parametrize("name", CASES)
def test_no_check_is_larger_than_the_step(name: str) -> None:
    # 8,192 tokens of attention on a CPU took 41 s beside another process.
    for check, step in run_ranks(2, bytes_of_check_and_step, name, timeout=240):
        assert check < step
