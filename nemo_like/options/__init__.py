"""Options of a caller: frozen dataclasses that check themselves, and the parsing of their short strings.

Nothing here touches a model. Everything raises `ValueError` (a wrong value) or `TypeError` (a wrong kind of value) with
the value, the reason and the accepted values. A default is set here and nowhere else.
"""

from nemo_like._util.words import (
    did_you_mean,
    dtype_word,
    field_names,
    normalise,
    parse_bytes,
    parse_dtype,
    parse_shape,
)
from nemo_like.options.checkpointing import AC_STRATEGIES, CheckpointConfig, MemoryBudget, parse_ac
from nemo_like.options.memory import AllocatorConfig, PlanSearch
from nemo_like.options.names import NamedList, NamedLists
from nemo_like.options.parallel import (
    CONTEXT_METHODS,
    DDP,
    FLOAT8,
    FROZEN_SHARDING,
    FSDP2,
    STRATEGIES,
    ContextParallel,
    ExpertParallel,
    OffloadConfig,
    Precision,
    Single,
    TensorParallel,
    parse_strategy,
)
from nemo_like.options.pipelining import SCHEDULES, PipelineParallel, Schedule
from nemo_like.options.step import ADAMW, COMPILE_BACKENDS, LOSSES, OPTIMIZERS, ChunkedLoss, StepSpec, parse_compile

__all__ = [
    "AC_STRATEGIES",
    "ADAMW",
    "COMPILE_BACKENDS",
    "CONTEXT_METHODS",
    "DDP",
    "FLOAT8",
    "FROZEN_SHARDING",
    "FSDP2",
    "LOSSES",
    "OPTIMIZERS",
    "SCHEDULES",
    "STRATEGIES",
    "AllocatorConfig",
    "CheckpointConfig",
    "ChunkedLoss",
    "ContextParallel",
    "ExpertParallel",
    "MemoryBudget",
    "NamedList",
    "NamedLists",
    "OffloadConfig",
    "PipelineParallel",
    "PlanSearch",
    "Precision",
    "Schedule",
    "Single",
    "StepSpec",
    "TensorParallel",
    "did_you_mean",
    "dtype_word",
    "field_names",
    "normalise",
    "parse_ac",
    "parse_bytes",
    "parse_compile",
    "parse_dtype",
    "parse_shape",
    "parse_strategy",
]
