"""Optional packages: imported when first needed, and named with the extra that brings them when absent."""

import importlib
from types import ModuleType

# The name to install of a module, where that is another one than its first word.
DISTRIBUTIONS = {"yaml": "pyyaml"}


class MissingExtraError(ImportError):
    """An optional package is needed and not installed; the message names the extra to install."""


def require(module: str, extra: str, why: str) -> ModuleType:
    """Import and return `module`, which the extra `extra` installs.

    Raises:
        MissingExtraError: `module` is not installed; the message has the pip command.

    >>> require("json", "hf", "to read a config").__name__
    'json'
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and module != error.name and not module.startswith(error.name + "."):
            raise  # the package is there, and one of *its* needs is missing: that message is the better one
        distribution = DISTRIBUTIONS.get(module, module.partition(".")[0])
        raise MissingExtraError(
            f"{module!r} is needed {why}, and is not installed. Install it with: "
            f"pip install {distribution} (in a checkout of nemo_like: pip install '.[{extra}]')."
        ) from error
