"""Numbers of the command line that must lie within bounds."""

from __future__ import annotations

from ssd.errors import ConfigError


def require_seconds(option: str, seconds: float, most: int) -> None:
    """Raise ConfigError where they are outside 0..``most``, as a NaN is."""
    if not 0 <= seconds <= most:
        raise ConfigError(f"{option} must be within 0..{most} seconds, got {seconds}")
