"""Functions that our programs share: messages, examples in their help, and options that are refused before long
work."""

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path


class _Without(logging.Filter):
    """Drops records whose message has `words` in it."""

    def __init__(self, words: str):
        super().__init__()
        self._words = words

    def filter(self, record: logging.LogRecord) -> bool:
        return self._words not in record.getMessage()


# By logger, a filter for its messages on import.
_NOISE = {
    # transformers imports torchao wherever it is installed, with kernels for devices that are not here.
    "torchao": _Without("Failed to load "),
    "torchao.kernel.intmm": _Without("Detected no triton"),
    # A kernel of bitsandbytes for generation, on CPUs that have AVX-512.
    "bitsandbytes.backends.cpu.ops": _Without("Failed to load CPU gemm_4bit_forward from kernels-community"),
}
_PYTREE_NOISE = _Without("is an Enum subclass and is now natively supported")


def start_logging() -> None:
    """Have the library's messages, and warnings of others, written to standard error. For a program, not for a library.

    It imports torch, so a program first does all work that needs no torch.
    """
    from nemo_like.torch_compat import PYTREE_LOGGER

    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("nemo_like").setLevel(logging.INFO)
    for name, noise in (_NOISE | {PYTREE_LOGGER: _PYTREE_NOISE}).items():
        logging.getLogger(name).addFilter(noise)
    # A name of transformers that peft uses.
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)


def examples(program: str, lines: Iterable[str]) -> str:
    """The end of a program's help: command lines with these options.

    >>> print(examples("nemo-like layers", ["--model llama3-8b"]))
    examples:
      nemo-like layers --model llama3-8b
    """
    return "\n".join(["examples:", *(f"  {program} {line}" for line in lines)])


def flag(name: str) -> str:
    """The command-line option of a setting.

    >>> flag("seq_len")
    '--seq-len'
    """
    return "--" + name.replace("_", "-")


def as_flag(name: str, value: object) -> str:
    """A setting as one writes it on the command line.

    >>> as_flag("merge", False), as_flag("grad_accum", 4)
    ('--no-merge', '--grad-accum 4')
    """
    if isinstance(value, bool):
        return flag(name) if value else flag(f"no-{name}")
    return f"{flag(name)} {value}"


def refuse_unread(args: argparse.Namespace, names: Iterable[str], why: str) -> None:
    """Raise ValueError where an option out of `names` was given, which nothing reads here; `why`: a sentence."""
    for name in names:
        value = getattr(args, name)
        if value != args.own.get_default(name):
            raise ValueError(f"{flag(name)} is {value!r}, and nothing reads it: {why} Leave it out.")


def check_writable(option: str, path: str | Path | None) -> None:
    """Raise ValueError where the file `path`, of `option`, could not be written later; None and ``-`` name no file."""
    if path is None or str(path) == "-":
        return
    path, folder = Path(path), Path(path).absolute().parent
    if path.is_dir():
        raise ValueError(f"{option} is {str(path)!r}, which is a folder. Give the name of a file.")
    if not folder.is_dir():
        raise ValueError(f"{option} names a file in {str(folder)!r}, which is not an existing folder; create it.")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ValueError(f"{option} is {str(path)!r}, where this user may not write. Give another file.")


def write_text(path: str | None, text: str) -> None:
    """Write `text` to the file that ``--json`` names (`check_writable`), or for ``-`` to standard output; None: nowhere."""
    if path == "-":
        sys.stdout.write(text + "\n")
    elif path is not None:
        Path(path).write_text(text + "\n", encoding="utf-8")


def check_new_folder(option: str, path: str) -> None:
    """Raise ValueError where the folder `path`, of `option`, is there already, or could not be made later."""
    if Path(path).exists():
        raise ValueError(f"{option} is {path!r}, which exists already and is not overwritten. Give another folder.")
    above = next(folder for folder in Path(path).absolute().parents if folder.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise ValueError(f"{option} is {path!r}, and in {str(above)!r} this user can make no folder. Give another one.")


def whole_or(word: str) -> Callable[[str], int | str]:
    """Return the reader of an option that is a whole number or `word`.

    >>> whole_or("max")("8"), whole_or("max")("MAX")
    (8, 'max')
    """

    def read(text: str) -> int | str:
        if text.strip().lower() == word:
            return word
        try:
            return tokens(text)
        except argparse.ArgumentTypeError:
            raise argparse.ArgumentTypeError(f"{text!r} is neither a whole number nor {word}") from None

    return read


def tokens(text: str) -> int:
    """Read a whole number, in units of 1024 with a ``k`` behind it.

    >>> tokens("8k"), tokens("300")
    (8192, 300)
    """
    digits = text.strip().lower()
    try:
        return int(digits[:-1]) * 1024 if digits.endswith("k") else int(digits)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number such as 8192 or 8k") from None
