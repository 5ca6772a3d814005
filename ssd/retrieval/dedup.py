"""Deduplicate prompts: if many prompts begin with the same text, this text is stored once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from ssd.errors import CacheError
from ssd.jit.addresses import Int64s, TokenIds, kernel
from ssd.retrieval.ring import power_of_two_at_least
from ssd.retrieval.segment import Tokens

_FACTOR: Final = np.uint64(0x9E3779B97F4A7C15)
_SHIFT: Final = np.uint64(32)


_MIN_SLOTS: Final = 64


class _HashTable:
    """An open-addressing hash table of int64, whose entries expire when their text is evicted from the ring buffer.

    An expired entry stays in its slot until the table is rebuilt. A slot takes 24 bytes, or 16 without values;
    untouched pages take no memory. ``positions`` are ring-buffer positions plus one; 0 marks a free slot.
    """

    def __init__(self, *, has_values: bool) -> None:
        self._has_values = has_values
        self._forgotten = self._num_used = 0
        self._make(_MIN_SLOTS)

    def _make(self, slots: int) -> None:
        self.keys, self.positions = np.zeros(slots, np.int64), np.zeros(slots, np.int64)
        self.values = np.zeros(slots if self._has_values else 0, np.int64)

    def __len__(self) -> int:
        return int(np.count_nonzero(self.positions > self._forgotten))

    def forget_before(self, position: int) -> None:
        """Expire the entries whose text is at ring-buffer positions before ``position``, because it is evicted."""
        self._forgotten = max(self._forgotten, position)

    def put(self, keys: Int64s, values: Int64s, position: int) -> None:
        if 3 * (self._num_used + len(keys)) > 2 * len(self.keys):
            before = self.keys, self.positions, self.values
            self._make(power_of_two_at_least(max(_MIN_SLOTS, 2 * (len(self) + len(keys)))))
            self._num_used = _copy_live(*before, self._forgotten, self.keys, self.positions, self.values)
        self._num_used += _put(self.keys, self.positions, self.values, keys, values, position + 1)

    def count_leading_keys(self, keys: Int64s) -> int:
        """Return how many leading elements of ``keys`` are in the hash table, up to the first one that is not."""
        return _count_leading_keys(self.keys, self.positions, keys, self._forgotten)

    def get(self, key: int) -> int | None:
        slot = _slot_of(self.keys, self.positions, key)
        return int(self.values[slot]) if self.positions[slot] > self._forgotten else None


@kernel
def _slot_of(keys: Int64s, positions: Int64s, key: int) -> int:
    slot = key & (len(keys) - 1)
    while positions[slot] != 0 and keys[slot] != key:
        slot = (slot + 1) & (len(keys) - 1)
    return slot


@kernel
def _put(keys: Int64s, positions: Int64s, values: Int64s, new: Int64s, new_values: Int64s, position: int) -> int:
    """Write keys and values to a hash table; return the number of previously free slots that were filled."""
    used = 0
    for i in range(len(new)):
        slot = _slot_of(keys, positions, new[i])
        used += positions[slot] == 0
        keys[slot], positions[slot] = new[i], position
        if len(values) > 0:
            values[slot] = new_values[i]
    return used


@kernel
def _count_leading_keys(keys: Int64s, positions: Int64s, wanted: Int64s, forgotten: int) -> int:
    for i in range(len(wanted)):
        if positions[_slot_of(keys, positions, wanted[i])] <= forgotten:
            return i
    return len(wanted)


@kernel
def _copy_live(
    keys: Int64s,
    positions: Int64s,
    values: Int64s,
    forgotten: int,
    new_keys: Int64s,
    new_positions: Int64s,
    new_values: Int64s,
) -> int:
    moved = 0
    for at in range(len(keys)):
        if positions[at] > forgotten:
            slot = _slot_of(new_keys, new_positions, keys[at])
            new_keys[slot], new_positions[slot] = keys[at], positions[at]
            if len(values) > 0:
                new_values[slot] = values[at]
            moved += 1
    return moved


class PromptDeduplicator:
    """Finds the leading blocks of a prompt that are stored already, by chained hashes. For one writing thread.

    The hash of a block covers the blocks before it, so a known hash means that the whole beginning is stored. A
    collision of two 64-bit hashes only means that a few tokens are not stored. A block expires when its text is
    evicted. The deduplicator therefore has at most one entry per block of the cache's capacity. An entry takes 24 to 64
    bytes, or 2.5 times as much with ``follows_others``.
    """

    def __init__(self, block_tokens: int, lead_in_tokens: int, *, follows_others: bool = False) -> None:
        """Create an empty deduplicator.

        Args:
            block_tokens: Tokens per block; 0 disables deduplication.
            lead_in_tokens: The number of tokens before new text that are stored with it.
            follows_others: Whether ``note_replicated`` is going to be called, with text from other replicas.
        """
        self._block_tokens = block_tokens
        self._lead_in_tokens = lead_in_tokens
        self._blocks = _HashTable(has_values=False)  # keys: hashes of blocks
        self._ends: _HashTable | None = None  # hash of a block's lead-in -> hash of the block
        if follows_others and block_tokens > 0 and lead_in_tokens > 0:
            self._ends = _HashTable(has_values=True)
        # Compile the kernels now rather than during a step.
        hashes, ends = block_hashes(np.zeros(1, np.int32), 0, 0, 1, lead_in_tokens)
        lead_in_hash(np.zeros(0, np.int32))
        warm = _HashTable(has_values=True)
        warm.put(hashes, ends, 0)
        warm.get(warm.count_leading_keys(hashes))
        _copy_live(warm.keys, warm.positions, warm.values, 0, *(np.zeros(2, np.int64) for _ in range(3)))

    def new_pieces(self, tokens: Tokens, prompt_length: int, position: int) -> list[Tokens]:
        """Return the part of a sequence that is not stored yet, and remember the sequence's blocks as stored.

        The result is a list with one view of ``tokens``, or an empty list if nothing is new. The completion (the tokens
        after the first ``prompt_length``) is always new, even if the same text is stored already, because drafts are
        ranked by how often their text occurred. The blocks of the completion are remembered too, because the next turn
        of a conversation repeats them in its prompt.

        The caller stores the part at the ring-buffer position ``position``, which must not be smaller than in earlier
        calls.
        """
        skipped = 0  # leading tokens of the prompt, whole blocks, that are stored already
        if self._block_tokens:
            hashes, ends = block_hashes(tokens, 0, 0, self._block_tokens, self._lead_in_tokens)
            num_known = self._blocks.count_leading_keys(hashes[: prompt_length // self._block_tokens])
            self._remember(hashes[num_known:], ends[num_known:], position)
            skipped = num_known * self._block_tokens
        if skipped == len(tokens):
            return []
        return [tokens[max(0, skipped - self._lead_in_tokens) :]]

    def note_replicated(self, piece: Tokens, position: int) -> None:
        """Remember the blocks of a text from another replica as stored at ring-buffer position ``position``.

        Replicas send only new text. If it continues a stored block, it begins with a lead-in: the last tokens of that
        block. So if ``piece`` begins with the lead-in of a known block, it is assumed to continue this block. Otherwise
        it is assumed to be the beginning of a prompt. If the assumption is wrong, a prompt may be regarded as stored
        although only parts of it are stored, in different texts. Lookups then still find contexts up to the length of
        the lead-in.
        """
        if self._ends is None:
            return
        before = None
        if len(piece) > self._lead_in_tokens:
            before = self._ends.get(lead_in_hash(piece[: self._lead_in_tokens]))
        start, seed = (0, 0) if before is None else (self._lead_in_tokens, before)
        self._remember(*block_hashes(piece, start, seed, self._block_tokens, self._lead_in_tokens), position)

    def forget_before(self, position: int) -> None:
        """Forget the prompt blocks stored before ring-buffer position ``position``, because their text is evicted."""
        self._blocks.forget_before(position)
        if self._ends is not None:
            self._ends.forget_before(position)

    def _remember(self, hashes: Int64s, ends: Int64s, position: int) -> None:
        self._blocks.put(hashes, ends, position)
        if self._ends is not None:
            self._ends.put(ends, hashes, position)


def block_hashes(
    tokens: Tokens, start: int, seed: int, block_tokens: int, lead_in_tokens: int
) -> tuple[Int64s, Int64s]:
    """Return two hashes of every whole block of ``tokens`` from ``start`` on, in two arrays int64[blocks].

    The first hash identifies the whole text up to the block's end; ``seed`` is this hash for the text before ``start``.
    The second hash identifies the block's last ``lead_in_tokens`` tokens, with which a stored continuation of the block
    begins.
    """
    found = np.empty((2, max(0, len(tokens) - start) // block_tokens), np.int64)
    _hash_blocks(tokens, start, seed, block_tokens, lead_in_tokens, found)
    return found[0], found[1]


def lead_in_hash(tokens: Tokens) -> int:
    """Return the hash of a lead-in, the tokens before a new text, to find the stored block that ends with these tokens.

    The result equals the second hash of ``block_hashes`` for such a block.
    """
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
    """Return a copy of token ids as int32[n]. Raises CacheError unless all are integers in 0..2147483647."""
    wide = np.array(token_ids)
    if len(wide) == 0:
        return np.empty(0, np.int32)
    if wide.ndim == 1 and wide.dtype == np.int32 and np.minimum.reduce(wide) >= 0:
        return wide
    if wide.ndim != 1 or wide.dtype.kind not in "iu" or wide.min() < 0 or wide.max() > np.iinfo(np.int32).max:
        raise CacheError("token ids must be one sequence of integers within 0..2147483647")
    return wide.astype(np.int32)


def split_sequence(tokens: Tokens, max_tokens: int, lead_in_tokens: int) -> list[Tokens]:
    """Split a sequence into array views of at most ``max_tokens`` tokens. An empty sequence gives no views.

    Each later view begins with the ``lead_in_tokens`` before it (at most half a view), so that a context across the
    split is still found.
    """
    if len(tokens) <= max_tokens:
        return [tokens] if len(tokens) else []
    step = max_tokens - min(lead_in_tokens, max_tokens // 2)
    num_pieces = 1 + -(-(len(tokens) - max_tokens) // step)
    return [tokens[i * step : i * step + max_tokens] for i in range(num_pieces)]
