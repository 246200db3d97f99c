"""The commands of the program ``nemo-like``: a module ``NAME_command`` each, and its purpose in a line here.

Nothing here imports torch, and a module imports it only when its command runs.
"""

import argparse
import textwrap
from collections.abc import Callable
from typing import Any

from nemo_like._util.console import write_text
from nemo_like.recipes import JOBS

# The commands by group and name, with their purposes.
GROUPS = {
    "without a GPU": {
        "layers": "print the layers of a model: its groups, units to shard and to checkpoint, their parameters and bytes",
        "plan": "predict the peak memory of a training step and find the fastest plan that fits",
        "fit": "find the fastest configuration that fits on a number of GPUs",
        "explain": "name the parts of a GPU's memory at its peak, and those that should not be there, by a snapshot of "
        "PyTorch",
        "models": "list the models that --model knows by name",
        "gpus": "list the GPUs that --gpu knows by name, with their memory and speeds",
    },
    "measure": {
        "profile": "measure the bytes that each layer of a model saves for backward and its time, and find the layers "
        "to recompute for a budget; or compare modes side by side: time, bytes, FLOPs, gradients",
    },
    "train": JOBS,
}
COMMANDS = {name: purpose for group in GROUPS.values() for name, purpose in group.items()}

# The help of ``--lora``.
LORA = "adapters of this rank train, all else is frozen, in the dtype of --precision (peft)"
WITHOUT_LORA = "without --lora all weights train, in 16 or 32 bits."
FOUR_BIT: dict[str, Any] = {
    "action": "store_true",
    "help": "with --lora: frozen linears have 4 bits, as in QLoRA (bitsandbytes, NF4, scales in 8 bits)",
}
# Options that several commands have alike, without their words.
MODEL: dict[str, Any] = {"help": "a preset (llama3-8b, ...), a config.json, or module:function"}
STORED: dict[str, Any] = {"default": "fp32", "help": "parameters as stored (default: %(default)s)"}
WIDE: dict[str, Any] = {"action": "store_true", "help": "print all columns, however narrow the screen is"}
NO_CACHE: dict[str, Any] = {
    "dest": "cache",
    "action": "store_false",
    "help": "trace again, and keep no traces; by default they are in NEMO_LIKE_CACHE (a folder, or off), ~/.cache/nemo_like",
}
# The help of ``--vocab-size``.
VOCAB_SIZE = "for a module:function that takes token ids and states no vocab_size"


def print_report(args: argparse.Namespace, text: str, to_json: Callable[[], str]) -> None:
    """Print `text`, and write the JSON where ``--json`` names a file; with ``--json -`` print the JSON alone.

    to_json: returns it, and is called only where it is written.
    """
    if args.json != "-":
        print(text, flush=True)
    if args.json is not None:
        write_text(args.json, to_json())


def overview() -> str:
    """Return the commands in their groups, as lines of at most 80 columns."""
    lines = []
    for title, commands in GROUPS.items():
        lines += ["", f"{title}:"]
        for name, purpose in commands.items():
            lines += textwrap.wrap(purpose, 80, initial_indent=f"  {name:9}", subsequent_indent=" " * 11)
    return "\n".join(lines[1:])
