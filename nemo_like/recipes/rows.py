"""Rows of tokens that a job trains on in each step, and what each token is to predict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class Batch:
    """The inputs that a model is called with, and what it is to predict."""

    inputs: torch.Tensor
    """(B, T) int64."""
    targets: torch.Tensor
    """(B, T) int64: what follows each input; -100 where it does not count."""
    positions: torch.Tensor | None = None
    """(B, T) int64, restarting at each document of a packed row; None: every row is one."""

    @property
    def extra(self) -> dict[str, torch.Tensor]:
        """Return what the model is given in addition to its inputs."""
        return {} if self.positions is None else {"position_ids": self.positions}

    def with_labels(self) -> dict[str, torch.Tensor]:
        """Return what a model is called with that computes its loss by itself, by name."""
        return {"input_ids": self.inputs, "labels": self.targets, "shift_labels": self.targets, **self.extra}

    def to(self, device: torch.device) -> Batch:
        """The same on `device`. The host does not wait for an accelerator: it copies from page-locked memory later on."""

        def sent(tensor: torch.Tensor) -> torch.Tensor:
            return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)

        positions = None if self.positions is None else sent(self.positions)
        return Batch(sent(self.inputs), sent(self.targets), positions)


class Rows(Protocol):
    """The batches of a run: a function of the step and the seed alone, so a run that resumes has no place to look up."""

    fingerprint: str
    """Changes with the data: recognises it when a run resumes."""

    def batch(self, step: int, part: int, parts: int) -> Batch:
        """Part `part` of `parts` equal ones of the global batch of `step`."""

    def targets(self, step: int) -> int | None:
        """Targets that count in the global batch of `step`; None: all do."""

    def lengths(self, step: int) -> list[int]:
        """Tokens that the model reads of each sample or document in the global batch of `step`, without padding."""


class HeldOut(Protocol):
    """Rows to evaluate on, in the order in which they are evaluated."""

    targets: int
    """Targets that count in all rows."""

    def __len__(self) -> int: ...

    def batch(self, numbers: Sequence[int]) -> Batch:
        """The rows with these numbers."""


# The order of samples: a function of the seed and a sample's number, stored nowhere.


def mix(*numbers: int) -> int:
    """64 well-mixed bits of the numbers: the finaliser of SplitMix64 (Steele et al., OOPSLA 2014), once per number."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state


def shuffled(place: int, size: int, key: int) -> int:
    """Return where a random permutation of range(size), chosen by `key`, sends `place`, without storing the
    permutation.

    Four rounds of a balanced Feistel network (Luby and Rackoff 1988) permute the next power of four. A result outside
    range(size) goes in once more until it is inside (Black and Rogaway 2002, "cycle walking").
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = place >> half, place & mask
        for turn in range(4):
            left, right = right, left ^ (mix(key, turn, right) & mask)
        place = left << half | right
        if place < size:
            return place
