"""Where text is cut into chunks, as the rule has it: a slow twin of ``ssd.sharing.published.format``."""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from ssd.retrieval.segment import Tokens


def slow_cut(parts: Sequence[Tokens]) -> list[list[int]]:
    """The lengths of the sequences of each chunk."""
    chunks: list[list[int]] = [[]]
    for part in parts:
        if sum(chunks[-1]) + len(part) > 131_072:
            chunks.append([])
        chunks[-1].append(len(part))
        content = b"".join(int(token).to_bytes(4, "little") for token in part)
        if sum(chunks[-1]) >= 8192 and xxhash.xxh3_64(content).intdigest() % 65_536 < len(part):
            chunks.append([])
    return [chunk for chunk in chunks if chunk]
