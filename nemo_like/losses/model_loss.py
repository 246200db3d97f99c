"""`loss="chunked"` for whole models: ``model(**batch).loss`` is unchanged, and the logits never exist.

While a model in training mode is called with labels, its head answers with `DeferredLogits`.
"""

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from nemo_like._util.log import warn_once
from nemo_like._util.tensors import autocast_dtype
from nemo_like.losses.cross_entropy import ChunkedCall, losses_per_token, reduced, whole
from nemo_like.losses.heads import Head
from nemo_like.losses.rows import CrossEntropyRows, Shape
from nemo_like.options import ChunkedLoss
from nemo_like.torch_compat import answering_calls, shape_only, tree_map_only

# Logits that are not computed yet: they note a model's operators on them, and let its cross entropy compute in chunks.
#
# A model that is called with labels puts its hidden states through a head and gives the logits to a loss. In between it
# changes the logits a little (a soft cap, a scale, a cast, a shift by one token). Here nothing of that is looked up in a
# table of models: the head answers with `DeferredLogits`, and each operator on them is written down. When they reach
# `torch.nn.functional.cross_entropy`, the same is done to the logits of one chunk after the other. Whatever
# else is done with them, they first become the logits that the model would have had: the plain path.


@dataclass
class HeadCall:
    """One call of the head by the model, not made yet."""

    head: nn.Module
    hidden: Tensor  # (..., D)
    options: ChunkedLoss
    losses: int = 0  # Number of times that a chunked loss came of it.
    reason: str | None = None  # Why whole logits were needed; None: they were not.
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
class Recipe:
    """Way in which deferred logits are computed: the call of the head, and the operators on them since."""

    call: HeadCall
    hidden: Tensor  # (..., D): the hidden states of the tokens that are left, in the shape that they have now.
    steps: tuple[Callable[[Tensor], Tensor], ...] = ()  # The same operators, for whole logits.
    values: tuple[Callable[[Tensor], Tensor], ...] = ()  # Functions that change values, for the logits of a chunk.
    made: list[Tensor] = field(default_factory=list)  # The whole logits, where they were needed.

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

    @classmethod
    def from_recipe(cls, recipe: Recipe, width: int, dtype: torch.dtype) -> Self:
        deferred: Self = shape_only(cls, (*recipe.hidden.shape[:-1], width), dtype, recipe.hidden.device)
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
        if name == "__get__" or name in _LOOKS:
            return super().__torch_function__(func, types, args, kwargs)
        done = None
        if func is nn.functional.cross_entropy:
            done = _cross_entropy(args, kwargs)
        elif name in _RULES and args and isinstance(args[0], DeferredLogits):
            done = _RULES[name](func, args, kwargs)
        if done is not None:
            return done
        reason = f"it uses {name!r} on them"
        args, kwargs = tree_map_only(DeferredLogits, lambda logits: logits.recipe.logits(reason), (args, kwargs))
        return func(*args, **kwargs)


# Methods, and functions of torch, that read a tensor's shape, type or device.
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


# Function that returns an operator's output for deferred logits, its first argument; None: the logits are needed.
Rule = Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]


def _next(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], **change: Any) -> DeferredLogits:
    """Deferred logits after one more operator, with `change` of the recipe or of the dtype."""
    old, rest = args[0], tuple(args[1:])
    steps = (*old.recipe.steps, lambda logits: func(logits, *rest, **kwargs))
    dtype = change.pop("dtype", old.dtype)
    return DeferredLogits.from_recipe(replace(old.recipe, steps=steps, made=[], **change), old.shape[-1], dtype)


def _cast(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A cast determines how precise the loss is to be; chunks compute it in float32 in any case."""
    like = torch.empty(0, dtype=args[0].dtype, device=args[0].device)
    rest = [torch.empty(0, dtype=a.dtype, device=a.device) if isinstance(a, DeferredLogits) else a for a in args[1:]]
    result = func(like, *rest, **kwargs)
    if result.device != like.device or not result.is_floating_point():
        return None
    return _next(func, args, kwargs, dtype=result.dtype)


def _scaled(exponent: int) -> Rule:
    def rule(func: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if len(args) != 2 or kwargs:
            return None
        factor = args[1]
        if isinstance(factor, Tensor):
            return _with_tensor(func, args, kwargs)
        if isinstance(factor, bool) or not isinstance(factor, int | float) or factor == 0:
            return None
        return _valued(func, args, kwargs, Scale(factor if exponent > 0 else 1 / factor))

    return rule


def _tanh(func: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return _valued(func, args, kwargs, torch.tanh)


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
    return _valued(func, args, kwargs, lambda logits: func(logits, other))


def _valued(func: object, args: Any, kwargs: Any, step: Callable[[Tensor], Tensor]) -> DeferredLogits:
    return _next(func, args, kwargs, values=(*args[0].recipe.values, step))


def _in_place(rule: Rule) -> Rule:
    def changed(func: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        done = rule(func, args, kwargs)
        if done is None:
            return None
        args[0].recipe = done.recipe
        return args[0]

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
    return _next(func, args, kwargs, hidden=hidden.reshape(*sizes[:-1], hidden.shape[-1]))


def _flatten(func: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    old = args[0]
    arguments = dict(zip(("start_dim", "end_dim"), args[1:])) | dict(kwargs)
    start, end = arguments.get("start_dim", 0), arguments.get("end_dim", -1)
    if end % old.dim() == old.dim() - 1:
        return None
    return _next(func, args, kwargs, hidden=old.recipe.hidden.flatten(start, end))


def _getitem(func: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Some of the tokens, all of the vocabulary."""
    old, key = args
    keys = list(key) if isinstance(key, tuple) else [key]
    if any(item is None or isinstance(item, DeferredLogits | list) for item in keys):
        return None
    sizes = [item.ndim if isinstance(item, Tensor) and item.dtype == torch.bool else 1 for item in keys]
    used = sum(size for item, size in zip(keys, sizes) if item is not Ellipsis)
    at = next((index for index, item in enumerate(keys) if item is Ellipsis), len(keys))
    keys[at : at + 1] = [slice(None)] * (old.dim() - used)
    if not isinstance(keys[-1], slice) or keys[-1].indices(old.shape[-1]) != (0, old.shape[-1], 1):
        return None
    keys[-1] = slice(None)
    return _next(func, args, kwargs, hidden=old.recipe.hidden[tuple(keys)])


def _cross_entropy(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """`torch.nn.functional.cross_entropy` of deferred logits, in chunks; None where chunks do not know an argument."""
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
    options, module, hidden = recipe.call.options, recipe.call.head, whole(recipe.hidden)
    rows = CrossEntropyRows(labels, ignore_index, smoothing, options.z_loss, shape, options.compile)
    call, reduction = ChunkedCall(head, rows, options, module), arguments.get("reduction", "mean")
    with answering_calls(module, None):
        if reduction == "none":
            return losses_per_token(call, hidden)
        return reduced(call, hidden, rows.counts.sum() if reduction == "mean" else 1)


def _shaped_head(recipe: Recipe) -> tuple[Head, Shape]:
    """The head and the operators after it: as numbers where they are a scale and a soft cap, else part of the head."""
    factors, capped = [1.0, 1.0], 0
    known = all(isinstance(step, Scale) or step is torch.tanh for step in recipe.values)
    if known and recipe.values.count(torch.tanh) <= 1:
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
    "contiguous": _next,
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


_MARK = "_nemo_like_chunked_loss"
# Names of the argument with which a model computes its own loss.
LABELS = ("labels", "targets", "target", "shift_labels")
# The argument by which a model of transformers is given the divisor of the sum of its losses.
ITEMS = "num_items_in_batch"


def chunk_model_loss(model: nn.Module, options: ChunkedLoss) -> nn.Module:
    """Have `model` compute its loss in chunks whenever it is called with labels in training mode. In place; returns it.

    Call it before FSDP2 or DDP. ``output.logits`` is None in such calls. Operators on the logits are noted at each
    call; where they are more than casts, scales, soft caps, added constants and a choice of tokens before
    `torch.nn.functional.cross_entropy`, the whole logits are made, and this is logged once.

    Args:
        model: a Hugging Face model (``get_output_embeddings``), or one whose head is the only linear layer as wide as
            an embedding has rows; its forward computes a loss from an argument named ``labels`` or ``targets``.
        options: the size of a chunk.

    Raises:
        ValueError: no head was found. The model is unchanged then.
    """
    hooks = LossHooks(model, options)
    model.register_forward_pre_hook(hooks.before, with_kwargs=True)
    # Also after an exception, or the head would go on answering with deferred logits.
    model.register_forward_hook(hooks.after, always_call=True)
    setattr(model, _MARK, hooks)
    return model


@contextlib.contextmanager
def chunked_in_evaluation(model: nn.Module) -> Iterator[None]:
    """Within it, the modules in `model` (itself, or inside) that `chunk_model_loss` has changed compute their loss in
    chunks in evaluation mode, too: the logits of a call with labels are None. Models with a plain loss are
    unchanged."""
    every = [hooks for module in model.modules() if isinstance(hooks := getattr(module, _MARK, None), LossHooks)]
    with contextlib.ExitStack() as stack:
        for hooks in every:
            stack.enter_context(patch.object(hooks, "in_evaluation", True))
        yield


@contextlib.contextmanager
def chunked_calls(model: nn.Module, options: ChunkedLoss) -> Iterator[list[str]]:
    """Within it, `model` computes its loss in chunks as after `chunk_model_loss`, also in evaluation mode.

    For planning. Yields a list that receives, for each call with whole logits, why; nothing is logged.

    Raises:
        ValueError: no head was found.
    """
    reasons: list[str] = []
    hooks = LossHooks(model, options, reasons)
    with (
        model.register_forward_pre_hook(hooks.before, with_kwargs=True),
        model.register_forward_hook(hooks.after, always_call=True),
    ):
        yield reasons


def say_whole_logits(model: nn.Module, reason: str) -> None:
    """Log, once, that `model` gets whole logits although chunks were asked for."""
    warn_once(f"loss='chunked' was asked for; {type(model).__name__} gets whole logits, because {reason}.")


def computes_in_chunks(model: nn.Module) -> bool:
    """Return whether `model`, called with labels now, computes its loss in chunks."""
    hooks = getattr(model, _MARK, None)
    return isinstance(hooks, LossHooks) and (model.training or hooks.in_evaluation)


def check_head(model: nn.Module) -> nn.Module:
    """`find_head`, or ValueError."""
    head = find_head(model)
    if head is None:
        raise ValueError(
            f"loss='chunked' needs the output head of {type(model).__name__}, and none was found: get_output_embeddings() "
            "gives no module, and not exactly one linear layer is as wide as an embedding has rows. Use loss='model', or "
            "call nemo_like.losses.chunked_cross_entropy in the model's forward."
        )
    return head


def find_head(model: nn.Module) -> nn.Module | None:
    """The module that makes logits; None where there is none, or where it is not known which."""
    get_head = getattr(model, "get_output_embeddings", None)
    if callable(get_head):
        with contextlib.suppress(NotImplementedError, AttributeError):
            head = get_head()
            if isinstance(head, nn.Module) and _width(head) is not None:
                return head
    rows = {module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)}
    heads = [module for module in model.modules() if isinstance(module, nn.Linear) and module.out_features in rows]
    return heads[0] if len(heads) == 1 else None


def _width(head: nn.Module) -> int | None:
    """Logits per token."""
    width = getattr(head, "out_features", None)
    if isinstance(width, int):
        return width
    weight = getattr(head, "weight", None)
    return weight.shape[0] if isinstance(weight, Tensor) and weight.ndim == 2 else None


class LossHooks:
    """The two hooks of one model.

    Args:
        planning: act in evaluation mode too, and put there, instead of logging it, why logits are whole.
        in_evaluation: act in evaluation mode, too: for who calls a model's forward by itself, and has no use for logits.

    Raises:
        ValueError: no head was found.
    """

    def __init__(
        self, model: nn.Module, options: ChunkedLoss, planning: list[str] | None = None, in_evaluation: bool = False
    ) -> None:
        self._head, self._options, self._planning = check_head(model), options, planning
        self.in_evaluation = in_evaluation  # The hooks act in evaluation mode, too.
        self._open: list[tuple[contextlib.ExitStack, list[HeadCall] | None]] = []

    def before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The forward pre-hook."""
        stack = contextlib.ExitStack()
        calls: list[HeadCall] | None = None
        acts = model.training or self.in_evaluation
        if self._planning is not None or (acts and not torch.compiler.is_compiling()):
            if _has_labels(model, args, kwargs):
                calls = []
                stack.enter_context(answering_calls(self._head, functools.partial(self._answer, calls)))
            elif self._planning is not None:
                self._planning.append("it is called without labels")
        self._open.append((stack, calls))

    def after(self, model: nn.Module, args: object, output: object) -> Any:
        """The forward hook, also after an exception: the output without deferred logits; None: as it is."""
        if not self._open:
            return None
        stack, calls = self._open.pop()
        stack.close()
        if output is None or calls is None:
            return None
        chunked = any(call.losses for call in calls)
        reasons = sorted({call.reason for call in calls if call.reason is not None})
        if not calls:
            name = type(self._head).__name__
            reasons.append(f"its forward does not call its head, a {name}, with hidden states alone")
        elif not chunked and not reasons:
            reasons.append("its loss is not a cross entropy of them")
        for reason in reasons:
            if self._planning is None:
                say_whole_logits(model, reason)
            else:
                self._planning.append(reason)
        return _without(output, keep=not chunked)

    def _answer(self, calls: list[HeadCall], /, *args: Any, **kwargs: object) -> Any:
        """Answer the head's call: with deferred logits where it has hidden states alone, which is noted in `calls`."""
        fits = len(args) == 1 and not kwargs and isinstance(args[0], Tensor)
        if not fits or args[0].ndim < 2 or not args[0].is_floating_point():
            with answering_calls(self._head, None):
                return self._head(*args, **kwargs)
        call = HeadCall(self._head, args[0], self._options)
        calls.append(call)
        # A plan's own styles may leave each rank a part of them, along the sequence.
        if isinstance(args[0], DTensor) and not all(placement.is_replicate() for placement in args[0].placements):
            return call.whole("its hidden states are cut over ranks")
        width = _width(self._head)
        assert width is not None
        return DeferredLogits.from_recipe(Recipe(call, args[0]), width, autocast_dtype(args[0]))


def _has_labels(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    names = inspect.signature(model.forward).parameters if args else ()
    named = dict(zip(names, args)) | dict(kwargs)
    return any(named.get(name) is not None for name in LABELS)


def _without(output: object, keep: bool) -> Any:
    """`output` without deferred logits: None in their place, or with `keep` the logits."""
    if isinstance(output, DeferredLogits):
        recipe = output.recipe
        return recipe.logits("no loss was computed from them") if keep or recipe.made else None
    if isinstance(output, dict):
        if not any(isinstance(value, DeferredLogits) for value in output.values()):
            return output
        # A new one: transformers' outputs do not let an entry be set to None.
        return type(output)(**{key: _without(value, keep) for key, value in output.items()})
    if isinstance(output, tuple | list) and any(isinstance(item, DeferredLogits) for item in output):
        items = [_without(item, keep) for item in output]
        return type(output)(*items) if hasattr(output, "_fields") else type(output)(items)
    return output
