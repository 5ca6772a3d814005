"""What the suffix drafter saw at every position of a draft, for people who ask why.

The drafter itself is asked, once more for each token of its draft, with a price at that token that nothing can pay:
it ends there, and what its kernels last looked at is what they looked at there. So all that is said is true of the
drafter that serves, which knows nothing of this and does nothing for it.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from ssd.compiled.addresses import Record, address, dtype_of
from ssd.drafting.acceptance import (
    BEFORE,
    INDEX,
    INPUTS,
    KEYED,
    LEVEL,
    LEVEL_VIEWS,
    NOISE,
    OFFER,
    OWN,
    PAIR,
    PREDICTION,
    RECYCLED,
    REQUEST,
    TOKEN,
    Model,
)
from ssd.drafting.ask import MAX_DRAFT
from ssd.drafting.drafter import SuffixDrafter
from ssd.drafting.grow import CHAIN_CANDIDATES, CONTINUED_CONTEXT
from ssd.drafting.lookup import IN_SEGMENT, Evidence
from ssd.drafting.propose import Frame
from ssd.drafting.protocol import Draft, DraftRequest
from ssd.drafting.vote import MAX_VOTED
from ssd.retrieval.segment import GUARD_BYTES, Segment, unpack
from ssd.retrieval.snapshot import Snapshot

CONTEXT_END: Final = -1
"""The node that the first tokens of a draft come after."""

OWN_TEXT: Final = -1
"""In the place of a segment's number: the request's own text."""

_TOO_MUCH: Final = 2.0
"""A price that no token can pay: chances are below 1."""

_CONTINUATION: Final = 2 * MAX_DRAFT
Ended = Literal["limit", "price", "nothing"]
_VIEW_NAMES: Final = {
    OWN: "own text",
    INDEX: "index",
    PREDICTION: "prediction",
    LEVEL: "places, longest match",
    LEVEL + 1: "places, next length",
    LEVEL + 2: "places, shortest",
    REQUEST: "this request so far",
    TOKEN: "this token",
    BEFORE: "token before it",
    PAIR: "both tokens",
    OFFER: "offers",
    RECYCLED: "target's own candidates",
    NOISE: "noise",
    KEYED: "noise before",
}
assert len(_VIEW_NAMES) == INPUTS and LEVEL_VIEWS == 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the end of the text stands as well.

    ``segment`` : its number in the snapshot, or OWN_TEXT. ``position`` : there, of the token that follows. ``weight`` :
    occurrences that it stands for, itself and those left out; of many at least so many, they are not counted out.
    ``level`` : number of the match length it was found at. ``goes_on`` : what follows, to the end of
    its sequence, or _CONTINUATION tokens.
    """

    segment: int
    position: int
    weight: float
    level: int
    goes_on: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """Places that were looked up.

    ``after`` : the node whose path was looked up behind the context, CONTEXT_END for the context alone; ``depth`` :
    draft tokens on that path. ``lengths`` : of the matches, longest first. ``places`` : those of longer matches first.
    """

    after: int
    depth: int
    lengths: tuple[int, ...]
    places: tuple[Place, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What one view of the acceptance model says of a candidate.

    ``chance`` : what came of candidates that looked alike to it, ``count`` of them, where 2 is none and 100 or more is
    100. ``weight`` : its log odds count so much.
    """

    name: str
    chance: float
    count: float
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A token that may come next.

    ``own_votes``, ``index_votes`` : by match length. ``chance`` : that it is accepted once those before it are;
    ``product`` : that it and those before it are. ``node`` : its number in the draft, None where it was left out.
    """

    token_id: int
    node: int | None
    own_votes: tuple[float, ...]
    index_votes: tuple[float, ...]
    chance: float
    product: float
    views: tuple[View, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where candidates were judged.

    ``after`` : the node before it, CONTEXT_END for the first; ``depth`` : draft tokens before it. ``lookup`` : number
    of the lookup whose places were asked; ``agreeing_places`` : numbers of those that agree with the draft so far.
    ``own_support``, ``index_support`` : how many occurrences that are, by match length. ``candidates`` : the most
    probable first.
    """

    after: int
    depth: int
    lookup: int
    agreeing_places: tuple[int, ...]
    own_support: tuple[float, ...]
    index_support: tuple[float, ...]
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A draft and how it came about.

    ``positions`` : one behind the context and one behind each node, in the order in which they were looked at; one
    whose draft was cut by the limit is there too. ``ended`` : why no more was drafted: the "limit", that the most
    probable of what was left is not worth its "price", or that "nothing" was found to go on with.
    """

    draft: Draft
    lookups: tuple[Lookup, ...]
    positions: tuple[Position, ...]
    ended: Ended

    def best_left_out(self) -> Candidate | None:
        """The most probable candidate that was not drafted: of a chain behind its end, of a tree anywhere."""
        where = self.positions[-1:] if self.draft.parents is None else self.positions
        left = [candidate for position in where for candidate in position.candidates if candidate.node is None]
        return max(left, key=lambda candidate: candidate.product, default=None)


def see(drafter: SuffixDrafter, request: DraftRequest, price: float) -> Seen:
    """What ``drafter`` drafts for ``request``, and all that it saw. Learns nothing, and forgets the request.

    ``request`` : brings a snapshot and no prices, prediction, offers, sampling or texts of others, and nothing is known
    of it yet; its context holds a token and its limit is 1 to MAX_DRAFT. ``price`` : of a token. O(tokens) drafts.
    """
    assert request.limit >= 1 and len(request.context) and request.snapshot is not None
    reader = _Reader(drafter, request, price)
    draft = reader.ask(request.limit + 1)
    size, product = len(draft.token_ids), draft.chances() if len(draft.token_ids) else np.empty(0)
    lookups: list[Lookup] = []
    positions: list[Position] = []
    for node in range(CONTEXT_END, size):
        begun = reader.ask(node + 1)
        assert begun.token_ids.tolist() == draft.token_ids[: node + 1].tolist()
        before = 1.0 if node == CONTEXT_END else float(product[node])
        lookup, position = reader.position(node, draft, before, lookups)
        if lookup is not None:
            lookups.append(lookup)
        positions.append(position)
    seen = Seen(draft=draft, lookups=tuple(lookups), positions=tuple(positions), ended="limit")
    if size < request.limit:
        seen = replace(seen, ended="nothing" if seen.best_left_out() is None else "price")
    return seen


class _Reader:
    """Asks a drafter and reads what its kernels left."""

    def __init__(self, drafter: SuffixDrafter, request: DraftRequest, price: float) -> None:
        assert request.snapshot is not None
        self._drafter, self._request, self._price = drafter, request, price
        self._context, self._snapshot = request.context, request.snapshot
        self._model = _record_at(Model, drafter.model_of(request.learned).address)

    def ask(self, wall: int) -> Draft:
        """The draft, of which the token number ``wall`` cannot pay."""
        prices = np.full(self._request.limit + 2, self._price)
        prices[wall:] = _TOO_MUCH
        draft = self._drafter.propose([replace(self._request, prices=prices)])[0]
        self._drafter.finish(self._request.request_id)  # no step goes on from another: each begins with a lookup
        return draft

    def position(
        self, node: int, draft: Draft, product: float, known: Sequence[Lookup]
    ) -> tuple[Lookup | None, Position]:
        """What was looked at last, behind ``node`` of ``draft``; and its lookup where that is none of ``known``."""
        frame = _record_at(Frame, self._drafter.workspace_address)
        path = path_to(node, draft)
        number, after, evidence, text = self._last_lookup(frame, path, known)
        lookup = known[number] if number < len(known) else self._lookup(after, path, evidence, text)
        passed = draft.token_ids[path[lookup.depth :]].tolist()
        agreeing = [i for i, place in enumerate(lookup.places) if list(place.goes_on[: len(passed)]) == passed]
        texts = [lookup.places[number].goes_on for number in agreeing]
        said = {text[len(passed)] for text in texts if len(text) > len(passed)}
        size = min(len(said), MAX_VOTED if self._request.tree else CHAIN_CANDIDATES)
        candidates, levels = frame["candidates"], slice(len(lookup.lengths))
        votes = candidates["votes"]
        parents = draft.parents_of_all()
        children = {int(draft.token_ids[child]): child for child, parent in enumerate(parents) if parent == node}
        found = [
            Candidate(
                token_id=int(votes["tokens"][row]),
                node=children.get(int(votes["tokens"][row])),
                own_votes=tuple(votes["by_token"][row]["own"][levels].tolist()),
                index_votes=tuple(votes["by_token"][row]["index"][levels].tolist()),
                chance=float(candidates["chances"][row]),
                product=product * float(candidates["chances"][row]),
                views=self._views(candidates["inputs"][row], int(candidates["sets"][row])),
            )
            for row in range(size)
        ]
        position = Position(
            after=node,
            depth=len(path),
            lookup=number,
            agreeing_places=tuple(agreeing),
            own_support=tuple((votes["own_support"][levels] * bool(agreeing)).tolist()),
            index_support=tuple((votes["index_support"][levels] * bool(agreeing)).tolist()),
            candidates=tuple(sorted(found, key=lambda candidate: -candidate.chance)),
        )
        return (lookup if number == len(known) else None), position

    def _last_lookup(self, frame: Any, path: list[int], known: Sequence[Lookup]) -> tuple[int, int, Any, Any]:
        """Which lookup the places come from: its number among ``known`` or the next one, the node it is behind, its
        evidence, and the text whose own places are meant."""
        depth = spare = 0
        if self._request.tree:
            if path:
                last = frame["tree"]["nodes"][path[-1]]
                depth, spare = int(last["looked_up_at"]), int(last["lookup"])
        else:
            looked_up = frame["lookups"]
            continued = self._drafter.workspace_address + _offset_of(Frame, "continued")
            if int(looked_up["context"]) == continued:
                depth = int(looked_up["context_length"]) - min(len(self._context), CONTINUED_CONTEXT)
                spare = 1
        after = path[depth - 1] if depth else CONTEXT_END
        number = spare if self._request.tree else 0
        evidence = _record_at(Evidence, int(frame["evidences"]) + number * dtype_of(Evidence).itemsize)
        if spare == 0:
            text: Any = self._context
        elif self._request.tree:
            text = frame["tree"]["texts"][spare - 1][: frame["tree"]["lengths"][spare - 1]]
        else:
            text = frame["continued"][: min(len(self._context), CONTINUED_CONTEXT) + depth]
        # A chain that may not look up again goes on with no place: that is a lookup which found nothing.
        same = [
            number
            for number, lookup in enumerate(known)
            if lookup.after == after and len(lookup.lengths) == int(evidence["num_levels"])
        ]
        return (same[0] if same else len(known)), after, evidence, text

    def _lookup(self, after: int, path: list[int], evidence: Any, text: npt.NDArray[np.int32]) -> Lookup:
        num_levels = int(evidence["num_levels"])
        ends = [int(end) for end in evidence["ends"][:num_levels]]
        depth = path.index(after) + 1 if after != CONTEXT_END else 0
        left_out = len(self._context) + depth - len(text)  # of a long context only the end is looked up again
        places = []
        for sample in range(ends[-1] if ends else 0):
            level = next(level for level in range(num_levels) if sample < ends[level])
            at, weight = int(evidence["at"][sample]), float(evidence["weights"][sample])
            if int(evidence["kind"][sample]) == IN_SEGMENT:
                number, position = _segment_at(self._snapshot, at)
                goes_on = _after(self._snapshot.segments[number], position)
            else:
                number, position, goes_on = OWN_TEXT, at + left_out, _repeated(text, at)
            places.append(Place(segment=number, position=position, weight=weight, level=level, goes_on=goes_on))
        lengths = tuple(int(length) for length in evidence["lengths"][:num_levels])
        return Lookup(after=after, depth=depth, lengths=lengths, places=tuple(places))

    def _views(self, inputs: npt.NDArray[np.int64], weight_set: int) -> tuple[View, ...]:
        weights = self._model["weights"][weight_set]
        return tuple(
            View(
                name=_VIEW_NAMES[view],
                chance=float(self._model["chances"][entry]),
                count=float(self._model["counts"][entry]),
                weight=float(weights[view]),
            )
            for view, entry in enumerate(inputs.tolist())
            if entry >= 0
        )


def path_to(node: int, draft: Draft) -> list[int]:
    """Nodes from the context's end to ``node``, itself the last."""
    parents, path = draft.parents_of_all(), list[int]()
    while node != CONTEXT_END:
        path.append(node)
        node = parents[node]
    return path[::-1]


def _segment_at(snapshot: Snapshot, at: int) -> tuple[int, int]:
    """In which segment an address lies, and at which position."""
    for number, segment in enumerate(snapshot.segments):
        offset = at - address(segment.text) - GUARD_BYTES
        if 0 <= offset <= segment.width * len(segment):
            return number, offset // segment.width
    raise AssertionError("a place in no segment")


def _after(segment: Segment, position: int) -> tuple[int, ...]:
    """What follows in a segment, to the end of the sequence."""
    count = min(_CONTINUATION, len(segment) - position)
    return _to_its_end(unpack(segment.text, count, segment.width, start=position).tolist())


def _repeated(text: npt.NDArray[np.int32], position: int) -> tuple[int, ...]:
    """What follows in own text, which is taken to go on from its own begin, see `lookup.next_token`."""
    tail = text[position:].tolist()
    return _to_its_end((tail * (_CONTINUATION // len(tail) + 1))[:_CONTINUATION])


def _to_its_end(tokens: list[int]) -> tuple[int, ...]:
    return tuple(itertools.takewhile(lambda token: token >= 0, tokens))


def _record_at(record: type[Record], at: int) -> Any:
    """The record at an address, by numpy: valid while the memory is held."""
    layout = dtype_of(record)
    return np.frombuffer(memoryview((ctypes.c_char * layout.itemsize).from_address(at)), layout)[0]


def _offset_of(record: type[Record], name: str) -> int:
    fields = dtype_of(record).fields
    assert fields is not None
    return int(fields[name][1])
