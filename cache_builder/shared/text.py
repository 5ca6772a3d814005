"""What others wrote, as it may be shown on a terminal."""

from __future__ import annotations

_LONGEST = 120


def shown(value: object) -> str:
    """At most 120 printable characters on one line; what cannot be printed is escaped."""
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
    text = "".join(each if each.isprintable() else f"\\x{ord(each):02x}" for each in text[: 2 * _LONGEST])
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def number_of(value: object) -> int | None:
    """A number a server gave, None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str | bytes):
        return None
    try:
        return int(value)
    except (ValueError, OverflowError):
        return None


def spelled_bytes(count: int | None) -> str:
    """A size for people."""
    if count is None:
        return "unknown"
    size, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size /= 1000
        units.pop(0)
    return f"{size:.0f} {units[0]}" if units[0] == "B" else f"{size:.1f} {units[0]}"


def spelled_age(seconds: float | None) -> str:
    """A time that has passed, for people."""
    if seconds is None:
        return "unknown"
    for name, length in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= length:
            return f"{seconds / length:.1f} {name}"
    return f"{max(seconds, 0.0):.1f} s"
