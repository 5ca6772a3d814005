"""Joins the KV cache blocks that engines publish to the texts of requests. A block names its parent by a hash."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from cache_builder.following.kv_events import BlockHash, StoredBlocks

Tokens = npt.NDArray[np.int32]

MAX_TEXT_TOKENS: Final = 8192
"""The number of new tokens after which a text is yielded although it may still grow, so that it is stored in time."""

LEAD_IN_TOKENS: Final = 64
"""The maximum number of already yielded tokens that are repeated before the new tokens of a text.

With them, the stored parts of a text overlap, so that a match can span the boundary between two parts.
"""

Key = tuple[Hashable, BlockHash]


@dataclass(frozen=True, slots=True)
class FollowedText:
    """The newest part of a text that an engine is computing: the tokens after the previous part of the same text.

    Attributes:
        tokens: int32[n], a lead-in of tokens that the previous part contained, then the new tokens.
        prompt_length: The number of tokens at the beginning of ``tokens`` that belong to the lead-in or to a prompt.
    """

    tokens: Tokens
    prompt_length: int
    lora: str | None
    cache_salt: str | None


@dataclass(slots=True)
class _Block:
    tokens: Tokens
    parent: Key | None
    lora: str | None
    cache_salt: str | None
    is_prompt: bool
    num_new: int  # the number of tokens up to here that have not been returned
    is_returned: bool = False


class BlockChains:
    """Joins KV cache blocks, which engines publish one by one, to the texts of requests.

    Memory is limited to ``max_tokens``. The events do not tell prompts from outputs. Blocks that arrive together are
    regarded as a prompt, because engines compute prompts many tokens at a time. A block that arrives alone is regarded
    as output, unless it begins a text.
    """

    def __init__(self, *, max_tokens: int, idle_s: float, lead_in_tokens: int = LEAD_IN_TOKENS) -> None:
        """Create an object without blocks.

        Args:
            max_tokens: The maximum number of tokens in memory.
            idle_s: The number of seconds without a new block after which a text is regarded as finished.
            lead_in_tokens: The maximum number of already yielded tokens that are repeated before the new tokens of a
                text.
        """
        self._max_tokens, self._idle_s, self._lead_in_tokens = max_tokens, idle_s, lead_in_tokens
        self._blocks: OrderedDict[Key, _Block] = OrderedDict()  # oldest first
        self._ends: OrderedDict[Key, float] = OrderedDict()  # when each end of a chain arrived, oldest first
        self.num_tokens = 0
        self.num_orphans = 0
        """The number of events that were dropped because their parent block is not in memory."""
        self.num_repeated = 0
        """The number of received blocks that were already in memory."""

    def store(self, publisher: Hashable, blocks: StoredBlocks, now: float) -> Iterator[FollowedText]:
        """Add consecutive blocks of a text. Yields each text that has ``MAX_TEXT_TOKENS`` new tokens.

        If more than ``max_tokens`` tokens are in memory, the oldest texts are yielded and their blocks deleted. Blocks
        whose parent block is not in memory are dropped. They could belong to any namespace, because only the first
        block of a text names the cache salt.
        """
        parent = None if blocks.parent is None else (publisher, blocks.parent)
        lora, salt = blocks.lora, blocks.cache_salt
        if parent is not None:
            if (before := self._blocks.get(parent)) is None:
                self.num_orphans += 1
                return
            self._blocks.move_to_end(parent)
            lora, salt = before.lora, before.cache_salt
        for block_hash, tokens in zip(blocks.hashes, blocks.tokens, strict=True):
            key = publisher, block_hash
            if key in self._blocks:
                self.num_repeated += 1
                self._blocks.move_to_end(key)
            elif key != parent:
                before = None if parent is None else self._blocks.get(parent)
                num_new = len(tokens) + (0 if before is None or before.is_returned else before.num_new)
                is_prompt = before is None or len(blocks.hashes) > 1
                self._blocks[key] = _Block(tokens, parent, lora, salt, is_prompt, num_new)
                self.num_tokens += len(tokens)
                if parent is not None:
                    self._ends.pop(parent, None)
                self._ends[key] = now
                if num_new >= MAX_TEXT_TOKENS:
                    yield self._text(key)
            parent = key
        while self.num_tokens > self._max_tokens:
            oldest = next(iter(self._blocks))
            if not self._blocks[oldest].is_returned and self._ends:
                yield self._text(next(iter(self._ends)))
            else:
                self._forget(oldest)

    def finished(self, now: float) -> Iterator[FollowedText]:
        """Yield the texts that no block has continued for ``idle_s`` seconds."""
        while self._ends and next(iter(self._ends.values())) <= now - self._idle_s:
            yield self._text(next(iter(self._ends)))

    def close(self, publisher: Hashable | None = None) -> Iterator[FollowedText]:
        """Yield all texts with new tokens and delete all blocks; with ``publisher``, only those of this publisher."""
        for key in [key for key in self._ends if publisher in (None, key[0])]:
            yield self._text(key)
        for key in [key for key in self._blocks if publisher in (None, key[0])]:
            self._forget(key)

    def _forget(self, key: Key) -> None:
        self.num_tokens -= len(self._blocks.pop(key).tokens)
        self._ends.pop(key, None)

    def _text(self, key: Key) -> FollowedText:
        """Return the new tokens of the text that ends with the block ``key``, and mark them as returned."""
        del self._ends[key]
        end = block = self._blocks[key]
        chain, lead_in, num_known = list[_Block](), list[Tokens](), 0
        while not block.is_returned:
            block.is_returned = True
            chain.append(block)
            if block.parent is None or block.parent not in self._blocks:
                break
            block = self._blocks[block.parent]
        while block.is_returned and block is not chain[-1] and num_known < self._lead_in_tokens:
            lead_in.append(block.tokens)
            num_known += len(block.tokens)
            if block.parent is None or block.parent not in self._blocks:
                break
            block = self._blocks[block.parent]
        chain.reverse()
        known = np.concatenate(lead_in[::-1])[-self._lead_in_tokens :] if lead_in else np.zeros(0, np.int32)
        num_prompt = max((i + 1 for i, each in enumerate(chain) if each.is_prompt), default=0)
        return FollowedText(
            np.concatenate([known, *(each.tokens for each in chain)]),
            len(known) + sum(len(each.tokens) for each in chain[:num_prompt]),
            end.lora,
            end.cache_salt,
        )
