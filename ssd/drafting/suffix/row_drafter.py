"""The suffix drafter for an engine that keeps its sequences as rows of one matrix: one kernel call a step.

A forward pass leaves the caches to its own weights, so between two of them every line of Python costs several times
what it costs in a loop. What is done for every row of every step is therefore done in ``rows``; Python is only
told when a row holds another text than before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from ssd.compiled.addresses import address
from ssd.compiled.records import Records
from ssd.drafting.suffix.draft_record import MAX_DRAFT
from ssd.drafting.suffix.namespace_models import NamespaceModels
from ssd.drafting.suffix.rows import NOT_SEATED, Batch, TextRecord, draft_rows, goes_on, take_over
from ssd.drafting.suffix.workspace import NO_SNAPSHOT, Workspace, checked_lengths, contiguous
from ssd.pricing.price_list import PriceList
from ssd.retrieval.segment_store import LearnedState
from ssd.retrieval.snapshot import Snapshot

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
    ) -> None:
        """``limit`` : most tokens of a draft. ``max_length`` : of a text; drafts leave room for the target's own token.

        ``vocab_size`` : of the target; a draft with another id is none. Drafts end with one of ``end_of_text_ids``.
        ``learned`` : where what is learned about the namespace is published; None keeps it to itself.
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
        batch.longest_match, batch.shortest_match = longest, shortest
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
