"""What is asked of the drafting kernels for one request, and the draft that they write."""

from __future__ import annotations

from typing import Annotated, Final

import numpy as np

from ssd.compiled.addresses import Address, Float64, Float64s, Int64, Record, TokenIds, float64_array, inlined

MAX_DRAFT: Final = 128
"""Longest draft; a greater limit is cut to it."""


class DraftRecord(Record):
    """A chain or a tree of ``size`` tokens.

    ``source`` : what most of the first token's evidence is, a number in SOURCES. ``parents`` : of a tree, the node that
    each comes after, -1 for the context's end. ``probabilities`` : the estimate of each token, where it is
    ``estimated``.
    """

    size: Int64
    match_length: Int64
    source: Int64
    is_tree: Int64
    estimated: Int64
    tokens: Annotated[TokenIds, np.int32, MAX_DRAFT]
    parents: Annotated[TokenIds, np.int32, MAX_DRAFT]
    probabilities: Annotated[Float64s, np.float64, MAX_DRAFT]


@inlined
def clear(out: DraftRecord) -> None:
    """Make ``out`` an empty draft."""
    out.size, out.match_length, out.source, out.is_tree, out.estimated = 0, 0, 0, 0, 1


@inlined
def parent_of(out: DraftRecord, node: int) -> int:
    """The node that one comes after, -1 for the context's end."""
    return int(np.int64(out.parents[node])) if out.is_tree == 1 else node - 1


SOURCES: Final = (
    "warm", "segment", "tail", "own", "prediction", "head", "model", "guess", "recycled", "coupled",
)  # fmt: skip
"""By the number in a draft; those of the index first, numbered as `lookup.origin_of` has it; offers as `Offers` has
their kinds."""

NUM_SOURCES: Final = 16
_names = [*SOURCES, "none"]


def source_number(name: str) -> int:
    """The number of a ``Draft.source``; of names that nobody knows only the first few have one each."""
    if name not in _names:
        if len(_names) == NUM_SOURCES:
            name = "none"
        else:
            _names.append(name)
    return _names.index(name)


def source_name(number: int) -> str:
    """The name that has a number."""
    return _names[number]


class Ask(Record):
    """A ``DraftRequest`` as kernels find it.

    ``context`` : int32[context_length]. ``snapshot``, ``model`` : what is searched, the acceptance model.
    ``prediction`` : int32[prediction_length], the client's text. ``price`` : of every token, where ``num_prices`` is 0;
    else ``prices`` : float64[num_prices], of the i-th token, not falling; the last one holds beyond. ``warmth`` : how
    the target chooses: 0 greedily or in a way not known, 1 at a temperature up to 0.5, 2 above. ``num_offered`` : of an
    `Offers`, whose arrays are the ``offered`` ones. ``successors`` : of a `SuccessorTable`, 0 for none. ``no_lookup`` :
    whether nothing is looked up, neither in the index nor in own text. ``temperature`` : the request's where the target
    draws with noise that is known, else 0; ``noise`` : of a `NoiseRecord` then. ``choices`` : of the `ChoiceTable` that
    such a request drafts from, 0 for none; ``may_teach`` : whether what it says is entered there.
    """

    context: Address
    context_length: Int64
    prompt_length: Int64
    limit: Int64
    snapshot: Address
    model: Address
    is_tree: Int64
    price: Float64
    prices: Address
    num_prices: Int64
    prediction: Address
    prediction_length: Int64
    warmth: Int64
    offered_tokens: Address
    offered_parents: Address
    offered_chances: Address
    offered_kinds: Address
    num_offered: Int64
    successors: Address
    no_lookup: Int64
    temperature: Float64
    noise: Address
    choices: Address
    may_teach: Int64


@inlined
def price_of(ask: Ask, number: int) -> float:
    """The price of a draft's token."""
    if ask.num_prices == 0:
        return ask.price
    return float(float64_array(ask.prices, ask.num_prices)[min(number, ask.num_prices - 1)])
