"""``python -m benchmarks.profile``."""

import sys

from benchmarks.profile.command import main

if __name__ == "__main__":
    sys.exit(main())
