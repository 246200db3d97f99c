"""Read a stack of an allocation: the phase of the step, the operator, the place in the source.

Only names and lines are read. A source file that is at hand is parsed for the class around a line, never imported.
"""

import ast
import functools
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Any

# A stack: dicts with `name`, `filename` and `line`, the innermost first.
Frames = Sequence[Mapping[str, Any]]


class Phase(StrEnum):
    """The phase of a step."""

    BUILD = "build"
    FORWARD = "forward"
    LOSS = "loss"
    RECOMPUTATION = "recomputation"
    BACKWARD = "backward"
    CLIPPING = "gradient clipping"
    OPTIMIZER = "optimizer"
    FSDP = "FSDP"
    COLLECTIVE = "collective"
    STATE = "saving or loading"
    SCRIPT = "script"
    UNKNOWN = "unknown"


_PACKAGE = re.compile(r".*?(?:site|dist)-packages/(.*)$")
# The phase that a function belongs to, of those that match ``file:name`` the first; None: to none.
_PHASES: tuple[tuple[Phase | None, str], ...] = (
    (None, r"torch/optim/lr_scheduler.*"),
    (Phase.OPTIMIZER, r"torch/optim/.*|(?:.*/)?(?i:[^/]*optim[^/]*):(?:step|__init__)"),
    (Phase.CLIPPING, r".*clip_grad.*"),
    (
        Phase.RECOMPUTATION,
        r"torch/utils/checkpoint\.py:(?:recompute_fn|unpack_hook|backward|_recompute|recompute)",
    ),
    (Phase.FSDP, r"torch/distributed/(?:fsdp|_composable).*"),
    (Phase.COLLECTIVE, r"torch/distributed/(?!tensor).*"),
    (Phase.BACKWARD, r"torch/autograd/(?:graph|__init__)\.py.*|torch/_tensor\.py:backward"),
    (Phase.FORWARD, r".*:forward"),
    # Functions that make or move weights.
    (
        Phase.BUILD,
        r".*:(?:_apply|convert|cuda|from_pretrained|load_state_dict|_load_pretrained_model|to_empty|reset_parameters|"
        r"_init_weights|set_module_tensor_to_device|_load_state_dict_into_meta_model|__init__)|"
        r"torch/nn/parameter\.py:__deepcopy__",
    ),
    (Phase.STATE, r".*:[^:]*state_dict[^:]*"),
)
# The phase of a stack with several of them is the first of these.
_FIRST = (
    *(Phase.RECOMPUTATION, Phase.OPTIMIZER, Phase.CLIPPING, Phase.FSDP, Phase.COLLECTIVE, Phase.BACKWARD),
    *(Phase.FORWARD, Phase.BUILD, Phase.STATE),
)
# Files of packages that pass a call on.
_PASSED = (
    *("torch/nn/modules/module.py", "torch/utils/_contextlib.py", "torch/_dynamo", "torch/_compile.py", "torch/amp/"),
    *("torch/utils/_device.py", "accelerate/utils/operations.py", "torch/autograd/function.py", "functools.py"),
)
_PASSED_BY_PYTHON = ("runpy", "contextlib.py", "threading.py")  # Files of Python's own that do.
_OF_PYTHON = re.compile(r"\.pyx?$|^<")
# Bytes of cuBLAS' workspace before Hopper, ":4096:2:16:8" in KiB (``aten/src/ATen/cuda/CublasHandlePool.cpp``).
CUBLAS_WORKSPACE = (2 * 4096 + 8 * 16) << 10
# Operators that others call for their result.
_ALLOCATES = {
    *("empty_memory_format", "empty_strided", "empty_like", "empty", "resize_"),
    *("to_copy", "_to_copy", "clone", "contiguous"),
}


@functools.cache
def in_package(filename: str) -> str:
    """Return a path from the folder of packages on, such as ``torch/nn/modules/module.py``; another one as it is."""
    inside = _PACKAGE.match(filename.replace("\\", "/"))
    return inside[1] if inside else filename.replace("\\", "/")


def text_of(frame: Any, key: str) -> str:
    """Return the text of a frame; a value of another type counts as none."""
    value = frame.get(key) if type(frame) is dict else None
    return value if type(value) is str else ""


def line_of(frame: Any) -> int:
    """Return the line of a frame, or 0."""
    value = frame.get("line") if type(frame) is dict else None
    return value if type(value) is int else 0


def python_frames(frames: Frames) -> list[Mapping[str, Any]]:
    """Return the frames of Python, the innermost first."""
    return [frame for frame in frames if _OF_PYTHON.search(text_of(frame, "filename"))]


def signature(frames: Frames) -> tuple[tuple[str, int], ...]:
    """Return files and lines of Python, the outermost first: equal for blocks that equal layers make at one place."""
    return tuple((text_of(frame, "filename"), line_of(frame)) for frame in reversed(python_frames(frames)))


@functools.cache
def _phase_of_function(filename: str, name: str) -> Phase | None:
    """Return the phase that a function of Python belongs to, if any."""
    function = f"{in_package(filename)}:{name}"
    return next((phase for phase, pattern in _PHASES if re.fullmatch(pattern, function)), None)


def phase_of(frames: Frames, *, recorded: bool) -> Phase:
    """Return the phase of the step that allocated.

    CUDA's backward runs in a thread of its own, so that its stacks have no frame of Python.

    Args:
        frames: the stack, the innermost first.
        recorded: whether stacks were recorded at all: then an empty one is that of backward's thread.
    """
    python = python_frames(frames)
    phases = {_phase_of_function(text_of(frame, "filename"), text_of(frame, "name")) for frame in python}
    for phase in _FIRST:
        if phase in phases:
            return phase
    if not python:
        threaded = any("autograd" in text_of(frame, "name") for frame in frames)
        return Phase.BACKWARD if threaded or recorded else Phase.UNKNOWN
    names = " ".join(text_of(frame, "name") for frame in python).lower()
    return Phase.LOSS if any(word in names for word in ("loss", "cross_entropy", "softmax")) else Phase.SCRIPT


def in_workspace(frames: Frames) -> bool | None:
    """Return whether a library allocated a workspace that it keeps; None: the stack is of Python only, and names none."""
    of_library = [text_of(frame, "name") for frame in frames if not _OF_PYTHON.search(text_of(frame, "filename"))]
    return any("orkspace" in name for name in of_library) if of_library else None


def class_at(filename: str, line: int) -> str:
    """Return the name of the innermost class whose function has `line`, where the source is at hand; else nothing."""
    inside = [name for first, last, name in _methods(filename) if first <= line <= last]
    return inside[-1] if inside else ""


@functools.lru_cache(maxsize=256)
def _methods(filename: str) -> list[tuple[int, int, str]]:
    """Return the first and last line of each function within a class, and the name of the class."""
    path = Path(filename)
    with suppress(OSError, SyntaxError, ValueError, RecursionError):  # a name may be longer than a file system takes
        if path.suffix == ".py" and path.is_file():
            return list(_functions(ast.parse(path.read_text(encoding="utf-8", errors="replace"))))
    return []


def _functions(node: ast.AST, name: str = "") -> Any:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and name:
            yield child.lineno, child.end_lineno or child.lineno, name
        yield from _functions(child, child.name if isinstance(child, ast.ClassDef) else name)


_OPERATOR = re.compile(r"at::_ops::(\w+?)::(?:call|redispatch)")
_BACKWARD = re.compile(r"torch::autograd::generated::(?:\(anonymous namespace\)::)?(\w+?)Backward\d*")


def operator_of(frames: Frames) -> str:
    """Return the operator that allocated, as ATen names it, or the function of Python."""
    inner = ""
    for frame in frames:
        name = text_of(frame, "name")
        if operator := _OPERATOR.search(name):
            if operator[1] not in _ALLOCATES:
                return operator[1]
            inner = inner or operator[1]
        elif node := _BACKWARD.search(name):
            return inner if inner and inner not in _ALLOCATES else f"backward of {node[1]}"
    names = (text_of(frame, "name") for frame in _telling(frames))
    return inner or next((name for name in names if name not in ("forward", "<module>")), "")


def place_of(frames: Frames, *, with_class: bool = False) -> str:
    """Return the file and line of the call to PyTorch; `with_class`: with its class, where the source is at hand."""
    telling = _telling(frames)
    mine = (f for f in telling if not in_package(text_of(f, "filename")).startswith("torch/"))
    frame = next(mine, telling[0] if telling else None)
    if frame is None:
        return ""
    filename, line = text_of(frame, "filename"), line_of(frame)
    inside = class_at(filename, line) if with_class else ""
    return f"{inside} {in_package(filename).rpartition('/')[2]}:{line}".strip()


def _telling(frames: Frames) -> list[Mapping[str, Any]]:
    return [
        frame
        for frame in python_frames(frames)
        if not in_package(text_of(frame, "filename")).startswith(_PASSED)
        and not any(word in text_of(frame, "filename") for word in _PASSED_BY_PYTHON)
    ]
