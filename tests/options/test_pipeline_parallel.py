"""`PipelineParallel`: defaults, and what makes no sense."""

from __future__ import annotations

from typing import Any

import pytest

from nemo_like.distributed.pipeline.schedules import stages_of
from nemo_like.options import SCHEDULES, PipelineParallel


def test_defaults() -> None:
    options = PipelineParallel.of(4)
    assert (options.size, options.schedule, options.microbatches, options.stages) == (4, "1f1b", 8, 4)
    assert PipelineParallel.of(options) is options
    assert [PipelineParallel(2, schedule=name).stages for name in SCHEDULES] == [2, 2, 4, 4, 4, 4]
    assert stages_of(PipelineParallel(2, schedule="ZBV"), 0) == [0, 3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": 0}, "pp is 0; it must be a whole number of ranks >= 1"),
        ({"size": True}, "pp is True"),
        ({"schedule": "1f1c"}, "schedule is '1f1c'; it must be one of .* Did you mean '1f1b'"),
        ({"schedule": None}, "schedule is None"),
        ({"microbatches": 0}, "microbatches is 0"),
        ({"microbatches": 1}, "fewer micro-batches than stages"),
        ({"stages_per_rank": 2}, "'1f1b' has 1 on each rank.*use 'interleaved_1f1b'"),
        ({"schedule": "zbv", "stages_per_rank": 3}, "'zbv' has 2 on each rank"),
        ({"schedule": "interleaved_1f1b", "microbatches": 5}, "goes 2 rounds of equal length: use 4 or 6"),
        ({"schedule": "dualpipev", "microbatches": 3}, "at least as many as there are stages: use 4"),
        ({"balance": "even"}, "balance is 'even'; it must be 'time', 'memory' or how many"),
        ({"balance": [2, 0]}, "balance is .2, 0."),
        ({"balance": [2, 2, 2]}, "balance has 3 numbers and there are 2 stages"),
    ],
)
def test_errors(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PipelineParallel(**{"size": 2} | arguments)
