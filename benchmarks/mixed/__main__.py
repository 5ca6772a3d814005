"""``python -m benchmarks.mixed``: see ``benchmarks/mixed/command.py``."""

import sys

from benchmarks.mixed.command import main

if __name__ == "__main__":
    sys.exit(main())
