"""Which cases a run has: the hook that both `conftest.py` files share.

- ``@pytest.mark.few(3)``: the first three cases of a parametrized test are in the default run, the others are ``long``.
- ``NEMO_LIKE_PART=2/10`` in the environment: of the long tests every tenth, from the second on (`.ci/nightly`).
"""

import os
from collections import Counter

import pytest
from hypothesis import settings

settings.register_profile("alike", derandomize=True, deadline=None)  # two runs draw the same; nightly draws others
if "NEMO_LIKE_PART" not in os.environ:
    settings.load_profile("alike")

_DONE = pytest.StashKey[bool]()


@pytest.hookimpl(tryfirst=True)  # before `-m` leaves out what is `long`
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.stash.setdefault(_DONE, False):
        return
    config.stash[_DONE] = True
    seen: Counter[str] = Counter()
    for item in items:
        mark = item.get_closest_marker("few")
        if mark is not None:
            test = item.nodeid.split("[")[0]
            if seen[test] >= mark.args[0]:
                item.add_marker("long")
            seen[test] += 1
    part, _, parts = os.environ.get("NEMO_LIKE_PART", "").partition("/")
    if part:
        chosen = [item for item in items if item.get_closest_marker("long")]
        items[:] = chosen[int(part) - 1 :: int(parts)]
