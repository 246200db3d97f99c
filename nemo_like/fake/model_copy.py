"""Copy a model to run the copy: neither a plan nor a profile changes the caller's, whatever it does to itself in forward."""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache, partial
from types import CellType, FunctionType, GeneratorType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from nemo_like._util.tensors import tensors_in
from nemo_like.torch_compat import HOOKS

# Elements up to which a tensor is copied, and fake runs compute with its values: models look at them.
SMALL = 1 << 20
_MARK = "_nemo_like_copy"
_ATOMS = (bool, int, float, str, bytes, type, type(None), torch.dtype, torch.device)
# Their hooks are part of a model's computation: old weight norms, `enable_input_require_grads`.
_LIBRARIES = ("torch", "transformers", "peft", "nemo_like")


def model_copy(model: nn.Module, *, runs_kernels: bool = False) -> nn.Module:
    """A copy of `model` to run; a copy that was made here is returned as it is.

    Modules, attributes, generators and configs are new objects, tied and shared ones once. Parameters are new ones with the
    old memory. So are large tensors, which a run on fake tensors does not write to; with `runs_kernels`, all tensors but
    parameters have memory of their own. Hooks that callers have put on are left off. Objects that cannot be copied (a
    lock, a process group) are shared.

    Raises:
        ValueError: a module has a generator as an attribute, which a run would advance.
    """
    if hasattr(model, _MARK):
        return model
    memo: dict[int, Any] = {}
    modules = list(model.modules())
    for module in modules:
        memo[id(module)] = object.__new__(type(module))
        for tensor in tensors_in([*vars(module).values()]):
            memo.setdefault(id(tensor), _tensor(tensor, whole=runs_kernels))
            memo[id(quant_state(tensor))] = quant_state(tensor)  # which its module has, too; None is its own copy
    for module in modules:
        attributes = {name: _attribute(module, name, value, memo) for name, value in vars(module).items()}
        memo[id(module)].__dict__.update(attributes)
    copied: nn.Module = memo[id(model)]
    copied.__dict__[_MARK] = True
    return copied


def copy_on_meta(model: nn.Module) -> nn.Module:
    """A copy of `model` with parameters on the meta device, tied ones once; its buffers are the model's."""
    memo: dict[int, Any] = {id(buffer): buffer for buffer in model.buffers()}
    memo |= _on_meta(model.parameters())
    memo |= {id(quant_state(p)): quant_state(memo[id(p)]) for p in model.parameters()}  # which modules have, too
    return copy.deepcopy(model, memo)


def copy_to_keep(model: nn.Module) -> nn.Module:
    """A `model_copy` to plan from later, whatever becomes of `model`; it is copied again each time.

    Its parameters are on the meta device, tied ones once. Those of other classes, but for 4 bits, are the model's.
    """
    copied = model_copy(model)
    del copied.__dict__[_MARK]
    moved = _on_meta(p for p in copied.parameters() if type(p) is nn.Parameter or quant_state(p) is not None)
    for module in copied.modules():
        module._parameters.update({n: moved[id(p)] for n, p in module._parameters.items() if id(p) in moved})
    return copied


def packed_as(tensor: Any, like: object, make: Callable[[Tensor], Tensor] = lambda scales: scales) -> Any:
    """Return `tensor` with the scales of `like`, where that is a weight of bitsandbytes in 4 bits, each one by `make`."""
    if (state := quant_state(like)) is not None:
        tensor.quant_state = _state_with(state, make)
    return tensor


def quant_state(weight: object) -> Any:
    """Return bitsandbytes' ``QuantState`` of a weight in 4 bits, or of its module: scales and tables; None: of others."""
    return getattr(weight, "quant_state", None)


def numbers_of(parameter: Tensor) -> int:
    """Return how many numbers a parameter has: in 4 bits, several in each element."""
    state = quant_state(parameter)
    return parameter.numel() if state is None else math.prod(state.shape)


def is_unquantised(tensor: Tensor | None) -> bool:
    """Return whether `tensor` is a weight that bitsandbytes quantises when it goes to its device."""
    return not getattr(tensor, "bnb_quantized", True)


def scales_of(weight: object) -> list[Tensor]:
    """Return the tensors of a `quant_state`, with those of the state of its scales; none of others."""
    states = [quant_state(weight), getattr(quant_state(weight), "state2", None)]
    return [t for state in states if state is not None for t in tensors_in([*vars(state).values()])]


def _state_with(state: Any, make: Callable[[Tensor], Tensor]) -> Any:
    def one(value: Any) -> Any:
        return make(value) if isinstance(value, Tensor) else _state_with(value, make) if type(value) is kind else value

    copied, kind = copy.copy(state), type(state)
    vars(copied).update({name: one(value) for name, value in vars(state).items()})
    return copied


def _on_meta(parameters: Iterable[nn.Parameter]) -> dict[int, nn.Parameter]:
    on_meta = cache(partial(Tensor.to, device="meta"))  # one table for the scales of all weights
    return {id(p): packed_as(nn.Parameter(p.detach().to("meta"), p.requires_grad), p, on_meta) for p in parameters}


@contextmanager
def with_state(module: nn.Module, state: Mapping[str, Tensor]) -> Iterator[None]:
    """Within it, `module` has the tensors of `state`, by name, in the place of its own; shared ones under every name.

    `torch.func.functional_call` puts a tensor that has two names back once, and leaves the other one there. All tables are
    put back: a parametrization that a forward adds and removes leaves a plain tensor among the buffers.
    """
    owners = dict(module.named_modules(remove_duplicate=False))
    tables: list[dict[str, Any]] = [table for owner in owners.values() for table in (owner._parameters, owner._buffers)]
    before = list(map(dict, tables))
    try:
        for name, tensor in state.items():
            path, _, leaf = name.rpartition(".")
            owner = owners[path]
            table: dict[str, Any] = owner._parameters if leaf in owner._parameters else owner._buffers
            table[leaf] = tensor
        yield
    finally:
        for table, own in zip(tables, before):
            table.clear()
            table.update(own)


def leaves_of(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`state` with new leaves of the same memory for its parameters; a tensor under two names stays one."""
    leaves = {
        id(t): packed_as(t.detach().requires_grad_(t.requires_grad), t) if isinstance(t, nn.Parameter) else t
        for t in state.values()
    }
    return {name: leaves[id(t)] for name, t in state.items()}


def call_with(module: nn.Module, state: Mapping[str, Tensor], args: tuple, kwargs: Mapping[str, Any]) -> Any:
    """Return the output of `module` with the tensors of `state` in the place of its own."""
    with with_state(module, state):
        return module(*args, **kwargs)


def _tensor(tensor: Tensor, whole: bool) -> Tensor:
    if type(tensor) is nn.Parameter and type(tensor.data) is Tensor:
        copied: Tensor = nn.Parameter(tensor.detach(), tensor.requires_grad)
        copied.__dict__.update(vars(tensor))
        return copied
    if type(tensor) is not Tensor:
        return tensor
    copied = tensor.detach()
    return (copied.clone() if whole or copied.numel() <= SMALL else copied).requires_grad_(tensor.requires_grad)


def _attribute(module: nn.Module, name: str, value: Any, memo: dict[int, Any]) -> Any:
    if isinstance(value, GeneratorType):
        raise ValueError(
            f"{type(module).__name__}.{name} is a generator: a plan or a profile would advance it, and it cannot be copied. "
            "Use an iterator that can (of itertools, or of a list), or a mode instead of a budget, such as 'selective'."
        )
    if name in HOOKS:
        return type(value)((key, _copied(hook, memo)) for key, hook in value.items() if _of_library(hook))
    return _copied(value, memo)


def _of_library(hook: Any) -> bool:
    return str(getattr(hook, "__module__", None) or type(hook).__module__).partition(".")[0] in _LIBRARIES


def _copied(value: object, memo: dict[int, Any]) -> Any:
    if isinstance(value, _ATOMS):
        return value
    if isinstance(value, FunctionType):
        return _function(value, memo)
    if isinstance(value, MethodType):
        return MethodType(_copied(value.__func__, memo), _copied(value.__self__, memo))
    if type(value) is partial:
        keywords = {name: _copied(item, memo) for name, item in value.keywords.items()}
        return partial(_copied(value.func, memo), *(_copied(item, memo) for item in value.args), **keywords)
    try:
        return copy.deepcopy(value, memo)
    except (TypeError, RuntimeError, NotImplementedError, AttributeError):
        return _by_parts(value, memo)


def _by_parts(value: Any, memo: dict[int, Any]) -> Any:
    """A copy of an object with a part that cannot be copied: this part is shared."""
    if type(value) in (list, tuple):
        return type(value)(_copied(item, memo) for item in value)
    if type(value) is dict:
        return {key: _copied(item, memo) for key, item in value.items()}
    if type(value).__module__ == "builtins" or not hasattr(value, "__dict__"):
        return value
    copied = memo[id(value)] = object.__new__(type(value))
    copied.__dict__.update({key: _copied(item, memo) for key, item in vars(value).items()})
    return copied


def _function(function: FunctionType, memo: dict[int, Any]) -> Callable[..., Any]:
    """`function`, as a ``forward`` that was put on one module, with copies of the objects in its closure."""
    if not function.__closure__:
        return function
    if id(function) not in memo:
        cells = tuple(CellType() for _ in function.__closure__)
        copied = memo[id(function)] = FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__, cells
        )
        copied.__kwdefaults__ = function.__kwdefaults__
        copied.__dict__.update(vars(function))
        for cell, content in zip(cells, function.__closure__):
            with suppress(ValueError):  # of an empty cell
                cell.cell_contents = _copied(content.cell_contents, memo)
    return memo[id(function)]
