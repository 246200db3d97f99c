"""``python -m tests.tools.gpu``."""

import sys

from tests.tools.gpu.driver import main

if __name__ == "__main__":
    sys.exit(main())
