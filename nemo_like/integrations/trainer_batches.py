"""The largest batch that a trainer's data and collator can make: of training, and of evaluation."""

import copy
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nemo_like._util.log import say_once
from nemo_like._util.rng import random_numbers_put_back
from nemo_like.torch_compat import tree_leaves
from nemo_like.transformers_compat import generated_batch, generates_batches

_MOST_ROWS = 2000  # Rows of a data set without columns that are made, to measure them.
_MOST_PAIRED = 6  # Columns of which the sums of each two are compared, too: 15 pairs.


@dataclass(frozen=True)
class LargestBatch:
    """The largest batch among those that were collated."""

    batch: Any
    unknown: str = ""  # The rest of a sentence on rows that were not measured; empty: all were.

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self._tensors())

    @property
    def shape(self) -> str:
        """Rows and width of its largest tensor, in words."""
        most = max(self._tensors(), key=lambda tensor: tensor.numel(), default=torch.empty(0))
        return " x ".join(map(str, most.shape[:2]))

    def _tensors(self) -> Iterator[torch.Tensor]:
        values = [*self.batch.values()] if isinstance(self.batch, Mapping) else self.batch
        return (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))


def is_stream(data: Any) -> bool:
    """Return whether a data set is read once from front to back, as those of ``datasets`` with ``streaming=True``."""
    return isinstance(data, torch.utils.data.IterableDataset) or not (data is None or hasattr(data, "__getitem__"))


def find_largest(trainer: Any, rows: int | None = None) -> LargestBatch:
    """Return the largest training batch that a trainer's data and collator can make. Leaves random states as they are.

    The collator, or a copy of it, makes a batch of the longest rows by each column, by each two of them and by all, because
    it may pad, cut, pack or concatenate columns; the largest of these batches is returned. Of a data set whose rows must be
    made to be measured, at most `_MOST_ROWS` are.

    Args:
        rows: rows of the batch; default: the trainer's.

    Raises:
        ValueError: the training set is a stream, of which a batch would be lost; as `generated_batch`.
    """
    if is_stream(trainer.train_dataset):
        raise ValueError(
            "The largest batch is made of the training set, and that is a stream: taking a batch would lose it. Pass "
            "ac_sample_input= to the trainer."
        )
    rows = rows or trainer.args.train_batch_size
    if generates_batches(trainer):
        prompts = sorted((row["prompt"] for row in trainer.train_dataset), key=lambda prompt: -len(str(prompt)))
        batch = generated_batch(trainer, rows, prompts[:_MOST_ROWS])
        return LargestBatch(batch, ", with the longest prompt and completions; generating is not in it")
    with random_numbers_put_back():
        return _largest_of(trainer.get_train_dataloader(), rows)


def largest_batch(trainer: Any, rows: int | None = None) -> Any:
    """Return the batch of `find_largest`; rows that were not measured are logged."""
    largest = find_largest(trainer, rows)
    if largest.unknown:
        say_once(f"Planned for a batch of {largest.shape}{largest.unknown}.")
    return largest.batch


def find_largest_evaluated(trainer: Any, rows: int | None = None) -> LargestBatch | None:
    """Return the largest batch of a trainer's evaluation, as `find_largest`; None: it has no data for it, or a stream."""
    data = None if generates_batches(trainer) else trainer.eval_dataset
    sets = list(data.values()) if type(data) is dict else [] if data is None else [data]
    if not sets or any(map(is_stream, sets)):
        return None
    with random_numbers_put_back():
        loaders = [trainer.get_eval_dataloader(each) for each in sets]
        return max(
            (_largest_of(each, rows or trainer.args.eval_batch_size) for each in loaders),
            key=lambda each: each.bytes,
        )


def _largest_of(loader: Any, rows: int) -> LargestBatch:
    data, unknown = loader.dataset, ""
    places, columns = _lengths(data)
    if not columns:
        return LargestBatch(next(iter(loader)), ", the first one, as its rows have no lengths: others may be larger")
    if len(places) < len(data):
        unknown = f", of {len(places):,} rows out of {len(data):,} that were measured; others may be larger"
    collate = _copy_of(loader.collate_fn)
    batches = (collate([data[places[row]] for row in longest]) for longest in _candidates(columns, rows))
    return max((LargestBatch(batch, unknown) for batch in batches), key=lambda each: each.bytes)


def _copy_of(collate: Any) -> Any:
    """Return a copy of a collator, which may have a generator of its own that the trainer's batches go on with."""
    try:
        return copy.deepcopy(collate)
    except (TypeError, ValueError, RuntimeError, NotImplementedError) as error:
        say_once(f"{type(collate).__name__} cannot be copied ({error}): the largest batch is made by it itself.")
        return collate


def _candidates(columns: Mapping[Any, Sequence[int]], rows: int) -> Iterable[tuple[int, ...]]:
    """Return sets of the longest rows: by each column, by the sum of each two, and by that of all."""
    every = [*columns.values()]
    pairs = itertools.combinations(every, 2) if len(every) <= _MOST_PAIRED else ()
    keys = [*every, *(list(map(sum, zip(*pair))) for pair in pairs), list(map(sum, zip(*every)))]
    return dict.fromkeys(tuple(sorted(range(len(key)), key=lambda row: -key[row])[:rows]) for key in keys)


def _lengths(data: Any) -> tuple[Sequence[int], dict[Any, Sequence[int]]]:
    """Return the places of the rows that are measured, and their lengths by column; no column: there are no lengths."""
    if not hasattr(data, "__len__"):
        return (), {}
    if names := getattr(data, "column_names", None):
        listed = {name: lengths for name in names if (lengths := _list_lengths(data, name)) is not None}
        return range(len(data)), listed
    count = len(data) if isinstance(data, Sequence) else min(len(data), _MOST_ROWS)
    places = [number * len(data) // count for number in range(count)]
    rows = [_sizes(data[place]) for place in places]
    return places, {name: [row.get(name, 0) for row in rows] for name in {name: 0 for row in rows for name in row}}


def _list_lengths(data: Any, name: str) -> Sequence[int] | None:
    """Return the lengths of a column of lists or of text of a `datasets.Dataset`; None: it has none."""
    import pyarrow.compute as compute  # `datasets` requires it

    lengths: list[int] = []
    for batch in data.with_format("arrow").select_columns([name]).iter(10_000):
        column = batch.column(name)
        kind = str(column.type)
        if "list" not in kind and kind not in ("string", "large_string"):
            return None
        lengths += (compute.list_value_length if "list" in kind else compute.utf8_length)(column).to_pylist()
    return [length or 0 for length in lengths]


def _sizes(row: Any) -> dict[Any, int]:
    """Return the sizes of the parts of a row that have one."""
    parts = dict(row) if isinstance(row, Mapping) else dict(enumerate(row)) if isinstance(row, tuple) else {"": row}
    return {
        name: math.prod(part.shape) if hasattr(part, "shape") else len(part)
        for name, part in parts.items()
        if hasattr(part, "__len__")
    }
