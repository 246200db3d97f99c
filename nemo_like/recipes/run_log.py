"""Records of a fine-tuning run: ``log.jsonl`` always, TensorBoard and Weights & Biases on request."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from nemo_like._util.extras import require
from nemo_like._util.log import warn_once


class RunLog:
    """Records of one run on rank 0; on other ranks, nothing. A resumed run goes on in the same file.

    Args:
        folder: where ``log.jsonl`` and TensorBoard's files are written; it exists.
        first_step: records of later steps, which a resumed run takes again, are dropped.

    Raises:
        MissingExtraError: something was asked for that is not installed.
    """

    def __init__(
        self,
        folder: Path,
        first_step: int,
        *,
        active: bool,
        tensorboard: bool = False,
        wandb: str | None = None,
        options: dict[str, Any] | None = None,
    ):
        self.path = folder / "log.jsonl"
        self._active = active
        self._incomplete = False
        self._board: Any = None
        self._wandb: Any = None
        if not active:
            return
        kept = [record for record in read_log(self.path) if record["step"] <= first_step] if first_step else []
        self.path.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
        if tensorboard:
            require("tensorboard", "tensorboard", "for --tensorboard")
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step + 1)
        if wandb is not None:
            package = require("wandb", "wandb", "for --wandb")
            self._wandb = package.init(project=wandb, dir=str(folder), config=options)

    def add(self, step: int, **values: object) -> None:
        """Record `values` (numbers or text) after step number `step`."""
        if not self._active:
            return
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step} | values, ensure_ascii=False) + "\n")
        except OSError as error:  # training is worth more than its record
            if not self._incomplete:
                warn_once(
                    f"{self.path} cannot be written ({error}): training goes on, and records are missing from step {step}."
                )
            self._incomplete = True
        for name, value in values.items():
            if self._board is not None:
                if isinstance(value, str):
                    self._board.add_text(name, value, step)
                else:
                    self._board.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(values, step=step)

    def close(self) -> None:
        """Bring everything to disk."""
        if self._board is not None:
            self._board.close()
        if self._wandb is not None:
            self._wandb.finish()


def read_log(path: Path) -> list[dict[str, Any]]:
    """The records in a ``log.jsonl``; a line that a killed run or a full disk left unfinished is left out."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            records.append(json.loads(line))
    return records
