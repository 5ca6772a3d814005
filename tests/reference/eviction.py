"""Slow twin of what leaves an index first, and what comes back: lists and dictionaries, all of it looked at."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

WINDOW = 8
BLOCK = 64
_FACTOR = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1


def slow_windows(tokens: Sequence[int]) -> list[tuple[int, int]]:
    """(where its last token stands, key) of each window that is remembered."""
    found = []
    for end in range(WINDOW - 1, len(tokens)):
        window = tokens[end - WINDOW + 1 : end + 1]
        if min(window) < 0:
            continue
        key = 0
        for token in window:
            key = (key * _FACTOR + token) & _WORD
        key = ((key ^ (key >> 29)) * _FACTOR) & _WORD
        if key < 1 << 62:
            found.append((end, key))
    return found


@cache
def _windows_of(tokens: tuple[int, ...]) -> list[tuple[int, int]]:
    return slow_windows(tokens)


Text = tuple[int, list[int]]
"""A position and the tokens there, separators among them."""


def slow_used_text(text: Text, marks: set[int]) -> list[int]:
    """The tokens whose block, or one beside it within the text, is marked; a separator after each run."""
    start, tokens = text
    within = {(start + i) // BLOCK for i in range(len(tokens))}
    kept: list[int] = []
    for i, token in enumerate(tokens):
        block = (start + i) // BLOCK
        if token >= 0 and any(near in marks and near in within for near in (block - 1, block, block + 1)):
            kept.append(token)
        elif kept and kept[-1] >= 0:
            kept.append(-1)
    return kept


class SlowIndex:
    """``kept``, ``recent`` : texts of segments; ``left`` : those that may come back; ``tail`` : what is in none.

    ``begins`` : where the sequence of an output begins, by the position of each of the output's tokens.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.kept: list[Text] = []
        self.recent: list[Text] = []
        self.left: list[Text] = []
        self.tail: Text = 0, []
        self.begins: dict[int, int] = {}

    def text(self) -> list[int]:
        return [token for _, tokens in [*self.kept, *self.recent, self.tail] for token in tokens]

    def append(self, pieces: Sequence[Sequence[int]], prompt_length: int) -> None:
        """Pieces of one sequence, which overlap by four tokens."""
        begin = self.tail[0] + len(self.tail[1])
        for piece in pieces:
            self.evict(len(piece) + 1)
            start = self.tail[0] + len(self.tail[1])
            self.tail[1].extend([*piece, -1])
            self.begins |= dict.fromkeys(range(start + prompt_length, start + len(piece)), begin)
            prompt_length = max(0, prompt_length - len(piece) + 4)

    def seal(self, size: int) -> None:
        start, tokens = self.tail
        self.recent.append((start, tokens[:size]))
        self.tail = start + size, tokens[size:]
        self.evict(0)

    def merge(self, starts: Sequence[int]) -> None:
        for segments in (self.kept, self.recent):
            merged = [text for text in segments if text[0] in starts]
            if merged:
                at = segments.index(merged[0])
                segments[at : at + len(merged)] = [(merged[0][0], [token for _, some in merged for token in some])]

    def keep(self) -> None:
        places: dict[int, int] = {}  # where each window that leaves stands first
        for start, tokens in self.left:
            for end, key in _windows_of(tuple(tokens)):
                places.setdefault(key, start + end)
        said = {
            key
            for start, tokens in [*self.left, *self.recent, self.tail]
            for end, key in _windows_of(tuple(tokens))
            if places.get(key, start + end) < self.begins.get(start + end, -1)
        }
        said -= {key for _, tokens in self.kept for _, key in _windows_of(tuple(tokens))}
        marks = {places[key] // BLOCK for key in said}
        found = [(text[0], used) for text in self.left if (used := slow_used_text(text, marks))]
        self.left.clear()
        self.kept += found
        while sum(len(tokens) for _, tokens in self.kept) > self.capacity / 2:
            self.kept.pop(0)
        self.evict(0)

    def evict(self, num_new: int) -> None:
        while (self.kept or self.recent) and len(self.text()) + num_new > self.capacity:
            if not self.recent:
                self.kept.pop(0)
                continue
            self.left.append(self.recent.pop(0))
            while sum(len(tokens) for _, tokens in self.left) > 2 * max(2, self.capacity // 8):
                self.left.pop(0)
