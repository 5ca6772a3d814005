"""The row drafter for an engine that samples on a device: its texts are followed by what each step gave.

The device may be ahead of what is known here. So a chain is drafted from the text that is known, long enough to hold
what the device is about to say and a draft after it; the device compares and takes its draft from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ssd.compiled.addresses import (
    address,
    float32_array,
    float64_array,
    int32_array,
    int64_array,
    kernel,
)
from ssd.drafting.ask import MAX_DRAFT, drafts_at
from ssd.drafting.drafter import NO_SNAPSHOT
from ssd.drafting.propose import frame_at
from ssd.drafting.rows import RowDrafter, Text, batch_at, draft_rows, text_at
from ssd.retrieval.snapshot import Snapshot

FOLLOWED: Final = 0
NO_ROOM: Final = 1
DIFFERS: Final = 2
"""What became of a step's words of one text: taken over; no room for them; they do not begin where it ends."""

NUM_HEAD: Final = 2
"""Words before the tokens in what a step gave (length with them, how many) and in a chain (length known, how many)."""

_LOW_PRICE: Final = 0.02
"""Of a drafted token. A device verifies a draft of fixed width, so that a token less saves nothing."""


@kernel
def follow(texts_at: int, words_at: int, outcomes_at: int, num_rows: int, width: int) -> int:
    """Take over what a step gave each text; how many could not be.

    ``texts_at`` : int64[rows], addresses of TextRecords, 0 for none. ``words_at`` : int32[rows, width], of each
    the length of the text now and how many of its tokens are new, then these. ``outcomes_at`` : int64[rows], written.
    """
    texts, outcomes = int64_array(texts_at, num_rows), int64_array(outcomes_at, num_rows)
    words, bad = int32_array(words_at, num_rows * width), 0
    for row in range(num_rows):
        length, count = words[row * width], words[row * width + 1]
        outcomes[row] = FOLLOWED
        if texts[row] == 0 or count == 0:
            continue
        text = text_at(texts[row])
        if count < 0 or count > width - NUM_HEAD or text.length + count != length:
            outcomes[row] = DIFFERS
        elif length > text.room:
            outcomes[row] = NO_ROOM
        else:
            known, first = int32_array(text.tokens, length), row * width + NUM_HEAD
            known[length - count :] = words[first : first + count]
            text.length, text.num_new = length, count
        bad += outcomes[row] != FOLLOWED
    return bad


@kernel
def write_chains(batch_address: int, num_rows: int, words_at: int, longest: int) -> None:
    """The chains of the last call as rows of ``NUM_HEAD + 2 * longest`` words.

    Of each row the length of its text and of its chain, then the chain's tokens as int32, then its chances as float32.
    """
    batch, width = batch_at(batch_address), NUM_HEAD + 2 * longest
    frame, count = frame_at(batch.workspace), batch.last_asked
    asked, sizes = int64_array(batch.asked, num_rows), int64_array(batch.sizes, num_rows)
    chances = float64_array(batch.probabilities, num_rows * MAX_DRAFT)
    texts, drafts = int64_array(batch.texts, num_rows), drafts_at(frame.drafts, frame.num_rows)
    words, floats = int32_array(words_at, num_rows * width), float32_array(words_at, num_rows * width)
    number = 0
    for row in range(num_rows):
        at = row * width
        words[at], words[at + 1] = 0 if texts[row] == 0 else text_at(texts[row]).length, 0
        if number < count and asked[number] == row:
            words[at + 1] = size = sizes[number]
            for i in range(size):
                words[at + NUM_HEAD + i] = drafts[number].tokens[i]
                floats[at + NUM_HEAD + longest + i] = chances[number * MAX_DRAFT + i]
            number += 1


class ChainDrafter(RowDrafter):
    """Chains for texts that grow by ``take``. ``seat`` says whose they are. Owned by one thread."""

    def __init__(self, *, longest: int, **settings: Any) -> None:
        """``longest`` : most tokens of a chain, at most MAX_DRAFT. ``settings`` : of `RowDrafter`, less its limit."""
        assert longest <= MAX_DRAFT
        self.longest = longest
        super().__init__(limit=longest, price=_LOW_PRICE, **settings)

    def take(self, texts: Sequence[Text | None], words: npt.NDArray[np.int32]) -> list[int]:
        """Take over what a step gave: the rows that could not follow, because tokens are missing.

        ``words`` : int32[rows, n], see ``follow``. O(new tokens), and O(text) where one needs room.
        """
        count = len(texts)
        addresses = np.fromiter((0 if text is None else text.address for text in texts), np.int64, count)
        outcomes = np.empty(count, np.int64)
        given = address(addresses), address(words), address(outcomes), count, words.shape[1]
        if not follow(*given):
            return []
        lost = np.flatnonzero(outcomes == DIFFERS).tolist()
        full = np.flatnonzero(outcomes == NO_ROOM).tolist()
        if full:
            addresses[outcomes != NO_ROOM] = 0
            for row in full:
                text = texts[row]
                assert text is not None
                text.make_room(int(words[row, 0]))
            follow(*given)
        return lost

    def draft_chains(
        self, wanted: npt.NDArray[np.bool_], snapshot: Snapshot, words: npt.NDArray[np.int32], limit: int
    ) -> None:
        """Draft for the texts that are seated and wanted, at most ``limit`` tokens each.

        ``wanted`` : bool[rows]. ``words`` : int32[rows or more, NUM_HEAD + 2 * longest], written, see `write_chains`.
        """
        count = len(wanted)
        assert count == len(self._texts) and words.shape[1] == NUM_HEAD + 2 * self.longest
        self._rows.num_sampled[:count] = wanted
        self._workspace.room_for(0, snapshot)
        batch = self._batch
        batch.rows, batch.lengths = 0, batch.asked  # neither is read
        batch.limit = min(limit, self.longest)
        draft_rows(self._memory.address, snapshot.address, count, 0.0, True, False)
        write_chains(self._memory.address, count, address(words), self.longest)

    def warm_up(self) -> None:
        super().warm_up()
        text = Text("", 1, 2)
        self.take([text], np.array([[1, 1, 5]], np.int32))
        self.seat([text], [1])
        self.draft_chains(np.zeros(1, bool), NO_SNAPSHOT, np.zeros((1, NUM_HEAD + 2 * self.longest), np.int32), 1)
        self.forget([text])
