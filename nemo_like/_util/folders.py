"""The folder of a user for things that may be made again."""

import os
from pathlib import Path


def cache_folder() -> Path | None:
    """Return the folder of measured rates and kept traces: ``NEMO_LIKE_CACHE``, else ``nemo_like`` in the user's folder for
    caches; None: it is ``off``."""
    if folder := os.environ.get("NEMO_LIKE_CACHE"):
        return None if folder == "off" else Path(folder).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nemo_like"
