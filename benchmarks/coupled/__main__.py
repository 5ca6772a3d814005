"""``python -m benchmarks.coupled``: see ``benchmarks/coupled/command.py``."""

import sys

from benchmarks.coupled.command import main

if __name__ == "__main__":
    sys.exit(main())
