"""The suites of `nemo-like bench`, by name."""

from nemo_like.bench.loss import LOSS
from nemo_like.bench.options import SUITE_NAMES
from nemo_like.bench.side_by_side import MEMORY, OFFLOAD

SUITES = dict(zip(SUITE_NAMES, (MEMORY, OFFLOAD, LOSS), strict=True))
