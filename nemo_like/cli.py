"""``nemo-like COMMAND``: each is a module of `nemo_like.commands`, imported when it is the one asked for."""

from __future__ import annotations

import argparse
import importlib
import logging
import pkgutil
import sys
from collections.abc import Sequence

from nemo_like import __version__, commands

_SUFFIX = "_command"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0 done, 2 bad input (one line says what), 130 interrupted."""
    argv = list(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    names = command_names()
    parser = argparse.ArgumentParser(
        prog="nemo-like", description="Fit a model's training into GPU memory with FSDP2, at the least cost in speed."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    asked = next((word for word in argv if not word.startswith("-")), None)
    for name in names:
        # Only the command that runs, or all of them for the overview, is worth importing.
        module = importlib.import_module(f"nemo_like.commands.{name}{_SUFFIX}") if asked in (name, None) else None
        subparser = subparsers.add_parser(name, help=module.HELP if module else None)
        if module is not None:
            subparser.description = module.HELP
            module.add_arguments(subparser)
            subparser.set_defaults(run=module.run)
    arguments = parser.parse_args(argv)
    try:
        return arguments.run(arguments)
    except KeyboardInterrupt:
        return 130
    except (ValueError, TypeError, ImportError, OSError) as error:
        print(f"nemo-like {arguments.command}: {error}", file=sys.stderr)
        return 2


def command_names() -> list[str]:
    """The commands there are, by name."""
    modules = (module.name for module in pkgutil.iter_modules(commands.__path__))
    return sorted(name.removesuffix(_SUFFIX) for name in modules if name.endswith(_SUFFIX))
