"""Memory of the texts of running requests: made once, written before each call that drafts from them."""

from __future__ import annotations

import weakref
from typing import Final

import numpy as np

from ssd.compiled.addresses import address
from ssd.compiled.records import Records
from ssd.compiled.registry import name_memory
from ssd.drafting.live_texts import LiveTexts
from ssd.drafting.suffix.live import GUARD_CODES, LiveRecord, write_live

MAX_LIVE_TOKENS: Final = 1 << 16
"""Tokens of all texts together that are looked at; where there are more, of each text its end."""


class LiveMemory:
    """Texts of running requests for the kernels; grows, never shrinks. Owned by one thread."""

    def __init__(self) -> None:
        self._record = Records(LiveRecord)
        self._written: weakref.ref[LiveTexts] | None = None
        self._room = self._room_texts = 0

    def write(self, live: LiveTexts | None) -> int:
        """Make these the texts; the address of their `LiveRecord`, 0 where there are none. O(tokens)."""
        if live is None:
            return 0
        if self._written is None or self._written() is not live:
            self._write(live)
            self._written = weakref.ref(live)
        return self._record.address

    def _write(self, live: LiveTexts) -> None:
        texts, lead_ins = live.texts, live.lead_ins
        if sum(map(len, texts)) > MAX_LIVE_TOKENS:
            most = MAX_LIVE_TOKENS // len(texts)
            lead_ins = [max(0, lead - max(0, len(text) - most)) for text, lead in zip(texts, lead_ins, strict=True)]
            texts = [text[max(0, len(text) - most) :] for text in texts]
        tokens = np.concatenate(texts) if texts else np.zeros(0, np.int32)
        lengths = np.array([len(text) for text in texts], np.int64)
        size = len(tokens) + len(texts) + 1
        self._make_room(size, len(texts))
        record = self._record[0]
        record.size, record.num_texts = size, len(texts)
        record.num_heads = 1 << min(size, len(self._heads)).bit_length() - 1
        name_memory(tokens)
        write_live(self._record.address, tokens, lengths, np.array(lead_ins, np.int64))

    def _make_room(self, size: int, num_texts: int) -> None:
        record = self._record[0]
        if size > self._room:
            self._room = 1 << (size - 1).bit_length()
            self._codes, self._previous = np.zeros(self._room + GUARD_CODES, np.int32), np.zeros(self._room, np.int32)
            self._heads = np.zeros(self._room, np.int32)
            record.codes, record.previous = address(self._codes), address(self._previous)
            record.heads = address(self._heads)
        if num_texts > self._room_texts:
            self._room_texts = 2 * num_texts
            self._begins = np.zeros(self._room_texts + 1, np.int64)
            record.begins = address(self._begins)
