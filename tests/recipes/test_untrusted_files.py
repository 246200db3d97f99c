"""Checkpoints that a stranger made run no code, and nothing in the package reads files in a way that could."""

import ast
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

import nemo_like
from nemo_like.distributed import materialize
from nemo_like.distributed.ranks import Ranks
from nemo_like.distributed.weights.checked_files import CheckedPlanner, CheckedReader, CheckpointUnreadableError
from nemo_like.distributed.weights.checkpoints import CheckpointError, CheckpointStore, _size_and_sum
from tests.checks import Calls

pytestmark = [pytest.mark.compat, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]

RAN: list[str] = []


def _run(word: str) -> str:
    RAN.append(word)
    return word


def _dotted(module: str, name: str) -> bytes:
    """A pickle that calls the attribute of an attribute of an allowed module."""
    text = [b"\x8c" + bytes([len(word)]) + word.encode() for word in (module, name)]
    return b"\x80\x04" + b"".join(text) + b"\x93\x8c\x01x\x85R."


HOSTILE = {
    "a function of the stranger": pickle.dumps(Calls(_run, "x")),
    "eval": pickle.dumps(Calls(eval, "1")),
    "torch.load": pickle.dumps(Calls(torch.load, "x", None, None, False)),
    "a dotted name": _dotted("torch.distributed.checkpoint.metadata", "torch.load"),
    "what a class leads to": _dotted("torch.distributed.checkpoint.metadata", "Metadata.__init__"),
    "an object inside": pickle.dumps(dcp.Metadata({"weight": Calls(_run, "x")}, storage_data={})),  # type: ignore
}


def _saved(folder: Path) -> Path:
    dcp.save(nn.Linear(3, 2).state_dict(), storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    return folder


@pytest.mark.parametrize("which", HOSTILE)
def test_metadata_that_would_run_code_are_refused_in_one_line(tmp_path: Path, which: str):
    RAN.clear()
    (_saved(tmp_path) / ".metadata").write_bytes(HOSTILE[which])
    model = nn.Linear(3, 2, device="meta")
    with pytest.raises(
        CheckpointUnreadableError, match=r"^\S+/.metadata refers to \S+, which .* take safetensors"
    ) as info:
        materialize(model, checkpoint=tmp_path)
    assert not RAN and "\n" not in str(info.value) and all(p.is_meta for p in model.parameters())


@pytest.mark.parametrize("value", [[1], {"a": 1}, dcp.Metadata({}, storage_data=None)])
def test_metadata_of_another_kind_are_refused(tmp_path: Path, value: object):
    (tmp_path / ".metadata").write_bytes(pickle.dumps(value))
    with pytest.raises(CheckpointUnreadableError, match="not the metadata of a checkpoint"):
        CheckedReader(tmp_path).read_metadata()


@pytest.mark.parametrize("name", ["/etc/passwd", "../other.distcp", "a/../../other.distcp"])
def test_metadata_that_name_files_outside_are_refused(tmp_path: Path, name: str):
    path = _saved(tmp_path) / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    next(iter(metadata.storage_data.values())).relative_path = name
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointUnreadableError, match=f"names the file '{name}', which is not in its folder"):
        CheckedReader(tmp_path).read_metadata()


@pytest.mark.parametrize("name", ["/x/a.safetensors", "../a.safetensors", 3])
def test_an_index_that_names_files_outside_is_refused(tmp_path: Path, name: object):
    folder = tmp_path / "inside"
    folder.mkdir()
    state = {key: value.detach() for key, value in nn.Linear(3, 2).state_dict().items()}
    save_file(state, tmp_path / "a.safetensors")
    save_file(state, folder / "b.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"weight": name, "bias": "b.safetensors"}}))
    model = nn.Linear(3, 2, device="meta")
    with pytest.raises(CheckpointUnreadableError, match=r"index.json names the file .* not in its folder") as info:
        materialize(model, checkpoint=folder)
    assert "\n" not in str(info.value) and all(p.is_meta for p in model.parameters())


def test_what_torch_writes_is_read(tmp_path: Path):
    """Dtypes, plain objects, paths: the metadata are those that torch reads."""
    kinds = ("bfloat16", "half", "float64", "float8_e4m3fn", "int8", "uint16", "long", "bool", "complex64")
    state: dict[str, Any] = {kind: torch.zeros(2, dtype=getattr(torch, kind)) for kind in kinds}
    state |= {"nested": {"list": [torch.ones(2), 3]}, "number": 5}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
    read, wanted = CheckedReader(tmp_path).read_metadata(), dcp.FileSystemReader(tmp_path).read_metadata()
    assert read.state_dict_metadata == wanted.state_dict_metadata and read.storage_data == wanted.storage_data
    assert read.planner_data == wanted.planner_data and len(read.state_dict_metadata) == 12


@pytest.mark.parametrize("stored", ["an object", "a number"])
def test_a_resumed_job_reads_plain_data_alone(tmp_path: Path, stored: str):
    value = Calls(_run, "x") if stored == "an object" else 7
    dcp.save({"weight": value}, storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
    state, RAN[:] = {"weight": torch.zeros(2)}, []
    load = {"storage_reader": CheckedReader(tmp_path), "planner": CheckedPlanner(), "no_dist": True}
    if stored == "an object":
        with pytest.raises(dcp.CheckpointException, match="weights_only"):
            dcp.load(state, **load)
    else:
        dcp.load(state, **load)
    assert not RAN and state["weight"] is not None


@pytest.mark.parametrize("hostile", ["metadata", "object"])
def test_a_job_does_not_resume_from_a_hostile_checkpoint(tmp_path: Path, hostile: str):
    store = CheckpointStore(tmp_path, Ranks(0, 1, torch.device("cpu")), background=False)
    store.save(1, {"weight": torch.ones(2) if hostile == "metadata" else Calls(_run, "x")}, {})
    RAN.clear()
    folder = store.path(1)
    if hostile == "metadata":
        (folder / ".metadata").write_bytes(HOSTILE["a function of the stranger"])
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"] = {p.name: _size_and_sum(p) for p in folder.iterdir() if p.name != "manifest.json"}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="refers to" if hostile == "metadata" else "cannot be read") as info:
        store.load({"weight": torch.zeros(2)}, lambda about: None)
    assert not RAN and "\n" not in str(info.value)


# --- Every call of the package that reads a file -------------------------------------------------------------------------

UNSAFE_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
UNSAFE_CALLS = {
    "yaml.load", "yaml.load_all", "yaml.full_load", "yaml.unsafe_load", "pandas.read_pickle", "torch.jit.load",
    "torch.export.load", "torch.package.PackageImporter", "torch.hub.load",
}  # fmt: skip
CHECKED = "checked_files.py"


def _name(node: ast.expr) -> str:
    return ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""


def unsafe_reads(source: str) -> list[str]:
    """Return the calls in `source` that may run what a file holds."""
    reads = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            reads += [f"{node.lineno}: import {name}" for name in names if name.split(".")[0] in UNSAFE_MODULES]
        if not isinstance(node, ast.Call):
            continue
        name, last = _name(node.func), _name(node.func).rpartition(".")[2]
        arguments = {word.arg: ast.unparse(word.value) for word in node.keywords}
        bad = name in UNSAFE_CALLS or last in {"FileSystemReader", "Unpickler"}
        bad |= name == "torch.load" and arguments.get("weights_only") != "True"
        bad |= arguments.get("weights_only") == "False" or arguments.get("allow_pickle") not in (None, "False")
        bad |= name.startswith("dcp.load") and "storage_reader" not in arguments
        if bad:
            reads.append(f"{node.lineno}: {name}")
    return reads


@pytest.mark.parametrize(
    "source",
    [
        "import pickle", "from joblib import load", "import yaml\nyaml.load(f)", "torch.load(p)",
        "torch.load(p, weights_only=False)", "np.load(p, allow_pickle=True)", "dcp.FileSystemReader(p)",
        "dcp.load(state, checkpoint_id=p)", "numpy.load(p, allow_pickle=flag)",
    ],
)  # fmt: skip
def test_an_unsafe_read_is_seen(source: str):
    assert unsafe_reads(source)


def test_no_file_of_a_user_is_read_in_a_way_that_runs_code():
    reads = {path: unsafe_reads(path.read_text(encoding="utf-8")) for path in Path(nemo_like.__file__).parent.rglob("*.py")}
    found = {path.name: [call.split(": ")[1] for call in calls] for path, calls in reads.items() if calls}
    # The second refuses every name (tests/explaining/test_snapshot.py).
    assert found == {name: ["import pickle"] for name in (CHECKED, "snapshot_file.py")}
