"""The kernel of the row drafter: everything that one step of another engine asks for, in one call."""

from __future__ import annotations

from typing import Final, NamedTuple

from ssd.compiled.addresses import Int64s, TokenIds, float64_array, inlined, int32_array, int64_array, kernel
from ssd.drafting.suffix.extend import MAX_DRAFT
from ssd.drafting.suffix.propose import propose_suffix
from ssd.drafting.suffix.workspace import Frame, frame_at
from ssd.pricing.pass_costs import cut_rows, observe_pass, token_price
from ssd.retrieval.search import table_at

# Words of a text, see `Text`.
ADDRESS: Final = 0
ROOM: Final = 1
LENGTH: Final = 2
NUM_NEW: Final = 3
PROMPT_LENGTH: Final = 4
STATE: Final = 5
TEXT_WORDS: Final = 6

# Words of a batch: addresses of the engine's rows and of memory of our own; what does not change; what was asked the
# last time; counters; what drafts are made with.
ROWS: Final = 0
STRIDE: Final = 1
WIDTH: Final = 2
LENGTHS: Final = 3
NUM_SAMPLED: Final = 4
TEXTS: Final = 5
COST: Final = 6
PRICE: Final = 7
ENDS: Final = 8
NUM_ENDS: Final = 9
ASKED: Final = 10
SIZES: Final = 11
SCRATCH: Final = 12
OUT: Final = 13
VOCAB_SIZE: Final = 14
LIMIT: Final = 15
MAX_LENGTH: Final = 16
LAST_ASKED: Final = 17
LAST_POSITIONS: Final = 18
NUM_PROPOSALS: Final = 19
NUM_DRAFTS: Final = 20
NUM_DRAFT_TOKENS: Final = 21
WORKSPACE: Final = 22
MODEL: Final = 23
LONGEST_MATCH: Final = 24
SHORTEST_MATCH: Final = 25
BATCH_WORDS: Final = 26

NOT_SEATED: Final = -1
NO_ROOM: Final = -2

_PRICE_UNKNOWN: Final = 0.1
"""Of a drafted token, in expected accepted tokens, while it is not known what steps cost."""

_TAIL_TOKENS: Final = 64
"""Compared at every step, where everything else says that a row still holds the request it held before."""


class Rows(NamedTuple):
    """The rows of a batch.

    ``lengths`` : int32, tokens of each. ``sampled`` : int64, how many of these are of this step, 0 for a row that is
    still prefilling. ``texts`` : int64, addresses of the words of each row's text, 0 for none.
    """

    words: Int64s
    lengths: TokenIds
    sampled: Int64s
    texts: Int64s


@inlined
def _rows_at(batch: int, num_rows: int) -> Rows:
    words = int64_array(batch, BATCH_WORDS)
    return Rows(
        words,
        int32_array(words[LENGTHS], num_rows),
        int64_array(words[NUM_SAMPLED], num_rows),
        int64_array(words[TEXTS], num_rows),
    )


@inlined
def _row(rows: Rows, row: int) -> TokenIds:
    return int32_array(rows.words[ROWS] + 4 * rows.words[STRIDE] * row, rows.lengths[row])


@inlined
def is_sound(length: int, sampled: int, width: int) -> bool:
    """Whether a row holds what it should."""
    return max(1, sampled) <= length <= width


@kernel
def goes_on(text: Int64s, row: TokenIds, sampled: int) -> bool:
    """Whether ``row`` is a text one step later, judged by its length and the text's last tokens. O(1)."""
    length = text[LENGTH]
    if length + sampled != len(row):
        return False
    known = int32_array(text[ADDRESS], length)
    differ = 0
    for i in range(max(0, length - _TAIL_TOKENS), length):
        differ |= known[i] ^ row[i]
    return differ == 0


@kernel
def take_over(text: Int64s, row: TokenIds, sampled: int) -> None:
    """Take over what is new in a text's row, for which it must have room. O(new)."""
    known, length = text[LENGTH], len(row)
    if length > known:
        int32_array(text[ADDRESS], length)[known:] = row[known:]
    text[LENGTH], text[NUM_NEW] = length, sampled


@kernel
def _are_seated(rows: Rows, by_text: bool) -> bool:
    """Whether every row is sound and holds the text it held before, for which there is room."""
    for row in range(len(rows.texts)):
        length, sampled = rows.lengths[row], rows.sampled[row]
        if not is_sound(length, sampled, rows.words[WIDTH]):
            return False
        if rows.texts[row] == 0:
            if sampled > 0:
                return False
            continue
        text = int64_array(rows.texts[row], TEXT_WORDS)
        if length > text[ROOM] or (by_text and not goes_on(text, _row(rows, row), sampled)):
            return False
    return True


@inlined
def _usable(tokens: TokenIds, size: int, words: Int64s) -> int:
    """How much of a draft: up to an end of text; nothing where an id is not the target's."""
    ends, usable = int32_array(words[ENDS], words[NUM_ENDS]), size
    for i in range(size):
        if tokens[i] < 0 or tokens[i] >= words[VOCAB_SIZE]:
            return 0
        if usable == size:
            for end in ends:
                if tokens[i] == end:
                    usable = i + 1
    return usable


@kernel
def _ask(frame: Frame, rows: Rows) -> tuple[int, int]:
    """Take over what is new and write a row of the frame for each that can have a draft: (how many, tokens new)."""
    words, num_asked, num_tokens = rows.words, 0, 0
    asked = int64_array(words[ASKED], len(rows.texts))
    for row in range(len(rows.texts)):
        sampled = rows.sampled[row]
        num_tokens += sampled
        if rows.texts[row] == 0:
            continue
        text = int64_array(rows.texts[row], TEXT_WORDS)
        take_over(text, _row(rows, row), sampled)
        if sampled == 0:
            continue
        wanted = frame.rows[num_asked]
        wanted[:] = 0
        wanted[0], wanted[1], wanted[3], wanted[4] = text[ADDRESS], text[LENGTH], text[STATE], text[PROMPT_LENGTH]
        # One token is always the target's own.
        wanted[2] = max(0, min(words[LIMIT], words[MAX_LENGTH] - text[LENGTH] - 1))
        wanted[7], wanted[8] = words[PRICE], 1
        asked[num_asked] = row
        num_asked += 1
    return num_asked, num_tokens


@kernel
def _write(frame: Frame, rows: Rows, num_asked: int, sizes: Int64s) -> int:
    """Of every row where its draft ends in ``out``, then the drafts, one after another; words written."""
    num_rows, words = len(rows.texts), rows.words
    asked, out = int64_array(words[ASKED], num_rows), int32_array(words[OUT], num_rows * (1 + MAX_DRAFT))
    at, number = num_rows, 0
    for row in range(num_rows):
        if number < num_asked and asked[number] == row:
            size = sizes[number]
            out[at : at + size] = frame.tokens[number, :size]
            at += size
            words[NUM_DRAFTS] += size > 0
            number += 1
        out[row] = at
    words[NUM_DRAFT_TOKENS] += at - num_rows
    return at


@kernel
def draft_rows(batch: int, snapshot: int, num_rows: int, seconds: float, is_seated: bool, by_text: bool) -> int:
    """Follow every row of a batch, draft for those that can have a draft, and cut the drafts to what pays.

    ``batch``, ``snapshot`` : addresses. ``seconds`` : since the last call's end, where it was for the same texts in the
    same rows, else 0. ``is_seated`` : the texts are known to be those of the rows. Where it is not, that is looked at,
    ``by_text`` also at their last tokens.

    Returns the words written to ``out`` : where each row's draft ends in it, then the drafts. NOT_SEATED where a row
    does not hold the text it held, NO_ROOM where the workspace has too few lanes; nothing was done then.
    """
    rows = _rows_at(batch, num_rows)
    words = rows.words
    frame = frame_at(words[WORKSPACE])
    if not is_seated and not _are_seated(rows, by_text):
        return NOT_SEATED
    if len(table_at(snapshot)) > len(frame.lanes):
        return NO_ROOM
    num_asked, num_tokens = _ask(frame, rows)
    if seconds > 0.0 and num_asked == num_rows and words[LAST_ASKED] == num_rows:
        observe_pass(words[COST], words[LAST_POSITIONS], False, num_tokens, seconds)
    price = token_price(words[COST], num_asked)
    float64_array(words[PRICE], 1)[0] = price if price > 0.0 else _PRICE_UNKNOWN
    propose_suffix(words[WORKSPACE], snapshot, words[MODEL], num_asked, words[LONGEST_MATCH], words[SHORTEST_MATCH])
    sizes, probabilities = int64_array(words[SIZES], num_asked), frame.probabilities[:num_asked]
    for number in range(num_asked):
        sizes[number] = _usable(frame.tokens[number], frame.results[number, 0], words)
    cut_rows(words[COST], probabilities, sizes, float64_array(words[SCRATCH], num_rows * MAX_DRAFT))
    size = _write(frame, rows, num_asked, sizes)
    words[NUM_PROPOSALS] += num_asked
    words[LAST_ASKED], words[LAST_POSITIONS] = num_asked, size
    return size
