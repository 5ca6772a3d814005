"""``ssd-cache merge``: merge several caches into one with few large segments."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import xxhash

from cache_builder.building.resumable import check_output, new_cache
from cache_builder.commands.options import progress_bar
from cache_builder.opened_cache import open_caches
from ssd.errors import ConfigError
from ssd.retrieval.files import check_namespace
from ssd.retrieval.prebuilt import DEFAULT_SEGMENT_TOKENS
from ssd.retrieval.ring import iter_sequences


def merge(
    paths: Sequence[Path],
    out: Path,
    *,
    namespace: str | None = None,
    force: bool = False,
    unique: bool = False,
    segment_tokens: int = DEFAULT_SEGMENT_TOKENS,
) -> None:
    """Write the sequences of several caches, in order, to one cache directory, and print a summary.

    Sequences that occur several times are kept by default, because drafts are ranked by how often a text occurs;
    ``unique`` keeps only the first of them. ``out`` may be one of ``paths``, and is unchanged after an error. The
    largest segment needs 18 bytes of memory per token, and ``unique`` about 100 bytes per sequence.

    Raises:
        ConfigError: ``out`` cannot be used, the caches contain no text, or ``namespace`` is missing although the caches
            have different namespaces.
        CacheError: A cache cannot be read, or the caches have different tokenizers.
        OSError: The result cannot be written.
    """
    check_output(out, force=force)
    caches = open_caches(paths)
    namespaces = sorted({cache.namespace for cache in caches})
    if namespace is None and len(namespaces) > 1:
        raise ConfigError(
            f"the caches belong to different namespaces ({', '.join(namespaces)}): set the namespace of the "
            "merged cache with --namespace. Requests of this namespace may then get drafts from the text of "
            "all these caches"
        )
    named = namespaces[0] if namespace is None else namespace
    if not any(cache.num_tokens for cache in caches):
        raise ConfigError("the caches contain no text: nothing was merged")
    known: set[bytes] = set()
    num_sequences = num_tokens = num_repeated = 0
    fingerprint = caches[0].fingerprint
    with (
        progress_bar(0, " tokens") as bar,
        new_cache(out, fingerprint=fingerprint, namespace=named, force=force, segment_tokens=segment_tokens) as writer,
    ):
        for cache in caches:
            for sequence in iter_sequences(cache.segments):
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
        print(f"  {num_repeated:,} repeated sequences were stored only once")


_DESCRIPTION = """\
Merge several caches into one with few large segments. Lookups are faster with fewer segments.

The caches may come from `ssd-cache build` or from a server (CACHE_DIR/NAMESPACE), and must have the same tokenizer.
They are not changed. Repeated texts are kept, because drafts are ranked by how often a text occurs.
"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.description = _DESCRIPTION
    command.add_argument("directories", nargs="+", type=Path, metavar="DIR", help="Cache directory, the newest last")
    command.add_argument(
        "--out", required=True, type=Path, metavar="DIR", help="Cache directory to write; created if missing"
    )
    command.add_argument(
        "--namespace", help="Namespace of the result (default: the namespace of the caches if all have the same)"
    )
    command.add_argument("--force", action="store_true", help="Replace an existing cache in --out")
    command.add_argument("--unique", action="store_true", help="Remove repeated sequences")


def run(options: argparse.Namespace) -> int:
    namespace = None if options.namespace is None else check_namespace(options.namespace)
    merge(options.directories, options.out, namespace=namespace, force=options.force, unique=options.unique)
    return 0
