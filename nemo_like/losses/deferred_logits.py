"""Logits that are not computed yet: they note what a model does with them, and let `F.cross_entropy` compute in chunks.

A model that is called with labels puts its hidden states through a head and gives the logits to a loss. In between it
changes the logits a little (a soft cap, a scale, a cast, a shift by one token). Here nothing of that is looked up in a
table of models: the head answers with `DeferredLogits`, and each operator on them is written down. When they reach
`torch.nn.functional.cross_entropy`, the same is done to the logits of one chunk after the other. Whatever
else is done with them, they first become the logits that the model would have had: the plain path.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nemo_like.losses.cross_entropy import losses_per_token, reduced, whole
from nemo_like.losses.heads import Head
from nemo_like.losses.rows import CrossEntropyRows, Shape
from nemo_like.options import ChunkedLoss
from nemo_like.torch_compat import answering_calls, shape_only


@dataclass
class HeadCall:
    """One call of the head by the model, not made yet."""

    head: nn.Module
    hidden: Tensor
    """(..., D)"""
    options: ChunkedLoss
    losses: int = 0
    """Number of times that a chunked loss came of it."""
    reason: str | None = None
    """Why whole logits were needed; None: they were not."""
    logits: Tensor | None = None

    def whole(self, reason: str) -> Tensor:
        """The logits of all tokens, as the model would have had them."""
        if self.logits is None:
            self.reason = reason
            with answering_calls(self.head, None):
                self.logits = self.head(self.hidden)
        return self.logits


@dataclass(frozen=True)
class Scale:
    """Logits times a number."""

    factor: float

    def __call__(self, logits: Tensor) -> Tensor:
        return logits * self.factor


@dataclass(frozen=True)
class Tanh:
    """tanh of each logit."""

    def __call__(self, logits: Tensor) -> Tensor:
        return logits.tanh()


@dataclass(frozen=True)
class Recipe:
    """Way in which deferred logits are computed: the call of the head, and what was done to them since."""

    call: HeadCall
    hidden: Tensor
    """(..., D): the hidden states of the tokens that are left, in the shape that they have now."""
    steps: tuple[Callable[[Tensor], Tensor], ...] = ()
    """The same operators, for whole logits."""
    values: tuple[Callable[[Tensor], Tensor], ...] = ()
    """Functions that change values, for the logits of a chunk."""
    made: list[Tensor] = field(default_factory=list)
    """The whole logits, where they were needed."""

    def logits(self, reason: str) -> Tensor:
        """Return the logits, computed whole."""
        if not self.made:
            logits = self.call.whole(reason)
            for step in self.steps:
                logits = step(logits)
            self.made.append(logits)
        return self.made[0]


class DeferredLogits(Tensor):
    """Looks like logits, (..., V), and holds nothing."""

    recipe: Recipe

    @staticmethod
    def from_recipe(recipe: Recipe, width: int, dtype: torch.dtype) -> DeferredLogits:
        deferred: DeferredLogits = shape_only(
            DeferredLogits, (*recipe.hidden.shape[:-1], width), dtype, recipe.hidden.device
        )
        deferred.recipe = recipe
        return deferred

    @classmethod
    def __torch_dispatch__(cls, func: object, types: object, args: object = (), kwargs: object = None) -> Any:  # type: ignore[override]
        # Whoever goes past `__torch_function__` would compute with nothing.
        raise RuntimeError(f"{func} met the deferred logits of a chunked loss. Use loss='model' for this model.")

    @classmethod
    def __torch_function__(cls, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "?")
        if name == "__get__" or name in _LOOKS or func in _LOOK_FUNCTIONS:
            return super().__torch_function__(func, types, args, kwargs)
        rule = _CROSS_ENTROPY if func is F.cross_entropy else _RULES.get(name)
        done = rule(func, args, kwargs) if rule is not None and args and isinstance(args[0], DeferredLogits) else None
        if done is None and func is F.cross_entropy:
            done = _CROSS_ENTROPY(func, args, kwargs)
        if done is not None:
            return done
        reason = f"it uses {name!r} on them"
        plain = [_plain(value, reason) for value in args], {key: _plain(value, reason) for key, value in kwargs.items()}
        return func(*plain[0], **plain[1])


_LOOKS = {
    "size",
    "dim",
    "numel",
    "nelement",
    "is_floating_point",
    "__len__",
    "is_contiguous",
    "element_size",
    "ndimension",
    "get_device",
    "is_complex",
    "stride",
}
"""Methods that ask what a tensor looks like."""
_LOOK_FUNCTIONS = {torch.is_floating_point, torch.numel, torch.is_complex}


def _plain(value: Any, reason: str) -> Any:
    """`value` with whole logits in place of deferred ones."""
    if isinstance(value, DeferredLogits):
        return value.recipe.logits(reason)
    if isinstance(value, tuple | list) and any(isinstance(item, DeferredLogits) for item in value):
        return type(value)(_plain(item, reason) for item in value)
    return value


Rule = Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]
"""Function that returns what an operator makes of deferred logits, its first argument; None: the logits are needed."""


def _next(
    old: DeferredLogits, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], **change: Any
) -> DeferredLogits:
    recipe = old.recipe
    rest = tuple(args[1:])
    steps = (*recipe.steps, lambda logits: func(logits, *rest, **kwargs))
    dtype = change.pop("dtype", _dtype(old))
    return DeferredLogits.from_recipe(replace(recipe, steps=steps, made=[], **change), old.shape[-1], dtype)


def _dtype(old: DeferredLogits) -> torch.dtype:
    return old.dtype


def _same(func: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return _next(args[0], func, args, kwargs)


def _cast(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A cast determines how precise the loss is to be; chunks compute it in float32 in any case."""
    like = torch.empty(0, dtype=args[0].dtype, device=args[0].device)
    rest = [torch.empty(0, dtype=a.dtype, device=a.device) if isinstance(a, DeferredLogits) else a for a in args[1:]]
    result = func(like, *rest, **kwargs)
    if result.device != like.device or not result.is_floating_point():
        return None
    return _next(args[0], func, args, kwargs, dtype=result.dtype)


def _scaled(exponent: int) -> Rule:
    def rule(func: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if len(args) != 2 or kwargs:
            return None
        factor = args[1]
        if isinstance(factor, Tensor):
            return _with_tensor(func, args, kwargs)
        if isinstance(factor, bool) or not isinstance(factor, int | float) or factor == 0:
            return None
        return _valued(args[0], func, args, kwargs, Scale(factor if exponent > 0 else 1 / factor))

    return rule


def _tanh(func: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return _valued(args[0], func, args, kwargs, Tanh())


def _with_tensor(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """With a tensor that is the same for every token and does not train: a bias, a scale, a mask of the vocabulary."""
    if len(args) != 2 or kwargs or isinstance(args[1], DeferredLogits):
        return None
    other = args[1]
    if isinstance(other, Tensor):
        same_for_all = all(size == 1 for size in other.shape[:-1]) and other.device == args[0].device
        if other.requires_grad or (other.ndim and not same_for_all):
            return None
        other = other.reshape(other.shape[-1:])  # as each token sees it
    return _valued(args[0], func, args, kwargs, lambda logits: func(logits, other))


def _valued(
    old: DeferredLogits, func: object, args: Any, kwargs: Any, step: Callable[[Tensor], Tensor]
) -> DeferredLogits:
    return _next(old, func, args, kwargs, values=(*old.recipe.values, step))


def _in_place(rule: Rule) -> Rule:
    def changed(func: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        done = rule(func, args, kwargs)
        if done is not None:
            args[0].recipe = done.recipe
            return args[0]
        return None

    return changed


def _view(func: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    old, sizes = args[0], args[1:]
    if len(sizes) == 1 and isinstance(sizes[0], tuple | list):
        sizes = tuple(sizes[0])
    if kwargs or not sizes or not all(isinstance(size, int) for size in sizes):
        return None
    width = old.shape[-1]
    tokens = math.prod(old.shape[:-1])
    known = math.prod(size for size in sizes if size != -1)
    last = sizes[-1] if sizes[-1] != -1 else tokens * width // known
    if last != width or len(sizes) < 2:
        return None
    hidden = old.recipe.hidden
    return _next(old, func, args, kwargs, hidden=hidden.reshape(*sizes[:-1], hidden.shape[-1]))


def _flatten(func: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    old = args[0]
    arguments = dict(zip(("start_dim", "end_dim"), args[1:])) | dict(kwargs)
    start, end = arguments.get("start_dim", 0), arguments.get("end_dim", -1)
    if end % old.dim() == old.dim() - 1:
        return None
    return _next(old, func, args, kwargs, hidden=old.recipe.hidden.flatten(start, end))


def _getitem(func: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Some of the tokens, all of the vocabulary."""
    old, key = args
    keys = list(key) if isinstance(key, tuple) else [key]
    if any(item is None or isinstance(item, DeferredLogits | list) for item in keys):
        return None
    used = sum(_dims(item) for item in keys if item is not Ellipsis)
    if sum(item is Ellipsis for item in keys):
        at = next(index for index, item in enumerate(keys) if item is Ellipsis)
        keys[at : at + 1] = [slice(None)] * (old.dim() - used)
    else:
        keys += [slice(None)] * (old.dim() - used)
    if keys[-1] != slice(None) and not _is_whole(keys[-1], old.shape[-1]):
        return None
    keys[-1] = slice(None)
    return _next(old, func, args, kwargs, hidden=old.recipe.hidden[tuple(keys)])


def _dims(item: object) -> int:
    return item.ndim if isinstance(item, Tensor) and item.dtype == torch.bool else 1


def _is_whole(item: object, width: int) -> bool:
    return isinstance(item, slice) and item.indices(width) == (0, width, 1)


def _CROSS_ENTROPY(func: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """`torch.nn.functional.cross_entropy` of deferred logits, in chunks; None where it requires what chunks do not know."""
    names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    arguments = dict(zip(names, args)) | dict(kwargs)
    logits, labels = arguments["input"], arguments["target"]
    unknown = any(arguments.get(name) is not None for name in ("weight", "size_average", "reduce"))
    if unknown or not isinstance(logits, DeferredLogits) or isinstance(labels, DeferredLogits) or logits.dim() != 2:
        return None
    recipe = logits.recipe
    if labels.is_floating_point() or labels.shape != logits.shape[:-1] or labels.device != logits.device:
        return None
    if recipe.made or recipe.call.logits is not None:
        return None  # they exist
    recipe.call.losses += 1
    head, shape = _shaped_head(recipe)
    ignore_index, smoothing = arguments.get("ignore_index", -100), arguments.get("label_smoothing", 0.0)
    options = recipe.call.options
    rows = CrossEntropyRows(labels, ignore_index, smoothing, options.z_loss, shape, options.compile)
    with answering_calls(recipe.call.head, None):
        return _loss(recipe, head, rows, arguments.get("reduction", "mean"))


def _loss(recipe: Recipe, head: Head, rows: CrossEntropyRows, reduction: str) -> Tensor:
    module, options, hidden = recipe.call.head, recipe.call.options, whole(recipe.hidden)
    params = None  # asked for inside the unit of `module`
    if reduction == "none":
        return losses_per_token(hidden, head, rows, options, params, module)
    items = rows.counts.sum() if reduction == "mean" else 1
    return reduced(hidden, head, rows, rows.counts, items, options, params, module)


def _shaped_head(recipe: Recipe) -> tuple[Head, Shape]:
    """The head and what follows it: as numbers where it is a scale and a soft cap, else as operators of the head."""
    factors, kinds = [1.0, 1.0], [type(step) for step in recipe.values]
    if set(kinds) <= {Scale, Tanh} and kinds.count(Tanh) <= 1:
        capped = 0
        for step in recipe.values:
            if isinstance(step, Scale):
                factors[capped] *= step.factor
            else:
                capped = 1
        before, after = factors
        if not capped:
            return recipe.call.head, Shape(None if before == 1 else before)
        if after > 0:
            return recipe.call.head, Shape(before * after, after)  # after * tanh(before * x)
    head, values = recipe.call.head, recipe.values

    def shaped(hidden: Tensor) -> Tensor:
        logits = head(hidden)
        for step in values:
            logits = step(logits)
        return logits

    return shaped, Shape()


_MULTIPLY, _DIVIDE = _scaled(1), _scaled(-1)
_RULES: dict[str, Rule] = {
    **dict.fromkeys(("float", "to", "type_as", "double", "bfloat16", "half"), _cast),
    **dict.fromkeys(("contiguous",), _same),
    **dict.fromkeys(("mul", "multiply", "__mul__", "__rmul__"), _MULTIPLY),
    **dict.fromkeys(("div", "divide", "true_divide", "__truediv__", "__div__"), _DIVIDE),
    **dict.fromkeys(("mul_", "__imul__"), _in_place(_MULTIPLY)),
    **dict.fromkeys(("div_", "__itruediv__", "__idiv__"), _in_place(_DIVIDE)),
    **dict.fromkeys(("add", "__add__", "__radd__", "sub", "__sub__"), _with_tensor),
    **dict.fromkeys(("add_", "__iadd__", "sub_", "__isub__"), _in_place(_with_tensor)),
    "tanh": _tanh,
    "tanh_": _in_place(_tanh),
    **dict.fromkeys(("view", "reshape"), _view),
    "flatten": _flatten,
    "__getitem__": _getitem,
}
