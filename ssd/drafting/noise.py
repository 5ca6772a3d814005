"""Compute the Gumbel noise with which tokens are sampled, so that drafters can compute it too.

A token is sampled as ``argmax(log p + noise)``. The noise of every vocabulary token is a pure function of a 64-bit
**key**; there is no stateful random generator. So a sampled token does not depend on how many tokens were drafted
before it, on its batch, or on the number of steps: the output is the same with and without speculation. And a drafter
that knows the key knows the noise before the target has computed its logits.

The generator is SplitMix64 (Steele, Lea, Flood 2014, "Fast Splittable Pseudorandom Number Generators", figure 15). Its
state is a counter, so its n-th output is computed directly as ``mix(key + (n + 1) * GAMMA)``.

There are two kinds of keys. A **seeded** key is a function of the seed, the choice index and the position, so one seed
gives one output. A **coupled** key belongs to noise that all requests of a stream share. It is a function of a secret,
the stream, the last ``window`` tokens, and how often these tokens have occurred in the prompt and the output. So two
requests sample with the same noise where their texts agree. They then sample the same token as often as their
distributions allow (Gumbel coupling; Daliri, Musco, Suresh 2024, arXiv 2408.07978), so the output of one request is a
good draft for the other. Occurrences in the prompt count because the prompt may contain earlier output of the same
stream. So the turns of a conversation share no key.

All keys of one sequence are different, each key is a function of the preceding text, and the noise of different keys is
independent. So every token follows the model's distribution, given the preceding text. The full argument is in
docs/concepts/coupled-sampling.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ssd.jit.addresses import (
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
"""The second multiplier of the output function of the SplitMix64 generator."""

UInt64 = npt.NDArray[np.uint64]

UInt = Any
"""The type of uint64 numbers in the annotations of numba kernels, because Python has no such type."""

_TO_UNIT: Final = 2.0**-53
_BITS: Final = 0xFFFFFFFFFFFFFFFF


def request_key(seed: int, choice_index: int) -> int:
    """Return the 64-bit number from which all Gumbel noise keys of a sequence are derived, see `key_at`."""
    return _mix_int((_mix_int((seed + GAMMA) & _BITS) ^ choice_index) + GAMMA & _BITS)


def _mix_int(z: int) -> int:
    z = (z ^ z >> 30) * MIX_1 & _BITS
    z = (z ^ z >> 27) * MIX_2 & _BITS
    return z ^ z >> 31


@inlined
def mix64(z: UInt) -> UInt:
    """Hash a 64-bit number with the output function of the SplitMix64 random number generator."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(MIX_1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(MIX_2)
    return z ^ (z >> np.uint64(31))


@inlined
def key_at(request: UInt, place: UInt) -> UInt:
    """Return the Gumbel noise key of one position of a sequence. Each position of the sequence has its own key.

    ``request`` is the sequence's `request_key`, and ``place`` the position or, for shared noise, a `coupled_place`.
    """
    return mix64((request ^ np.uint64(place)) + np.uint64(GAMMA))


@inlined
def gumbel_at(key: UInt, token: int) -> float:
    """Return the Gumbel noise of the vocabulary token ``token`` for a noise key.

    It equals `gumbel_noise` of ssd.model.sampling.sampler except for the rounding of the logarithm.
    """
    bits = mix64(key + np.uint64(token + 1) * np.uint64(GAMMA)) >> np.uint64(11)
    return float(-math.log(-math.log((np.float64(bits) + 0.5) * _TO_UNIT)))


WINDOW: Final = 8
"""The default number of preceding tokens from which the key of shared Gumbel noise (coupled sampling) is computed."""

_FIRST_SLOTS: Final = 64
_NO_TOKENS: Final = np.empty(0, np.int32)


class NoiseRecord(Record):
    """The state from which numba kernels compute the Gumbel noise keys of one sequence.

    Attributes:
        request: The sequence's `request_key`.
        window: The number of preceding tokens that a key of shared noise depends on; 0 for seeded keys.
        counted: The number of tokens whose preceding context has been counted in ``table``.
        num_prompt_tokens: The number of prompt tokens; the tokens after them are sampled.
        num_slots: The number of slots of ``table``, a power of two.
        table: uint64[2 * num_slots], a hash table with open addressing: pairs of a context's hash (0 for an empty slot)
            and the number of its occurrences.
        drawn: uint64[num_slots / 2, 2], the key and the token of each counted token that was sampled.
        num_learned: The number of sampled tokens that have been compared with the sample cache.
        run_length: The number of consecutive latest sampled tokens that were in the sample cache.
    """

    request: Uint64
    window: Int64
    counted: Int64
    num_prompt_tokens: Int64
    num_slots: Int64
    table: Address
    drawn: Address
    num_learned: Int64
    run_length: Int64


noise_at = view_of(NoiseRecord)


@inlined
def window_hash(window: int, context: TokenIds, length: int, tokens: TokenIds, parents: TokenIds, node: int) -> UInt:
    """Return a nonzero 64-bit hash of the ``window`` tokens that end at a node of a draft chain or tree.

    ``parents`` are the parents of a tree, and empty for a chain. ``node`` is the last token to hash; -1 stands for the
    last one of the ``length`` tokens in ``context``.
    """
    found, left, is_chain = np.uint64(0), window, len(parents) == 0
    while node >= 0 and left > 0:
        found = mix64((found ^ np.uint64(tokens[node])) + np.uint64(GAMMA))
        node, left = node - 1 if is_chain else int(np.int64(parents[node])), left - 1
    for place in range(length - 1, max(-1, length - 1 - left), -1):
        found = mix64((found ^ np.uint64(context[place])) + np.uint64(GAMMA))
    return max(found, np.uint64(1))


@inlined
def _slot_of(table: UInt64, num_slots: int, found: UInt) -> int:
    slot = np.int64(found & np.uint64(num_slots - 1))
    while table[2 * slot] != np.uint64(0) and table[2 * slot] != found:
        slot = (slot + 1) & (num_slots - 1)
    return int(slot)


@inlined
def count_occurrences(noise: NoiseRecord, found: UInt) -> int:
    """Return how often the text's last ``window`` tokens, whose hash is ``found``, have occurred before in the text."""
    table = uint64_array(noise.table, 2 * noise.num_slots)
    return np.int64(table[2 * _slot_of(table, noise.num_slots, found) + 1])  # type: ignore[return-value]


@inlined
def coupled_place(found: UInt, times: int) -> UInt:
    """Return the number that `key_at` gets instead of a position if requests share their Gumbel noise.

    The number combines ``found``, the hash of the text's last tokens, with the number of earlier occurrences of these
    tokens in the text.
    """
    return mix64(found + np.uint64(times + 1) * np.uint64(GAMMA))


@inlined
def num_drawn(noise: NoiseRecord) -> int:
    """Return the number of sampled tokens in a sequence, i.e. those after the prompt."""
    return max(0, noise.counted - noise.num_prompt_tokens)


@inlined
def drawn_tokens(noise: NoiseRecord) -> UInt64:
    """Return for each sampled token of a sequence its Gumbel noise key and then its id: uint64[2 * num_drawn]."""
    return uint64_array(noise.drawn, 2 * num_drawn(noise))


@kernel
def _count(noise_address: int, context: TokenIds) -> None:
    noise = noise_at(noise_address)
    table = uint64_array(noise.table, 2 * noise.num_slots)
    drawn = uint64_array(noise.drawn, noise.num_slots)
    for end in range(noise.counted, len(context)):
        found = window_hash(noise.window, context, end, context, context[:0], -1)
        slot = _slot_of(table, noise.num_slots, found)
        if end >= noise.num_prompt_tokens:
            number, times = 2 * (end - noise.num_prompt_tokens), int(np.int64(table[2 * slot + 1]))
            drawn[number] = key_at(np.uint64(noise.request), coupled_place(found, times))
            drawn[number + 1] = np.uint64(np.int64(context[end]))
        table[2 * slot] = found
        table[2 * slot + 1] += np.uint64(1)
    noise.counted = len(context)


@kernel
def _keys(noise_address: int, context: TokenIds, tokens: TokenIds, parents: TokenIds) -> UInt64:
    noise, num_keys, length = noise_at(noise_address), 1 + len(tokens), len(context)
    window, is_chain = noise.window, len(parents) == 0
    keys, depths = np.empty(num_keys, np.uint64), np.empty(num_keys, np.int64)
    uncounted = noise.counted  # the tokens after these are, for example, a draft model's own
    earlier = np.empty(max(0, length - uncounted), np.uint64)
    if window > 0:
        for i in range(len(earlier)):
            earlier[i] = window_hash(window, context, uncounted + i, tokens, parents, -1)
    hashes = np.empty(num_keys, np.uint64)
    for key in range(num_keys):
        node = key - 1
        parent = -1 if node < 0 else (node - 1 if is_chain else int(np.int64(parents[node])))
        depths[key] = 0 if node < 0 else depths[parent + 1] + 1
        if window == 0:
            keys[key] = key_at(np.uint64(noise.request), length + depths[key])
            continue
        found = window_hash(window, context, length, tokens, parents, node)
        times = count_occurrences(noise, found)
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
    """The Gumbel noise with which the tokens of one sequence are sampled. Create it with `seeded` or `coupled`.

    ``address`` is the memory address of the `NoiseRecord` for numba kernels.
    """

    def __init__(self, seed: int, number: int, window: int = 0, prompt_length: int = 0) -> None:
        self._memory = Records(NoiseRecord)
        self._record, self.address = self._memory[0], self._memory.address
        self._record.request, self._record.window = request_key(seed, number), window
        self._record.num_prompt_tokens = prompt_length
        self._table: UInt64 = np.zeros((0, 2), np.uint64)
        self._drawn = self._table
        if window:
            self._make_slots(_FIRST_SLOTS)

    @classmethod
    def seeded(cls, seed: int, choice_index: int = 0) -> SequenceNoise:
        """Create Gumbel noise that depends only on the seed and the position, so that the seed reproduces the output.

        ``choice_index`` (below 2^32) distinguishes the outputs of one request.
        """
        return cls(seed, choice_index)

    @classmethod
    def coupled(cls, secret: int, stream: int, window: int = WINDOW, *, prompt_length: int = 0) -> SequenceNoise:
        """Create Gumbel noise for coupled sampling: sequences share it wherever their preceding tokens are the same.

        Args:
            secret: A 64-bit number; only sequences with the same secret and stream share noise.
            stream: The number of a noise stream, below 2^32.
            window: The number of preceding tokens that must be the same, >= 1.
            prompt_length: The number of prompt tokens, which are not sampled.
        """
        assert window >= 1
        return cls(secret, stream, window, prompt_length)

    @property
    def is_coupled(self) -> bool:
        """Return whether other sequences are sampled with the same Gumbel noise at places where their texts agree."""
        return self._record.window > 0

    @property
    def num_counted(self) -> int:
        """Return the length of the text for which ``advance`` has updated the state of shared Gumbel noise."""
        return self._record.counted

    def advance(self, context: TokenIds) -> None:
        """Update the state of shared Gumbel noise with the new accepted tokens of a sequence.

        This cannot be undone, so pass only accepted tokens. ``context`` begins with the text of the last call. O(new
        tokens * window).
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
        """Return the Gumbel noise keys of the next ``width`` tokens of sequences with seeded noise, uint64[B, width].

        ``lengths`` are the lengths of the contexts. The first key of a row belongs to the token after the context, and
        the other keys belong to the tokens after each of ``width - 1`` draft tokens.
        """
        requests = np.array([noise._record.request for noise in noises], np.uint64)
        keys: UInt64 = _seeded_keys(requests, np.array(lengths, np.int64), width)
        return keys

    def keys(self, context: TokenIds, tokens: TokenIds = _NO_TOKENS, parents: TokenIds | None = None) -> UInt64:
        """Return the Gumbel noise keys with which the tokens after the context and after each draft token are sampled.

        The result is uint64[1 + k]. O(k * (window + depth of the draft)), and O(window + k) more for each context token
        since the last ``advance``.

        Args:
            context: The text so far, int32[n], which begins with the text of the last ``advance``.
            tokens: The draft tokens, int32[k].
            parents: The parents of a draft tree, int32[k]; None for a chain.
        """
        keys: UInt64 = _keys(self.address, context, tokens, _NO_TOKENS if parents is None else parents)
        return keys

    def _make_slots(self, count: int) -> None:
        self._table, self._drawn = np.zeros((count, 2), np.uint64), np.zeros((count // 2, 2), np.uint64)
        self._record.num_slots, self._record.table = count, address(self._table)
        self._record.drawn = address(self._drawn)
