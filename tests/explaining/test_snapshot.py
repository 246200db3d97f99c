"""Files of others: nothing in them runs, and each has one line that says what is wrong."""

import gzip
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nemo_like.explaining.explain import explain
from nemo_like.explaining.snapshot import timelines
from nemo_like.explaining.snapshot_file import SnapshotError, read_snapshot, write_stripped
from tests.checks import Calls
from tests.explaining.made import Recording, real


def _hostile(tmp_path: Path) -> list[bytes]:
    mark = str(tmp_path / "ran")
    run = Calls(os.system, f"touch {mark}")
    segment = {"address": 1, "total_size": 1, "blocks": [{"address": 1, "size": 1, "state": "active_allocated"}]}
    values: list[Any] = [
        run,
        {"segments": [run]},
        {"segments": [], "device_traces": [[run]]},
        {"segments": [segment | {"blocks": [run]}]},
        Calls(eval, f"open({mark!r}, 'w')"),
        Calls(getattr, 3, "real"),
        {"segments": Path(mark)},
        {"segments": {1: 2}},
        {"segments": [{"address": "1", "total_size": 2, "blocks": []}]},
        {"segments": [{"address": -1, "total_size": 2, "blocks": []}]},
        {"segments": [segment | {"blocks": 3}]},
        {"segments": [segment | {"blocks": [{"size": 1}]}]},
        {"segments": [], "device_traces": {}},
        {"segments": [], "device_traces": [[{"action": 3, "size": 1}]]},
        {"segments": [], "device_traces": [[{"action": "alloc", "size": None}]]},
        {"segments": [], "device_traces": [[{"action": "alloc", "size": 1, "frames": 7}]]},
        {"weights": 1, "bias": 2},
        7,
        "text",
    ]
    texts = [pickle.dumps(value) for value in values]
    return [*texts, b"cos\nsystem\n(S'touch /tmp/x'\ntR.", b"\x80\x04Pabc\n.", b"", b"\x1f\x8bnot gzip"]


def test_hostile_files_run_nothing_and_get_a_line(tmp_path: Path, program: Any) -> None:
    for number, text in enumerate(_hostile(tmp_path)):
        path = tmp_path / f"{number}.pickle"
        path.write_bytes(text)
        said = program(["explain", str(path)], 2).err
        assert said.startswith(f"nemo-like explain: {path.name} was not read: ") and said.count("\n") == 1, said
    assert not (tmp_path / "ran").exists()


def test_a_cut_file_gets_a_line(tmp_path: Path) -> None:
    made = Recording()
    made.free(made.make(1 << 20, "forward"))
    made.make(1 << 20, "build")
    text, path = pickle.dumps(made.snapshot()), tmp_path / "cut.pickle"
    for number in range(60):
        path.write_bytes(text[: number * len(text) // 60])
        with pytest.raises(SnapshotError, match=r"^cut\.pickle was not read: it is cut, damaged or no pickle"):
            read_snapshot(path)


def test_a_gzipped_file_and_a_dict_say_the_same(tmp_path: Path) -> None:
    snapshot = real("four-layers-100-three-steps")
    (tmp_path / "s.gz").write_bytes(gzip.compress(pickle.dumps(snapshot)))
    assert explain(tmp_path / "s.gz").to_dict() == explain(snapshot).to_dict()


def test_the_first_form_has_segments_alone(tmp_path: Path) -> None:
    """Torch 2.0."""
    frames = [{"name": "forward", "filename": "model.py", "line": 3}]
    block = {"size": 512, "state": "active_allocated", "history": [{"addr": 8, "real_size": 500, "frames": frames}]}
    free = {"size": 512, "state": "inactive"}
    (tmp_path / "s").write_bytes(pickle.dumps([{"address": 8, "total_size": 1024, "blocks": [block, free]}]))
    made = explain(tmp_path / "s")
    assert (made.peak_bytes, made.reserved_bytes, dict(made.parts)) == (512, 1024, {"activations": 512})
    assert str(made).startswith("Nothing was recorded") and "In use 512 B of 1.00 KiB reserved; 512 B free." in str(made)
    write_stripped(read_snapshot(tmp_path / "s"), tmp_path / "stripped")
    assert dict(explain(tmp_path / "stripped").parts) == {"activations": 512}


def test_a_trace_without_its_beginning_says_so() -> None:
    made = Recording()
    made.free(made.make(1 << 20, "forward"))
    snapshot = made.snapshot()
    snapshot["device_traces"][0] = snapshot["device_traces"][0][1:]  # the segment was taken before
    (only,) = timelines(read_snapshot(snapshot))
    assert only.notes == ["The trace gives segments back that it never took: its beginning is lost."] or not only.notes
    overfull = {"address": 0, "total_size": 1, "blocks": [{"size": 5, "state": "active_allocated"}]}
    (only,) = timelines(read_snapshot({"segments": [overfull]}))
    assert only.notes == ["1 segments overlap or are overfull: the file is damaged."]


def test_a_device_that_is_not_there() -> None:
    with pytest.raises(SnapshotError, match="it has device 0"):
        explain(real("state-only-2"), device=3)
    with pytest.raises(SnapshotError, match="it has no memory of any device"):
        explain({"segments": []})


def test_a_file_needs_no_torch(tmp_path: Path) -> None:
    made = Recording()
    made.make(1 << 20, "build")
    (tmp_path / "s.pickle").write_bytes(pickle.dumps(made.snapshot()))
    code = "import sys; from nemo_like.cli import main; main(['explain', 's.pickle']); sys.exit('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=os.environ | {"PYTHONPATH": os.getcwd()}, timeout=60
    )
    assert done.returncode == 0


def test_a_log_with_a_message(tmp_path: Path, program: Any) -> None:
    text = json.loads((Path(__file__).with_name("oom_messages.json")).read_text(encoding="utf-8"))[0]["text"]
    log, out = tmp_path / "train.log", tmp_path / "out.json"
    log.write_text(f"step 1\n{text}\n", encoding="utf-8")
    assert program(["explain", str(log), "--json", str(out)]).out.startswith("GPU 2 had 6.87 of 79.19GiB free for 7.65GiB")
    assert json.loads(out.read_text(encoding="utf-8"))["unexpected"][0]["kind"] == "live tensors"


def test_a_stripped_snapshot_tells_the_same_without_names(tmp_path: Path, program: Any) -> None:
    snapshot = real("tinyllama-8bit-lora") | {"external_annotations": [{"name": "secret"}]}
    snapshot["device_traces"][0][0] |= {"user_metadata": "secret", "compile_context": "secret"}
    whole, stripped = tmp_path / "whole.pickle", tmp_path / "stripped.pickle"
    whole.write_bytes(pickle.dumps(snapshot))
    assert "sizes" in program(["explain", str(whole), "--strip", str(stripped)]).out
    text = stripped.read_bytes()
    assert b"secret" not in text and b"3105878423.py" not in text
    before, after = explain(whole), explain(stripped)
    assert (before.parts, before.layers, before.peak_bytes) == (after.parts, after.layers, after.peak_bytes)
    filenames = {
        frame["filename"] for event in read_snapshot(stripped)["device_traces"][0] for frame in event["frames"]
    }
    assert all(name.startswith(("site-packages/", "python3", "script", "??")) for name in filenames), filenames
