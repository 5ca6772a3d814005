"""Small segments of neighbouring blocks become one: what a lookup takes grows with their number."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from cache_builder.building.block import BlockOptions, Progress, write_new_segment
from ssd.errors import CacheError
from ssd.retrieval.segment_file import open_segment, read_tokens

SMALL_SHARE = 4
"""A segment is small that holds less than a fourth of what one may."""


@dataclass(frozen=True, slots=True)
class Neighbours:
    """Segments in order, (id, tokens with separators), that become one; one alone stays as it is."""

    segments: tuple[tuple[str, int], ...]

    @property
    def num_tokens(self) -> int:
        """Of all, with separators."""
        return sum(size for _, size in self.segments)

    @property
    def segment_id(self) -> str:
        """The name of what they become."""
        if len(self.segments) == 1:
            return self.segments[0][0]
        return f"static-{xxhash.xxh3_128_hexdigest(' '.join(name for name, _ in self.segments).encode())}"


def neighbours_of(segments: Sequence[tuple[str, int]], most: int) -> Iterator[Neighbours]:
    """All ``segments`` in order, together where they are small and have no more than ``most`` tokens in all."""
    held: list[tuple[str, int]] = []
    size = 0
    for segment in segments:
        is_small = min(size, segment[1]) * SMALL_SHARE < most
        if held and (size + segment[1] > most or not is_small):
            yield Neighbours(tuple(held))
            held, size = [], 0
        held.append(segment)
        size += segment[1]
    if held:
        yield Neighbours(tuple(held))


def merge(neighbours: Neighbours, options: BlockOptions, progress: Progress) -> Neighbours:
    """Write the segment that ``neighbours`` become, unless it is there; their files stay. Returns ``neighbours``.

    Memory as for a block. Raises CacheError, OSError.
    """
    path = options.segments / f"{neighbours.segment_id}.seg"
    try:
        if (
            len(open_segment(path, fingerprint=options.fingerprint, namespace=options.namespace))
            == neighbours.num_tokens
        ):
            return neighbours
    except (CacheError, OSError):
        pass
    tokens = np.empty(neighbours.num_tokens, np.int32)
    at = 0
    for segment_id, size in neighbours.segments:
        file = options.segments / f"{segment_id}.seg"
        tokens[at : at + size] = read_tokens(file, fingerprint=options.fingerprint, namespace=options.namespace)
        at += size
    write_new_segment(tokens, neighbours.segment_id, options)
    return neighbours
