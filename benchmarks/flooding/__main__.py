"""``python -m benchmarks.flooding``."""

import sys

from benchmarks.flooding.command import main

if __name__ == "__main__":
    sys.exit(main())
