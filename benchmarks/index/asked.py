"""What is asked of an index, how long a proposal takes, and the same contexts asked of other people's drafters."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.child import ChildError
from benchmarks.peers import Peer
from ssd.config import DraftConfig
from ssd.drafting import Drafter, DraftRequest, make_drafter
from ssd.retrieval.search import longest_match
from ssd.retrieval.segment import Segment, unpack
from ssd.retrieval.snapshot import Snapshot

Tokens = npt.NDArray[np.int32]

CONTEXT_TOKENS = 64
DRAFT_TOKENS = 10
MOST_KNOWN = 10
"""Of a broken context so many of the last tokens occur, or fewer."""

_ATTEMPTS = 50


@dataclass(frozen=True, slots=True)
class Context:
    """A context and what is known of it.

    ``tokens`` : int32[CONTEXT_TOKENS]. ``known`` : how many of the last ones occur, one after the other; no longer tail
    does. ``following`` : int32[DRAFT_TOKENS], what stands next at the place it was taken from.
    """

    tokens: Tokens
    known: int
    following: Tokens

    @property
    def is_present(self) -> bool:
        """All of it occurs."""
        return self.known == CONTEXT_TOKENS


def window(segment: Segment, start: int, stop: int) -> Tokens:
    """int32: tokens [start, stop) of a segment, without unpacking the others."""
    return unpack(segment.text[segment.width * start :], stop - start, segment.width)


def sample_contexts(snapshot: Snapshot, count: int, random: np.random.Generator) -> list[Context]:
    """``count`` contexts from random places of the segments, in turn present and broken.

    A broken one has the token before its last 1 to MOST_KNOWN replaced, so that no longer tail occurs anywhere. Raises
    AssertionError when the text offers none.
    """
    bounds = np.cumsum([len(segment) for segment in snapshot.segments])
    largest = _largest_id(snapshot, random)
    contexts: list[Context] = []
    for _ in range(1000 + 100 * count):
        if len(contexts) == count:
            return contexts
        place = int(random.integers(bounds[-1]))
        segment = snapshot.segments[int(np.searchsorted(bounds, place, side="right"))]
        text = _stretch(segment, CONTEXT_TOKENS + DRAFT_TOKENS, random)
        if text is None:
            continue
        tokens, following = text[:CONTEXT_TOKENS].copy(), text[CONTEXT_TOKENS:].copy()
        known = CONTEXT_TOKENS
        if len(contexts) % 2:
            known = int(random.integers(1, MOST_KNOWN + 1))
            if not _break(tokens, known, largest, snapshot, random):
                continue
        contexts.append(Context(tokens, known, following))
    if len(contexts) < count:
        raise AssertionError(f"only {len(contexts)} of {count} contexts were found in {bounds[-1]} tokens")
    return contexts


def _stretch(segment: Segment, length: int, random: np.random.Generator) -> Tokens | None:
    """``length`` tokens from a random place; None when a separator is among them."""
    if len(segment) <= length:
        return None
    start = int(random.integers(0, len(segment) - length))
    text = window(segment, start, start + length)
    return None if text.min() < 0 else text


def _largest_id(snapshot: Snapshot, random: np.random.Generator) -> int:
    """About the largest token id there is: of a few thousand tokens of each segment."""
    found = 0
    for segment in snapshot.segments:
        start = int(random.integers(max(1, len(segment) - 4096)))
        found = max(found, int(window(segment, start, min(len(segment), start + 4096)).max()))
    return found


def _break(tokens: Tokens, known: int, largest: int, snapshot: Snapshot, random: np.random.Generator) -> bool:
    for _ in range(_ATTEMPTS):
        tokens[-known - 1] = random.integers(0, largest + 1)
        if longest_match(snapshot, tokens[-known - 1 :], known + 1).length == known:
            return True
    return False  # anything precedes these tokens somewhere


_CHECKED_MATCH_TOKENS = DraftConfig().max_match_length
_LEAST_AGREEING = 0.9


class Prober:
    """Asks a drafter and takes the time."""

    def __init__(self) -> None:
        self.drafter: Drafter = make_drafter("ssd", DraftConfig(num_speculative_tokens=DRAFT_TOKENS))
        self._number = 0
        warm_up = getattr(self.drafter, "warm_up", None)
        if warm_up is not None:
            warm_up()

    def one(self, tokens: Tokens, snapshot: Snapshot) -> tuple[float, Tokens]:
        """Microseconds of one proposal by a new request, and its draft."""
        self._number += 1
        request = DraftRequest(f"probe-{self._number}", tokens, len(tokens), snapshot, DRAFT_TOKENS)
        began = time.perf_counter_ns()
        drafts = self.drafter.propose([request])
        took = time.perf_counter_ns() - began
        self.drafter.finish(request.request_id)
        return took / 1e3, drafts[0].token_ids


def percentile(values: Sequence[float] | npt.NDArray[np.float64], q: float) -> float:
    """Rounded to a tenth; 0.0 of nothing."""
    return round(float(np.percentile(np.asarray(values), q)), 1) if len(values) else 0.0


def measure(snapshot: Snapshot, random: np.random.Generator, *, passes: int = 3, count: int = 2000) -> dict[str, Any]:
    """Microseconds of a call from Python: percentiles of a pass of ``count`` new contexts, the median over passes.

    Raises AssertionError when drafts are not what was stored.
    """
    prober, cold, kinds = Prober(), list[list[float]](), {True: list[float](), False: list[float]()}
    unique = agreeing = 0
    gc.collect()
    gc.disable()
    try:
        for _ in range(passes):
            cold.append([])
            for context in sample_contexts(snapshot, count, random):
                took, draft = prober.one(context.tokens, snapshot)
                cold[-1].append(took)
                kinds[context.is_present].append(took)
                if context.is_present and longest_match(snapshot, context.tokens, _CHECKED_MATCH_TOKENS).support == 1:
                    unique += 1
                    agreeing += np.array_equal(draft, context.following[: len(draft)])
    finally:
        gc.enable()
    if agreeing < _LEAST_AGREEING * unique:
        raise AssertionError(f"of {unique} contexts that stand in one place only {agreeing} drafts are what follows")
    p50, p99 = (float(np.median([np.percentile(times, q) for times in cold])) for q in (50, 99))
    return {
        "propose_us_p50": round(p50, 1),
        "propose_us_p99": round(p99, 1),
        "present_us_p50": percentile(kinds[True], 50),
        "broken_us_p50": percentile(kinds[False], 50),
        "checked_drafts": unique,
        "checked_drafts_equal": int(agreeing),
    }


_ROUNDS = 3
_CONTEXTS = 1000
_WARM_UP = 64

TREE_DEPTHS = (24, 64)
"""vLLM's default for the suffix tree, and its own."""
WAYS: dict[str, dict[str, dict[str, int | str]]] = {
    "arctic": {f", depth {depth}": {"depth": depth} for depth in TREE_DEPTHS},
    "sglang-ngram": {"": {"draft_tokens": DRAFT_TOKENS + 1}},
    "llama-cpp": {", lookup": {"type": "lookup"}},
}
"""Of a peer, what is put behind its name and the options of it; no options where it is not listed."""


def compare(
    names: Sequence[str],
    snapshot: Snapshot,
    our_bytes: float,
    sequences: Sequence[Tokens],
    random: np.random.Generator,
) -> dict[str, dict[str, Any]]:
    """Each peer beside ours: bytes a token, tokens inserted a second, microseconds of a proposal.

    ``snapshot``, of so many bytes a token, holds ``sequences``. Every round asks ours and then the peer the same new
    contexts; medians over rounds, ratios within a round. A peer that cannot be used has a reason under "unavailable".
    """
    figures: dict[str, dict[str, Any]] = {}
    for name in names:
        for suffix, options in WAYS.get(name, {"": {}}).items():
            try:
                with Peer(name, **options) as peer:
                    figures[f"{name}{suffix}"] = _beside(peer, snapshot, our_bytes, sequences, random)
            except ChildError as error:
                figures[f"{name}{suffix}"] = {"unavailable": str(error).splitlines()[0]}
    return figures


def _beside(
    peer: Peer, snapshot: Snapshot, our_bytes: float, sequences: Sequence[Tokens], random: np.random.Generator
) -> dict[str, Any]:
    prober, rounds = Prober(), list[dict[str, float]]()
    insertion = peer.insert(sequences)
    for count in (_WARM_UP, *[_CONTEXTS] * _ROUNDS):
        contexts = sample_contexts(snapshot, count, random)
        our_us = np.array([prober.one(context.tokens, snapshot)[0] for context in contexts])
        their_us = peer.propose([context.tokens for context in contexts], DRAFT_TOKENS).us
        present = np.array([context.is_present for context in contexts])
        rounds.append({})
        for kind, chosen in (("present", present), ("broken", ~present)):
            ours, theirs = float(np.median(our_us[chosen])), float(np.median(their_us[chosen]))
            rounds[-1] |= {f"propose_us_{kind}_p50": theirs, f"propose_{kind}_times_ours": theirs / ours}
    figures: dict[str, Any] = {"versions": peer.versions, "tokens": insertion.num_tokens}
    if insertion.num_tokens:
        bytes_per_token = insertion.resident_growth_bytes / insertion.num_tokens
        figures |= {
            "bytes_per_token": round(bytes_per_token, 1),
            "bytes_per_token_times_ours": round(bytes_per_token / our_bytes, 1),
            "insert_tokens_per_s": round(insertion.num_tokens / insertion.seconds),
        }
    return figures | {key: round(float(np.median([each[key] for each in rounds[1:]])), 2) for key in rounds[0]}
