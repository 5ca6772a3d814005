"""Slow twins of prices: every choice of features by numpy's least squares, every cut of every draft."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def fit_nonnegative(features: Floats, seconds: Floats, weights: Floats) -> Floats:
    """Coefficients >= 0 with the least weighted squared error: float64[k] of float64[n, k], float64[n], float64[n]."""
    best, least = np.zeros(features.shape[1]), np.inf
    for size in range(features.shape[1] + 1):
        for chosen in itertools.combinations(range(features.shape[1]), size):
            found = np.zeros(features.shape[1])
            scale = np.sqrt(weights)
            found[list(chosen)] = np.linalg.lstsq(
                features[:, list(chosen)] * scale[:, None], seconds * scale, rcond=None
            )[0]
            error = squared_error(found, features, seconds, weights)
            if found.min() >= 0.0 and error < least:
                best, least = found, error
    return best


def fading(count: int, forgetting: float) -> Floats:
    """What each of ``count`` observations counts after the last one: float64[count]."""
    weights: Floats = forgetting ** np.arange(count, dtype=np.float64)[::-1]
    return weights


def squared_error(coefficients: Sequence[float] | Floats, features: Floats, seconds: Floats, weights: Floats) -> float:
    """Of a linear function, weighted."""
    return float((weights * (features @ np.asarray(coefficients) - seconds) ** 2).sum())


def joint_rate(
    gains: Sequence[Sequence[float]], lengths: Sequence[int], seconds: Sequence[float], recent: tuple[float, float]
) -> float:
    """Tokens per second with rows cut to ``lengths``."""
    tokens = sum(1 + sum(row[:length]) for row, length in zip(gains, lengths, strict=True))
    return (tokens + recent[0]) / (seconds[sum(lengths)] + recent[1])


class SlowRowPrices:
    """Prices and cuts of a batch without padding: `PriceList` and ``cut_rows`` by all that was ever told."""

    def __init__(self) -> None:
        self.fixed = self.per_position = 0.0
        self.is_known = False
        self.seen: list[tuple[int, int, float]] = []

    def observe(self, num_positions: int, num_tokens: int, seconds: float) -> None:
        """One step."""
        if self.is_known and seconds > 5 * (self.fixed + self.per_position * num_positions):
            return
        self.seen.append((num_positions, num_tokens, seconds))
        weights = fading(len(self.seen), 0.98)
        positions = np.array([each[0] for each in self.seen], np.float64)
        took = np.array([each[2] for each in self.seen])
        if weights.sum() < 8:
            return
        mean = float(np.average(positions, weights=weights))
        if np.average((positions - mean) ** 2, weights=weights) >= 0.05:
            features = np.stack([np.ones_like(positions), positions], axis=1)
            self.fixed, self.per_position = map(float, fit_nonnegative(features, took, weights))
            self.is_known = True
        else:
            self.per_position = min(self.per_position, float(np.average(took, weights=weights)) / mean)
            self.fixed = max(0.0, float(np.average(took, weights=weights)) - self.per_position * mean)

    def recent(self) -> tuple[float, float]:
        """Tokens and seconds of an average step of late."""
        if not self.seen:
            return 0.0, 0.0
        weights = fading(len(self.seen), 0.99)
        return (
            float(np.average([each[1] for each in self.seen], weights=weights)),
            float(np.average([each[2] for each in self.seen], weights=weights)),
        )

    def price(self, num_rows: int) -> float:
        """Of a drafted token, in output tokens; 0 while it is not known."""
        tokens, seconds = self.recent()
        plain = self.fixed + self.per_position * num_rows
        return self.per_position * (num_rows + tokens) / max(plain + seconds, 1e-9)

    def sizes(self, probabilities: Sequence[Sequence[float]]) -> list[int]:
        """How much of each draft pays."""
        rows = [np.cumprod(row).tolist() for row in probabilities]
        everything = [len(row) for row in rows]
        if not self.is_known:
            return everything
        ordered = sorted((gain for row in rows for gain in row), reverse=True)
        tokens, seconds = self.recent()
        best, most = 0, -1.0
        for count in range(len(ordered) + 1):
            took = self.fixed + self.per_position * (len(rows) + count)
            rate = (len(rows) + sum(ordered[:count]) + tokens) / max(took + seconds, 1e-9)
            if rate > most * (1 + 1e-12):
                best, most = count, rate
        least = ordered[best - 1] if best else np.inf
        return [sum(1 for _ in itertools.takewhile(lambda gain: gain >= least, row)) for row in rows]


def mean_excess(seen: Sequence[tuple[float, float, int]], promised: float, first: float) -> float:
    """What `Excess` expects after so few askings that none has faded."""
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
