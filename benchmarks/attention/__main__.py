"""``python -m benchmarks.attention``."""

import sys

from benchmarks.attention.command import main

if __name__ == "__main__":
    sys.exit(main())
