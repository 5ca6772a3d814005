"""``python -m benchmarks.decode``."""

import sys

from benchmarks.decode.command import main

if __name__ == "__main__":
    sys.exit(main())
