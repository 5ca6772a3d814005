"""Compile what most tests call, once, before every process of a run would: ``python -m tests.compile_ahead``.

Machine code is kept on disk, so this takes a minute in a fresh checkout and some seconds ever after.
"""

from __future__ import annotations

from contextlib import ExitStack

from tests.server.bundled_engine import load_bundled


def main() -> None:
    """Every kernel that a server compiles at its start."""
    with ExitStack() as resources:
        load_bundled(resources).warm_up()


if __name__ == "__main__":
    main()
