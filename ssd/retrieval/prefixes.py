"""Storing a prompt's beginning once: what many requests repeat is not stored many times."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from ssd.compiled.addresses import Int64s, TokenIds, kernel
from ssd.errors import CacheError
from ssd.retrieval.packed import Tokens

_FACTOR: Final = np.uint64(0x9E3779B97F4A7C15)
_SHIFT: Final = np.uint64(32)


class PrefixFilter:
    """Knows which leading blocks of text are stored, by a chain of hashes. One writer.

    The hash of a block covers the blocks before it, so a known hash means that the whole beginning up to there is known
    (64 bits: a collision only loses a few tokens of drafting material). A block is forgotten once the ring
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
        self._by_age: deque[tuple[int, list[int], list[int]]] = deque()  # position, hashes of blocks and of their ends
        block_hashes(np.zeros(0, np.int32), 0, 0, max(1, block_tokens), lead_in_tokens)  # compiled here, not in a step
        hash_of(np.zeros(0, np.int32))

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
        before = None
        if len(piece) > self._lead_in_tokens:
            before = self._ends.get(hash_of(piece[: self._lead_in_tokens]))
        start, seed = (0, 0) if before is None else (self._lead_in_tokens, before)
        hashes, ends = block_hashes(piece, start, seed, self._block_tokens, self._lead_in_tokens)
        self._keep(hashes, ends, position)

    def forget_before(self, position: int) -> None:
        """Forget the blocks stored before ``position``: they are evicted. O(1) for each."""
        while self._by_age and self._by_age[0][0] < position:
            stored_at, hashes, ends = self._by_age.popleft()
            for block_hash, end in zip(hashes, ends, strict=True):
                if self._positions.get(block_hash) == stored_at:  # else it was stored again since
                    del self._positions[block_hash]
                    if self._ends.get(end) == block_hash:
                        del self._ends[end]

    def _remember(self, tokens: Tokens, prompt_length: int, position: int) -> int:
        """Returns how many leading tokens are stored already, a multiple of the block length within the prompt."""
        hashes, ends = block_hashes(tokens, 0, 0, self._block_tokens, self._lead_in_tokens)
        num_known, most = 0, min(len(hashes), prompt_length // self._block_tokens)
        while num_known < most and hashes[num_known] in self._positions:
            num_known += 1
        self._keep(hashes[num_known:], ends[num_known:], position)
        return num_known * self._block_tokens

    def _keep(self, hashes: list[int], ends: list[int], position: int) -> None:
        """Blocks that follow each other, as ``block_hashes`` gives them."""
        if hashes:
            self._positions.update(dict.fromkeys(hashes, position))
            if self._follows_others:
                self._ends.update(zip(ends, hashes, strict=True))
            self._by_age.append((position, hashes, ends))


def block_hashes(
    tokens: Tokens, start: int, seed: int, block_tokens: int, lead_in_tokens: int
) -> tuple[list[int], list[int]]:
    """Two hashes of each whole block of ``tokens`` : int32[n], from ``start`` on: of the text up to its end, where
    ``seed`` is that up to ``start``, and of its last ``lead_in_tokens`` tokens, or all there are: those that a piece
    after it would begin with. O(n), in one kernel.
    """
    found = np.empty((2, max(0, len(tokens) - start) // block_tokens), np.int64)
    _hash_blocks(tokens, start, seed, block_tokens, lead_in_tokens, found)
    hashes, ends = found.tolist()
    return hashes, ends


def hash_of(tokens: Tokens) -> int:
    """Of ``tokens`` : int32[n], where they are the last ones of a block, as ``block_hashes`` has it. O(n)."""
    return _hash(tokens, 0, len(tokens), 0)


@kernel
def _hash(tokens: TokenIds, start: int, stop: int, seed: int) -> int:
    hashed = np.uint64(seed)
    for i in range(start, stop):
        hashed = (hashed ^ np.uint64(tokens[i] + 1)) * _FACTOR
        hashed ^= hashed >> _SHIFT
    return np.int64(hashed)  # type: ignore[return-value]


@kernel
def _hash_blocks(
    tokens: TokenIds, start: int, seed: int, block_tokens: int, lead_in_tokens: int, found: Int64s
) -> None:
    for number in range(found.shape[1]):
        stop = start + (number + 1) * block_tokens
        seed = _hash(tokens, stop - block_tokens, stop, seed)
        found[0, number] = seed
        found[1, number] = _hash(tokens, max(0, stop - lead_in_tokens), stop, 0)


def as_sequence(token_ids: Sequence[int] | npt.NDArray[np.integer]) -> Tokens:
    """A copy as int32[n]. Raises CacheError for what is no sequence of token ids."""
    wide = np.array(token_ids)
    if len(wide) == 0:
        return np.empty(0, np.int32)
    if wide.ndim == 1 and wide.dtype == np.int32 and np.minimum.reduce(wide) >= 0:
        return wide
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
