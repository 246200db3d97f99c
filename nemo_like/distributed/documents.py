"""Packed documents: several in one row, which must train as if each came alone.

Callers say where documents begin in one of three ways: ``position_ids`` that restart, ``cu_seqlens``, or an
``attention_mask`` of document numbers (0: padding). transformers reads the first (in some models, where there is no
cache), its SDPA ignores the second and takes the third for ones. So all three become positions that restart, masks that
keep documents apart, and labels of which each document's first, predicted from the document before, does not count.
"""

from __future__ import annotations

import contextvars
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from nemo_like.distributed.context_parallel.cached import counts_positions
from nemo_like.distributed.context_parallel.mixers import sequence_mixers
from nemo_like.losses.targets import IGNORED, predicts_next_token
from nemo_like.module_tree import base_model
from nemo_like.options.words import a_or_an

_LENGTHS = ("cu_seqlens", "cu_seq_lens", "cu_seq_lens_q")
_BESIDE = (*_LENGTHS, "cu_seq_lens_k", "max_length_q", "max_length_k", "max_seqlen", "seq_idx")
_documents: contextvars.ContextVar[Tensor | None] = contextvars.ContextVar("nemo_like_documents", default=None)
"""(B, S) numbers of the documents of the call that runs; None: its rows are whole."""


def documents_of(positions: Any, batch: int) -> Tensor | None:
    """(B, S) numbers of the documents in each row, by where `positions` do not go on by one; None where they all do.

    positions: (B, S) or (1, S), or (4, B, S) whose first stream counts tokens; other shapes say nothing.

    >>> documents_of(torch.tensor([[0, 1, 2, 0, 1]]), 1).tolist()
    [[0, 0, 0, 1, 1]]
    """
    if not isinstance(positions, Tensor):
        return None
    if positions.ndim == 3 and len(positions) == 4:
        positions = positions[0]
    if positions.ndim != 2:
        return None
    starts = positions[:, 1:] != positions[:, :-1] + 1
    if not bool(starts.any()):
        return None
    numbers = torch.cat([torch.zeros_like(starts[:, :1]), starts], 1).cumsum(1)
    return numbers.expand(batch, -1)


def keep_documents_apart(model: nn.Module) -> nn.Module:
    """Have a transformers `model` train packed rows as its documents one by one, in place; returns it.

    Call it before any other hook is put on the model. Other models, and calls without packed rows, are as they were.
    """
    calls = packed_calls(model)
    if calls is not None:
        model.register_forward_pre_hook(calls, with_kwargs=True)
        model.register_forward_hook(calls.after, always_call=True)
    return model


def packed_calls(model: nn.Module) -> PackedCalls | None:
    """The forward pre-hook that keeps documents apart, not put on; None where `model` is none of transformers'."""
    inner = base_model(model)
    names = inspect.signature(inner.forward).parameters
    if "transformers.masking_utils" not in sys.modules or not hasattr(inner, "config") or "attention_mask" not in names:
        return None
    _tell_masks_of_documents()
    return PackedCalls(model)


class PackedCalls:
    """The forward pre-hook of one model."""

    def __init__(self, model: nn.Module) -> None:
        inner = base_model(model)
        self._tokens: list[Any] = []
        self._names = tuple(inspect.signature(inner.forward).parameters)
        self._shifts = predicts_next_token(inner)
        self._encoder_decoder = bool(getattr(inner.config, "is_encoder_decoder", False))
        # Towers of pictures and sounds have sequences of their own, which no document of the text ends.
        mixer = next(sequence_mixers(_language(inner), transformers=True), None)
        self._mixer = None if mixer is None else f"{mixer[0]}, {a_or_an(mixer[1])}, {mixer[2]}"
        self._config: Any = inner.config
        self._streams = any(hasattr(module, "get_rope_index") for module in inner.modules())
        find_text: Any = getattr(inner.config, "get_text_config", None)
        text: Any = inner.config if find_text is None else find_text()
        self._row_limits: list[tuple[str, int]] = []
        if "chunked_attention" in (getattr(text, "layer_types", None) or ()):
            self._row_limits.append(("attention_chunk_size", int(text.attention_chunk_size)))
        if any(counts_positions(module) for module in inner.modules()):
            self._row_limits.append(("floor_scale", int(text.floor_scale) - 1))

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What to call `model` with instead; None: what it was given."""
        self._tokens.append(_documents.set(None))
        given = dict(zip(self._names, args)) | kwargs
        main = next((given[key] for key in ("input_ids", "inputs_embeds") if isinstance(given.get(key), Tensor)), None)
        if main is None or given.get("past_key_values") is not None or len(args) > len(self._names):
            return None
        numbers, numbered = self._numbers(given, *main.shape[:2])
        if numbers is None or (self._mixer and not numbered):
            return None  # kernels of recurrent layers read cu_seqlens themselves
        if self._mixer or self._encoder_decoder or "position_ids" not in self._names:
            raise NotImplementedError(
                f"This call of {type(model).__name__} has packed documents, and "
                + (self._mixer or "it is an encoder-decoder or takes no position_ids")
                + ": give it one document per row."
            )
        self._refuse_counting_rows(main.shape[1])
        given = self._apart(given, numbers)
        _documents.set(documents_of(given["position_ids"], len(main)))
        return (), given

    def after(self, model: nn.Module, args: Any, output: Any) -> None:
        """The forward hook that ends what the pre-hook began."""
        if self._tokens:
            _documents.reset(self._tokens.pop())

    def _refuse_counting_rows(self, length: int) -> None:
        """What counts along a row, not along a document: Llama 4's chunks, and the scales of its queries."""
        for name, most in self._row_limits:
            if length > most:
                raise NotImplementedError(
                    f"This call has packed documents in rows of {length} tokens, and {name} ({most}) is counted along the "
                    f"row, not from where a document begins: pack rows of at most {most} tokens, or give one document a row."
                )

    def _numbers(self, given: dict[str, Any], batch: int, length: int) -> tuple[Tensor | None, bool]:
        """(B, S) document numbers, 0 for padding or -1 where unknown, and whether a mask gave them."""
        mask: Any = given.get("attention_mask")
        flat = isinstance(mask, Tensor) and mask.ndim == 2 and not mask.is_floating_point() and mask.dtype != torch.bool
        if flat and mask.shape[1] == length and bool((mask > 1).any()):
            return mask, True
        ends = next((given[name] for name in _LENGTHS if isinstance(given.get(name), Tensor)), None)
        if ends is not None:
            if "flash" in str(getattr(self._config, "_attn_implementation", "")):
                return None, False  # which reads them itself
            return _hide(_numbers_from_lengths(ends, batch, length), mask), False
        found = documents_of(given.get("position_ids"), batch)
        return (None if found is None else _hide(found + 1, mask)), False

    def _apart(self, given: dict[str, Any], numbers: Tensor) -> dict[str, Any]:
        starts = torch.ones_like(numbers, dtype=torch.bool)
        starts[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
        _refuse_scattered(numbers, starts)
        positions = since_start(starts)
        own, streams = _text_and_streams(given.get("position_ids"))
        if self._streams and streams is None and any(name.startswith("pixel_values") for name in given):
            raise NotImplementedError(
                "This call has packed documents with pictures, whose positions along height and width are not known here: "
                "pass position_ids of four streams (4, B, S), of which the first counts each document's tokens and the "
                "others are get_rope_index's of each document."
            )
        if own is not None:
            if not bool(((own[:, 1:] != own[:, :-1] + 1) | ~starts[:, 1:]).all()):
                raise ValueError(
                    "This call has packed documents, and position_ids that go on where a document begins: leave "
                    "position_ids out, or restart them there."
                )
            # Those of a document may begin elsewhere than at zero; padding is apart from what it follows.
            positions = torch.where(numbers == 0, positions, own.expand_as(positions))
        given = {name: value for name, value in given.items() if name not in _BESIDE}
        if streams is not None:
            positions = torch.cat([positions[None], streams.expand(-1, *positions.shape)])
        given |= {"position_ids": positions, "attention_mask": None, "use_cache": False}
        labels = given.get("labels")
        if self._shifts and isinstance(labels, Tensor):
            given["labels"] = labels.masked_fill(starts, IGNORED)
        return given


def _language(model: nn.Module) -> nn.Module:
    """The module that runs the text, of a model that may have towers of pictures beside it."""
    find = getattr(model, "get_decoder", None)
    found = find() if callable(find) else None
    return found if isinstance(found, nn.Module) else model


def _text_and_streams(positions: Any) -> tuple[Tensor | None, Tensor | None]:
    """Of ``position_ids``: (B, S) that count tokens, and three streams (3, B, S) of pictures; None where they have none."""
    if not isinstance(positions, Tensor) or positions.ndim not in (2, 3):
        return None, None
    if positions.ndim == 2:
        return positions, None
    return (positions[0], positions[1:]) if len(positions) == 4 else (None, positions)


def _tell_masks_of_documents() -> None:
    """Have transformers' masks look at `_documents`, but those of flash attention; once in a process."""
    module: Any = sys.modules["transformers.masking_utils"]
    for name in ("sdpa", "eager", "flex_attention"):
        own = module.ALL_MASK_ATTENTION_FUNCTIONS[name]
        if not isinstance(own, _MaskOfDocuments):
            module.AttentionMaskInterface.register(name, _MaskOfDocuments(own))


class _MaskOfDocuments:
    """A mask function of transformers, which hides other documents of the row while a packed call runs."""

    def __init__(self, own: Callable[..., Any]) -> None:
        self._own = own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        numbers = _documents.get()
        if numbers is None or not kwargs.get("q_length") == kwargs.get("kv_length") == numbers.shape[1]:
            return self._own(*args, **kwargs)
        shape = kwargs["mask_function"]

        def within(b: Any, head: Any, q: Any, k: Any) -> Any:
            return shape(b, head, q, k) & (numbers[b, q] == numbers[b, k])

        skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        return self._own(*args, **kwargs | skips | {"mask_function": within})


def _numbers_from_lengths(ends: Tensor, batch: int, length: int) -> Tensor:
    """(B, S) from cumulative lengths over all rows one after the other: 0, end of the first document, ..."""
    total = batch * length
    if ends.ndim != 1 or int(ends[0]) != 0 or int(ends[-1]) > total:
        raise ValueError(
            f"cu_seqlens is {ends.tolist()}; it must begin with 0 and end within the {batch} x {length} tokens of the batch."
        )
    numbers = torch.searchsorted(ends[1:].contiguous(), torch.arange(total, device=ends.device), right=True) + 1
    return numbers.masked_fill(numbers > len(ends) - 1, 0).view(batch, length)


def _hide(numbers: Tensor, mask: Any) -> Tensor:
    """0 where a mask of ones and zeros hides a token."""
    if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.shape != numbers.shape:
        return numbers
    return numbers.masked_fill(mask == 0, 0)


def _refuse_scattered(numbers: Tensor, starts: Tensor) -> None:
    """A document in two pieces would train as two."""
    for row, begins in zip(numbers, starts):
        runs = row[begins & (row != 0)]
        if len(runs) != len(runs.unique()):
            raise ValueError(
                f"A row has the document numbers {runs.tolist()} one after the other: a document must be in one piece, "
                "without hidden tokens inside."
            )


def since_start(starts: Tensor) -> Tensor:
    """Positions that restart where `starts` is True, (B, S)."""
    index = torch.arange(starts.shape[1], device=starts.device).expand_as(starts)
    return index - index.masked_fill(~starts, 0).cummax(1).values
