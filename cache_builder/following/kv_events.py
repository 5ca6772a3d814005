"""KV events: the messages in which vLLM, SGLang, TensorRT-LLM and LMCache publish the token ids of cached blocks.

A message is a batch of events, packed by msgpack as a map or, by older versions, as an array (vLLM,
``vllm/distributed/kv_events.py``). A block of the prefix cache is published when it is full, so that the last tokens of
a request, fewer than a block, are never published. Everything in a message is checked, because it comes from the
network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ssd.errors import SSDError

_FIELDS: Final = (
    "type",
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
)
"""The fields of a ``BlockStored`` event in their order, because vLLM encodes an event as a list without field names."""

_MAX_BLOCKS: Final = 1 << 16
_MAX_CHARACTERS: Final = 256

BlockHash = int | bytes


class InvalidEvents(SSDError):
    """A message is not a batch of KV events, or an event in it is malformed."""


@dataclass(frozen=True, slots=True)
class StoredBlocks:
    """Consecutive full blocks of one text.

    Attributes:
        hashes: The hashes of the blocks, each of which identifies the whole text up to the block's end.
        parent: The hash of the block before the first one; None at the beginning of a text.
        tokens: int32[len(hashes), block size], the token ids of each block.
        lora: The name or number of the LoRA adapter; None for the base model.
        cache_salt: The request's ``cache_salt``, which is published with the first block of a text only.
    """

    hashes: Sequence[BlockHash]
    parent: BlockHash | None
    tokens: npt.NDArray[np.int32]
    lora: str | None
    cache_salt: str | None


class AllCleared:
    """The event that a publisher has emptied its prefix cache, so that no later block continues an earlier one."""


Event = StoredBlocks | AllCleared


def decode_batch(payload: bytes, vocab_size: int) -> tuple[list[Event], int]:
    """Decode a message with a batch of KV events, and return its events and the number of invalid events.

    Three kinds of valid events are left out: removals of blocks; blocks without token ids, which are copies on another
    medium; and blocks of a hybrid KV cache's further groups, which repeat the text of the first group.

    Raises:
        InvalidEvents: The message is not a batch of events.
    """
    import msgspec

    try:
        batch = msgspec.msgpack.decode(payload)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise InvalidEvents(f"not msgpack: {error}") from None
    if isinstance(batch, list):
        batch = dict(zip(("ts", "events"), batch, strict=False))
    events = batch.get("events") if isinstance(batch, dict) else None
    if not isinstance(events, list):
        raise InvalidEvents("not a batch of KV events")
    found, num_invalid = list[Event](), 0
    for event in events:
        try:
            decoded = _decode(event, vocab_size)
        except InvalidEvents:
            num_invalid += 1
            continue
        if decoded is not None:
            found.append(decoded)
    return found, num_invalid


def _decode(event: Any, vocab_size: int) -> Event | None:
    if isinstance(event, list):
        event = dict(zip(_FIELDS, event, strict=False))
    kind = event.get("type") if isinstance(event, dict) else None
    if kind == "AllBlocksCleared":
        return AllCleared()
    if kind != "BlockStored":
        if not isinstance(kind, str):
            raise InvalidEvents("an event without type")
        return None
    hashes, parent, token_ids = event.get("block_hashes"), event.get("parent_block_hash"), event.get("token_ids")
    if not (isinstance(hashes, list) and isinstance(token_ids, list) and len(hashes) <= _MAX_BLOCKS):
        raise InvalidEvents("block_hashes and token_ids must be lists")
    if not token_ids or event.get("group_idx"):
        return None
    size = len(token_ids) // max(1, len(hashes))
    if not hashes or size * len(hashes) != len(token_ids) or event.get("block_size") != size:
        raise InvalidEvents("the number of tokens is not that of whole blocks")
    for each in (*hashes, *([] if parent is None else [parent])):
        if isinstance(each, bool) or not isinstance(each, (int, bytes)) or (isinstance(each, bytes) and len(each) > 64):
            raise InvalidEvents("a block hash is neither a number nor bytes")
    if not all(type(token) is int and 0 <= token < vocab_size for token in token_ids):
        raise InvalidEvents("a token id is not in the vocabulary")
    lora = event.get("lora_name") or event.get("lora_id")
    return StoredBlocks(
        hashes,
        parent,
        np.array(token_ids, np.int32).reshape(len(hashes), size),
        None if lora is None else _text(lora),
        _salt(event.get("extra_keys"), lora),
    )


def _salt(extra_keys: Any, lora: Any) -> str | None:
    """Return the cache salt from ``extra_keys``, a list with the keys that vLLM adds to the hash of each block.

    All strings of the first block except the adapter's name are taken as the salt. One of them may be a digest of
    prompt embeddings, by which texts must be separated too.
    """
    first = extra_keys[0] if isinstance(extra_keys, list) and extra_keys else None
    texts = [each for each in first if isinstance(each, str)] if isinstance(first, list) else []
    if isinstance(lora, str) and lora in texts:
        texts.remove(lora)
    return _text("\n".join(texts)) if texts else None


def _text(value: Any) -> str:
    if not isinstance(value, (str, int)) or len(str(value)) > _MAX_CHARACTERS:
        raise InvalidEvents("the name of an adapter or a salt is too long or not a text")
    return str(value)
