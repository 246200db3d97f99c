"""`loss="chunked"` for whole models: ``model(**batch).loss`` is what it was, and the logits never exist.

While a model in training mode is called with labels, its head answers with `nemo_like.losses.deferred_logits`.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from nemo_like._util.log import warn_once
from nemo_like.losses.deferred_logits import DeferredLogits, HeadCall, Recipe
from nemo_like.losses.heads import autocast_dtype
from nemo_like.options import ChunkedLoss
from nemo_like.torch_compat import answering_calls

_MARK = "_nemo_like_chunked_loss"
LABELS = ("labels", "targets", "target", "shift_labels")
"""Names of the argument with which a model computes its own loss."""
ITEMS = "num_items_in_batch"
"""The argument by which a model of transformers is given what to divide the sum of its losses by."""


def chunk_model_loss(model: nn.Module, options: ChunkedLoss) -> nn.Module:
    """Have `model` compute its loss in chunks whenever it is called with labels in training mode. In place; returns it.

    Call it before FSDP2 or DDP. ``output.logits`` is None in such calls. What is done with the logits is seen at each
    call; where it is more than casts, scales, soft caps, added constants and a choice of tokens before
    `torch.nn.functional.cross_entropy`, the whole logits are made, and this is logged once.

    Args:
        model: a Hugging Face model (``get_output_embeddings``), or one whose head is the only linear layer as wide as
            an embedding has rows; its forward computes a loss from an argument named ``labels`` or ``targets``.
        options: the size of a chunk.

    Raises:
        ValueError: no head was found. The model is unchanged then.
    """
    hooks = LossHooks(check_head(model), options)
    model.register_forward_pre_hook(hooks.before, with_kwargs=True)
    # Also after an exception, or the head would go on answering with deferred logits.
    model.register_forward_hook(hooks.after, always_call=True)
    setattr(model, _MARK, hooks)
    return model


def loss_hooks(model: nn.Module, options: ChunkedLoss) -> LossHooks:
    """The two hooks of `chunk_model_loss`, not put on: for who calls a model's forward by itself, and has no use for
    logits. They act in evaluation mode, too.

    Raises:
        ValueError: no head was found.
    """
    hooks = LossHooks(check_head(model), options)
    hooks.in_evaluation = True
    return hooks


@contextlib.contextmanager
def chunked_in_evaluation(model: nn.Module) -> Iterator[None]:
    """Within it, what `chunk_model_loss` was called with in `model` (itself, or a module inside) computes its loss in chunks
    in evaluation mode, too: the logits of a call with labels are None. Models with a plain loss are left as they are."""
    every = [hooks for module in model.modules() if isinstance(hooks := getattr(module, _MARK, None), LossHooks)]
    before = [hooks.in_evaluation for hooks in every]
    for hooks in every:
        hooks.in_evaluation = True
    try:
        yield
    finally:
        for hooks, was in zip(every, before, strict=True):
            hooks.in_evaluation = was


@contextlib.contextmanager
def chunked_calls(model: nn.Module, options: ChunkedLoss) -> Iterator[list[str]]:
    """Within it, `model` computes its loss in chunks as after `chunk_model_loss`, also in evaluation mode.

    For planning. Yields a list that receives, for each call with whole logits, why; nothing is logged.

    Raises:
        ValueError: no head was found.
    """
    reasons: list[str] = []
    hooks = LossHooks(check_head(model), options, reasons)
    handles = [
        model.register_forward_pre_hook(hooks.before, with_kwargs=True),
        model.register_forward_hook(hooks.after, always_call=True),
    ]
    try:
        yield reasons
    finally:
        for handle in handles:
            handle.remove()


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
    """The two hooks of one model."""

    def __init__(self, head: nn.Module, options: ChunkedLoss, planning: list[str] | None = None) -> None:
        """planning: act in evaluation mode too, and put there, instead of logging it, why logits are whole."""
        self._head, self._options, self._planning = head, options, planning
        self.in_evaluation = False
        """The hooks act in evaluation mode, too."""
        self._open: list[tuple[contextlib.ExitStack, list[HeadCall] | None]] = []

    def before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The forward pre-hook."""
        stack = contextlib.ExitStack()
        calls: list[HeadCall] | None = None
        acts = model.training or self.in_evaluation
        if self._planning is not None or (acts and not torch.compiler.is_compiling()):
            if _has_labels(model, args, kwargs):
                calls = []
                stack.enter_context(answering_calls(self._head, self._answer(calls)))
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
        for reason in sorted({call.reason for call in calls if call.reason is not None}):
            self._plain(model, reason)
        if not calls:
            name = type(self._head).__name__
            self._plain(model, f"its forward does not call its head, a {name}, with hidden states alone")
        chunked = any(call.losses for call in calls)
        if calls and not chunked and not any(call.reason for call in calls):
            self._plain(model, "its loss is not a cross entropy of them")
        return _without(output, keep=not chunked)

    def _plain(self, model: nn.Module, reason: str) -> None:
        if self._planning is not None:
            self._planning.append(reason)
        else:
            say_whole_logits(model, reason)

    def _answer(self, calls: list[HeadCall]) -> Callable[..., Any]:
        def answer(*args: Any, **kwargs: object) -> Any:
            fits = len(args) == 1 and not kwargs and isinstance(args[0], Tensor)
            if not fits or args[0].ndim < 2 or not args[0].is_floating_point():
                with answering_calls(self._head, None):
                    return self._head(*args, **kwargs)
            call = HeadCall(self._head, args[0], self._options)
            calls.append(call)
            if _is_cut(args[0]):
                return call.whole("its hidden states are cut over ranks")
            width = _width(self._head)
            assert width is not None
            return DeferredLogits.from_recipe(Recipe(call, args[0]), width, autocast_dtype(args[0]))

        return answer


def _is_cut(hidden: Tensor) -> bool:
    """Return whether a rank has a part of the hidden states, as a plan's own styles may leave them (along the
    sequence)."""
    return isinstance(hidden, DTensor) and not all(placement.is_replicate() for placement in hidden.placements)


def _has_labels(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    if any(kwargs.get(name) is not None for name in LABELS):
        return True
    if not args:
        return False
    names = list(inspect.signature(model.forward).parameters)
    return any(name in LABELS and value is not None for name, value in zip(names, args))


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
