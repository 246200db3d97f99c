"""Broken and hostile files: one line each, in our own words, within bounds of memory; nothing in them runs."""

import copy
import gzip
import io
import json
import os
import pickle
import resource
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_like.explaining.snapshot_file import SnapshotError, read_snapshot
from tests.checks import Calls

FRAME = {"name": "forward", "filename": "a.py", "line": 3}
GOOD: dict[str, Any] = {
    "segments": [
        {
            **{"device": 0, "address": 4096, "total_size": 2 << 20, "stream": 0},
            "blocks": [{"address": 4096, "size": 1 << 20, "state": "active_allocated", "frames": [FRAME]}],
        }
    ],
    "device_traces": [
        [
            {"action": "segment_alloc", "addr": 4096, "size": 2 << 20, "stream": 0, "frames": []},
            {"action": "alloc", "addr": 4096, "size": 1 << 20, "stream": 0, "frames": [FRAME]},
        ]
    ],
}
PICKLE = pickle.dumps(GOOD)


def changed(value: Any, *path: Any) -> bytes:
    """Return the pickle of `GOOD` with another value at a place."""
    snapshot = part = copy.deepcopy(GOOD)
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    return pickle.dumps(snapshot)


SEGMENT, EVENT = ("segments", 0), ("device_traces", 0, 1)
BLOCK = (*SEGMENT, "blocks", 0)


def _laughs(levels: int) -> list[Any]:
    lists: list[Any] = []
    for _ in range(levels):
        lists = [lists, lists]
    return lists


def _digit_log(before: bytes) -> bytes:
    return before + b"9" * 1_000_000 + b"\nCUDA out of memory. Tried to allocate " + b"1" * 1_000_000


def _laughing_lists() -> bytes:
    """Return a pickle of lists in lists, each with the one before it twice."""
    text = b"\x80\x04]q\x00"
    for level in range(1, 40):
        text += b"]q" + bytes([level]) + b"(" + 2 * (b"h" + bytes([level - 1])) + b"e"
    return text + b"."


REFUSED: dict[str, bytes] = {
    "empty": b"",
    "one byte": b"\x80",
    "half": PICKLE[: len(PICKLE) // 2],
    "without its last byte": PICKLE[:-1],
    "garbage at the end": PICKLE[:-1] + b"\xff.",
    "global of protocol 0": b"cos\nsystem\n(S'touch executed'\ntR.",
    "stack global": b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x0etouch executed\x85R.",
    "long name of a global": b"c" + b"x" * 100_000 + b"\nsystem\n.",
    "escape codes in a global": b"\x80\x04\x8c\x05\x1b[31m\x8c\x06system\x93.",
    "instance": b"(S'touch executed'\nios\nsystem\n.",
    "extension": b"\x80\x02\x82\x01.",
    "persistent name": b"Pfoo\n.",
    "binary persistent name": b"\x8c\x03fooQ.",
    "build": b"\x80\x02}}b.",
    "new object": b"\x80\x02cbuiltins\nlist\n)\x81.",
    "digits of an int": b"I" + b"9" * 100_000 + b"\n.",
    "gzip in gzip": gzip.compress(gzip.compress(PICKLE)),
    "cut gzip": gzip.compress(PICKLE)[:-20],
    "gzip without contents": b"\x1f\x8bnot gzip",
    "claims 3 GiB in gzip": gzip.compress(b"\x80\x04\x8e" + struct.pack("<Q", 3 << 30) + b"\0" * (16 << 20), 1),
    "claims 4 exabytes": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 62) + b"x",
    "claims 4 GiB": b"\x80\x04B" + struct.pack("<I", 0xFFFFFFFF) + b"x",
    "claims a frame of 1 TiB": b"\x80\x04\x95" + struct.pack("<Q", 1 << 40) + b"N.",
    "claims a memo of 4 GiB": b"\x80\x04Nr" + struct.pack("<I", 0x0FFFFFFF) + b".",
    "claims a memo of 32 GiB": b"\x80\x04Nr" + struct.pack("<I", 0x7FFFFFFF) + b".",
    "dicts without end": gzip.compress(b"\x80\x04](" + b"}" * (30 << 20) + b"e."),
    "deep nesting": b"\x80\x04" + b"]" * 200_000 + b"a" * 199_999 + b".",
    "lists with themselves": b"\x80\x04]q\x00h\x00a.",
    "dict with itself": b"\x80\x04}q\x00(X\x08\x00\x00\x00segmentsh\x00u.",
    "laughs": _laughing_lists(),
    "one trace on many devices": pickle.dumps(GOOD | {"device_traces": [GOOD["device_traces"][0] * 500] * 100}),
    "one segment with many blocks, many times": pickle.dumps(
        GOOD | {"segments": [GOOD["segments"][0] | {"blocks": GOOD["segments"][0]["blocks"] * 1000}] * 1000}
    ),
    "events of 200 devices": pickle.dumps(GOOD | {"device_traces": [[GOOD["device_traces"][0][1]]] * 200}),
    "a stack of 20,000 frames": changed([FRAME] * 20_000, *EVENT, "frames"),
    "JSON": json.dumps(GOOD).encode(),
    "text": b"hello world\n" * 100,
    "noise": bytes(range(256)) * 1000,
    "SVG": b"<svg></svg>",
    "zip": b"PK\x03\x04" + b"\0" * 100,
    "prefixes": b"[rank0]: " * 20_000 + b"x\n" + b"> > > > > > > >" * 10_000 + b"\nno message",
    "int": pickle.dumps(7),
    "list of ints": pickle.dumps([1, 2]),
    "empty list": pickle.dumps([]),
    "escape codes in keys": pickle.dumps({"\x1b[31m": 1}),
    "keys that are no text": pickle.dumps({10**5000: 1, (1, (2,)): 3}),
    "segments None": changed(None, "segments"),
    "traces None": changed(None, "device_traces"),
    "traces in a dict": changed({"a": 1}, "device_traces"),
    "blocks in a dict": changed({"a": 1}, *SEGMENT, "blocks"),
    "text as size": changed("big", *SEGMENT, "total_size"),
    "negative size": changed(-5, *BLOCK, "size"),
    "size of 200 bits": changed(1 << 200, *BLOCK, "size"),
    "event of 80 bits": changed(1 << 80, *EVENT, "size"),
    "segment of 63 bits": changed(1 << 63, "device_traces", 0, 0, "size"),
    "bool as address": changed(True, *SEGMENT, "address"),
    "text as address": changed("x", *BLOCK, "address"),
    "None as address": changed(None, *EVENT, "addr"),
    "list as address": changed([1], *EVENT, "addr"),
    "dict as stream": changed({"a": 1}, *EVENT, "stream"),
    "list as stream": changed([1], *SEGMENT, "stream"),
    "text as device": changed("gpu", *SEGMENT, "device"),
    "negative device": changed(-3, *SEGMENT, "device"),
    "device 1,000,000,000": changed(10**9, *SEGMENT, "device"),
    "int as state": changed(5, *BLOCK, "state"),
    "text as requested size": changed("x", *BLOCK, "requested_size"),
    "text as free bytes": changed("x", *EVENT, "device_free"),
}
READ: dict[str, bytes] = {
    "good": PICKLE,
    "gzipped": gzip.compress(PICKLE),
    "laughing frames": changed(_laughs(30), *BLOCK, "frames"),
    "laughing frames of an event": changed(_laughs(30), *EVENT, "frames"),
    "mixed frames": changed([5, None, {"name": 3, "filename": None, "line": "x"}], *BLOCK, "frames"),
    "long names": changed([{"name": "x" * 10**6, "filename": "y" * 10**6 + ".py", "line": 1}], *EVENT, "frames"),
    "escape codes": changed(
        [{"name": "a\n\x1b[31mred\x1b[0m", "filename": "x/\x1b]0;title\x07\u202e.py", "line": 1}], *EVENT, "frames"
    ),
    "lone surrogate": changed([{"name": "a\ud800", "filename": "\udfff.py", "line": 1}], *EVENT, "frames"),
    "another's file": changed([{"name": "f", "filename": "/etc/passwd", "line": 1}], *EVENT, "frames"),
    "device file": changed([{"name": "f", "filename": "/dev/zero.py", "line": 1}], *EVENT, "frames"),
    "int in a history": changed([{"frames": 5}], *BLOCK, "history"),
    "many devices without events": pickle.dumps(GOOD | {"device_traces": [[]] * 10_000}),
    "many of one event": pickle.dumps(
        GOOD | {"device_traces": [[{"action": "alloc", "addr": 1, "size": 1, "frames": None}] * 10_000]}
    ),
    "large extra value": pickle.dumps(GOOD | {"extra": list(range(100_000))}),
    "digits in a log": _digit_log(b"Tried to allocate "),
    "log in UTF-16": "CUDA out of memory. Tried to allocate 1.00 GiB".encode("utf-16"),
    "one line of messages": b"CUDA out of memory. Tried to allocate 1.00 GiB " * 20_000,
    "NULs in a log": b"\0" * 100_000 + b"CUDA out of memory. Tried to allocate 1.00 GiB",
}
PYTHONS = (
    *("Errno", "object", "subscript", "argument", "codec", "literal", "opcode", "load key", "Memo", "()"),
    *("not supported", "truncated", "too large", "expected", "instruction"),
)


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bytes], str]]:
    """Return a function that writes a file; fail where a file has run something."""
    monkeypatch.chdir(tmp_path)

    def write(text: bytes) -> str:
        Path("file").write_bytes(text)
        return "file"

    yield write
    assert not Path("executed").exists()


@pytest.mark.parametrize("name", REFUSED)
def test_a_hostile_file_gets_one_line(name: str, written: Callable[[bytes], str], program: Any) -> None:
    printed = program(["explain", written(REFUSED[name])], 2)
    line = printed.err.removesuffix("\n")
    assert not printed.out and line.isprintable() and len(line) < 250
    assert line.startswith("nemo-like explain: ") and line.endswith(".")
    assert not any(word in line for word in PYTHONS), line


@pytest.mark.parametrize("name", READ)
def test_an_odd_file_is_read(name: str, written: Callable[[bytes], str], program: Any) -> None:
    printed = program(["explain", written(READ[name])])
    assert not printed.err and all(line.isprintable() and len(line) < 1000 for line in printed.out.split("\n"))
    assert printed.out.startswith(("Peak 1.00 MiB", "GPU ", "The GPU ", "Nothing was recorded: "))


@pytest.mark.parametrize("value", [Calls(os.system, "touch executed"), Calls(eval, "open('executed', 'w')"), Path("x")])
@pytest.mark.parametrize("place", [("segments",), ("segments", 0), ("device_traces", 0, 1), (*EVENT, "frames")])
def test_objects_are_refused(value: Any, place: Any, written: Callable[[bytes], str], program: Any) -> None:
    assert "it wants to build" in program(["explain", written(changed(value, *place))], 2).err


def test_a_name_of_a_file_obeys_no_terminal(tmp_path: Path, program: Any) -> None:
    path = tmp_path / "\x1b[31m.pickle"
    path.write_bytes(b"")
    line = program(["explain", str(path)], 2).err
    assert line.startswith(r"nemo-like explain: \x1b[31m.pickle was not read") and line[:-1].isprintable()


@pytest.mark.parametrize(
    ("kind", "words"), [("folder", "has no snapshot"), ("pipe", "is not a file"), ("dangling", "does not exist")]
)
def test_what_is_not_a_file(kind: str, words: str, tmp_path: Path, program: Any) -> None:
    path = tmp_path / kind
    {"folder": path.mkdir, "pipe": lambda: os.mkfifo(path), "dangling": lambda: path.symlink_to("/nonexistent")}[kind]()
    error = program(["explain", str(path)], 2).err
    assert words in error and "Give " in error and error.count("\n") == 1


def test_standard_input_is_read_to_its_last_64_mib(program: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    message = b"CUDA out of memory. Tried to allocate 1.00 GiB\n"
    for text, code in ((b"\xff\0" * 1000 + message, 0), (message + bytes(65 << 20), 2), (b"", 2)):
        monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(text)))
        printed = program(["explain", "-"], code)
        assert "1.00GiB" in printed.out if code == 0 else printed.err.startswith("nemo-like explain: Standard input has no")


def test_bombs_take_less_than_1_and_a_half_gib(tmp_path: Path) -> None:
    bombs = [name for name in REFUSED if name.startswith(("claims", "dicts"))]
    for number, name in enumerate(bombs):
        (tmp_path / str(number)).write_bytes(REFUSED[name])
    code = (
        "import re, sys; from nemo_like.cli import main\n"
        "codes = {main(['explain', path]) for path in sys.argv[1:]}\n"
        # ru_maxrss begins with that of the process that started this one
        "print(codes, int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]) >> 10)"
    )
    paths = [str(tmp_path / str(number)) for number in range(len(bombs))]
    done = subprocess.run([sys.executable, "-c", code, *paths], capture_output=True, text=True, check=True, timeout=60)
    codes, mebibytes = done.stdout.split()
    assert codes == "{2}" and int(mebibytes) < 1536 and done.stderr.count("\n") == len(bombs)


def test_unpacked_bytes_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nemo_like.explaining.snapshot_file._LARGEST_UNPACKED", 1 << 20)
    before = resource.getrlimit(resource.RLIMIT_AS)
    (tmp_path / "long").write_bytes(gzip.compress(b"N0" * (2 << 20)))
    with pytest.raises(SnapshotError, match="more than 1,048,576 bytes"):
        read_snapshot(tmp_path / "long")
    assert resource.getrlimit(resource.RLIMIT_AS) == before
