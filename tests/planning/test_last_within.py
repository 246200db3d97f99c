"""The last size within a limit is found in few steps, whatever the guesses are worth."""

from __future__ import annotations

import random
from bisect import bisect_right
from itertools import accumulate

import pytest

from nemo_like.planning.answers.within import last_within


@pytest.mark.parametrize("noise", [0, 5, 1000])
def test_what_bisection_finds_is_found_in_fewer_steps(noise):
    draw, asked, steps = random.Random(noise), [], 0
    for count in [0, 1, 2, 3, 700] * 20:
        about = list(accumulate(draw.randint(1, 50) for _ in range(count)))
        sizes = sorted(1000 + held + draw.randint(0, noise) for held in about)
        limit = draw.randint(900, 1100 + 26 * count)

        def size(at, sizes=sizes, asked=asked):
            asked.append(at)
            return sizes[at]

        assert last_within(limit, size, about) == bisect_right(sizes, limit) - 1
        assert len(set(asked)) == len(asked)  # nothing is asked twice
        steps, asked = steps + len(asked) * (count == 700), []
    assert noise > 5 or steps <= 20 * 5  # bisection takes ten
