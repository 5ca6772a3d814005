"""The kernel of the row drafter: everything that one step of another engine asks for, in one call."""

from __future__ import annotations

from typing import Final, NamedTuple

from ssd.compiled.addresses import Int64s, TokenIds, float64_array, inlined, int32_array, int64_array, kernel
from ssd.compiled.records import Address, Int64, Record, view_of
from ssd.drafting.suffix.ask import asks_at
from ssd.drafting.suffix.draft_record import MAX_DRAFT, drafts_at
from ssd.drafting.suffix.propose import propose_suffix
from ssd.drafting.suffix.workspace import Frame, frame_at
from ssd.pricing.pass_costs import cut_rows, observe_pass, token_price

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

    The engine's: ``rows`` : int32, row i begins at ``stride * i`` and holds at most ``width`` tokens. ``lengths`` :
    int32, tokens of each. Ours, of each row: ``num_sampled`` : int64, how many of its tokens are of this step, 0 for a
    row that is still prefilling. ``texts`` : int64, address of its TextRecord, 0 for none. ``asked``, ``sizes``,
    ``probabilities``, ``best_first`` : scratch, of the drafts asked for. ``out`` : int32, see ``draft_rows``.

    ``cost`` : see `PassCosts`. ``ends`` : int32[num_ends], the ids of ends of text. ``last_asked``,
    ``last_positions`` : rows and words of the last call.
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
        asks[number].price = price if price > 0.0 else _PRICE_UNKNOWN
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
