"""``python -m benchmarks.side_channels``."""

import sys

from benchmarks.side_channels.command import main

if __name__ == "__main__":
    sys.exit(main())
