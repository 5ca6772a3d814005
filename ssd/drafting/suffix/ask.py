"""What is asked of the drafting kernels for one request, and where its draft goes."""

from __future__ import annotations

from typing import Final

from ssd.compiled.addresses import float64_array, inlined, int32_array
from ssd.compiled.records import Address, Float64, Int64, Record, views_of
from ssd.drafting.sequence_noise import noise_at
from ssd.drafting.suffix.draft_record import DraftRecord
from ssd.drafting.suffix.foreseen import Foreseen
from ssd.drafting.suffix.gather import NOTHING, Evidence, is_own, num_samples, origin_of
from ssd.drafting.suffix.judge import Candidates
from ssd.drafting.suffix.keyed import Keyed
from ssd.drafting.suffix.keyed_choices import learn_choices
from ssd.drafting.suffix.offered import ROOT, Forest, child_of, clear_forest, plant
from ssd.drafting.suffix.prediction import PredictionPlace
from ssd.drafting.suffix.vote import votes_by_source

SOURCES: Final = (
    "warm", "segment", "tail", "own", "prediction", "head", "model", "guess", "recycled", "coupled",
)  # fmt: skip
"""By the number in a draft; those of the index first, numbered as `gather.origin_of` has it; offers as `Offers` has
their kinds."""

_OWN: Final = 3
_PREDICTION: Final = 4
_OFFERED: Final = 5
_RECYCLED: Final = 8
_COUPLED: Final = 9


class Ask(Record):
    """A ``DraftRequest`` as kernels find it.

    ``context`` : int32[context_length]. ``state`` : number of the request's state in the workspace. ``prediction`` :
    int32[prediction_length], the client's text. ``price`` : of every token, where ``num_prices`` is 0; else ``prices``
    : float64[num_prices], of the i-th token, not falling; the last one holds beyond. ``warmth`` : how the
    target chooses: 0 greedily or in a way not known, 1 at a temperature up to 0.5, 2 above. ``num_offered`` : of an
    `Offers`, whose arrays are the ``offered`` ones. ``successors`` : of a `SuccessorTable`, 0 for none. ``no_lookup`` :
    whether nothing is looked up, neither in the index nor in own text. ``temperature`` : the request's where the target
    draws with noise that is known, else 0; ``noise`` : of a `NoiseRecord` then. ``choices`` : of the `ChoiceTable` that
    such a request drafts from, 0 for none; ``may_teach`` : whether what it says is entered there.
    """

    context: Address
    context_length: Int64
    prompt_length: Int64
    limit: Int64
    state: Int64
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


asks_at = views_of(Ask)


@inlined
def price_of(ask: Ask, number: int) -> float:
    """The price of a draft's token."""
    if ask.num_prices == 0:
        return ask.price
    return float(float64_array(ask.prices, ask.num_prices)[min(number, ask.num_prices - 1)])


@inlined
def predicted_token(ask: Ask, prediction: PredictionPlace, depth: int) -> int:
    """What the client's prediction has ``depth`` tokens on, NOTHING where it has ended."""
    at = prediction.place + depth
    return int(int32_array(ask.prediction, ask.prediction_length)[at]) if at < ask.prediction_length else NOTHING


@inlined
def name_source(found: Candidates, row: int, evidence: Evidence, predicted: int, out: DraftRecord) -> None:
    """Note the length of the longest match, and which source gave most of a candidate's votes.

    The last count was of all samples. Of the index it is the place of the longest match that says the candidate: where
    that lies, in a static segment, one born in the ring or the ring's tail. Without votes it is who offers it, or the
    target itself. What the same noise chose before has no other source, places or not: of all that is there it says
    most. O(samples).
    """
    token = found.votes.tokens[row]
    index, own = votes_by_source(found.votes, row)
    out.match_length = evidence.lengths[0] if evidence.num_levels > 0 else 0
    out.source = _OWN
    if token == predicted:
        out.source = _PREDICTION
    elif token == found.keyed.token:
        out.source = _COUPLED
    elif own < index:
        for sample in range(num_samples(evidence)):
            if found.votes.nexts[sample] == token and not is_own(evidence, sample):
                out.source = origin_of(evidence.recency[sample])
                break
    elif own == 0.0:
        child = child_of(found.forest, ROOT, token)
        out.source = _OFFERED + found.forest.kinds[child] if child >= 0 else _RECYCLED


@inlined
def foresee(ask: Ask, foreseen: Foreseen, keyed: Keyed) -> None:
    """Take up the noise that the target draws with for this request, if it does, and what is known of it."""
    foreseen.is_known, keyed.choices, keyed.token = int(ask.temperature > 0.0), 0, NOTHING
    if ask.temperature <= 0.0:
        return
    noise = noise_at(ask.noise)
    foreseen.noise, foreseen.request, foreseen.window = ask.noise, noise.request, noise.window
    foreseen.context, foreseen.start, foreseen.temperature = ask.context, ask.context_length, ask.temperature
    if ask.choices != 0:
        learn_choices(ask.choices, ask.noise, ask.may_teach == 1)
        keyed.choices, keyed.said_before = ask.choices, noise.run


@inlined
def plant_offers(ask: Ask, forest: Forest) -> None:
    """Make what the request brings the forest."""
    number = ask.num_offered
    if number == 0:
        clear_forest(forest)
        return
    tokens, parents = int32_array(ask.offered_tokens, number), int32_array(ask.offered_parents, number)
    plant(forest, tokens, parents, float64_array(ask.offered_chances, number), int32_array(ask.offered_kinds, number))
