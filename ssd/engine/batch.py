"""The rows of a pass as arrays: what is done to all of them is one call, and Python looks at a row that is special."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Rows
from typing import Annotated, Final

import numpy as np
import numpy.typing as npt

from ssd.drafting.draft_records import MAX_DRAFT, NUM_SOURCES
from ssd.drafting.noise import SequenceNoise
from ssd.drafting.suffix_drafter import NamespaceGroup
from ssd.engine.request import Row
from ssd.engine.sequence import Sequence
from ssd.jit.addresses import (
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
    offset_of,
    view_of,
)
from ssd.model.sampling.sampler import Noise
from ssd.retrieval.cache_state import LearnedState
from ssd.retrieval.namespace_cache import NamespaceCache

Ints = npt.NDArray[np.int64]

LEFT: Final = -1
"""Taken of a row that more is to be done for than to append tokens."""


class Frame(Record):
    """What kernels find of a `Batch`, of each row: ``rows``, the address of its `Row`; ``taken`` : tokens that the last
    pass gave it, LEFT for none; ``accepted``, ``drafted``, ``sources`` : how many of these were drafted, of how many,
    from where; ``numbers`` : passes that gave it tokens; ``lengths`` : its tokens. All are int64[num_rows].

    ``gaps`` : float64[num_gaps], seconds since the tokens before, of rows that had some. ``by_source`` : tokens drafted
    and accepted; ``positions`` : how often the i-th token of a draft was accepted. ``num_tokens`` : taken of all rows.

    ``wanted`` : int64[num_rows], whether a row is drafted for; ``asked`` : int64[num_asked], addresses of the
    `DraftRow` of those. ``num_spared`` : rows that are not, as they got nothing lately. ``width``, ``has_trees`` : of
    the drafts of the pass to come, and one position more.
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
    wanted: Address
    asked: Address
    num_asked: Int64
    num_spared: Int64
    width: Int64
    has_trees: Int64
    num_left: Int64
    num_taken: Int64
    num_tokens: Int64
    num_drafts: Int64
    num_gaps: Int64
    num_positions: Int64
    by_source: Annotated[Ints, np.int64, (2, NUM_SOURCES)]
    positions: Annotated[Int64s, np.int64, MAX_DRAFT + 1]


row_at, frame_at = view_of(Row), view_of(Frame)
DRAFTING_AT: Final = offset_of(Row, "drafting")


@inlined
def _ends(row: Row, token: int) -> bool:
    found = False
    for ending in int32_array(row.endings, row.num_endings):
        found |= ending == token
    return found


@kernel
def begin_fed(
    batch: int, turn: int, fed: Ints, parents: Ints, before: TokenIds, lengths: Int64s, counts: Int64s
) -> None:
    """Write each row's last token and its draft of the ``turn``, ``counts[b]`` tokens together, the token before the
    last, -1 for none, and the row's length.

    ``parents`` : of each the position that it goes on from, -1 of the first; padding goes on as a chain. Of no columns
    where there are no trees: then it is not written.
    """
    rows, width = int64_array(frame_at(batch).rows, len(fed)), fed.shape[1]
    for b in range(len(fed)):
        row = row_at(rows[b])
        tokens, draft = int32_array(row.tokens, row.length), row.verified[turn]
        fed[b, 0], lengths[b], counts[b] = tokens[row.length - 1], row.length, draft.size + 1
        before[b] = tokens[row.length - 2] if row.length > 1 else -1
        for i in range(width - 1):
            fed[b, i + 1] = draft.tokens[i] if i < draft.size else 0
        for i in range(parents.shape[1]):
            is_node = draft.is_tree == 1 and 0 < i <= draft.size
            parents[b, i] = draft.parents[i - 1] + 1 if is_node else i - 1


@kernel
def append_said(batch: int, said: Ints, sizes: Int64s) -> None:
    """Append to every simple row what was said, ``sizes[b]`` tokens.

    A row is LEFT where nothing was said, and where a token ends it: then nothing was done.
    """
    frame = frame_at(batch)
    rows, taken = int64_array(frame.rows, len(sizes)), int64_array(frame.taken, len(sizes))
    lengths = int64_array(frame.lengths, len(sizes))
    frame.num_left = 0
    for b in range(len(sizes)):
        row, size = row_at(rows[b]), sizes[b]
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
def count_rows(batch: int, turn: int, sizes: Int64s, now: float) -> None:
    """Count what the pass of a ``turn`` that said ``sizes[b]`` tokens to each row gave those that took something."""
    frame, num_rows = frame_at(batch), len(sizes)
    rows, taken = int64_array(frame.rows, num_rows), int64_array(frame.taken, num_rows)
    accepted, drafted = int64_array(frame.accepted, num_rows), int64_array(frame.drafted, num_rows)
    sources, gaps = int64_array(frame.sources, num_rows), float64_array(frame.gaps, num_rows)
    numbers = int64_array(frame.numbers, num_rows)
    frame.num_taken, frame.num_tokens, frame.num_drafts, frame.num_gaps, frame.num_positions = 0, 0, 0, 0, 0
    frame.by_source[:] = 0
    frame.positions[:] = 0
    for b in range(num_rows):
        draft = row_at(rows[b]).verified[turn]
        drafted[b], sources[b] = draft.size, draft.source
        accepted[b] = max(0, min(sizes[b] - 1, taken[b]))
        if taken[b] <= 0:
            continue
        counts = row_at(rows[b]).counts
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
    begin_fed(batch.address, 0, matrix, matrix, np.zeros(0, np.int32), none, none)
    append_said(batch.address, matrix, none)
    count_rows(batch.address, 0, none, 0.0)


_ARRAYS: Final = "rows", "taken", "accepted", "drafted", "sources", "numbers", "lengths", "wanted", "asked", "gaps"


class Batch:
    """Sequences that are in a pass together, and what stays as it is from one of their passes to the next.

    ``slots`` : int64[B], of each row. ``unseen`` : rows that have taken nothing yet, nor had before it was made.
    ``noted`` : those of which every draft is noted. ``coupled`` : those that draw with coupled noise. ``address``,
    ``frame`` : of its `Frame`, whose arrays have the same names here.
    """

    rows: Int64s
    taken: Int64s
    accepted: Int64s
    drafted: Int64s
    sources: Int64s
    numbers: Int64s
    lengths: Int64s
    wanted: Int64s
    asked: Int64s
    gaps: npt.NDArray[np.float64]

    def __init__(self, sequences: Rows[Sequence]) -> None:
        self.sequences = list(sequences)
        self._slot_list = [sequence.slot for sequence in sequences]
        self.slots = np.array(self._slot_list, np.int64)
        self._memory = Records(Frame)
        self.frame, self.address = self._memory[0], self._memory.address
        arrays = np.zeros((len(_ARRAYS), len(sequences)), np.int64)
        for name, array in zip(_ARRAYS, arrays, strict=True):
            setattr(self, name, array.view(np.float64) if name == "gaps" else array)
            setattr(self.frame, name, address(array))
        self.rows[:] = [sequence.address for sequence in sequences]
        self.frame.num_rows = len(sequences)
        self.is_plain = all(sequence.is_plain for sequence in sequences)
        self.is_ruled = any(sequence.grammar is not None for sequence in sequences)
        self.unseen = [b for b, sequence in enumerate(sequences) if not sequence.stats.num_output_tokens]
        self.coupled = [sequence for sequence in sequences if sequence.sampling.noise.is_coupled]
        self.noted = [b for b, sequence in enumerate(sequences) if sequence.stats.steps is not None]
        self.chooses_by_position = all(s.is_plain or s.is_drawn_by_position for s in sequences)
        self._goes_on = self.chooses_by_position and not self.coupled and not any(s.is_suspect for s in sequences)
        self._ends = np.array([sequence.row.end for sequence in sequences], np.int64)
        drawn_at = [s.request.sampling.temperature if s.is_drawn_by_position else 0.0 for s in sequences]
        self._drawn_at = np.array(drawn_at, np.float32)
        self._noises = [sequence.sampling.noise for sequence in sequences]
        self._owners: tuple[list[str], list[LearnedState | None], npt.NDArray[np.bool_]] | None = None
        self._namespaces: list[tuple[NamespaceCache | None, NamespaceGroup]] | None = None

    def noise(self, lengths: Int64s, width: int) -> Noise:
        """What a pass of chains that is ``width`` wide, behind so many tokens of each row, chooses tokens with where
        they are chosen by position."""
        keys = SequenceNoise.seeded_keys(self._noises, lengths.tolist(), width)
        return Noise(keys, np.repeat(self._drawn_at[:, None], width, axis=1))

    def runs_on(self, running: Rows[Sequence], lengths: Int64s) -> bool:
        """Whether these are the sequences that run, all go on behind so many tokens of each, and what they say then
        depends on nothing else that has to be looked at."""
        return (
            self._goes_on
            and len(running) == len(self.sequences)
            and all(sequence.row.is_simple == 1 for sequence in self.sequences)
            and bool((lengths < self._ends).all())
        )

    def is_of(self, sequences: Rows[Sequence]) -> bool:
        """Whether it is the one of these sequences, in the slots that they have now."""
        return self.sequences == sequences and self._slot_list == [sequence.slot for sequence in sequences]

    def owners(self) -> tuple[list[str], list[LearnedState | None], npt.NDArray[np.bool_]]:
        """Of each row ``request_ids``, ``learned`` and ``allow_caching`` as ``ScoredPass`` has them."""
        if self._owners is not None:
            return self._owners
        caches, is_final = self._caches()
        names = [sequence.request.request_id for sequence in self.sequences]
        rows = zip(self.sequences, caches, strict=True)
        allow_caching = np.array([cache is not None and sequence.request.learn for sequence, cache in rows], np.bool_)
        owners = names, [None if cache is None else cache.learned for cache in caches], allow_caching
        if is_final:
            self._owners = owners
        return owners

    def groups(self, keep: Callable[[Sequence, LearnedState | None], None]) -> list[NamespaceGroup]:
        """The rows by namespace, to be drafted for from what it holds now.

        ``keep`` : told of each sequence and of what is learned of its namespace, before it is drafted for.
        """
        namespaces = self._namespaces
        if namespaces is None:
            caches, is_final = self._caches()
            members: dict[NamespaceCache | None, list[Sequence]] = {}
            for sequence, cache in zip(self.sequences, caches, strict=True):
                keep(sequence, None if cache is None else cache.learned)
                members.setdefault(cache, []).append(sequence)
            namespaces = [(cache, _group(cache, rows)) for cache, rows in members.items()]
            self._namespaces = namespaces if is_final else None
        return [group if cache is None else group._replace(snapshot=cache.snapshot()) for cache, group in namespaces]

    def _caches(self) -> tuple[list[NamespaceCache | None], bool]:
        """Of each row, and whether all are open that will be: what is learned of a namespace has a place only then."""
        caches = [None if s.namespace is None else s.namespace.cache for s in self.sequences]
        is_open = [s.namespace is None or cache is not None for s, cache in zip(self.sequences, caches, strict=True)]
        return caches, all(is_open)


def _group(cache: NamespaceCache | None, rows: Rows[Sequence]) -> NamespaceGroup:
    own = [s for s in rows if cache is None or s.sampling.noise.is_coupled]
    return NamespaceGroup(
        None,
        None if cache is None else cache.learned,
        np.array([s.address + DRAFTING_AT for s in rows], np.int64),
        [(s.asking, s.row.drafting) for s in own if s.asking is not None],
    )
