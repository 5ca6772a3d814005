"""``ssd-cache prune``: a cache of at most so many tokens or bytes, of what a replay of logs shows to be of use."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from cache_builder.building.unfinished import check_new, new_cache
from cache_builder.commands.options import CACHE_DIRECTORY, add_log_arguments, progress_bar, read_logs
from cache_builder.evaluation.costs import flat
from cache_builder.evaluation.decoding import Decoded, OutputDecoder
from cache_builder.evaluation.log import Log, Row, runs
from cache_builder.held import Held, fingerprint_of, open_held
from ssd.config import CacheConfig, DraftConfig
from ssd.drafting.ask import SOURCES
from ssd.errors import ConfigError, TokenizerMismatch
from ssd.retrieval.cache import CacheSet
from ssd.retrieval.ring import sequences_of
from ssd.retrieval.segment import Tokens

_DESCRIPTION = """\
Make a cache directory smaller: keep what recorded requests are seen to draft from, the most used first.

The logs are decoded over the directory as `ssd-cache evaluate` does; of its text the blocks of 64 tokens that accepted
drafts came from are kept with a lead-in, as many as fit. What room is left goes to a part of all other text.
Without --logs the newest text is kept. Judge the result by logs that were not given here:
`ssd-cache evaluate OTHERS --cache frozen --warm OUT`.
"""


def add(command: argparse.ArgumentParser) -> None:
    """Its arguments."""
    command.description = _DESCRIPTION
    command.add_argument("directory", type=Path, metavar="DIR", help=CACHE_DIRECTORY)
    command.add_argument(
        "--budget", required=True, metavar="SIZE", help="tokens, as 4000000 or 4M, or bytes of files, as 64MB or 64MiB"
    )
    command.add_argument(
        "--logs", nargs="+", default=[], metavar="LOG", help="recorded requests, as the inputs of build"
    )
    command.add_argument("--out", type=Path, metavar="OUT", help="where to write (default: DIR itself, with --force)")
    command.add_argument("--force", action="store_true", help="replace the cache that is there")
    add_log_arguments(command)


def run(options: argparse.Namespace) -> int:
    budget = Budget.parse(options.budget)
    out = options.directory if options.out is None else options.out
    pruned = prune(
        options.directory, out, budget, find_said=(lambda: _said(options)) if options.logs else None,
        force=options.force,
    )  # fmt: skip
    print(f"{out}: {pruned.num_tokens:,} of {pruned.num_tokens_before:,} tokens in {pruned.num_sequences:,} sequences")
    if options.logs:
        print(f"  {pruned.num_kept_used:,} of the {pruned.num_used_blocks:,} blocks that drafts came from are kept")
    else:
        print("  the newest are kept: --logs LOG says what is used")
    return 0


def _said(options: argparse.Namespace) -> Said:
    codec, read = read_logs(options, options.logs)
    fingerprint = fingerprint_of(options.directory)
    if codec.fingerprint != fingerprint:
        raise TokenizerMismatch(
            f"{options.directory} was made with another tokenizer than --tokenizer {options.tokenizer}: give that one"
        )
    with progress_bar(int(read.log.output_lengths[read.log.with_prompt].sum()), " tokens") as progress:
        return said_from(options.directory, read.log, fingerprint, progress)


BLOCK_TOKENS: Final = 64
"""Of stored text, which is used or not as one."""

RUN_TOKENS: Final = 8
"""So many tokens in a row are hardly ever a coincidence."""

_WARM: Final = SOURCES.index("warm")
_WIDTH: Final = 32
"""Tokens up to which a pass is taken to cost nothing more: drafts are long, so that what helps any device is seen."""

Keys = npt.NDArray[np.uint64]
Counts = npt.NDArray[np.int64]


class Said:
    """Runs of tokens that drafts from stored text brought and that were accepted, and how often.

    ``keys`` : uint64[n], their hashes, rising; ``counts`` : int64[n].
    """

    def __init__(self, found: Iterable[Keys]) -> None:
        self.keys, self.counts = np.unique(np.concatenate([np.empty(0, np.uint64), *found]), return_counts=True)
        self._is_placed = np.zeros(len(self.keys), np.bool_)

    def place(self, tokens: Tokens, start: int, credits: Counts) -> None:
        """Credit the blocks of ``credits`` with the runs that stand in ``tokens`` first, which begin at ``start``.

        Called with all stored text in order: what stands in several places counts where it stands first, so that what
        is popular is kept once. O(n).
        """
        keys = runs(tokens, RUN_TOKENS)
        begins = np.flatnonzero(np.isin(keys, self.keys))
        at, first = np.unique(np.searchsorted(self.keys, keys[begins]), return_index=True)
        begins = begins[first][~self._is_placed[at]]
        at = at[~self._is_placed[at]]
        self._is_placed[at] = True
        np.add.at(credits, (start + begins + RUN_TOKENS - 1) // BLOCK_TOKENS, self.counts[at])


def said_from(
    directory: Path, log: Log, fingerprint: str, progress: Callable[[int], None] = lambda num_tokens: None
) -> Said:
    """Decode ``log`` with the cache ``directory`` as it is. ``progress`` : told of output tokens.

    Raises CacheError. Some 30 us a token that is accepted nowhere, less where drafts are.
    """
    decoder = OutputDecoder(flat(_WIDTH), draft=DraftConfig())
    found: list[Keys] = []
    with CacheSet(CacheConfig(), fingerprint, inline=True) as caches:
        caches.add_static_directory(directory)
        snapshot = caches.get().snapshot()
        for number in log.with_prompt.tolist():
            row = log.row(number)
            found += _accepted(row, decoder.decode(row, snapshot))
            progress(len(row.output))
    return Said(found)


def _accepted(row: Row, steps: Decoded) -> Sequence[Keys]:
    """The runs that end in a token that a draft from stored text brought."""
    text, positions = row.text(), len(row.context) + np.cumsum(steps.accepted + 1) - steps.accepted - 1
    of_warm = np.flatnonzero((steps.accepted > 0) & (steps.sources == _WARM))
    return [
        runs(text[max(0, positions[step] - RUN_TOKENS + 1) : positions[step] + steps.accepted[step]], RUN_TOKENS)
        for step in of_warm.tolist()
    ]


LEAD_IN_TOKENS: Final = BLOCK_TOKENS // 2
"""Kept before a block, so that what is said there is found from its first token."""

_STRETCH_BLOCKS: Final = 4
_GOLDEN_RATIO: Final = 0.6180339887498949

LEAST_TOKENS: Final = 8
"""Shorter pieces of a sequence are not kept: hardly anything is drafted from them."""

Flags = npt.NDArray[np.bool_]


def chosen(credits: Counts, budget: int, *, spread: bool = False) -> Flags:
    """Of every half block whether it is kept, bool[2 n]; all of it takes at most ``budget`` tokens, with separators.

    ``credits`` : int64[n], how often each block was of use. Of blocks of equal use the newest, which is the last, goes
    first; with ``spread`` those that lie spread over the text. O(n log n).
    """
    newest = np.arange(len(credits))
    order = (newest, _spread(len(credits)), credits) if spread else (newest, credits)
    ranked = np.lexsort(order)[::-1]
    fewest, most = 0, len(ranked)
    while fewest < most:
        count = (fewest + most + 1) // 2
        fewest, most = (
            (count, most) if _num_tokens(_halves(ranked[:count], len(credits))) <= budget else (fewest, count - 1)
        )
    return _halves(ranked[:fewest], len(credits))


def _spread(count: int) -> npt.NDArray[np.float64]:
    """float64[count], a number of each block: those with the greatest lie all over the text, in stretches of a few."""
    stretches = (np.arange(count) // _STRETCH_BLOCKS).astype(np.float64)
    found: npt.NDArray[np.float64] = (stretches * _GOLDEN_RATIO) % 1.0  # evenly spread, however many are taken
    return found


def _halves(blocks: npt.NDArray[np.int64], count: int) -> Flags:
    kept = np.zeros(2 * count, np.bool_)
    kept[2 * blocks] = kept[2 * blocks + 1] = True
    kept[np.maximum(0, 2 * blocks - 1)] = True
    return kept


def _num_tokens(kept: Flags) -> int:
    """At most so many, a separator after each run of half blocks included."""
    num_runs = int(kept[:1].sum() + (kept[1:] & ~kept[:-1]).sum())
    return LEAD_IN_TOKENS * int(kept.sum()) + num_runs


def kept_pieces(tokens: Tokens, start: int, kept: Flags) -> list[Tokens]:
    """What is kept of a sequence that begins at ``start``: views, in order. O(n / 32 + pieces)."""
    first, last = start // LEAD_IN_TOKENS, (start + len(tokens) - 1) // LEAD_IN_TOKENS
    flags = np.concatenate([[False], kept[first : last + 1], [False]])
    edges = np.flatnonzero(flags[1:] != flags[:-1]).reshape(-1, 2) + first
    pieces = []
    for begin, end in edges.tolist():
        piece = tokens[max(0, begin * LEAD_IN_TOKENS - start) : end * LEAD_IN_TOKENS - start]
        if len(piece) >= min(LEAST_TOKENS, len(tokens)):
            pieces.append(piece)
    return pieces


_UNITS: Final = {"": 1, "k": 1000, "M": 1000**2, "G": 1000**3, "ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}
_FILE_BYTES: Final = 1 << 14
"""Of a directory beside the text, and of a segment's header and padding."""
_LEAST_TOKENS: Final = 2 * BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class Budget:
    """So many tokens, or bytes of files."""

    amount: int
    is_bytes: bool

    @classmethod
    def parse(cls, text: str) -> Budget:
        """ "4M" and "4000000" are tokens, "64MB" and "64MiB" bytes. Raises ConfigError."""
        found = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,9})?) ?((?:[kMG]i?)?)(B?)", text.strip().replace("K", "k"))
        amount = 0 if found is None else int(float(found[1]) * _UNITS[found[2]])
        if found is None or not 0 < amount < 1 << 50:
            raise ConfigError(f"--budget {text[:40]}: give tokens, as 4000000 or 4M, or bytes, as 64MB or 64MiB")
        return cls(amount, bool(found[3]))

    def tokens_of(self, cache: Held) -> int:
        """How many tokens of ``cache`` it is, separators included."""
        if not self.is_bytes:
            return self.amount
        segments = cache.segments
        num_bytes = sum(each.text.nbytes + each.order.nbytes + each.fence.nbytes for each in segments)
        room = max(0, self.amount - _FILE_BYTES * (1 + len(segments)))
        return int(room * cache.num_tokens / max(1, num_bytes))


@dataclass(frozen=True, slots=True)
class Pruned:
    """Tokens are with separators. ``num_used_blocks`` : of 64 tokens each, those that drafts came from;
    ``num_kept_used`` : of them those that are kept whole."""

    num_tokens_before: int
    num_tokens: int
    num_sequences: int
    num_used_blocks: int
    num_kept_used: int


def prune(
    directory: Path,
    out: Path,
    budget: Budget,
    *,
    find_said: Callable[[], Said] | None = None,
    force: bool = False,
) -> Pruned:
    """Write what of the cache ``directory`` is of most use to ``out``, which may be the same directory.

    ``find_said`` : what logs were seen to draft from it; None keeps the newest text. Raises ConfigError, CacheError,
    OSError; then ``out`` is as it was before. O(tokens), in memory of a block in 64 and a segment of the result.
    """
    check_new(out, force=force)
    (cache,) = open_held([directory])
    num_tokens = budget.tokens_of(cache)
    if num_tokens < _LEAST_TOKENS:
        raise ConfigError(f"--budget leaves room for {num_tokens} tokens: give at least {_LEAST_TOKENS}")
    credits = np.zeros(-(-cache.num_tokens // BLOCK_TOKENS), np.int64)
    if find_said is not None:
        credits = credits_of(cache, find_said())
    # Of what no log used, a part of everything served held-out requests better than the newest, or what stands nearby.
    kept = chosen(credits, num_tokens, spread=find_said is not None)
    num_sequences = 0
    with new_cache(out, fingerprint=cache.fingerprint, namespace=cache.namespace, force=force) as writer:
        for start, sequence in _placed(cache):
            for piece in kept_pieces(sequence, start, kept):
                writer.append(piece)
                num_sequences += 1
        num_written = writer.num_tokens
    used, kept_blocks = credits > 0, kept.reshape(-1, BLOCK_TOKENS // LEAD_IN_TOKENS).all(1)
    return Pruned(cache.num_tokens, num_written, num_sequences, int(used.sum()), int((used & kept_blocks).sum()))


def credits_of(cache: Held, said: Said) -> Counts:
    """int64[blocks]: of each 64 tokens of the cache how many that were accepted elsewhere stand there first."""
    credits = np.zeros(-(-cache.num_tokens // BLOCK_TOKENS), np.int64)
    for start, sequence in _placed(cache):
        said.place(sequence, start, credits)
    return credits


def _placed(cache: Held) -> Iterator[tuple[int, Tokens]]:
    """Its sequences, and where each begins; a separator follows each."""
    start = 0
    for sequence in sequences_of(cache.segments):
        yield start, sequence
        start += len(sequence) + 1
