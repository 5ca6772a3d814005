"""``python -m benchmarks.evaluate``: see ``benchmarks/evaluate/command.py``."""

import sys

from benchmarks.evaluate.command import main

if __name__ == "__main__":
    sys.exit(main())
