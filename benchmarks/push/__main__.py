"""``python -m benchmarks.push``."""

import sys

from benchmarks.push.command import main

if __name__ == "__main__":
    sys.exit(main())
