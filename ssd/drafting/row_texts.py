"""The texts of a batch's rows, extended by kernels with the tokens of each step.

A text is the drafter's own copy of a row's prompt and output. Kernels read new tokens from the engine's arrays
(`read_rows`), or from arrays that the caller fills (`append_tokens`, `extend_texts`).
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from ssd.drafting.draft_kernel import reset_row_at
from ssd.drafting.draft_records import DraftRow
from ssd.jit.addresses import (
    Address,
    Int64,
    Int64s,
    Record,
    Records,
    address,
    int32_array,
    int64_array,
    kernel,
    offset_of,
    view_of,
)

Tokens = npt.NDArray[np.int32]

NUM_HEADER_WORDS: Final = 2
"""The number of int32 words before each row's tokens in the arrays that the engine and the drafter exchange.

The first word is the length of the row's text, and the second word is the number of tokens that follow.
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


text_at, _source_at = view_of(RowTextRecord), view_of(TokenRowsRecord)
DRAFTING_AT: Final = offset_of(RowTextRecord, "drafting")


@kernel
def append_tokens(texts_at: int, words_at: int, lost_at: int, num_rows: int, width: int) -> int:
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
        text = text_at(texts[row])
        if count < 0 or count > width - NUM_HEADER_WORDS or text.length + count != length or length > text.capacity:
            lost[row] = 1
            num_lost += 1
            continue
        known, first = int32_array(text.tokens, length), row * width + NUM_HEADER_WORDS
        known[length - count :] = words[first : first + count]
        text.length, text.num_new = length, count
    return num_lost


@kernel
def extend_texts(texts_at: int, tokens_at: int, sizes_at: int, num_rows: int) -> None:
    """Append new tokens to each row's text, and replace their number in ``sizes_at`` by the length of the text."""
    texts, sizes, end = int64_array(texts_at, num_rows), int64_array(sizes_at, num_rows), 0
    for row in range(num_rows):
        size, begin = sizes[row], end
        end += size
        sizes[row] = 0
        if texts[row] == 0:
            continue
        text = text_at(texts[row])
        if 0 < size <= text.capacity - text.length:
            int32_array(text.tokens, text.capacity)[text.length : text.length + size] = int32_array(tokens_at, end)[
                begin:
            ]
            text.length, text.num_new = text.length + size, size
        sizes[row] = text.length


@kernel
def read_rows(texts_at: int, source_at: int, needs_draft: Int64s) -> int:
    """Append to each text the tokens that the engine's array has behind it; return how many tokens these are.

    ``texts_at`` is the address of int64[rows]: the address of each row's `RowTextRecord`, or 0. ``source_at`` is the
    address of the `TokenRowsRecord`. ``needs_draft``, int64[rows], becomes 0 for rows without new tokens, and -1 for
    texts that do not match the engine's array.
    """
    source, num_rows, num_new = _source_at(source_at), len(needs_draft), 0
    texts, lengths = int64_array(texts_at, num_rows), int32_array(source.lengths, source.num_rows)
    for row in range(num_rows):
        if texts[row] == 0:
            continue
        text, length = text_at(texts[row]), lengths[row]
        tokens = int32_array(source.tokens + 4 * row * source.width, source.width)
        known = int32_array(text.tokens, text.capacity)
        fits = 0 < text.length <= length <= min(source.width, text.capacity)
        if not fits or tokens[text.length - 1] != known[text.length - 1]:
            needs_draft[row] = -1
        elif length == text.length:
            needs_draft[row] = 0
        else:
            known[text.length : length] = tokens[text.length : length]
            text.num_new = length - text.length
            text.length = length
            num_new += text.num_new
    return num_new


class RowText:
    """The drafter's own copy of a row's prompt and output, needed because the engine may move or overwrite its array.

    ``address`` is the memory address of the `RowTextRecord` for numba kernels. The text can grow to ``capacity``
    tokens.
    """

    __slots__ = ("_buffer", "_memory", "_record", "address")

    def __init__(self, tokens: Tokens, prompt_length: int, capacity: int) -> None:
        self._memory = Records(RowTextRecord)
        self._record, self.address = self._memory[0], self._memory.address
        reset_row_at(self.address + DRAFTING_AT, prompt_length)
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
