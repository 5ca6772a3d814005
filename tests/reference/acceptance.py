"""Slow twin of the acceptance model and of drafting by it: dictionaries, every occurrence looked at."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tests.reference.drafting import Evidence

NOTHING = -1

View = tuple[Any, ...]
Views = dict[str, View]

_LENGTH_STARTS = [0, 1, 2, 3, 4, 5, 7, 9, 13, 17, 25, 33, 49]
_TYPICAL_LENGTH = [0.5, 1, 2, 3, 4, 5.5, 7.5, 10, 14, 20, 28, 40, 64]
_TYPICAL_SUPPORT = [1, 2, 3, 5, 10, 40]
_TYPICAL_SHARE = [0.02, 0.1, 0.25, 0.42, 0.5, 0.6, 0.75, 0.92, 1.0]
_WEIGHTS = {
    "own": 0.8,
    "index": 0.8,
    "prediction": 8.0,
    "level 0": 0.8,
    "level 1": 0.5,
    "level 2": 0.3,
    "request": 0.3,
    "token": 0.3,
    "before": 0.3,
    "pair": 0.3,
}
_TYPICAL_OFFERED = [0.015, 0.06, 0.15, 0.27, 0.45, 0.65, 0.85, 0.97]
_TYPICAL_RECYCLED = [0.015, 0.045, 0.09, 0.18, 0.36, 0.62, 0.81, 0.95]
_TYPICAL_VERDICT = [0.1, 0.03, 0.04, 0.15, 0.25, 0.4, 0.6]
_TYPICAL_RUN = [0.0, 0.8, 1.5, 2.2, 3.0, 3.8]
_TYPICAL_HEIGHT = [-1.3, -0.75, -0.25, 0.25, 0.75, 1.25, 1.75, 3.0]
_SURE_LENGTH = 9


def length_bucket(length: int) -> int:
    return max(i for i, start in enumerate(_LENGTH_STARTS) if start <= length)


def support_bucket(support: float) -> int:
    return sum(support >= bound for bound in (1.5, 2.5, 3.5, 6.5, 16.0))


def share_bucket(votes: float, support: float) -> int:
    if votes <= 0:
        return 0
    share = votes / support
    return 1 + sum(share >= bound for bound in (0.15, 0.33, 0.49, 0.51, 0.66, 0.85)) + (share > 0.999)


def _rule_of_thumb(length: float, support: float, share: float) -> float:
    votes = max(share * support, 0.05)
    odds = (votes + 0.5) / (support - votes + 0.5)
    return -1.3 + 0.85 * math.log(1 + length) + 0.1 * math.log(1 + support) + 0.45 * math.log(odds)


def offered_bucket(chance: float) -> int:
    return sum(chance >= bound for bound in (0.03, 0.1, 0.2, 0.35, 0.55, 0.75, 0.92))


def _log_odds(chance: float) -> float:
    return math.log(chance / (1 - chance))


def prior(view: str, key: View) -> float:
    """Log odds of an entry that has seen nothing."""
    if view in ("own", "index"):
        length, support, share, newest, _where = key
        logit = _rule_of_thumb(_TYPICAL_LENGTH[length], _TYPICAL_SUPPORT[support], _TYPICAL_SHARE[share])
        logit += 0.2 if newest else -0.2
    elif view == "prediction":
        length, fresh, says = key
        slope, start = (0.5, 2.0) if fresh else (0.9, 0.3)
        logit = start + slope * math.log(1 + _TYPICAL_LENGTH[length]) if says else -1.5
    elif view == "offer":
        _kind, says, bucket, _when = key
        chance = _TYPICAL_OFFERED[bucket]
        logit = _log_odds(chance if says else 0.4 * (1 - chance))
    elif view == "recycled":
        temperature_bucket, is_pair, rank, level = key
        chance = (0.85 if is_pair else 0.6) * _TYPICAL_RECYCLED[level]
        logit = _log_odds(0.4 * (1 - chance) if rank == 8 else chance * 0.9**rank) - [0, 0.2, 0.5][temperature_bucket]
    elif view == "noise":
        verdict, height, length, share = key
        place = _rule_of_thumb([1.5, 4.0, 8.0, 24.0][length], 3.0, [0.2, 0.6, 1.0][share])
        logit = _log_odds(_TYPICAL_VERDICT[verdict]) + 0.5 * place + 0.5 * _TYPICAL_HEIGHT[height]
    elif view == "keyed":
        confirmed, run, agreement, _temperature_bucket, says = key
        logit = 0.4 * confirmed + _TYPICAL_RUN[run] + [0.0, -0.7, 0.5][agreement]
        logit = logit if says else -1.0 - logit
    elif view.startswith("level"):
        logit = _rule_of_thumb(_TYPICAL_LENGTH[key[0]], _TYPICAL_SUPPORT[key[1]], _TYPICAL_SHARE[key[2]])
    elif view == "request":
        logit = _rule_of_thumb(_TYPICAL_LENGTH[key[1]], 3.0, _TYPICAL_SHARE[key[2]])
    else:
        logit = _rule_of_thumb([1.5, 4.0, 8.0, 24.0][key[1]], 3.0, [0.2, 0.6, 1.0][key[2]])
    return min(max(logit, math.log(1e-4)), -math.log(1e-4))


@dataclass
class SlowModel:
    """Entries (chance, count) by view and key, weights by weight set and view, knots of the curves by depth and number.

    What is not there has its prior.
    """

    entries: dict[tuple[str, View], tuple[float, float]] = field(default_factory=dict)
    weights: dict[View, dict[str, float]] = field(default_factory=dict)
    knots: dict[tuple[int, int], float] = field(default_factory=dict)

    def entry(self, view: str, key: View) -> tuple[float, float]:
        return self.entries.get((view, key), (1 / (1 + math.exp(-prior(view, key))), 2.0))

    def weights_of(self, chosen: View) -> dict[str, float]:
        if chosen not in self.weights:
            own, index, prediction, offer, recycled, noise, keyed, levels, _when = chosen
            absent = {"own": not own, "index": not index, "prediction": not prediction, "offer": not offer}
            absent |= {"recycled": not recycled, "level 1": levels < 1, "level 2": levels < 2}
            absent |= {"noise": not noise, "keyed": not keyed}
            others = {"offer": 2.5, "recycled": 2.0} if own or index else {"offer": 6.0, "recycled": 3.0}
            others |= {"noise": 1.5, "keyed": 8.0}
            say = {view: 0.0 if absent.get(view) else weight for view, weight in (_WEIGHTS | others).items()}
            self.weights[chosen] = {view: weight / sum(say.values()) for view, weight in say.items()} | {"1": 0.0}
        return self.weights[chosen]

    def mixed(self, views: Views, chosen: View) -> float:
        weights = self.weights_of(chosen)
        total = weights["1"]
        for view, key in views.items():
            chance, _ = self.entry(view, key)
            total += weights[view] * math.log(chance / (1 - chance))
        return total

    def around(self, log_odds: float, when: int) -> list[tuple[tuple[int, int], float, float]]:
        """The knots left and right of log odds: which, its share, its chance."""
        place = min(max(2 * log_odds, -16), 16)
        left = min(math.floor(place), 15)
        return [
            ((when, knot), share, self.knots.get((when, knot), 1 / (1 + math.exp(-knot / 2))))
            for knot, share in ((left, 1 - (place - left)), (left + 1, place - left))
        ]

    def chance(self, views: Views, chosen: View) -> float:
        return sum(share * chance for _, share, chance in self.around(self.mixed(views, chosen), chosen[-1]))

    def learn(self, views: Views, chosen: View, label: bool) -> float:
        log_odds = self.mixed(views, chosen)
        step = 0.02 * (label - self.chance(views, chosen))
        for knot, share, chance in self.around(log_odds, chosen[-1]):
            self.knots[knot] = min(max(chance + share * step, 1e-4), 1 - 1e-4)
        error = label - 1 / (1 + math.exp(-log_odds))
        weights = self.weights_of(chosen)
        weights["1"] = min(max(weights["1"] + 0.003 * error, -4), 4)
        for view, key in views.items():
            chance, count = self.entry(view, key)
            weights[view] = min(max(weights[view] + 0.01 * error * math.log(chance / (1 - chance)), -4), 4)
            count = min(count + 1, 100)
            chance += (label - chance) * max(1 / count, 0.01)
            self.entries[view, key] = min(max(chance, 1e-4), 1 - 1e-4), count
        return error


@dataclass(frozen=True)
class Asked:
    """One request's situation: ``mean_error`` of its earlier drafts' estimates, ``prediction`` of what is to come.

    ``offers`` : by path, of each token offered behind it the kind and the chance. ``successors`` : after one token or
    two, the target's own candidates with the levels of their shares. ``noise`` : of a token behind those
    drafted, where the target draws at ``temperature``. ``choices`` : behind those drafted, the token that the same
    noise chose before and how often that was confirmed; ``said_before`` : so many of the last tokens are what it had
    chosen.
    """

    context: Sequence[int]
    prompt_length: int = 0
    mean_error: float = 0.0
    num_static: int = 0
    num_texts: int = 1
    prediction: Sequence[int] = ()
    agreed: int = 0
    was_right: bool = True
    offers: dict[tuple[int, ...], dict[int, tuple[int, float]]] = field(default_factory=dict)
    successors: dict[tuple[int, ...], list[tuple[int, int]]] = field(default_factory=dict)
    temperature_bucket: int = 0
    noise: Callable[[Sequence[int], int], float] | None = None
    temperature: float = 0.0
    choices: Callable[[Sequence[int]], tuple[int, int] | None] = lambda _draft: None
    said_before: int = 0

    def run_to(self, draft: Sequence[int]) -> int:
        """So many tokens at the end of context and draft are what the same noise chose there before."""
        run = self.said_before
        for depth, token in enumerate(draft):
            choice = self.choices(draft[:depth])
            run = run + 1 if choice is not None and choice[0] == token else 0
        return run


def noise_verdict(known: list[tuple[int, int]], token: int, noise: Callable[[int], float], temperature: float) -> int:
    """What an entry, of tokens with the levels of their shares, and the noise of each say of a token."""
    if not known:
        return 0
    scores = {each: math.log(_TYPICAL_RECYCLED[level]) / temperature + noise(each) for each, level in known}
    if token not in scores:
        return 1
    best, *others = sorted(scores.values(), reverse=True)
    if scores[token] < best:
        return 3 if best - scores[token] < 1.0 else 2
    lead = best - others[0] if others else math.inf
    return 4 if lead < 0.5 else 5 if lead < 1.5 else 6


def offers_by_path(
    offered: Sequence[tuple[int, int, float, int]],
) -> dict[tuple[int, ...], dict[int, tuple[int, float]]]:
    """Of (token, parent, chance, kind) each, by path: tokens, kinds and chances; what hangs on nothing is left out."""
    result: dict[tuple[int, ...], dict[int, tuple[int, float]]] = {}
    paths: list[tuple[int, ...] | None] = []
    for number, (token, parent, chance, kind) in enumerate(offered):
        above = () if parent == -1 else paths[parent] if 0 <= parent < number else None
        paths.append(None if above is None or token < 0 else (*above, token))
        if above is None or token < 0:
            continue
        here = result.setdefault(above, {})
        if token not in here or chance > here[token][1]:
            here[token] = kind, chance
    return result


def candidates(
    levels: list[tuple[int, Evidence]],
    asked: Asked,
    draft: Sequence[int],
    model: SlowModel,
    follows: bool = True,
    most: int = 12,
    most_recycled: int = 6,
) -> dict[int, tuple[float, Views, View]]:
    """Chance, views and weight set of every token that may come after the context and ``draft``."""
    depth = len(draft)

    def counts(item: Any) -> bool:  # a running request has not ended where it has not gone on yet
        return item[2] or item[1][1] < asked.num_texts or len(item[0]) > depth

    alive: list[tuple[int, Evidence]] = []  # of each level what no longer match has
    seen: set[tuple[int, int, int]] = set()
    for length, found in levels:
        new = [item for item in found if item[1] not in seen]
        seen |= {item[1] for item in new}
        alive.append((length + depth, [item for item in new if list(item[0][:depth]) == list(draft) and counts(item)]))

    def says(item: Any) -> int | None:
        return item[0][depth] if len(item[0]) > depth else None

    def share(items: Evidence, token: int) -> tuple[int, int]:
        votes = sum(says(item) == token for item in items)
        return votes, len(items)

    tops: dict[bool, tuple[int, Evidence]] = {}
    for own in (False, True):
        for length, items in alive:
            if of_source := [item for item in items if item[2] == own]:
                tops.setdefault(own, (length, of_source))
    predicted = asked.prediction[depth] if follows and depth < len(asked.prediction) else None
    tokens = {says(item) for _, items in alive for item in items} | {predicted}
    found_tokens = sorted(token for token in tokens if token is not None)
    text = [NOTHING, *asked.context, *draft]
    before = text[-1]
    is_sure = len(found_tokens) == 1 and max((length for length, _ in tops.values()), default=0) >= _SURE_LENGTH
    known = [] if is_sure else asked.successors.get((text[-2], before)) or asked.successors.get((before,), [])
    is_pair = (text[-2], before) in asked.successors
    offered = asked.offers.get(tuple(draft), {})
    found_tokens += [token for token in offered if token not in found_tokens]
    choice = asked.choices(draft)
    if choice is not None and choice[0] not in found_tokens:
        found_tokens.append(choice[0])
    assert len(found_tokens) <= most, "more than the fast one judges"
    found_tokens += [token for token, _ in known[:most_recycled] if token not in found_tokens]
    result: dict[int, tuple[float, Views, View]] = {}
    for token in found_tokens:
        views: Views = {}
        for own, name in ((True, "own"), (False, "index")):
            if own not in tops:
                continue
            length, items = tops[own]
            newest = max(items, key=lambda item: item[1])
            if own:
                where = int(newest[1][2] >= asked.prompt_length)
            else:
                number = newest[1][1]
                is_late = number >= asked.num_texts - 1
                where = 2 + (number >= asked.num_texts) if is_late else int(number >= asked.num_static)
            votes, support = share(items, token)
            views[name] = (
                length_bucket(length),
                support_bucket(support),
                share_bucket(votes, support),
                says(newest) == token,
                where,
            )
        if predicted is not None:
            views["prediction"] = length_bucket(asked.agreed + depth), asked.was_right, predicted == token
        so_far: Evidence = []
        filled, strongest = 0, (0, 0)
        for length, items in alive:
            if not items:
                continue
            so_far = so_far + items
            votes, support = share(so_far, token)
            bucket = share_bucket(votes, support)
            if filled < 3:
                views[f"level {filled}"] = length_bucket(length), support_bucket(support), bucket
            if strongest[1] == 0:
                strongest = length_bucket(length), bucket
            filled += 1
        bucket = min(7, max(0, int((asked.mean_error + 0.4) * 10)))
        coarse = sum(strongest[0] >= b for b in (3, 5, 8)), sum(strongest[1] >= b for b in (3, 7))
        views["request"] = bucket, *strongest
        views["token"] = ((token * 40503) >> 4) % 1024, *coarse
        views["before"] = ((before * 40503) >> 4) % 1024, *coarse
        views["pair"] = (((token * 40503) ^ (before * 69069 + (before >> 7))) >> 3) % 8192, *coarse
        when = 0 if depth == 0 else 1 if depth < 4 else 2
        if offered:
            kind, chance = offered.get(token) or max(offered.values(), key=lambda each: each[1])
            views["offer"] = kind, token in offered, offered_bucket(chance), when
        if known:
            ranks = [each for each, _ in known]
            rank = ranks.index(token) if token in ranks else 8
            views["recycled"] = asked.temperature_bucket, is_pair, rank, known[rank if rank < 8 else 0][1]
        if asked.noise is not None:
            verdict = noise_verdict(known, token, partial(asked.noise, draft), asked.temperature)
            height = min(7, max(0, int(2 * (asked.noise(draft, token) + 1) + 1)))
            views["noise"] = verdict, height, *coarse
        if choice is not None:
            newest_says = [says(max(items, key=lambda item: item[1])) for _, items in tops.values()]
            agreement = (2 if choice[0] in newest_says else 1) if tops else 0
            run = sum(asked.run_to(draft) >= start for start in (1, 2, 4, 8, 16))
            views["keyed"] = choice[1], run, agreement, asked.temperature_bucket, token == choice[0]
        sources = (
            True in tops,
            False in tops,
            predicted is not None,
            bool(offered),
            bool(known),
            asked.noise is not None,
            choice is not None,
        )
        chosen = *sources, min(max(filled, 1), 3) - 1, when
        result[token] = model.chance(views, chosen), views, chosen
    return result


def goes_on(levels: list[tuple[int, Evidence]], draft: Sequence[int]) -> bool:
    """Whether any place agrees with all of the draft and says what comes next."""
    places = [item[0] for _, found in levels for item in found]
    return any(len(said) > len(draft) and list(said[: len(draft)]) == list(draft) for said in places)
