"""``python -m benchmarks.hybrid``."""

import sys

from benchmarks.hybrid.command import main

if __name__ == "__main__":
    sys.exit(main())
