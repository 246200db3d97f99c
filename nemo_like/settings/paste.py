"""A job as Python keywords for a Trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nemo_like._util.table import paragraph
from nemo_like.options import FSDP2
from nemo_like.settings import trainer
from nemo_like.settings.files import nested, settings_of

if TYPE_CHECKING:
    from nemo_like.job import Job


def trainer_call(job: Job, **more: Any) -> str:
    """Return lines of at most 100 columns: the job as arguments of a Trainer, and options that it does not have.

    Args:
        job, more: as for `nemo_like.settings.write_settings`.
    """
    shards = job.fsdp is not None
    # The table is that of FSDP2; a Trainer on several ranks that is not told to shard takes DDP by itself.
    tables, left = settings_of(trainer.TABLE, job if shards else job.change(strategy=FSDP2()), **more)
    keywords = {name: value for name, value in nested(tables).items() if shards or not name.startswith("fsdp")}
    others = (trainer.OURS, trainer.TRLS)
    ours, trls = ({name: keywords.pop(name) for name in names if name in keywords} for names in others)
    lines = [f"Trainer: TrainingArguments({_written(keywords)})"]
    lines += [f"CheckpointingArguments: {_written(ours)}"] if ours else []
    lines += [f"In an SFTConfig, too: {_written(trls)}"] if "max_length" in trls else []
    left = tuple(word for word in left if not word.startswith("world_size = "))  # the launcher has it
    lines += [f"Not in a Trainer: {'; '.join(left)}"] if left else []
    return "\n".join(paragraph(line, 100) for line in lines)


def _written(keywords: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={_literal(value)}" for name, value in keywords.items())


def _literal(value: Any) -> str:
    """Return a value of JSON as Python with double quotes."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_literal(name)}: {_literal(each)}" for name, each in value.items()) + "}"
    return f'"{value}"' if isinstance(value, str) else repr(value)
