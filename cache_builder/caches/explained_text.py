"""An explanation as text: the draft as a tree with its chances, why it ends, and the places that it was made of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from cache_builder.caches.explain import UNKNOWN, Explanation, votes_of
from cache_builder.caches.wording import Decode, percent, shown
from ssd.drafting.seen import CONTEXT_END, OWN_TEXT, Candidate, Lookup, Position

_MOST_PLACES: Final = 8
_MOST_LEFT_OUT: Final = 2
_LEAST_SHOWN: Final = 0.005
_MOST_VIEWED: Final = 2
_TAIL_TOKENS: Final = 24
_AFTER_TOKENS: Final = 12


def as_text(explanation: Explanation, decode: Decode) -> str:
    """All of it, for people. ``decode`` : from ids to text, None shows ids."""
    parts = [_head(explanation, decode), _draft(explanation, decode), _views(explanation, decode)]
    parts += [_lookup(explanation, lookup, decode) for lookup in explanation.seen.lookups if lookup.lengths]
    return "\n".join(line for part in parts for line in part) + f"\n\n{UNKNOWN}"


def _head(explanation: Explanation, decode: Decode) -> Iterator[str]:
    snapshot, context = explanation.snapshot, explanation.context
    num_output = len(context) - explanation.prompt_length
    yield (
        f"{explanation.path}: {snapshot.num_tokens:,} tokens in {len(snapshot.segments)} segments; "
        + (
            "nothing was learned about acceptance yet, chances are by rule of thumb"
            if not explanation.learned_from
            else f"chances as learned from {explanation.learned_from:,} candidates"
        )
    )
    output = f" and {num_output:,} of output" if num_output else ""
    ending = shown(context[-_TAIL_TOKENS:], decode)
    yield f"the text: {explanation.prompt_length:,} tokens of prompt{output}, ending {ending}"
    first = explanation.seen.lookups[0]
    for level, length in enumerate(first.lengths):
        own = sum(p.weight for p in first.places if p.level == level and p.segment == OWN_TEXT)
        index = sum(p.weight for p in first.places if p.level == level and p.segment != OWN_TEXT)
        at_least = "at least " if any(p.weight > 1.0 for p in first.places if p.level == level) else ""
        if own + index == 0:
            continue  # the places of the longer match
        yield (
            f"  its last {length} tokens {shown(context[-min(length, _TAIL_TOKENS) :], decode)} stand elsewhere"
            f"{' too' if level else ''}: {at_least}{index:.0f} in the cache, {own:.0f} in the text itself"
        )


def _draft(explanation: Explanation, decode: Decode) -> Iterator[str]:
    seen, draft = explanation.seen, explanation.seen.draft
    size = len(draft.token_ids)
    yield ""
    if size == 0:
        yield f"no draft: {explanation.why_ended(decode)}"
    else:
        expected = float(draft.chances().sum())
        yield (
            f"draft: a {'tree' if explanation.is_tree else 'chain'} of {size} tokens from {draft.source!r}, of which "
            f"{expected:.1f} are expected to be accepted, at a price of {explanation.price:g} each"
        )
    if any(position.candidates for position in seen.positions):
        yield "  chance   with all   votes         token (- left out)"
        yield "           before it"
    yield from _below(explanation, CONTEXT_END, 0, decode)
    if size:
        yield f"it ends here: {explanation.why_ended(decode)}"


def _below(explanation: Explanation, after: int, indent: int, decode: Decode) -> Iterator[str]:
    """What comes after a node; further in only where it branches."""
    position = explanation.seen.positions[after + 1]
    taken = [candidate for candidate in position.candidates if candidate.node is not None]
    left = [each for each in position.candidates if each.node is None and each.product >= _LEAST_SHOWN]
    if len(taken) == 1:
        yield _line(taken[0], position, indent, decode)
    for candidate in left[:_MOST_LEFT_OUT]:
        yield _line(candidate, position, indent, decode)
    for candidate in taken:
        if len(taken) > 1:
            yield _line(candidate, position, indent, decode)
        if candidate.node is not None:
            yield from _below(explanation, candidate.node, indent + (len(taken) > 1), decode)


def _line(candidate: Candidate, position: Position, indent: int, decode: Decode) -> str:
    votes, support = votes_of(candidate, position)
    said = f"{votes:.0f} of {support:.0f}"
    mark = "  " * indent + ("- " if candidate.node is None else "")
    token = shown([candidate.token], decode)
    return f"  {percent(candidate.chance):>6}   {percent(candidate.product):>9}   {said:<12}  {mark}{token}"


def _views(explanation: Explanation, decode: Decode) -> Iterator[str]:
    first = explanation.seen.positions[0]
    if first.candidates:
        yield ""
        yield "where the chance of the first token comes from: what each view says, and how much it counts"
    for candidate in first.candidates[:_MOST_VIEWED]:
        views = sorted(candidate.views, key=lambda view: -abs(view.weight))
        said = ", ".join(f"{view.name} {percent(view.chance)} ({view.weight:.2f})" for view in views)
        yield f"  {shown([candidate.token], decode)} {percent(candidate.chance)}: {said}"


def _lookup(explanation: Explanation, lookup: Lookup, decode: Decode) -> Iterator[str]:
    count = len(lookup.places)
    where = "the end of the text" if lookup.after == CONTEXT_END else "the draft's end, looked up again,"
    yield ""
    yield f"places where {where} stands as well" + (f", {_MOST_PLACES} of {count}" if count > _MOST_PLACES else "")
    for place in lookup.places[:_MOST_PLACES]:
        length = lookup.lengths[place.level]
        before = explanation.before(place, lookup)
        stands_for = f" (stands for {place.weight:.0f})" if place.weight > 1.5 else ""
        yield (
            f"  {length:3} tokens  {explanation.name_of(place)} at {place.position:,}{stands_for}: "
            f"{shown(before, decode)} > {shown(place.goes_on[:_AFTER_TOKENS], decode)}"
        )
