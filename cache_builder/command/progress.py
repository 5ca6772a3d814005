"""How far a command is, for who watches it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

_LINE_S: Final = 10.0


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


class BuildProgress:
    """Bytes read and tokens made: a bar on a terminal, elsewhere a line every ten seconds."""

    def __init__(self, *, quiet: bool) -> None:
        """``quiet`` : nothing at all."""
        self._quiet = quiet
        self._bar: Any = None
        self._total = self._num_bytes = self._num_tokens = 0
        self._began = self._told = time.monotonic()

    def begin(self, num_bytes: int) -> None:
        """``num_bytes`` : of all inputs, 0 where nobody knows."""
        self._total = num_bytes
        self._began = self._told = time.monotonic()
        if self._quiet or not sys.stderr.isatty():
            return
        try:
            from tqdm import tqdm
        except ModuleNotFoundError:
            return
        self._bar = tqdm(total=num_bytes or None, unit="B", unit_scale=True, leave=False)

    def tell(self, num_bytes: int, num_tokens: int) -> None:
        """So many more."""
        self._num_bytes += num_bytes
        self._num_tokens += num_tokens
        if self._bar is not None:
            self._bar.set_postfix_str(self._rate(), refresh=False)
            self._bar.update(num_bytes)
        elif not self._quiet and time.monotonic() - self._told >= _LINE_S:
            self._told = time.monotonic()
            print(f"ssd-cache: {self._line()}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Nothing comes any more."""
        if self._bar is not None:
            self._bar.close()

    def _rate(self) -> str:
        took = max(1e-3, time.monotonic() - self._began)
        return f"{self._num_tokens / 1e6:.1f}M tokens, {self._num_tokens / took / 1e3:,.0f}k tokens/s"

    def _line(self) -> str:
        share = self._num_bytes / self._total if self._total else 0.0
        if not 0.0 < share <= 1.0:
            return self._rate()
        left = (time.monotonic() - self._began) * (1 - share) / share
        return f"{share:.0%} of {self._total / 1e6:,.0f} MB, {self._rate()}, {left / 60:.0f} min left"


@contextmanager
def build_progress(*, quiet: bool) -> Iterator[BuildProgress]:
    """A ``BuildProgress`` that is closed at the end."""
    progress = BuildProgress(quiet=quiet)
    try:
        yield progress
    finally:
        progress.close()
