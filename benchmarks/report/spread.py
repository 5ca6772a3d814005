"""A ratio and how far it scattered, as tables have it."""

from __future__ import annotations

from collections.abc import Sequence


def ratio_with_spread(values: Sequence[float]) -> str:
    """A median, the least and the most: ``1.23x (1.10 ... 1.34)``."""
    middle, least, most = values
    return f"{middle:.2f}x ({least:.2f} ... {most:.2f})"
