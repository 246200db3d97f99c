"""Rows of packed documents in each form that callers have, and the documents one by one."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from nemo_like import parallelize
from tests.checks import backward
from tests_distributed.context.cut_models import LOSS, build, gradients, off, step

LENGTHS = ((5, 3, 4, 3), (2, 7, 6, 0))
"""Of the documents of two rows; the last of the first row is padding (15 tokens each)."""


def _ids(row: int) -> Tensor:
    return torch.randint(1, 48, (sum(LENGTHS[row]),), generator=torch.Generator().manual_seed(10 + row))


def packed(form: str) -> dict[str, Any]:
    """(2, 15) ids and labels, with what `form` says of the documents; ``positions`` | ``numbers`` | ``cu_seqlens``."""
    ids = torch.stack([_ids(0), _ids(1)])
    numbers = torch.stack([torch.repeat_interleave(torch.arange(1, 5), torch.tensor(row)) for row in LENGTHS])
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in LENGTHS])
    labels = ids.clone()
    labels[0, -LENGTHS[0][-1] :] = -100
    inputs: dict[str, Any] = {"input_ids": ids, "labels": labels}
    if form == "positions":
        return inputs | {"position_ids": positions}
    if form == "numbers":
        return inputs | {"attention_mask": numbers.masked_fill((numbers == 4), 0)}
    ends = torch.tensor([0, *(length for row in LENGTHS for length in row if length)]).cumsum(0).int()
    return inputs | {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 7, "max_length_k": 7}


def one_by_one(model: nn.Module, shifts: bool) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the mean over all counted tokens of all documents."""
    documents = [part[None] for row in (0, 1) for part in _ids(row).split([n for n in LENGTHS[row] if n])]
    documents.pop(3)  # the padding
    counted = sum(part.shape[1] - shifts for part in documents)
    losses = [
        backward(model(input_ids=part, labels=part).loss * (part.shape[1] - shifts) / counted).item() for part in documents
    ]
    return sum(losses), gradients(model)


def wrong_forms(name: str, cp: Any, modes: tuple[str, ...]) -> list[str]:
    """Where the packed rows of some form do not train `name` as the documents one by one."""
    whole = build(name)
    expected = one_by_one(copy.deepcopy(whole), shifts=name not in ("bert", "modernbert"))
    wrong = []
    for mode in modes:
        model = parallelize(copy.deepcopy(whole), ac=mode, cp=cp)
        for form in ("positions", "numbers", "cu_seqlens"):
            wrong += [f"{mode}, {form}: {text}" for text in off(step(model, packed(form)), expected, 2 * LOSS)]
    return wrong


def packed_pictures(whole: nn.Module, inputs: dict[str, Any], form: str) -> dict[str, Any]:
    """The rows of `inputs`, text with pictures, as one; said by ``positions`` or by ``numbers``.

    Where the model has streams of positions, there are four of them, or three beside numbers.
    """
    rows, length = inputs["input_ids"].shape
    one = {name: value.reshape(1, -1) for name, value in inputs.items() if value.shape == (rows, length)}
    numbers = {"attention_mask": torch.arange(1, rows + 1).repeat_interleave(length)[None]}
    counted = torch.arange(length).expand(1, rows, -1)
    find: Any = getattr(whole.model, "get_rope_index", None)
    if find is None:
        return inputs | one | ({"position_ids": counted.reshape(1, -1)} if form == "positions" else numbers)
    streams, _ = find(inputs["input_ids"], **{name: inputs[name] for name in ("image_grid_thw", "mm_token_type_ids")})
    if form == "positions":
        return inputs | one | {"position_ids": torch.cat([counted, streams]).reshape(4, 1, -1)}
    return inputs | one | numbers | {"position_ids": streams.reshape(3, 1, -1)}
