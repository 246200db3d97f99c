"""A JSON file is the old one or the whole new one."""

from __future__ import annotations

import json

import pytest

from nemo_like._util.json_file import write_json


def test_what_cannot_be_written_leaves_the_old_file_and_nothing_beside_it(tmp_path):
    path = tmp_path / "found.json"
    write_json(path, {"rates": [1, 2.5]})
    with pytest.raises(TypeError):
        write_json(path, {"rates": object()})
    assert json.loads(path.read_text()) == {"rates": [1, 2.5]} and path.read_text().endswith("}\n")
    assert [each.name for each in tmp_path.iterdir()] == ["found.json"]


def test_nothing_is_left_where_the_place_cannot_be_taken(tmp_path):
    (tmp_path / "found.json").mkdir()
    with pytest.raises(OSError):
        write_json(tmp_path / "found.json", {})
    assert [each.name for each in tmp_path.iterdir()] == ["found.json"]
