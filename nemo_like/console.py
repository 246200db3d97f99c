"""What a program of ours says: on standard error nothing of packages that it does not use, and examples in its help."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterable

from nemo_like.torch_compat import PYTREE_LOGGER


class _Without(logging.Filter):
    """Drops records whose message has `words` in it."""

    def __init__(self, words: str):
        super().__init__()
        self._words = words

    def filter(self, record: logging.LogRecord) -> bool:
        return self._words not in record.getMessage()


_NOISE = {
    # transformers imports torchao wherever it is installed, with kernels for devices that are not here.
    "torchao": _Without("Failed to load "),
    "torchao.kernel.intmm": _Without("Detected no triton"),
    PYTREE_LOGGER: _Without("is an Enum subclass and is now natively supported"),
    # A kernel of bitsandbytes for generation, on CPUs that have AVX-512.
    "bitsandbytes.backends.cpu.ops": _Without("Failed to load CPU gemm_4bit_forward from kernels-community"),
}
"""By logger, what it says while it is imported."""


def start_logging() -> None:
    """Have the library's messages, and warnings of others, written to standard error. For a program, not for a library."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("nemo_like").setLevel(logging.INFO)
    for name, noise in _NOISE.items():
        logging.getLogger(name).addFilter(noise)
    # What peft asks transformers for.
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)


def examples(program: str, lines: Iterable[str]) -> str:
    """The end of a program's help: command lines with these options.

    >>> print(examples("nemo-like layers", ["--model llama3-8b"]))
    examples:
      nemo-like layers --model llama3-8b
    """
    return "\n".join(["examples:", *(f"  {program} {line}" for line in lines)])
