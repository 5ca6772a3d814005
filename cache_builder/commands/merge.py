"""``ssd-cache merge``: several caches become one of few large segments."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import xxhash

from cache_builder.building.unfinished import check_new, new_cache
from cache_builder.commands.options import progress_bar
from cache_builder.held import open_held
from ssd.errors import ConfigError
from ssd.retrieval.files import check_namespace
from ssd.retrieval.ring import sequences_of
from ssd.retrieval.static import DEFAULT_SEGMENT_TOKENS


def merge(
    paths: Sequence[Path],
    out: Path,
    *,
    namespace: str | None = None,
    force: bool = False,
    unique: bool = False,
    segment_tokens: int = DEFAULT_SEGMENT_TOKENS,
) -> None:
    """Write the sequences of the caches ``paths``, in their order, to ``out``, which may be one of them; print it.

    What drafting asks is how often a text occurs and with what it goes on, so equal sequences stay as many as they are.
    ``namespace`` : of the result, None where all have the same. ``force`` : in place of a cache that is there.
    ``unique`` : of equal sequences only the first, for some 100 bytes of memory a sequence. ``segment_tokens`` : size
    of a segment, which bounds the memory: about 18 bytes a token.

    Raises ConfigError, CacheError, OSError; then ``out`` is as it was before.
    """
    check_new(out, force=force)
    caches = open_held(paths)
    namespaces = sorted({cache.namespace for cache in caches})
    if namespace is None and len(namespaces) > 1:
        raise ConfigError(
            f"the caches are of the namespaces {', '.join(namespaces)}: say with --namespace whose the result is. What "
            "each learned may then be drafted for the other"
        )
    named = namespaces[0] if namespace is None else namespace
    if not any(cache.num_tokens for cache in caches):
        raise ConfigError("the caches hold no text: nothing was merged")
    known: set[bytes] = set()
    num_sequences = num_tokens = num_repeated = 0
    fingerprint = caches[0].fingerprint
    with (
        progress_bar(0, " tokens") as bar,
        new_cache(out, fingerprint=fingerprint, namespace=named, force=force, segment_tokens=segment_tokens) as writer,
    ):
        for cache in caches:
            for sequence in sequences_of(cache.segments):
                bar.update(len(sequence) + 1)
                if unique:
                    digest = xxhash.xxh3_128_digest(sequence.tobytes())
                    if digest in known:
                        num_repeated += 1
                        continue
                    known.add(digest)
                writer.append(sequence)
                num_sequences += 1
                num_tokens += len(sequence)
    num_segments = sum(len(cache.segments) for cache in caches)
    print(
        f"{out}: {num_tokens:,} tokens in {num_sequences:,} sequences from {num_segments} segments of {len(caches)} "
        f"caches, namespace {named}"
    )
    if num_repeated:
        print(f"  {num_repeated:,} sequences were there already and not stored again")


_DESCRIPTION = """\
Write what several caches hold into one directory of few large segments: lookups take less time in fewer segments.

Caches that `ssd-cache build` made and a server's own (CACHE_DIR/NAMESPACE) may be given, of one tokenizer. They stay as
they are. Equal texts are kept as often as they are stored, since that is what drafts are ranked by.
"""


def add(command: argparse.ArgumentParser) -> None:
    command.description = _DESCRIPTION
    command.add_argument(
        "directories", nargs="+", type=Path, metavar="DIR", help="in order, what counts as newest last"
    )
    command.add_argument("--out", required=True, type=Path, metavar="DIR", help="where to write; created if missing")
    command.add_argument("--namespace", help="name kept in the files (default: the caches' own, where it is one)")
    command.add_argument("--force", action="store_true", help="replace the cache in the --out directory")
    command.add_argument("--unique", action="store_true", help="of equal sequences keep the first only")


def run(options: argparse.Namespace) -> int:
    namespace = None if options.namespace is None else check_namespace(options.namespace)
    merge(options.directories, options.out, namespace=namespace, force=options.force, unique=options.unique)
    return 0
