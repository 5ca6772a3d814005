"""``python -m benchmarks.fleet``."""

import sys

from benchmarks.fleet.command import main

if __name__ == "__main__":
    sys.exit(main())
