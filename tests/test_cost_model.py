"""Prices: what passes take is found, drafts are cut where it pays most, promises are taken for what they are worth."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd.cost_model.calibration import BACKOFF_AFTER, AcceptanceCalibration, DraftBackoff, PlattScaling
from ssd.cost_model.cost_model import CostModel
from ssd.cost_model.pass_costs import KNEES, add_observation, best_num_steps, fit_nonnegative
from ssd.cost_model.throughput import AcceptanceRates, MarginalGain, StepThroughput
from ssd.drafting.draft_batch import cut_drafts
from ssd.drafting.draft_records import DraftRecord
from ssd.drafting.protocol import Draft
from ssd.engine.drafter_backends import write_draft
from ssd.engine.pass_timing import plausible_times
from ssd.jit.addresses import Records, dtype_of, kernel
from tests.reference import cost_model as slow
from tests.reference.drafts import promise_tested

Floats = npt.NDArray[np.float64]


def learned(fixed: float, per_position: float, wide: float = 0.0) -> CostModel:
    prices = CostModel()
    for rows, width in itertools.product((1, 8), (1, 2, 17)):
        prices.calibrate(rows * width, fixed + per_position * rows * width + wide * (width > 1), is_wide=width > 1)
    prices.end_warm_up()
    return prices


def draft(*probabilities: float) -> Draft:
    return Draft(np.arange(len(probabilities), dtype=np.int32), 1, "context", np.array(probabilities))


def paying(prices: CostModel, *rows: Sequence[float]) -> int:
    """The width that gives most for chains of these chances."""
    gains = np.zeros(max(map(len, rows)))
    for row in rows:
        gains[: len(row)] += np.cumprod(row)
    seconds = [prices.seconds(len(rows) * (1 + width), is_wide=width > 0) for width in range(1 + len(gains))]
    return best_num_steps((0.0, 0.0), float(len(rows)), gains, np.array(seconds))


@given(
    st.lists(st.lists(st.floats(0.01, 0.99), max_size=8), min_size=1, max_size=5),
    st.floats(1e-2, 1.0),
    st.floats(1e-4, 0.1),
    st.floats(1e-4, 0.3),
)
def test_the_width_maximises_expected_tokens_per_second(
    rows: list[list[float]], fixed: float, per_position: float, wide: float
) -> None:
    rates = []
    for width in range(max(map(len, rows)) + 1):
        expected = 0.0
        for row in rows:
            chance, expected = 1.0, expected + 1.0
            for probability in row[:width]:
                chance *= probability
                expected += chance
        rates.append(expected / (fixed + per_position * len(rows) * (width + 1) + wide * (width > 0)))
    chosen = paying(learned(fixed, per_position, wide), *rows)
    assert rates[chosen] == pytest.approx(max(rates), rel=1e-2)


@pytest.mark.parametrize("factor", [0.4, 2.5])
def test_a_change_of_load_is_followed_within_fifty_passes(factor: float) -> None:
    random, law = np.random.default_rng(0), np.array((0.01, 0.0005, 0.001))
    prices = learned(*law)
    for _ in range(50):
        width = int(random.integers(1, 9))
        took = factor * float(law @ (1, width, width > 1)) * float(random.normal(1, 0.02))
        prices.observe(width, 1, took, is_wide=width > 1)
    for width in (1, 4, 8):
        want = factor * float(law @ (1, width, width > 1))
        assert prices.seconds(width, is_wide=width > 1) == pytest.approx(want, rel=0.25)


@pytest.mark.parametrize("calibrates", [False, True])
@pytest.mark.parametrize("knee", KNEES)
def test_the_first_positions_cost_less_where_they_are_computed_while_weights_are_read(
    knee: float, calibrates: bool
) -> None:
    def law(num_positions: int) -> float:
        return 0.048 + 0.0034 * float(slow.effective_positions(float(num_positions), knee))

    random, prices = np.random.default_rng(0), CostModel()
    if calibrates:
        for rows, width in TIMED:
            prices.calibrate(rows * width, law(rows * width), is_wide=width > 1)
        prices.end_warm_up()
    for _ in range(200):
        rows, width = int(random.choice([1, 4, 8])), int(random.integers(1, 17))
        seconds = law(rows * width) * float(random.normal(1, 0.02))
        prices.observe(rows * width, 1, seconds, is_wide=width > 1)
        if calibrates:
            assert prices.pass_time is not None and prices.pass_time.knee == knee
    for positions in (2, 4, 8, 16, 24, 32, 64, 128):
        assert prices.seconds(positions, is_wide=True) == pytest.approx(law(positions), rel=0.06)


def test_what_the_warm_up_took_and_gave_besides_is_forgotten() -> None:
    prices, fresh = learned(0.01, 0.001), learned(0.01, 0.001)
    for _ in range(20):
        prices.observe(4, 400, 0.03, is_wide=True)
    assert prices.token_cost(1) > 2 * fresh.token_cost(1)
    prices.end_warm_up()
    assert (prices.token_cost(1), prices.pass_time) == (fresh.token_cost(1), fresh.pass_time)


row_chances = st.lists(st.floats(0.0, 1.0), max_size=4)


def cut(prices: CostModel, rows: list[list[float]]) -> list[int]:
    drafts = Records(DraftRecord, len(rows))
    for record, chances in zip(drafts, rows, strict=True):
        write_draft(draft(*chances), record)
    addresses = drafts.address + dtype_of(DraftRecord).itemsize * np.arange(len(rows))
    cut_drafts(prices.address, addresses, np.ones(len(rows)), False)
    return [record.size for record in drafts]


Step = tuple[int, int, float, bool]


def steps_of(sizes: st.SearchStrategy[int]) -> st.SearchStrategy[list[Step]]:
    return st.lists(st.tuples(sizes, st.integers(1, 20), st.floats(1e-3, 1.0), st.booleans()), max_size=40)


@given(
    steps_of(st.integers(1, 40)),
    steps_of(st.just(4)),  # of one size: they do not tell what a position costs
    st.booleans(),
    st.sampled_from([0, 0, 60, 70, 300]),
    st.lists(row_chances, min_size=1, max_size=4),
)
def test_what_steps_without_padding_cost_is_that_of_the_twin(
    various: list[Step], alike: list[Step], are_alike_first: bool, num_wide: int, rows: list[list[float]]
) -> None:
    prices, twin = CostModel(), slow.SlowRowPrices()
    steps = alike + various if are_alike_first else various + alike
    for step in steps + [(4 + i % 3, 4, 0.01, True) for i in range(num_wide)]:
        num_positions, num_tokens, seconds, is_wide = step
        prices.observe(num_positions, num_tokens, seconds, is_wide=is_wide)
        twin.observe(*step)
    assert (prices.pass_time is not None) == twin.is_known
    for positions, is_wide in itertools.product((1, 7, 40), (False, True)):
        want = twin.seconds(positions, is_wide)
        assert prices.seconds(positions, is_wide=is_wide) == pytest.approx(want, rel=1e-6, abs=1e-9)
    assert prices.token_cost(len(rows)) == pytest.approx(twin.price(len(rows)), rel=1e-6, abs=1e-9)
    got, want_sizes = cut(prices, rows), twin.sizes(rows)
    if got != want_sizes:  # two cuts that are as good as each other
        gains = [np.cumprod(row).tolist() for row in rows]
        times = [twin.seconds(len(rows) + n, n > 0) for n in range(sum(map(len, rows)) + 1)]
        rates = [slow.combined_rate(gains, sizes, times, twin.recent()) for sizes in (got, want_sizes)]
        assert rates[0] == pytest.approx(rates[1], rel=1e-6)


# -- learned times --


@kernel
def fitted(features: Floats, seconds: Floats, keep: float) -> tuple[float, float, float]:
    moments = np.zeros((4, 4))
    for i in range(len(features)):
        add_observation(moments, keep, (features[i, 0], features[i, 1], features[i, 2]), seconds[i])
    return fit_nonnegative(moments)[:3]


def features_of(passes: list[tuple[int, int]]) -> Floats:
    return np.array([[1.0, rows * width, width > 1] for rows, width in passes], np.float64)


sizes = st.tuples(st.integers(1, 16), st.integers(1, 9))


@given(st.lists(st.tuples(sizes, st.floats(1e-3, 1.0)), min_size=1, max_size=40), st.sampled_from([1.0, 0.98, 0.9]))
def test_no_other_line_without_negative_parts_is_closer(
    passes: list[tuple[tuple[int, int], float]], keep: float
) -> None:
    features, seconds = features_of([size for size, _ in passes]), np.array([took for _, took in passes])
    weights = slow.fading(len(passes), keep) / seconds**2
    got = fitted(features, seconds, keep)
    want = slow.fit_nonnegative(features, seconds, weights)
    assert min(got) >= 0.0
    least = slow.squared_error(want, features, seconds, weights)
    assert slow.squared_error(got, features, seconds, weights) == pytest.approx(least, rel=1e-6, abs=1e-9)


def test_features_that_cannot_be_told_apart_count_as_the_first() -> None:
    features = features_of([(1, 1), (1, 2)] * 4)  # the second position and the step to it
    assert fitted(features, features @ (0.01, 0.002, 0.0), 1.0) == pytest.approx((0.01, 0.002, 0.0))
    assert fitted(np.ones((4, 3)), np.full(4, 0.5), 1.0) == pytest.approx((0.5, 0.0, 0.0))
    assert fitted(np.zeros((4, 3)), np.full(4, 0.5), 1.0) == (0.0, 0.0, 0.0)


TIMED = list(itertools.product((1, 8), (1, 2, 5, 65)))


@given(st.dictionaries(sizes, st.floats(1e-3, 1.0), min_size=1, max_size=12))
def test_plausible_times_are_monotone_and_never_longer_than_several_smaller_passes(
    seconds: dict[tuple[int, int], float],
) -> None:
    found = plausible_times(seconds)
    for (rows, width), each in found.items():
        assert each <= seconds[rows, width]
        for (other_rows, other_width), other in found.items():
            if rows <= other_rows and width <= other_width:
                assert each <= other
            assert each <= -(-rows // other_rows) * -(-width // other_width) * seconds[other_rows, other_width]


@given(st.floats(1e-3, 0.1), st.floats(0.0, 0.05), st.floats(0.0, 0.5), st.integers(0, 7), st.floats(1.0, 1e4))
def test_no_interruption_makes_passes_with_drafts_seem_not_to_pay(
    fixed: float, per_position: float, wide: float, interrupted: int, times: float
) -> None:
    seconds = features_of(TIMED) @ (fixed, per_position * fixed, wide * fixed)
    seconds[interrupted] *= times
    prices = CostModel()
    for (rows, width), one in plausible_times(dict(zip(TIMED, seconds.tolist(), strict=True))).items():
        prices.calibrate(rows * width, one, is_wide=width > 1)
    prices.end_warm_up()
    assert paying(prices, [0.95] * 8) > 0


# -- wrong estimates --


class Repeats:
    """Requests whose output is known by heart, one after another in simulated time."""

    LENGTH = 48
    NO_DRAFT = 1 / 24
    """The share of positions behind which no source goes on."""
    CHANCE = 0.97

    def __init__(self, prices: CostModel, law: Floats, num_rows: int, seed: int) -> None:
        """``law`` : the true seconds of a pass, of a position, and of being wide. ``num_rows`` : decoded together."""
        self.prices, self.law, self.num_rows = prices, law, num_rows
        self.random = np.random.default_rng(seed)

    def width(self, num_proposed: int) -> tuple[int, float]:
        """How much of a draft is verified, and the tokens of each row that the pass is expected to put out."""
        chances = np.cumprod(np.full(num_proposed, self.CHANCE))
        chances = chances[chances >= self.prices.token_cost(self.num_rows)]
        width = self.prices.num_steps_to_verify(self.num_rows * chances, self.num_rows) if len(chances) else 0
        return width, 1.0 + float(chances[:width].sum())

    def request(self) -> None:
        """Decode a request. Its first pass has no draft, and some passes are interrupted."""
        length, num_proposed = 0, 0
        while length < self.LENGTH:
            width, tokens = self.width(num_proposed)
            positions = self.num_rows * (1 + width)
            noise = 10.0 if self.random.random() < 0.005 else float(self.random.normal(1, 0.02))
            took = noise * float(self.law @ (1, positions, width > 0))
            self.prices.observe(positions, self.num_rows * round(tokens), took, is_wide=width > 0)
            length, num_proposed = length + round(tokens), min(64, int(self.random.geometric(self.NO_DRAFT)))

    def rates(self) -> Floats:
        """Tokens per step and tokens per second from now on, without probes: float64[2]."""
        self.prices._costs.since_probe = 0
        tokens = seconds = 0.0
        for num_proposed in range(65):
            width, expected = self.width(num_proposed)
            weight = (1 - self.NO_DRAFT) ** num_proposed
            tokens += weight * expected
            seconds += weight * float(self.law @ (1, self.num_rows * (1 + width), width > 0))
        return np.array([tokens, tokens / seconds])


def calibrated(law: Floats, factors: Sequence[float]) -> CostModel:
    prices = CostModel()
    for (rows, width), factor in zip(TIMED, factors, strict=True):
        prices.calibrate(rows * width, factor * float(law @ (1, rows * width, width > 1)), is_wide=width > 1)
    prices.end_warm_up()
    return prices


wrong_factors = st.one_of(
    st.lists(st.floats(-2.0, 2.0), min_size=8, max_size=8),
    st.tuples(st.integers(0, 7), st.floats(-2.0, 2.0)).map(lambda one: [one[1] * (i == one[0]) for i in range(8)]),
    st.floats(-2.0, 2.0).map(lambda wide: [wide * (i % 4 > 0) for i in range(8)]),
)


@settings(max_examples=300)
@given(
    wrong_factors,
    st.sampled_from([1, 8]),
    st.sampled_from([2e-5, 1e-4]),
    st.sampled_from([0.0, 6e-4]),
    st.integers(0, 2**32),
)
def test_drafts_come_back_within_twenty_repeated_requests_however_wrong_the_calibration_is(
    powers: list[float], num_rows: int, per_position: float, wide: float, seed: int
) -> None:
    law = np.array([1e-3, per_position, wide])
    right = Repeats(calibrated(law, [1.0] * 8), law, num_rows, seed)
    wrong = Repeats(calibrated(law, [10.0**power for power in powers]), law, num_rows, seed)
    for _ in range(20):
        right.request()
        wrong.request()
    got, want = wrong.rates(), right.rates()
    assert (got >= 0.9 * want).all(), f"tokens per step and per second: {got}, with correct costs {want}"


@pytest.mark.parametrize("num_rows", [1, 8])
def test_drafts_that_lose_time_end_although_every_pass_has_some(num_rows: int) -> None:
    """The machine becomes faster while each pass verifies drafts, so that passes without drafts seem slow."""
    random, law = np.random.default_rng(0), np.array([3e-3, 0.0, 6e-4])
    prices = calibrated(1.4 * law, [1.0] * 8)
    for _ in range(50):
        prices.observe(num_rows, num_rows, 1.4 * float(law @ (1, num_rows, 0)) * float(random.normal(1, 0.02)))
    for _ in range(8):  # of text that can be drafted
        prices.observe(2 * num_rows, 2 * num_rows, float(law @ (1, 2 * num_rows, 1)), is_wide=True)
    widths = []
    for _ in range(2500):
        widths.append(prices.num_steps_to_verify(np.full(1, 0.1 * num_rows), num_rows))
        positions, is_wide = num_rows * (1 + widths[-1]), widths[-1] > 0
        seconds = float(law @ (1, positions, is_wide)) * float(random.normal(1, 0.02))
        prices.observe(positions, round(num_rows * (1 + 0.1 * is_wide)), seconds, is_wide=is_wide)
    assert np.mean(widths[:32]) > 0.5 and np.mean(widths[-500:]) < 0.1


@pytest.mark.parametrize("factor", [0.02, 50.0])
def test_drafts_come_back_where_nothing_is_calibrated_and_the_first_passes_were_slow(factor: float) -> None:
    """As inside vLLM and transformers' ``generate``, which measure passes only while they serve."""
    law = np.array([1e-3, 1e-4, 6e-4])
    prices = CostModel()
    for positions in range(2, 14):
        prices.observe(1, 1, float(law @ (1, 1, 0)))
        prices.observe(positions, positions, factor * float(law @ (1, positions, 1)), is_wide=True)
    wrong, right = Repeats(prices, law, 1, 0), Repeats(calibrated(law, [1.0] * 8), law, 1, 0)
    for _ in range(20):
        wrong.request()
        right.request()
    assert (wrong.rates() >= 0.9 * right.rates()).all()


# -- what a token is worth --


def test_steps_are_counted_and_not_the_pauses_between() -> None:
    now = 0.0
    rate = StepThroughput(lambda: now)
    assert rate.tokens_per_s == 0
    for _ in range(5):
        rate.start_step()
        now += 0.5
        rate.count(2)
        rate.count(3)
        now += 60
    rate.start_step()
    assert rate.tokens_per_s == pytest.approx(10)


def test_a_step_lasts_what_one_does_of_which_nothing_is_left_out() -> None:
    """What asking others takes is left out of a step; that its pass then verifies more is still in it."""
    now = 0.0
    rate = StepThroughput(lambda: now)

    def step(seconds: float, left_out: float = 0.0) -> None:
        nonlocal now
        rate.start_step()
        if left_out:
            now += left_out
            rate.leave_out(left_out)
        now += seconds
        rate.count(1)

    step(0.5, left_out=0.25)
    rate.start_step()
    assert rate.seconds_per_step == pytest.approx(0.5)
    for _ in range(9):
        step(0.4)
        step(0.5, left_out=0.25)
    rate.start_step()
    assert rate.seconds_per_step == pytest.approx(0.4)
    for _ in range(99):
        step(0.3, left_out=0.25)
    rate.start_step()
    assert rate.seconds_per_step == pytest.approx(0.3, rel=0.02)


@given(st.lists(st.floats(0, 1), max_size=12), st.data())
def test_chances_are_the_products_of_those_before(estimates: list[float], data: st.DataObject) -> None:
    """Of chains and trees; a parent comes before its children."""
    parents = [data.draw(st.integers(-1, i - 1)) for i in range(len(estimates))]
    for tree in (False, True):
        draft = Draft(
            np.zeros(len(estimates), np.int32),
            probabilities=np.array(estimates),
            parents=np.array(parents, np.int32) if tree else None,
        )
        for i, found in enumerate(draft.path_probabilities().tolist()):
            chance, node = 1.0, i
            while node >= 0:
                chance *= estimates[node]
                node = parents[node] if tree else node - 1
            assert found == pytest.approx(chance)


def test_rates_learn_lean_and_fade() -> None:
    rates = AcceptanceRates()
    first = rates.rate("a")
    for _ in range(50):
        rates.record("a", 4, 0)
    assert rates.rate("a") < 0.2 < rates.rate("b") < first
    for _ in range(300):
        rates.record("c", 4, 4)
    assert rates.rate("b") > 0.8 > 0.5 > rates.rate("a")
    for _ in range(500):
        rates.fade("a")
    assert rates.rate("a") == pytest.approx(rates.rate("b"), abs=0.05)
    rates.forget("a")
    rates.fade("a")
    assert rates.rate("a") == rates.rate("b")


@given(
    st.lists(
        st.tuples(st.sampled_from([0.0, 0.4, 3.0, 50.0]), st.sampled_from([0.0, 0.5, 0.99]), st.integers(0, 9)),
        max_size=100,
    ),
    st.sampled_from([0.0, 0.4, 3.0, 50.0]),
    st.sampled_from([0.0, 0.5, 0.99]),
)
def test_expected_excess_is_the_mean_of_those_alike_leaning_on_all(
    seen: list[tuple[float, float, int]], promised: float, first: float
) -> None:
    excess = MarginalGain()
    for each in seen:
        excess.learn(*each)
    assert excess.expected(promised, first) == pytest.approx(slow.mean_excess(seen, promised, first))


# -- what promises are worth --


PASS = (0.01, 0.002)


def draft_lengths(
    shares: AcceptanceCalibration, prices: CostModel, promised: float, true: float, passes: int
) -> list[int]:
    """How much is drafted in each of so many passes over one row, of eight tokens of chance ``promised`` each."""
    random, lengths = np.random.default_rng(0), []
    for _ in range(passes):
        draft = Draft(np.zeros(8, np.int32), probabilities=np.full(8, promised))
        draft = draft.cut(prices.num_steps_to_verify(shares.share(1.0) * draft.path_probabilities()))
        length = len(draft.token_ids)
        accepted = int((np.cumprod(random.random(length) < true)).sum())
        shares.observe(1.0, promise_tested(draft, range(accepted)), accepted)
        prices.observe(1 + length, 1 + accepted, PASS[0] + PASS[1] * (1 + length), is_wide=length > 0)
        lengths.append(length)
    return lengths


def test_a_drafter_whose_promises_do_not_hold_is_drafted_less_and_comes_back() -> None:
    shares, prices = AcceptanceCalibration(), learned(*PASS)
    assert draft_lengths(shares, prices, 0.9, 0.9, 200)[-1] > 4, "what it promises comes"
    lengths = draft_lengths(shares, prices, 0.9, 0.05, 400)
    assert np.mean(lengths[-200:]) < 0.5, "nothing of it comes any more"
    assert max(lengths[-200:]) > 0 or max(draft_lengths(shares, prices, 0.9, 0.05, 4000)) > 0, "it is tried again"
    lengths = draft_lengths(shares, prices, 0.9, 0.9, 6000)
    assert np.mean(lengths[-100:]) > 4, "it has come back"


@pytest.mark.parametrize("true", [0.2, 0.5, 0.8])
def test_the_share_approaches_what_is_kept(true: float) -> None:
    shares, random, seen = AcceptanceCalibration(), np.random.default_rng(2), []
    for _ in range(1000):
        shares.observe(1.0, 5.0, int(random.binomial(5, true)))
        seen.append(shares.share(1.0))
    assert np.mean(seen[100:]) == pytest.approx(true, abs=0.05)


@given(st.floats(0, 2), st.floats(0, 2))
def test_temperatures_that_are_far_apart_have_their_own(first: float, second: float) -> None:
    shares = AcceptanceCalibration()
    for _ in range(50):
        shares.observe(first, 2.0, 0)
    assert shares.share(first) < 0.1
    if abs(first - second) > 0.25:
        assert shares.share(second) == 1.0


@settings(max_examples=8)
@given(st.floats(-1, 1), st.floats(0.3, 2.0), st.integers(0, 2**32))
def test_platt_scaling_finds_how_a_draft_models_probabilities_are_off(shift: float, scale: float, seed: int) -> None:
    random, model = np.random.default_rng(seed), PlattScaling(shift=0.5, scale=1.0)
    probes = np.array([0.1, 0.3, 0.6, 0.9])
    true = 1 / (1 + np.exp(-shift - scale * np.log(probes / (1 - probes))))
    seen = []
    for step in range(2000):
        drawn = random.integers(0, 4, 4)
        model.learn(probes[drawn], random.random(4) < true[drawn])
        if step >= 500:
            seen.append(model.estimate(probes))
    assert np.mean(seen, axis=0) == pytest.approx(true, abs=0.05)


# -- who is asked --


def run(throttle: DraftBackoff, fruitless: list[int], steps: int, ask_s: float, pass_s: float) -> list[int]:
    """How often each row was asked, none of which ever gets a draft."""
    counts = [0] * len(fruitless)
    for _ in range(steps):
        should_draft_all = throttle.should_draft_all(len(fruitless))
        due = [should_draft_all or count < BACKOFF_AFTER for count in fruitless]
        fruitless[:] = [count + is_due for count, is_due in zip(fruitless, due, strict=True)]
        throttle.record_drafting(sum(due), ask_s * sum(due), skips_some=not all(due))
        throttle.observe_pass(pass_s)
        counts = [count + is_due for count, is_due in zip(counts, due, strict=True)]
    return counts


def test_a_drafter_is_told_of_all_drafts_and_else_as_seldom_as_is_cheap() -> None:
    throttle = DraftBackoff()
    assert throttle.should_observe(has_drafts=False)
    for told, passed, period in ((1e-5, 1e-2, 1), (1e-4, 1e-2, 4), (2e-4, 1e-2, 8), (1e-1, 1e-2, 16)):
        for _ in range(200):
            throttle.record_observing(told)
            throttle.observe_pass(passed)
        assert throttle.should_observe(has_drafts=True)
        assert [throttle.should_observe(has_drafts=False) for _ in range(2 * period)] == 2 * (
            [False] * (period - 1) + [True]
        )


def test_a_call_that_compiled_kernels_is_not_counted() -> None:
    throttle = DraftBackoff()
    throttle.record_drafting(1, 40.0, skips_some=False)
    throttle.record_observing(40.0)
    throttle.observe_pass(0.01)
    assert throttle.period(64) == 1 and throttle.should_observe(has_drafts=False)


@given(st.floats(1e-6, 1e-2), st.floats(1e-4, 1.0), st.integers(1, 64))
def test_asking_rows_that_get_nothing_takes_its_share_and_no_longer_pause_than_that_needs(
    ask_s: float, pass_s: float, num_rows: int
) -> None:
    throttle, fruitless = DraftBackoff(), [0] * num_rows
    run(throttle, fruitless, 24, ask_s, pass_s)
    steps = 60 * throttle.period(num_rows)
    counts = run(throttle, fruitless, steps, ask_s, pass_s)
    pause = steps / counts[0]
    share = sum(counts) * ask_s / (steps * pass_s)
    if pause < 16:
        assert share <= 0.0025 * (1 + 1e-6)
    if pause > 1:
        assert share * pause / (pause - 1) > 0.0025 * (1 - 1e-6), "one step less would take too much"
