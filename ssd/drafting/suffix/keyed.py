"""What is known of the noise behind each node of a draft: its key, and what was chosen under that key before."""

from __future__ import annotations

from typing import Annotated, Final

import numpy as np

from ssd.compiled.addresses import Int64s, inlined
from ssd.compiled.records import Address, Int64, Record
from ssd.drafting.suffix.draft_record import MAX_DRAFT, DraftRecord, parent_of
from ssd.drafting.suffix.foreseen import Foreseen, begin_position
from ssd.drafting.suffix.gather import NOTHING
from ssd.drafting.suffix.keyed_choices import NO_CHOICE, choice_at, choices_at, times_confirmed, token_of

RUNS: Final = 6
"""Buckets of a number of tokens in a row."""

_RUN_BUCKETS: Final = np.searchsorted([1, 2, 4, 8, 16], np.arange(17), side="right")


class Keyed(Record):
    """What was chosen before under the key of the position that is looked at.

    ``choices`` : address of the `ChoiceTable`, 0 where none is looked up. ``token`` : the one chosen, NOTHING where the
    key is new; ``confirmed`` : how often in a row. ``run`` : how many tokens right before the position, drafted or said
    already, are what was known there. ``said_before`` : ``run`` at the context's end.

    ``tokens``, ``runs`` : the same of every position looked at, those behind node n at n + 1.
    """

    choices: Address
    token: Int64
    confirmed: Int64
    run: Int64
    said_before: Int64
    tokens: Annotated[Int64s, np.int64, MAX_DRAFT + 1]
    runs: Annotated[Int64s, np.int64, MAX_DRAFT + 1]


@inlined
def run_bucket(run: int) -> int:
    """0..RUNS - 1."""
    return int(_RUN_BUCKETS[min(run, 16)])


@inlined
def _look_up(keyed: Keyed, foreseen: Foreseen, out: DraftRecord, node: int) -> None:
    choice = choice_at(choices_at(keyed.choices), foreseen.key)
    keyed.token, keyed.confirmed, keyed.run = NOTHING, times_confirmed(choice), keyed.said_before
    if choice != np.uint64(NO_CHOICE):
        keyed.token = token_of(choice)
    if node >= 0:
        above = parent_of(out, node) + 1
        keyed.run = keyed.runs[above] + 1 if keyed.tokens[above] == out.tokens[node] else 0
    keyed.tokens[node + 1], keyed.runs[node + 1] = keyed.token, keyed.run


@inlined
def begin_node(keyed: Keyed, foreseen: Foreseen, out: DraftRecord, node: int, depth: int) -> None:
    """Take up the position behind a node of a draft, -1 for the context's end, behind ``depth`` of its tokens.

    The positions on the path to it have been taken up before. O(depth) with coupled noise, else O(1).
    """
    if foreseen.is_known:
        begin_position(foreseen, out, node, depth)
    if keyed.choices != 0:
        _look_up(keyed, foreseen, out, node)
