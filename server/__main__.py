"""``python -m server`` and the console script ``ssd-serve``."""

from __future__ import annotations

import sys

from server.command.keys import hide_keys


def main() -> int:
    """Run the server; returns the exit status."""
    hide_keys()  # before anything else is loaded: they are visible until then
    from server.command.start import main as launch

    return launch()


if __name__ == "__main__":
    sys.exit(main())
