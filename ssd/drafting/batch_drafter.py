"""The suffix drafter for an engine that keeps its sequences as rows of a batch: one kernel call a step.

A forward pass leaves the caches to its own weights, so between two of them every line of Python costs several times
what it costs in a loop. What is done for every row of every step is therefore done in kernels; Python is only told when
a row holds another text than before.

The engine's device may be ahead of what is known here. So texts follow what each step gave, whenever that arrives, and
a chain is drafted from what is known: as long as what the device is about to say and a draft after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from ssd.compiled.addresses import (
    Address,
    Float64,
    Int64,
    Record,
    Records,
    TokenIds,
    address,
    float32_array,
    float64_array,
    int32_array,
    int64_array,
    kernel,
    offset_of,
    view_of,
)
from ssd.drafting.acceptance_model import NamespaceModels
from ssd.drafting.draft_kernel import DraftRow, draft_batch, reset_row_at
from ssd.drafting.draft_records import MAX_DRAFT
from ssd.drafting.suffix_drafter import NO_SNAPSHOT, Workspace, checked_lengths
from ssd.pricing.pass_costs import cut_rows, observe_pass, token_price
from ssd.pricing.price_list import PriceList
from ssd.retrieval.cache_state import LearnedState
from ssd.retrieval.snapshot import Snapshot

NUM_HEAD: Final = 2
"""Words before the tokens in what a step gave (length with them, how many) and in a chain (length known, how many)."""

_PRICE_UNKNOWN: Final = 0.1
"""Of a drafted token, in expected accepted tokens, while it is not known what steps cost."""


class TextRecord(Record):
    """What a row holds, as kernels find it: a copy of it at ``tokens``, with room for ``room`` tokens.

    ``length`` : tokens so far, of which ``num_new`` came with the last step.
    """

    tokens: Address
    room: Int64
    length: Int64
    num_new: Int64
    drafting: DraftRow


class RowBatch(Record):
    """The rows of a batch, and what they are drafted with.

    Of each row: ``texts`` : int64, address of its TextRecord, 0 for none. ``wanted`` : int64, whether it is drafted
    for. ``asked``, ``drafting``, ``sizes``, ``probabilities``, ``best_first`` : scratch, of the drafts asked for.

    ``cost`` : see `PassCosts`. ``price`` : of a drafted token while that says nothing. ``ends`` : int32[num_ends], the
    ids of ends of text. ``num_new`` : tokens that came since the last call. ``last_asked``, ``last_positions`` : rows
    and positions of the last call; -1 rows where others were seated since.
    """

    texts: Address
    wanted: Address
    asked: Address
    drafting: Address
    sizes: Address
    probabilities: Address
    best_first: Address
    cost: Address
    price: Float64
    workspace: Address
    model: Address
    ends: Address
    num_ends: Int64
    vocab_size: Int64
    limit: Int64
    max_length: Int64
    longest_match: Int64
    shortest_match: Int64
    num_new: Int64
    last_asked: Int64
    last_positions: Int64
    num_proposals: Int64
    num_drafts: Int64
    num_draft_tokens: Int64


_text_at, _batch_at = view_of(TextRecord), view_of(RowBatch)
_DRAFTING_AT: Final = offset_of(TextRecord, "drafting")


@kernel
def _follow(texts_at: int, words_at: int, lost_at: int, num_rows: int, width: int) -> int:
    """Take over what a step gave each text; how many could not be, which are marked in ``lost``.

    ``texts_at`` : int64[rows], addresses of TextRecords, 0 for none. ``words_at`` : int32[rows, width], of each
    the length of the text now and how many of its tokens are new, then these. ``lost_at`` : int64[rows], written.
    """
    texts, lost = int64_array(texts_at, num_rows), int64_array(lost_at, num_rows)
    words, num_lost = int32_array(words_at, num_rows * width), 0
    for row in range(num_rows):
        length, count = words[row * width], words[row * width + 1]
        lost[row] = 0
        if texts[row] == 0 or count == 0:
            continue
        text = _text_at(texts[row])
        if count < 0 or count > width - NUM_HEAD or text.length + count != length or length > text.room:
            lost[row] = 1
            num_lost += 1
            continue
        known, first = int32_array(text.tokens, length), row * width + NUM_HEAD
        known[length - count :] = words[first : first + count]
        text.length, text.num_new = length, count
    return num_lost


@kernel
def _usable(tokens: TokenIds, size: int, batch: RowBatch) -> int:
    """How much of a draft: up to an end of text; nothing where an id is not the target's."""
    ends, usable = int32_array(batch.ends, batch.num_ends), size
    for i in range(size):
        if tokens[i] < 0 or tokens[i] >= batch.vocab_size:
            return 0
        if usable == size:
            for end in ends:
                if tokens[i] == end:
                    usable = i + 1
    return usable


@kernel
def _ask(batch: RowBatch, snapshot: int, num_rows: int) -> int:
    """Ask for a draft for each row that is to have one; how many. ``drafting`` has the addresses of their rows."""
    texts, wanted = int64_array(batch.texts, num_rows), int64_array(batch.wanted, num_rows)
    asked, drafting, num_asked = int64_array(batch.asked, num_rows), int64_array(batch.drafting, num_rows), 0
    for row in range(num_rows):
        if texts[row] == 0 or wanted[row] == 0:
            continue
        text = _text_at(texts[row])
        ask = text.drafting.params
        ask.context, ask.context_length, ask.snapshot, ask.model = text.tokens, text.length, snapshot, batch.model
        # One token is always the target's own.
        ask.limit = max(0, min(batch.limit, batch.max_length - text.length - 1))
        asked[num_asked], drafting[num_asked] = row, texts[row] + _DRAFTING_AT
        num_asked += 1
    return num_asked


@kernel
def _draft_rows_of_batch(
    batch_address: int, snapshot: int, num_rows: int, seconds: float, words_at: int, longest: int
) -> None:
    """Draft for the rows that are wanted, cut the drafts to what pays, and write them as rows of
    ``NUM_HEAD + 2 * longest`` words.

    ``snapshot`` : its address. ``seconds`` : since the last call's end; 0 where that says nothing. Of each row the
    length of its text and of its chain, then the chain's tokens as int32, then its chances as float32.
    """
    batch = _batch_at(batch_address)
    num_asked = _ask(batch, snapshot, num_rows)
    if seconds > 0.0 and 0 < num_asked == num_rows == batch.last_asked:
        observe_pass(batch.cost, batch.last_positions, batch.last_positions > num_rows, batch.num_new, seconds)
    batch.num_new = 0
    price = token_price(batch.cost, num_asked)
    texts, asked = int64_array(batch.texts, num_rows), int64_array(batch.asked, num_asked)
    for row in asked:
        _text_at(texts[row]).drafting.params.token_cost = price if price > 0.0 else batch.price
    draft_batch(batch.workspace, int64_array(batch.drafting, num_asked), batch.longest_match, batch.shortest_match)
    sizes = int64_array(batch.sizes, num_asked)
    chances = float64_array(batch.probabilities, num_asked * MAX_DRAFT).reshape((num_asked, MAX_DRAFT))
    for number in range(num_asked):
        draft = _text_at(texts[asked[number]]).drafting.draft
        size = _usable(draft.tokens, draft.size, batch)
        sizes[number], chances[number, :size] = size, draft.probabilities[:size]
    cut_rows(batch.cost, chances, sizes, float64_array(batch.best_first, num_rows * MAX_DRAFT))
    width, number, positions = NUM_HEAD + 2 * longest, 0, num_rows
    words, floats = int32_array(words_at, num_rows * width), float32_array(words_at, num_rows * width)
    for row in range(num_rows):
        at = row * width
        words[at], words[at + 1] = 0 if texts[row] == 0 else _text_at(texts[row]).length, 0
        if number < num_asked and asked[number] == row:
            words[at + 1] = size = sizes[number]
            for i in range(size):
                words[at + NUM_HEAD + i] = _text_at(texts[row]).drafting.draft.tokens[i]
                floats[at + NUM_HEAD + longest + i] = chances[number, i]
            batch.num_drafts += size > 0
            positions += size
            number += 1
    batch.num_proposals += num_asked
    batch.num_draft_tokens += positions - num_rows
    batch.last_asked, batch.last_positions = num_asked, positions


Tokens = npt.NDArray[np.int32]


class Text:
    """What a row holds: the engine may move it and write over it, so it is kept here too."""

    __slots__ = ("_buffer", "_memory", "_record", "address")

    def __init__(self, tokens: Tokens, prompt_length: int, room: int) -> None:
        """``room`` : most tokens that it is going to have. ``address`` : of its TextRecord."""
        self._memory = Records(TextRecord)
        self._record, self.address = self._memory[0], self._memory.address
        reset_row_at(self.address + _DRAFTING_AT, prompt_length)
        self._buffer = np.empty(max(room, len(tokens)), np.int32)  # the system gives it as far as it is written
        self._record.tokens, self._record.room = address(self._buffer), len(self._buffer)
        self.replace(tokens, 0)

    @property
    def length(self) -> int:
        """Tokens so far."""
        return self._record.length

    @property
    def num_new(self) -> int:
        """Of these, tokens that came with the last step."""
        return self._record.num_new

    @property
    def prompt_length(self) -> int:
        """Of these, tokens of the prompt."""
        return self._record.drafting.params.prompt_length

    @property
    def tokens(self) -> Tokens:
        """int32[length]: prompt and output so far. A view, valid until more is taken over."""
        return self._buffer[: self.length]

    def replace(self, tokens: Tokens, num_new: int) -> None:
        """``tokens`` is the whole text, int32[n], cut to its room; the last ``num_new`` are of this step. O(n)."""
        tokens = tokens[: len(self._buffer)]
        self._buffer[: len(tokens)] = tokens
        self._record.length, self._record.num_new = len(tokens), num_new


class _RowArrays:
    """Arrays of a batch with ``count`` rows, by their names in `RowBatch`."""

    def __init__(self, count: int) -> None:
        self.texts, self.wanted, self.asked, self.drafting, self.sizes = np.zeros((5, count), np.int64)
        self.probabilities, self.best_first = np.zeros((2, count * MAX_DRAFT))


class RowDrafter:
    """Drafts as ``SuffixDrafter`` does, for all rows of a batch in one call, and cuts them to what pays together.

    Whose text a row holds is said by ``seat`` and holds until it is said again; texts grow by ``take``. Owned by one
    thread. Deterministic given its calls and the times that it is told.
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
        price: float = _PRICE_UNKNOWN,
    ) -> None:
        """``longest`` : most tokens of a draft, at most MAX_DRAFT. ``max_length`` : of a text; drafts leave room for
        the target's own token. ``vocab_size`` : of the target; a draft with another id is none. Drafts end with one of
        ``end_of_text_ids``.
        ``learned`` : where what is learned about the namespace is published; None keeps it to itself. ``price`` : of a
        drafted token, in expected accepted tokens, while it is not known what steps cost.
        Raises ConfigError when ``max_match_length`` is not within 1..256.
        """
        assert longest <= MAX_DRAFT
        self.longest = longest
        self._workspace, self._price_list = Workspace(), PriceList()
        self._models, self._learned = NamespaceModels(), learned
        self._memory = Records(RowBatch)
        self._batch = batch = self._memory[0]
        self._num_rows = 0
        self._ends = np.array(sorted(end_of_text_ids), np.int32)
        batch.ends, batch.num_ends = address(self._ends), len(self._ends)
        batch.cost, batch.workspace = self._price_list.address, self._workspace.address
        batch.model = self._models.of(learned).address
        batch.vocab_size, batch.max_length, batch.price = vocab_size, max_length, price
        batch.longest_match, batch.shortest_match = checked_lengths(max_match_length, min_match_length)
        self._make_rows(16)

    @property
    def counts(self) -> tuple[int, int, int]:
        """Since the start: rows that could have had a draft, drafts that were not empty, their tokens."""
        return self._batch.num_proposals, self._batch.num_drafts, self._batch.num_draft_tokens

    def new_words(self, num_rows: int) -> Tokens:
        """Memory for what ``draft`` writes of so many rows."""
        return np.zeros((num_rows, NUM_HEAD + 2 * self.longest), np.int32)

    def seat(self, texts: Sequence[Text | None]) -> None:
        """Say whose text is in each row; None is drafted nothing for. O(rows)."""
        self._num_rows = len(texts)
        if len(texts) > len(self._arrays.texts):
            self._make_rows(2 * len(texts))
        self._arrays.texts[: len(texts)] = _addresses(texts)
        self._batch.last_asked = -1

    def take(self, texts: Sequence[Text | None], words: Tokens) -> list[int]:
        """Take over what a step gave these texts; returns those that could not follow, as tokens are missing.

        ``words`` : int32[texts or more, n]; of each the length of the text now and how many of its tokens are new, 0
        for none, then these. O(new tokens).
        """
        count = len(texts)
        addresses, lost = _addresses(texts), np.empty(count, np.int64)
        self._batch.num_new += int(words[:count, 1].sum())
        found = _follow(address(addresses), address(words), address(lost), count, words.shape[1])
        return np.flatnonzero(lost).tolist() if found else []

    def draft(
        self, wanted: npt.NDArray[np.bool_], snapshot: Snapshot, words: Tokens, limit: int, seconds: float = 0.0
    ) -> None:
        """Draft for the texts that are seated and wanted, at most ``limit`` tokens each.

        ``wanted`` : bool[rows]. ``words`` : int32[rows or more, NUM_HEAD + 2 * longest], of ``new_words``; of each row
        written are the length of its text and of its draft, then the draft's tokens and, from NUM_HEAD + longest on,
        their chances as float32. ``seconds`` : since the last call returned, for what a step costs.
        """
        count = self._num_rows
        assert count == len(wanted) <= len(words) and words.shape[1] == NUM_HEAD + 2 * self.longest
        self._arrays.wanted[:count] = wanted
        self._workspace.room_for(snapshot)
        self._batch.limit = min(limit, self.longest)
        _draft_rows_of_batch(self._memory.address, snapshot.address, count, seconds, address(words), self.longest)

    def leave(self) -> None:
        """Nobody is seated any more, as texts have ended."""
        self._num_rows = 0
        self._models.ended(self._learned)

    def publish(self) -> None:
        """Leave what was learned in ``learned``, for other threads and the next process."""
        self._models.publish()

    def warm_up(self) -> None:
        """Compile the kernels, so that the first request compiles nothing."""
        self._batch.model = self._models.of(None).address  # the namespace learns nothing from it
        text = Text(np.zeros(1, np.int32), 1, 2)
        self.take([text], np.array([[2, 1, 5]], np.int32))
        self.seat([text])
        self.draft(np.ones(1, bool), NO_SNAPSHOT, self.new_words(1), 1)
        self.leave()
        self._batch.num_proposals = self._batch.num_new = 0
        self._batch.model = self._models.of(self._learned).address

    def _make_rows(self, count: int) -> None:
        self._arrays = arrays = _RowArrays(count)
        for name, array in vars(arrays).items():
            setattr(self._batch, name, address(array))


def _addresses(texts: Sequence[Text | None]) -> npt.NDArray[np.int64]:
    return np.fromiter((0 if text is None else text.address for text in texts), np.int64, len(texts))
