"""What imports what: a job loads nothing of planning that it does not use, and folders have no circles."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import nemo_like

ROOT = Path(nemo_like.__file__).parent

_JOB = """
import sys
import torch.distributed as dist
from nemo_like.torch_compat import fake_store
dist.init_process_group("fake", store=fake_store(), rank=0, world_size=4)
from nemo_like import parallelize
from tests.models.decoders import build, batch
ids = batch(2, 8)
for axis in ("pp", "tp", "cp"):
    parallelize(build("llama"), sample_input={"input_ids": ids, "labels": ids}, device="cpu", **{axis: 2})
print(*sorted(name for name in sys.modules if name.startswith("nemo_like.planning.")))
"""


# A process of its own, since this one has everything loaded (3 s).
def test_a_job_without_a_budget_loads_nothing_of_planning() -> None:
    run = subprocess.run([sys.executable, "-c", _JOB], capture_output=True, text=True, cwd=ROOT.parent)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == []


def test_no_files_import_each_other_in_a_circle() -> None:
    files = {_module(path): _imports(path) - {_module(path)} for path in ROOT.rglob("*.py")}
    left = {name: {other for other in imported if other in files} for name, imported in files.items()}
    while free := [name for name, imported in left.items() if not imported & left.keys()]:
        for name in free:
            del left[name]
    assert left == {}


def _module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")


def _imports(path: Path) -> set[str]:
    """Names of modules that are imported anywhere in the file, TYPE_CHECKING and functions included."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            for each in node.names:  # a file of a folder, or a name of a file
                inside = (ROOT.parent / node.module.replace(".", "/") / f"{each.name}.py").exists()
                names.add(f"{node.module}.{each.name}" if inside else node.module)
        elif isinstance(node, ast.Import):
            names |= {each.name for each in node.names}
    return names


def test_the_map_in_the_documents_has_a_line_for_each_folder_and_file_of_the_root() -> None:
    lines = (ROOT.parent / "docs" / "CONTRIBUTING.md").read_text(encoding="utf-8").splitlines()
    told = [line.split("`")[1] for line in lines if line.startswith("| `nemo_like/")]
    folders = {f"{path.parent.relative_to(ROOT.parent)}/" for path in ROOT.rglob("*.py")} - {"nemo_like/"}
    files = {f"nemo_like/{path.name}" for path in ROOT.glob("*.py") if not path.name.startswith("__")}
    assert sorted(told) == sorted(folders | files)
