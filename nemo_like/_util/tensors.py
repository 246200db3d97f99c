"""The tensors inside whatever a module or an operator is called with or returns."""

import contextvars
import copy
import ctypes
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from nemo_like.torch_compat import is_fake, tree_leaves, tree_map

# Sequence types as a tuple: ``tuple | list`` would make a new object each time that it is evaluated.
SEQUENCES = (tuple, list)
# Types that have no tensors inside.
_PLAIN = (bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


# The place of a tensor in a call: the position or the name of its argument, and its number there.
Place = tuple[int | str, int]


# Fake tensors of the CPU take the place of a GPU's, as in a plan for one.
STANDS_FOR_CUDA: contextvars.ContextVar[bool] = contextvars.ContextVar("nemo_like_stands_for_cuda", default=False)


def on_accelerator(tensor: Tensor) -> bool:
    """Return whether `tensor` is on an accelerator, or takes the place of one that is."""
    return tensor.device.type != "cpu" or (STANDS_FOR_CUDA.get() and is_fake(tensor))


def autocast_is_on(kind: str) -> bool:
    """Return whether autocast lowers operators on devices of that kind; the meta device has none."""
    return torch.amp.autocast_mode.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def autocast_dtype(operand: Tensor) -> torch.dtype:
    """Return the dtype that a matmul, or attention, of `operand` runs in here."""
    kind = operand.device.type
    lowers = autocast_is_on(kind) and operand.dtype != torch.float64
    return torch.get_autocast_dtype(kind) if lowers else operand.dtype


def bytes_of(tensor: Tensor) -> bytes:
    """The bits of the elements of `tensor`, on the CPU, in order; of a conjugate view, the conjugates'.

    >>> bytes_of(torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8).T), bytes_of(torch.empty(0))
    (b'\\x01\\x03\\x02\\x04', b'')
    >>> turned = torch.tensor([1 + 2j]).conj()
    >>> bytes_of(turned) == bytes_of(turned.clone().resolve_conj()), bytes_of(turned) == bytes_of(turned.conj())
    (True, False)
    """
    whole = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return ctypes.string_at(whole.data_ptr(), whole.nbytes)


def tensors_in(value: object) -> list[Tensor]:
    """Every tensor in `value`, in order, a tensor that occurs twice twice.

    Looks into tuples, lists, mappings (the output classes of model libraries among them), and the classes that are
    registered with PyTorch's pytrees; nested in any way.

    >>> len(tensors_in(({"a": Tensor(2)}, [Tensor(1), 3, None])))
    2
    """
    tensors: list[Tensor] = []
    _find(value, tensors)
    return tensors


def _find(value: object, tensors: list[Tensor]) -> None:
    """By hand: this runs on the arguments and the outputs of every operator, where a pytree is slow."""
    if isinstance(value, Tensor):
        tensors.append(value)
    elif isinstance(value, SEQUENCES):
        for item in value:
            _find(item, tensors)
    elif value is None or isinstance(value, _PLAIN):
        return
    elif isinstance(value, Mapping):
        for item in value.values():
            _find(item, tensors)
    else:
        for leaf in tree_leaves(value):
            if leaf is not value:
                _find(leaf, tensors)


def is_wrapped(types: Iterable[type]) -> bool:
    """Return whether an operator was called with a tensor that is made of others, by the types that its dispatch is given:
    a DTensor, or torchao's float8. A mode that returns ``NotImplemented`` then sees the operators run inside."""
    return any(hasattr(kind, "__tensor_flatten__") for kind in types)


def by_argument(args: tuple, kwargs: Mapping[str, Any]) -> dict[Place, Tensor]:
    """The tensors of a call by their argument and their number in it.

    A number among all of them would not do: layers that are not run leave shared containers empty.
    """
    arguments: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    return {(name, i): tensor for name, value in arguments for i, tensor in enumerate(tensors_in(value))}


def map_tensors(function: Callable[[Tensor], Any], value: object) -> Any:
    """`value` with `function` on every tensor that `tensors_in` finds; containers are new ones, anything else as it is.

    >>> map_tensors(lambda t: t.shape, {"a": Tensor(2), "b": [3]})
    {'a': torch.Size([2]), 'b': [3]}
    """

    def one(leaf: object) -> Any:
        if isinstance(leaf, Tensor):
            return function(leaf)
        if not isinstance(leaf, MutableMapping):
            return leaf
        copied = copy.copy(leaf)  # no class of pytrees: keys and values pass from layer to layer in a UserDict
        for key, item in leaf.items():
            copied[key] = map_tensors(function, item)
        return copied

    return tree_map(one, value)


def describe(args: tuple, kwargs: Mapping[str, Any]) -> str:
    """Arguments for a message: tensors by dtype and shape, others by type.

    >>> describe((Tensor(2, 3),), {"name": "a"})
    'float32 (2, 3), name: str'
    """

    def in_words(value: object) -> str:
        if isinstance(value, Tensor):
            return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
        return type(value).__name__

    return ", ".join([*map(in_words, args), *(f"{name}: {in_words(value)}" for name, value in kwargs.items())])


def split_sample(sample_input: object) -> tuple[tuple, dict[str, Any]]:
    """A sample input as (args, kwargs): a mapping is keywords, a tuple or list positions, anything else one argument."""
    if isinstance(sample_input, Mapping):
        return (), dict(sample_input)
    if isinstance(sample_input, tuple | list):
        return tuple(sample_input), {}
    return (sample_input,), {}


def versions(value: object) -> Any:
    """Return the number of times that the tensors of an operator's output were changed in place."""
    return value._version if isinstance(value, Tensor) else [tensor._version for tensor in tensors_in(value)]


def storages(tensor: Tensor) -> set[int]:
    """Return the addresses of the memory behind `tensor`, through wrapper subclasses (DTensor, quantised
    types)."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        parts = (getattr(tensor, name) for name in flatten()[0])
        return {
            key for part in parts if isinstance(part, Tensor) for key in storages(part)
        }  # a DTensor names its mesh, too
    if tensor.layout is not torch.strided:
        return set()  # sparse, mkldnn: no storage of their own to name; their version counters tell of changes
    return {tensor.untyped_storage()._cdata}
