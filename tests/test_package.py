"""The package: public names, what imports what, its version, and files that are the old ones or whole new ones."""

import ast
import collections
import importlib
import importlib.metadata
import itertools
import json
import re
import subprocess
import sys
import tomllib
import typing
from pathlib import Path

import pytest

import nemo_like
from nemo_like import cli
from nemo_like._util.json_file import write_json

PATHS = {
    "nemo_like.activation_checkpointing": (
        "SELECTIVE_AC_WRAPPER_FLAG",
        "CheckpointSpec",
        "apply_full_layer_checkpointing_to_layers",
        "apply_selective_checkpointing_to_layers",
        "apply_specs",
        "apply_submodule_checkpointing",
        "detect_kv_sharing_and_maybe_disable_cache",
        "is_selective_activation_checkpointing",
        "make_selective_checkpoint_context_fn",
        "unwrap_checkpoint_wrapper",
    ),
    "nemo_like.compile": ("compile_layers",),
    "nemo_like.distributed": ("materialize", "shard_layers", "shard_sequence", "unshard_sequence"),
    "nemo_like.distributed.update_in_backward": ("OptimizerInBackward", "optimizer_in_backward"),
    "nemo_like.distributed.pipeline": ("Pipeline",),
    "nemo_like.integrations": (
        "ActivationOffloadingMixin",
        "NoOpManager",
        "OffloadActivations",
        "get_lora_act_offloading_ctx_manager",
    ),
    "nemo_like.layers": ("layer_groups",),
    "nemo_like.losses": ("chunked_cross_entropy",),
    "nemo_like.options": (
        "DDP",
        "FSDP2",
        "AllocatorConfig",
        "CheckpointConfig",
        "ChunkedLoss",
        "ContextParallel",
        "ExpertParallel",
        "MemoryBudget",
        "OffloadConfig",
        "PipelineParallel",
        "PlanSearch",
        "Precision",
        "Single",
        "StepSpec",
        "TensorParallel",
    ),
    "nemo_like.planning": ("Plan", "plan_for"),
    "nemo_like.planning.fit": ("FitReport", "fit"),
    "nemo_like.profiling": ("MemoryProfiler", "ProfileReport"),
}
"""The contract's, by the path that does not change."""
ELSEWHERE = (
    "name",
    "ActivationCheckpointTransform",
    "CheckpointWrapper",
    "DryRun",
    "Explanation",
    "Job",
    "SelectiveCheckpointer",
    "SelectivePolicy",
    "TorchPolicy",
    "apply_activation_checkpointing",
    "checkpoint_timesteps",
    "dry_run",
    "explain",
    "is_checkpointed",
    "is_recomputing",
    "PlanReport",
    "parallelize",
    "predict",
)
"""Names that are promised from `nemo_like` alone."""


@pytest.mark.parametrize("path", PATHS)
def test_a_name_is_one_object_by_both_paths(path: str) -> None:
    module = importlib.import_module(path)
    for name in PATHS[path]:
        assert getattr(nemo_like, name) is getattr(module, name)


def test_the_public_names_are_these() -> None:
    # Frozen on purpose: a name that users import is added or taken away knowingly.
    assert nemo_like.__all__ == sorted({*ELSEWHERE, *(name for names in PATHS.values() for name in names)})
    assert all(getattr(nemo_like, name).__doc__ for name in nemo_like.__all__)


@pytest.mark.parametrize("name", ["nemo_like", "nemo_like.planning"])
def test_the_names_of_a_stub_are_there_at_run_time(name: str) -> None:
    """Type checkers and editors read the stub; so does the package."""
    package = importlib.import_module(name)
    for node in ast.parse(Path(str(package.__file__)).with_suffix(".pyi").read_text(encoding="utf-8")).body:
        for alias in node.names if isinstance(node, ast.ImportFrom) else ():
            assert alias.asname == alias.name, "without 'as' it is not public"
            assert getattr(package, alias.name) is getattr(importlib.import_module(str(node.module)), alias.name)


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


def test_a_class_has_a_name_of_its_own() -> None:
    nodes = (node for path in ROOT.rglob("*.py") for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    counts = collections.Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    assert [name for name, count in counts.items() if count > 1] == []


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


CHECKOUT = Path(__file__).resolve().parent.parent


def test_the_version_stands_in_one_place() -> None:
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+|rc\d+)?", nemo_like.__version__)
    assert "version" not in project["project"] and project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "nemo_like.__version__"}


def test_packaging_reads_it_without_importing_torch() -> None:
    """A build environment has no torch: setuptools has to find the word in the source itself."""
    script = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "from setuptools.config.expand import read_attr\n"
        "print(read_attr('nemo_like.__version__'))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=CHECKOUT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == nemo_like.__version__


def test_the_command_says_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.split() == ["nemo-like", nemo_like.__version__]


def test_summaries_of_runs_name_it() -> None:
    from nemo_like.recipes.log import versions

    assert versions()["nemo_like"] == nemo_like.__version__


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


def test_the_written_signatures_of_parallelize_return_models_or_pipelines() -> None:
    """Type checkers read these: without pp= the model comes back, with it a pipeline."""
    from nemo_like.parallelizer import parallelize

    written = [each.__annotations__ for each in typing.get_overloads(parallelize)]
    returned = [each["return"] for each in written]
    assert ["pp" in each for each in written] == [False, False, True]
    assert {each["keywords"] for each in written} == {"Unpack[JobKeywords]"}
    assert returned == ["Model", "Model | DistributedDataParallel", "Pipeline"]


def _requirements() -> list[str]:
    """Return the requirements of pyproject.toml, those of extras included."""
    project = tomllib.loads((ROOT.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = itertools.chain.from_iterable(project["optional-dependencies"].values())
    return [each for each in (*project["dependencies"], *extras) if not each.startswith("nemo_like[")]


def test_the_page_of_dependencies_has_every_requirement_with_its_bounds():
    page = (ROOT.parent / "docs" / "reference" / "dependencies.md").read_text(encoding="utf-8")
    cells = [line.split("|")[1] for line in page.partition("## ")[0].splitlines() if line.startswith("| ")][1:]
    listed = [name.strip() for cell in cells for name in re.split("[,;] ", re.sub(r"\(.*?\)", "", cell))]
    assert {*listed} == {*_requirements()}


@pytest.mark.parametrize("name", ["torch", "transformers", "trl"])
def test_the_installed_release_is_one_that_is_supported(name):
    requirements = pytest.importorskip("packaging.requirements")
    asked = next(each for each in map(requirements.Requirement, _requirements()) if each.name == name)
    try:
        installed = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{name} is not installed")
    assert asked.specifier.contains(installed, prereleases=True)
    assert {"<"} < {bound.operator for bound in asked.specifier}  # the next major release is tested before it is taken
