"""What the pretraining job can be told beside what every job can."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nemo_like._util.console import check_new_folder, flag
from nemo_like.options import SCHEDULES as PIPELINE_SCHEDULES
from nemo_like.recipes.option_sources import parse_command_line
from nemo_like.recipes.run_options import RunOptions, job_option, option

HELP = "train a decoder on text, byte by byte: on one device, or on many with torchrun"
EXAMPLES = (
    "--steps 200",
    "--model llama-small --data corpus.txt --ac selective --checkpoint-dir run --resume=auto",
    "--model llama3-8b --init sharded --precision bfloat16 --tp 2 --ac 40GiB --fit",
)
INITS = ("host", "sharded")
TOKENIZERS = ("bytes", "bpe")


@dataclass(frozen=True, kw_only=True)
class Options(RunOptions):
    """The job's options. Each is a command-line option of the same name, ``_`` written as ``-``.

    Raises:
        ValueError: a value is wrong; the message has the option, the value, the reason and what is accepted.
    """

    model: str = option("llama-tiny", "a preset, the path of a config.json, or module:function that returns a model")
    data: str | None = option(
        None, "text to train on, a file or a folder, read as bytes (default: this Python's standard library)"
    )
    tokenizer: str = option("bytes", "what a token is: bytes | bpe, byte pairs learned from the text (tokenizers)")
    vocab_size: int = option(1024, "tokens of --tokenizer bpe, which the model then has, too", int)
    export: str | None = option(
        None,
        "at the end, write a folder here that transformers' from_pretrained opens, with --tokenizer bpe's tokenizer",
    )
    init: str = option(
        "host", "host: each rank builds all weights on the CPU | sharded: each rank makes only its shard (large models)"
    )
    tp: int = job_option("tp")
    cp: int = job_option("cp")
    ep: int = job_option("ep")
    pp: int = job_option("pp")
    pp_schedule: str = job_option("pp_schedule")
    pack: bool = option(
        False,
        "the files of the text are documents: packed into samples, apart from each other in attention and loss",
        bool,
    )

    @property
    def fixed(self) -> tuple[str, ...]:
        return (*super().fixed, "tokenizer", "vocab_size")

    @property
    def searched(self) -> tuple[str, ...]:
        return (*super().searched, "tp", "cp", "ep", "pp_schedule")

    @property
    def read_beside(self) -> Iterable[tuple[bool, str, tuple[str, ...]]]:
        return (
            *super().read_beside,
            (self.tokenizer == "bpe", "--tokenizer bpe", ("vocab_size",)),
            (self.pp > 1, "--pp above 1", ("pp_schedule",)),
        )

    def planned_input(self, rows: int, width: int) -> Any:
        if self.pp == 1:
            made = super().planned_input(rows, width)
            return self.packed_input(made, rows, width) if self.pack else made
        ids = torch.zeros(rows, width, dtype=torch.int64)
        return {"input_ids": ids, "labels": ids}  # the last stage computes the loss

    @property
    def choices(self) -> Mapping[str, Sequence[str]]:
        return {**super().choices, "init": INITS, "tokenizer": TOKENIZERS, "pp_schedule": PIPELINE_SCHEDULES}

    @property
    def least(self) -> Mapping[str, float]:
        return {**super().least, "vocab_size": 1}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pp > 1:
            self._check_pipeline()
        if self.export is not None:
            check_new_folder("--export", self.export)

    def _check_pipeline(self) -> None:
        for name, off in (("pack", False), ("init", "host"), ("cpu_offload", False)):
            if getattr(self, name) != off:
                raise ValueError(
                    f"{flag(name)} is {getattr(self, name)!r} beside --pp {self.pp}, which it cannot be yet."
                )
        if self.strategy != "fsdp2":
            raise ValueError(
                f"--strategy is {self.strategy!r} beside --pp {self.pp}; a pipeline's stages take 'fsdp2'."
            )
        try:
            self.job()
        except ValueError as error:
            raise ValueError(f"--pp, --pp-schedule and --grad-accum: {error}") from error

    @property
    def passes(self) -> int:
        """How often a rank runs forward and backward in a step; a pipeline cuts its one batch by itself."""
        return 1 if self.pp > 1 else self.grad_accum

    @property
    def axes(self) -> Mapping[str, int]:
        return {"tp": self.tp, "cp": self.cp, "pp": self.pp}


def parse_options(arguments: Sequence[str] | None = None) -> Options:
    """The options on the command line; a wrong one ends the process with code 2 and one line that says why.

    >>> parse_options(["--steps", "3"]).steps
    3
    """
    return parse_command_line(
        Options,
        "python -m nemo_like.recipes.pretrain",
        HELP,
        EXAMPLES,
        arguments,
    )
