"""``python -m benchmarks.soak``."""

import sys

from benchmarks.soak.command import main

if __name__ == "__main__":
    sys.exit(main())
