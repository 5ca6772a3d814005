"""``python -m benchmarks.rollouts``: see ``benchmarks/rollouts/command.py``."""

import sys

from benchmarks.rollouts.command import main

if __name__ == "__main__":
    sys.exit(main())
