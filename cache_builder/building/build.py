"""``ssd-cache build``: inputs to a directory of static segments, which appears whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import xxhash

from cache_builder.building.block import (
    Block,
    BlockResult,
    BuildOptions,
    BuildResult,
    build_block,
    codec_of,
    plan_of,
    write_new_segment,
)
from cache_builder.building.unfinished import check_new, replace_directory, working_directory
from cache_builder.inputs.record import STANDARD_INPUT, InputError
from cache_builder.inputs.sources import Source, find_sources
from cache_builder.inputs.streams import is_regular
from cache_builder.workers import Progress, run
from ssd import __version__
from ssd.errors import ConfigError
from ssd.retrieval.files import Manifest, sync_directory, write_manifest
from ssd.retrieval.segment import concatenate, open_segment
from ssd.text.codec import TextCodec

SMALL_SHARE = 4
"""A segment is small that holds less than a fourth of what one may."""


Neighbours: TypeAlias = tuple[tuple[str, int], ...]
"""Segments in order, (id, tokens with separators), that become one; one alone stays as it is."""


def joined_id(neighbours: Neighbours) -> str:
    """The name of what they become."""
    if len(neighbours) == 1:
        return neighbours[0][0]
    return f"static-{xxhash.xxh3_128_hexdigest(' '.join(name for name, _ in neighbours).encode())}"


def neighbours_of(segments: Sequence[tuple[str, int]], most: int) -> Iterator[Neighbours]:
    """All ``segments`` in order, together where they are small and have no more than ``most`` tokens in all."""
    held: list[tuple[str, int]] = []
    size = 0
    for segment in segments:
        is_small = min(size, segment[1]) * SMALL_SHARE < most
        if held and (size + segment[1] > most or not is_small):
            yield tuple(held)
            held, size = [], 0
        held.append(segment)
        size += segment[1]
    if held:
        yield tuple(held)


def merge(neighbours: Neighbours, options: BuildOptions, progress: Progress) -> None:
    """Write the segment that ``neighbours`` become; their files stay. Memory as for a block."""
    files = [options.segments / f"{segment_id}.seg" for segment_id, _ in neighbours]
    segments = [open_segment(file, fingerprint=options.fingerprint, namespace=options.namespace) for file in files]
    write_new_segment(concatenate(segments), joined_id(neighbours), options)


_ALONE_WEIGHT = 8 << 20
"""Bytes of text that one process has done before others have started."""

Executor: TypeAlias = Callable[[Sequence[Block], BuildOptions, Progress], Iterator[BlockResult]]
"""Maps ``build_block`` over the blocks, in any order, in processes that reach ``options.directory``."""


def build(
    inputs: Sequence[str],
    out: Path,
    options: BuildOptions,
    *,
    begin: Callable[[int], None] = lambda num_bytes: None,
    progress: Progress = lambda num_bytes, num_tokens: None,
    executor: Executor | None = None,
) -> BuildResult:
    """Encode all inputs and write them to ``out``.

    ``begin`` : told the bytes of all inputs before the first is read, as far as they are known. ``executor`` : what
    maps the blocks, None for processes here. Raises InputError (unless ``skip_invalid`` and it is only a line),
    ConfigError, CacheError, OSError; then ``out`` is as it was before, and what was finished is kept beside it for the
    next build.
    """
    check_new(out, force=options.force)
    sources = find_sources(inputs, options.format)
    codec = codec_of(options.tokenizer, options.chat_template)
    with working_directory(out, fresh=False) as working:
        options = replace(options, directory=working.absolute(), fingerprint=codec.fingerprint)
        blocks = plan_of(sources, _how(options, codec), options.block_bytes)
        jobs = _jobs(options.jobs, sources, blocks)
        begin(sum(source.size or 0 for source in sources))
        if executor is not None and jobs == 0:
            raise ConfigError("other machines cannot read standard input, pipes or memory://: give files or URLs")
        if executor is None:
            results = run(build_block, blocks, options, progress, jobs=jobs)
        else:
            results = executor(blocks, options, progress)
        result = BuildResult()
        segments: dict[int, Neighbours] = {}
        for block in results:
            result.add(block.counts)
            segments[block.number] = block.segments
        if result.num_tokens == 0:
            skipped = f", and {result.num_invalid} lines were left out as invalid" if result.num_invalid else ""
            if result.num_without_answer:
                skipped += f", and {result.num_without_answer} of {result.num_records} records say no answer"
            raise InputError(f"the inputs hold no text{skipped}: nothing was built")
        in_order = [segment for number in sorted(segments) for segment in segments[number]]
        final = list(neighbours_of(in_order, options.segment_tokens))
        together = [neighbours for neighbours in final if len(neighbours) > 1]
        for _ in run(merge, together, options, lambda num_bytes, num_tokens: None, jobs=jobs):
            pass
        result.num_segments = len(final)
        _publish(out, working, final, options)
    return result


def _how(options: BuildOptions, codec: TextCodec) -> str:
    """All that decides what becomes of a text: what was made another way is not used."""
    try:
        tokenizer = xxhash.xxh3_128_hexdigest(codec.to_json().encode())
    except ValueError:
        tokenizer = options.tokenizer
    return json.dumps(
        [
            __version__, codec.fingerprint, tokenizer, codec.eos_token_ids, codec.chat_template(options.chat_template),
            options.namespace, sorted(options.fields.names.items()), options.skip_invalid, options.segment_tokens,
        ]
    )  # fmt: skip


def _jobs(wanted: int | None, sources: Sequence[Source], blocks: Sequence[Block]) -> int:
    """0 where no other process can read the inputs, 1 where it is not worth another."""
    if any(source.name == STANDARD_INPUT or not is_regular(source.name) for source in sources):
        return 0
    if wanted is None and sum(block.weight for block in blocks) < _ALONE_WEIGHT:
        return 1
    return min(len(blocks), wanted or len(os.sched_getaffinity(0)))


def _publish(out: Path, working: Path, final: Sequence[Neighbours], options: BuildOptions) -> None:
    """``new`` becomes a cache of these segments alone, and takes the place of ``out``."""
    sizes = {joined_id(neighbours): sum(size for _, size in neighbours) for neighbours in final}
    for file in options.segments.iterdir():
        if file.stem not in sizes:
            file.unlink()
    sync_directory(options.segments)
    manifest = Manifest(
        fingerprint=options.fingerprint,
        namespace=options.namespace,
        generation=1,
        segments=tuple({"id": name, "num_tokens": size, "start": None} for name, size in sizes.items()),
    )
    write_manifest(options.segments, manifest)
    replace_directory(out, working)
    sync_directory(out.parent)
