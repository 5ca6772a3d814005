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
from ssd.drafting.draft_records import MAX_DRAFT, row_at
from ssd.drafting.row_texts import (
    DRAFTING_AT,
    NUM_HEADER_WORDS,
    RowText,
    TokenRows,
    Tokens,
    append_tokens,
    extend_texts,
    read_rows,
    text_at,
)
from ssd.drafting.suffix_drafter import NO_SNAPSHOT, Workspace
from ssd.jit.addresses import (
    Address,
    Int64,
    Record,
    Records,
    address,
    float32_array,
    int32_array,
    int64_array,
    kernel,
    view_of,
)
from ssd.retrieval.cache_state import LearnedState
from ssd.retrieval.snapshot import Snapshot

_DEFAULT_TOKEN_COST: Final = 0.1
"""The default cost of verifying a draft token, in expected accepted tokens; used until the time of steps is measured.
"""


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


_batch_at = view_of(RowBatch)


@kernel
def _draft_rows(
    batch_address: int, needs_draft_at: int, snapshot: int, num_rows: int, seconds: float, words_at: int, longest: int
) -> int:
    """Draft for some rows, and shorten all drafts together for the best throughput.

    If the batch has a ``source``, the texts are extended first. Returns the number of texts that do not match it.

    ``needs_draft_at`` is the address of int64[rows]: whether to draft for each row. ``words_at`` is the address of
    int32[rows, NUM_HEADER_WORDS + 2 * longest], which receives for each row the length of its text, the size of its
    draft, the draft tokens, and their acceptance probabilities as float32. ``seconds`` is the time since the last call
    returned, from which the cost of a step is learned; 0 if nothing can be learned.
    """
    batch = _batch_at(batch_address)
    settings, costs = draft_batch_at(batch.settings), draft_batch_at(batch.settings).costs
    texts, needs_draft = int64_array(batch.texts, num_rows), int64_array(needs_draft_at, num_rows)
    if batch.source != 0:
        batch.num_new += read_rows(batch.texts, batch.source, needs_draft)
    rows, num_drafting, num_lost = np.empty(num_rows, np.int64), 0, 0
    for row in range(num_rows):
        num_lost += needs_draft[row] < 0
        if texts[row] != 0 and needs_draft[row] > 0:
            rows[num_drafting] = texts[row] + DRAFTING_AT
            num_drafting += 1
    if seconds > 0.0 and 0 < num_drafting == num_rows == batch.last_num_drafting:
        observe_pass(costs, batch.last_positions, batch.last_positions > num_rows, batch.num_new, seconds)
    batch.num_new = 0
    token_cost = draft_token_cost(costs, num_drafting)
    rows = rows[:num_drafting]
    for i in range(num_drafting):
        text, params = text_at(rows[i] - DRAFTING_AT), row_at(rows[i]).params
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
        words[at], words[at + 1] = 0 if texts[row] == 0 else text_at(texts[row]).length, 0
        if texts[row] != 0 and needs_draft[row] > 0:
            draft = text_at(texts[row]).drafting.draft
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
        found = append_tokens(address(addresses), address(words), address(lost), count, words.shape[1])
        return np.flatnonzero(lost).tolist() if found else []

    def extend(self, token_ids: Sequence[Sequence[int] | Tokens]) -> list[int]:
        """Append the new tokens of each assigned row to its text, and return the length of each text.

        A row without text has length 0, and a text without room for its tokens is not extended.
        """
        # Arrays of the standard library, because after a forward pass every call of numpy costs tens of microseconds.
        tokens, sizes = array("i", chain.from_iterable(token_ids)), array("q", map(len, token_ids))
        assert len(sizes) == self._num_rows
        self._batch.num_new += len(tokens)
        extend_texts(self._batch.texts, address(tokens), address(sizes), len(sizes))
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
