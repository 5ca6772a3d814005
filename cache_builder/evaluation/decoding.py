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
from ssd.cost_model.pass_costs import best_num_steps
from ssd.cost_model.throughput import FORGETTING, ThroughputRecord, add_pass, cost_in_tokens, recent_pass
from ssd.drafting.acceptance_features import acceptance_tables_at
from ssd.drafting.acceptance_model import AcceptanceModel
from ssd.drafting.accepted_path import accepted_path
from ssd.drafting.draft_batch import draft_batch_at, is_valid_draft, path_probabilities
from ssd.drafting.draft_kernel import draft_row, reset_row
from ssd.drafting.draft_outcomes import learn_from_path
from ssd.drafting.draft_records import MAX_DRAFT, SOURCES, DraftRow
from ssd.drafting.draft_scratch import draft_scratch_at
from ssd.drafting.suffix_drafter import NO_SNAPSHOT, Workspace
from ssd.jit.addresses import (
    Address,
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
    """The parameters and the state of `OutputDecoder`, in a record that the compiled kernel reads by its address.

    Attributes:
        settings: The address of the `DraftBatch` with the options of drafting.
        model: The address of the acceptance model.
        costs: The address of float64[limit + 1], the costs of forward passes of 1, 2, ... tokens.
        marginal_costs: The address of float64[num_marginal_costs], the cost of each further draft token, see
            `marginal_costs`.
        rate: Tokens and costs of recent passes, with which the cost of a draft token is converted to output tokens.
        by_source: For each of `SOURCES`, the numbers of drafts, of draft tokens and of accepted draft tokens.
        row: The output that is replayed. All further fields are scratch memory.
    """

    settings: Address
    model: Address
    is_tree: Int64
    costs: Address
    marginal_costs: Address
    num_marginal_costs: Int64
    rate: ThroughputRecord
    by_source: Annotated[Int64s, np.int64, (NUM_SOURCES, 3)]
    token_costs: Annotated[Float64s, np.float64, MAX_DRAFT]
    gains: Annotated[Float64s, np.float64, MAX_DRAFT]
    path: Annotated[TokenIds, np.int32, MAX_DRAFT]
    row: DraftRow


_decoder_at = view_of(Decoder)


@kernel
def decode_output(at: int, snapshot: int, text_at: int, length: int, prompt_length: int, steps: TokenIds) -> int:
    """Replay one recorded output and return the number of decoding steps. ``at`` is the address of a `Decoder`.

    ``text_at`` is the address of the ``length`` token ids of the prompt and the output. ``steps``, int32[3 * output],
    receives three numbers for each step: draft tokens, accepted draft tokens, and the index of the draft's source. A
    step generates one token in addition to the accepted ones, so the last token of the text never counts as accepted.
    """
    decoder = _decoder_at(at)
    settings, row = draft_batch_at(decoder.settings), decoder.row
    reset_row(row, prompt_length)
    params, out, token_costs, rate = row.params, row.draft, decoder.token_costs, decoder.rate
    params.context, params.snapshot, params.model, params.token_costs = (
        text_at,
        snapshot,
        decoder.model,
        token_costs.ctypes.data,
    )
    params.limit, params.is_tree, params.num_token_costs = settings.limit, decoder.is_tree, decoder.num_marginal_costs
    text, costs = int32_array(text_at, length), float64_array(decoder.costs, settings.limit + 1)
    more = float64_array(decoder.marginal_costs, decoder.num_marginal_costs)
    position, number, agreeing = prompt_length, 0, 0
    while position < length:
        for i in range(decoder.num_marginal_costs):
            token_costs[i] = cost_in_tokens(rate, 1.0, costs[0], more[i])
        params.token_cost, params.context_length = token_costs[0], position
        draft_row(draft_scratch_at(settings.scratch), row, settings.max_match_length, settings.min_match_length)
        is_valid_draft(settings, row, 1.0)
        path_probabilities(out, 1.0, decoder.gains)
        out.size = best_num_steps(recent_pass(rate), 1.0, decoder.gains[: out.size], costs)
        tokens = out.tokens[: out.size]
        agreeing = accepted_path(tokens, out.parents, -1, out.is_tree == 1, text[position:], False, decoder.path)
        accepted = min(agreeing, length - 1 - position)
        if out.size > 0:
            decoder.by_source[out.source, 0] += 1
            decoder.by_source[out.source, 1] += out.size
            decoder.by_source[out.source, 2] += accepted
        steps[3 * number], steps[3 * number + 1], steps[3 * number + 2] = out.size, accepted, out.source
        add_pass(rate, min(agreeing + 1, length - position), costs[out.size])
        position += accepted + 1
        number += 1
    learn_from_path(row.state.scored, out.size, decoder.path[:agreeing], acceptance_tables_at(decoder.model))
    return number


Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class DecodingSteps:
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
    """Replays recorded outputs with the suffix drafter, to count the decoding steps that a server would need.

    It decodes one sequence at a time. Draft sources that need the target model, such as token recycling, are left out.
    The result is deterministic. In a request's first pass, a draft is only made if the acceptance probability of its
    first token is at least ``sure``. Must be used by one thread.
    """

    def __init__(
        self, curve: CostCurve, *, draft: DraftConfig, tree: bool = True, sure: float = FIRST_TOKEN_THRESHOLD
    ) -> None:
        limit = min(draft.num_speculative_tokens, MAX_DRAFT)
        self._costs = curve.costs_up_to(limit + 1)[1:]
        self._marginal_costs = marginal_costs(self._costs)
        self._workspace, self._model = Workspace(draft.max_match_length, draft.min_match_length), AcceptanceModel()
        settings = self._workspace.batch
        settings.limit, settings.first_threshold = limit, sure
        self._memory = Records(Decoder)
        self._decoder = decoder = self._memory[0]
        decoder.settings, decoder.model, decoder.is_tree = self._workspace.address, self._model.address, tree
        decoder.costs, decoder.marginal_costs, decoder.num_marginal_costs = (
            address(self._costs),
            address(self._marginal_costs),
            len(self._marginal_costs),
        )
        decoder.rate.forgetting = FORGETTING
        self._steps = np.zeros(0, np.int32)

    def decode(self, row: RecordedOutput, snapshot: Snapshot | None) -> DecodingSteps:
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
        return DecodingSteps(drafted, accepted, sources, took)

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


def marginal_costs(costs: Floats) -> Floats:
    """Return the costs of each further draft token, float64[max(1, n - 1)], from the costs of passes of 1 to n tokens.

    The returned costs never decrease from one token to the next: they are the increments of the greatest convex curve
    below ``costs``. The measured costs themselves may jump at one width. A draft would then end before the jump, even
    if the tokens after the jump were worth their cost.
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
