"""``python -m benchmarks.host``: see ``benchmarks/host/command.py``."""

import sys

from benchmarks.host.command import main

if __name__ == "__main__":
    sys.exit(main())
