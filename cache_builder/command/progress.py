"""How far a command is, for who watches it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(total: int, unit: str) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, nothing anywhere else. ``total`` : 0 where it is not known."""
    if not sys.stderr.isatty():
        yield lambda amount: None
        return
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:
        yield lambda amount: None
        return
    with tqdm(total=total or None, unit=unit, unit_scale=True, leave=False) as bar:
        yield lambda amount: bar.update(amount) and None
