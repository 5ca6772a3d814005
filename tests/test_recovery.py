"""No model that can be restored keeps a drafter from drafting what comes again and again."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd.drafting.acceptance_features import DEPTH_BUCKETS, ENTRIES, KNOTS, NUM_LEARNED
from ssd.drafting.acceptance_mixing import _KNOT_RATE
from ssd.drafting.acceptance_model import AcceptanceModel
from ssd.drafting.protocol import DraftRequest
from ssd.drafting.suffix_drafter import SuffixDrafter
from ssd.retrieval.cache_state import LearnedState
from tests.reference import drafting as reference

_HEADER_BYTES = len(AcceptanceModel().to_bytes()) - 4 * (2 * ENTRIES + NUM_LEARNED) - 8
"""Its last eight say how many candidates were learned from."""
_NUM_WEIGHTS = NUM_LEARNED - DEPTH_BUCKETS * KNOTS
_OUTPUT_TOKENS = 120
_PROMPT_TOKENS = 40
_REQUESTS = 20
"""Requests of _OUTPUT_TOKENS tokens after which a drafter has drafted, at its price of 0.1, whatever was restored."""
_FAST_AGAIN = 60
"""Requests after which it drafts at every pass and nearly all of them: from the worst of what could be restored."""
_MOST_UNDRAFTED = math.ceil(KNOTS / (_KNOT_RATE * 0.9**2))
"""At a price of 0.1, how many candidates in a row must come before one is drafted, whatever was learned before.

Each that comes while its chance is below the price is off by 0.9 or more, and more than that share of what the curve is
moved by falls to a knot that can still rise; together its knots cannot rise by more than KNOTS. So no model is beyond
recovery.
"""

assert _MOST_UNDRAFTED <= _REQUESTS * _OUTPUT_TOKENS


def stored(chances: object, counts: object, weights: object, knots: object, num_learned: float = 0.0) -> bytes:
    """Bytes with a right checksum; each argument a number or as many as there are."""
    sizes = (ENTRIES, ENTRIES, _NUM_WEIGHTS, DEPTH_BUCKETS * KNOTS)
    numbers = [
        np.broadcast_to(np.asarray(each, np.float32), size)
        for each, size in zip((chances, counts, weights, knots), sizes, strict=True)
    ]
    header = AcceptanceModel().to_bytes()[: _HEADER_BYTES - 8] + np.float64(num_learned).tobytes()
    body = header + np.concatenate(numbers).astype("<f4").tobytes()
    return body + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")


NOTHING_STORED = reference.make_snapshot([])


def drafter_with(kept: bytes) -> tuple[SuffixDrafter, LearnedState]:
    """A drafter, and a namespace that restores ``kept``."""
    return SuffixDrafter(), LearnedState(kept)


def undrafted(
    drafter: SuffixDrafter, learned: LearnedState, name: str, text: npt.NDArray[np.int32], *, tree: bool
) -> tuple[int, int]:
    """Passes of one request without a draft, and all its passes; ``text`` is what the target says."""
    length, num_passes, num_without = _PROMPT_TOKENS, 0, 0
    while length < len(text):
        request = DraftRequest(
            name, text[:length], _PROMPT_TOKENS, NOTHING_STORED, 16, allow_tree=tree, learned=learned
        )
        draft = drafter.propose([request])[0]
        num_passes += 1
        num_without += len(draft.token_ids) == 0
        place, accepted = -1, 0
        parents = range(-1, len(draft.token_ids) - 1) if draft.parents is None else draft.parents.tolist()
        for node, (token, parent) in enumerate(zip(draft.token_ids.tolist(), parents, strict=True)):
            if parent == place and length + accepted < len(text) and text[length + accepted] == token:
                place, accepted = node, accepted + 1
        length += accepted + 1
    drafter.finish(name)
    return num_without, num_passes


def repeating(period: npt.NDArray[np.integer]) -> npt.NDArray[np.int32]:
    return np.resize(period, _PROMPT_TOKENS + _OUTPUT_TOKENS).astype(np.int32)


TINY = float(np.finfo(np.float32).tiny)
ALMOST_ONE = float(np.nextafter(np.float32(1), np.float32(0)))
CHANCES = [TINY, 1e-4, 0.5, ALMOST_ONE]
COUNTS = [0.0, 2.0, 3e38]
WEIGHTS = [-3e38, -999.0, -1.0, 0.0, 1.0, 999.0, 3e38]


@st.composite
def buffers(draw: st.DrawFn) -> bytes:
    """Any numbers: one for all, drawn from few, or all different."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))

    def numbers(extremes: list[float], size: int, scale: float, low: float) -> object:
        kind = draw(st.sampled_from(["one", "few", "random"]))
        if kind == "one":
            return draw(st.sampled_from(extremes))
        if kind == "few":
            return random.choice(extremes, size)
        return low + scale * random.random(size)

    return stored(
        numbers(CHANCES, ENTRIES, 1.0, 0.0),
        numbers(COUNTS, ENTRIES, 1e6, 0.0),
        numbers(WEIGHTS, _NUM_WEIGHTS, 200.0, -100.0),
        numbers(CHANCES, DEPTH_BUCKETS * KNOTS, 1.0, 0.0),
        draw(st.sampled_from([0.0, 2.0**53 - 1])),
    )


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("weights", [-999.0, 0.0, 999.0])
@pytest.mark.parametrize("chance", [TINY, ALMOST_ONE])
@pytest.mark.parametrize("knot", [TINY, ALMOST_ONE])
def test_text_that_repeats_is_drafted_again_whatever_was_restored(
    chance: float, weights: float, knot: float, tree: bool
) -> None:
    drafter, learned = drafter_with(stored(chance, 3e38, weights, knot))
    text = repeating(np.arange(7) + 10)
    all_without = sum(undrafted(drafter, learned, str(n), text, tree=tree)[0] for n in range(_FAST_AGAIN))
    assert all_without <= _MOST_UNDRAFTED
    num_without, num_passes = undrafted(drafter, learned, "last", text, tree=tree)
    assert num_without == 0
    assert num_passes <= _OUTPUT_TOKENS / 10


@given(buffers(), st.lists(st.integers(0, 5), min_size=1, max_size=24), st.booleans())
@settings(max_examples=60)
def test_any_numbers_with_a_right_checksum_are_recovered_from(kept: bytes, period: list[int], tree: bool) -> None:
    drafter, learned = drafter_with(kept)
    text = repeating(np.array(period))
    for number in range(_REQUESTS):
        undrafted(drafter, learned, str(number), text, tree=tree)
    num_without, num_passes = undrafted(drafter, learned, "last", text, tree=tree)
    assert num_without < num_passes, "nothing was drafted"
    assert num_passes < _OUTPUT_TOKENS


@given(buffers(), st.integers(0, 2**31), st.integers(1, 255))
@settings(max_examples=40)
def test_what_is_restored_is_what_would_be_kept_and_damaged_bytes_are_refused(kept: bytes, at: int, flip: int) -> None:
    restored = AcceptanceModel.from_bytes(kept).to_bytes()
    assert AcceptanceModel.from_bytes(restored).to_bytes() == restored
    changed = bytearray(restored)
    changed[at % len(changed)] ^= flip
    for damaged in (bytes(changed), restored[: at % len(restored)], restored + b"x"):
        with pytest.raises(ValueError, match="acceptance model"):
            AcceptanceModel.from_bytes(damaged)


@pytest.mark.parametrize("place", range(5))
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_is_refused(value: float, place: int) -> None:
    numbers = [0.5, 2.0, 0.0, 0.5, 0.0]
    numbers[place] = value
    with pytest.raises(ValueError, match="contains invalid numbers"):
        AcceptanceModel.from_bytes(stored(*numbers))


def test_a_tree_that_is_not_grown_teaches() -> None:
    """Nothing is worth half of such a price."""
    text, drafter = repeating(np.arange(7) + 10), SuffixDrafter()
    for length in range(_PROMPT_TOKENS, _PROMPT_TOKENS + 3):
        request = DraftRequest("a", text[:length], 7, None, 16, token_costs=np.array([2.0]), allow_tree=True)
        assert len(drafter.propose([request])[0].token_ids) == 0
        assert drafter.model_of(None).num_learned == length - _PROMPT_TOKENS


def test_what_would_follow_a_leaf_of_a_tree_teaches() -> None:
    """One token is drafted of text that repeats; the next one, which is not worth its price, came as well."""
    text, drafter = repeating(np.arange(7) + 10), SuffixDrafter()
    token_costs = np.array([0.01, 2.0])
    for length in (_PROMPT_TOKENS, _PROMPT_TOKENS + 2):
        request = DraftRequest("a", text[:length], 7, None, 16, token_costs=token_costs, allow_tree=True)
        assert len(drafter.propose([request])[0].token_ids) == 1
    assert drafter.model_of(None).num_learned == 2
