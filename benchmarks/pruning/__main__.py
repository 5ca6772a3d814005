"""``python -m benchmarks.pruning``."""

import sys

from benchmarks.pruning.command import main

if __name__ == "__main__":
    sys.exit(main())
