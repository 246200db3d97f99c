"""Packed documents: several in one row, which must train as if each came alone.

Callers state where documents begin in one of three ways: ``position_ids`` that restart in a call without an
``attention_mask``, ``cu_seqlens``, or an ``attention_mask`` of document numbers (0: padding). transformers reads the first
(in some models, where there is no cache), its SDPA ignores the second and takes the third for ones. So all three become
positions that restart, masks that keep documents apart (for flash attention, lengths), and labels. Each document's first
label, predicted from the document before, does not count.

Together with a mask of ones and zeros, positions that restart are positions: a row with padding on its left has them.
"""

import contextlib
import contextvars
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from nemo_like._util.log import warn_once
from nemo_like._util.module_tree import bare, bare_modules, base_model, join
from nemo_like.distributed.context.parts import (
    PackedRows,
    documents_of,
    in_blocks,
    kept_apart,
    once_for_all_layers,
    running,
)
from nemo_like.distributed.context.stacks import counts_ids, counts_positions, sequence_mixers
from nemo_like.layers.groups import group_of
from nemo_like.layers.structure import class_of
from nemo_like.losses.rows import IGNORED, predicts_next_token
from nemo_like.transformers_compat import (
    ATTENTION,
    FIND_DOCUMENTS,
    USE_CACHE,
    given_cache,
    mask_functions,
    masking,
    model_base,
    text_config,
)

_LENGTHS = ("cu_seqlens", "cu_seq_lens", "cu_seq_lens_q")
LEFT_ALONE = "nemo_like_documents_left_alone"
# True while the documents of the call that runs are known: transformers would read the device to find them again.
_are_known = contextvars.ContextVar("nemo_like_documents_known", default=False)
_BESIDE = (*_LENGTHS, "cu_seq_lens_k", "max_length_q", "max_length_k", "max_seqlen", "seq_idx")


def keep_documents_apart(model: nn.Module) -> nn.Module:
    """Have a transformers `model` train packed rows as its documents one by one, in place; returns it.

    Call it before any other hook is put on the model. Other models, and calls without packed rows, are as they were. So is
    one that is marked with `LEFT_ALONE`: it is planned for a trainer that trains packed rows in transformers' own way.
    """
    calls = None if getattr(model, LEFT_ALONE, False) else packed_calls(model)
    if calls is not None:
        model.register_forward_pre_hook(calls, with_kwargs=True)
        model.register_forward_hook(calls.after, always_call=True)
    return model


class PackedCalls:
    """The forward pre-hook of one model."""

    def __init__(self, model: nn.Module) -> None:
        inner = base_model(model)
        self._tokens: list[Any] = []
        self._names = tuple(inspect.signature(inner.forward).parameters)
        self._shifts = predicts_next_token(inner)
        generates: Any = getattr(inner, "can_generate", None)
        self._shifts_itself = not self._shifts and callable(generates) and generates()
        self._config: Any = getattr(inner, "config", None)
        self._why_not = _why_not(inner, self._names, masked=not self._by_lengths)
        self._counts_ids = counts_ids(_language(inner))
        self._announced = False
        self._streams = any(hasattr(module, "get_rope_index") for module in inner.modules())
        text: Any = text_config(self._config)
        self._row_limits: list[tuple[str, int]] = []
        if "chunked_attention" in (getattr(text, "layer_types", None) or ()):
            self._row_limits.append(("attention_chunk_size", int(text.attention_chunk_size)))
        if any(counts_positions(module) for module in inner.modules()):
            self._row_limits.append(("floor_scale", int(text.floor_scale) - 1))

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the arguments to call `model` with instead; None: those that it was given."""
        self._tokens.append(running.set(None))
        arguments = dict(zip(self._names, args)) | kwargs
        main = next(
            (arguments[key] for key in ("input_ids", "inputs_embeds") if isinstance(arguments.get(key), Tensor)), None
        )
        if main is None or given_cache((), (), arguments) is not None or len(args) > len(self._names):
            return None
        numbers = self._numbers(model, arguments, *main.shape[:2])
        position_ids = arguments.get("position_ids")
        # Those that a model makes itself count its tokens, unless it makes them of ids or of pictures.
        counts = position_ids is None and not (self._counts_ids or self._streams)
        has_lengths = any(isinstance(arguments.get(name), Tensor) for name in _LENGTHS)
        is_read = counts or _text_and_streams(position_ids)[0] is not None
        _are_known.set(numbers is not None or (is_read and not has_lengths))
        if numbers is None:
            return None
        if self._why_not:
            self._refuse(model, self._why_not)
        for name, most in self._row_limits:
            if main.shape[1] > most:
                raise NotImplementedError(
                    f"This call has packed documents in rows of {main.shape[1]} tokens, and {name} ({most}) is counted "
                    f"along the row, not from where a document begins: pack rows of at most {most} tokens, or give one "
                    "document a row."
                )
        arguments = self._apart(model, arguments, numbers)
        documents = documents_of(arguments["position_ids"], len(main))
        if documents is not None:  # else each row is one document
            running.set(PackedRows(documents, apart=self._by_lengths))
        return (), arguments

    def after(self, model: nn.Module, args: object, output: object) -> None:
        """End the packed call that the pre-hook began: the forward hook."""
        if not self._tokens:
            return
        rows = running.get()
        running.reset(self._tokens.pop())
        _are_known.set(False)
        if rows is not None and not rows.apart and output is not None:
            self._refuse(model, "none of its masks is made by transformers' masking_utils, which would keep them apart")

    def whole_batch(self, model: nn.Module, batch: dict[str, Any]) -> dict[str, Any]:
        """`batch`, of which each part will be a call of its own, as `model` would be called with it."""
        try:
            changed = self(model, (), batch)
        finally:
            self.after(model, (), None)
        return batch if changed is None else {name: value for name, value in changed[1].items() if name not in _BESIDE}

    @property
    def _by_lengths(self) -> bool:
        """Return whether attention takes no mask, but lengths: the varlen kernels."""
        return "flash" in str(getattr(self._config, ATTENTION, ""))

    def _refuse(self, model: nn.Module, why: str) -> None:
        raise NotImplementedError(
            f"This call of {type(model).__name__} has packed documents, and {why}: give it one document per row."
        )

    def _numbers(self, model: nn.Module, arguments: dict[str, Any], batch: int, length: int) -> Tensor | None:
        """(B, S) document numbers, 0 for padding; None: each row is one document, or the model reads lengths itself."""
        mask: Any = arguments.get("attention_mask")
        flat = isinstance(mask, Tensor) and mask.ndim == 2 and not mask.is_floating_point() and mask.dtype != torch.bool
        if flat and mask.shape[1] == length and bool((mask > 1).any()):
            self._announced = True
            return mask
        name = next((name for name in _LENGTHS if isinstance(arguments.get(name), Tensor)), None)
        if name is not None:
            if name in self._names:
                return None
            if mask is not None and not (isinstance(mask, Tensor) and mask.ndim == 2):
                raise ValueError(
                    f"This call states with {name} where documents begin, and with an attention_mask of another form than "
                    "(B, S) which tokens each token sees: leave one of the two out."
                )
            self._announced = True
            numbers = numbers_from_lengths(arguments[name], batch, length)
            if isinstance(mask, Tensor) and mask.shape == numbers.shape:  # zeros hide tokens
                numbers = numbers.masked_fill(mask == 0, 0)
            return numbers
        documents = documents_of(arguments.get("position_ids"), batch)
        if documents is None:
            return None
        kind = type(model).__name__
        if mask is not None:
            if (
                flat
                and mask.shape == documents.shape
                and not self._announced
                # A document begins at a token that the mask shows, together with the one before.
                and ((documents.diff() != 0) & (mask[:, 1:] != 0) & (mask[:, :-1] != 0)).any()
            ):
                self._announced = True
                warn_once(
                    f"position_ids restart in a row of this call of {kind}, at a token that its attention_mask shows "
                    "together with the one before. With a mask they are read as positions, as transformers does, and the "
                    "row is one document. If it is several: leave attention_mask out, or give their numbers in it."
                )
            return None
        if not self._announced:
            self._announced = True
            warn_once(
                f"position_ids restart in a row of this call of {kind}, and there is no attention_mask: the row is packed "
                "documents. None sees another, and the label of a document's first token does not count."
            )
        return documents + 1

    def _apart(self, model: nn.Module, arguments: dict[str, Any], numbers: Tensor) -> dict[str, Any]:
        starts = starts_of(numbers)
        refuse_scattered(numbers, starts)
        positions = since_start(starts)
        text, streams = _text_and_streams(arguments.get("position_ids"))
        if text is None and self._counts_ids:
            raise ValueError(
                f"This call has packed documents, and {type(model).__name__} counts its positions from the ids that are no "
                "padding: pass position_ids that restart where a document begins."
            )
        if self._streams and streams is None and any(name.startswith("pixel_values") for name in arguments):
            raise NotImplementedError(
                "This call has packed documents with pictures, whose positions along height and width are not known here: "
                "pass position_ids of four streams (4, B, S), of which the first counts each document's tokens and the "
                "others are get_rope_index's of each document."
            )
        if text is not None:
            if not bool(((text[:, 1:] != text[:, :-1] + 1) | ~starts[:, 1:]).all()):
                raise ValueError(
                    "This call has packed documents, and position_ids that go on where a document begins: leave "
                    "position_ids out, or restart them there."
                )
            # Those of a document may begin elsewhere than at zero; padding is apart from the tokens before it.
            positions = torch.where(numbers == 0, positions, text.expand_as(positions))
        arguments = {name: value for name, value in arguments.items() if name not in _BESIDE}
        if streams is not None:
            positions = torch.cat([positions[None], streams.expand(-1, *positions.shape)])
        arguments |= {"position_ids": positions, "attention_mask": None, USE_CACHE: False}
        if self._by_lengths:
            arguments |= lengths_of(starts)
        labels, moved = arguments.get("labels"), arguments.get("shift_labels")
        if self._shifts_itself and isinstance(labels, Tensor) and labels.shape == starts.shape:
            counted = labels != IGNORED
            if bool(counted[:, 1:][starts[:, 1:]].any()):
                self._refuse(model, "its own loss counts the label of a document's first token (write -100 there)")
        if self._shifts and isinstance(labels, Tensor):
            arguments["labels"] = labels.masked_fill(starts, IGNORED)
            # Others are the caller's targets of each token, a document's last one too, whose next is not in the row.
            if isinstance(moved, Tensor) and torch.equal(moved[:, :-1], labels[:, 1:]):
                arguments["shift_labels"] = moved.masked_fill(nn.functional.pad(starts, (0, 1))[:, 1:], IGNORED)
        return arguments


def packed_calls(model: nn.Module) -> PackedCalls | None:
    """The forward pre-hook that keeps documents apart, not put on; None where `model` is none of transformers'."""
    inner = base_model(model)
    base = model_base()
    if base is None or not any(isinstance(module, base) for module in inner.modules()):
        return None
    if not isinstance(inner, base) and "attention_mask" not in inspect.signature(inner.forward).parameters:
        return None  # a model of the caller's own, which calls one of theirs
    _tell_masks_of_documents()
    return PackedCalls(model)


def _why_not(model: nn.Module, names: tuple[str, ...], masked: bool) -> str | None:
    """Why packed documents cannot be kept apart in `model`, whose forward takes `names`; None: nothing is known.

    masked: a mask keeps them apart; else lengths, which attention of the layers' own does not read.
    """
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return "it is an encoder-decoder"
    text = bare(_language(model))
    prefix = next((name for name, module in bare_modules(model) if module is text), "")
    for name, module, why in sequence_mixers(text, transformers=True, masked=masked):
        # Encoders of pictures and sounds have sequences of their own, which no document of the text ends.
        fqn = join(prefix, name) if name else prefix
        if not fqn or group_of(model, fqn) not in ("vision", "audio"):
            return f"{fqn or 'it'}, a {class_of(module).__name__}, {why}"
    missing = [name for name in ("attention_mask", "position_ids") if name not in names]
    return f"it takes no {' and no '.join(missing)}" if missing else None


def _language(model: nn.Module) -> nn.Module:
    """The module that runs the text, of a model that may have encoders of pictures next to it."""
    find = getattr(model, "get_decoder", None)
    language = find() if callable(find) else None
    return language if isinstance(language, nn.Module) else model


def _text_and_streams(positions: object) -> tuple[Tensor | None, Tensor | None]:
    """Return the parts of ``position_ids``: (B, S) that count tokens, and three streams (3, B, S) of pictures; None
    where they have none."""
    if not isinstance(positions, Tensor) or positions.ndim not in (2, 3):
        return None, None
    if positions.ndim == 2:
        return positions, None
    return (positions[0], positions[1:]) if len(positions) == 4 else (None, positions)


def _tell_masks_of_documents() -> None:
    """Have transformers' masks look at `running`, but those of flash attention; once in a process."""
    # Not by `register`: the functions that cp exchanges here and puts back would hide it.
    mapping: Any = mask_functions()
    for name in ("sdpa", "eager", "flex_attention"):
        if not isinstance(mapping[name], _MaskOfDocuments):
            mapping[name] = _MaskOfDocuments(mapping[name], as_numbers=name == "sdpa")
    find = getattr(masking(), FIND_DOCUMENTS, None)  # None: a release that does not look
    if find is not None and not isinstance(find, functools.partial):
        setattr(masking(), FIND_DOCUMENTS, functools.partial(_documents_in, find))


def _documents_in(find: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return None if _are_known.get() else find(*args, **kwargs)


class _MaskOfDocuments:
    """A mask function of transformers, which hides other documents of the row while a packed call runs."""

    def __init__(self, function: Callable[..., Any], *, as_numbers: bool) -> None:
        self._own, self._as_numbers = function, as_numbers

    def __call__(self, *args: object, **kwargs: Any) -> Any:
        if in_blocks.get() and self._as_numbers:
            kept_apart()
            return None
        rows = running.get()
        if rows is None or not kwargs.get("q_length") == kwargs.get("kv_length") == rows.numbers.shape[1]:
            return self._own(*args, **kwargs)
        shape, numbers = kwargs["mask_function"], rows.numbers
        rows.apart = True

        def within(b: Any, head: object, q: Any, k: Any) -> Any:
            return shape(b, head, q, k) & (numbers[b, q] == numbers[b, k])

        skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        mask = self._own(*args, **kwargs | skips | {"mask_function": within})
        return once_for_all_layers(mask, kwargs["dtype"]) if self._as_numbers else mask


@contextlib.contextmanager
def masks_in_blocks(wanted: bool) -> Iterator[None]:
    """Within it, if `wanted`, torch's attention gets no mask of documents and windows: as flex attention, it saves none."""
    token = in_blocks.set(wanted)
    try:
        yield
    finally:
        in_blocks.reset(token)


def makes_masks(model: nn.Module, arguments: Mapping[str, Any]) -> bool:
    """Return whether a call of a transformers `model` with `arguments` gives torch's attention masks of documents or of
    windows, which are of tokens by tokens."""
    config: Any = text_config(getattr(base_model(model), "config", None))
    tokens = next((value for value in arguments.values() if isinstance(value, Tensor) and value.ndim == 2), None)
    if getattr(config, ATTENTION, None) != "sdpa" or tokens is None:
        return False
    if (
        any(name in arguments for name in _LENGTHS)
        or documents_of(arguments.get("position_ids"), len(tokens)) is not None
    ):
        return True
    kinds = set(getattr(config, "layer_types", None) or ("sliding_attention",))
    sizes = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
    return any(0 < (getattr(config, sizes[kind], 0) or 0) < tokens.shape[1] for kind in kinds & sizes.keys())


# Documents as numbers, and their starts, positions and lengths.


def starts_of(numbers: Tensor) -> Tensor:
    """Return the places where a document of `numbers` (B, S) begins."""
    starts = torch.ones_like(numbers, dtype=torch.bool)
    starts[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
    return starts


def since_start(starts: Tensor) -> Tensor:
    """Positions that restart where `starts` is True, (B, S)."""
    index = torch.arange(starts.shape[1], device=starts.device).expand_as(starts)
    return index - index.masked_fill(~starts, 0).cummax(1).values


def lengths_of(starts: Tensor) -> dict[str, Any]:
    """Return the arguments of kernels without masks for documents beginning at `starts`, (B, S), of all rows in
    turn."""
    begins = starts.flatten().nonzero()[:, 0].int()
    ends = torch.cat([begins, begins.new_tensor([starts.numel()])])
    longest = int(ends.diff().max())
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}


def numbers_from_lengths(ends: Tensor, batch: int, length: int) -> Tensor:
    """(B, S) from cumulative lengths over all rows one after the other: 0, end of the first document, ..."""
    total = batch * length
    if ends.ndim != 1 or int(ends[0]) != 0 or int(ends[-1]) > total:
        raise ValueError(
            f"cu_seqlens is {ends.tolist()}; it must begin with 0 and end within the {batch} x {length} tokens of the batch."
        )
    numbers = torch.searchsorted(ends[1:].contiguous(), torch.arange(total, device=ends.device), right=True) + 1
    return numbers.masked_fill(numbers > len(ends) - 1, 0).view(batch, length)


def refuse_scattered(numbers: Tensor, starts: Tensor) -> None:
    """A document in two pieces would train as two."""
    begins = starts & (numbers != 0)
    apart = -1 - torch.arange(numbers.shape[1], device=numbers.device)
    again = (numbers.where(begins, apart).sort(1).values.diff(dim=1) == 0).any(1)
    if again.any():
        row = int(again.int().argmax())
        raise ValueError(
            f"A row has the document numbers {numbers[row][begins[row]].tolist()} one after the other: a document must be "
            "in one piece, without hidden tokens inside."
        )
