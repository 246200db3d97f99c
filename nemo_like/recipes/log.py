"""Reports of a run: lines with loss, speed and memory, the losses, and a summary's figures."""

import contextlib
import math
import os
import platform
import sys
from importlib import metadata

import torch

from nemo_like import __version__
from nemo_like._util.live_bytes import memory_peak, memory_used
from nemo_like._util.log import is_rank_zero
from nemo_like._util.table import paragraph, screen_width
from nemo_like._util.words import GIB
from nemo_like.distributed.ranks import Ranks


class DivergedError(RuntimeError):
    """The loss or the gradient is no longer finite."""


class Progress:
    """Lines with steps, loss, speed, memory and the time that is left on rank 0; nothing on the others."""

    def __init__(self, steps: int, device: torch.device, limit: int = 0):
        """`limit`: bytes of memory that the device has; 0: not printed."""
        self._steps, self._device, self._limit, self._shown = steps, device, limit, is_rank_zero()
        self._width = screen_width() if sys.stdout.isatty() or "COLUMNS" in os.environ else None

    def step(
        self,
        done: int,
        loss: float,
        learning_rate: float,
        tokens_per_second: float,
        mfu: float | None = None,
        step_seconds: float = 0.0,
    ) -> None:
        """Report after `done` steps; `loss` in nats per token, `mfu` a share of 1, left out where it is None."""
        if not self._shown:
            return
        fields = [(0, f"loss {loss:.4f}"), (3, f"lr {learning_rate:.2e}"), (1, f"{tokens_per_second:,.0f} tokens/s")]
        fields += [] if mfu is None else [(5, f"MFU {mfu:.1%}")]
        of_limit = f" of {self._limit / GIB:.2f} GiB" if self._limit else ""
        fields += [(6, f"memory {memory_used(self._device) / GIB:.2f} GiB")]
        fields += [(2, f"peak {memory_peak(self._device) / GIB:.2f} GiB{of_limit}")]
        if self._device.type != "cpu":
            reserved = torch.get_device_module(self._device).max_memory_reserved(self._device)
            fields += [(7, f"reserved {reserved / GIB:.2f} GiB")]
        left = (self._steps - done) * step_seconds
        fields += [(4, f"{_span(left)} left")] if left > 0 else []
        word = "" if self._width is not None and self._width < 80 else "step "
        step = f"{word}{done:>{len(str(self._steps))}}/{self._steps}"
        print(f"{step}  {_fitting(fields, None if self._width is None else self._width - len(step) - 2)}", flush=True)

    def say(self, line: str) -> None:
        """Print one line."""
        if self._shown:
            print("\n".join(paragraph(part, self._width) for part in line.split("\n")), flush=True)


def _span(seconds: float) -> str:
    """Return a time in its two largest units.

    >>> _span(7384), _span(75.4), _span(8.2)
    ('2 h 3 min', '1 min 15 s', '8 s')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _fitting(fields: list[tuple[int, str]], width: int | None) -> str:
    """Return `fields` in a line of at most `width`; those of the largest numbers are left out first, and 0 never.

    >>> _fitting([(0, "loss 2.5"), (3, "lr 0.1"), (1, "90 tokens/s")], 22)
    'loss 2.5  90 tokens/s'
    """
    kept = list(fields)
    while width is not None and len("  ".join(text for _, text in kept)) > width and any(keep for keep, _ in kept):
        kept.remove(max(kept))
    return "  ".join(text for _, text in kept)


class LossLog:
    """The mean loss over all ranks of every step. Losses stay on the device until they are read."""

    def __init__(self, ranks: Ranks, first_step: int):
        self.losses: list[float] = []  # Nats per token, one per step, from the step numbered `first_step` on.
        self.first_step, self._ranks = first_step, ranks
        self._unread: list[torch.Tensor] = []

    def add(self, loss: torch.Tensor, norm: torch.Tensor) -> None:
        """One step's mean loss on this rank's samples and gradient norm, 0-dim; does not wait for the device."""
        self._unread.append(torch.stack([loss, norm.to(loss.device)]))

    def read(self) -> None:
        """Bring the added numbers, one step's at least, from the device and take the mean over ranks. A collective.

        Raises:
            DivergedError: a loss or norm is infinite or NaN; on every rank.
        """
        unread, self._unread = torch.stack(self._unread).double(), []  # (steps, 2)
        for loss, norm in (self._ranks.sum(unread) / self._ranks.world_size).tolist():
            if not (math.isfinite(loss) and math.isfinite(norm)):
                raise DivergedError(
                    f"Step {self.first_step + len(self.losses) + 1}: the loss is {loss}, the gradient's norm {norm}. "
                    "Lower --lr, lengthen --warmup-steps or clip more; checkpoints from before are untouched."
                )
            self.losses.append(loss)


def versions() -> dict[str, str]:
    """Return the versions of the software that the run ran on."""
    installed = {
        "nemo_like": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
    }
    for name in ("transformers", "tokenizers"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            installed[name] = metadata.version(name)
    return installed
