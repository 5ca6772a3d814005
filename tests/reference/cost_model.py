"""Slow twins of prices: every choice of features by numpy's least squares, every cut of every draft."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def fit_nonnegative(features: Floats, seconds: Floats, weights: Floats) -> Floats:
    """Coefficients >= 0 with the least weighted squared error: float64[k] of float64[n, k], float64[n], float64[n]."""
    num, scale = features.shape[1], np.sqrt(weights)
    best, everything = np.zeros(num), squared_error(np.zeros(num), features, seconds, weights)
    least = everything
    for bits in range(1, 1 << num):  # of equal fits the first counts
        chosen = [i for i in range(num) if bits >> i & 1]
        found = np.zeros(num)
        found[chosen] = np.linalg.lstsq(features[:, chosen] * scale[:, None], seconds * scale, rcond=None)[0]
        error = squared_error(found, features, seconds, weights)
        if found.min() >= 0.0 and error < least - 1e-12 * everything:
            best, least = found, error
    return best


def fading(count: int, forgetting: float) -> Floats:
    """What each of ``count`` observations counts after the last one: float64[count]."""
    weights: Floats = forgetting ** np.arange(count, dtype=np.float64)[::-1]
    return weights


def squared_error(coefficients: Sequence[float] | Floats, features: Floats, seconds: Floats, weights: Floats) -> float:
    """Of a linear function, weighted."""
    return float((weights * (features @ np.asarray(coefficients) - seconds) ** 2).sum())


def combined_rate(
    gains: Sequence[Sequence[float]], lengths: Sequence[int], seconds: Sequence[float], recent: tuple[float, float]
) -> float:
    """Tokens per second with rows cut to ``lengths``."""
    tokens = sum(1 + sum(row[:length]) for row, length in zip(gains, lengths, strict=True))
    return (tokens + recent[0]) / (seconds[sum(lengths)] + recent[1])


def effective_positions(num_positions: Floats | float, knee: float) -> Floats | float:
    """How many of the positions take time beside the reading of the weights."""
    effective: Floats | float = np.hypot(num_positions, knee) - knee
    return effective


class SlowRowPrices:
    """Twin of `CostModel` and ``cut_drafts`` for a batch without padding: it keeps every pass it was ever told of."""

    def __init__(self) -> None:
        self.fixed = self.per_position = self.wide = self.knee = 0.0
        self.slowdown = 1.0
        self.is_known = False
        self.counted: list[tuple[int, float]] = []  # tokens and seconds of the passes that count for the rate
        self.kinds: dict[bool, list[tuple[int, float]]] = {
            False: [],
            True: [],
        }  # positions and seconds, by whether wide
        self.slow: dict[bool, list[float]] = {
            False: [],
            True: [],
        }  # how many times too slow the last passes in a row were
        self.since_probe = self.pause = self.since_plain = 0
        self.lost = 0.0
        self.is_probing = False

    def observe(self, num_positions: int, num_tokens: int, seconds: float, is_wide: bool) -> None:
        """One step."""
        self.since_probe += 1
        self.since_plain = self.since_plain + 1 if is_wide else 0
        if is_wide and self.is_probing:
            self.end_probe(num_tokens, seconds)
        expected = self.seconds(num_positions, is_wide)
        if self.is_known:
            slow = self.slow[is_wide]
            if seconds > 2 * expected:
                slow.append(seconds / max(expected, 1e-9))
            else:
                slow.clear()
            if len(slow) == 3 or expected > 2 * seconds:
                seconds = min(slow) * expected if slow else seconds
                slow.clear()
                self.kinds[is_wide].clear()
            elif seconds > 5 * expected:
                return
        self.counted.append((num_tokens, seconds))
        if expected > 1e-9:
            speed = min(expected / max(seconds, 1e-9), 1.25)
            self.slowdown *= 1 + max(1 / 8, 1 / len(self.counted)) * speed * (1 - speed)
        self.kinds[is_wide].append((num_positions, seconds / self.slowdown))
        self.fit()

    def end_probe(self, num_tokens: int, seconds: float) -> None:
        """Set the pause until the next probe: what this one or the last one lost is at most one hundredth of it."""
        self.is_probing, self.since_probe = False, 0
        tokens, time = self.recent()
        lost = seconds / time - num_tokens / tokens if tokens > 0 and time > 0 else 0.0
        self.pause, self.lost = max(64, int(min(lost, self.lost, 1e4) / 0.01)), lost

    def fit(self) -> None:
        """The curve through all passes that count."""
        positions = np.array([each[0] for kind in self.kinds.values() for each in kind], np.float64)
        took = np.array([each[1] for kind in self.kinds.values() for each in kind])
        wide = np.repeat([0.0, 1.0], [len(kind) for kind in self.kinds.values()])
        weights = np.concatenate([fading(len(kind), 0.98) for kind in self.kinds.values()]) / took**2
        if len(self.counted) < 8:
            return
        mean, seconds = float(np.average(positions, weights=weights)), float(np.average(took, weights=weights))
        if np.average((positions - mean) ** 2, weights=weights) >= 0.05:
            found: dict[float, tuple[float, Floats]] = {}
            for knee in (0.0, 8.0, 16.0, 32.0, 64.0):
                features = np.stack([np.ones_like(positions), effective_positions(positions, knee), wide], axis=1)
                line = fit_nonnegative(features, took, weights)
                error = max(squared_error(line, features, took, weights), 1e-4 * float(weights @ took**2))
                found[knee] = error, line
            best = min(found, key=lambda knee: found[knee][0])
            self.knee = best if found[best][0] < 0.8 * found[0.0][0] else 0.0
            self.fixed, self.per_position, self.wide = map(float, found[self.knee][1])
            self.is_known = True
        else:
            effective = float(np.average(effective_positions(positions, self.knee), weights=weights))
            self.per_position = min(self.per_position, seconds / effective)
            share = float(np.average(wide, weights=weights))
            self.fixed = max(0.0, seconds - self.per_position * effective - self.wide * share)

    def seconds(self, num_positions: int, is_wide: bool) -> float:
        """Of a pass."""
        positions = float(effective_positions(num_positions, self.knee))
        return self.slowdown * (self.fixed + self.per_position * positions + self.wide * is_wide)

    def recent(self) -> tuple[float, float]:
        """Tokens and seconds of an average step of late."""
        if not self.counted:
            return 0.0, 0.0
        tokens, seconds = np.average(self.counted, axis=0, weights=fading(len(self.counted), 0.99))
        return float(tokens), float(seconds)

    def price(self, num_rows: int) -> float:
        """Of a drafted token, in output tokens; 0 while it is not known."""
        tokens, seconds = self.recent()
        num_more = max(1, num_rows)
        more = (self.seconds(num_rows + num_more, False) - self.seconds(num_rows, False)) / num_more
        price = more * (num_rows + tokens) / max(self.seconds(num_rows, False) + seconds, 1e-9)
        return min(price, 0.5) if self.since_probe >= self.pause else price

    def sizes(self, probabilities: Sequence[Sequence[float]]) -> list[int]:
        """How much of each draft pays."""
        rows = [np.cumprod(row).tolist() for row in probabilities]
        everything = [len(row) for row in rows]
        if not self.is_known or not any(rows):
            return everything
        ordered = sorted((gain for row in rows for gain in row), reverse=True)
        tokens, seconds = self.recent()
        best, most = 0, -1.0
        for count in range(len(ordered) + 1):
            took = self.seconds(len(rows) + count, count > 0)
            rate = (len(rows) + sum(ordered[:count]) + tokens) / max(took + seconds, 1e-9)
            if count == 0:
                plain_rate = rate
            if rate > most * (1 + 1e-12):
                best, most = count, rate
        if best and not self.is_probing and self.since_plain >= max(64, (most / plain_rate - 1) / 0.005):
            return [0] * len(rows)
        if self.since_probe >= self.pause and sum(ordered[best:]) >= 0.5 * len(rows):
            self.is_probing, best = True, min(len(ordered), max(16 * len(rows), 4 * best))
        least = ordered[best - 1] if best else np.inf
        return [sum(1 for _ in itertools.takewhile(lambda gain: gain >= least, row)) for row in rows]


def mean_excess(seen: Sequence[tuple[float, float, int]], promised: float, first: float) -> float:
    """What `MarginalGain` expects after so few askings that none has faded."""
    assert len(seen) < 140

    def bucket(value: float, bounds: Sequence[float]) -> int:
        return sum(value >= bound for bound in bounds)

    def cell(promised: float, first: float) -> tuple[int, int]:
        return bucket(promised, _EXCESS_PROMISED), bucket(first, _EXCESS_FIRST)

    of_all = [excess for _, _, excess in seen]
    alike = [excess for p, f, excess in seen if cell(p, f) == cell(promised, first)]
    overall = (8.0 + sum(of_all)) / (8.0 + len(of_all))
    return (sum(alike) + 12.0 * overall) / (len(alike) + 12.0)


_EXCESS_PROMISED = [0.05, 0.15, 0.3, 0.5, 0.8, 1.2, 1.8, 2.6, 4, 6, 10, 20]
_EXCESS_FIRST = [0.05, 0.12, *(tenth / 10 for tenth in range(2, 10)), 0.97]
