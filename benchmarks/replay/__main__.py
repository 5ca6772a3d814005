"""``python -m benchmarks.replay``."""

import sys

from benchmarks.replay.command import main

if __name__ == "__main__":
    sys.exit(main())
