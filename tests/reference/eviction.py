"""Slow twin of what leaves an index first, and what comes back: lists and dictionaries, all of it looked at."""

from __future__ import annotations

from collections.abc import Sequence

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
    """``kept``, ``recent`` : texts of segments; ``left`` : those that may come back; ``tail`` : what is in none."""

    def __init__(self, capacity: int, num_slots: int) -> None:
        self.capacity, self.num_slots = capacity, num_slots
        self.kept: list[Text] = []
        self.recent: list[Text] = []
        self.left: list[Text] = []
        self.tail: Text = 0, []
        self.slots: dict[int, tuple[int, int]] = {}  # key and position of a window
        self.marks: set[int] = set()

    def text(self) -> list[int]:
        return [token for _, tokens in [*self.kept, *self.recent, self.tail] for token in tokens]

    def is_stored(self, position: int) -> bool:
        segments = [*self.kept, *self.left, *self.recent]
        return position >= self.tail[0] or any(s <= position < s + len(tokens) for s, tokens in segments)

    def say(self, output: Sequence[int]) -> None:
        recent = self.recent[0][0] if self.recent else self.tail[0]
        for _, key in slow_windows(output):
            known, position = self.slots.get(key % self.num_slots, (0, -1))
            if known == key and position >= recent and self.is_stored(position):
                self.marks.add(position // BLOCK)

    def remember(self, text: Text) -> None:
        for end, key in slow_windows(text[1]):
            _, position = self.slots.get(key % self.num_slots, (0, -1))
            if position < 0 or not self.is_stored(position):
                self.slots[key % self.num_slots] = key, text[0] + end

    def append(self, sequence: Sequence[int]) -> None:
        self.evict(len(sequence) + 1)
        start, stop = self.tail[0] + len(self.tail[1]), self.tail[0] + len(self.tail[1]) + len(sequence) + 1
        self.tail[1].extend([*sequence, -1])
        self.marks -= {block for block in self.marks if start <= block * BLOCK <= stop}
        self.remember((start, list(sequence)))

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
                if segments is self.kept:
                    self.remember(segments[at])

    def keep(self) -> None:
        text = self.left.pop(0)
        start, tokens = text
        for _, key in slow_windows(tokens):
            if start <= self.slots.get(key % self.num_slots, (0, -1))[1] < start + len(tokens):
                del self.slots[key % self.num_slots]
        used = slow_used_text(text, self.marks)
        if used:
            self.kept.append((start, used))
            while sum(len(tokens) for _, tokens in self.kept) > self.capacity / 2:
                self.kept.pop(0)
            self.evict(0)
            self.remember((start, used))

    def evict(self, num_new: int) -> None:
        while (self.kept or self.recent) and len(self.text()) + num_new > self.capacity:
            if not self.recent:
                self.kept.pop(0)
                continue
            start, tokens = self.recent.pop(0)
            if any(start // BLOCK <= block <= (start + len(tokens) - 1) // BLOCK for block in self.marks):
                self.left.append((start, tokens))
        while sum(len(tokens) for _, tokens in self.left) > 2 * max(2, self.capacity // 8):
            self.left.pop(0)
