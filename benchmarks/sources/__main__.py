"""``python -m benchmarks.sources``: see ``benchmarks/sources/command.py``."""

import sys

from benchmarks.sources.command import main

if __name__ == "__main__":
    sys.exit(main())
