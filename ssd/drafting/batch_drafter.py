"""The suffix drafter for an engine that keeps its sequences as rows of a batch, such as vLLM.

One kernel call drafts for all rows of a step. A forward pass evicts the CPU caches, so a line of Python after it costs
several times as much as in a tight loop. So all work per row and step is done in kernels, and Python code runs only
when a row gets another sequence.

The engine's device may be ahead of the host. So the drafter extends its copy of each text when the results of a step
arrive, and a draft chain covers the tokens that the device is about to sample and further tokens after them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Final

import numpy as np
import numpy.typing as npt

from ssd.cost_model.cost_model import CostModel
from ssd.cost_model.pass_costs import draft_token_cost, observe_pass
from ssd.drafting.acceptance_model import NamespaceModels
from ssd.drafting.draft_batch import DRAFT_OFFSET, cut_drafts, draft_batch, draft_batch_at, is_valid_draft
from ssd.drafting.draft_kernel import reset_row_at
from ssd.drafting.draft_records import MAX_DRAFT, DraftRow, row_at
from ssd.drafting.suffix_drafter import NO_SNAPSHOT, Workspace
from ssd.jit.addresses import (
    Address,
    Int64,
    Int64s,
    Record,
    Records,
    address,
    float32_array,
    int32_array,
    int64_array,
    kernel,
    offset_of,
    view_of,
)
from ssd.retrieval.cache_state import LearnedState
from ssd.retrieval.snapshot import Snapshot

NUM_HEADER_WORDS: Final = 2
"""The number of int32 words before each row's tokens in the arrays that the engine and the drafter exchange.

The first word is the length of the row's text, and the second word is the number of tokens that follow.
"""

_DEFAULT_TOKEN_COST: Final = 0.1
"""The default cost of verifying a draft token, in expected accepted tokens; used until the time of steps is measured.
"""


class RowTextRecord(Record):
    """The drafter's copy of the prompt and output of one row of the batch, in the form that numba kernels read.

    Attributes:
        tokens: The address of int32[room]; the first ``length`` tokens are valid.
        num_new: The number of tokens that the last step appended.
        drafting: The state of the drafter for this text.
    """

    tokens: Address
    capacity: Int64
    length: Int64
    num_new: Int64
    drafting: DraftRow


class TokenRowsRecord(Record):
    """An engine's arrays of a batch, see `TokenRows`, in the form that numba kernels read: addresses and sizes."""

    tokens: Address
    lengths: Address
    num_rows: Int64
    width: Int64


class RowBatch(Record):
    """The rows of a batch and the counters of its drafter, in the form that numba kernels read.

    Attributes:
        texts: For each row, the address of its `RowTextRecord`, int64; 0 for none.
        source: The address of the `TokenRowsRecord` that texts are extended from; 0 for none.
        settings: The address of the `DraftBatch`.
        model: The address of the acceptance model.
        num_new: The number of tokens appended since the last drafting call.
        last_num_drafting: The number of rows that the last drafting call drafted for; -1 if rows were assigned since.
        last_positions: The number of positions of the forward pass that verified the last drafts.
        num_proposals: The number of rows drafted for since the start.
        num_drafts: The number of drafts since the start that were not empty.
        num_draft_tokens: The number of draft tokens since the start.
    """

    texts: Address
    source: Address
    settings: Address
    model: Address
    max_length: Int64
    num_new: Int64
    last_num_drafting: Int64
    last_positions: Int64
    num_proposals: Int64
    num_drafts: Int64
    num_draft_tokens: Int64


_text_at, _batch_at, _source_at = view_of(RowTextRecord), view_of(RowBatch), view_of(TokenRowsRecord)
_DRAFTING_AT: Final = offset_of(RowTextRecord, "drafting")


@kernel
def _append_tokens(texts_at: int, words_at: int, lost_at: int, num_rows: int, width: int) -> int:
    """Append a step's tokens to each row's text, and return the number of texts that could not be extended.

    The arrays are given by address. ``texts_at`` is int64[rows]: the address of each row's `RowTextRecord`, or 0.
    ``words_at`` is int32[rows, width]: for each row, the new length of its text, the number of new tokens, and these
    tokens. ``lost_at`` is the output, int64[rows]: 1 if the row's text was not extended, else 0.
    """
    texts, lost = int64_array(texts_at, num_rows), int64_array(lost_at, num_rows)
    words, num_lost = int32_array(words_at, num_rows * width), 0
    for row in range(num_rows):
        length, count = words[row * width], words[row * width + 1]
        lost[row] = 0
        if texts[row] == 0 or count == 0:
            continue
        text = _text_at(texts[row])
        if count < 0 or count > width - NUM_HEADER_WORDS or text.length + count != length or length > text.capacity:
            lost[row] = 1
            num_lost += 1
            continue
        known, first = int32_array(text.tokens, length), row * width + NUM_HEADER_WORDS
        known[length - count :] = words[first : first + count]
        text.length, text.num_new = length, count
    return num_lost


@kernel
def _extend_texts(texts_at: int, tokens_at: int, sizes_at: int, num_rows: int) -> None:
    """Append new tokens to each row's text, and replace their number in ``sizes_at`` by the length of the text."""
    texts, sizes, end = int64_array(texts_at, num_rows), int64_array(sizes_at, num_rows), 0
    for row in range(num_rows):
        size, begin = sizes[row], end
        end += size
        sizes[row] = 0
        if texts[row] == 0:
            continue
        text = _text_at(texts[row])
        if 0 < size <= text.capacity - text.length:
            int32_array(text.tokens, text.capacity)[text.length : text.length + size] = int32_array(tokens_at, end)[
                begin:
            ]
            text.length, text.num_new = text.length + size, size
        sizes[row] = text.length


@kernel
def _read_rows(batch: RowBatch, needs_draft: Int64s) -> int:
    """Append to each text the tokens that the engine's array has behind it; return how many texts do not match it.

    ``needs_draft``, int64[rows], becomes 0 for rows without new tokens, and -1 for texts that do not match.
    """
    source, num_rows, num_lost = _source_at(batch.source), len(needs_draft), 0
    texts, lengths = int64_array(batch.texts, num_rows), int32_array(source.lengths, source.num_rows)
    for row in range(num_rows):
        if texts[row] == 0:
            continue
        text, length = _text_at(texts[row]), lengths[row]
        tokens = int32_array(source.tokens + 4 * row * source.width, source.width)
        known = int32_array(text.tokens, text.capacity)
        fits = 0 < text.length <= length <= min(source.width, text.capacity)
        if not fits or tokens[text.length - 1] != known[text.length - 1]:
            needs_draft[row] = -1
            num_lost += 1
        elif length == text.length:
            needs_draft[row] = 0
        else:
            known[text.length : length] = tokens[text.length : length]
            text.num_new = length - text.length
            text.length = length
            batch.num_new += text.num_new
    return num_lost


@kernel
def _draft_rows(
    batch_address: int, needs_draft_at: int, snapshot: int, num_rows: int, seconds: float, words_at: int, longest: int
) -> int:
    """Draft for some rows, and shorten all drafts together for the best throughput.

    If the batch has a ``source``, the texts are extended first; the return value is that of `_read_rows`, otherwise 0.

    ``needs_draft_at`` is the address of int64[rows]: whether to draft for each row. ``words_at`` is the address of
    int32[rows, NUM_HEADER_WORDS + 2 * longest], which receives for each row the length of its text, the size of its
    draft, the draft tokens, and their acceptance probabilities as float32. ``seconds`` is the time since the last call
    returned, from which the cost of a step is learned; 0 if nothing can be learned.
    """
    batch = _batch_at(batch_address)
    settings, costs = draft_batch_at(batch.settings), draft_batch_at(batch.settings).costs
    texts, needs_draft = int64_array(batch.texts, num_rows), int64_array(needs_draft_at, num_rows)
    num_lost = _read_rows(batch, needs_draft) if batch.source != 0 else 0
    rows, num_drafting = np.empty(num_rows, np.int64), 0
    for row in range(num_rows):
        if texts[row] != 0 and needs_draft[row] > 0:
            rows[num_drafting] = texts[row] + _DRAFTING_AT
            num_drafting += 1
    if seconds > 0.0 and 0 < num_drafting == num_rows == batch.last_num_drafting:
        observe_pass(costs, batch.last_positions, batch.last_positions > num_rows, batch.num_new, seconds)
    batch.num_new = 0
    token_cost = draft_token_cost(costs, num_drafting)
    rows = rows[:num_drafting]
    for i in range(num_drafting):
        text, params = _text_at(rows[i] - _DRAFTING_AT), row_at(rows[i]).params
        params.context, params.context_length = text.tokens, text.length
        params.snapshot, params.model = snapshot, batch.model
        # The target adds one token to the accepted draft.
        params.limit = max(0, min(settings.limit, batch.max_length - text.length - 1))
        params.token_cost = token_cost if token_cost > 0.0 else settings.default_token_cost
    draft_batch(batch.settings, rows)
    for i in range(num_drafting):
        is_valid_draft(settings, row_at(rows[i]), 1.0)
    cut_drafts(costs, rows + DRAFT_OFFSET, np.ones(num_drafting), False)
    width, positions = NUM_HEADER_WORDS + 2 * longest, num_rows
    words, floats = int32_array(words_at, num_rows * width), float32_array(words_at, num_rows * width)
    for row in range(num_rows):
        at = row * width
        words[at], words[at + 1] = 0 if texts[row] == 0 else _text_at(texts[row]).length, 0
        if texts[row] != 0 and needs_draft[row] > 0:
            draft = _text_at(texts[row]).drafting.draft
            words[at + 1] = draft.size
            for i in range(draft.size):
                words[at + NUM_HEADER_WORDS + i] = draft.tokens[i]
                floats[at + NUM_HEADER_WORDS + longest + i] = draft.probabilities[i]
            batch.num_drafts += draft.size > 0
            positions += draft.size
    batch.num_proposals += num_drafting
    batch.num_draft_tokens += positions - num_rows
    batch.last_num_drafting, batch.last_positions = num_drafting, positions
    return num_lost


Tokens = npt.NDArray[np.int32]


class RowText:
    """The drafter's own copy of a row's prompt and output, needed because the engine may move or overwrite its array.

    ``address`` is the memory address of the `RowTextRecord` for numba kernels. The text can grow to ``capacity``
    tokens.
    """

    __slots__ = ("_buffer", "_memory", "_record", "address")

    def __init__(self, tokens: Tokens, prompt_length: int, capacity: int) -> None:
        self._memory = Records(RowTextRecord)
        self._record, self.address = self._memory[0], self._memory.address
        reset_row_at(self.address + _DRAFTING_AT, prompt_length)
        self._buffer = np.empty(max(capacity, len(tokens)), np.int32)  # memory is allocated as it is written
        self._record.tokens, self._record.capacity = address(self._buffer), len(self._buffer)
        self.replace(tokens, 0)

    @property
    def length(self) -> int:
        return self._record.length

    @property
    def num_new(self) -> int:
        """Return the number of tokens that the last step appended to the text."""
        return self._record.num_new

    @property
    def prompt_length(self) -> int:
        return self._record.drafting.params.prompt_length

    @property
    def tokens(self) -> Tokens:
        """Return a view of the prompt and the output so far, valid until tokens are appended."""
        return self._buffer[: self.length]

    def replace(self, tokens: Tokens, num_new: int) -> None:
        """Replace the row's whole text by ``tokens``; the last ``num_new`` of them were generated in this step."""
        tokens = tokens[: len(self._buffer)]
        self._buffer[: len(tokens)] = tokens
        self._record.length, self._record.num_new = len(tokens), num_new


class TokenRows:
    """The arrays in which an engine keeps the tokens of its batch. `BatchDrafter.draft` reads new tokens from them.

    Attributes:
        tokens: int32[rows, width], the tokens of each sequence.
        lengths: int32[rows], the number of tokens of each sequence.
    """

    def __init__(self, tokens: Tokens, lengths: Tokens) -> None:
        """Refer to the arrays without copying them; AssertionError if they are not C-contiguous int32 arrays."""
        for each in (tokens, lengths):
            assert each.dtype == np.int32 and each.flags.c_contiguous, "the engine's tokens are not int32 rows"
        self.tokens, self.lengths = tokens, lengths
        self._memory = Records(TokenRowsRecord)
        self.address, record = self._memory.address, self._memory[0]
        record.tokens, record.lengths = address(tokens), address(lengths)
        record.num_rows, record.width = min(len(tokens), len(lengths)), tokens.shape[1]


class BatchDrafter:
    """Drafts by the method of ``SuffixDrafter``, i.e. from text matches, for all rows of a batch in one kernel call.

    The draft lengths of all rows are chosen together for the greatest expected throughput. ``assign`` sets the text of
    each row, and ``append`` extends the texts. One thread owns the drafter. Drafts depend only on the calls and on the
    times passed to them.
    """

    def __init__(
        self,
        *,
        longest: int,
        max_length: int,
        vocab_size: int,
        end_of_text_ids: Iterable[int] = (),
        max_match_length: int = 32,
        min_match_length: int = 1,
        learned: LearnedState | None = None,
        default_token_cost: float = _DEFAULT_TOKEN_COST,
    ) -> None:
        """Create a drafter.

        Args:
            longest: The maximum number of draft tokens, at most MAX_DRAFT.
            max_length: The maximum length of a text. A draft leaves room for the token that the target adds to it.
            vocab_size: The size of the target's vocabulary. A draft with a token outside the vocabulary is dropped.
            end_of_text_ids: The tokens that end a draft.
            max_match_length: The maximum match length in tokens.
            min_match_length: The minimum match length in tokens.
            learned: The namespace's learned models, which the drafter reads and updates. None uses its own models.
            default_token_cost: The cost of a draft token in expected accepted tokens, used until steps are measured.

        Raises:
            ConfigError: If ``max_match_length`` is not within 1..256.
        """
        assert longest <= MAX_DRAFT
        self.longest = longest
        self._workspace, self._cost_model = Workspace(max_match_length, min_match_length), CostModel()
        self._models, self._learned = NamespaceModels(), learned
        self._end_ids = np.array(sorted(end_of_text_ids), np.int32)
        self._settings = settings = self._workspace.batch
        settings.end_ids, settings.num_end_ids = address(self._end_ids), len(self._end_ids)
        settings.costs, settings.vocab_size = self._cost_model.address, vocab_size
        settings.default_token_cost = default_token_cost
        self._memory = Records(RowBatch)
        self._batch = batch = self._memory[0]
        batch.settings, batch.max_length = self._workspace.address, max_length
        batch.model = self._models.get(learned).address
        self._num_rows = 0
        self._make_rows(16)

    @property
    def counts(self) -> tuple[int, int, int]:
        """Return totals since the start: rows for which drafts were requested, nonempty drafts, and draft tokens."""
        return self._batch.num_proposals, self._batch.num_drafts, self._batch.num_draft_tokens

    def new_words(self, num_rows: int) -> Tokens:
        """Allocate the array that ``draft`` writes the drafts of ``num_rows`` rows to."""
        return np.zeros((num_rows, NUM_HEADER_WORDS + 2 * self.longest), np.int32)

    def assign(self, texts: Sequence[RowText | None]) -> None:
        """Set the text of each row of the batch; None disables drafting for the row."""
        self._num_rows = len(texts)
        if len(texts) > len(self._texts):
            self._make_rows(2 * len(texts))
        self._texts[: len(texts)] = _addresses(texts)
        self._batch.last_num_drafting = -1

    def append(self, texts: Sequence[RowText | None], words: Tokens) -> list[int]:
        """Append a step's tokens to the rows' texts, and return the indices of the texts that could not be extended.

        ``words`` is int32[n, width]: for each text its new length, the number of new tokens, and these tokens.
        """
        count = len(texts)
        addresses, lost = _addresses(texts), np.empty(count, np.int64)
        self._batch.num_new += int(words[:count, 1].sum())
        found = _append_tokens(address(addresses), address(words), address(lost), count, words.shape[1])
        return np.flatnonzero(lost).tolist() if found else []

    def extend(self, token_ids: Sequence[Sequence[int] | Tokens]) -> list[int]:
        """Append the new tokens of each assigned row to its text, and return the length of each text.

        A row without text has length 0, and a text without room for its tokens is not extended.
        """
        # Arrays of the standard library, because after a forward pass every call of numpy costs tens of microseconds.
        tokens, sizes = array("i", chain.from_iterable(token_ids)), array("q", map(len, token_ids))
        assert len(sizes) == self._num_rows
        self._batch.num_new += len(tokens)
        _extend_texts(self._batch.texts, address(tokens), address(sizes), len(sizes))
        return sizes.tolist()

    def draft(
        self,
        needs_draft: Sequence[bool],
        snapshot: Snapshot,
        words: Tokens,
        limit: int,
        seconds: float = 0.0,
        source: TokenRows | None = None,
    ) -> list[int]:
        """Draft for the assigned rows that are marked in ``needs_draft``, and write the drafts to ``words``.

        With ``source``, the texts are first extended by the new tokens in the engine's arrays, and rows without new
        tokens get no draft. Returns the rows whose text does not match these arrays; they get no draft either.

        Args:
            needs_draft: Whether to draft for each row.
            snapshot: The snapshot of the retrieval cache to search.
            words: The array from `new_words`. It receives for each row the length of its text, the size of its draft,
                the draft tokens and, from NUM_HEADER_WORDS + longest on, their acceptance probabilities as float32.
            limit: The maximum number of draft tokens per row.
            seconds: The time since the last call returned, from which the cost of a step is learned.
            source: The engine's arrays; None if the texts are up to date.
        """
        count = self._num_rows
        assert count == len(needs_draft) <= len(words) and words.shape[1] == NUM_HEADER_WORDS + 2 * self.longest
        marks = array("q", needs_draft)
        self._workspace.reserve(snapshot)
        self._settings.limit = min(limit, self.longest)
        assert source is None or count <= len(source.lengths)
        self._batch.source = 0 if source is None else source.address
        num_lost = _draft_rows(
            self._memory.address, address(marks), snapshot.address, count, seconds, address(words), self.longest
        )
        return [row for row, mark in enumerate(marks) if mark < 0] if num_lost else []

    def clear(self) -> None:
        """Remove the texts of all rows, because their sequences have ended."""
        self._num_rows = 0
        self._models.ended(self._learned)

    def publish(self) -> None:
        """Publish a copy of the acceptance model to the namespace, for other threads and the next process."""
        self._models.publish()

    def warm_up(self) -> None:
        self._batch.model = self._models.get(None).address  # so that the namespace does not learn from the warm-up
        text = RowText(np.zeros(1, np.int32), 1, 2)
        self.append([text], np.array([[2, 1, 5]], np.int32))
        self.assign([text])
        self.draft([True], NO_SNAPSHOT, self.new_words(1), 1)
        self.clear()
        self._batch.num_proposals = self._batch.num_new = 0
        self._batch.model = self._models.get(self._learned).address

    def _make_rows(self, count: int) -> None:
        self._texts = np.zeros(count, np.int64)
        self._batch.texts = address(self._texts)


def _addresses(texts: Sequence[RowText | None]) -> npt.NDArray[np.int64]:
    return np.fromiter((0 if text is None else text.address for text in texts), np.int64, len(texts))
