"""Slow twins of how texts are hashed: plain loops over Python's integers."""

from __future__ import annotations

from collections.abc import Sequence

_FACTOR = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1


def slow_hash(tokens: Sequence[int], seed: int = 0) -> int:
    """A 64-bit number with a sign that every token changes."""
    hashed = seed & _WORD
    for token in tokens:
        hashed = ((hashed ^ (token + 1)) * _FACTOR) & _WORD
        hashed ^= hashed >> 32
    return hashed - (1 << 64) if hashed >> 63 else hashed


def slow_block_hashes(
    tokens: Sequence[int], start: int, seed: int, block_tokens: int, lead_in_tokens: int
) -> tuple[list[int], list[int]]:
    """Of each whole block: the hash of the text to its end, going on from ``seed``, and of its last tokens."""
    hashes, ends = [], []
    while start + block_tokens <= len(tokens):
        seed = slow_hash(tokens[start : start + block_tokens], seed)
        start += block_tokens
        hashes.append(seed)
        ends.append(slow_hash(tokens[max(0, start - lead_in_tokens) : start]))
    return hashes, ends
