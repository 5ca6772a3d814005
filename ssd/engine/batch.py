"""The rows of a pass as arrays: what is done to all of them is one call, and Python looks at a row that is special."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import Annotated, Final

import numpy as np
import numpy.typing as npt

from ssd.compiled.addresses import (
    Address,
    Int64,
    Int64s,
    Record,
    Records,
    TokenIds,
    address,
    float64_array,
    inlined,
    int32_array,
    int64_array,
    kernel,
    view_of,
)
from ssd.drafting.ask import MAX_DRAFT
from ssd.drafting.noise import SequenceNoise
from ssd.engine.request import NUM_SOURCES, Row
from ssd.engine.sequence import Sequence
from ssd.model.sampling.sampler import Noise
from ssd.retrieval.cache_state import LearnedState

Ints = npt.NDArray[np.int64]

LEFT: Final = -1
"""Taken of a row that more is to be done for than to append tokens."""


class Frame(Record):
    """What kernels find of a `Batch`, of each row: ``rows``, the address of its `Row`; ``taken`` : tokens that the last
    pass gave it, LEFT for none; ``accepted``, ``drafted``, ``sources`` : how many of these were drafted, of how many,
    from where; ``numbers`` : passes that gave it tokens; ``lengths`` : its tokens. All are int64[num_rows].

    ``gaps`` : float64[num_gaps], seconds since the tokens before, of rows that had some. ``by_source`` : tokens drafted
    and accepted; ``positions`` : how often the i-th token of a draft was accepted. ``num_tokens`` : taken of all rows.
    """

    num_rows: Int64
    rows: Address
    taken: Address
    accepted: Address
    drafted: Address
    sources: Address
    numbers: Address
    lengths: Address
    gaps: Address
    num_left: Int64
    num_taken: Int64
    num_tokens: Int64
    num_drafts: Int64
    num_gaps: Int64
    num_positions: Int64
    by_source: Annotated[Ints, np.int64, (2, NUM_SOURCES)]
    positions: Annotated[Int64s, np.int64, MAX_DRAFT + 1]


_row_at, _frame_at = view_of(Row), view_of(Frame)


@inlined
def _ends(row: Row, token: int) -> bool:
    found = False
    for ending in int32_array(row.endings, row.num_endings):
        found |= ending == token
    return found


@kernel
def begin_fed(batch: int, fed: Ints, before: TokenIds, lengths: Int64s) -> None:
    """Write each row's last token at the beginning of ``fed``, the one before it, -1 for none, and its length."""
    rows = int64_array(_frame_at(batch).rows, len(fed))
    for b in range(len(fed)):
        row = _row_at(rows[b])
        tokens = int32_array(row.tokens, row.length)
        fed[b, 0], lengths[b] = tokens[row.length - 1], row.length
        before[b] = tokens[row.length - 2] if row.length > 1 else -1


@kernel
def append_said(batch: int, said: Ints, sizes: Int64s) -> None:
    """Append to every simple row what was said, ``sizes[b]`` tokens.

    A row is LEFT where nothing was said, and where a token ends it: then nothing was done.
    """
    frame = _frame_at(batch)
    rows, taken = int64_array(frame.rows, len(sizes)), int64_array(frame.taken, len(sizes))
    lengths = int64_array(frame.lengths, len(sizes))
    frame.num_left = 0
    for b in range(len(sizes)):
        row, size = _row_at(rows[b]), sizes[b]
        is_left = row.is_simple == 0 or size == 0 or row.length + size >= row.end
        if not is_left:
            for i in range(size):
                is_left |= _ends(row, said[b, i])
        if is_left:
            taken[b] = LEFT
            frame.num_left += 1
        else:
            tokens = int32_array(row.tokens, row.end)
            for i in range(size):
                tokens[row.length + i] = said[b, i]
            row.length += size
            row.counts.num_output_tokens += size
            taken[b] = size
        lengths[b] = row.length


@kernel
def count_rows(batch: int, sizes: Int64s, now: float) -> None:
    """Count what a pass that said ``sizes[b]`` tokens to each row gave those that took something."""
    frame, num_rows = _frame_at(batch), len(sizes)
    rows, taken = int64_array(frame.rows, num_rows), int64_array(frame.taken, num_rows)
    accepted, drafted = int64_array(frame.accepted, num_rows), int64_array(frame.drafted, num_rows)
    sources, gaps = int64_array(frame.sources, num_rows), float64_array(frame.gaps, num_rows)
    numbers = int64_array(frame.numbers, num_rows)
    frame.num_taken, frame.num_tokens, frame.num_drafts, frame.num_gaps, frame.num_positions = 0, 0, 0, 0, 0
    frame.by_source[:] = 0
    frame.positions[:] = 0
    for b in range(num_rows):
        accepted[b] = max(0, min(sizes[b] - 1, taken[b]))
        if taken[b] <= 0:
            continue
        counts = _row_at(rows[b]).counts
        frame.num_taken += 1
        frame.num_tokens += taken[b]
        counts.num_verify_steps += 1
        numbers[b] = counts.num_verify_steps
        if counts.first_token_s > 0.0:
            gaps[frame.num_gaps] = now - counts.last_token_s
            frame.num_gaps += 1
        else:
            counts.first_token_s = now
        counts.last_token_s = now
        if drafted[b] == 0:
            continue
        frame.num_drafts += 1
        counts.num_drafts += 1
        counts.num_draft_tokens += drafted[b]
        counts.num_accepted_tokens += accepted[b]
        counts.by_source[sources[b]] += accepted[b]
        frame.by_source[0, sources[b]] += drafted[b]
        frame.by_source[1, sources[b]] += accepted[b]
        frame.num_positions = max(frame.num_positions, accepted[b])
        for position in range(accepted[b]):
            frame.positions[position] += 1


def warm_up_rows() -> None:
    """Compile what is done to all rows, with none."""
    batch, none, matrix = Batch(()), np.zeros(0, np.int64), np.zeros((0, 1), np.int64)
    begin_fed(batch.address, matrix, np.zeros(0, np.int32), none)
    append_said(batch.address, matrix, none)
    count_rows(batch.address, none, 0.0)


class Batch:
    """Sequences that are in a pass together, and what stays as it is from one of their passes to the next.

    ``slots`` : int64[B], of each row. ``unseen`` : rows that no pass gave tokens. ``noted`` : those of which every
    draft is noted. ``address``, ``frame`` : of its `Frame`; ``taken``, ``accepted``, ``drafted``, ``sources``,
    ``numbers``, ``lengths``, ``gaps`` are the arrays there.
    """

    def __init__(self, sequences: Rows[Sequence]) -> None:
        self.sequences = list(sequences)
        self.slot_list = [sequence.slot for sequence in sequences]
        self.slots = np.array(self.slot_list, np.int64)
        self._memory = Records(Frame)
        self.frame, self.address = self._memory[0], self._memory.address
        self._rows = np.array([sequence.address for sequence in sequences], np.int64)
        self.taken, self.accepted, self.drafted, self.sources, self.numbers, self.lengths = np.zeros(
            (6, len(self._rows)), np.int64
        )
        self.gaps = np.zeros(len(self._rows))
        for name in ("rows", "taken", "accepted", "drafted", "sources", "numbers", "lengths", "gaps"):
            setattr(self.frame, name, address(self._rows if name == "rows" else getattr(self, name)))
        self.frame.num_rows = len(self._rows)
        self.is_plain = all(sequence.is_plain for sequence in sequences)
        self.is_ruled = any(sequence.grammar is not None for sequence in sequences)
        self.unseen = [b for b, sequence in enumerate(sequences) if not sequence.stats.num_verify_steps]
        self.noted = [b for b, sequence in enumerate(sequences) if sequence.stats.steps is not None]
        self.chooses_by_position = all(s.is_plain or s.is_drawn_by_position for s in sequences)
        drawn_at = [s.request.sampling.temperature if s.is_drawn_by_position else 0.0 for s in sequences]
        self._drawn_at = np.array(drawn_at, np.float32)
        self._noises = [sequence.sampling.noise for sequence in sequences]
        self._owners: tuple[list[str], list[LearnedState | None], npt.NDArray[np.bool_]] | None = None

    def noise(self, lengths: Int64s, width: int) -> Noise:
        """What a pass of chains that is ``width`` wide, behind so many tokens of each row, chooses tokens with where
        they are chosen by position."""
        keys = SequenceNoise.seeded_keys(self._noises, lengths.tolist(), width)
        return Noise(keys, np.repeat(self._drawn_at[:, None], width, axis=1))

    def is_of(self, sequences: Rows[Sequence]) -> bool:
        """Whether it is the one of these sequences, in the slots that they have now."""
        return self.sequences == sequences and self.slot_list == [sequence.slot for sequence in sequences]

    def owners(self) -> tuple[list[str], list[LearnedState | None], npt.NDArray[np.bool_]]:
        """Of each row ``request_ids``, ``learned`` and ``may_keep`` as ``ScoredPass`` has them."""
        if self._owners is not None:
            return self._owners
        names, learned, may_keep, is_final = list[str](), list[LearnedState | None](), list[bool](), True
        for sequence in self.sequences:
            request, namespace = sequence.request, sequence.namespace
            cache = None if namespace is None else namespace.cache
            names.append(request.request_id)
            learned.append(None if cache is None else cache.learned)
            may_keep.append(cache is not None and request.learn)
            is_final = is_final and (cache is not None or namespace is None)
        owners = names, learned, np.array(may_keep)
        if is_final:  # all caches are open: what is learned of a namespace has a place only then
            self._owners = owners
        return owners
