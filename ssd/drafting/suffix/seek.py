"""The tokens that may come next at a position of a draft: from places, prediction, offers and the target itself."""

from __future__ import annotations

from typing import Final

from ssd.compiled.addresses import Int64s, inlined
from ssd.drafting.suffix.foreseen import weigh
from ssd.drafting.suffix.gather import Evidence, Texts
from ssd.drafting.suffix.judge import Candidates, Position
from ssd.drafting.suffix.recycled import NOT_ASKED, recall
from ssd.drafting.suffix.vote import NOWHERE, Votes, add_offered, add_voteless, count_votes, keep_greatest

SURE_LENGTH: Final = 9
"""Where so many tokens agree and all places say the same, the target's own candidates are not looked up."""


@inlined
def _is_sure(evidence: Evidence, size: int, passed: int, votes: Votes) -> bool:
    top = min(votes.index_top, votes.own_top)
    return bool(size == 1 and top < NOWHERE and evidence.lengths[top] + passed >= SURE_LENGTH)


@inlined
def seek(
    texts: Texts,
    evidence: Evidence,
    alive: Int64s,
    num_alive: int,
    at: Position,
    most: int,
    most_recycled: int,
    found: Candidates,
) -> int:
    """Find the candidates of a position: how many there are.

    ``alive`` : samples that agree with the draft so far, see ``count_votes``. At most ``most`` tokens with votes, the
    predicted one, that which the same noise chose before and those offered, of which the greatest share of votes or
    chance decides; beside them ``most_recycled`` of the target's own.
    """
    votes, recycled = found.votes, found.recycled
    size = count_votes(texts, evidence, alive, num_alive, at.passed, at.predicted, votes)
    recycled.count = NOT_ASKED
    if found.successors != 0 and not _is_sure(evidence, size, at.passed, votes):
        recall(found.successors, at.earlier, at.before, recycled)
    if found.foreseen.is_known:
        weigh(found.foreseen, recycled)
    size, keyed = add_offered(found.forest, at.offered, size, votes), found.keyed.token
    if keyed >= 0:
        size = add_voteless(keyed, size, votes)
    if size > most:
        size = keep_greatest(votes, size, most, evidence.num_levels, at.predicted, keyed, found.forest, at.offered)
    for rank in range(min(most_recycled, recycled.count)):
        size = add_voteless(recycled.tokens[rank], size, votes)
    return size
