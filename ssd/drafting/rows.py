"""The suffix drafter for an engine that keeps its sequences as rows of one matrix: one kernel call a step.

A forward pass leaves the caches to its own weights, so between two of them every line of Python costs several times
what it costs in a loop. What is done for every row of every step is therefore done in ``draft_rows``; Python is only
told when a row holds another text than before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ssd.compiled.addresses import (
    Address,
    Float64,
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
from ssd.drafting.acceptance_model import NamespaceModels
from ssd.drafting.ask import MAX_DRAFT, asks_at, drafts_at
from ssd.drafting.drafter import NO_SNAPSHOT, Workspace, checked_lengths, contiguous
from ssd.drafting.propose import Frame, frame_at, propose_suffix
from ssd.pricing.pass_costs import cut_rows, observe_pass, token_price
from ssd.pricing.price_list import PriceList
from ssd.retrieval.cache_state import LearnedState
from ssd.retrieval.snapshot import Snapshot

NOT_SEATED: Final = -1

_PRICE_UNKNOWN: Final = 0.1
"""Of a drafted token, in expected accepted tokens, while it is not known what steps cost."""

_TAIL_TOKENS: Final = 64
"""Compared at every step, where everything else says that a row still holds the request it held before."""


class TextRecord(Record):
    """What a row holds, as kernels find it: a copy of it at ``tokens``, with room for ``room`` tokens.

    ``length`` : tokens so far, of which ``num_new`` came with the last step. ``state`` : of the workspace.
    """

    tokens: Address
    room: Int64
    length: Int64
    num_new: Int64
    prompt_length: Int64
    state: Int64


class Batch(Record):
    """The rows of a batch, and what they are drafted with.

    The engine's: ``rows`` : int32, row i begins at ``stride * i`` and holds at most ``width`` tokens; 0 where the texts
    are kept up otherwise (`ssd.drafting.chains`). ``lengths`` : int32, tokens of each. Ours, of each row:
    ``num_sampled`` : int64, how many of its tokens are of this step, 0 for a row that is still prefilling. ``texts`` :
    int64, address of its TextRecord, 0 for none. ``asked``, ``sizes``, ``probabilities``, ``best_first`` : scratch, of
    the drafts asked for. ``out`` : int32, see ``draft_rows``.

    ``cost`` : see `PassCosts`. ``price`` : of a drafted token while that says nothing. ``ends`` : int32[num_ends], the
    ids of ends of text. ``last_asked``, ``last_positions`` : rows and words of the last call.
    """

    rows: Address
    stride: Int64
    width: Int64
    lengths: Address
    num_sampled: Address
    texts: Address
    asked: Address
    sizes: Address
    probabilities: Address
    best_first: Address
    out: Address
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
    last_asked: Int64
    last_positions: Int64
    num_proposals: Int64
    num_drafts: Int64
    num_draft_tokens: Int64


text_at = view_of(TextRecord)
batch_at = view_of(Batch)


class Rows(NamedTuple):
    """A batch and the arrays of its rows."""

    batch: Batch
    lengths: TokenIds
    sampled: Int64s
    texts: Int64s


@inlined
def _row(rows: Rows, row: int) -> TokenIds:
    return int32_array(rows.batch.rows + 4 * rows.batch.stride * row, rows.lengths[row])


@inlined
def is_sound(length: int, sampled: int, width: int) -> bool:
    """Whether a row holds what it should."""
    return max(1, sampled) <= length <= width


@kernel
def goes_on(at: int, row: TokenIds, sampled: int) -> bool:
    """Whether ``row`` is the text at an address one step later, judged by its length and last tokens. O(1)."""
    text = text_at(at)
    length = text.length
    if length + sampled != len(row):
        return False
    known = int32_array(text.tokens, length)
    differ = 0
    for i in range(max(0, length - _TAIL_TOKENS), length):
        differ |= known[i] ^ row[i]
    return differ == 0


@kernel
def take_over(at: int, row: TokenIds, sampled: int) -> None:
    """Take over what is new in the row of the text at an address, which must have room for it. O(new)."""
    text = text_at(at)
    known, length = text.length, len(row)
    if length > known:
        int32_array(text.tokens, length)[known:] = row[known:]
    text.length, text.num_new = length, sampled


@kernel
def _are_seated(rows: Rows, by_text: bool) -> bool:
    """Whether every row is sound and holds the text it held before, for which there is room."""
    for row in range(len(rows.texts)):
        length, sampled = rows.lengths[row], rows.sampled[row]
        if not is_sound(length, sampled, rows.batch.width):
            return False
        if rows.texts[row] == 0:
            if sampled > 0:
                return False
            continue
        text = rows.texts[row]
        if length > text_at(text).room or (by_text and not goes_on(text, _row(rows, row), sampled)):
            return False
    return True


@inlined
def _usable(tokens: TokenIds, size: int, batch: Batch) -> int:
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
def _ask(frame: Frame, rows: Rows) -> tuple[int, int]:
    """Take over what is new and ask for a draft for each row that can have one: (how many, tokens new)."""
    batch, num_asked, num_tokens = rows.batch, 0, 0
    asked, asks = int64_array(batch.asked, len(rows.texts)), asks_at(frame.asks, frame.num_rows)
    for row in range(len(rows.texts)):
        sampled = rows.sampled[row]
        num_tokens += sampled
        if rows.texts[row] == 0:
            continue
        if batch.rows != 0:
            take_over(rows.texts[row], _row(rows, row), sampled)
        if sampled == 0:
            continue
        ask, text = asks[num_asked], text_at(rows.texts[row])
        ask.context, ask.context_length, ask.prompt_length = text.tokens, text.length, text.prompt_length
        # One token is always the target's own.
        ask.limit, ask.state = max(0, min(batch.limit, batch.max_length - text.length - 1)), text.state
        ask.is_tree, ask.num_prices, ask.prediction_length, ask.num_offered = 0, 0, 0, 0
        ask.successors, ask.choices, ask.no_lookup, ask.warmth, ask.temperature = 0, 0, 0, 0, 0.0
        asked[num_asked] = row
        num_asked += 1
    return num_asked, num_tokens


@kernel
def _write(frame: Frame, rows: Rows, num_asked: int, sizes: Int64s) -> int:
    """Of every row where its draft ends in ``out``, then the drafts, one after another; words written."""
    num_rows, batch, drafts = len(rows.texts), rows.batch, drafts_at(frame.drafts, frame.num_rows)
    asked, out = int64_array(batch.asked, num_rows), int32_array(batch.out, num_rows * (1 + MAX_DRAFT))
    at, number = num_rows, 0
    for row in range(num_rows):
        if number < num_asked and asked[number] == row:
            size = sizes[number]
            out[at : at + size] = drafts[number].tokens[:size]
            at += size
            batch.num_drafts += size > 0
            number += 1
        out[row] = at
    batch.num_draft_tokens += at - num_rows
    return at


@kernel
def draft_rows(batch_address: int, snapshot: int, num_rows: int, seconds: float, is_seated: bool, by_text: bool) -> int:
    """Follow every row of a batch, draft for those that can have a draft, and cut the drafts to what pays.

    ``snapshot`` : its address. ``seconds`` : since the last call's end, where it was for the same texts in the
    same rows, else 0. ``is_seated`` : the texts are known to be those of the rows. Where it is not, that is looked at,
    ``by_text`` also at their last tokens.

    Returns how many words were written: where each row's draft ends among them, then the drafts. NOT_SEATED where a row
    does not hold the text it held; nothing was done then.
    """
    batch = batch_at(batch_address)
    rows = Rows(
        batch,
        int32_array(batch.lengths, num_rows),
        int64_array(batch.num_sampled, num_rows),
        int64_array(batch.texts, num_rows),
    )
    frame = frame_at(batch.workspace)
    if not is_seated and not _are_seated(rows, by_text):
        return NOT_SEATED
    num_asked, num_tokens = _ask(frame, rows)
    if seconds > 0.0 and num_asked == num_rows and batch.last_asked == num_rows:
        observe_pass(batch.cost, batch.last_positions, False, num_tokens, seconds)
    price = token_price(batch.cost, num_asked)
    asks, drafts = asks_at(frame.asks, frame.num_rows), drafts_at(frame.drafts, frame.num_rows)
    for number in range(num_asked):
        asks[number].price = price if price > 0.0 else batch.price
    propose_suffix(batch.workspace, snapshot, batch.model, num_asked, batch.longest_match, batch.shortest_match)
    sizes = int64_array(batch.sizes, num_asked)
    probabilities = float64_array(batch.probabilities, num_asked * MAX_DRAFT).reshape((num_asked, MAX_DRAFT))
    for number in range(num_asked):
        draft = drafts[number]
        size = _usable(draft.tokens, draft.size, batch)
        sizes[number], probabilities[number, :size] = size, draft.probabilities[:size]
    cut_rows(batch.cost, probabilities, sizes, float64_array(batch.best_first, num_rows * MAX_DRAFT))
    size = _write(frame, rows, num_asked, sizes)
    batch.num_proposals += num_asked
    batch.last_asked, batch.last_positions = num_asked, size
    return size


Tokens = npt.NDArray[np.int32]
_MIN_ROOM = 256


class Text:
    """What a row holds: the engine may move it and write over it, so it is kept here too."""

    __slots__ = ("_buffer", "_memory", "_record", "address", "name")

    def __init__(self, name: str, prompt_length: int, room: int) -> None:
        """``name`` : never given to another text. ``room`` : tokens it is going to have at least.

        ``address`` : of its TextRecord.
        """
        self.name = name
        self._memory = Records(TextRecord)
        self._record, self.address = self._memory[0], self._memory.address
        self._record.prompt_length = prompt_length
        self._buffer = np.empty(0, np.int32)
        self.make_room(room)

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
        return self._record.prompt_length

    @property
    def tokens(self) -> Tokens:
        """int32[length]: prompt and output so far. A view, valid until more is taken over."""
        return self._buffer[: self.length]

    def make_room(self, length: int) -> None:
        """For so many tokens, and as many again where that takes more than there is. O(text) then."""
        if length > len(self._buffer):
            grown, known = np.empty(max(_MIN_ROOM, 2 * length), np.int32), self.length
            grown[:known] = self._buffer[:known]
            self._buffer = grown
            self._record.tokens, self._record.room = address(grown), len(grown)

    def take_over(self, row: Tokens, num_new: int) -> None:
        """Take over what is new in ``row``, int32[n], the whole text; the last ``num_new`` are of this step. O(new)."""
        self.make_room(len(row))
        take_over(self.address, contiguous(row), num_new)

    def goes_on(self, row: Tokens, num_new: int) -> bool:
        """Whether ``row`` is this text one step later, judged by its length and its last tokens. O(1)."""
        return goes_on(self.address, contiguous(row), num_new)

    def keep_at(self, state: int) -> None:
        """Say which state of the workspace it is drafted with."""
        self._record.state = state


class _RowArrays:
    """Arrays of a batch with ``count`` rows, by their names in `Batch`."""

    def __init__(self, count: int) -> None:
        self.num_sampled, self.texts, self.asked, self.sizes = np.zeros((4, count), np.int64)
        self.probabilities, self.best_first = np.zeros((2, count * MAX_DRAFT))
        self.out = np.zeros(count * (1 + MAX_DRAFT), np.int32)


class RowDrafter:
    """Drafts as ``SuffixDrafter`` does, for all rows of a matrix in one call, and cuts them to what pays together.

    Whose text a row holds is said by ``seat`` and holds until it is said again. Owned by one thread. Deterministic
    given its calls and the times that it is told.
    """

    def __init__(
        self,
        *,
        limit: int,
        max_length: int,
        vocab_size: int,
        end_of_text_ids: Iterable[int] = (),
        max_match_length: int = 32,
        min_match_length: int = 1,
        learned: LearnedState | None = None,
        price: float = _PRICE_UNKNOWN,
    ) -> None:
        """``limit`` : most tokens of a draft. ``max_length`` : of a text; drafts leave room for the target's own token.

        ``vocab_size`` : of the target; a draft with another id is none. Drafts end with one of ``end_of_text_ids``.
        ``learned`` : where what is learned about the namespace is published; None keeps it to itself. ``price`` : of a
        drafted token, in expected accepted tokens, while it is not known what steps cost.
        Raises ConfigError when ``max_match_length`` is not within 1..256.
        """
        longest, shortest = checked_lengths(max_match_length, min_match_length)
        self._workspace, self._price_list = Workspace(), PriceList()
        self._models, self._learned = NamespaceModels(), learned
        self._memory = Records(Batch)
        self._batch = self._memory[0]
        self._given: tuple[object, object] = None, None
        self._texts: list[Text | None] = []
        self._ends = np.array(sorted(end_of_text_ids), np.int32)
        batch = self._batch
        batch.ends, batch.num_ends = address(self._ends), len(self._ends)
        batch.cost, batch.workspace = self._price_list.address, self._workspace.address
        batch.model = self._models.of(learned).address
        batch.vocab_size, batch.limit, batch.max_length = vocab_size, min(limit, MAX_DRAFT), max_length
        batch.longest_match, batch.shortest_match, batch.price = longest, shortest, price
        self._make_rows(16)

    @property
    def counts(self) -> tuple[int, int, int]:
        """Since the start: rows that could have had a draft, drafts that were not empty, their tokens."""
        return self._batch.num_proposals, self._batch.num_drafts, self._batch.num_draft_tokens

    def draft(
        self,
        sampled: Sequence[Sequence[int]],
        lengths: npt.NDArray[np.int32],
        rows: npt.NDArray[np.int32],
        snapshot: Snapshot,
        seconds: float,
        *,
        is_seated: bool = False,
        by_text: bool = False,
    ) -> list[list[int]] | None:
        """One draft for each row, empty where nothing is known or the row is prefilling.

        ``sampled`` : what this step gave each row; nothing while it is prefilling. ``lengths`` : int32[rows or more],
        tokens of each row, these included. ``rows`` : int32[rows or more, n], row i has its text in
        ``[i, :lengths[i]]``. ``seconds`` : since the last call returned; for what a step costs, where it was for the
        same rows.

        ``is_seated`` : ``seat`` was just called for these arrays. Else None is returned, and nothing done, where a row
        holds what cannot go on from what it held: it is to be said whose the rows are. ``by_text`` looks for that at
        the last tokens of each row also. O(new tokens) but for drafting.
        """
        if lengths is not self._given[0] or rows is not self._given[1]:
            self._adopt(lengths, rows)
        num_rows, counts = min(len(sampled), self._num_rows), self._sampled
        if not is_seated and num_rows != len(self._texts):
            return None
        for row in range(num_rows):
            counts[row] = len(sampled[row])
        self._workspace.room_for(0, snapshot)
        size = draft_rows(self._memory.address, snapshot.address, num_rows, seconds, is_seated, by_text)
        if size == NOT_SEATED:
            return None
        written: list[int] = self._out[:size].tolist()
        drafts, start = [], num_rows
        for end in written[:num_rows]:
            drafts.append(written[start:end])
            start = end
        if num_rows < len(sampled):
            drafts += [[] for _ in sampled[num_rows:]]
        return drafts

    def seat(self, texts: Sequence[Text | None], lengths: Sequence[int]) -> bool:
        """Say whose text, of ``lengths[i]`` tokens now, is in row i. Returns whether it is as it was. O(rows)."""
        is_same, self._texts = texts == self._texts, list(texts)
        if len(texts) > len(self._rows.texts):
            self._make_rows(2 * len(texts))
        workspace = self._workspace
        workspace.room_for(len(texts), NO_SNAPSHOT)
        self._rows.texts[: len(texts)] = [0 if text is None else text.address for text in texts]
        for text, length in zip(texts, lengths, strict=True):
            if text is not None:
                text.make_room(length)
                text.keep_at(workspace.begun_state(text.name, text.prompt_length))
        return is_same

    def forget(self, texts: Iterable[Text]) -> None:
        """These have ended; nobody is seated any more."""
        self._texts = []
        for text in texts:
            self._workspace.forget(text.name)
        self._models.ended(self._learned)

    def publish(self) -> None:
        """Leave what was learned in ``learned``, for other threads and the next process."""
        self._models.publish()

    def warm_up(self) -> None:
        """Compile the kernels, so that the first request compiles nothing."""
        self._batch.model = self._models.of(None).address  # the namespace learns nothing from it
        text, rows, lengths = Text("", 1, 2), np.zeros((1, 2), np.int32), np.full(1, 2, np.int32)
        text.take_over(rows[0], 1)
        text.goes_on(rows[0], 1)
        self.seat([text], [2])
        self.draft([[0]], lengths, rows, NO_SNAPSHOT, 0.0, is_seated=True)
        self.forget([text])
        self._batch.num_proposals = 0
        self._batch.model = self._models.of(self._learned).address

    def _make_rows(self, count: int) -> None:
        self._rows = rows = _RowArrays(count)
        # As plain memory: a few numbers at a time, this is quicker, most of all when numpy's code is in no cache.
        self._sampled, self._out = memoryview(rows.num_sampled), memoryview(rows.out)  # type: ignore[arg-type]
        for name, array in vars(rows).items():
            setattr(self._batch, name, address(array))

    def _adopt(self, lengths: npt.NDArray[np.int32], rows: npt.NDArray[np.int32]) -> None:
        """Note where the engine's arrays lie; copies of arrays of another kind are made anew at every call."""
        taken = np.ascontiguousarray(lengths, np.int32), np.ascontiguousarray(rows, np.int32)
        self._given = (lengths, rows) if taken[0] is lengths and taken[1] is rows else (None, None)
        self._taken = taken
        self._batch.lengths, self._batch.rows = address(taken[0]), address(taken[1])
        self._num_rows = min(len(taken[0]), len(taken[1]))
        self._batch.stride = self._batch.width = taken[1].shape[1]
