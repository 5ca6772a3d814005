"""What running requests lend each other: of each namespace, what its requests have said so far."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import Final

from ssd.drafting.live_texts import LiveTexts
from ssd.engine.sequence import Sequence

Lent = tuple[LiveTexts | None, int]
"""What a row may draft from, and which text of that is its own; -1 for none."""

NOTHING_LENT: Final[Lent] = (None, -1)


def lend(batch: Rows[Sequence], lead_in: int) -> list[Lent]:
    """Of each row, what the rows of its namespace have said, but for those whose text may not reach others.

    ``lead_in`` : tokens of a prompt that stand before what was said, so that its begin is found. A row that nobody
    else lends to gets nothing. O(rows); texts are views.
    """
    members: dict[int, list[int]] = {}
    for row, sequence in enumerate(batch):
        cache = None if sequence.namespace is None else sequence.namespace.cache
        if cache is not None:
            members.setdefault(id(cache), []).append(row)
    lent = [NOTHING_LENT] * len(batch)
    for rows in members.values():
        lenders = [row for row in rows if _lends(batch[row])] if len(rows) > 1 else []
        if not lenders:
            continue
        lead_ins = [min(lead_in, batch[row].num_prompt_tokens) for row in lenders]
        texts = [
            batch[row].context[batch[row].num_prompt_tokens - lead :]
            for row, lead in zip(lenders, lead_ins, strict=True)
        ]
        live = LiveTexts(texts, lead_ins)
        numbers = {row: number for number, row in enumerate(lenders)}
        for row in rows:
            lent[row] = live, numbers.get(row, -1)
    return lent


def _lends(sequence: Sequence) -> bool:
    """Whether others may see its text, and there is some."""
    return sequence.request.learn and sequence.num_tokens > sequence.num_prompt_tokens
