"""``python -m benchmarks.siblings``: see ``benchmarks/siblings/command.py``."""

import sys

from benchmarks.siblings.command import main

if __name__ == "__main__":
    sys.exit(main())
