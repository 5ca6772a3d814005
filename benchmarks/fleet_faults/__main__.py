"""``python -m benchmarks.fleet_faults``."""

import sys

from benchmarks.fleet_faults.command import main

if __name__ == "__main__":
    sys.exit(main())
