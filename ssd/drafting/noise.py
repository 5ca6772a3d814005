"""The noise that sampled tokens are drawn with, and which keys a sequence draws it with.

A key is 64 bits, and gives every token of the vocabulary its noise.

Nothing is drawn from a stateful generator, so a token does not depend on how many tokens were drafted before it, on
the batch it ran in or on the steps it took: speculation on and off give the same tokens. And whoever knows the key
knows the noise before the target has spoken.

The generator is SplitMix64 (Steele, Lea, Flood 2014, "Fast Splittable Pseudorandom Number Generators", figure 15):
its state is a counter, so its n-th output is ``mix(key + (n + 1) * GAMMA)`` at once.

A sequence draws with noise of a seed, or coupled with that of other requests.

A key says where its noise is used. Of a *seed* it is a function of seed, choice and position: one seed gives one
output. *Coupled* noise is that of a stream, which many requests share: its key is a function of a secret, the stream,
the last ``window`` tokens and how often these have stood in its text already, prompt and output. So two requests draw
with the same noise where they say the same, and then choose the same token as often as their distributions allow
(Daliri, Musco, Suresh 2024, arXiv 2408.07978, for the Gumbel coupling); what one said can be drafted for the other. The
prompt counts because it may hold what the same stream said before: the turns of a conversation then share no key.

Either way the keys of one sequence are all different, each is a function of what came before, and noise at different
keys is independent: given what came before, every token is drawn with noise that nothing before it depends on, so it
has the model's law. ``docs/coupled-sampling.md`` has the argument in full.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ssd.compiled.addresses import (
    Address,
    Int64,
    Int64s,
    Record,
    Records,
    TokenIds,
    Uint64,
    address,
    inlined,
    kernel,
    uint64_array,
    view_of,
)

GAMMA = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9

MIX_2 = 0x94D049BB133111EB
"""SplitMix64's increment and multipliers."""

UInt64 = npt.NDArray[np.uint64]

UInt = Any
"""Numba's uint64, which Python has no type for."""

_TO_UNIT: Final = 2.0**-53
_BITS: Final = 0xFFFFFFFFFFFFFFFF


def request_key(seed: int, choice_index: int) -> int:
    """What all keys of one sequence are derived from, see `key_at`: 64 bits. A microsecond."""
    return _mix_int((_mix_int((seed + GAMMA) & _BITS) ^ choice_index) + GAMMA & _BITS)


def _mix_int(z: int) -> int:
    z = (z ^ z >> 30) * MIX_1 & _BITS
    z = (z ^ z >> 27) * MIX_2 & _BITS
    return z ^ z >> 31


@inlined
def mixed(z: UInt) -> UInt:
    """For kernels: SplitMix64's output function."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(MIX_1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(MIX_2)
    return z ^ (z >> np.uint64(31))


@inlined
def key_at(request: UInt, place: UInt) -> UInt:
    """For kernels: the key of a place, 64 bits that tell it from all others of the sequence, from its `request_key`."""
    return mixed((request ^ np.uint64(place)) + np.uint64(GAMMA))


@inlined
def gumbel_at(key: UInt, token: int) -> float:
    """For kernels: the noise of one token at a key; what `gumbel_noise` of ssd.model.sampling.sampler says, but for
    rounding of the logarithm.
    """
    bits = mixed(key + np.uint64(token + 1) * np.uint64(GAMMA)) >> np.uint64(11)
    return float(-math.log(-math.log((np.float64(bits) + 0.5) * _TO_UNIT)))


WINDOW: Final = 8
"""Tokens that a coupled key depends on, where nothing else is asked for."""

_FIRST_SLOTS: Final = 64
_NO_TOKENS: Final = np.empty(0, np.int32)


class NoiseRecord(Record):
    """What the keys of one sequence are made of.

    ``request`` : its `request_key`. ``window`` : tokens that a key depends on, 0 where it depends on the position.
    ``counted`` : tokens of the text whose contexts are counted. ``table`` : uint64[2 * num_slots], by open addressing
    pairs of the hash of a context, 0 for none, and how often it has occurred; ``num_slots`` is a power of two.
    ``first`` : tokens of the prompt; those after it are drawn. ``drawn`` : uint64[num_slots / 2, 2], of each token
    drawn among those counted its key and itself. ``taken`` : of so many of them a drafter has taken note; ``run`` : so
    many of the last of these it had known, see `keyed_choices`.
    """

    request: Uint64
    window: Int64
    counted: Int64
    first: Int64
    num_slots: Int64
    table: Address
    drawn: Address
    taken: Int64
    run: Int64


noise_at = view_of(NoiseRecord)


@inlined
def hash_behind(window: int, context: TokenIds, length: int, tokens: TokenIds, parents: TokenIds, node: int) -> UInt:
    """Of the last ``window`` tokens behind a node of a draft: 64 bits, not 0. O(window).

    ``length`` : tokens of ``context``. ``tokens``, ``parents`` : of the draft, -1 is its beginning; of a chain no
    parents. ``node`` : -1 for the end of the context.
    """
    found, left, is_chain = np.uint64(0), window, len(parents) == 0
    while node >= 0 and left > 0:
        found = mixed((found ^ np.uint64(tokens[node])) + np.uint64(GAMMA))
        node, left = node - 1 if is_chain else int(np.int64(parents[node])), left - 1
    for place in range(length - 1, max(-1, length - 1 - left), -1):
        found = mixed((found ^ np.uint64(context[place])) + np.uint64(GAMMA))
    return max(found, np.uint64(1))


@inlined
def _slot_of(table: UInt64, num_slots: int, found: UInt) -> int:
    """Where a hash is counted, or would be."""
    slot = np.int64(found & np.uint64(num_slots - 1))
    while table[2 * slot] != np.uint64(0) and table[2 * slot] != found:
        slot = (slot + 1) & (num_slots - 1)
    return int(slot)


@inlined
def times_counted(noise: NoiseRecord, found: UInt) -> int:
    """How often a context has occurred in the text that is counted. O(1)."""
    table = uint64_array(noise.table, 2 * noise.num_slots)
    return np.int64(table[2 * _slot_of(table, noise.num_slots, found) + 1])  # type: ignore[return-value]


@inlined
def coupled_place(found: UInt, times: int) -> UInt:
    """The place, see `key_at`, of a context that has occurred so often before."""
    return mixed(found + np.uint64(times + 1) * np.uint64(GAMMA))


@inlined
def num_drawn(noise: NoiseRecord) -> int:
    """How many tokens were drawn of the text that is counted."""
    return max(0, noise.counted - noise.first)


@inlined
def drawn_tokens(noise: NoiseRecord) -> UInt64:
    """Of each token drawn its key and itself, one after the other: uint64[2 * num_drawn]."""
    return uint64_array(noise.drawn, 2 * num_drawn(noise))


@kernel
def _count(noise_address: int, context: TokenIds) -> None:
    """Count the contexts of all tokens of a text that are not counted yet."""
    noise = noise_at(noise_address)
    table = uint64_array(noise.table, 2 * noise.num_slots)
    drawn = uint64_array(noise.drawn, noise.num_slots)
    for end in range(noise.counted, len(context)):
        found = hash_behind(noise.window, context, end, context, context[:0], -1)
        slot = _slot_of(table, noise.num_slots, found)
        if end >= noise.first:
            number, times = 2 * (end - noise.first), int(np.int64(table[2 * slot + 1]))
            drawn[number] = key_at(np.uint64(noise.request), coupled_place(found, times))
            drawn[number + 1] = np.uint64(np.int64(context[end]))
        table[2 * slot] = found
        table[2 * slot + 1] += np.uint64(1)
    noise.counted = len(context)


@kernel
def _keys(noise_address: int, context: TokenIds, tokens: TokenIds, parents: TokenIds) -> UInt64:
    """The key behind the context and behind each token of a draft: uint64[1 + tokens]."""
    noise, num_keys, length = noise_at(noise_address), 1 + len(tokens), len(context)
    window, is_chain = noise.window, len(parents) == 0
    keys, depths = np.empty(num_keys, np.uint64), np.empty(num_keys, np.int64)
    uncounted = noise.counted  # what follows are a draft model's own tokens, say
    earlier = np.empty(max(0, length - uncounted), np.uint64)
    if window > 0:
        for i in range(len(earlier)):
            earlier[i] = hash_behind(window, context, uncounted + i, tokens, parents, -1)
    hashes = np.empty(num_keys, np.uint64)
    for key in range(num_keys):
        node = key - 1
        parent = -1 if node < 0 else (node - 1 if is_chain else int(np.int64(parents[node])))
        depths[key] = 0 if node < 0 else depths[parent + 1] + 1
        if window == 0:
            keys[key] = key_at(np.uint64(noise.request), length + depths[key])
            continue
        found = hash_behind(window, context, length, tokens, parents, node)
        times = times_counted(noise, found)
        for other in earlier:
            times += other == found
        above = node
        while above >= 0:
            above = above - 1 if is_chain else int(np.int64(parents[above]))
            times += hashes[above + 1] == found
        hashes[key] = found
        keys[key] = key_at(np.uint64(noise.request), coupled_place(found, times))
    return keys


@kernel
def _seeded_keys(requests: UInt64, lengths: Int64s, width: int) -> UInt64:
    keys = np.empty((len(requests), width), np.uint64)
    for b in range(len(requests)):
        for t in range(width):
            keys[b, t] = key_at(requests[b], lengths[b] + t)
    return keys


class SequenceNoise:
    """The noise of one sequence: made by `seeded` or `coupled`. ``address`` : of its `NoiseRecord`, for kernels."""

    def __init__(self, seed: int, number: int, window: int = 0, prompt_length: int = 0) -> None:
        """Use `seeded` or `coupled`."""
        self._memory = Records(NoiseRecord)
        self._record, self.address = self._memory[0], self._memory.address
        self._record.request, self._record.window = request_key(seed, number), window
        self._record.first = prompt_length
        self._table: UInt64 = np.zeros((0, 2), np.uint64)
        self._drawn = self._table
        if window:
            self._make_slots(_FIRST_SLOTS)

    @classmethod
    def seeded(cls, seed: int, choice_index: int = 0) -> SequenceNoise:
        """Noise of a seed, any 64 bits. ``choice_index`` : of several outputs of one seed, below 2^32."""
        return cls(seed, choice_index)

    @classmethod
    def coupled(cls, secret: int, stream: int, window: int = WINDOW, *, prompt_length: int = 0) -> SequenceNoise:
        """Noise that all sequences of one secret, any 64 bits, and one stream, below 2^32, share.

        ``window`` : tokens that it depends on, >= 1. ``prompt_length`` : those of its text that nobody drew.
        """
        assert window >= 1
        return cls(secret, stream, window, prompt_length)

    @property
    def is_coupled(self) -> bool:
        """Whether other sequences draw with the same noise where they say the same."""
        return self._record.window > 0

    @property
    def num_counted(self) -> int:
        """Tokens of the text that ``advance`` was told."""
        return self._record.counted

    def advance(self, context: TokenIds) -> None:
        """Take note of the text so far, int32[n], that begins with the text of the last call. O(new tokens * window).

        What is told can never be taken back; a text that may be goes to ``keys`` alone.
        """
        if not self._record.window or self._record.counted == len(context):
            return
        assert self._record.counted < len(context)
        wanted = 2 * len(context)
        if wanted > len(self._table):
            self._make_slots(1 << (wanted - 1).bit_length())
            self._record.counted = 0
        _count(self.address, context)

    @staticmethod
    def seeded_keys(noises: Sequence[SequenceNoise], lengths: Sequence[int], width: int) -> UInt64:
        """Of several sequences the ``keys`` of the tokens after their contexts and after ``width - 1`` tokens of a
        chain, all by position and none coupled: uint64[B, width].

        ``lengths`` : tokens of each context. O(B * width).
        """
        requests = np.array([noise._record.request for noise in noises], np.uint64)
        keys: UInt64 = _seeded_keys(requests, np.array(lengths, np.int64), width)
        return keys

    def keys(self, context: TokenIds, tokens: TokenIds = _NO_TOKENS, parents: TokenIds | None = None) -> UInt64:
        """The keys of the token after ``context``, int32[n], and of those after each of a draft's: uint64[1 + k].

        ``tokens``, ``parents`` : int32[k], as in a `Draft`. ``context`` begins with the text of the last ``advance``;
        what goes beyond costs O(tokens beyond * (window + k)). Else O(k * (window + depth of the draft)).
        """
        keys: UInt64 = _keys(self.address, context, tokens, _NO_TOKENS if parents is None else parents)
        return keys

    def _make_slots(self, count: int) -> None:
        self._table, self._drawn = np.zeros((count, 2), np.uint64), np.zeros((count // 2, 2), np.uint64)
        self._record.num_slots, self._record.table = count, address(self._table)
        self._record.drawn = address(self._drawn)
