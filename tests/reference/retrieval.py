"""Slow twins of the retrieval storage: short enough to be obviously right."""

from __future__ import annotations

from collections.abc import Sequence

from ssd.retrieval.segment import SEPARATOR
from ssd.retrieval.snapshot import Snapshot


def naive_order(tokens: Sequence[int]) -> list[int]:
    """Sort the positions 1..n by the text before them, read backwards, as lists."""
    return sorted(range(1, len(tokens) + 1), key=lambda position: list(tokens[:position])[::-1])


def naive_count(tokens: Sequence[int], pattern: Sequence[int]) -> int:
    """How often ``pattern`` occurs in ``tokens``, overlaps included."""
    m = len(pattern)
    return sum(list(tokens[i : i + m]) == list(pattern) for i in range(len(tokens) - m + 1))


def snapshot_text(snapshot: Snapshot) -> list[int]:
    """All ring-born text of a snapshot in order of position: segments, then the tail."""
    text = [int(token) for segment in snapshot.segments if segment.start is not None for token in segment.tokens]
    mask = len(snapshot.ring) - 1
    return text + [int(snapshot.ring[p & mask]) for p in range(snapshot.memtable_start, snapshot.memtable_stop)]


def snapshot_count(snapshot: Snapshot, pattern: Sequence[int]) -> int:
    """Occurrences of ``pattern`` by walking each segment's whole order, plus those in the tail."""
    m = len(pattern)
    total = 0
    for segment in snapshot.segments:
        tokens = segment.tokens.tolist()
        before = [tokens[max(0, position - m) : position][::-1] for position in segment.order.tolist()]
        assert before == sorted(before)
        total += before.count(list(pattern)[::-1])
    mask = len(snapshot.ring) - 1
    tail = [int(snapshot.ring[p & mask]) for p in range(snapshot.memtable_start, snapshot.memtable_stop)]
    return total + naive_count(tail, pattern)


def sequences(text: Sequence[int]) -> list[list[int]]:
    """Split at separators; the text must end with one."""
    found: list[list[int]] = [[]]
    for token in text:
        if token == SEPARATOR:
            found.append([])
        else:
            found[-1].append(token)
    assert found.pop() == []
    return found


def naive_skipped(
    stored_prefixes: set[tuple[int, ...]], tokens: Sequence[int], prompt_length: int, block_tokens: int
) -> int:
    """How many leading prompt tokens are stored already, whole blocks; then remember the beginnings of ``tokens``."""
    skipped = 0
    while (
        block_tokens
        and skipped + block_tokens <= min(prompt_length, len(tokens))
        and tuple(tokens[: skipped + block_tokens]) in stored_prefixes
    ):
        skipped += block_tokens
    for stop in range(block_tokens, len(tokens) + 1, block_tokens) if block_tokens else ():
        stored_prefixes.add(tuple(tokens[:stop]))
    return skipped


def naive_split(tokens: Sequence[int], max_tokens: int, lead_in_tokens: int) -> list[list[int]]:
    """Cut step by step: a piece, then back by the lead-in, then the next."""
    pieces = []
    start = 0
    while start < len(tokens):
        pieces.append(list(tokens[start : start + max_tokens]))
        if start + max_tokens >= len(tokens):
            break
        start += max_tokens - min(lead_in_tokens, max_tokens // 2)
    return pieces


def num_agreeing(text: Sequence[int], position: int, context: Sequence[int], max_length: int) -> int:
    """Tokens before ``position`` of ``text`` that agree with the end of ``context``; none is a separator."""
    length = 0
    while length < min(position, len(context), max_length) and text[position - 1 - length] == context[-1 - length] >= 0:
        length += 1
    return length


def longest_agreement(snapshot: Snapshot, context: Sequence[int], max_length: int) -> tuple[int, int]:
    """Length and support of the longest match, by looking at every position of every text."""
    mask = len(snapshot.ring) - 1
    texts = [segment.tokens.tolist() for segment in snapshot.segments]
    texts.append([int(snapshot.ring[p & mask]) for p in range(snapshot.memtable_start, snapshot.memtable_stop)])
    lengths = [num_agreeing(text, p, context, max_length) for text in texts for p in range(1, len(text) + 1)]
    longest = max(lengths, default=0)
    return longest, lengths.count(longest) if longest else 0
