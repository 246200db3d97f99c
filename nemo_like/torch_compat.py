"""The private names of PyTorch that this package uses: the only module that imports or reads one, ordered by topic.

Each has a fallback, or an error that says what is missing. "Seen in" names the releases that were looked at: torch
2.11.0, 2.13.0 and 2.15.0, unless it says otherwise. Whoever adds a release looks here first. Attributes of objects
that everybody reads (`nn.Module._modules` and its like, `Tensor._version`, an operator's `_schema`) stay where they
are used; `tests/test_torch_compat.py` has the list.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from operator import methodcaller
from typing import Any, TypeVar

import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import SelectiveCheckpointContext

from nemo_like.log import warn_once

# --- Documented for users, though the module is underscored: aliases, no fallback. Seen in all. ----------------------
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket  # isort: skip
from torch.utils._python_dispatch import TorchDispatchMode  # isort: skip
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten  # isort: skip

# PyTorch's activation wrappers, which others recognise ours by: no fallback, since ours derive from them. Seen in all.
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (  # isort: skip
    ActivationWrapper,
    CheckpointWrapper,
    OffloadWrapper,
)

__all__ = [
    "ActivationWrapper",
    "CheckpointWrapper",
    "HigherOrderOperator",
    "OffloadWrapper",
    "OpOverload",
    "OpOverloadPacket",
    "TorchDispatchMode",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
]

RELEASES = "torch 2.11 to 2.15"
"""The releases that error messages recommend."""

PYTREE_LOGGER = tree_map.__module__
"""The logger that warns of what others register as a tree. Seen in all."""


def forward_hooks(module: nn.Module) -> tuple[Callable[..., Any], ...]:
    """What `register_forward_hook` has put on `module`, in that order; none where torch keeps them elsewhere."""
    return tuple(getattr(module, "_forward_hooks", {}).values())


def wrapped_module(wrapper: nn.Module) -> nn.Module:
    """The module inside one of PyTorch's activation wrappers, ours among them."""
    return wrapper._checkpoint_wrapped_module  # type: ignore[return-value]


def _private(owner: Any, path: str) -> Any:
    """The attribute at the dotted `path` of `owner`, None where any part of it is absent."""
    for name in path.split("."):
        owner = getattr(owner, name, None)
    return owner


def profiler_is_on() -> bool:
    """Whether one of torch's profilers runs on this thread, beside which no other may start; False: torch can't tell."""
    enabled: Callable[[], bool] | None = _private(torch.autograd, "_profiler_enabled")
    return enabled is not None and enabled()


# --- Autograd ---------------------------------------------------------------------------------------------------------

# Absent in 2.11: an autograd node of our own does the same.
_make_saved_tensor: Callable[..., Any] | None = _private(torch._C, "_autograd._make_saved_tensor")
_keep_graph: Callable[[], bool] | None = _private(torch._C, "_autograd._get_current_graph_task_keep_graph")
_graph_task: Callable[[], int] | None = _private(torch._C, "_current_graph_task_id")
_functorch_level: Callable[[], Any] | None = _private(torch._C, "_functorch.peek_interpreter_stack")
_top_hooks: Callable[[bool], Any] | None = _private(torch._C, "_autograd._top_saved_tensors_default_hooks")
_pop_hooks: Callable[[], None] | None = _private(torch._C, "_autograd._pop_saved_tensors_default_hooks")
_push_hooks: Callable[..., None] | None = _private(torch._C, "_autograd._push_saved_tensors_default_hooks")


_node: Callable[[], Any] | None = _private(torch._C, "_current_autograd_node")
_number: Callable[[], int] | None = _private(torch.autograd, "_get_sequence_nr")


def autograd_node() -> Any:
    """The node whose backward runs on this thread; None: none does, or torch does not tell."""
    return None if _node is None or _number is None else _node()


def next_sequence_number() -> int:
    """The number that autograd's next node on this thread gets (``node._sequence_nr()``); 0 where torch does not tell."""
    return 0 if _number is None else _number()


class _SaveInput(torch.autograd.Function):
    """A node that does nothing but keep a tensor the way autograd keeps one."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: Tensor) -> Tensor:
        ctx.save_for_backward(tensor)
        return anchor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        raise AssertionError("no gradient flows through a saved input")


def save_tensor(tensor: Tensor) -> Callable[[], Tensor]:
    """Have autograd save `tensor`, hooks and version check included; the result gives it back."""
    if _make_saved_tensor is not None:
        return _make_saved_tensor(tensor, is_output=False).unpack
    # The output is held, not its node: the node frees what it saved as soon as the output goes.
    output = _SaveInput.apply(torch.empty(0, requires_grad=True), tensor)
    return lambda: output.grad_fn.saved_tensors[0]


_give_back: Callable[[int], None] | None = _private(torch._C, "StorageBase._free_weak_ref")
_countable = _give_back is not None and hasattr(torch.UntypedStorage, "_weak_ref")
weak_storage: Callable[[torch.UntypedStorage], Any] = methodcaller("_weak_ref") if _countable else StorageWeakRef
"""A weak reference to a storage, for `WeakStorages`: a number, which takes a third of a `StorageWeakRef`'s time."""


class WeakStorages(dict[int, Any]):
    """What `weak_storage` returned, by any number.

    While such a reference exists, the place of its storage object is taken: no other storage can be confused with it.
    """

    def is_of(self, index: int, tensor: Tensor) -> bool:
        """Whether reference `index` is one to the memory of `tensor`."""
        reference = self.get(index)
        return reference is not None and getattr(reference, "cdata", reference) == tensor.untyped_storage()._cdata

    def among(self, storages: set[int]) -> set[int]:
        """The numbers of the references to one of these storages, each given as its ``_cdata``."""
        return {index for index, reference in self.items() if getattr(reference, "cdata", reference) in storages}

    def __del__(self) -> None:
        for reference in self.values():
            if type(reference) is int and _give_back is not None:
                _give_back(reference)


def graph_is_kept() -> bool | None:
    """Whether the backward that runs now was started with ``retain_graph=True``; None: unknown, or none runs."""
    if _keep_graph is None or (_graph_task is not None and _graph_task() == -1):
        return None
    return _keep_graph()


def in_backward() -> bool:
    """Whether a backward runs now on this thread, as it does in every replay; False where torch does not tell."""
    return _graph_task is not None and _graph_task() != -1


def in_functorch_transform() -> bool:
    """Whether a `torch.func` transform is active; False where torch does not tell."""
    return _functorch_level is not None and _functorch_level() is not None


def innermost_saved_tensor_hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """The (pack, unpack) pair that saved tensors go to at this point; None for none, or where torch cannot tell."""
    if _top_hooks is None:
        warn_once("This torch cannot tell which saved-tensor hooks are active: offloading inside a checkpointed region "
                  "is then refused only where the modules show it.")  # fmt: skip
        return None
    return _top_hooks(False)


_no_dispatch: Callable[[], Any] | None = _private(torch._C, "_DisableTorchDispatch")
_no_function: Callable[[], Any] | None = _private(torch._C, "DisableTorchFunction")


@contextlib.contextmanager
def unseen() -> Iterator[bool]:
    """Within it no mode sees what runs, neither ours nor a caller's: counters, tracers and policies count as without.

    Gives whether that is so; False, with one warning, where this torch has no such switch.
    """
    if _no_dispatch is None or _no_function is None:
        warn_once("This torch cannot hide operators from its modes: replays are not verified.")
        yield False
        return
    with _no_dispatch(), _no_function():
        yield True


def is_fake(tensor: Tensor) -> bool:
    """Whether `tensor` is a `FakeTensor`, which has a shape and no values."""
    module = sys.modules.get("torch._subclasses.fake_tensor")
    return module is not None and isinstance(tensor, module.FakeTensor)


def sparse_parts(tensor: Tensor) -> list[Tensor]:
    """The plain tensors that a sparse tensor is made of, without making a COO tensor's indices unique."""
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    by_row = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
    pointers = (
        (tensor.crow_indices(), tensor.col_indices()) if by_row else (tensor.ccol_indices(), tensor.row_indices())
    )
    return [*pointers, tensor.values()]


@contextlib.contextmanager
def without_innermost_saved_tensor_hooks() -> Iterator[None]:
    """Within it, saved tensors go to the hooks around the innermost ones, or to none.

    Where torch cannot take hooks away, they stay.
    """
    hooks = _top_hooks(False) if _top_hooks is not None and _pop_hooks is not None and _push_hooks is not None else None
    if hooks is None:
        yield
        return
    _pop_hooks()  # type: ignore[misc]
    try:
        yield
    finally:
        _push_hooks(*hooks)  # type: ignore[misc]


def version_of(tensor: Tensor) -> int | None:
    """How often `tensor`, or a tensor that shares its version counter, was changed in place.

    None where nothing is counted (inference tensors, or a torch without the name): an in-place change of such a
    tensor cannot be noticed, as autograd itself does not notice it.
    """
    if tensor.is_inference():
        return None
    return getattr(tensor, "_version", None)


def sequence_number(node: Any) -> int:
    """When `node` of a graph was made: later ones have larger numbers."""
    number: int = node._sequence_nr()
    return number


def use_count(tensor: Tensor) -> int | None:
    """How many hold `tensor`, autograd's buffers among them; None where torch does not tell."""
    count = getattr(tensor, "_use_count", None)
    return None if count is None else count()


def storage_use_count(tensor: Tensor) -> int | None:
    """How many hold the storage of `tensor`, the caller's own view of it among them; None where torch does not tell."""
    count = _private(torch._C, "_storage_Use_Count")
    return None if count is None else count(tensor.untyped_storage()._cdata)


def generator_id(generator: torch.Generator) -> int:
    """What two Python objects of one generator have in common; operators are given another object than their caller.

    Where torch does not tell, the object's own id.
    """
    return getattr(generator, "_cdata", id(generator))


def generator_address(generator: torch.Generator) -> int | None:
    """Where in memory the generator itself lies, in C++; None where torch does not tell."""
    return getattr(generator, "_cdata", None)


def base_of(tensor: Tensor) -> Tensor | None:
    """The tensor that `tensor` is a differentiable view of; None for no view."""
    return getattr(tensor, "_base", None)


_context_takes_output = "op_output" in inspect.signature(SelectiveCheckpointContext).parameters  # not in 2.11


def selective_context(output: Any) -> SelectiveCheckpointContext:
    """What a policy function for PyTorch's selective contexts is given in forward, ``op_output`` included."""
    if _context_takes_output:
        return SelectiveCheckpointContext(is_recompute=False, op_output=output)
    context = SelectiveCheckpointContext(is_recompute=False)
    context.op_output = output
    return context


def op_output(context: Any) -> Any:
    """What the operator gave that a policy function is asked about by PyTorch's contexts; None in 2.11, which asks first."""
    return getattr(context, "op_output", None)


# --- Modes and attention back ends ------------------------------------------------------------------------------------

# The order that `sdpa_kernel([...], set_priority=True)` sets has no public getter. Without the private one, the order
# is left alone, and only the on/off flags are put back.
_get_priority: Callable[[], list[int]] | None = _private(torch._C, "_get_sdp_priority_order")
_set_priority: Callable[[list[int]], None] | None = _private(torch._C, "_set_sdp_priority_order")
# Without the stack of function modes only the default device is known to torch itself.
_mode_stack: Callable[[], list[Any]] | None = _private(torch, "overrides._get_current_function_mode_stack")
_mode_depth: Callable[[], int] | None = _private(torch._C, "_len_torch_function_stack")
_without_innermost_mode: Callable[[], Any] | None = _private(torch, "overrides._pop_mode_temporarily")


def sdp_priority() -> list[int] | None:
    """The order in which attention back ends are tried; None where it can't be read or can't be set."""
    return _get_priority() if _get_priority is not None and _set_priority is not None else None


def set_sdp_priority(order: list[int]) -> None:
    """Set what `sdp_priority` gave; nothing happens where it gives None."""
    if _set_priority is not None:
        _set_priority(order)


_backends = torch.backends
# The public functions are frames in Python around these, and they are asked twice for every region.
SWITCH_READERS: dict[str, Callable[[], Any]] = {
    "flash": _private(torch._C, "_get_flash_sdp_enabled") or _backends.cuda.flash_sdp_enabled,
    "mem_efficient": _private(torch._C, "_get_mem_efficient_sdp_enabled") or _backends.cuda.mem_efficient_sdp_enabled,
    "math": _private(torch._C, "_get_math_sdp_enabled") or _backends.cuda.math_sdp_enabled,
    "cudnn": _private(torch._C, "_get_cudnn_sdp_enabled") or _backends.cuda.cudnn_sdp_enabled,
    "deterministic": _private(torch._C, "_get_deterministic_algorithms") or torch.are_deterministic_algorithms_enabled,
    "warn_only": _private(torch._C, "_get_deterministic_algorithms_warn_only")
    or torch.is_deterministic_algorithms_warn_only_enabled,
    "matmul_precision": _private(torch._C, "_get_float32_matmul_precision") or torch.get_float32_matmul_precision,
    "mkldnn": _private(torch._C, "_get_mkldnn_enabled") or (lambda: _backends.mkldnn.enabled),
}
"""What tells the state of torch's global switches: of SDPA's kernels, of deterministic algorithms, ..."""


below_autograd: Callable[[], contextlib.AbstractContextManager[Any]] | None = _private(
    torch._C, "_AutoDispatchBelowAutograd"
)
"""Operators called within it are not differentiated: they go to the dispatch modes as they are, also those that autograd
would take apart. None where torch has no such thing. Seen in all."""


def direct_call(op: Any) -> Callable[..., Any]:
    """What `op` is when it is called, without the frame in Python around it; `op` itself where torch has no such thing."""
    inside = getattr(op, "_op", None) if type(op) is OpOverload else None
    return op if inside is None else inside


def function_modes() -> tuple[Any, ...]:
    """The active `TorchFunctionMode`s, outermost first; none, with one warning, where torch has no list of them."""
    if _mode_depth is not None and _mode_depth() == 0:
        return ()
    if _mode_stack is None:
        warn_once("This torch has no list of active function modes: replay runs without those of the forward.")
        return ()
    return tuple(_mode_stack())


@contextlib.contextmanager
def without_function_modes() -> Iterator[None]:
    """Within it no `TorchFunctionMode` is active; with one warning they stay, where torch can't take them off."""
    with contextlib.ExitStack() as stack:
        if _mode_depth is None or _without_innermost_mode is None:
            warn_once("This torch cannot take function modes off: replay runs with those of the backward as well.")
        else:
            for _ in range(_mode_depth()):
                stack.enter_context(_without_innermost_mode())
        yield


# --- Operators --------------------------------------------------------------------------------------------------------


inductor_writes_blocks = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 12)
"""Whether inductor compiles functions that write blocks in place; that of 2.11 ends with ``KeyError: 'buf1'``."""


def higher_order_op(name: str) -> Any | None:
    """``flex_attention`` or ``inductor_compiled_code``; None for another name, or, with one warning, where it moved."""
    module = {"flex_attention": "flex_attention", "inductor_compiled_code": "wrap"}.get(name)
    if module is None:
        return None
    try:
        return getattr(importlib.import_module(f"torch._higher_order_ops.{module}"), name)
    except (ImportError, AttributeError):
        warn_once(f"torch {torch.__version__} has no higher-order operator {name!r} where we know it: it isn't saved.")
        return None


def partitioner_compute_intensive_ops() -> list[Any] | None:
    """The operators that the compiler's partitioner holds expensive; None, with one warning, where it has no list."""
    try:
        partitioners = importlib.import_module("torch._functorch.partitioners")
        return list(partitioners.get_default_op_list().compute_intensive_ops)
    except (ImportError, AttributeError):
        warn_once(
            f"torch {torch.__version__} has no partitioners.get_default_op_list: the built-in list of "
            "compute-intensive operators is used instead."
        )
        return None


def registered_ops() -> list[str]:
    """``"aten::mm"`` and so on, for near matches in errors; empty where torch has no list, and errors have no hint."""
    schemas = _private(torch._C, "_jit_get_all_schemas")
    return sorted({schema.name for schema in schemas()}) if schemas is not None else []


def foreach_mul() -> Callable[[list[Tensor], Tensor], None] | None:
    """The fused loop that multiplies every tensor of a list in place; None where absent: multiply one by one."""
    return getattr(torch, "_foreach_mul_", None)


def shape_only(
    cls: type[Tensor], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device,
    stride: tuple[int, ...] | None = None,
) -> Any:  # fmt: skip
    """A `cls` that looks like a tensor of these and holds nothing; `cls` answers all that is done with it.

    Without the name: one NaN, expanded, which cannot be made where tensors are fake. Seen in all.
    """
    make = _private(Tensor, "_make_wrapper_subclass")
    if make is not None:
        return make(cls, shape, stride, dtype=dtype, device=device)
    return torch.full((), float("nan"), dtype=dtype, device=device).expand(shape).as_subclass(cls)


FAKE_LOGGER = "torch._subclasses.fake_tensor"
"""The logger of the fake mode; where it has another name, what it logs is seen."""


@contextlib.contextmanager
def quiet_fake_tensors() -> Iterator[None]:
    """Within it, an operator that fails on fake tensors raises, and torch does not print the traceback besides."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def fake_tensor_types() -> tuple[type[Any], type[Any]]:
    """`FakeTensor` and `FakeTensorMode`: private by path, though documented and used by exporters.

    Raises:
        ImportError: a release that has moved them; planning needs them.
    """
    try:
        module = importlib.import_module("torch._subclasses.fake_tensor")
        return module.FakeTensor, module.FakeTensorMode
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"torch {torch.__version__} has no torch._subclasses.fake_tensor, which planning needs to run a model "
            f"without memory. Use {RELEASES}."
        ) from error


def fake_parameter(mode: Any, like: Tensor, dtype: torch.dtype) -> Any:
    """A parameter of the fake `mode` on the CPU, with the shape, strides and `requires_grad` of `like`; None where torch has
    no such switch as `unseen` needs.

    The public way goes through every active mode three times, and a model has thousands of parameters.
    """
    if _no_dispatch is None or _no_function is None:
        return None
    with _no_dispatch(), _no_function():
        elements = torch.empty_strided(like.shape, like.stride(), dtype=dtype, device="meta")
        made = fake_tensor_types()[0](mode, elements, torch.device("cpu"))
        made._is_param = True
        return made.requires_grad_(like.requires_grad)


# --- The compiler -----------------------------------------------------------------------------------------------------


def disable_dynamo_lru_cache() -> None:
    """Make Dynamo try compiled graphs in the order they were made; where it can't, that stays (one warning).

    With several microbatches in flight, its most-recently-used order may pick a dynamic-shape graph for a region whose
    forward ran the static one.
    """
    try:
        importlib.import_module("torch._C._dynamo.eval_frame")._set_lru_cache(False)
    except (ImportError, AttributeError):
        warn_once(
            "Compiled selective checkpointing asked Dynamo for a stable graph order; this torch has no such switch."
        )


_Function = TypeVar("_Function", bound=Callable[..., Any])
_eval_frame: Any = _private(torch._C, "_dynamo.eval_frame")


def left_to_python(function: _Function) -> _Function:
    """`function`, which Dynamo shall neither compile nor compile pieces of, where it is called from uncompiled code.

    `torch.compiler.disable` means the same and costs microseconds a call, which saved-tensor hooks and dispatch modes
    can't afford. This marks the code object once. Where torch has no such mark: `torch.compiler.disable`.
    """
    mark, strategy = getattr(_eval_frame, "set_code_exec_strategy", None), _private(_eval_frame, "_FrameExecStrategy")
    action = _private(_eval_frame, "_FrameAction.SKIP")
    if mark is None or strategy is None or action is None:
        return torch.compiler.disable(function)
    mark(function.__code__, strategy(action, action))  # itself; and what it calls
    return function


HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""The tables of a module's hooks, in the order in which a step calls them."""


def _of_fsdp(hook: Any) -> bool:
    """Whether `hook` gathers or frees the parameters of an FSDP2 unit."""
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp")


def has_hooks_but_fsdp(module: nn.Module) -> bool:
    """Whether calling `module` runs hooks besides those by which FSDP2 gathers and frees its parameters."""
    return any(not _of_fsdp(hook) for name in HOOKS for hook in (getattr(module, name, None) or {}).values())


@contextlib.contextmanager
def _hooks_where(module: nn.Module, keep: Callable[[Any], bool]) -> Iterator[None]:
    """Within it, a call of `module` runs only the forward hooks that `keep` accepts."""
    before = {name: getattr(module, name) for name in HOOKS[:2]}
    for name, hooks in before.items():
        setattr(module, name, type(hooks)((key, hook) for key, hook in hooks.items() if keep(hook)))
    try:
        yield
    finally:
        for name, hooks in before.items():
            setattr(module, name, hooks)


@contextlib.contextmanager
def without_fsdp_hooks(module: Any) -> Iterator[None]:
    """Within it, a call of `module`, whose parameters are gathered already, runs all hooks but FSDP2's."""
    if not isinstance(module, nn.Module):
        yield
        return
    with _hooks_where(module, lambda hook: not _of_fsdp(hook)):
        yield


def _casting_hooks(unit: nn.Module, policy: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """What FSDP2 does in forward to the inputs and the outputs of `unit`, as a pre-hook and a hook."""
    apply = importlib.import_module("torch.distributed.utils")._apply_to_tensors

    def cast(value: Any, dtype: torch.dtype | None) -> Any:
        return value if dtype is None else apply(lambda t: t.to(dtype) if t.is_floating_point() else t, value)

    def inputs(module: nn.Module, args: Any, kwargs: Any) -> Any:
        dtype = policy.param_dtype if policy.cast_forward_inputs else None
        return cast(args, dtype), cast(kwargs, dtype)

    return inputs, lambda module, args, output: cast(output, policy.output_dtype)


def cast_in_fsdp_replay(root: nn.Module | None, stack: contextlib.ExitStack) -> None:
    """Until `stack` ends, FSDP2 units in `root` cast inputs and outputs in backward as they do in forward.

    In 2.11 a unit whose backward has begun gathers its parameters for a replay and casts nothing, so that the replay
    computes in other dtypes than forward did. Since 2.13 it casts, and this does nothing.
    """
    state_type = _private(sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_state"), "FSDPState")
    if root is None or state_type is None or hasattr(state_type, "_cast_forward_inputs"):
        return
    for module in root.modules():
        policy = getattr(getattr(module, "_get_fsdp_state", lambda: None)(), "_mp_policy", None)
        if policy is not None:
            inputs, output = _casting_hooks(module, policy)
            stack.callback(module.register_forward_pre_hook(inputs, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(output).remove)


def call_in_fsdp_unit(module: Any, inside: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    """``inside(hidden)`` between the FSDP2 hooks of `module`, which run once however often `inside` calls it.

    All other hooks of `module` run at each of these calls, and only then. Where `module` has no hooks of FSDP2 (it lies
    in another module's unit, or in none), this is ``inside(hidden)``. Seen in 2.11, 2.13 and 2.15.
    """
    pre = module._forward_pre_hooks if isinstance(module, nn.Module) else {}
    if not any(map(_of_fsdp, pre.values())):
        return inside(hidden)
    everything = {name: getattr(module, name) for name in HOOKS[:2]}
    own_forward = module.__dict__.get("forward")

    def forward(hidden: Tensor) -> Tensor:
        only_fsdp = {name: getattr(module, name) for name in everything}
        _put(module, "forward", own_forward)
        for name, hooks in everything.items():
            setattr(module, name, hooks)
        try:
            with without_fsdp_hooks(module):
                # Complex, because FSDP2 casts real outputs to `MixedPrecisionPolicy.output_dtype`: a loss loses its bits.
                result = inside(hidden)
                return torch.complex(result, torch.zeros_like(result))
        finally:
            for name, hooks in only_fsdp.items():
                setattr(module, name, hooks)

    with _hooks_where(module, _of_fsdp):
        module.forward = forward
        try:
            return module(hidden).real
        finally:
            _put(module, "forward", own_forward)


def _put(module: nn.Module, name: str, own: Any) -> None:
    """Give `module` its class's method `name`, or `own`, which was set on the instance."""
    if own is None:
        module.__dict__.pop(name, None)
    else:
        module.__dict__[name] = own


@contextlib.contextmanager
def answering_calls(module: nn.Module, answer: Callable[..., Any] | None) -> Iterator[None]:
    """Within it, calling `module` calls `answer` instead, without any hook; None: the module itself again, uncompiled.

    Seen in 2.11, 2.13 and 2.15.
    """
    name, compiled = "_call_impl", "_compiled_call_impl"  # the second, if there is one, is called instead of the first
    if not callable(getattr(nn.Module, name, None)):
        raise RuntimeError(f"This torch has no nn.Module.{name}, which calls are answered through; use {RELEASES}.")
    before, graph = module.__dict__.get(name), module.__dict__.get(compiled)
    _put(module, name, answer)
    _put(module, compiled, None)
    try:
        yield
    finally:
        _put(module, name, before)
        _put(module, compiled, graph)


_tracing_context: Callable[[], Any] | None = _private(torch, "_guards.TracingContext.try_get")


def graph_is_being_made() -> bool:
    """Whether this is called from the making of a compiled graph: from code that Dynamo traces, or by what comes after.

    In 2.11 `torch.compiler.is_compiling` says so only to code that Dynamo traces. Where torch has no tracing context,
    it alone is asked.
    """
    return torch.compiler.is_compiling() or (_tracing_context is not None and _tracing_context() is not None)


def is_compiled(module: nn.Module) -> bool:
    """Whether `nn.Module.compile` was called on `module`, so that its call is one compiled graph; False if untold."""
    return getattr(module, "_compiled_call_impl", None) is not None


def async_tensor_parallel() -> bool:
    """Whether inductor fuses collectives into matmuls; off where it is not imported or has no such switch."""
    return bool(getattr(sys.modules.get("torch._inductor.config"), "_micro_pipeline_tp", False))


def compiler_budget(share: float) -> contextlib.AbstractContextManager[Any]:
    """Within it, the compiler keeps `share` of a graph's activations. Raises AttributeError where there is no budget."""
    config = importlib.import_module("torch._functorch.config")
    if not hasattr(config, "activation_memory_budget"):
        raise AttributeError(f"torch {torch.__version__} has no activation_memory_budget. Use {RELEASES}.")
    return config.patch(activation_memory_budget=share)


# --- Experts ----------------------------------------------------------------------------------------------------------


def grouped_mm(rows: Tensor, weights: Tensor, counts: Sequence[int], ends: Tensor) -> Tensor:
    """Rows (R, K), sorted by group, times the matrix of each one's group, (G, K, N) → (R, N).

    One kernel where torch has one for these: ``F.grouped_mm``, or ``torch._grouped_mm`` before it was public; bfloat16 on
    CUDA from Ampere on, any float on the CPU, rows of 16 bytes or a multiple. Else a loop over the groups.

    Args:
        counts: rows of each group, known on the host.
        ends: (G,) int32 where the rows of each group end, on the device: making it here would wait for that.
    """
    kernel = getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
    if kernel is not None and rows.shape[0] and _has_grouped_kernel(rows, weights):
        return kernel(rows, weights, offs=ends)
    # Also without any row: the weights get gradients of zero then, and every rank reduces the same.
    parts = zip(rows.split(list(counts)), weights.unbind(0), strict=True)
    found = [part @ matrix for index, (part, matrix) in enumerate(parts) if part.shape[0] or index == 0]
    return torch.cat(found)


def _has_grouped_kernel(rows: Tensor, weights: Tensor) -> bool:
    if rows.dtype != weights.dtype or any(size * rows.element_size() % 16 for size in weights.shape[1:]):
        return False
    if rows.device.type == "cuda":
        return rows.dtype == torch.bfloat16 and torch.cuda.get_device_capability(rows.device) >= (8, 0)
    return rows.device.type == "cpu"


# --- Ranks ------------------------------------------------------------------------------------------------------------


def loss_is_parallel() -> bool | None:
    """Whether this is under `torch.distributed.tensor.parallel.loss_parallel`; None where torch does not tell.

    Seen in all: the context registers its operators with the dispatcher of `DTensor`.
    """
    from torch.distributed.tensor import DTensor

    handlers = getattr(getattr(DTensor, "_op_dispatcher", None), "_custom_op_handlers", None)
    return None if handlers is None else torch.ops.aten.nll_loss_forward.default in handlers


def unwaited_collectives() -> int:
    """How many functional collectives of this process are under way and not yet waited for; 0 where torch can't tell."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return 0
    count = _private(torch._C, "_distributed_c10d._get_work_registry_size")
    return 0 if count is None else count()


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that `mesh` was sliced from; `mesh` itself where torch does not tell."""
    return getattr(mesh, "_get_root_mesh", lambda: mesh)()


def flatten_mesh(mesh: DeviceMesh, name: str, before: DeviceMesh | None) -> DeviceMesh | None:
    """All axes of `mesh` as one, called `name`, behind the axis `before` where there is one; None: torch can't."""
    if not hasattr(mesh, "_flatten") or not hasattr(DeviceMesh, "_concatenate"):
        return None
    flat = mesh._flatten(name)
    return flat if before is None else DeviceMesh._concatenate([before, flat])


def as_dtensor_type(kind: type[DTensor], tensor: DTensor) -> DTensor:
    """`tensor`, without a history, as a `kind`: the same memory and placements. Looked at in 2.13 alone."""
    return kind(tensor._local_tensor, tensor._spec, requires_grad=False)


def fsdp_param_groups(module: nn.Module) -> Iterator[Any]:
    """FSDP2's parameter groups at `module`; none where this torch is different."""
    state = getattr(module, "_get_fsdp_state", lambda: None)()
    yield from getattr(state, "_fsdp_param_groups", ())


def free_last_gather(module: nn.Module) -> None:
    """Free the flat buffer that the FSDP2 unit at `module` was gathered into last, of which its parameters are copies.

    FSDP2 keeps it until the next unit is gathered in forward, also where the forward is a replay in backward, behind which
    there may be none before the next step. Nothing happens where torch keeps no such buffer, or has other names for it.
    """
    for group in fsdp_param_groups(module):
        comm, wait = getattr(group, "comm_ctx", None), getattr(group, "_wait_all_gather_streams_on_event", None)
        kept = getattr(comm, "all_gather_state", None)
        if kept is not None and wait is not None:
            wait(kept.event)  # the streams of gathers get its memory: not before it is copied out
            comm.all_gather_state = None  # type: ignore[union-attr]


def accumulated_gradient(fsdp_param: Any) -> Tensor | None:
    """What an FSDP2 parameter has accumulated, whole, without communication; None: nothing, or torch does not tell."""
    return getattr(fsdp_param, "unsharded_accumulated_grad", None)


def accumulate_zeros(fsdp_param: Any, dtype: torch.dtype) -> None:
    """Give an FSDP2 parameter without an accumulated gradient one of zeros, in the layout of the whole parameter.

    In 2.15 the accumulated gradient is that of the whole parameter; before, an attribute of its own. Nothing happens
    where torch has no whole parameter: before the first forward, or in a release that names it differently.
    """
    whole = getattr(fsdp_param, "_unsharded_param", None)
    if whole is None:
        return
    # Its storage may be freed by now; shape, device and (under tensor parallelism) DTensor layout are not.
    zeros = torch.zeros_like(whole.detach(), dtype=dtype)
    if isinstance(getattr(type(fsdp_param), "unsharded_accumulated_grad", None), property):
        whole.grad = zeros
    elif hasattr(fsdp_param, "unsharded_accumulated_grad"):
        fsdp_param.unsharded_accumulated_grad = zeros


def forget_meshes() -> None:
    """Empty what DTensor remembers of operators by mesh: of one that is made anew it would take the process groups of the
    old one. Where torch remembers nothing, or has other names for it, nothing happens. Seen in 2.13."""
    for where, name in (("debug", "_clear_sharding_prop_cache"), ("_redistribute", "_gen_transform_infos.cache_clear")):
        clear = None
        with contextlib.suppress(ImportError):
            clear = _private(importlib.import_module(f"torch.distributed.tensor.{where}"), name)
        if clear is not None:
            clear()


def fake_store() -> Any:
    """The store of the process-group back end ``"fake"``, which sends nothing, from PyTorch's testing package.

    Raises:
        RuntimeError: this torch has none where we know it.
    """
    try:
        return importlib.import_module("torch.testing._internal.distributed.fake_pg").FakeStore()
    except (ImportError, AttributeError) as error:
        raise RuntimeError(f"torch {torch.__version__} has no fake process group where we know it.") from error


class ConnectedStage(PipelineStage):
    """torch's pipeline stage, which opens no connection to its own rank.

    torch 2.11 connects each stage with its neighbours before the first step. In a V-shaped schedule a neighbour may be on
    the same rank, and gloo has no connection to that. Later releases do not ask for these operations.
    """

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        asked: list[Any] = getattr(super(), "_get_init_p2p_neighbors_ops", list)()
        return [op for op in asked if op.group_peer != self.group_rank]

    def _warmup_backward_result(self, received_result: Tensor | None = None) -> Tensor:
        """Whether all stages know what they send and receive: under the ``fake`` back end the others say nothing. From torch
        2.13 on."""
        if torch.distributed.get_backend(self.group) == "fake":
            return torch.ones(1, dtype=torch.int32)
        found: Tensor = super()._warmup_backward_result(received_result)
        return found


def splits_compiled_backward() -> bool:
    """Whether a pipeline schedule can cut the backward of a compiled layer in two: 2.11.0 asks such a node for metadata
    that it has not got; 2.13.0 and 2.15.0 do not."""
    return tuple(map(int, torch.__version__.split("+")[0].split(".")[:2])) >= (2, 13)


def backward_in_halves() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The two halves of a backward as a pipeline's schedules run them: gradients of inputs first, of weights later.

    Raises:
        RuntimeError: this torch has them elsewhere.
    """
    try:
        halves = importlib.import_module("torch.distributed.pipelining._backward")
        return halves.stage_backward_input, halves.stage_backward_weight
    except (ImportError, AttributeError) as error:
        raise RuntimeError(
            f"torch {torch.__version__} does not show how it cuts a backward in two, so that the bytes which are kept "
            "between the halves can't be predicted. Use a schedule that does not: 1f1b or interleaved_1f1b."
        ) from error


def schedule_from_file(path: str, stages: Any, microbatches: int, **options: Any) -> Any:
    """torch's schedule for what the CSV file at `path` says.

    Raises:
        RuntimeError: this torch has no such schedule where we know it.
    """
    from torch.distributed.pipelining import schedules

    runtime = getattr(schedules, "_PipelineScheduleRuntime", None)
    if runtime is None or not hasattr(runtime, "_load_csv"):
        raise RuntimeError(f"torch {torch.__version__} reads no schedule from a file; name one, such as '1f1b'.")
    schedule = runtime(stages, microbatches, **options)
    schedule._load_csv(path)
    return schedule
