"""``ssd-cache diff``: what one cache holds that another does not, and how much of it could be drafted all the same."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from cache_builder.commands.options import codec_of, progress_bar
from cache_builder.held import Decode, Held, digest_of, open_held, shown
from ssd.retrieval.ring import sequences_of
from ssd.retrieval.search import longest_match
from ssd.retrieval.segment import Tokens
from ssd.retrieval.snapshot import make_snapshot, segment_table

WINDOWS: Final = (8, 16)
"""Tokens of a window, shortest first. Drafts go on from matches about so long."""

MOST_WINDOWS: Final = 50_000
"""Windows looked up of each length, evenly spread: a share that is off by 0.2 points, some 5 s of lookups."""

_SHOWN_TOKENS: Final = 64


@dataclass(slots=True, kw_only=True)
class Missing:
    """What ``path`` holds that another cache does not. Tokens are without separators.

    ``windows``, ``found`` : by length, how many windows of its text were looked up in the other, and stand there.
    ``newest`` : the end of the last sequence that is missing.
    """

    path: Path
    num_sequences: int = 0
    num_tokens: int = 0
    num_missing_sequences: int = 0
    num_missing_tokens: int = 0
    windows: Counter[int] = field(default_factory=Counter)
    found: Counter[int] = field(default_factory=Counter)
    newest: Tokens = field(default_factory=lambda: np.empty(0, np.int32))

    def share(self, length: int) -> float | None:
        """Of windows of so many tokens those that the other holds; None where there is none."""
        return self.found[length] / self.windows[length] if self.windows[length] else None

    def as_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "path": str(self.path),
            "num_sequences": self.num_sequences,
            "num_tokens": self.num_tokens,
            "num_missing_sequences": self.num_missing_sequences,
            "num_missing_tokens": self.num_missing_tokens,
            "windows": [
                {"tokens": length, "looked_up": self.windows[length], "share_found": self.share(length)}
                for length in WINDOWS
            ],
            "newest_missing": self.newest.tolist(),
        }


def diff(
    one: Path, other: Path, *, progress: Callable[[int], None] = lambda num_tokens: None
) -> tuple[Missing, Missing]:
    """What ``one`` holds that ``other`` does not, and the other way round.

    Sequences are compared whole, as often as they are stored, by 128 bits of hash; windows are looked up. ``progress``
    is told of tokens. Some 100 bytes of memory a sequence. Raises CacheError. O(tokens).
    """
    first, second = open_held([one, other])
    return _missing(first, second, progress), _missing(second, first, progress)


def _missing(cache: Held, other: Held, progress: Callable[[int], None]) -> Missing:
    result, there = Missing(path=cache.path), Counter(map(digest_of, sequences_of(other.segments)))
    table = segment_table(other.segments)
    searched = make_snapshot(0, other.segments, table, np.zeros(1, np.int32), 0, 0)
    stride, skip = max(1, cache.num_tokens // MOST_WINDOWS), 0
    longest = WINDOWS[-1]
    for sequence in sequences_of(cache.segments):
        result.num_sequences += 1
        result.num_tokens += len(sequence)
        digest = digest_of(sequence)
        if there[digest] > 0:
            there[digest] -= 1
        else:
            result.num_missing_sequences += 1
            result.num_missing_tokens += len(sequence)
            result.newest = sequence[-_SHOWN_TOKENS:].copy()
        num_possible = max(0, len(sequence) - WINDOWS[0] + 1)
        for place in range(WINDOWS[0] + skip, len(sequence) + 1, stride):
            agreeing = longest_match(searched, sequence[max(0, place - longest) : place], longest).length
            for length in WINDOWS:
                if length <= place:
                    result.windows[length] += 1
                    result.found[length] += agreeing >= length
        skip = (skip - num_possible) % stride if skip < num_possible else skip - num_possible
        progress(len(sequence) + 1)
    return result


def as_text(sides: Sequence[Missing], decode: Decode) -> str:
    """For people. ``decode`` : from ids to text, None shows ids."""
    lines = []
    for side, other in (sides, sides[::-1]):
        lines += [
            f"{side.path}: {side.num_tokens:,} tokens in {side.num_sequences:,} sequences",
            f"  not in {other.path}: {side.num_missing_tokens:,} tokens in {side.num_missing_sequences:,} sequences",
        ]
        for length in WINDOWS:
            share = side.share(length)
            if share is not None:
                lines.append(
                    f"  windows of {length:2} tokens that stand in {other.path}: {100 * share:.1f} % of "
                    f"{side.windows[length]:,} looked up"
                )
        if len(side.newest):
            lines.append(f"  the newest that is missing ends: {shown(side.newest.tolist(), decode)}")
    return "\n".join(lines)


_DESCRIPTION = """\
What each of two caches holds that the other does not: whole sequences, and of short windows of text the share that
stands in the other all the same, which is what drafts are made from.
"""


def add(command: argparse.ArgumentParser) -> None:
    """Its arguments."""
    command.description = _DESCRIPTION
    command.add_argument("one", type=Path, metavar="A", help="a cache directory")
    command.add_argument("other", type=Path, metavar="B", help="another one of the same tokenizer")
    command.add_argument("--tokenizer", metavar="DIR_OR_MODEL", help="show the newest difference as text")
    command.add_argument("--json", action="store_true", help="print one JSON object")


def run(options: argparse.Namespace) -> int:
    codec = codec_of(options)
    with progress_bar(0, " tokens") as progress:
        sides = diff(options.one, options.other, progress=progress)
    if options.json:
        print(json.dumps({"a": sides[0].as_json(), "b": sides[1].as_json()}, indent=1))
    else:
        print(as_text(sides, None if codec is None else codec.decode))
    return 0
