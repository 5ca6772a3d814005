"""Ways to decode a recorded request: each says what a step emits and takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from benchmarks.hybrid.costs import CARRYING_S, LOOKUP_S, POSITION_S, draft_seconds, pass_seconds
from benchmarks.hybrid.drafters import OTHER_TOKENS, OurDrafter, RecordedDrafter
from benchmarks.hybrid.recordings import Recording
from ssd.drafting.arbiter import Arbiter
from ssd.drafting.protocol import EMPTY_DRAFT, Draft, Drafter, DraftRequest
from ssd.pricing.calibration import KeptShares
from ssd.pricing.rate import Rate
from ssd.retrieval.snapshot import Snapshot

_GREEDY = 0.0


@dataclass(frozen=True, slots=True)
class Took:
    """A step. ``asked`` : whether the other drafter was."""

    emitted: int
    seconds: float
    asked: bool


@dataclass(slots=True, eq=False)
class Place:
    """Where a request stands: ``known`` of its output tokens are there, at least 1."""

    request_id: str
    recording: Recording
    text: npt.NDArray[np.int32]
    snapshot: Snapshot
    known: int = 1

    @property
    def position(self) -> int:
        """Of the next token in the text."""
        return len(self.recording.prompt) + self.known

    @property
    def left(self) -> int:
        """Output tokens still to come."""
        return len(self.recording.output) - self.known


class Decoder(Protocol):
    """One way of decoding."""

    def step(self, place: Place) -> Took:
        """Do one step."""
        ...

    def finish(self, request_id: str) -> None:
        """The request has ended."""
        ...


class OtherAlone:
    """Always the other drafter."""

    def step(self, place: Place) -> Took:
        """Do one step."""
        return _by_other(place)

    def finish(self, request_id: str) -> None:
        """Nothing is kept."""


def _by_other(place: Place) -> Took:
    size = min(OTHER_TOKENS, place.left - 1)
    emitted = min(int(place.recording.emitted[place.known - 1]), size + 1)
    took = pass_seconds(1 + size, place.position) + (draft_seconds(size) if size else 0.0)
    return Took(emitted, took, size > 0)


class WithDrafter:
    """Drafts of one of our drafters, priced and cut as the engine does where passes take what the cost model says."""

    def __init__(self, drafter: Drafter, max_draft: int, *, tree: bool) -> None:
        self._drafter, self._max_draft, self._tree = drafter, max_draft, tree
        self._rate = Rate()
        self._shares = KeptShares()
        self._proposed = EMPTY_DRAFT

    def step(self, place: Place) -> Took:
        """Do one step."""
        draft = self.draft(place)
        path = right_path(draft, place)
        took = Took(len(path) + 1, LOOKUP_S + pass_seconds(1 + len(draft.token_ids), place.position), False)
        self.observe(place, draft, path, took)
        return took

    def draft(self, place: Place) -> Draft:
        """What is verified."""
        alone = pass_seconds(1, place.position)
        request = DraftRequest(
            place.request_id,
            place.text[: place.position],
            len(place.recording.prompt),
            place.snapshot,
            min(self._max_draft, place.left - 1),
            prices=np.array([self._rate.price(1, alone, POSITION_S)]),
            tree=self._tree,
        )
        draft = self._drafter.propose([request])[0]
        if draft.probabilities is None:
            return draft
        self._proposed = draft
        draft = replace(draft, probabilities=self._shares.corrected(_GREEDY, draft))
        expected = np.ones(1 + len(draft.token_ids))
        expected[1:] += np.cumsum(draft.chances())
        return draft.cut(self._rate.best(expected, alone + POSITION_S * np.arange(float(len(expected)))))

    def observe(self, place: Place, draft: Draft, path: list[int], took: Took) -> None:
        """Learn what came of a draft, in a step that may have taken another; what it emits must be what was said."""
        if draft.token_ids[path].tolist() != place.text[place.position : place.position + len(path)].tolist():
            raise AssertionError("tokens were accepted that the recorded text does not have")
        self._shares.observe(_GREEDY, self._proposed, place.text[place.position :][: len(path) + 1].tolist())
        told = draft if draft.parents is None else replace(draft, path=np.array(path, np.int32))
        self._drafter.observe(place.request_id, told, len(path))
        self._rate.observe(took.emitted, took.seconds)

    def finish(self, request_id: str) -> None:
        """The request has ended."""
        self._drafter.finish(request_id)


class Together(WithDrafter):
    """The arbiter over ours and the other."""

    def __init__(self, other: RecordedDrafter, max_draft: int) -> None:
        self._other, self._now = other, 0.0
        arbiter = Arbiter([_warm(OurDrafter()), other], clock=lambda: self._now)
        super().__init__(arbiter, max_draft, tree=True)

    def step(self, place: Place) -> Took:
        """Do one step."""
        self._other.begin(place.recording)
        before = self._other.num_asked
        draft = self.draft(place)
        path = right_path(draft, place)
        seconds = LOOKUP_S + pass_seconds(1 + len(draft.token_ids), place.position)
        asked = self._other.num_asked > before
        if asked:
            seconds += draft_seconds(min(OTHER_TOKENS, place.left - 1)) + CARRYING_S
        took = Took(len(path) + 1, seconds, asked)
        self._now += seconds
        self.observe(place, draft, path, took)
        return took


class Oracle(WithDrafter):
    """Of ours alone and the other alone the one that emits more, known beforehand; its own cost is paid."""

    def __init__(self, max_draft: int, *, tree: bool) -> None:
        super().__init__(_warm(OurDrafter()), max_draft, tree=tree)

    def step(self, place: Place) -> Took:
        """Do one step."""
        draft = self.draft(place)
        path = right_path(draft, place)
        took = Took(len(path) + 1, LOOKUP_S + pass_seconds(1 + len(draft.token_ids), place.position), False)
        other = _by_other(place)
        if other.emitted > took.emitted:
            took = other
        self.observe(place, draft, path, took)
        return took


def right_path(draft: Draft, place: Place) -> list[int]:
    """The indices of the accepted tokens of a draft: its longest branch that the recorded text agrees with."""
    text = place.text[place.position : place.position + place.left - 1].tolist()
    parents = draft.parents_of_all()
    right = list[int]()  # of each token how many of its branch are right, 0 where one is wrong
    for token, parent in zip(draft.token_ids.tolist(), parents, strict=True):
        depth = right[parent] if parent >= 0 else 0
        is_right = (parent < 0 or depth > 0) and depth < len(text) and token == text[depth]
        right.append(depth + 1 if is_right else 0)
    path = list[int]()
    node = max(range(len(right)), key=lambda each: right[each], default=-1)
    if node < 0 or right[node] == 0:
        return path
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


def decoders(max_draft: int) -> dict[str, Callable[[], Decoder]]:
    """All ways, by the name of their speed-up in the JSON."""
    return {
        "other_alone": OtherAlone,
        "ours_alone": lambda: WithDrafter(_warm(OurDrafter()), max_draft, tree=True),
        "ours_alone_path": lambda: WithDrafter(_warm(OurDrafter()), max_draft, tree=False),
        "both": lambda: Together(RecordedDrafter(), max_draft),
        "oracle": lambda: Oracle(max_draft, tree=False),
        "oracle_tree": lambda: Oracle(max_draft, tree=True),
    }


def _warm(drafter: OurDrafter) -> OurDrafter:
    drafter.warm_up()
    return drafter
