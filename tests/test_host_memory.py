"""Memory of the host that each rank may count on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nemo_like._util.host_memory import host_bytes


@pytest.mark.parametrize(
    ("own", "files", "limit"),
    [
        ("0::/job/step\n", {"memory.max": "max", "job/memory.max": "5000000", "job/step/memory.max": "max"}, 5000000),
        ("0::/\n", {"memory.max": "3000000"}, 3000000),
        ("4:memory:/job\n2:cpu,cpuacct:/job\n", {"memory/job/memory.limit_in_bytes": "2000000"}, 2000000),
        ("0::/job\n", {"job/memory.max": "max"}, None),
        ("", {}, None),
    ],
)
def test_it_is_nine_tenths_of_what_host_or_control_group_has_by_ranks(
    tmp_path: Path, own: str, files: dict[str, str], limit: int | None
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    (tmp_path / "own").write_text(own)
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if limit is None else limit
    for ranks in (1, 4):
        assert host_bytes(ranks, tmp_path, tmp_path / "own") == whole * 9 // 10 // ranks
