"""``python -m server`` and the console script ``ssd-serve``."""

from __future__ import annotations

import sys

from .launch import main

if __name__ == "__main__":
    sys.exit(main())
