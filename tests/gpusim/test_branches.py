"""The finder of branches that depend on the kind of device."""

from __future__ import annotations

import pytest

from tests.tools.branch_finder import Branch, find, package
from tests.tools.branch_reasons import REASONS
from tests.tools.branches import judge

SOURCE = """
def f(x, kind, items, module):
    if x.device.type == "cpu":
        return 1
    if x.type != "cpu" and items:
        x.a()
    else:
        x.b()
    if not (kind in ("cuda", "mps")):
        x.c()
    wide = None if x.is_cuda else x
    if torch.accelerator.is_available():
        pass
    many = [each for each in items if each.type == "cuda"]
    pinned = kind != "cpu"
    either = kind == "cpu" or items
    if hasattr(module, "max_memory_allocated"):
        x.d()
    if x.type != "meta" or kind == "layer":
        x.e()
    return torch.cuda.is_initialized()
"""


def test_finds_each_kind_of_branch():
    found = [(each.line, each.form, each.wanted, each.side) for each in find(SOURCE, "f.py")]
    assert found == [
        (3, "if", False, (5, 8)),
        (5, "if", True, (6, 6)),
        (9, "if", True, None),
        (11, "conditional", True, None),
        (12, "if", True, (13, 13)),
        (14, "comprehension", True, None),
        (15, "value", True, None),
        (16, "operand", False, None),
        (17, "if", True, (18, 18)),
        (21, "value", True, None),
    ]


@pytest.mark.parametrize(
    ("seen", "result"),
    [
        ([], "not reached"),
        ([(3,), (3, 7, True)], "CPU side only"),
        ([(3,), (3, 7, False)], "CPU side only"),  # raised in between
        ([(3,), (3, 7, True), (3, 7, False), (5,)], "ran"),
        ([(3,), (5,)], "ran"),  # the comparison could not be evaluated
    ],
)
def test_says_what_ran(seen: list[tuple[object, ...]], result: str):
    branch: Branch = find(SOURCE, "/f.py")[0]
    judge([branch], {("/f.py", *each) for each in seen})
    assert branch.result == result


def test_reasons_name_branches():
    assert set(REASONS) <= {(branch.file, branch.condition) for branch in package()}
