"""Several recordings in one table: before and after, and the ranks of a job."""

import json
import pickle
import re
from pathlib import Path
from typing import Any

from tests.explaining.made import Recording, real

MIB = 1 << 20


def _written(path: Path, snapshot: dict[str, Any]) -> str:
    path.write_bytes(pickle.dumps(snapshot))
    return str(path)


def test_two_files_differ_by_parts_that_add_up_to_the_peaks(tmp_path: Path, program: Any) -> None:
    files = [_written(tmp_path / f"{name}.pickle", real(f"gpt-medium-512-{name}")) for name in ("inference", "train")]
    text = program(["explain", *files]).out
    rows = {row[0].strip(): row[1:] for row in re.findall(r"^([a-z' ]+?)  +([\d,]+)  +([\d,]+)  +([+-][\d,]+)$", text, re.M)}
    sizes = {part: [int(word.replace(",", "")) for word in words] for part, words in rows.items()}
    peak, reserved = sizes.pop("peak"), sizes.pop("most reserved")
    assert peak == [1861, 11853, 9992] and reserved == [1890, 12074, 10184]
    for column in range(3):  # each number is rounded to a MiB
        assert abs(sum(size[column] for size in sizes.values()) - peak[column]) <= len(sizes) / 2
    assert text.startswith("inference.pickle: peak in forward, div_Tensor")


def test_a_folder_of_ranks_names_those_that_differ(tmp_path: Path, program: Any) -> None:
    for rank in range(12):
        made = Recording()
        made.make(64 * MIB, "build")
        made.free(made.make((10 + 3 * (rank == 11)) * MIB, "forward"), phase="backward")
        _written(tmp_path / f"rank_{rank}.pickle", made.snapshot())
    (tmp_path / "rank_0.log").write_text("step 1")
    text = program(["explain", str(tmp_path), "--json", str(tmp_path / "out.json")]).out
    assert re.search(r"^peak +74  rank_0\.pickle +77  rank_11\.pickle$", text, re.M), text
    assert re.search(r"^weights +64  rank_0\.pickle +64  rank_0\.pickle$", text, re.M), text
    every = json.loads((tmp_path / "out.json").read_text())
    assert list(every) == [f"rank_{rank}.pickle" for rank in range(12)]  # in the order of their numbers
    assert sum(each["peak_bytes"] for each in every.values()) == (12 * 74 + 3) * MIB


def test_files_that_cannot_be_compared_get_a_line(tmp_path: Path, program: Any) -> None:
    one = _written(tmp_path / "one.pickle", real("state-only-2"))
    assert "'two.pickle' does not exist" in program(["explain", one, "two.pickle"], 2).err
    assert "has no snapshot (.pickle, .pkl, .gz)" in program(["explain", str(tmp_path / "..")], 2).err
    assert "--used" in program(["explain", one, one, "--used", "3GiB"], 2).err
    (tmp_path / "two.pickle").write_text("hello")
    assert "two.pickle was not read" in program(["explain", one, str(tmp_path / "two.pickle")], 2).err
    (tmp_path / "a").mkdir()
    same = _written(tmp_path / "a" / "one.pickle", real("state-only-2"))
    name = tmp_path.name
    assert f"{name}/one.pickle: peak in no recording\na/one.pickle:" in program(["explain", one, same]).out
