"""The blocks of a build: what one worker reads at a time, the same however many there are."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Final

import xxhash

from cache_builder.inputs.sources import Part, Source, parts_of, weight_of

MOST_BLOCK_BYTES: Final = 48 << 20
"""Of text, some 12 million tokens: a block is one segment, and what is lost where a build is killed."""

LEAST_BLOCK_BYTES: Final = 1 << 20
BLOCKS: Final = 16
"""A small corpus is cut into so many, so that there is work for several cores; small segments are merged at the end."""


@dataclass(frozen=True, slots=True)
class Block:
    """Some inputs or parts of inputs, in order.

    ``key`` : of what is read, when it was last changed, and how it is stored; a block with the same key gives the same
    segments. ``place`` : of what is read alone. ``weight`` : bytes of text, roughly.
    """

    number: int
    parts: tuple[Part, ...]
    key: str
    place: str
    weight: int


def plan_of(sources: Sequence[Source], how: str, block_bytes: int | None = None) -> list[Block]:
    """All of ``sources`` as blocks, in order. ``how`` : whatever else decides what becomes of them. Raises InputError.

    Small inputs share a block; a large one that can be cut is several.
    """
    if block_bytes is None:
        total = sum(map(weight_of, sources))
        block_bytes = min(MOST_BLOCK_BYTES, max(LEAST_BLOCK_BYTES, total // BLOCKS))
    blocks: list[Block] = []
    held: list[tuple[Part, str]] = []
    weight = 0
    for source in sources:
        for part, part_weight in parts_of(source, block_bytes):
            if held and weight + part_weight > block_bytes * 5 // 4:
                blocks.append(_block(len(blocks), held, how, weight))
                held, weight = [], 0
            held.append((part, f"{source.size} {source.stamp}"))
            weight += part_weight
    if held:
        blocks.append(_block(len(blocks), held, how, weight))
    return blocks


def _block(number: int, parts: list[tuple[Part, str]], how: str, weight: int) -> Block:
    places = json.dumps([astuple(part) for part, _ in parts])
    key = xxhash.xxh3_128_hexdigest(json.dumps([how, places, [stamp for _, stamp in parts]]).encode())
    return Block(number, tuple(part for part, _ in parts), key, xxhash.xxh3_64_hexdigest(places.encode()), weight)
