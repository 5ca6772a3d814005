"""Which requests a replay sees, in which order, and which of them count."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np

from cache_builder.evaluation.log import Row


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a stream.

    ``is_scored`` : False: it is learned as a completed request, and no draft is asked for.
    """

    row: Row
    is_scored: bool = True


def shuffled(sessions: Iterable[list[Row]], seed: int) -> list[list[Row]]:
    """The sessions in another order, each whole and its rows in their own order."""
    known = list(sessions)
    return [known[index] for index in np.random.default_rng(seed).permutation(len(known))]


def limited(sessions: Iterable[list[Row]], max_output_tokens: int | None) -> Iterator[list[Row]]:
    """The rows before the first that would make more than ``max_output_tokens``; None: all. Reads no further."""
    num_tokens = 0
    for session in sessions:
        kept: list[Row] = []
        for row in session:
            num_tokens += len(row.output)
            if max_output_tokens is not None and num_tokens > max_output_tokens:
                yield kept
                return
            kept.append(row)
        yield kept


def stream(sessions: Iterable[list[Row]], *, warm: float = 0.0, learned: Iterable[list[Row]] = ()) -> list[Turn]:
    """All of ``learned``, then ``sessions``; of these the first ``warm``, a share of their number, is learned too."""
    known = list(sessions)
    num_warm = int(warm * len(known))
    return [
        *(Turn(row, is_scored=False) for row in chain.from_iterable(learned)),
        *(Turn(row, is_scored=number >= num_warm) for number, session in enumerate(known) for row in session),
    ]


def adversarial(turns: Iterable[Turn], seed: int) -> list[Turn]:
    """What was scored is learned, and after each such request an earlier one comes back with another end.

    Its context and output are those of some request learned so far, up to a random token of the output; from there the
    output goes on as another one does, from a random token of that. So a long match lies once in every output, at a
    place nothing foretells. The changed requests are learned as well.
    """
    random = np.random.default_rng(seed)
    seen: list[Row] = []
    changed: list[Turn] = []
    for turn in turns:
        seen.append(turn.row)
        changed.append(Turn(turn.row, is_scored=False))
        if turn.is_scored:
            one, other = (seen[index] for index in random.integers(len(seen), size=2))
            kept = random.integers(len(one.output)) if len(one.output) > 1 else 0
            rest = random.integers(len(other.output))
            output = np.concatenate([one.output[:kept], other.output[rest:]])
            changed.append(Turn(Row(one.context, output)))
    return changed
