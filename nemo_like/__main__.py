"""``python -m nemo_like`` is the command ``nemo-like``."""

import sys

from nemo_like.cli import command

if __name__ == "__main__":
    sys.exit(command())
