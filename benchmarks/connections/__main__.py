"""``python -m benchmarks.connections``."""

import sys

from benchmarks.connections.command import main

if __name__ == "__main__":
    sys.exit(main())
