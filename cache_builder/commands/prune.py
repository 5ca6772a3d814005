"""``ssd-cache prune``: reduce a cache to a number of tokens, keeping the text that a replay of logs uses most."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from cache_builder.building.resumable import check_output, new_cache
from cache_builder.commands.options import CACHE_DIRECTORY, add_log_arguments, progress_bar, read_logs, token_count
from cache_builder.evaluation.costs import flat_curve
from cache_builder.evaluation.decoding import OutputDecoder
from cache_builder.evaluation.log import Log
from cache_builder.opened_cache import OpenedCache, open_caches
from ssd.config import CacheConfig, DraftConfig
from ssd.drafting.draft_records import SOURCES
from ssd.errors import ConfigError
from ssd.retrieval.cache_manager import CacheManager
from ssd.retrieval.ring import iter_sequences
from ssd.retrieval.segment import Tokens

_DESCRIPTION = """\
Shrink a cache directory: keep the text from which recorded requests draft, the most used first.

The logs are replayed with drafts from the directory, as by `ssd-cache evaluate`. Blocks of 64 tokens from which drafts
were accepted are kept, with the text before them, as many as fit into --budget. The rest is filled with other text.
Evaluate the result with other logs: `ssd-cache evaluate OTHERS --cache frozen --warm OUT`.
"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.description = _DESCRIPTION
    command.add_argument("directory", type=Path, metavar="DIR", help=CACHE_DIRECTORY)
    command.add_argument(
        "--budget", type=token_count, required=True, metavar="TOKENS", help="Maximum number of tokens to keep, e.g. 4M"
    )
    command.add_argument(
        "--logs", nargs="+", required=True, metavar="LOG", help="Files of requests that `ssd-cache build` can read"
    )
    command.add_argument(
        "--out", type=Path, metavar="OUT", help="Cache directory to write (default: DIR, which requires --force)"
    )
    command.add_argument("--force", action="store_true", help="Replace an existing cache in OUT")
    add_log_arguments(command)


def run(options: argparse.Namespace) -> int:
    if options.budget < 2 * BLOCK_TOKENS:
        raise ConfigError(f"--budget must be at least {2 * BLOCK_TOKENS} tokens, got {options.budget}")
    out = options.directory if options.out is None else options.out
    check_output(out, force=options.force)
    codec, log = read_logs(options, options.logs)
    with progress_bar(int(log.output_lengths[log.replayable].sum()), " tokens") as bar:
        accepted_keys = accepted_runs(options.directory, log, codec.fingerprint, bar.update)
    prune(options.directory, out, options.budget, accepted_keys, force=options.force)
    return 0


BLOCK_TOKENS: Final = 64
"""The number of tokens in a block, the unit in which `prune` counts the use of a cache and keeps its text."""

RUN_TOKENS: Final = 8
"""The number of consecutive tokens by which accepted text is found again in the cache; fewer would match by accident.
"""

_WARM: Final = SOURCES.index("prebuilt")
_WIDTH: Final = 32
"""The number of tokens up to which a forward pass is assumed to take constant time in the replay of a log.

Under this assumption drafts are long, so the accepted drafts cover more of the cache's text.
"""

_FACTOR: Final = 0x9E3779B97F4A7C15

Keys = npt.NDArray[np.uint64]
Counts = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


def accepted_runs(
    directory: Path, log: Log, fingerprint: str, progress: Callable[[int], object] = lambda num_tokens: None
) -> list[Keys]:
    """Replay a log with drafts from a cache, and return which token sequences of the cache were accepted as drafts.

    A token sequence is represented by the hash of ``RUN_TOKENS`` consecutive tokens; there is one array of hashes for
    each accepted draft. It takes about 30 microseconds per output token, and less if drafts are accepted. Raises
    CacheError if the cache cannot be read.
    """
    decoder = OutputDecoder(flat_curve(_WIDTH), draft=DraftConfig())
    accepted_keys: list[Keys] = []
    with CacheManager(CacheConfig(), fingerprint, inline=True) as caches:
        caches.add_prebuilt_directory(directory)
        snapshot = caches.get().snapshot()
        for number in log.replayable.tolist():
            row = log.row(number)
            steps, text = decoder.decode(row, snapshot), row.text()
            positions = len(row.context) + np.cumsum(steps.accepted + 1) - steps.accepted - 1
            for step in np.flatnonzero((steps.accepted > 0) & (steps.sources == _WARM)).tolist():
                begin, end = positions[step] - RUN_TOKENS + 1, positions[step] + steps.accepted[step]
                accepted_keys.append(_hash_runs(text[max(0, begin) : end]))
            progress(len(row.output))
    return accepted_keys


def _hash_runs(tokens: Tokens) -> Keys:
    """Return the hashes of all runs of ``RUN_TOKENS`` consecutive tokens: uint64[n - RUN_TOKENS + 1]. O(n)."""
    room = max(0, len(tokens) - RUN_TOKENS + 1)
    keys = np.zeros(room, np.uint64)
    for place in range(RUN_TOKENS):
        keys = keys * np.uint64(_FACTOR) + tokens[place : place + room].astype(np.uint64)
    return (keys ^ (keys >> np.uint64(29))) * np.uint64(_FACTOR)


def count_uses(cache: OpenedCache, accepted_keys: Iterable[Keys]) -> Counts:
    """Return for each block of a cache how often accepted drafts contained text of this block: int64[blocks].

    ``accepted_keys`` is the result of `accepted_runs`. If a text occurs several times in the cache, only the block of
    its first occurrence is counted, so that pruning keeps repeated text once. O(tokens).
    """
    keys, counts = np.unique(np.concatenate([np.empty(0, np.uint64), *accepted_keys]), return_counts=True)
    is_placed = np.zeros(len(keys), np.bool_)
    credits = np.zeros(-(-cache.num_tokens // BLOCK_TOKENS), np.int64)
    for start, tokens in _sequences_with_positions(cache):
        there = _hash_runs(tokens)
        begins = np.flatnonzero(np.isin(there, keys))
        at, first = np.unique(np.searchsorted(keys, there[begins]), return_index=True)
        begins, at = begins[first][~is_placed[at]], at[~is_placed[at]]
        is_placed[at] = True
        np.add.at(credits, (start + begins + RUN_TOKENS - 1) // BLOCK_TOKENS, counts[at])
    return credits


LEAD_IN_TOKENS: Final = BLOCK_TOKENS // 2
"""The number of tokens that are kept before each used block. A context that matches them gets the block's tokens as its
draft.
"""

_STRETCH_BLOCKS: Final = 4
_GOLDEN_RATIO: Final = 0.6180339887498949

LEAST_TOKENS: Final = 8
"""The minimum length in tokens of a kept part of a sequence; pruning drops shorter parts, which hardly yield drafts."""


def choose_half_blocks(credits: Counts, budget: int) -> Flags:
    """Choose the half blocks of a cache that pruning keeps: bool[2 n], two entries for each block. O(n log n).

    The most used blocks are kept first, each with the half block before it as a lead-in. If not all blocks with the
    same count fit, stretches of a few blocks are chosen, spread evenly over the text. In tests with requests that were
    not counted, unused blocks chosen in this way gave better drafts than the newest unused blocks, and than the
    neighbours of used blocks.

    Args:
        credits: The usage count of each block, int64[n].
        budget: The maximum number of kept tokens, including separators.
    """
    count = len(credits)
    spread = (np.arange(count) // _STRETCH_BLOCKS * _GOLDEN_RATIO) % 1.0  # even for any number of blocks
    ranked = np.lexsort((np.arange(count), spread, credits))[::-1]

    def select_halves(most: int) -> Flags:
        kept = np.zeros(2 * count, np.bool_)
        kept[2 * ranked[:most]] = kept[2 * ranked[:most] + 1] = True
        kept[np.maximum(0, 2 * ranked[:most] - 1)] = True
        return kept

    fewest, most = 0, count
    while fewest < most:
        kept = select_halves(middle := (fewest + most + 1) // 2)
        num_runs = int(kept[:1].sum() + (kept[1:] & ~kept[:-1]).sum())
        fits = LEAD_IN_TOKENS * int(kept.sum()) + num_runs <= budget
        fewest, most = (middle, most) if fits else (fewest, middle - 1)
    return select_halves(fewest)


def retained_pieces(tokens: Tokens, start: int, kept: Flags) -> list[Tokens]:
    """Return the parts of a sequence that pruning keeps, in order.

    The sequence begins at position ``start`` of the cache. ``kept`` is the result of `choose_half_blocks`.
    """
    first, last = start // LEAD_IN_TOKENS, (start + len(tokens) - 1) // LEAD_IN_TOKENS
    flags = np.concatenate([[False], kept[first : last + 1], [False]])
    edges = np.flatnonzero(flags[1:] != flags[:-1]).reshape(-1, 2) + first
    pieces = []
    for begin, end in edges.tolist():
        piece = tokens[max(0, begin * LEAD_IN_TOKENS - start) : end * LEAD_IN_TOKENS - start]
        if len(piece) >= min(LEAST_TOKENS, len(tokens)):
            pieces.append(piece)
    return pieces


def prune(directory: Path, out: Path, budget: int, accepted_keys: Iterable[Keys], *, force: bool = False) -> None:
    """Write the most used text of a cache, at most ``budget`` tokens with separators, to ``out``, and print a summary.

    ``accepted_keys``, the result of `accepted_runs`, tells which text was used. ``out`` may equal ``directory``, and is
    unchanged after an error. It takes O(tokens) time, and memory for 1/64 of the tokens and one segment of the result.
    Raises ConfigError if ``out`` cannot be used, CacheError if the cache cannot be read, and OSError if the result
    cannot be written.
    """
    (cache,) = open_caches([directory])
    credits = count_uses(cache, accepted_keys)
    kept = choose_half_blocks(credits, budget)
    num_sequences = num_tokens = num_kept = 0
    with new_cache(out, fingerprint=cache.fingerprint, namespace=cache.namespace, force=force) as writer:
        for start, sequence in _sequences_with_positions(cache):
            num_tokens += len(sequence)
            for piece in retained_pieces(sequence, start, kept):
                writer.append(piece)
                num_sequences += 1
                num_kept += len(piece)
    used, kept_blocks = credits > 0, kept.reshape(-1, BLOCK_TOKENS // LEAD_IN_TOKENS).all(1)
    print(f"{out}: {num_kept:,} of {num_tokens:,} tokens in {num_sequences:,} sequences")
    print(f"  {(used & kept_blocks).sum():,} of the {used.sum():,} blocks from which drafts came are kept")


def _sequences_with_positions(cache: OpenedCache) -> Iterator[tuple[int, Tokens]]:
    start = 0
    for sequence in iter_sequences(cache.segments):
        yield start, sequence
        start += len(sequence) + 1
