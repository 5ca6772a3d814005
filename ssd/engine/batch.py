"""The sequences of a forward pass as arrays, so that one kernel call updates all sequences.

Sequences that need Python code, e.g. because they end, are marked and handled one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Rows
from typing import Annotated, Final

import numpy as np
import numpy.typing as npt

from ssd.drafting.draft_records import MAX_DRAFT, NUM_SOURCES
from ssd.drafting.noise import SequenceNoise
from ssd.drafting.suffix_drafter import NamespaceGroup
from ssd.engine.request import SequenceRecord
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

NEEDS_SLOW_PATH: Final = -1  # in ``BatchRecord.committed``


class BatchRecord(Record):
    """The arrays and counts of a `Batch` at a fixed address, where compiled kernels read and write them.

    A field of type Address points to an array with one entry per sequence (row). The entries are int64, unless another
    type or length is given.
    """

    num_rows: Int64
    rows: Address  # the address of each row's `SequenceRecord`
    committed: Address  # the number of tokens that the last pass appended to each row, or NEEDS_SLOW_PATH
    num_accepted: Address  # the number of these tokens that are accepted draft tokens
    num_drafted: Address  # the number of draft tokens that were verified
    sources: Address  # the source of each row's draft
    step_numbers: Address  # the number of verify steps of the request so far, this one included
    lengths: Address  # the number of tokens of each row
    gaps: Address  # seconds since the previous token, float64[num_gaps], of the rows that already had a token
    needs_draft: Address  # whether the row needs a draft
    draft_rows: Address  # the addresses of the `DraftRow` of the rows that need a draft, int64[num_draft_rows]
    num_draft_rows: Int64
    num_in_backoff: Int64  # the number of rows that get no draft because they had only empty drafts lately
    width: Int64  # the number of positions of the next pass: the longest draft, plus one
    has_trees: Int64  # whether a draft of the next pass is a tree
    num_slow_rows: Int64
    num_committed_rows: Int64  # the number of rows to which the pass appended tokens
    num_tokens: Int64
    num_drafts: Int64  # the number of drafts that were not empty
    num_gaps: Int64
    max_accepted: Int64  # the largest number of accepted draft tokens of a row
    # The drafted and the accepted tokens of each source, int64[2, NUM_SOURCES].
    by_source: Annotated[Ints, np.int64, (2, NUM_SOURCES)]
    # How often the i-th token of a draft was accepted, int64[MAX_DRAFT + 1].
    accepted_by_position: Annotated[Int64s, np.int64, MAX_DRAFT + 1]


sequence_at, batch_record_at = view_of(SequenceRecord), view_of(BatchRecord)
DRAFT_ROW_OFFSET: Final = offset_of(SequenceRecord, "draft_row")


@inlined
def _is_stop_id(row: SequenceRecord, token: int) -> bool:
    found = False
    for stop_id in int32_array(row.stop_ids, row.num_stop_ids):
        found |= stop_id == token
    return found


@kernel
def fill_input_ids(
    batch: int, buffer: int, input_ids: Ints, parents: Ints, previous_ids: TokenIds, lengths: Int64s, counts: Int64s
) -> None:
    """Write the input of a forward pass: the last token of each sequence, followed by its draft tokens.

    Args:
        batch: The address of the `BatchRecord`.
        buffer: Which of the two draft buffers of each sequence (0 or 1) holds its draft.
        input_ids: Output, int64[B, T]: ``counts[b]`` tokens of sequence b, then zeros.
        parents: Output, int64[B, T], or int64[B, 0] if no draft is a tree: the index in the row of each token's parent
            in the draft tree, -1 for the first token. The parent of a padding token is the token to its left.
        previous_ids: Output, int32[B]: the second-to-last token of each sequence, -1 if there is none.
        lengths: Output, int64[B]: the number of tokens of each sequence.
        counts: Output, int64[B]: the number of input tokens of each sequence.
    """
    rows, width = int64_array(batch_record_at(batch).rows, len(input_ids)), input_ids.shape[1]
    for b in range(len(input_ids)):
        row = sequence_at(rows[b])
        tokens, draft = int32_array(row.tokens, row.length), row.drafts[buffer]
        input_ids[b, 0], lengths[b], counts[b] = tokens[row.length - 1], row.length, draft.size + 1
        previous_ids[b] = tokens[row.length - 2] if row.length > 1 else -1
        for i in range(width - 1):
            input_ids[b, i + 1] = draft.tokens[i] if i < draft.size else 0
        for i in range(parents.shape[1]):
            is_node = draft.is_tree == 1 and 0 < i <= draft.size
            parents[b, i] = draft.parents[i - 1] + 1 if is_node else i - 1


@kernel
def append_output_ids(batch: int, output_ids: Ints, sizes: Int64s) -> None:
    """Append the output tokens of a forward pass to the sequences for which a kernel can do that, and mark the others.

    A sequence is marked by ``committed[b] = NEEDS_SLOW_PATH`` and left unchanged, so that Python code appends its
    tokens. Such a sequence has no output, may end in this pass, or has stop strings, structured output or
    log-probabilities.

    Args:
        batch: The address of the `BatchRecord`.
        output_ids: int64[B, T], the output tokens.
        sizes: int64[B], the number of output tokens of each sequence.
    """
    record = batch_record_at(batch)
    rows, committed = int64_array(record.rows, len(sizes)), int64_array(record.committed, len(sizes))
    lengths = int64_array(record.lengths, len(sizes))
    record.num_slow_rows = 0
    for b in range(len(sizes)):
        row, size = sequence_at(rows[b]), sizes[b]
        needs_slow_path = row.uses_fast_path == 0 or size == 0 or row.length + size >= row.end
        if not needs_slow_path:
            for i in range(size):
                needs_slow_path |= _is_stop_id(row, output_ids[b, i])
        if needs_slow_path:
            committed[b] = NEEDS_SLOW_PATH
            record.num_slow_rows += 1
        else:
            tokens = int32_array(row.tokens, row.end)
            for i in range(size):
                tokens[row.length + i] = output_ids[b, i]
            row.length += size
            row.counts.num_output_tokens += size
            committed[b] = size
        lengths[b] = row.length


@kernel
def find_accepted(
    batch: int, paths: Ints, sizes: Int64s, counts: Int64s, num_positions: Int64s, last_accepted: Int64s
) -> None:
    """Write for each sequence with new output tokens how many positions were verified, and the last accepted one.

    Args:
        batch: The address of the `BatchRecord`; the output tokens must have been appended.
        paths: int64[B, T], the positions in the row of the accepted input tokens.
        sizes: int64[B], the number of output tokens of each sequence.
        counts: int64[B], the number of input tokens of each sequence.
        num_positions: Output, int64[B]: ``counts``, or 0 for a sequence without new output tokens.
        last_accepted: Output, int64[B]: the position of the last accepted input token, or -1.
    """
    committed = int64_array(batch_record_at(batch).committed, len(sizes))
    for b in range(len(sizes)):
        has_output = committed[b] > 0
        num_positions[b] = counts[b] if has_output else 0
        last_accepted[b] = paths[b, sizes[b] - 1] if has_output else -1


@kernel
def update_row_counts(batch: int, buffer: int, sizes: Int64s, now: float) -> None:
    """Count the output and draft tokens of a forward pass, in the statistics of each request and in the `BatchRecord`.

    The output tokens must have been appended. ``sizes``, int64[B], is the number of output tokens of each sequence, and
    ``now`` is the time in seconds.
    """
    record, num_rows = batch_record_at(batch), len(sizes)
    rows, committed = int64_array(record.rows, num_rows), int64_array(record.committed, num_rows)
    num_accepted, num_drafted = int64_array(record.num_accepted, num_rows), int64_array(record.num_drafted, num_rows)
    sources, gaps = int64_array(record.sources, num_rows), float64_array(record.gaps, num_rows)
    step_numbers = int64_array(record.step_numbers, num_rows)
    record.num_committed_rows, record.num_tokens, record.num_drafts, record.num_gaps, record.max_accepted = (
        0,
        0,
        0,
        0,
        0,
    )
    record.by_source[:] = 0
    record.accepted_by_position[:] = 0
    for b in range(num_rows):
        draft = sequence_at(rows[b]).drafts[buffer]
        num_drafted[b], sources[b] = draft.size, draft.source
        num_accepted[b] = max(0, min(sizes[b] - 1, committed[b]))
        if committed[b] <= 0:
            continue
        counts = sequence_at(rows[b]).counts
        record.num_committed_rows += 1
        record.num_tokens += committed[b]
        counts.num_verify_steps += 1
        step_numbers[b] = counts.num_verify_steps
        if counts.first_token_s > 0.0:
            gaps[record.num_gaps] = now - counts.last_token_s
            record.num_gaps += 1
        else:
            counts.first_token_s = now
        counts.last_token_s = now
        if num_drafted[b] == 0:
            continue
        record.num_drafts += 1
        counts.num_drafts += 1
        counts.num_draft_tokens += num_drafted[b]
        counts.num_accepted_tokens += num_accepted[b]
        counts.by_source[sources[b]] += num_accepted[b]
        record.by_source[0, sources[b]] += num_drafted[b]
        record.by_source[1, sources[b]] += num_accepted[b]
        record.max_accepted = max(record.max_accepted, num_accepted[b])
        for position in range(num_accepted[b]):
            record.accepted_by_position[position] += 1


def warm_up_rows() -> None:
    batch, none, matrix = Batch(()), np.zeros(0, np.int64), np.zeros((0, 1), np.int64)
    fill_input_ids(batch.address, 0, matrix, matrix, np.zeros(0, np.int32), none, none)
    append_output_ids(batch.address, matrix, none)
    find_accepted(batch.address, matrix, none, none, none, none)
    update_row_counts(batch.address, 0, none, 0.0)


_ARRAYS: Final = (
    "rows",
    "committed",
    "num_accepted",
    "num_drafted",
    "sources",
    "step_numbers",
    "lengths",
    "needs_draft",
    "draft_rows",
    "gaps",
)


class Batch:
    """The sequences of a forward pass and the arrays that kernels use, reused until the running sequences change."""

    rows: Int64s
    committed: Int64s
    num_accepted: Int64s
    num_drafted: Int64s
    sources: Int64s
    step_numbers: Int64s
    lengths: Int64s
    needs_draft: Int64s
    draft_rows: Int64s
    gaps: npt.NDArray[np.float64]

    def __init__(self, sequences: Rows[Sequence]) -> None:
        self.sequences = list(sequences)
        self._slot_list = [sequence.slot for sequence in sequences]
        self.slots = np.array(self._slot_list, np.int64)  # the slot of each row, int64[B]
        self._memory = Records(BatchRecord)
        self.record, self.address = self._memory[0], self._memory.address
        arrays = np.zeros((len(_ARRAYS), len(sequences)), np.int64)
        for name, array in zip(_ARRAYS, arrays, strict=True):
            setattr(self, name, array.view(np.float64) if name == "gaps" else array)
            setattr(self.record, name, address(array))
        self.rows[:] = [sequence.address for sequence in sequences]
        self.record.num_rows = len(sequences)
        # Whether the next token of every row is the argmax of the logits.
        self.is_greedy = all(sequence.is_greedy for sequence in sequences)
        # Whether a row has structured output.
        self.has_grammars = any(sequence.grammar is not None for sequence in sequences)
        # The rows without an output token.
        self.first_token_pending = [b for b, sequence in enumerate(sequences) if not sequence.stats.num_output_tokens]
        # The sequences that are sampled with noise that other requests share.
        self.coupled = [sequence for sequence in sequences if sequence.sampling.noise.is_coupled]
        # The rows whose drafts are recorded one by one.
        self.traced = [b for b, sequence in enumerate(sequences) if sequence.stats.steps is not None]
        # Whether the tokens of all rows depend only on the logits and on the noise of their positions.
        self.samples_by_position = all(s.is_greedy or s.is_sampled_by_position for s in sequences)
        self._allows_launch_ahead = (
            self.samples_by_position and not self.coupled and not any(s.needs_solo_retry for s in sequences)
        )
        self._max_lengths = np.array([sequence.row.end for sequence in sequences], np.int64)
        temperatures = [s.request.sampling.temperature if s.is_sampled_by_position else 0.0 for s in sequences]
        self._temperatures = np.array(temperatures, np.float32)
        self._noises = [sequence.sampling.noise for sequence in sequences]
        self._row_namespaces: tuple[list[str], list[LearnedState | None], npt.NDArray[np.bool_]] | None = None
        self._groups: list[tuple[NamespaceCache | None, NamespaceGroup]] | None = None

    def noise(self, lengths: Int64s, width: int) -> Noise:
        """Return the Gumbel noise [B, T] with which the next ``width`` = T tokens of each sequence are sampled.

        May be called only if ``samples_by_position`` is true and all drafts are chains. ``lengths``, int64[B], are the
        numbers of tokens that each sequence has now.
        """
        keys = SequenceNoise.seeded_keys(self._noises, lengths.tolist(), width)
        return Noise(keys, np.repeat(self._temperatures[:, None], width, axis=1))

    def can_continue(self, running: Rows[Sequence], lengths: Int64s) -> bool:
        """Return whether the next forward pass can be launched for this batch before the current pass has ended.

        Three conditions must hold. ``running``, the running sequences, are those of this batch. No sequence reaches its
        maximum length in the current pass; ``lengths``, int64[B], are the numbers of tokens after it. The next tokens
        depend on nothing that the CPU must compute first, such as a grammar mask.
        """
        return (
            self._allows_launch_ahead
            and len(running) == len(self.sequences)
            and all(sequence.row.uses_fast_path == 1 for sequence in self.sequences)
            and bool((lengths < self._max_lengths).all())
        )

    def has_sequences(self, sequences: Rows[Sequence]) -> bool:
        return self.sequences == sequences and self._slot_list == [sequence.slot for sequence in sequences]

    def row_namespaces(self) -> tuple[list[str], list[LearnedState | None], npt.NDArray[np.bool_]]:
        """Return each sequence's request id, its namespace's drafting statistics, and whether its text may be cached.

        The statistics are None for a sequence without an open cache. The last result is bool[B].
        """
        if self._row_namespaces is not None:
            return self._row_namespaces
        caches, is_final = self._caches()
        names = [sequence.request.request_id for sequence in self.sequences]
        rows = zip(self.sequences, caches, strict=True)
        allow_caching = np.array([cache is not None and sequence.request.learn for sequence, cache in rows], np.bool_)
        row_namespaces = names, [None if cache is None else cache.learned for cache in caches], allow_caching
        if is_final:
            self._row_namespaces = row_namespaces
        return row_namespaces

    def namespace_groups(self, start_request: Callable[[Sequence, LearnedState | None], None]) -> list[NamespaceGroup]:
        """Group the sequences by cache namespace, because the drafter searches the cache of one namespace at a time.

        When groups are formed, ``start_request`` is called for each sequence with the drafting statistics of its
        namespace, so that the drafter knows the request before its first draft.
        """
        groups = self._groups
        if groups is None:
            caches, is_final = self._caches()
            members: dict[NamespaceCache | None, list[Sequence]] = {}
            for sequence, cache in zip(self.sequences, caches, strict=True):
                start_request(sequence, None if cache is None else cache.learned)
                members.setdefault(cache, []).append(sequence)
            groups = [(cache, _namespace_group(cache, rows)) for cache, rows in members.items()]
            self._groups = groups if is_final else None
        return [group if cache is None else group._replace(snapshot=cache.snapshot()) for cache, group in groups]

    def _caches(self) -> tuple[list[NamespaceCache | None], bool]:
        caches = [None if s.namespace is None else s.namespace.cache for s in self.sequences]
        is_open = [s.namespace is None or cache is not None for s, cache in zip(self.sequences, caches, strict=True)]
        return caches, all(is_open)


def _namespace_group(cache: NamespaceCache | None, rows: Rows[Sequence]) -> NamespaceGroup:
    with_requests = [s for s in rows if cache is None or s.sampling.noise.is_coupled]
    return NamespaceGroup(
        None,
        None if cache is None else cache.learned,
        np.array([s.address + DRAFT_ROW_OFFSET for s in rows], np.int64),
        [(s.draft_request, s.row.draft_row) for s in with_requests if s.draft_request is not None],
    )
