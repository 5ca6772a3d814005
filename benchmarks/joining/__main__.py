"""``python -m benchmarks.joining``."""

import sys

from benchmarks.joining.command import main

if __name__ == "__main__":
    sys.exit(main())
