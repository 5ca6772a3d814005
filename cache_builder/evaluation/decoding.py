"""Recorded outputs decoded by the servers' own drafter, with no model: a kernel call each."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Final

import numpy as np
import numpy.typing as npt

from cache_builder.evaluation.costs import CostCurve, Floats, flat
from cache_builder.evaluation.log import Row
from ssd.compiled.addresses import (
    Address,
    Float64,
    Float64s,
    Int64,
    Int64s,
    Record,
    Records,
    TokenIds,
    address,
    float64_array,
    int32_array,
    kernel,
    view_of,
)
from ssd.config import DraftConfig
from ssd.drafting.acceptance import model_at
from ssd.drafting.acceptance_model import AcceptanceModel
from ssd.drafting.ask import MAX_DRAFT, SOURCES, DraftRecord, parent_of
from ssd.drafting.drafter import NO_SNAPSHOT, Workspace, checked_lengths
from ssd.drafting.judge import learn_from_path
from ssd.drafting.propose import DraftRow, begin_row, draft_row, frame_at
from ssd.pricing.calibration import SURE
from ssd.pricing.rate import FORGETTING, RateRecord, add_pass, joint_rate, price_at, recent_pass
from ssd.retrieval.snapshot import Snapshot

NUM_SOURCES: Final = len(SOURCES)


class Decoder(Record):
    """How outputs are decoded, what passes gave of late, and what all steps come to.

    ``costs`` : float64[limit + 1], of a pass of 1, 2, ... tokens; ``more`` : float64[num_more], what each drafted token
    adds at least, not falling. ``sure`` : chance of its first token that the draft of an output's first pass must have.

    ``by_source`` : of each of `SOURCES` drafts that were verified, their tokens, accepted ones. ``row`` : of the
    output. All else is scratch.
    """

    workspace: Address
    model: Address
    limit: Int64
    is_tree: Int64
    longest_match: Int64
    shortest_match: Int64
    sure: Float64
    costs: Address
    more: Address
    num_more: Int64
    rate: RateRecord
    by_source: Annotated[Int64s, np.int64, (NUM_SOURCES, 3)]
    prices: Annotated[Float64s, np.float64, MAX_DRAFT]
    chances: Annotated[Float64s, np.float64, MAX_DRAFT]
    agreed: Annotated[Int64s, np.int64, MAX_DRAFT]
    depths: Annotated[Int64s, np.int64, MAX_DRAFT]
    path: Annotated[TokenIds, np.int32, MAX_DRAFT]
    row: DraftRow


_decoder_at = view_of(Decoder)


@kernel
def _num_paying(decoder: Decoder, out: DraftRecord) -> int:
    """How many of the draft's tokens are verified: as many as give most, see `Rate.best`."""
    costs, recent = float64_array(decoder.costs, decoder.limit + 1), recent_pass(decoder.rate)
    gain, best, most = 0.0, 0, joint_rate(recent, 1.0, costs[0])
    for node in range(out.size):
        parent = parent_of(out, node)
        decoder.chances[node] = out.probabilities[node] * (decoder.chances[parent] if parent >= 0 else 1.0)
        gain += decoder.chances[node]
        together = joint_rate(recent, 1.0 + gain, costs[node + 1])
        if together > most:
            best, most = node + 1, together
    return best


@kernel
def _num_agreeing(decoder: Decoder, out: DraftRecord, size: int, text: TokenIds, position: int) -> int:
    """Compare the first ``size`` tokens with the text from ``position`` on; the agreeing ones are left in ``path``."""
    num_left, longest, last = len(text) - position, 0, -1
    for node in range(size):
        parent = parent_of(out, node)
        depth = 0 if parent < 0 else decoder.depths[parent] + 1
        decoder.depths[node] = depth
        before = 0 if parent < 0 else decoder.agreed[parent]
        if before < 0 or depth >= num_left or out.tokens[node] != text[position + depth]:
            decoder.agreed[node] = -1
            continue
        decoder.agreed[node] = depth + 1
        if depth + 1 > longest:
            longest, last = depth + 1, node
    for depth in range(longest - 1, -1, -1):
        decoder.path[depth] = last
        last = parent_of(out, last)
    return longest


@kernel
def decode_output(at: int, snapshot: int, text_at: int, length: int, prompt_length: int, steps: TokenIds) -> int:
    """Decode the text at an address from ``prompt_length`` on; the number of steps.

    ``snapshot`` : address of the index. ``steps`` : int32[3 * output], of each step the tokens drafted, those accepted
    and the draft's source. A step emits the accepted tokens and one more: the text's last is never counted as accepted.
    """
    decoder = _decoder_at(at)
    frame, row = frame_at(decoder.workspace), decoder.row
    begin_row(row, prompt_length)
    ask, out, prices = row.ask, row.draft, decoder.prices
    ask.context, ask.snapshot, ask.model, ask.prices = text_at, snapshot, decoder.model, prices.ctypes.data
    ask.limit, ask.is_tree, ask.num_prices = decoder.limit, decoder.is_tree, decoder.num_more
    text, costs = int32_array(text_at, length), float64_array(decoder.costs, decoder.limit + 1)
    more = float64_array(decoder.more, decoder.num_more)
    position, number, kept, agreeing = prompt_length, 0, 0, 0
    while position < length:
        for i in range(decoder.num_more):
            prices[i] = price_at(decoder.rate, 1.0, costs[0], more[i])
        ask.price, ask.context_length = prices[0], position
        draft_row(frame, row, decoder.longest_match, decoder.shortest_match)
        is_kept = out.size > 0 and (number > 0 or out.probabilities[0] >= decoder.sure)
        kept = _num_paying(decoder, out) if is_kept else 0
        agreeing = _num_agreeing(decoder, out, kept, text, position)
        accepted = min(agreeing, length - 1 - position)
        if kept > 0:
            decoder.by_source[out.source, 0] += 1
            decoder.by_source[out.source, 1] += kept
            decoder.by_source[out.source, 2] += accepted
        steps[3 * number], steps[3 * number + 1], steps[3 * number + 2] = kept, accepted, out.source
        add_pass(decoder.rate, min(agreeing + 1, length - position), costs[kept])
        position += accepted + 1
        number += 1
    learn_from_path(row.state.judged, kept, decoder.path[:agreeing], model_at(decoder.model))
    return number


Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Decoded:
    """The steps of one output, in order, and the nanoseconds of a processor that they took here.

    ``drafted``, ``accepted``, ``sources`` : int32[s]; accepted leaves out the target's own token of each step, sources
    are numbers in `SOURCES`, of the draft's first token.
    """

    drafted: Ints
    accepted: Ints
    sources: Ints
    ns: int


class OutputDecoder:
    """Decodes recorded outputs with the suffix drafter at the prices of a cost curve.

    As one sequence alone is decoded by an engine that learns nothing but text and acceptance: what only a running
    target tells (its other candidates, its times) is not there. Deterministic. Owned by one thread.
    """

    def __init__(self, curve: CostCurve, *, draft: DraftConfig, tree: bool = True, sure: float = SURE) -> None:
        """``curve`` : what passes take. ``sure`` : see `SURE`; 0 drafts for the first pass as for all."""
        limit = min(draft.num_speculative_tokens, MAX_DRAFT)
        self._costs = curve.upto(limit + 1)[1:]
        self._more = rising(self._costs)
        self._workspace, self._model = Workspace(), AcceptanceModel()
        self._memory = Records(Decoder)
        self._decoder = decoder = self._memory[0]
        decoder.workspace, decoder.model = self._workspace.address, self._model.address
        decoder.limit, decoder.is_tree, decoder.sure = limit, tree, sure
        decoder.longest_match, decoder.shortest_match = checked_lengths(draft.max_match_length, draft.min_match_length)
        decoder.costs, decoder.more, decoder.num_more = address(self._costs), address(self._more), len(self._more)
        decoder.rate.forgetting = FORGETTING
        self._steps = np.zeros(0, np.int32)

    def decode(self, row: Row, snapshot: Snapshot | None) -> Decoded:
        """The steps of an output over an index; None: over none. O(output) drafts."""
        text, searched = row.text(), snapshot or NO_SNAPSHOT
        self._workspace.room_for(searched)
        if len(self._steps) < 3 * len(row.output):
            self._steps = np.zeros(6 * len(row.output), np.int32)
        began = time.thread_time_ns()
        count = decode_output(
            self._memory.address,
            searched.address,
            address(text),
            len(text),
            len(row.context),
            self._steps,
        )
        took = time.thread_time_ns() - began
        drafted, accepted, sources = self._steps[: 3 * count].reshape(-1, 3).T.copy()
        return Decoded(drafted, accepted, sources, took)

    def by_source(self) -> dict[str, tuple[int, int, int]]:
        """Of each source that a draft began with: drafts, their tokens, accepted ones, of all outputs so far."""
        counts = self._memory.array[0]["by_source"].tolist()
        assert len(counts) == NUM_SOURCES
        return {name: (each[0], each[1], each[2]) for name, each in zip(SOURCES, counts, strict=True) if each[0]}


@cache
def warm_up() -> None:
    """Compile the kernel, or read it from its file, once in a process: else the first output's time has that in it."""
    row = Row(np.array([1, 2], np.int32), np.array([1, 2], np.int32))
    OutputDecoder(flat(2), draft=DraftConfig()).decode(row, None)


def rising(costs: Floats) -> Floats:
    """What each token more costs on the greatest convex curve below ``costs``: prices never fall along a draft.

    float64[max(1, n - 1)] of float64[n]. A measured curve has steps and noise; a draft may pay beyond a steep part.
    """
    corners = [0]
    for width in range(1, len(costs)):
        while len(corners) > 1 and _slope(costs, *corners[-2:]) >= _slope(costs, corners[-1], width):
            corners.pop()
        corners.append(width)
    below = np.interp(np.arange(len(costs)), corners, costs[corners])
    return np.maximum(0.0, np.diff(below)) if len(costs) > 1 else np.zeros(1)


def _slope(costs: Floats, begin: int, end: int) -> float:
    return float(costs[end] - costs[begin]) / (end - begin)
