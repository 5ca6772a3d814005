"""``ssd-cache explain``: what would be drafted after a text, from which places, and why no more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from cache_builder.caches.held import read_learned
from cache_builder.caches.inspect import fingerprint_of
from cache_builder.caches.wording import Decode, percent, shown
from ssd.config import MAX_SPECULATIVE_TOKENS, DraftConfig
from ssd.drafting.acceptance_model import AcceptanceModel
from ssd.drafting.drafter import SuffixDrafter
from ssd.drafting.protocol import DraftRequest
from ssd.drafting.seen import CONTEXT_END, OWN_TEXT, Candidate, Lookup, Place, Position, Seen, see
from ssd.errors import CacheError, ConfigError, StoreUnavailable, TokenizerMismatch
from ssd.retrieval.directory import load_segments
from ssd.retrieval.files import read_manifest
from ssd.retrieval.packed import unpack
from ssd.retrieval.segment_store import LearnedState
from ssd.retrieval.snapshot import Snapshot, make_snapshot, segment_table

DEFAULT_PRICE: Final = 0.1
"""Of a drafted token, in accepted ones: what a drafter takes where nobody has measured a pass."""

UNKNOWN: Final = (
    "A server knows more: text it has not sealed yet, what other requests say just now, what its model held likely "
    "before, and its own price of a token, measured."
)

_SHOWN_BEFORE: Final = 12
_SHOWN_AFTER: Final = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """A draft and what it was made of.

    ``context`` : the text, of which the first ``prompt_length`` tokens are the prompt. ``snapshot`` : what was
    searched. ``learned_from`` : candidates that the directory's learned.bin rests on, None where there is none that
    can be used.
    """

    path: Path
    context: list[int]
    prompt_length: int
    snapshot: Snapshot
    seen: Seen
    is_tree: bool
    limit: int
    price: float
    learned_from: int | None

    def text_of(self, lookup: Lookup) -> list[int]:
        """The text that was looked up: the context and the path to a node."""
        return [*self.context, *(self.token(node) for node in self.path_to(lookup.after))]

    def path_to(self, node: int) -> list[int]:
        """Nodes of the draft from the context's end to ``node``, itself the last."""
        parents, path = self.seen.draft.parents_of_all(), list[int]()
        while node != CONTEXT_END:
            path.append(node)
            node = parents[node]
        return path[::-1]

    def token(self, node: int) -> int:
        """Of a node of the draft."""
        return int(self.seen.draft.token_ids[node])

    def before(self, place: Place, lookup: Lookup) -> list[int]:
        """The last tokens before a place."""
        first = max(0, place.position - _SHOWN_BEFORE)
        if place.segment == OWN_TEXT:
            return self.text_of(lookup)[first : place.position]
        segment = self.snapshot.segments[place.segment]
        tokens: list[int] = unpack(segment.text, place.position - first, segment.width, start=first).tolist()
        return tokens[max((i + 1 for i, token in enumerate(tokens) if token < 0), default=0) :]

    def name_of(self, place: Place) -> str:
        """Where a place lies, for people."""
        return "own text" if place.segment == OWN_TEXT else self.snapshot.segments[place.segment].segment_id

    def why_ended(self, decode: Decode) -> str:
        """One sentence."""
        if self.seen.ended == "limit":
            return f"the draft limit of {self.limit} tokens is reached"
        left = self.seen.best_left_out()
        if left is not None:
            return (
                f"the most probable token left out is {shown([left.token], decode)}: it comes, with all before it, in "
                f"{percent(left.product)} of cases, and drafting it costs {self.price:g} of an accepted token"
            )
        if not self.seen.lookups[0].lengths:
            return "the last token stands nowhere else, neither in the cache nor earlier in the text"
        return "the texts that agree with the draft end there, and what the draft ends with stands nowhere else"

    def as_json(self, decode: Decode) -> dict[str, Any]:
        """For ``--json``. ``decode`` : from ids to text, None leaves texts out."""

        def said(name: str, ids: Sequence[int]) -> dict[str, Any]:
            return {name: list(ids)} | ({} if decode is None else {f"{name}_text": decode(ids)})

        draft, chances = self.seen.draft, self.seen.draft.chances() if len(self.seen.draft.token_ids) else np.empty(0)
        return {
            "report": "explain",
            "path": str(self.path),
            "prompt_tokens": self.prompt_length,
            "output_tokens": len(self.context) - self.prompt_length,
            "shape": "tree" if self.is_tree else "chain",
            "draft_limit": self.limit,
            "price": self.price,
            "learned_from": self.learned_from,
            "segments": len(self.snapshot.segments),
            "index_tokens": self.snapshot.num_tokens,
            "draft": {
                "token_ids": draft.token_ids.tolist(),
                **({} if decode is None else {"texts": [decode([token]) for token in draft.token_ids.tolist()]}),
                "parents": draft.parents_of_all(),
                "chances": [] if draft.probabilities is None else draft.probabilities.tolist(),
                "products": chances.tolist(),
                "source": draft.source,
                "match_length": draft.match_length,
            },
            "ended": {"reason": self.seen.ended, "sentence": self.why_ended(decode)},
            "lookups": [
                {
                    "after": lookup.after,
                    "lengths": list(lookup.lengths),
                    "places": [
                        {
                            "where": self.name_of(place),
                            "position": place.position,
                            "length": lookup.lengths[place.level],
                            "stands_for": place.weight,
                            **said("before", self.before(place, lookup)),
                            **said("goes_on", place.goes_on[:_SHOWN_AFTER]),
                        }
                        for place in lookup.places
                    ],
                }
                for lookup in self.seen.lookups
            ],
            "positions": [
                {
                    "after": position.after,
                    "depth": position.depth,
                    "lookup": position.lookup,
                    "agreeing_places": list(position.alive),
                    "own_support": list(position.own),
                    "index_support": list(position.index),
                    "candidates": [_candidate_as_json(candidate, decode) for candidate in position.candidates],
                }
                for position in self.seen.positions
            ],
            "unknown": UNKNOWN,
        }


def explain(
    path: Path,
    context: Sequence[int],
    *,
    prompt_length: int,
    fingerprint: str | None = None,
    is_tree: bool = True,
    limit: int | None = None,
    price: float = DEFAULT_PRICE,
) -> Explanation:
    """What a drafter that has just opened the cache ``path`` drafts after ``context``.

    ``fingerprint`` : of the tokenizer that made the ids, None where nobody says. ``limit`` : most tokens of the draft,
    None for the server's default. ``price`` : of a drafted token, in accepted ones. Changes nothing.
    Raises ConfigError, TokenizerMismatch, CacheError.
    """
    config = DraftConfig()
    limit = config.num_speculative_tokens if limit is None else limit
    if not 1 <= limit <= MAX_SPECULATIVE_TOKENS:
        raise ConfigError(f"the draft limit must be within 1..{MAX_SPECULATIVE_TOKENS}, got {limit}")
    if not 0.0 < price < 1.0:
        raise ConfigError(f"the price of a token must be above 0 and below 1 accepted token, got {price:g}")
    if not context:
        raise ConfigError("there is no text to go on from: give a prompt of at least one token")
    snapshot = _open(path, fingerprint)
    drafter = SuffixDrafter(
        max_match_length=config.max_match_length, min_match_length=config.min_match_length, recycling=False
    )
    stored = read_learned(path)
    learned_from: int | None = None
    if stored is not None:
        try:
            learned_from = AcceptanceModel.from_bytes(stored).num_learned
        except ValueError:
            stored = None  # as a server does; `check` says what is wrong with it
    learned = LearnedState(stored)
    request = DraftRequest(
        "explained", np.array(context, np.int32), prompt_length, snapshot, limit, tree=is_tree, learned=learned
    )
    return Explanation(
        path=path,
        context=list(context),
        prompt_length=prompt_length,
        snapshot=snapshot,
        seen=see(drafter, request, price),
        is_tree=is_tree,
        limit=limit,
        price=price,
        learned_from=learned_from,
    )


def _open(path: Path, fingerprint: str | None) -> Snapshot:
    """All of a directory, as the server finds it that keeps it, or is given it to warm up."""
    own = fingerprint_of(path)
    if fingerprint is not None and fingerprint != own:
        raise TokenizerMismatch(
            f"{path} was made with tokenizer {own}, this one is {fingerprint}: its token ids mean other text. Give the "
            "tokenizer it was made with"
        )
    manifest = read_manifest(path, fingerprint=own)
    if manifest is None:
        raise StoreUnavailable(f"{path} is being replaced at this moment: try again")
    segments, failures = load_segments(path, manifest)
    for failure in failures:
        if isinstance(failure, CacheError):
            raise failure
        raise StoreUnavailable(f"{path} is incomplete: {failure}. Copy or build it again") from failure
    return make_snapshot(0, tuple(segments), segment_table(segments), np.zeros(1, np.int32), 0, 0)


def _candidate_as_json(candidate: Candidate, decode: Decode) -> dict[str, Any]:
    text = {} if decode is None else {"text": decode([candidate.token])}
    return {
        "token_id": candidate.token,
        **text,
        "node": candidate.node,
        "own_votes": list(candidate.own),
        "index_votes": list(candidate.index),
        "chance": candidate.chance,
        "product": candidate.product,
        "views": [
            {"name": view.name, "chance": view.chance, "count": view.count, "weight": view.weight}
            for view in candidate.views
        ],
    }


def votes_of(candidate: Candidate, position: Position) -> tuple[float, float]:
    """A candidate's votes, and how many there are."""
    return sum(candidate.own) + sum(candidate.index), sum(position.own) + sum(position.index)
