"""Storing a prompt's beginning once: what many requests repeat is not stored many times."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from ssd.errors import CacheError
from ssd.retrieval.packed import Tokens


class PrefixFilter:
    """Knows which leading blocks of text are stored, by a chain of hashes. One writer.

    The hash of a block covers the blocks before it, so a known hash means that the whole beginning up to there is known
    (64 bits of xxh3: a collision only loses a few tokens of drafting material). A block is forgotten once the ring
    position it was stored at is evicted, so memory is bounded by capacity / block entries of about 100 bytes, twice
    that with ``follows_others``.
    """

    def __init__(self, block_tokens: int, lead_in_tokens: int, *, follows_others: bool = False) -> None:
        """Blocks of ``block_tokens`` tokens (0: no filter); ``lead_in_tokens`` are repeated before new text.

        ``follows_others`` : pieces that another filter of the same lengths cut will be noted too.
        """
        self._block_tokens = block_tokens
        self._lead_in_tokens = lead_in_tokens
        self._follows_others = follows_others and block_tokens > 0 and lead_in_tokens > 0
        self._positions: dict[int, int] = {}  # hash of a block -> position of the sequence that stored it
        self._ends: dict[int, int] = {}  # hash of the tokens that a piece after a block would begin with -> its hash
        self._by_age: deque[tuple[int, list[tuple[int, int]]]] = deque()  # as (position, (block, its end) of all)

    def __len__(self) -> int:
        """Blocks known."""
        return len(self._positions)

    def pieces(self, tokens: Tokens, prompt_length: int, position: int) -> list[Tokens]:
        """What of a sequence is to be stored, and remember its blocks as stored at ``position``.

        ``tokens`` : int32[n], prompt then completion; the completion is always stored, because how often a text
        occurred is what ranks drafts. ``position`` : where the ring will put it, never smaller than before. Returns
        views of ``tokens``: none when there is nothing new, else one. O(n).

        Blocks of the completion are remembered too: the next turn of a conversation brings them back in its prompt.
        """
        skipped = self._remember(tokens, prompt_length, position) if self._block_tokens else 0
        if skipped == len(tokens):
            return []
        return [tokens[max(0, skipped - self._lead_in_tokens) :]]

    def note(self, piece: Tokens, position: int) -> None:
        """Remember the blocks of a piece that another replica cut and that is stored at ``position``. O(n).

        Where it begins as a piece after a known block would, it is taken to go on from there, else to be the beginning
        of a text. Taken wrongly, the filter may know a beginning whose parts are all stored, each with the lead-in
        before it, though not in one piece: any context of that length is found all the same.
        """
        if not self._follows_others:
            return
        before = self._ends.get(_hash(piece[: self._lead_in_tokens])) if len(piece) > self._lead_in_tokens else None
        start, seed = (0, 0) if before is None else (self._lead_in_tokens, before)
        self._keep(piece, list(self._chain(piece, start, seed)), position)

    def forget_before(self, position: int) -> None:
        """Forget the blocks stored before ``position``: they are evicted. O(1) for each."""
        while self._by_age and self._by_age[0][0] < position:
            stored_at, blocks = self._by_age.popleft()
            for block_hash, end in blocks:
                if self._positions.get(block_hash) == stored_at:  # else it was stored again since
                    del self._positions[block_hash]
                    if self._ends.get(end) == block_hash:
                        del self._ends[end]

    def _remember(self, tokens: Tokens, prompt_length: int, position: int) -> int:
        """Returns how many leading tokens are stored already, a multiple of the block length within the prompt."""
        skipped = 0
        is_known_so_far = True
        blocks: list[tuple[int, int]] = []
        for stop, block_hash in self._chain(tokens):
            is_known_so_far = is_known_so_far and stop <= prompt_length and block_hash in self._positions
            if is_known_so_far:
                skipped = stop
            else:
                blocks.append((stop, block_hash))
        self._keep(tokens, blocks, position)
        return skipped

    def _keep(self, tokens: Tokens, blocks: list[tuple[int, int]], position: int) -> None:
        """``blocks`` : (end offset in ``tokens``, hash) of each."""
        kept = []
        for stop, block_hash in blocks:
            self._positions[block_hash] = position
            end = 0
            if self._follows_others:
                end = _hash(tokens[max(0, stop - self._lead_in_tokens) : stop])
                self._ends[end] = block_hash
            kept.append((block_hash, end))
        if kept:
            self._by_age.append((position, kept))

    def _chain(self, tokens: Tokens, start: int = 0, block_hash: int = 0) -> Iterator[tuple[int, int]]:
        """(end offset, hash of everything up to there) of each whole block from ``start`` on."""
        for stop in range(start + self._block_tokens, len(tokens) + 1, self._block_tokens):
            block_hash = _hash(tokens[stop - self._block_tokens : stop], block_hash)
            yield stop, block_hash


def _hash(tokens: Tokens, seed: int = 0) -> int:
    return xxhash.xxh3_64_intdigest(tokens.data, seed=seed)


def as_sequence(token_ids: Sequence[int] | npt.NDArray[np.integer]) -> Tokens:
    """A copy as int32[n]. Raises CacheError for what is no sequence of token ids."""
    wide = np.array(token_ids)
    if len(wide) == 0:
        return np.empty(0, np.int32)
    if wide.ndim != 1 or wide.dtype.kind not in "iu" or wide.min() < 0 or wide.max() > np.iinfo(np.int32).max:
        raise CacheError("token ids must be one sequence of integers within 0..2147483647")
    return wide.astype(np.int32)


def split_sequence(tokens: Tokens, max_tokens: int, lead_in_tokens: int) -> list[Tokens]:
    """Cut a sequence into views of at most ``max_tokens`` tokens.

    Each later piece begins with the ``lead_in_tokens`` before it (at most half a piece), so that a context which runs
    over the cut is still found. An empty sequence gives no piece.
    """
    if len(tokens) <= max_tokens:
        return [tokens] if len(tokens) else []
    step = max_tokens - min(lead_in_tokens, max_tokens // 2)
    num_pieces = 1 + -(-(len(tokens) - max_tokens) // step)
    return [tokens[i * step : i * step + max_tokens] for i in range(num_pieces)]
