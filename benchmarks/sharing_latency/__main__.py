"""``python -m benchmarks.sharing_latency``."""

import sys

from benchmarks.sharing_latency.command import main

if __name__ == "__main__":
    sys.exit(main())
