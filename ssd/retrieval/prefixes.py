"""Storing a prompt's beginning once: what many requests repeat is not stored many times."""

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


_LEAST_SLOTS: Final = 64


class _Table:
    """Numbers by key, each known as long as what is stored at its position: open addressing, 24 bytes a slot or 16.

    ``keys``, ``positions``, ``values`` : int64[n], n a power of two, the last of no length where nothing is kept;
    positions are one more than they are, 0 in a free slot: untouched pages cost no memory. Those of what was forgotten
    stay until the slots run short.
    """

    def __init__(self, *, has_values: bool) -> None:
        self._has_values = has_values
        self._forgotten = self._num_used = 0
        self._make(_LEAST_SLOTS)

    def _make(self, slots: int) -> None:
        self.keys, self.positions = np.zeros(slots, np.int64), np.zeros(slots, np.int64)
        self.values = np.zeros(slots if self._has_values else 0, np.int64)

    def __len__(self) -> int:
        return int(np.count_nonzero(self.positions > self._forgotten))

    def forget_before(self, position: int) -> None:
        """What is stored before is not known any more. O(1)."""
        self._forgotten = max(self._forgotten, position)

    def put(self, keys: Int64s, values: Int64s, position: int) -> None:
        """Know ``keys`` from now on. O(keys), now and then O(all)."""
        if 3 * (self._num_used + len(keys)) > 2 * len(self.keys):
            before = self.keys, self.positions, self.values
            self._make(power_of_two_at_least(max(_LEAST_SLOTS, 2 * (len(self) + len(keys)))))
            self._num_used = _move(*before, self._forgotten, self.keys, self.positions, self.values)
        self._num_used += _put(self.keys, self.positions, self.values, keys, values, position + 1)

    def num_known(self, keys: Int64s) -> int:
        """How many of ``keys`` are known before the first that is not. O(keys)."""
        return _num_known(self.keys, self.positions, keys, self._forgotten)

    def get(self, key: int) -> int | None:
        """Its value, None where it is not known. O(1)."""
        slot = _slot_of(self.keys, self.positions, key)
        return int(self.values[slot]) if self.positions[slot] > self._forgotten else None


@kernel
def _slot_of(keys: Int64s, positions: Int64s, key: int) -> int:
    """Where a key stands, or would."""
    slot = key & (len(keys) - 1)
    while positions[slot] != 0 and keys[slot] != key:
        slot = (slot + 1) & (len(keys) - 1)
    return slot


@kernel
def _put(keys: Int64s, positions: Int64s, values: Int64s, new: Int64s, their: Int64s, position: int) -> int:
    """Write keys and values; how many slots were free before."""
    used = 0
    for i in range(len(new)):
        slot = _slot_of(keys, positions, new[i])
        used += positions[slot] == 0
        keys[slot], positions[slot] = new[i], position
        if len(values) > 0:
            values[slot] = their[i]
    return used


@kernel
def _num_known(keys: Int64s, positions: Int64s, asked: Int64s, forgotten: int) -> int:
    for i in range(len(asked)):
        if positions[_slot_of(keys, positions, asked[i])] <= forgotten:
            return i
    return len(asked)


@kernel
def _move(
    keys: Int64s,
    positions: Int64s,
    values: Int64s,
    forgotten: int,
    new_keys: Int64s,
    new_positions: Int64s,
    new_values: Int64s,
) -> int:
    """Write what is still known into an empty table; how much that is."""
    moved = 0
    for at in range(len(keys)):
        if positions[at] > forgotten:
            slot = _slot_of(new_keys, new_positions, keys[at])
            new_keys[slot], new_positions[slot] = keys[at], positions[at]
            if len(values) > 0:
                new_values[slot] = values[at]
            moved += 1
    return moved


class PrefixFilter:
    """Knows which leading blocks of text are stored, by a chain of hashes. One writer.

    The hash of a block covers the blocks before it, so a known hash means that the whole beginning up to there is known
    (64 bits: a collision only loses a few tokens of drafting material). A block is forgotten once the ring position it
    was stored at is evicted, so memory is bounded by capacity / block entries of 24 to 64 bytes, and with
    ``follows_others`` by 2.5 times that.
    """

    def __init__(self, block_tokens: int, lead_in_tokens: int, *, follows_others: bool = False) -> None:
        """Blocks of ``block_tokens`` tokens (0: no filter); ``lead_in_tokens`` are repeated before new text.

        ``follows_others`` : pieces that another filter of the same lengths cut will be noted too.
        """
        self._block_tokens = block_tokens
        self._lead_in_tokens = lead_in_tokens
        self._blocks = _Table(has_values=False)  # by the hash of a block
        self._ends: _Table | None = None  # by the hash of the tokens that a piece after a block begins with: its hash
        if follows_others and block_tokens > 0 and lead_in_tokens > 0:
            self._ends = _Table(has_values=True)
        # Compiled here, not in a step.
        hashes, ends = block_hashes(np.zeros(1, np.int32), 0, 0, 1, lead_in_tokens)
        hash_of(np.zeros(0, np.int32))
        warm = _Table(has_values=True)
        warm.put(hashes, ends, 0)
        warm.get(warm.num_known(hashes))
        _move(warm.keys, warm.positions, warm.values, 0, *(np.zeros(2, np.int64) for _ in range(3)))

    def pieces(self, tokens: Tokens, prompt_length: int, position: int) -> list[Tokens]:
        """What of a sequence is to be stored, and remember its blocks as stored at ``position``.

        ``tokens`` : int32[n], prompt then completion; the completion is always stored, because how often a text
        occurred is what ranks drafts. ``position`` : where the ring will put it, never smaller than before. Returns
        views of ``tokens``: none when there is nothing new, else one. O(n).

        Blocks of the completion are remembered too: the next turn of a conversation brings them back in its prompt.
        """
        skipped = 0  # leading tokens that are stored already: whole blocks within the prompt
        if self._block_tokens:
            hashes, ends = block_hashes(tokens, 0, 0, self._block_tokens, self._lead_in_tokens)
            num_known = self._blocks.num_known(hashes[: prompt_length // self._block_tokens])
            self._keep(hashes[num_known:], ends[num_known:], position)
            skipped = num_known * self._block_tokens
        if skipped == len(tokens):
            return []
        return [tokens[max(0, skipped - self._lead_in_tokens) :]]

    def note(self, piece: Tokens, position: int) -> None:
        """Remember the blocks of a piece that another replica cut and that is stored at ``position``. O(n).

        Where it begins as a piece after a known block would, it is taken to go on from there, else to be the beginning
        of a text. Taken wrongly, the filter may know a beginning whose parts are all stored, each with the lead-in
        before it, though not in one piece: any context of that length is found all the same.
        """
        if self._ends is None:
            return
        before = None
        if len(piece) > self._lead_in_tokens:
            before = self._ends.get(hash_of(piece[: self._lead_in_tokens]))
        start, seed = (0, 0) if before is None else (self._lead_in_tokens, before)
        self._keep(*block_hashes(piece, start, seed, self._block_tokens, self._lead_in_tokens), position)

    def forget_before(self, position: int) -> None:
        """Forget the blocks stored before ``position``: they are evicted. O(1)."""
        self._blocks.forget_before(position)
        if self._ends is not None:
            self._ends.forget_before(position)

    def _keep(self, hashes: Int64s, ends: Int64s, position: int) -> None:
        """Blocks that follow each other, as ``block_hashes`` gives them."""
        self._blocks.put(hashes, ends, position)
        if self._ends is not None:
            self._ends.put(ends, hashes, position)


def block_hashes(
    tokens: Tokens, start: int, seed: int, block_tokens: int, lead_in_tokens: int
) -> tuple[Int64s, Int64s]:
    """Two hashes of each whole block of ``tokens`` : int32[n], from ``start`` on: of the text up to its end, where
    ``seed`` is that up to ``start``, and of its last ``lead_in_tokens`` tokens, or all there are: those that a piece
    after it would begin with. O(n), in one kernel.
    """
    found = np.empty((2, max(0, len(tokens) - start) // block_tokens), np.int64)
    _hash_blocks(tokens, start, seed, block_tokens, lead_in_tokens, found)
    return found[0], found[1]


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
