"""``python -m benchmarks.offline``."""

import sys

from benchmarks.offline.command import main

if __name__ == "__main__":
    sys.exit(main())
