"""Replay of recorded outputs with the server's drafter but without a model, one call of a kernel per output."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Final

import numpy as np
import numpy.typing as npt

from cache_builder.evaluation.costs import CostCurve, Floats, flat_curve
from cache_builder.evaluation.log import RecordedOutput
from ssd.config import DraftConfig
from ssd.cost_model.calibration import FIRST_TOKEN_THRESHOLD
from ssd.cost_model.throughput import FORGETTING, ThroughputRecord, add_pass, combined_rate, cost_in_tokens, recent_pass
from ssd.drafting.acceptance_mixing import acceptance_tables_at
from ssd.drafting.acceptance_model import AcceptanceModel
from ssd.drafting.candidates import learn_from_path
from ssd.drafting.draft_kernel import DraftRow, draft_row, draft_scratch_at, reset_row
from ssd.drafting.draft_records import MAX_DRAFT, SOURCES, DraftRecord, parent_of
from ssd.drafting.suffix_drafter import NO_SNAPSHOT, Workspace, checked_lengths
from ssd.jit.addresses import (
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
from ssd.retrieval.snapshot import Snapshot

NUM_SOURCES: Final = len(SOURCES)


class Decoder(Record):
    """The parameters and the state of a replay of recorded outputs, in memory that the compiled kernel reads.

    Attributes:
        costs: float64[limit + 1], the costs of forward passes of 1, 2, ... tokens.
        more: float64[num_more], the minimum cost of each additional draft token, non-decreasing.
        sure: The acceptance probability that the first token of an output's first draft must have.
        by_source: For each of `SOURCES`, the numbers of drafts, of their tokens and of their accepted tokens.
        row: The output that is replayed. All further fields are scratch memory.
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
    rate: ThroughputRecord
    by_source: Annotated[Int64s, np.int64, (NUM_SOURCES, 3)]
    prices: Annotated[Float64s, np.float64, MAX_DRAFT]
    chances: Annotated[Float64s, np.float64, MAX_DRAFT]
    agreed: Annotated[Int64s, np.int64, MAX_DRAFT]
    depths: Annotated[Int64s, np.int64, MAX_DRAFT]
    path: Annotated[TokenIds, np.int32, MAX_DRAFT]
    row: DraftRow


_decoder_at = view_of(Decoder)


@kernel
def _best_num_tokens(decoder: Decoder, out: DraftRecord) -> int:
    """Return the number of draft tokens that maximizes the expected output tokens per cost of the verification pass."""
    costs, recent = float64_array(decoder.costs, decoder.limit + 1), recent_pass(decoder.rate)
    gain, best, most = 0.0, 0, combined_rate(recent, 1.0, costs[0])
    for node in range(out.size):
        parent = parent_of(out, node)
        decoder.chances[node] = out.probabilities[node] * (decoder.chances[parent] if parent >= 0 else 1.0)
        gain += decoder.chances[node]
        together = combined_rate(recent, 1.0 + gain, costs[node + 1])
        if together > most:
            best, most = node + 1, together
    return best


@kernel
def _num_accepted(decoder: Decoder, out: DraftRecord, size: int, text: TokenIds, position: int) -> int:
    """Return how many of a draft's first ``size`` tokens agree with the recorded text from ``position`` on.

    The accepted path through the draft tree is written to ``decoder.path``.
    """
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
    """Replay one recorded output and return the number of decoding steps. Called with addresses of records and arrays.

    ``text_at`` refers to the ``length`` token ids of the prompt and the output. ``steps`` (int32[3 * output]) receives
    for each step the numbers of drafted and accepted tokens and the draft's source. A step emits one more token than it
    accepts, so the last token of the text never counts as accepted.
    """
    decoder = _decoder_at(at)
    frame, row = draft_scratch_at(decoder.workspace), decoder.row
    reset_row(row, prompt_length)
    params, out, prices = row.params, row.draft, decoder.prices
    params.context, params.snapshot, params.model, params.token_costs = (
        text_at,
        snapshot,
        decoder.model,
        prices.ctypes.data,
    )
    params.limit, params.is_tree, params.num_token_costs = decoder.limit, decoder.is_tree, decoder.num_more
    text, costs = int32_array(text_at, length), float64_array(decoder.costs, decoder.limit + 1)
    more = float64_array(decoder.more, decoder.num_more)
    position, number, kept, agreeing = prompt_length, 0, 0, 0
    while position < length:
        for i in range(decoder.num_more):
            prices[i] = cost_in_tokens(decoder.rate, 1.0, costs[0], more[i])
        params.token_cost, params.context_length = prices[0], position
        draft_row(frame, row, decoder.longest_match, decoder.shortest_match)
        is_kept = out.size > 0 and (number > 0 or out.probabilities[0] >= decoder.sure)
        kept = _best_num_tokens(decoder, out) if is_kept else 0
        agreeing = _num_accepted(decoder, out, kept, text, position)
        accepted = min(agreeing, length - 1 - position)
        if kept > 0:
            decoder.by_source[out.source, 0] += 1
            decoder.by_source[out.source, 1] += kept
            decoder.by_source[out.source, 2] += accepted
        steps[3 * number], steps[3 * number + 1], steps[3 * number + 2] = kept, accepted, out.source
        add_pass(decoder.rate, min(agreeing + 1, length - position), costs[kept])
        position += accepted + 1
        number += 1
    learn_from_path(row.state.scored, kept, decoder.path[:agreeing], acceptance_tables_at(decoder.model))
    return number


Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Decoded:
    """The decoding steps of one replayed output.

    Attributes:
        drafted: int32[s], the number of draft tokens of each step.
        accepted: int32[s], the number of accepted draft tokens of each step.
        sources: int32[s], the index in `SOURCES` of the first draft token's source.
        ns: The processor time of the replay in nanoseconds.
    """

    drafted: Ints
    accepted: Ints
    sources: Ints
    ns: int


class OutputDecoder:
    """Replays recorded outputs with the suffix drafter, to count the steps that a server would need. Deterministic.

    It decodes like an engine that runs one sequence at a time, without drafts that depend on a running target model,
    such as token recycling. ``sure`` is the minimum acceptance probability of the first draft token in a request's
    first pass. Must be used by one thread.
    """

    def __init__(
        self, curve: CostCurve, *, draft: DraftConfig, tree: bool = True, sure: float = FIRST_TOKEN_THRESHOLD
    ) -> None:
        limit = min(draft.num_speculative_tokens, MAX_DRAFT)
        self._costs = curve.costs_up_to(limit + 1)[1:]
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

    def decode(self, row: RecordedOutput, snapshot: Snapshot | None) -> Decoded:
        """Replay an output and return its decoding steps. If ``snapshot`` is None, no cache is searched."""
        text, searched = row.text(), snapshot or NO_SNAPSHOT
        self._workspace.reserve(searched)
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
        """Map each draft source to its numbers of drafts, draft tokens and accepted draft tokens so far."""
        counts = self._memory.array[0]["by_source"].tolist()
        assert len(counts) == NUM_SOURCES
        return {name: (each[0], each[1], each[2]) for name, each in zip(SOURCES, counts, strict=True) if each[0]}


@cache
def warm_up() -> None:
    """Compile the replay kernel, so that the measured time of the first output does not include the compilation."""
    row = RecordedOutput(np.array([1, 2], np.int32), np.array([1, 2], np.int32))
    OutputDecoder(flat_curve(2), draft=DraftConfig()).decode(row, None)


def rising(costs: Floats) -> Floats:
    """Return the increments of the greatest convex curve below ``costs``: float64[max(1, n - 1)].

    The increments are the minimum costs of further draft tokens. A measured curve has steps and noise, and a longer
    draft may pay off beyond a steep part of the curve.
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
