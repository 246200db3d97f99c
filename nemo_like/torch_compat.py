"""The private names of PyTorch that this package uses: the only module that imports or reads one, ordered by topic.

They are those of torch 2.13.0, 2.14.1 and 2.15.0, unless noted otherwise, and are used as they are: in a release
without one, the import or the call fails and names it. Where more is known, the error names the feature that requires
it. Whoever adds a release looks here first. Attributes of objects that everybody reads (`nn.Module._modules` and its
like, `Tensor._version`, an operator's `_schema`) stay where they are used; `tests/test_torch_compat.py` has the list.
"""

import contextlib
import importlib
import itertools
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import partial, wraps
from operator import attrgetter, methodcaller
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple, Self, TypeVar

import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel.loss import _disable_custom_loss_ops, _enable_custom_loss_ops
from torch.fx import GraphModule

from nemo_like._util.code import callers

# --- Documented for users, though the module is underscored: aliases. ---------------------------------------------
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket  # isort: skip
from torch.utils import _python_dispatch  # isort: skip
from torch.utils._python_dispatch import TorchDispatchMode  # isort: skip
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten  # isort: skip

# PyTorch's activation wrappers, which others recognise ours by, since ours derive from them.
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

RELEASES = "torch 2.13 to 2.15"  # The releases that error messages recommend.

PYTREE_LOGGER = tree_map.__module__  # The logger that warns of classes that others register as trees.


def forward_hooks(module: nn.Module) -> tuple[Callable[..., Any], ...]:
    """Return the hooks that `register_forward_hook` has put on `module`, in that order."""
    return tuple(module._forward_hooks.values())


# The hooks of all modules, in tables that are named as a module's own.
GLOBAL_HOOKS: dict[str, Any] = {
    "_forward_pre_hooks": nn.modules.module._global_forward_pre_hooks,
    "_forward_hooks": nn.modules.module._global_forward_hooks,
}


# The module inside one of PyTorch's activation wrappers, ours among them.
wrapped_module: Callable[[nn.Module], nn.Module] = attrgetter("_checkpoint_wrapped_module")


# Within it, no dispatch mode that was entered before sees or holds anything; one that is entered inside does.
without_dispatch_modes: Callable[[], contextlib.AbstractContextManager[Any]] = _python_dispatch._disable_current_modes


class DispatchMode(TorchDispatchMode):
    """A mode without the function that torch puts around ``__torch_dispatch__`` to keep Dynamo out.

    It is a frame of its own, costs 1.5 µs on every operator, and imports Dynamo. Without it Dynamo would compile the method
    where it left a frame around to eager, so the method is marked, once.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "__torch_dispatch__" in cls.__dict__:
            left_to_python(cls.__torch_dispatch__)


# --- Autograd ---------------------------------------------------------------------------------------------------------

_autograd: Any = torch._C._autograd


def autograd_node() -> Any:
    """The node whose backward runs on this thread; None: none does. Not looked at in 2.15."""
    return torch._C._current_autograd_node()


def next_sequence_number() -> int:
    """The number that autograd's next node on this thread gets (``node._sequence_nr()``). Not looked at in 2.15."""
    return torch.autograd._get_sequence_nr()


def save_tensor(tensor: Tensor) -> Callable[[], Tensor]:
    """Have autograd save `tensor`, hooks and version check included; the result gives it back."""
    return _autograd._make_saved_tensor(tensor, is_output=False).unpack


def graph_is_kept() -> bool | None:
    """Return whether the backward that runs now was started with ``retain_graph=True``; None: none runs."""
    return _autograd._get_current_graph_task_keep_graph() if in_backward() else None


def in_backward() -> bool:
    """Return whether a backward runs now on this thread, as it does in every recomputation."""
    return torch._C._current_graph_task_id() != -1


def in_functorch_transform() -> bool:
    """Return whether a `torch.func` transform is active."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def innermost_saved_tensor_hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """The (pack, unpack) pair that saved tensors go to at this point; None for none."""
    return _autograd._top_saved_tensors_default_hooks(False)


@contextlib.contextmanager
def unseen() -> Iterator[None]:
    """Within it no mode sees operators, ours or a caller's: counters, tracers and policies count as without."""
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        yield


def is_fake(tensor: Tensor) -> bool:
    """Return whether `tensor` is a `FakeTensor`, which has a shape and no values."""
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
    """Within it, saved tensors go to the hooks around the innermost ones, or to none."""
    hooks = innermost_saved_tensor_hooks()
    if hooks is None:
        yield
        return
    _autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        _autograd._push_saved_tensors_default_hooks(*hooks)


def version_of(tensor: Tensor) -> int | None:
    """Return the number of times that `tensor`, or a tensor that shares its version counter, was changed in place.

    None where nothing is counted (inference tensors): an in-place change of such a tensor cannot be noticed, as autograd
    itself does not notice it.
    """
    return None if tensor.is_inference() else tensor._version


# When a node of a graph was made: later ones have larger numbers.
sequence_number: Callable[[Any], int] = methodcaller("_sequence_nr")


# The number of holders of a tensor, autograd's buffers among them.
use_count: Callable[[Tensor], int] = Tensor._use_count  # type: ignore[attr-defined]


def storage_use_count(tensor: Tensor) -> int:
    """Return the number of holders of the storage of `tensor`, the caller's own view of it among them."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


# The address in memory of a generator itself, in C++. Two Python objects of one generator have it in common; operators
# are given another object than their caller.
generator_address: Callable[[torch.Generator], int] = attrgetter("_cdata")

# The tensor that a tensor is a differentiable view of; None for no view.
base_of: Callable[[Tensor], Tensor | None] = attrgetter("_base")


# --- Modes and attention back ends ------------------------------------------------------------------------------------

# The order in which attention back ends are tried, which `sdpa_kernel([...], set_priority=True)` sets: it has no public
# getter.
sdp_priority: Callable[[], list[int]] = torch._C._get_sdp_priority_order
set_sdp_priority: Callable[[list[int]], None] = torch._C._set_sdp_priority_order


def stop_unless(condition: Tensor, message: str) -> None:
    """Raise NotImplementedError where a 0-dim `condition` is False. On an accelerator the host does not wait: the device
    stops, with `message`, before it runs work queued after.

    CUDA refuses messages of 255 characters and more at the call, whatever the condition is; CPUs and meta tensors take them.

    Raises:
        ValueError: `message` has 250 characters or more, on any device.
    """
    if len(message) >= 250:
        raise ValueError(f"message has {len(message)} characters, and an accelerator takes fewer than 250: {message!r}")
    if condition.device.type != "cpu":
        torch._assert_async(condition, message)
    elif not condition:
        raise NotImplementedError(message)


# Attention kernels by their number in `torch.nn.attention.SDPBackend`.
SDP_KERNELS = {1: "flash", 2: "mem_efficient", 0: "math", 3: "cudnn"}


def fused_attention_kernel(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> str:
    """Return the kernel that runs attention of (B, H, L, D) queries over (B, KV heads, M, D) keys and values: ``cpu``,
    ``flash``, ``cudnn`` or ``mem_efficient``, in the place of kernels without log-sum-exps as well."""
    if query.device.type == "cpu":
        return "cpu"
    number = torch._fused_sdp_choice(
        query, key, value, None, 0.0, causal, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )
    name = SDP_KERNELS.get(number, "math")
    return "mem_efficient" if name == "math" else name


# The public functions are frames in Python around these, and they are asked twice for every region.
# Functions that read the state of torch's global switches: of SDPA's kernels, of deterministic algorithms, ...
SWITCH_READERS: dict[str, Callable[[], Any]] = {
    "flash": torch._C._get_flash_sdp_enabled,
    "mem_efficient": torch._C._get_mem_efficient_sdp_enabled,
    "math": torch._C._get_math_sdp_enabled,
    "cudnn": torch._C._get_cudnn_sdp_enabled,
    "deterministic": torch._C._get_deterministic_algorithms,
    "warn_only": torch._C._get_deterministic_algorithms_warn_only,
    "matmul_precision": torch._C._get_float32_matmul_precision,
    "mkldnn": torch._C._get_mkldnn_enabled,
}


# Operators called within it are not differentiated: they go to the dispatch modes as they are, also those that
# autograd would take apart.
below_autograd: Callable[[], contextlib.AbstractContextManager[Any]] = torch._C._AutoDispatchBelowAutograd


def direct_call(op: Any) -> Callable[..., Any]:
    """Return the function that a call of `op` runs, without its frame in Python; `op` itself if not an overload."""
    return op._op if type(op) is OpOverload else op


def function_modes() -> tuple[Any, ...]:
    """The active `TorchFunctionMode`s, outermost first."""
    return tuple(torch.overrides._get_current_function_mode_stack()) if torch._C._len_torch_function_stack() else ()


@contextlib.contextmanager
def without_function_modes() -> Iterator[None]:
    """Within it no `TorchFunctionMode` is active."""
    with contextlib.ExitStack() as stack:
        for _ in range(torch._C._len_torch_function_stack()):
            stack.enter_context(torch.overrides._pop_mode_temporarily())
        yield


# --- Operators --------------------------------------------------------------------------------------------------------


def higher_order_op(name: str) -> Any | None:
    """``flex_attention`` or ``inductor_compiled_code``; None for another name."""
    module = {"flex_attention": "flex_attention", "inductor_compiled_code": "wrap"}.get(name)
    return None if module is None else getattr(importlib.import_module(f"torch._higher_order_ops.{module}"), name)


# The operators that the compiler's partitioner holds expensive, as read in 2.13 and 2.15. Its module imports inductor's
# caches, torch.export's archives and networkx, 0.3 s for eleven names. `tests/test_torch_compat.py` compares the two.
PARTITIONER_COMPUTE_INTENSIVE_OPS = (
    "aten.mm",
    "aten.convolution",
    "aten.convolution_backward",
    "aten.bmm",
    "aten.addmm",
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_efficient_attention",
    "aten._flash_attention_forward",
    "aten._efficient_attention_forward",
    "aten.upsample_bilinear2d",
    "aten._scaled_mm",
)


def registered_ops() -> list[str]:
    """``"aten::mm"`` and so on, for near matches in errors."""
    return sorted({schema.name for schema in torch._C._jit_get_all_schemas()})


# Multiplies every tensor of a list in place, in one fused loop.
foreach_mul: Callable[[list[Tensor], Tensor], None] = torch._foreach_mul_


def shape_only(
    cls: type[Tensor],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    stride: tuple[int, ...] | None = None,
) -> Any:
    """A `cls` that looks like a tensor of these and holds nothing; `cls` answers all that is done with it."""
    return Tensor._make_wrapper_subclass(cls, shape, stride, dtype=dtype, device=device)


# The logger of the fake mode, which prints a traceback where an operator that fails on fake tensors raises.
FAKE_LOGGER = "torch._subclasses.fake_tensor"


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
    """A parameter of the fake `mode` on the CPU, with the shape, strides and `requires_grad` of `like`.

    Of a DTensor, one with such a part. The public way goes through every active mode three times, and a model has thousands
    of parameters.
    """
    part = local_part(like)
    with unseen():
        elements = torch.empty_strided(part.shape, part.stride(), dtype=dtype, device="meta")
        parameter = fake_tensor_types()[0](mode, elements, torch.device("cpu"))
        if isinstance(like, DTensor):
            layout: Any = like._spec
            meta = layout.tensor_meta._replace(dtype=dtype)
            parameter = DTensor(parameter, replace(layout, tensor_meta=meta), requires_grad=False)
        parameter._is_param = True
        return parameter.requires_grad_(like.requires_grad)


# --- Checkpoints ------------------------------------------------------------------------------------------------------


def checkpoint_globals() -> dict[str, Any]:
    """Return, by module and name, all that the ``.metadata`` of a checkpoint may refer to: classes of plain data, dtypes.

    The older names are those of torch up to 2.2, and of Python before and after 3.13.
    """
    from torch.distributed._shard.sharded_tensor import metadata as older
    from torch.distributed.checkpoint import filesystem, metadata

    allowed: dict[str, Any] = {
        f"torch.{name}": value for name, value in vars(torch).items() if type(value) is torch.dtype
    }
    allowed |= {
        f"builtins.{kind.__name__}": kind for kind in (bool, dict, float, frozenset, int, list, set, str, tuple)
    }
    for module in ("pathlib", "pathlib._local"):
        allowed |= {f"{module}.PosixPath": PurePosixPath, f"{module}.WindowsPath": PureWindowsPath}
    kinds = [kind for kind in vars(metadata).values() if getattr(kind, "__module__", None) == metadata.__name__]
    kinds += [filesystem._StorageInfo, older.TensorProperties, older.MEM_FORMAT_ENCODING]
    kinds += [torch.Size, torch.serialization._get_layout, OrderedDict]
    return allowed | {f"{kind.__module__}.{kind.__qualname__}": kind for kind in kinds}


# --- The compiler -----------------------------------------------------------------------------------------------------


_eval_frame: Any = torch._C._dynamo.eval_frame


def disable_dynamo_lru_cache() -> None:
    """Make Dynamo try compiled graphs in the order they were made.

    With several micro-batches in flight, its most-recently-used order may pick a dynamic-shape graph for a region whose
    forward ran the static one.
    """
    _eval_frame._set_lru_cache(False)


_Function = TypeVar("_Function", bound=Callable[..., Any])


def left_to_python(function: _Function) -> _Function:
    """`function`, which Dynamo shall neither compile nor compile pieces of, where it is called from uncompiled code.

    `torch.compiler.disable` means the same and costs microseconds a call, which saved-tensor hooks and dispatch modes
    can't afford. This marks the code object once.
    """
    skip = _eval_frame._FrameAction.SKIP
    strategy = _eval_frame._FrameExecStrategy(skip, skip)  # itself; and functions it calls
    _eval_frame.set_code_exec_strategy(function.__code__, strategy)
    return function


# `torch.compiler.disable`, which imports Dynamo where it decorates, a second. This does at the first call.
uncompiled = torch._disable_dynamo


# The tables of a module's hooks, in the order in which a step calls them.
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def _of_fsdp(hook: object) -> bool:
    """Return whether `hook` gathers or frees the parameters of an FSDP2 unit, or explains that they were not
    gathered."""
    return hook is explain_sharded_weights or str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp")


def explain_sharded_weights(module: nn.Module, _args: object, _output: object) -> None:
    """Explain, as a forward hook that is always called, torch's error for weights that FSDP2 has not gathered."""
    error = sys.exc_info()[1]
    if not isinstance(error, RuntimeError) or "got mixed torch.Tensor and DTensor" not in str(error):
        return
    advice = (
        f"{type(module).__name__} was called while its weights, or those of a part, were sharded: FSDP2 gathers them "
        "for the forward of the whole model, and a layer's for that of the layer. For another method, call "
        "torch.distributed.fsdp.register_fsdp_forward_method(model, 'encode') after parallelize. Where a layer uses "
        "weights of another, name the module that holds both: parallelize(..., layers=[...])."
    )
    if "FSDP2 gathers them" not in str(error):
        error.args = (f"{advice} ({error})",)


def cast_as_weight(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Cast, as autocast does on one rank, a layer's float32 tensors for a module outside of the layers.

    FSDP2 casts the inputs of a unit alone, and such a module is in the root's.
    """
    dtype: Any = module.weight.dtype
    return tuple(
        value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value for value in args
    )


def has_hooks_but_fsdp(module: nn.Module) -> bool:
    """Return whether calling `module` runs hooks besides those by which FSDP2 gathers and frees its parameters, and
    `cast_as_weight`."""
    return any(
        hook is not cast_as_weight and not _of_fsdp(hook)
        for name in HOOKS
        for hook in (getattr(module, name, None) or {}).values()
    )


@contextlib.contextmanager
def _with_tables(module: nn.Module, tables: Mapping[str, Any]) -> Iterator[None]:
    """Within it, `module` has these tables of hooks, by name."""
    before = {name: getattr(module, name) for name in tables}
    for name, hooks in tables.items():
        setattr(module, name, hooks)
    try:
        yield
    finally:
        for name, hooks in before.items():
            setattr(module, name, hooks)


def _hooks_where(module: nn.Module, keep: Callable[[Any], bool]) -> contextlib.AbstractContextManager[None]:
    """Within it, a call of `module` runs only the forward hooks that `keep` accepts."""
    every = {name: getattr(module, name) for name in HOOKS[:2]}
    return _with_tables(
        module,
        {name: type(hooks)((key, h) for key, h in hooks.items() if keep(h)) for name, hooks in every.items()},
    )


def only_fsdp_hooks(module: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Within it, a call of `module` runs FSDP2's hooks and no others."""
    return _hooks_where(module, _of_fsdp)


def without_fsdp_hooks(module: object) -> contextlib.AbstractContextManager[None]:
    """Within it, a call of `module`, whose parameters are gathered already, runs all hooks but FSDP2's."""
    if isinstance(module, nn.Module):
        return _hooks_where(module, lambda hook: not _of_fsdp(hook))
    return contextlib.nullcontext()


def call_in_fsdp_unit(module: Any, inside: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    """``inside(hidden)`` between the FSDP2 hooks of `module`, which run once however often `inside` calls it.

    All other hooks of `module` run at each of these calls, and only then. Where `module` has no hooks of FSDP2 (it is
    in another module's unit, or in none), this is ``inside(hidden)``.
    """
    pre = module._forward_pre_hooks if isinstance(module, nn.Module) else {}
    if not any(map(_of_fsdp, pre.values())):
        return inside(hidden)
    everything = {name: getattr(module, name) for name in HOOKS[:2]}
    own_forward = module.__dict__.get("forward")

    def forward(hidden: Tensor) -> Tensor:
        put_on_instance(module, "forward", own_forward)
        with _with_tables(module, everything), without_fsdp_hooks(module):
            # Complex, because FSDP2 casts real outputs to `MixedPrecisionPolicy.output_dtype`: a loss loses its bits.
            result = inside(hidden)
            return torch.complex(result, torch.zeros_like(result))

    with _hooks_where(module, _of_fsdp):
        module.forward = forward
        try:
            return module(hidden).real
        finally:
            put_on_instance(module, "forward", own_forward)


def put_on_instance(module: nn.Module, name: str, value: Any) -> None:
    """Give `module` the method `value`, called `name`; None: that of its class."""
    if value is None:
        module.__dict__.pop(name, None)
    else:
        module.__dict__[name] = value


@contextlib.contextmanager
def answering_calls(module: nn.Module, answer: Callable[..., Any] | None) -> Iterator[None]:
    """Within it, calling `module` calls `answer` instead, without any hook; None: the module itself again, uncompiled."""
    name, compiled = "_call_impl", "_compiled_call_impl"  # the second, if there is one, is called instead of the first
    if not callable(getattr(nn.Module, name, None)):
        raise RuntimeError(f"This torch has no nn.Module.{name}, which calls are answered through; use {RELEASES}.")
    before, graph = module.__dict__.get(name), module.__dict__.get(compiled)
    put_on_instance(module, name, answer)
    put_on_instance(module, compiled, None)
    try:
        yield
    finally:
        put_on_instance(module, name, before)
        put_on_instance(module, compiled, graph)


class _Wait(torch.autograd.Function):
    """The plain tensor of a collective that may not have ended, with the same gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.trigger_wait().detach()  # type: ignore[attr-defined]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


def _waited(value: Any) -> Any:
    """`value` with plain tensors in the place of collectives' results; a list, dict or object is changed in place."""
    if type(value) is AsyncCollectiveTensor:
        return _Wait.apply(value)
    if _is_lent(value):
        for key, item in _items(value):
            if (plain := _waited(item)) is not item:
                _put_item(value, key, plain)
        return value
    return _map_tuple(_waited, value)


def _state_in(owns: Sequence[dict[str, Any]]) -> Iterator[tuple[str, Tensor]]:
    """Parameters, buffers and tensors in attributes, by name; but statistics that a norm of torch reads in evaluation."""
    for own in owns:
        tables = own, own["_parameters"], {} if "num_batches_tracked" in own["_buffers"] else own["_buffers"]
        items = ((name, value) for table in tables for name, value in table.items())
        yield from ((name, value) for name, value in items if type(value) in (Tensor, nn.Parameter))


def compiled_call(
    function: Callable[..., Any], name: str, backend: str, recomputes: Sequence[nn.Module] = ()
) -> Callable[..., Any]:
    """Return `function`, the forward of a `name`, compiled; the compiled call gets plain tensors only.

    AOTAutograd of torch 2.13 drops the gradient of an `AsyncCollectiveTensor` that a graph gets, such as the output of an
    embedding whose vocabulary is split: it would never train. So the wait is an operator in front of the graph.

    recomputes: the modules of a graph with regions that are recomputed. These would read the values that a module has
    written into its own tensors in between, without a word from torch: a write is refused, also one that no region reads
    (a counter), since the call does not tell the two apart.
    """
    graph = torch.compile(function, backend=backend)
    owns = list(map(vars, recomputes))

    def call(*args: Any, **kwargs: Any) -> Any:
        watched = owns and torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        before = [(name, t, t._version) for name, t in _state_in(owns) if not t.is_inference()] if watched else []
        try:
            output = graph(*map(_waited, args), **{name: _waited(value) for name, value in kwargs.items()})
            if written := [name for name, tensor, version in before if tensor._version != version]:
                raise RuntimeError(
                    f"The forward of {name} writes into its own {written[0]!r}, and torch.compile "
                    "recomputes from the values after the write: where it reads them, gradients are wrong. Use ac='full', "
                    "which recomputes from outside of the compiled layer, or compile=False."
                )
            return output
        except AssertionError as error:
            # The partitioner puts the state of a recomputed random operator behind the mesh, among which it counts tensors.
            if "tensors_saved_with_vc_check" not in str(error):
                raise
            raise RuntimeError(
                "On a CPU, this torch cannot compile a layer whose weights tp splits and that recomputes dropout or "
                "attention, which it counts among random operators. Use ac='full', which recomputes from outside of the "
                "compiled layer, ac='selective' without dropout, or compile=False."
            ) from error

    return call


def async_tensor_parallel() -> bool:
    """Return whether inductor fuses collectives into matmuls; off where it is not imported."""
    config = sys.modules.get("torch._inductor.config")
    return config is not None and bool(config._micro_pipeline_tp)


def fuse_collectives_into_matmuls(group: torch.distributed.ProcessGroup) -> None:
    """Have inductor fuse the collectives of `group` into matmuls, over symmetric memory, in code compiled later."""
    import torch._inductor.config as config
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    config._micro_pipeline_tp = True
    enable_symm_mem_for_group(group.group_name)


# --- Experts ----------------------------------------------------------------------------------------------------------


def grouped_mm(rows: Tensor, weights: Tensor, counts: Sequence[int], ends: Tensor) -> Tensor:
    """Rows (R, K), sorted by group, times the matrix of each one's group, (G, K, N) → (R, N).

    One kernel where ``F.grouped_mm`` takes these: bfloat16 on CUDA from Ampere on, any float on the CPU, rows of 16 bytes or
    a multiple. Else a loop over the groups.

    Args:
        counts: rows of each group, known on the host.
        ends: (G,) int32 where the rows of each group end, on the device: making it here would wait for that.
    """
    if rows.shape[0] and _has_grouped_kernel(rows, weights):
        return torch.nn.functional.grouped_mm(rows, weights, offs=ends)
    # Also without any row: the weights get gradients of zero then, and every rank reduces the same.
    parts = zip(rows.split(list(counts)), weights.unbind(0), strict=True)
    return torch.cat([part @ matrix for index, (part, matrix) in enumerate(parts) if part.shape[0] or index == 0])


def is_rocm() -> bool:
    """Return whether this torch is built for AMD's GPUs, which it calls ``"cuda"``, too."""
    return torch.version.hip is not None


def _has_grouped_kernel(rows: Tensor, weights: Tensor) -> bool:
    if rows.dtype != weights.dtype or any(size * rows.element_size() % 16 for size in weights.shape[1:]):
        return False
    if rows.device.type == "cuda":  # an MI300X answers with (9, 4)
        return (
            not is_rocm() and rows.dtype == torch.bfloat16 and torch.cuda.get_device_capability(rows.device) >= (8, 0)
        )
    return rows.device.type == "cpu"


# --- Ranks ------------------------------------------------------------------------------------------------------------


def loss_is_parallel() -> bool:
    """Return whether this is under `torch.distributed.tensor.parallel.loss_parallel`.

    The context registers its operators with the dispatcher of `DTensor`.
    """
    return torch.ops.aten.nll_loss_forward.default in DTensor._op_dispatcher._custom_op_handlers


@contextlib.contextmanager
def under_loss_parallel(wanted: bool) -> Iterator[None]:
    """Do as `loss_parallel` does if `wanted`, but leave the caller's own on, and end after an error, too."""
    if not wanted or loss_is_parallel():
        yield
        return
    _enable_custom_loss_ops()
    try:
        yield
    finally:
        _disable_custom_loss_ops()


def unwaited_collectives() -> int:
    """Return the number of functional collectives of this process that are under way and not yet waited for."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return 0
    return torch._C._distributed_c10d._get_work_registry_size()


# The mesh that a mesh was sliced from.
root_mesh: Callable[[DeviceMesh], DeviceMesh] = DeviceMesh._get_root_mesh


def flatten_mesh(mesh: DeviceMesh, name: str, before: DeviceMesh | None) -> DeviceMesh:
    """All axes of `mesh` as one, called `name`, behind the axis `before` where there is one."""
    flat = mesh._flatten(name)
    return flat if before is None else DeviceMesh._concatenate([before, flat])


def as_dtensor_type(kind: type[DTensor], tensor: DTensor) -> DTensor:
    """`tensor`, without a history, as a `kind`: the same memory and placements. Seen in 2.13 and 2.14."""
    return kind(tensor._local_tensor, tensor._spec, requires_grad=False)


def fsdp_param_groups(module: nn.Module) -> Iterator[Any]:
    """FSDP2's parameter groups at `module`; none where it is not a unit."""
    if hasattr(type(module), "_get_fsdp_state"):
        yield from module._get_fsdp_state()._fsdp_param_groups  # type: ignore[operator]


def sharded_versions(module: nn.Module) -> list[int]:
    """The version counters of the shards of an FSDP2 unit: another list where one of them was written.

    An operator on a DTensor counts on the DTensor alone, and one on its local part there alone.
    """
    shards = [param.sharded_param for param in fsdp_params(module)]
    return [tensor._version for shard in shards for tensor in (shard, shard._local_tensor)]


def _around(
    group: Any, method: str, before: Callable[[], None] | None, after: Callable[[], None] | None = None
) -> None:
    """Have `method` of one FSDP2 group call `before` first and `after` last.

    Not hooks of the module, which a compiled layer would trace.
    """
    own = getattr(group, method)

    def called(*args: object, **kwargs: object) -> Any:
        if before is not None:
            before()
        # FSDP2 keeps the tensors into which a first forward gathers: made in inference mode, they could never train.
        outside = torch.inference_mode(False)(torch.no_grad()(own)) if torch.is_inference_mode_enabled() else own
        result = outside(*args, **kwargs)
        if after is not None:
            after()
        return result

    setattr(group, method, called)


def before_each_gather(module: nn.Module, tell: Callable[[str], None]) -> None:
    """Call ``tell(event)`` before the FSDP2 unit at `module` gathers, in ``"forward"`` or in ``"backward"``."""

    def backward(group: Any) -> None:
        if group._training_state.name != "PRE_BACKWARD":  # by another of its outputs
            tell("backward")

    for group in fsdp_param_groups(module):
        _around(group, "pre_forward", partial(tell, "forward"))
        _around(group, "pre_backward", partial(backward, group))


def before_each_reduction(module: nn.Module, call: Callable[[], None]) -> None:
    """Call `call` before the FSDP2 unit at `module` reduces."""

    def reduces(group: Any) -> None:
        if group.reduce_grads:
            call()

    for group in fsdp_param_groups(module):
        _around(group, "post_backward", partial(reduces, group))


def around_end_of_backward(
    root: nn.Module, before: Callable[[], None] | None, after: Callable[[], None] | None = None
) -> None:
    """Call `before` and `after` around the end of a backward of `root`, where FSDP2 reduces the units that backward has
    not come to."""
    # By the class: the stand-in for another stage's layer in a pipeline answers for that layer's attributes.
    states = [m._get_fsdp_state() for m in root.modules() if hasattr(type(m), "_get_fsdp_state")]  # type: ignore[operator]
    # Of all units: which of them backward comes to first, and so has its method called, is not known.
    for state in {id(state): state for state in states}.values():
        _around(state, "_root_post_backward_final_callback", before, after)


def gather_ahead(module: nn.Module, backward: bool) -> None:
    """Begin the gathers that a rank begins, and ends, when it comes to the FSDP2 unit at `module`."""
    state = module._get_fsdp_state()  # type: ignore[operator]
    for each in (state, *(state._states_to_backward_prefetch if backward else state._states_to_forward_prefetch)):
        for group in each._fsdp_param_groups:
            group.unshard()


def own_store() -> Any:
    """A connection of its own to the store of the default process group."""
    store: Any = torch.distributed.distributed_c10d._get_default_store()
    return store.clone()


def around_each_call(
    module: nn.Module, before: Callable[[], None], gathered: Callable[[], None], after: Callable[[], None]
) -> None:
    """Around each forward of the FSDP2 unit at `module`: before it is gathered, when it is, and before it is freed."""
    for group in fsdp_param_groups(module):
        _around(group, "pre_forward", before, gathered)
        _around(group, "post_forward", after)


def after_each_forward(module: nn.Module, call: Callable[[], None]) -> None:
    """Call `call` after each forward of the FSDP2 unit at `module`."""
    for group in fsdp_param_groups(module):
        _around(group, "post_forward", call)


class FsdpPlace(NamedTuple):
    """A place, in the modules of an FSDP2 unit, that one of its parameters is registered at."""

    param: Any
    module: nn.Module
    name: str

    @property
    def gathered(self) -> nn.Parameter:
        """The parameter that forward sees; it exists from the first gather on."""
        return self.param._unsharded_param

    def has_its_own(self) -> bool:
        """Return whether FSDP2's parameter is registered there: the shard, or the gathered one."""
        # As torch checks in the first forward: load_state_dict(assign=True), and `to`, may put another shard there.
        names = ("sharded_param", "_unsharded_param", "_sharded_post_forward_param")
        registered = self.module._parameters.get(self.name)
        return any(registered is getattr(self.param, name, None) for name in names)

    @torch.no_grad()
    def write_back(self) -> None:
        """Put this rank's part of the gathered parameter into the shard, where the two differ."""
        mesh, shard = self.param.mesh_info, self.param.sharded_param.to_local()
        parts = local_part(self.gathered).detach().chunk(mesh.shard_mesh_size, dim=self.param.fsdp_placement.dim)
        if shard.numel():  # `chunk` gives fewer parts than ranks where there are fewer rows
            part = parts[mesh.shard_mesh_rank].to(shard.device)
            # A parameter in 32 bits that was gathered in 16 keeps its own bits where nothing was written.
            shard.data.copy_(torch.where(part == shard.to(part.dtype), shard, part.to(shard.dtype)))


def fsdp_places(module: nn.Module, shared: bool = False) -> Iterator[FsdpPlace]:
    """The places of the parameters of the FSDP2 unit at `module`, one for each, or all of a `shared` one."""
    for param in fsdp_params(module):
        info = param._module_info
        yield FsdpPlace(param, info.module, info.param_name)
        for holder, name in zip(info.shared_modules, info.shared_param_names) if shared else ():
            yield FsdpPlace(param, holder, name)


def content_versions(registered: Sequence[tuple[dict[str, Any], str, Any]]) -> list[int]:
    """Return the number of in-place changes of each of these FSDP2 parameters, (table, name, parameter), as gathered.

    None are counted in inference mode.
    """
    counted = not torch.is_inference_mode_enabled()
    return [param._unsharded_param._version for _, _, param in registered] if counted else []


def begin_from_root(module: nn.Module, root: nn.Module) -> None:
    """Have FSDP2 set up its state at `root` also where the unit at `module` is called before it.

    Else the unit would take itself for the root, and each later forward of `root` would fail.
    """
    module._get_fsdp_state()._lazy_init = root._get_fsdp_state()._lazy_init  # type: ignore[operator]


def fsdp_is_idle(module: nn.Module) -> bool:
    """Return whether no unit of the FSDP2 root at `module` is in a forward or a backward, or has left one by an error."""
    states = module._get_fsdp_state()._state_ctx.all_states  # type: ignore[operator]
    return all(state._training_state.name == "IDLE" for state in states)


def register_shards(module: nn.Module) -> None:
    """Register the shards of the FSDP2 unit at `module`, which stays gathered for backward."""
    for group in fsdp_param_groups(module):
        for param in group.fsdp_params if group.is_unsharded else ():
            param._setattr_on_modules(param.sharded_param)


def shards_are_registered(module: nn.Module) -> bool:
    """Return whether the shards of the FSDP2 unit at `module` are registered though it is gathered."""
    return any(
        place.module._parameters.get(place.name) is place.param.sharded_param
        for group in fsdp_param_groups(module)
        if group.is_unsharded
        for place in fsdp_places(module)
    )


def register_whole_when_gathered(module: nn.Module) -> None:
    """Have the FSDP2 unit at `module` undo `register_shards` where it is needed gathered, and is."""

    def register(group: Any) -> None:
        for param in group.fsdp_params if group.is_unsharded else ():
            param._setattr_on_modules(param._unsharded_param)

    for group in fsdp_param_groups(module):
        _around(group, "unshard", partial(register, group))


_CALL: Any = nn.Module._call_impl.__code__


def call_is_inside_of(module: nn.Module) -> bool:
    """Return whether a hook of `module` that runs now does so in a call of it that another call of it has made.

    The stack tells, since a call that ended with an error leaves nothing else behind.
    """
    calls = 0
    for frame in callers():
        registered = frame.f_code.co_name == "wrapped_method"  # of torch.distributed.fsdp.register_fsdp_forward_method
        if (frame.f_code is _CALL or registered) and frame.f_locals.get("self") is module:
            calls += 1
    return calls > 1


class _Lent:
    """A list, dict or dataclass that a layer is called with, in which FSDP2's hooks do not look."""

    def __init__(self, container: Any) -> None:
        self.container = container
        # (key, tensor or tuple of some) as the caller has them.
        self.items = [(key, value) for key, value in _items(container) if isinstance(value, Tensor | tuple)]
        self.replaced: list[Any] = []

    def put(self, values: Iterator[Any]) -> None:
        self.replaced = [next(values) for _ in self.items]
        for (key, _), value in zip(self.items, self.replaced):
            _put_item(self.container, key, value)

    def give_back(self) -> list[Tensor]:
        """Put the caller's tensors back where the layer has left them, and return those that the layer has put in."""
        of = {id(new): old for (_, old), new in zip(self.items, self.replaced)}
        added = []
        for key, value in _items(self.container):
            if id(value) in of:
                _put_item(self.container, key, of[id(value)])
            else:
                added += [tensor for tensor in tree_leaves(value) if isinstance(tensor, Tensor)]
        return added


class _Watched(_Lent):
    """Another object that a layer is called with: FSDP2 hands it on as it is, and hooks nothing that is put into it."""

    def __init__(self, owner: object) -> None:
        self.container, self.items, self.replaced = owner, [], []
        self.before = tree_leaves(vars(owner))

    def give_back(self) -> list[Tensor]:
        before = set(map(id, self.before))
        return [t for t in tree_leaves(vars(self.container)) if isinstance(t, Tensor) and id(t) not in before]


def _items(container: Any) -> list[tuple[Any, Any]]:
    if isinstance(container, dict | list):
        return list(container.items() if isinstance(container, dict) else enumerate(container))
    return [(field.name, getattr(container, field.name)) for field in fields(container)]


def _put_item(container: Any, key: Any, value: Any) -> None:
    if isinstance(container, dict | list):
        container[key] = value
    else:
        setattr(container, key, value)


def _is_lent(value: Any) -> bool:
    """Return whether FSDP2 would hand a rebuilt copy of `value` to a layer that can change it."""
    if isinstance(value, dict | list):
        return True
    return is_dataclass(value) and not isinstance(value, type) and not value.__dataclass_params__.frozen  # type: ignore[attr-defined]


def _lend(value: Any, lent: dict[int, _Lent]) -> Any:
    """`value` with a `_Lent` in the place of each container that a layer can change; those inside of one stay there."""
    if _is_lent(value):
        if id(value) not in lent:
            lent[id(value)] = _Lent(value)
            for _, inner in _items(value):
                _lend(inner, lent)
        return lent[id(value)]
    if hasattr(value, "__dict__") and not isinstance(value, Tensor | nn.Module) and not callable(value):
        lent.setdefault(id(value), _Watched(value))
        return value
    return _map_tuple(partial(_lend, lent=lent), value)


def _unlend(value: Any) -> Any:
    return value.container if isinstance(value, _Lent) else _map_tuple(_unlend, value)


def _map_tuple(function: Callable[[Any], Any], value: Any) -> Any:
    """`value`, or a tuple of its items after `function`, named where that is."""
    if not isinstance(value, tuple):
        return value
    items = map(function, value)
    return type(value)(*items) if hasattr(value, "_fields") else tuple(items)


_CONTENTS = "_nemo_like_contents"


def lend_containers(module: nn.Module) -> None:
    """Have the FSDP2 unit at `module` called with the caller's own lists, dicts and dataclasses.

    FSDP2 casts, moves and hooks the tensors in them by making new containers, so a layer's additions are lost. Here the
    container stays the caller's: it holds FSDP2's tensors while the layer runs, and the caller's again afterwards.
    """
    state = module._get_fsdp_state()  # type: ignore[operator]
    handle = state._pre_forward_hook_handle
    hooks = module._forward_pre_hooks
    if len(state._modules) > 1 or handle.id not in hooks:
        return
    own, stack = state._pre_forward, list[list[_Lent]]()

    @torch.compiler.disable
    @wraps(own)
    def pre_forward(called: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        lent: dict[int, _Lent] = {}
        args = tuple(_lend(value, lent) for value in args)
        kwargs = {name: _lend(value, lent) for name, value in kwargs.items()}
        boxes = list(lent.values())
        stack.append(boxes)
        if not boxes:
            return own(called, args, kwargs)
        contents = tuple(value for box in boxes for _, value in box.items)
        args, kwargs = own(called, args, {**kwargs, _CONTENTS: contents})
        made = iter(kwargs.pop(_CONTENTS))
        for box in boxes:
            box.put(made)
        return tuple(map(_unlend, args)), {name: _unlend(value) for name, value in kwargs.items()}

    def give_back() -> None:
        boxes = stack.pop() if stack else []
        gather_before_backward_of(module, [t for box in boxes for t in box.give_back() if t.grad_fn is not None])

    hooks[handle.id] = state._pre_forward = pre_forward
    after_each_forward(module, give_back)


def gather_before_backward_of(module: nn.Module, tensors: list[Tensor]) -> None:
    """Have the FSDP2 unit at `module` gathered before the backward of `tensors`, as it is for its outputs."""
    state = module._get_fsdp_state()  # type: ignore[operator]

    def gather(grad: Tensor) -> Tensor:
        # Where the unit's own forward requires gradients, it is gathered.
        return grad if state._training_state.name == "FORWARD" else state._pre_backward(grad)

    for tensor in tensors:
        tensor.register_hook(gather)


def read_dtypes_again(module: nn.Module) -> None:
    """Have the FSDP2 unit at `module`, of which nothing trained in the first forward, know the dtypes of weights that
    train now.

    2.15 has no ``_orig_dtype``: it reads the dtypes of frozen weights, too.
    """
    for group in fsdp_param_groups(module):
        untrained = getattr(group, "_orig_dtype", torch.float32) is None
        if untrained and any(param.sharded_param.requires_grad for param in group.fsdp_params):
            group._init_mp_dtypes()


def free_last_gather(module: nn.Module) -> None:
    """Free the flat buffer that the FSDP2 unit at `module` was gathered into last, of which its parameters are copies.

    FSDP2 keeps it until the next unit is gathered in forward, also where the forward is recomputation in backward,
    behind which there may be none before the next step. 2.15 has a method for it.
    """
    for group in fsdp_param_groups(module):
        comm: Any = getattr(group, "comm_ctx", None)  # set in the first forward
        if getattr(comm, "all_gather_state", None) is None:
            continue
        if hasattr(comm, "release_all_gather_state_for_comm_reuse"):
            comm.release_all_gather_state_for_comm_reuse()
        else:  # its memory is reused then: not before it is copied out
            group._wait_all_gather_streams_on_event(comm.all_gather_state.event)
            comm.all_gather_state = None


def fsdp_params(module: nn.Module) -> list[Any]:
    """FSDP2's objects for the parameters of the unit at `module`."""
    return [param for group in fsdp_param_groups(module) for param in group.fsdp_params]


def without_gradient(params: Sequence[Any]) -> list[int]:
    """Return the numbers of these FSDP2 parameters that no backward has reached since their last reduction."""
    return [
        index
        for index, param in enumerate(params)
        if param.unsharded_accumulated_grad is None
        and getattr(getattr(param, "_unsharded_param", None), "grad", None) is None
    ]


def complete_accumulated(params: Sequence[Any]) -> None:
    """Bring all gradients of one FSDP2 unit into the dtype in which some were accumulated, which 2.15 does itself.

    FSDP2 accumulates in the dtype to reduce in, and refuses two dtypes ("uniform gradient dtype"): a parameter that only
    the last micro-batch has reached, as an expert may be, has its gradient in the dtype to compute in.
    """
    if not params or not hasattr(params[0], "to_accumulated_grad_if_needed"):
        return
    dtypes = [p.unsharded_accumulated_grad.dtype for p in params if p.unsharded_accumulated_grad is not None]
    late = [p for p in params if p.unsharded_accumulated_grad is None and p.sharded_param.requires_grad]
    for param in late if dtypes else ():
        param.to_accumulated_grad_if_needed()
        if without_gradient([param]):
            # Its storage may be freed by now; shape, device and (under tensor parallelism) DTensor layout are not.
            param.unsharded_accumulated_grad = torch.zeros_like(param._unsharded_param.detach(), dtype=dtypes[0])


def forget_meshes() -> None:
    """Empty DTensor's tables of operators by mesh: for a mesh made again they would give the process groups of the old
    one. Seen in 2.13 and 2.14: in a release with other names nothing happens."""
    for where, name in (("debug", "_clear_sharding_prop_cache"), ("_redistribute", "_gen_transform_infos.cache_clear")):
        with contextlib.suppress(ImportError, AttributeError):
            attrgetter(name)(importlib.import_module(f"torch.distributed.tensor.{where}"))()


def fake_store() -> Any:
    """The store of the process-group back end ``"fake"``, which sends nothing, from PyTorch's testing package.

    Raises:
        RuntimeError: this torch has none where we know it.
    """
    try:
        return importlib.import_module("torch.testing._internal.distributed.fake_pg").FakeStore()
    except (ImportError, AttributeError) as error:
        raise RuntimeError(f"torch {torch.__version__} has no fake process group where we know it.") from error


class FakeRanks:
    """A world in which this process is `rank` of `world_size` ranks, and the others are not there; to be entered often.

    Process groups that are up are set aside inside, and work again afterwards, also after an error or Ctrl-C: torch keeps
    them in tables of its module and, by name, in C++, where those of fake ranks get names of their own. Dispatch modes do
    not see how DTensor finds out shapes, which it does once for each call.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self._inside: Any = None
        self._outside: list[Any] = []

    def __enter__(self) -> Self:
        self._outside.append(_groups())
        if self._inside is not None:
            _put_groups(self._inside)
            return self
        _put_groups(_NO_GROUPS)
        torch.distributed.distributed_c10d._world.group_count = next(_first_names)
        try:
            torch.distributed.init_process_group("fake", store=fake_store(), rank=self.rank, world_size=self.world_size)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._inside = _groups()
        _put_groups(self._outside.pop())

    def forget(self) -> None:
        """Leave nothing of these ranks: they are not entered again."""
        for name in self._inside.tables[_NAMES].values():
            torch._C._distributed_c10d._unregister_process_group(name)
        forget_meshes()


@contextlib.contextmanager
def fake_ranks(rank: int, world_size: int) -> Iterator[None]:
    """This process is `rank` of `world_size` ranks inside, as in `FakeRanks`, whose meshes may be those of real ranks."""
    ranks = FakeRanks(rank, world_size)
    forget_meshes()
    try:
        with ranks:
            yield
    finally:
        ranks.forget()


_shapes: Any = DTensor._op_dispatcher.sharding_propagator
_find_shape: Any = type(_shapes)._propagate_tensor_meta_non_cached


def _find_shape_unseen(schema: Any) -> Any:
    with without_dispatch_modes():
        return _find_shape(_shapes, schema)


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, the future value of a tensor that is being sent, or any other tensor itself."""
    part = getattr(tensor, "_local_tensor", tensor)
    return getattr(part, "elem", part) if type(part) is AsyncCollectiveTensor else part


class _Groups(NamedTuple):
    """All that torch has of process groups."""

    tables: tuple[dict[Any, Any], ...]
    default: Any
    next_name: int  # A number.
    excepthook: Any  # torch puts one around it that names the rank.
    shapes: Any  # The function that finds out shapes for DTensor; None: its own.


def _groups() -> _Groups:
    c10d: Any = torch.distributed.distributed_c10d
    tables = tuple(dict(getattr(c10d, name)) for name in _TABLES_OF_GROUPS)
    return _Groups(
        tables, c10d._world.default_pg, c10d._world.group_count, sys.excepthook, vars(_shapes).get(_find_shape.__name__)
    )


def _put_groups(groups: _Groups) -> None:
    c10d: Any = torch.distributed.distributed_c10d
    for name, content in zip(_TABLES_OF_GROUPS, groups.tables):
        getattr(c10d, name).clear()
        getattr(c10d, name).update(content)
    for group, name in groups.tables[_NAMES].items():
        try:
            torch._C._distributed_c10d._resolve_process_group(name)
        except RuntimeError:  # torch.distributed.destroy_process_group() forgets the names of all
            torch._C._distributed_c10d._register_process_group(name, group)
    c10d._update_default_pg(groups.default)
    c10d._world.group_count, sys.excepthook = groups.next_name, groups.excepthook or sys.excepthook
    vars(_shapes).pop(_find_shape.__name__, None)
    if groups.shapes is not None:
        vars(_shapes)[_find_shape.__name__] = groups.shapes


_TABLES_OF_GROUPS = ("_pg_map", "_pg_names", "_pg_group_ranks", "_pg_backend_config", "_pg_to_tag", "_tags_to_pg")
_NAMES = _TABLES_OF_GROUPS.index("_pg_names")
_NO_GROUPS = _Groups(({},) * len(_TABLES_OF_GROUPS), None, 0, None, _find_shape_unseen)
# Each fake world begins its names at another number: more than the groups that a job makes.
_first_names = itertools.count(1_000_000, 1_000_000)


def voting_stage(*args: Any, **kwargs: Any) -> Any:
    """torch's pipeline stage, whose vote before the first step needs no other rank under the ``fake`` back end.

    Imported here: torch's pipelines import its compiler, which takes a second.
    """
    from torch.distributed.pipelining import PipelineStage

    class VotingStage(PipelineStage):
        def _warmup_backward_result(self, received_result: Tensor | None = None) -> Tensor:
            """Return whether all stages know the tensors they send and receive: under ``fake`` the others report
            nothing."""
            if torch.distributed.get_backend(self.group) == "fake":
                return torch.ones(1, dtype=torch.int32)
            return super()._warmup_backward_result(received_result)

    return VotingStage(*args, **kwargs)


def backward_in_halves() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The two halves of a backward as a pipeline's schedules run them: gradients of inputs first, of weights later.

    Raises:
        RuntimeError: this torch has them elsewhere.
    """
    try:
        with without_dispatch_modes():  # this import makes tensors, which a mode that counts them must not see
            halves = importlib.import_module("torch.distributed.pipelining._backward")
        return halves.stage_backward_input, halves.stage_backward_weight
    except (ImportError, AttributeError) as error:
        raise RuntimeError(
            f"torch {torch.__version__} does not show how it cuts a backward in two, so that the bytes which are saved "
            "between the halves can't be predicted. Use a schedule that does not: 1f1b or interleaved_1f1b."
        ) from error


def decompositions_of_inductor() -> Mapping[Any, Callable[..., Any]]:
    """Return the operators that Inductor takes apart before AOTAutograd cuts a graph, with how it does."""
    return importlib.import_module("torch._inductor.decomposition").select_decomp_table()


def traced_graph(
    function: Callable[..., Any], decompositions: Mapping[Any, Callable[..., Any]]
) -> Callable[..., GraphModule]:
    """Return a function of the arguments of `function` that traces it, as AOTAutograd does: by Python's rules for operators
    that consist of others."""
    trace = importlib.import_module("torch.fx.experimental.proxy_tensor").make_fx(
        function, decomposition_table=decompositions, tracing_mode="real"
    )

    def traced(*args: Any) -> GraphModule:
        with importlib.import_module("torch._dispatch.python").enable_python_dispatcher():
            return trace(*args)

    return traced


def two_graphs(joint: GraphModule, outputs: int, fake: Any) -> tuple[GraphModule, GraphModule]:
    """Return forward and backward of a joint graph, whose first `outputs` results are forward's, by AOTAutograd's cut.

    The first returns the second's arguments behind its own results. fake: the mode of the tensors of the trace.
    """
    guards = importlib.import_module("torch._guards")
    partition = importlib.import_module("torch._functorch.partitioners").min_cut_rematerialization_partition
    with guards.tracing(guards.TracingContext(fake)):
        return partition(joint, None, num_fwd_outputs=outputs)


def recorded_snapshot() -> Mapping[str, Any] | None:
    """Return the snapshot of CUDA's allocator; None: no allocation was recorded (``_record_memory_history``)."""
    if not torch.cuda.is_available():
        return None
    snapshot: Mapping[str, Any] = torch.cuda.memory._snapshot()
    return snapshot if any(snapshot["device_traces"]) else None


def module_of_node() -> str:
    """Return the path of the module whose operator a graph gets now; empty: no graph is being made, or it is not known."""
    if not torch.fx.traceback.has_preserved_node_meta():
        return ""
    stack = list((torch.fx.traceback.get_current_meta().get("nn_module_stack") or {}).values())
    path = str(stack[-1][0]) if stack else ""
    return path.replace("['", ".").replace("']", "").replace("[", ".").replace("]", "")
