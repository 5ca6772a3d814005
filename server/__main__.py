"""``python -m server`` and the console script ``ssd-serve``."""

from __future__ import annotations

import sys

from server.command.keys import hide_keys
from server.observe.logs import set_up_logging, wants_json


def main() -> int:
    """Run the server; returns the exit status."""
    if wants_json(sys.argv[1:]):  # what is wrong with the other options is a line of JSON too
        set_up_logging("info", "json")
    hide_keys()  # before anything else is loaded: they are visible until then
    from server.command.arguments import parse_arguments

    options = parse_arguments(None)  # before the server is imported: help and mistakes are answered at once
    from server.command.start import main as start

    return start(options)


if __name__ == "__main__":
    sys.exit(main())
