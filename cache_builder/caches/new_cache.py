"""A new cache directory in the place of nothing, or of an old one: there whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cache_builder.building.partial_directory import partial_directory
from ssd.errors import ConfigError
from ssd.retrieval.files import LOCK_NAME, MANIFEST_NAME, DirectoryLock
from ssd.retrieval.static import DEFAULT_SEGMENT_TOKENS, StaticWriter


@contextmanager
def new_cache(
    out: Path, *, fingerprint: str, namespace: str, force: bool, segment_tokens: int = DEFAULT_SEGMENT_TOKENS
) -> Iterator[StaticWriter]:
    """A writer of what becomes the cache ``out`` when the block ends without an exception.

    ``force`` : a cache that is there already is replaced; it may be read meanwhile, but no server may write it.
    ``segment_tokens`` : size of a segment. Raises ConfigError, CacheError, OSError; then ``out`` is as it was before.
    """
    check_out(out, force=force)
    with partial_directory(out) as temporary:
        with StaticWriter(
            temporary / "new", fingerprint=fingerprint, namespace=namespace, segment_tokens=segment_tokens
        ) as writer:
            yield writer
        if out.exists():
            lock = DirectoryLock(out)
            try:
                out.rename(temporary / "old")
            finally:
                lock.close()
        (temporary / "new").rename(out)


def check_out(out: Path, *, force: bool) -> None:
    """Raises ConfigError, or CacheLocked, where ``out`` is not to be written.

    ``force`` : a cache there may be replaced.
    """
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is a file: give a directory with --out")
    if (out / MANIFEST_NAME).exists():
        if not force:
            raise ConfigError(f"{out} holds a cache already: --force replaces it, or give another directory with --out")
        DirectoryLock(out).close()
    elif out.exists() and any(path.name != LOCK_NAME for path in out.iterdir()):
        raise ConfigError(f"{out} is not empty and holds no cache: give another directory with --out")
