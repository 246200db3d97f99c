"""The samples of a fine-tuning run: looked through once before training, then read and encoded step by step.

The look through every sample, which the ranks share, finds what is broken before anything heavy starts, and leaves 16 bytes
a sample in memory: how long it is, and how many of its tokens count. That is enough to know which samples are in which
row, which step is the largest, and by what a step's loss is divided.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from nemo_like._util.log import say_once, warn_once
from nemo_like.losses.rows import IGNORED
from nemo_like.recipes.agree import Ranks
from nemo_like.recipes.encode import Encoded, Encoder, check_form
from nemo_like.recipes.rows import Batch, mix, shuffled
from nemo_like.recipes.sample_files import BadSampleError, SampleFiles

HELD_OUT_SHARE = 0.1
"""At most this share of the samples is held out of the training data."""


@dataclass(frozen=True)
class SampleSet:
    """The usable samples of some files."""

    files: SampleFiles
    encoder: Encoder
    index: list[int]
    """The number in `files` of each."""
    lengths: list[int]
    """Tokens that the model reads of each."""
    targets: list[int]
    """Tokens of each that count."""
    skipped: int = 0
    """Number of samples that could not be used."""

    def __len__(self) -> int:
        return len(self.index)

    def encoded(self, sample: int) -> Encoded:
        """The sample's tokens, read from disk."""
        tokens = self.files.read(self.index[sample])
        if tokens is None:
            raise RuntimeError(f"{self.files.where(self.index[sample])} changed in mid-run; keep the data unchanged.")
        return self.encoder.encode(tokens)

    def subset(self, chosen: Sequence[int]) -> SampleSet:
        """Only the samples with these numbers."""
        index, lengths, targets = ([column[i] for i in chosen] for column in (self.index, self.lengths, self.targets))
        return SampleSet(self.files, self.encoder, index, lengths, targets, self.skipped)

    def batch(self, rows: Sequence[Sequence[int]], width: int | None = None, pad: int = 0) -> Batch:
        """Rows of samples as a batch, each filled up to `width` tokens (default: the longest row)."""
        width = max(sum(self.lengths[i] for i in row) for row in rows) if width is None else width
        inputs = torch.full((len(rows), width), pad, dtype=torch.int64)
        targets = torch.full((len(rows), width), IGNORED, dtype=torch.int64)
        positions = torch.arange(width).repeat(len(rows), 1)
        for number, row in enumerate(rows):
            at = 0
            for sample in row:
                read = self.encoded(sample)
                tokens, end = torch.tensor(read.tokens), at + read.inputs
                inputs[number, at:end] = tokens[:-1]
                targets[number, at:end] = tokens[1:].masked_fill(~torch.tensor(read.counts[1:]), IGNORED)
                positions[number, at:end] = torch.arange(read.inputs)
                at = end
            positions[number, at:] = torch.arange(width - at)
        packed = any(len(row) > 1 for row in rows)
        # What fills a row up is after everything that counts, where causal attention never looks.
        return Batch(inputs, targets, positions if packed else None)


def look_through(flag: str, files: SampleFiles, encoder: Encoder, ranks: Ranks, *, skip_bad: bool) -> SampleSet:
    """Every sample of `files`, encoded once, each by one rank. A collective.

    Raises:
        ValueError: there is none; or one cannot be used and `skip_bad` is False, with file, line and reason.
    """
    if not ranks.same(int(files.fingerprint[:15], 16)):
        raise ValueError(
            f"The ranks see different data: {flag} differs between hosts. Give all of them the same files."
        )
    lengths = torch.zeros(len(files), dtype=torch.int64)
    targets, cut, bad = lengths.clone(), 0, lengths.clone()
    with ranks.together(f"looking through the samples of {flag}"):
        form_checked = False
        for number in range(ranks.rank, len(files), ranks.world_size):
            try:
                sample = files.read(number)
                if sample is None:
                    continue
                if not form_checked:
                    check_form(encoder, sample)
                    form_checked = True
                tokens = encoder.encode(sample)
            except BadSampleError as error:
                if not skip_bad:
                    raise ValueError(
                        f"{files.where(number)}: {error}. Correct it, or leave such samples out with --skip-bad."
                    ) from error
                bad[number] = 1
                continue
            lengths[number], targets[number] = tokens.inputs, tokens.targets
            cut += tokens.cut
    lengths, targets, bad = ranks.sum(lengths), ranks.sum(targets), ranks.sum(bad)
    index = lengths.nonzero().flatten()
    skipped, cut = int(bad.sum()), int(ranks.sum(torch.tensor(cut)))
    if skipped:
        first = int(bad.nonzero()[0])
        warn_once(
            f"{flag}: {skipped} of {len(files)} samples are left out; the first is {_reason(files, encoder, first)}."
        )
    if not len(index):
        raise ValueError(
            f"{flag} has no sample that can be used: {'every one is broken' if skipped else 'it is empty'}."
        )
    if cut:
        say_once(f"{flag}: {cut} of {len(index)} samples are longer than --seq-len and are cut at their end.")
    return SampleSet(files, encoder, index.tolist(), lengths[index].tolist(), targets[index].tolist(), skipped)


def hold_out(samples: SampleSet, most: int) -> tuple[SampleSet, SampleSet | None]:
    """Return what is trained on, and up to `most` samples that are not: the same for every seed and number of ranks.

    Raises:
        ValueError: there are too few to hold one out.
    """
    if most == 0:
        return samples, None
    count = min(most, int(len(samples) * HELD_OUT_SHARE))
    if count == 0:
        raise ValueError(
            f"--data has {len(samples)} sample(s), and a tenth of them is held out for evaluation, which is none. "
            "Give more, or samples to evaluate on with --eval-data, or --eval-samples 0."
        )
    by_hash = sorted(range(len(samples)), key=lambda i: (mix(samples.index[i], 7), i))
    held_out = set(by_hash[:count])
    return samples.subset([i for i in range(len(samples)) if i not in held_out]), samples.subset(sorted(held_out))


class HeldOutSamples:
    """Samples to evaluate on, a row each, those of like length together."""

    def __init__(self, samples: SampleSet) -> None:
        self.samples, self.targets = samples, sum(samples.targets)
        self._by_length = sorted(range(len(samples)), key=lambda i: (samples.lengths[i], i))

    def __len__(self) -> int:
        return len(self.samples)

    def batch(self, numbers: Sequence[int]) -> Batch:
        """As `HeldOut.batch`."""
        return self.samples.batch([[self._by_length[i]] for i in numbers])


_OPEN_ROWS = 64  # rows that wait for a sample that fits: more fill better, and put samples further from their turn


class SampleRows:
    """Samples by step. Every sample is used once per epoch, in an order shuffled anew each epoch.

    A row is one sample, or as many as fit. Which are in it is a function of (lengths, seed, step): the same on any number of
    ranks, and a run that resumes goes on with the very next sample.

    Args:
        samples: to train on.
        batch_size: rows per step over all ranks and micro-batches.
        seed: of the order.
        room: tokens of a packed row; None: one sample a row. No sample is longer.

    Raises:
        ValueError: there are fewer rows than one batch has.
    """

    def __init__(self, samples: SampleSet, batch_size: int, seed: int, room: int | None = None) -> None:
        self.samples, self.fingerprint = samples, samples.files.fingerprint
        self._batch_size, self._seed, self._room = batch_size, seed, room
        self._epochs: dict[int, list[list[int]]] = {}  # of packed rows: the newest two
        self._first_rows = [0]
        self.rows_per_epoch = len(samples) if room is None else len(self._epoch(0))
        """Rows of the first epoch; of packed ones, others may have a few more or less."""
        if self.rows_per_epoch < batch_size:
            raise ValueError(
                f"--data has {len(samples)} samples to train on, {self.rows_per_epoch} row(s): fewer than --batch-size "
                f"{batch_size}. Give more data or a smaller batch."
            )

    @property
    def samples_fingerprint(self) -> str:
        """Changes with which samples are trained on, and with their tokens."""
        text = f"{self.fingerprint} {self.samples.index} {self.samples.lengths} {self.samples.targets}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def batch(self, step: int, part: int = 0, parts: int = 1) -> Batch:
        """As `Rows.batch`."""
        rows = self.of_step(step)
        size = len(rows) // parts
        return self.samples.batch(rows[part * size : (part + 1) * size], self._room)

    def targets(self, step: int) -> int:
        """As `Rows.targets`."""
        return sum(self.samples.targets[i] for row in self.of_step(step) for i in row)

    def lengths(self, step: int) -> list[int]:
        """As `Rows.lengths`."""
        return [self.samples.lengths[i] for row in self.of_step(step) for i in row]

    def largest(self, rows: int) -> Batch:
        """A batch of `rows` rows, no smaller than any of the run: the longest samples, or packed rows."""
        lengths = self.samples.lengths
        longest = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
        return self.samples.batch([[longest[i % len(longest)]] for i in range(rows)], self._room)

    def of_step(self, step: int) -> list[list[int]]:
        """The samples of each row of the global batch of `step`."""
        return [self._row(step * self._batch_size + i) for i in range(self._batch_size)]

    def _row(self, number: int) -> list[int]:
        count = len(self.samples)
        if self._room is None:
            epoch, place = divmod(number, count)
            return [shuffled(place, count, mix(self._seed, epoch, 2))]
        epoch = 0
        while number >= self._end(epoch):
            epoch += 1
        return self._epoch(epoch)[number - self._first_rows[epoch]]

    def _end(self, epoch: int) -> int:
        if len(self._first_rows) < epoch + 2:
            self._first_rows.append(self._first_rows[epoch] + len(self._epoch(epoch)))
        return self._first_rows[epoch + 1]

    def _epoch(self, epoch: int) -> list[list[int]]:
        if epoch not in self._epochs:
            key, count = mix(self._seed, epoch, 2), len(self.samples)
            assert self._room is not None
            order = (shuffled(i, count, key) for i in range(count))
            kept = {number: rows for number, rows in self._epochs.items() if number == epoch - 1}
            self._epochs = kept | {epoch: pack(order, self.samples.lengths, self._room)}
        return self._epochs[epoch]


def pack(order: Iterable[int], lengths: Sequence[int], room: int) -> list[list[int]]:
    """Samples into rows of at most `room` tokens, each into the fullest open row that it fits in.

    >>> pack(range(4), [3, 2, 1, 2], 4)
    [[0, 2], [1, 3]]
    """
    rows: list[list[int]] = []
    opened: list[tuple[int, int]] = []  # (tokens left, number of the row), by room
    for sample in order:
        length = lengths[sample]
        at = bisect_left(opened, (length, -1))
        if at < len(opened):
            left, row = opened.pop(at)
        else:
            left, row = room, len(rows)
            rows.append([])
            if len(opened) == _OPEN_ROWS:
                opened.pop(0)
        rows[row].append(sample)
        if left > length:
            insort(opened, (left - length, row))
    return rows


def _reason(files: SampleFiles, encoder: Encoder, number: int) -> str:
    try:
        sample = files.read(number)
        encoder.encode(sample or {})
    except BadSampleError as error:
        return f"{files.where(number)}: {error}"
    return files.where(number)
