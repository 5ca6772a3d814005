"""``ssd-cache inspect``: print the contents of a cache directory, and each fault with its remedy."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from cache_builder.commands.options import CACHE_DIRECTORY, codec_from_options, progress_bar
from cache_builder.opened_cache import escape_control_characters, open_cache, read_cache_manifest, read_learned_state
from ssd.drafting.acceptance_model import AcceptanceModel
from ssd.errors import CacheError, StoreUnavailable
from ssd.retrieval.directory import LEARNED_NAME, MAX_READS, PART_NAMES, is_cache_file
from ssd.retrieval.files import MANIFEST_NAME, Manifest, open_file
from ssd.retrieval.owners import (
    SECRET_NAME,
    STATE_DIRECTORY,
    parse_secret,
    read_owner,
    secret_id,
    tenant_directories,
)
from ssd.retrieval.ring import iter_blocks, iter_sequences
from ssd.retrieval.segment import SEPARATOR, Segment, open_segment, unpack
from ssd.retrieval.suffix_array import build_sparse_index
from ssd.text.codec import TextCodec

_DESCRIPTION = """\
Show the contents of a cache directory and verify all checksums. Nothing is changed. The exit status is 1 if there is a
fault.

--deep also checks properties that checksums do not cover: every segment is sorted, all token ids are valid,
the manifest agrees with the files, learned.bin is usable. It lists all other files.

If DIR is a server's --cache-dir, its namespaces are listed. Orphaned namespaces are marked: these caches of tenants
were created with a secret other than the one stored in DIR, so no request finds them and no deletion removes them.
"""
_MAX_SECRET_BYTES: Final = 1 << 16
_REBUILD: Final = "build the directory again, or restore it from a copy"


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.description = _DESCRIPTION
    command.add_argument("directory", type=Path, metavar="DIR", help=CACHE_DIRECTORY)
    command.add_argument("--deep", action="store_true", help="Also check properties that checksums do not cover")
    one = command.add_mutually_exclusive_group()
    one.add_argument("--json", action="store_true", help="Print one JSON object")
    one.add_argument(
        "--sequences", action="store_true", help="Print each sequence as a JSON line, which `ssd-cache build` can read"
    )
    command.add_argument(
        "--secret-file",
        type=Path,
        metavar="FILE",
        help="File with the server's secret, if DIR is its --cache-dir (default: the secret that DIR contains)",
    )
    command.add_argument(
        "--tokenizer",
        metavar="DIR_OR_MODEL",
        help="Tokenizer of the cache: --deep checks that the cache was built with it, --sequences prints text instead "
        "of token ids",
    )


def run(options: argparse.Namespace) -> int:
    root = options.directory
    if not (root / MANIFEST_NAME).exists() and ((root / STATE_DIRECTORY).is_dir() or tenant_directories(root)):
        found = inspect_all(root, options.secret_file)
        print(json.dumps(found, indent=1) if options.json else all_as_text(found))
        return 1 if found["faults"] else 0
    codec = codec_from_options(options)
    if options.sequences:
        try:
            _print_sequences(options.directory, codec)
        except BrokenPipeError:  # the reader (e.g. head) has closed the pipe; Python must not write the rest at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    with progress_bar(0, " tokens") as bar:
        facts = inspect(options.directory, deep=options.deep, codec=codec, progress=bar.update)
    print(json.dumps(facts, indent=1) if options.json else as_text(facts))
    return 0 if facts["is_intact"] else 1


Facts = dict[str, Any]


def as_text(facts: Facts) -> str:
    sequences = "" if facts["num_sequences"] is None else f" in {facts['num_sequences']:,} sequences"
    lines = [
        f"{facts['path']}",
        f"  namespace    {escape_control_characters(facts['namespace'])}",
        f"  tokenizer    {escape_control_characters(facts['fingerprint'])}",
        f"  generation   {facts['generation']}",
        f"  tokens       {facts['num_tokens']:,}{sequences}",
        f"  bytes        {facts['num_bytes']:,}",
        f"  segments     {len(facts['segments'])}",
    ]
    for segment in facts["segments"]:
        state = "checksums ok" if segment["error"] is None else "DAMAGED"
        lines.append(f"    {segment['id']:40}{segment['num_tokens']:>14,} tokens   {state}")
    if facts["learned_from"] is not None:
        lines.append(f"  {LEARNED_NAME}: learned from {facts['learned_from']:,} candidates")
    lines += [f"  note: {escape_control_characters(note)}" for note in facts["notes"]]
    lines += [f"  FAULT: {escape_control_characters(fault)}" for fault in facts["faults"]]
    return "\n".join(lines)


def all_as_text(facts: Facts) -> str:
    lines = [f"{facts['path']}", f"  namespaces   {len(facts['namespaces'])}"]
    lines += [
        f"    {escape_control_characters(each['name']):44}{each['num_bytes']:>16,} bytes   {each['of']}"
        for each in facts["namespaces"]
    ]
    return "\n".join([*lines, *(f"  FAULT: {escape_control_characters(fault)}" for fault in facts["faults"])])


def inspect_all(root: Path, secret_file: Path | None = None) -> Facts:
    """List all caches in a server's cache directory with their owners, and return the object that ``--json`` prints.

    A tenant's cache has a name derived from the server's secret, which is read from ``secret_file`` (default: from the
    directory). In the result, "of" tells to whom a cache belongs. "orphans" are caches of tenants that were created
    with another secret. "faults" reports orphans, and a missing or damaged secret. Nothing is changed. Raises
    CacheError if the directory or the secret cannot be read.
    """
    kept_at = secret_file or root / STATE_DIRECTORY / SECRET_NAME
    faults, namespaces, orphans = list[str](), list[Facts](), list[str]()
    ours = None
    try:
        tenants = {path.name for path in tenant_directories(root)}
        try:
            with open_file(kept_at) as file:
                ours = secret_id(parse_secret(file.read(_MAX_SECRET_BYTES))[0])
        except FileNotFoundError:
            faults += [f"{kept_at} is missing: restore it, or give --secret-file"] if tenants else []
        except ValueError as error:
            faults.append(f"{kept_at} is damaged ({error}): restore it from a copy")
        for path in sorted(each for each in root.iterdir() if each.is_dir() and each.name != STATE_DIRECTORY):
            owner, of = read_owner(path) if path.name in tenants else None, "a server's own"
            if owner is not None:
                of = "a tenant's" if owner.secret == ours else "an orphan"
                orphans += [path.name] if owner.secret != ours else []
            elif path.name in tenants:
                of = "the cache of a tenant without the id of its secret: it is damaged, or a former version wrote it"
            num_bytes = sum(file.stat().st_size for file in path.iterdir() if is_cache_file(file))
            namespaces.append({"name": path.name, "num_bytes": num_bytes, "of": of})
    except OSError as error:
        raise StoreUnavailable(f"{root} cannot be read: {error}. Check its permissions") from None
    faults += [f"{name} is an orphan: restore the secret it was created with, or remove it" for name in orphans]
    return {"path": str(root), "namespaces": namespaces, "orphans": orphans, "faults": faults}


def inspect(
    path: Path,
    *,
    deep: bool = False,
    codec: TextCodec | None = None,
    progress: Callable[[int], object] = lambda num_tokens: None,
) -> Facts:
    """Read a cache directory completely and check it. Nothing is changed, and a server may continue to write to it.

    Args:
        path: The cache directory.
        deep: Also check properties that checksums cannot verify: the order of each suffix array, token ids,
            learned.bin.
        codec: The tokenizer that the cache must have been built with, for ``deep``. None: not checked.
        progress: Called with the number of tokens read since the last call.

    Returns:
        The object that ``--json`` prints. Token counts exclude separators. The "error" of a segment is None if its file
        exists and all checksums match. "faults" describe each problem and its remedy. With ``deep`` there are also
        "notes" about harmless findings, "num_sequences", and "learned_from", the number of candidate tokens that the
        acceptance model in learned.bin was trained on.

    Raises:
        CacheError: The directory contains no cache.

    It takes O(tokens) time; ``deep`` needs 8 bytes of memory per token of the largest segment.
    """
    for _ in range(MAX_READS):
        manifest = read_cache_manifest(path)
        facts = _inspect_segments(path, manifest, deep, codec, progress)
        if facts["is_intact"] or read_cache_manifest(path) == manifest:
            break
    return facts


def _inspect_segments(
    path: Path, manifest: Manifest, deep: bool, codec: TextCodec | None, progress: Callable[[int], object]
) -> Facts:
    """Return the result of `inspect` for the segments that ``manifest`` lists.

    A listed segment whose file is missing is a fault, also if a server has deleted the file since the manifest was
    read.
    """
    segments, faults, notes = list[Facts](), list[str](), list[str]()
    learned_from = None
    if deep and codec is not None and codec.fingerprint != manifest.fingerprint:
        faults.append(
            f"it was made with tokenizer {manifest.fingerprint}, this one is {codec.fingerprint}: use the "
            "tokenizer it was made with, or build it again"
        )
        codec = None
    num_sequences = 0
    for entry in manifest.segments:
        file = path / f"{entry['id']}.seg"  # read_manifest checked the name
        found = {"id": entry["id"], "num_tokens": 0, "num_bytes": 0, "is_static": entry.get("start") is None}
        error = None
        try:
            found["num_bytes"] = file.stat().st_size
            namespace = manifest.namespace if deep else None
            segment = open_segment(file, fingerprint=manifest.fingerprint, namespace=namespace)
            found["num_tokens"] = sum(int(np.count_nonzero(block != SEPARATOR)) for block in iter_blocks(segment))
            num_sequences += len(segment) - found["num_tokens"]
            faults += _find_faults(segment, entry, codec) if deep else ()
        except FileNotFoundError:
            error = f"{file} is missing"
        except (CacheError, OSError) as failure:
            error = str(failure)
        faults += [] if error is None else [error]
        segments.append({**found, "error": error})
        progress(found["num_tokens"])
    if deep:
        try:
            stored = read_learned_state(path)
            learned_from = None if stored is None else AcceptanceModel.from_bytes(stored).num_learned
        except (CacheError, ValueError) as wrong:
            faults.append(f"{LEARNED_NAME} is not used ({wrong}): remove it, and a new acceptance model is trained")
        parts = PART_NAMES | {f"{segment['id']}.seg" for segment in segments}
        notes += [f"{file.name} is no file of a cache" for file in sorted(path.iterdir()) if file.name not in parts]
    return {
        "path": str(path),
        "namespace": manifest.namespace,
        "fingerprint": manifest.fingerprint,
        "generation": manifest.generation,
        "num_tokens": sum(segment["num_tokens"] for segment in segments),
        "num_bytes": sum(segment["num_bytes"] for segment in segments),
        "num_sequences": num_sequences if deep else None,
        "learned_from": learned_from,
        "is_intact": not faults,
        "segments": segments,
        "faults": faults,
        "notes": notes,
    }


def _find_faults(segment: Segment, entry: Facts, codec: TextCodec | None) -> Iterator[str]:
    """Yield the faults of a segment that checksums do not detect, e.g. token ids outside the vocabulary."""
    name = f"{segment.segment_id}.seg"
    if (said := (entry.get("num_tokens"), entry.get("start"))) != (len(segment), segment.start):
        yield (
            f"{MANIFEST_NAME} says of {name} that it has {said[0]!r:.20} tokens from position {said[1]!r:.20} on, the "
            f"file has {len(segment)} from {segment.start}: restore one of the two"
        )
    largest = max(int(block.max()) for block in iter_blocks(segment))
    if codec is not None and largest >= codec.vocab_size:
        yield f"{name} contains token id {largest}, but the tokenizer has {codec.vocab_size} tokens: {_REBUILD}"
    fence = build_sparse_index(segment.text, segment.order, segment.width) if is_sorted(segment) else None
    if fence is None or not np.array_equal(fence, segment.sparse_index):
        yield f"the suffix array of {name} does not match its text: lookups miss text, outputs stay right; {_REBUILD}"


_RANKS_AT_ONCE: Final = 1 << 20


def is_sorted(segment: Segment) -> bool:
    """Return whether a segment's suffix array is sorted, without sorting the text again. O(n) time, 8 bytes per token.

    The array orders all prefixes of the text, compared from their last token backwards. It is sorted if every prefix
    occurs once, and if for each two neighbours either the last token of the first prefix is smaller, or their last
    tokens are equal and the remaining prefixes are in the right order (Burkhardt and Kaerkkaeinen 2003, "Fast
    lightweight suffix array construction and checking", section 3.3).
    """
    n, order = len(segment), segment.order
    if order.min() < 1 or order.max() > n:
        return False
    ranks = np.full(n + 1, -1, np.int32)  # position 0 keeps rank -1, because a prefix precedes longer texts
    for begin in range(0, n, _RANKS_AT_ONCE):  # numpy indexes need eight bytes
        places = order[begin : begin + _RANKS_AT_ONCE]
        ranks[places] = np.arange(begin, begin + len(places), dtype=np.int32)
    if ranks[1:].min() < 0:
        return False
    tokens = unpack(segment.text, n, segment.width)
    for begin in range(0, n, _RANKS_AT_ONCE):
        ends = order[begin : begin + _RANKS_AT_ONCE + 1] - 1
        last, before = tokens[ends], ranks[ends]
        if ((last[:-1] > last[1:]) | ((last[:-1] == last[1:]) & (before[:-1] >= before[1:]))).any():
            return False
    return True


def _print_sequences(path: Path, codec: TextCodec | None) -> None:
    """Print each sequence of a cache as a JSON line, with its text if ``codec`` is given, else with its token ids."""
    for sequence in iter_sequences(open_cache(path, codec).segments):
        ids = sequence.tolist()
        record = {"token_ids": ids} if codec is None else {"text": codec.decode(ids)}
        sys.stdout.buffer.write(json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode() + b"\n")
    sys.stdout.buffer.flush()
