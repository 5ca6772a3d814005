"""What a client was made to do, and whether it got what it should. Imports nothing but the standard library."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from typing import Any

MODEL = "bundled"
"""What the server calls its model."""

KEY = "a key"
"""What the server wants of everybody."""


class Checks:
    """Claims about one client, in the order they were looked at."""

    def __init__(self, *packages: str) -> None:
        """``packages`` : what the client is made of, for the versions."""
        self._packages = packages
        self.failed: dict[str, str] = {}
        self.passed: list[str] = []

    def see(self, claim: str, holds: bool, got: Any) -> None:
        """Note whether a claim holds; ``got`` is shown where it does not."""
        print(f"  {'yes' if holds else 'NO '}  {claim}", file=sys.stderr)
        if holds:
            self.passed.append(claim)
        else:
            self.failed[claim] = f"{got!r:.300}"

    def finish(self) -> int:
        """Print one JSON line; returns the exit status."""
        versions = {package: version(package) for package in self._packages}
        print(json.dumps({"versions": versions, "passed": self.passed, "failed": self.failed}))
        return 1 if self.failed else 0
