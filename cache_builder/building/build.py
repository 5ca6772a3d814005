"""``ssd-cache build``: records to a directory of static segments, which appears whole or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cache_builder.building.partial_directory import partial_directory
from cache_builder.building.stored import Stored
from cache_builder.inputs.examples import examples_of
from cache_builder.inputs.fields import AS_WE_CALL_THEM, FieldNames
from cache_builder.inputs.records import Format, InputError, read_records
from ssd.config import IndexConfig
from ssd.errors import ConfigError
from ssd.retrieval.directory_lock import LOCK_NAME
from ssd.retrieval.manifest import MANIFEST_NAME
from ssd.retrieval.prefixes import PrefixFilter
from ssd.retrieval.static import StaticWriter
from ssd.text.codec import TextCodec


@dataclass(slots=True)
class BuildResult:
    """What went into the directory. Tokens are without separators."""

    num_records: int = 0
    num_sequences: int = 0
    num_tokens: int = 0
    num_skipped_prompt_tokens: int = 0
    """Prompt tokens not stored, because an earlier sequence begins with the same blocks."""
    num_stored_sequences: int = 0
    """Sequences that ``add`` found in the cache already, and did not store again."""
    num_invalid: int = 0
    """Lines left out by ``skip_invalid``."""


def build(
    inputs: list[str],
    out: Path,
    *,
    codec: TextCodec,
    namespace: str,
    format: Format = "auto",
    add: bool = False,
    force: bool = False,
    skip_invalid: bool = False,
    fields: FieldNames = AS_WE_CALL_THEM,
    progress: Callable[[int], None] = lambda num_bytes: None,
) -> BuildResult:
    """Encode all inputs and write them to ``out``.

    ``add`` : to a cache that is there already, what it does not hold; ``force`` : in place of it. ``fields`` : how
    records call theirs. Raises InputError (unless ``skip_invalid``
    and it is only a line), ConfigError, CacheError, OSError; then ``out`` is as it was before.
    """
    result = BuildResult()
    index = IndexConfig()
    known = PrefixFilter(index.dedup_block_tokens, index.lead_in_tokens)
    is_addition = add and (out / MANIFEST_NAME).exists()
    stored = Stored.of(out, fingerprint=codec.fingerprint) if is_addition else Stored()
    with _writer(out, codec, namespace, add=add, force=force) as writer:
        for name in inputs:
            for record in read_records(name, format, progress):
                try:
                    examples = examples_of(record, codec, fields)
                except InputError:
                    if not (skip_invalid and record.is_json):
                        raise
                    result.num_invalid += 1
                    continue
                result.num_records += 1
                for example in examples:
                    tokens = np.array(example.token_ids, np.int32)
                    pieces = known.pieces(tokens, example.prompt_length, writer.num_tokens)
                    if pieces and stored.take(pieces[0]):
                        result.num_stored_sequences += 1
                        continue
                    for piece in pieces:
                        writer.append(piece)
                    result.num_sequences += len(pieces)
                    num_stored = sum(map(len, pieces))
                    result.num_tokens += num_stored
                    result.num_skipped_prompt_tokens += len(tokens) - num_stored
        if result.num_tokens == 0 and not result.num_stored_sequences:
            skipped = f", and {result.num_invalid} lines were left out as invalid" if result.num_invalid else ""
            raise InputError(f"the inputs hold no text{skipped}: nothing was built")
    return result


@contextmanager
def _writer(out: Path, codec: TextCodec, namespace: str, *, add: bool, force: bool) -> Iterator[StaticWriter]:
    if add and force:
        raise ConfigError("--add and --force exclude each other: add to the cache, or replace it")
    is_cache = (out / MANIFEST_NAME).exists()
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is a file: give a directory with --out")
    is_empty = not out.exists() or not any(path.name != LOCK_NAME for path in out.iterdir())
    if not is_empty and not is_cache:
        raise ConfigError(f"{out} is not empty and holds no cache: give another directory with --out")
    if is_cache and not add and not force:
        raise ConfigError(f"{out} holds a cache already: --add adds to it, --force replaces it")
    if add and is_cache:
        with StaticWriter(out, fingerprint=codec.fingerprint, namespace=namespace) as writer:
            yield writer
        return
    with partial_directory(out) as temporary:
        with StaticWriter(temporary / "new", fingerprint=codec.fingerprint, namespace=namespace) as writer:
            yield writer
        if out.exists():
            out.rename(temporary / "old")
        (temporary / "new").rename(out)
