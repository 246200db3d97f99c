"""``nemo-like COMMAND``: each is a module of `nemo_like.commands`, imported when it is the one asked for.

Such a module has ``HELP``, ``EXAMPLES`` (what to write after the command's name), ``add_arguments`` and ``run``.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys
from collections.abc import Sequence

from nemo_like import __version__, commands
from nemo_like._util.console import examples, start_logging

_SUFFIX = "_command"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0 done, 2 bad input (one line says what), 130 interrupted."""
    argv = list(sys.argv[1:] if argv is None else argv)
    start_logging()
    arguments = make_parser(next((word for word in argv if not word.startswith("-")), None)).parse_args(argv)
    try:
        return arguments.run(arguments)
    except KeyboardInterrupt:
        return 130
    except (ValueError, TypeError, ImportError, OSError, NotImplementedError) as error:
        print(f"nemo-like {arguments.command}: {error}", file=sys.stderr)
        return 2


def make_parser(asked: str | None = None) -> argparse.ArgumentParser:
    """The parser of the command `asked`, which alone is imported; None or one that reads others: of all commands."""
    parser = argparse.ArgumentParser(
        prog="nemo-like",
        description="Fit a model's training into GPU memory with FSDP2, at the least cost in speed.",
        epilog="nemo-like COMMAND --help has the options of a command, and examples.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in command_names():
        if asked not in (None, name, "completion"):
            subparsers.add_parser(name)
            continue
        module = importlib.import_module(f"nemo_like.commands.{name}{_SUFFIX}")
        subparser = subparsers.add_parser(
            name,
            help=module.HELP,
            description=module.HELP,
            epilog=examples(f"nemo-like {name}", module.EXAMPLES),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(subparser)
        subparser.set_defaults(run=module.run, parser=parser, own=subparser)
    return parser


def command_names() -> list[str]:
    """The commands there are, by name."""
    modules = (module.name for module in pkgutil.iter_modules(commands.__path__))
    return sorted(name.removesuffix(_SUFFIX) for name in modules if name.endswith(_SUFFIX))
