"""A method of context parallelism and a schedule that are put into their registries train as those that they are copies
of."""

from nemo_like import ContextParallel
from tests.registered import WORD, register
from tests_distributed.context.cut_models import batch, build, wrong_in_modes
from tests_distributed.pipeline.test_pipeline import _schedule
from tests_distributed.spawn import run_ranks


def _trained(rank: int, world_size: int) -> list[str]:
    register()
    _schedule(rank, world_size, WORD, "llama", "full")
    return wrong_in_modes(build("llama"), batch("llama"), ContextParallel(2, WORD), ("selective",))


# 5 s: two ranks train by both.
def test_toys_train_on_two_ranks() -> None:
    assert run_ranks(2, _trained) == [[], []]
