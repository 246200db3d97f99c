"""`nemo-like completion`: a script that has a shell complete commands and their options."""

from __future__ import annotations

import argparse
import sys

from nemo_like._util.extras import require

EXAMPLES = (
    "bash >> ~/.bash_completion",
    "zsh > ~/.zfunc/_nemo-like",
    "fish > ~/.config/fish/completions/nemo-like.fish",
)
SHELLS = ("bash", "zsh", "fish", "tcsh")
_FILES = ("PATH", "FILE")
"""Words that mean a file's name in the help of an option."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("shell", choices=SHELLS, help="which shell the script is for")


def run(args: argparse.Namespace) -> int:
    """Print the script, made from the parsers of all commands."""
    shtab = require("shtab", "completion", "to write the script")
    _complete_files(args.parser, shtab.FILE)
    sys.stdout.write(shtab.complete(args.parser, shell=args.shell) + "\n")
    return 0


def _complete_files(parser: argparse.ArgumentParser, kind: object) -> None:
    """Mark the options whose value is a file."""
    for action in parser._actions:
        if isinstance(action.choices, dict):  # the commands
            for inner in action.choices.values():
                _complete_files(inner, kind)
        elif action.metavar in _FILES:
            action.complete = kind  # type: ignore[attr-defined]
