"""``nemo-like COMMAND``: each is a module of `nemo_like.commands`, imported when it is the one asked for.

Such a module has ``EXAMPLES`` (arguments after the command's name), ``OPTIONS``, ``run``, and where a command is
long ``first_line``, which is printed at once. Its purpose is in `nemo_like.commands.COMMANDS`.

To import torch takes seconds. So help, version and a misspelt word import none of it: the modules that print a
command's options do not import it, and all else is imported inside of ``run``.
"""

import argparse
import gc
import importlib
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext

from nemo_like import __version__
from nemo_like._util.console import start_logging
from nemo_like._util.garbage import rare_collections
from nemo_like._util.help_parser import HelpParser
from nemo_like._util.log import is_rank_zero
from nemo_like.commands import COMMANDS, overview
from nemo_like.commands.early_checks import check_early
from nemo_like.commands.settings_options import take_settings


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0 done, 2 bad input (in one line), 130 interrupted, 141 unread."""
    argv = list(sys.argv[1:] if argv is None else argv)
    command = next((word for word in argv if not word.startswith("-")), None)
    program = f"nemo-like {command}" if command in COMMANDS else "nemo-like"
    if "" not in sys.path and not sys.flags.safe_path:
        sys.path.insert(0, "")  # as ``python -m`` has it: --model mymod:build is a file in the current folder
    in_options = str
    try:
        parser = make_parser(command, argv)
        if not argv:
            parser.print_help()
            return 0
        arguments = parser.parse_args(argv)
        in_options = arguments.own.in_options
        arguments.refuse(arguments)
        if is_rank_zero() and (line := arguments.first_line(arguments)):
            print(line, file=sys.stderr, flush=True)
        with rare_collections() if command in _TRACING else nullcontext():
            if command not in _WITHOUT_TORCH:
                start_logging()
            return arguments.run(arguments)
    except KeyboardInterrupt:
        print(f"{program}: interrupted.", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader, such as ``head``, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python writes the rest as it ends
        return 141
    except (ValueError, TypeError, ImportError, OSError, NotImplementedError) as error:
        print(f"{program}: {in_options(str(error))}", file=sys.stderr)
        return 2


def command() -> int:
    """Run one command as a process of its own: `main`, without Python's last collection, which would take two seconds."""
    try:
        return main()
    finally:
        gc.freeze()


_TRACING = ("explain", "fit", "layers", "plan")  # Their imports make many objects, too.
_WITHOUT_TORCH = ("explain", "gpus", "models")


def make_parser(command: str | None = None, argv: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Return the parser with the options of `command`, which alone is imported.

    The file that ``--from`` names in `argv` sets defaults.
    """
    parser = HelpParser(
        prog="nemo-like",
        usage="nemo-like [-h] [--version] COMMAND [options]",
        description=f"Fit a model's training into GPU memory with FSDP2, at the least cost in speed.\n\n{overview()}",
        epilog="nemo-like COMMAND --help has the options of a command, and examples.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subparsers = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", prog="nemo-like", help=argparse.SUPPRESS
    )
    for name, purpose in COMMANDS.items():
        if command != name:
            subparsers.add_parser(name)
            continue
        module = importlib.import_module(f"nemo_like.commands.{name}_command")
        subparser = subparsers.add_parser(name, help=purpose, purpose=purpose, lines=module.EXAMPLES)
        subparser.add_options(module.OPTIONS)
        first_line = getattr(module, "first_line", lambda arguments: "")
        take_settings(subparser, argv)
        check = getattr(module, "check", check_early)
        subparser.set_defaults(run=module.run, refuse=check, first_line=first_line, parser=parser, own=subparser)
        parser.command = subparser
    return parser
