"""Options of the retrieval cache: how large, where it is kept, whom it is shared with."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from server.command.sizes import count, num_bytes, spelled
from ssd.config import EVICTION_POLICIES, CacheConfig, IndexConfig
from ssd.sharing.connection import URL_VARIABLE


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    """Checked."""

    namespace: str
    warm_directories: tuple[Path, ...]
    config: CacheConfig
    publishes: bool = True
    publish_to: str | None = None


def add_cache_options(parser: argparse.ArgumentParser) -> None:
    """The group "cache"."""
    index, cache = IndexConfig(), CacheConfig()
    add = parser.add_argument_group("cache").add_argument
    add(
        "--cache-tokens", type=count, default=index.capacity_tokens, metavar="N",
        help=f"capacity, 16M for instance (default: {spelled(index.capacity_tokens)})",
    )  # fmt: skip
    add(
        "--rebuild-interval", type=float, default=index.rebuild_interval_s, metavar="SECONDS",
        help="new text is indexed at the latest after this time (default: %(default)s)",
    )  # fmt: skip
    add(
        "--cache-eviction", default=index.eviction, choices=EVICTION_POLICIES,
        help="what stays when the cache is full: used: half of it may be what outputs said again; fifo: the newest "
        "text (default: %(default)s)",
    )  # fmt: skip
    add("--cache-dir", type=Path, metavar="DIR", help="keep the cache here (default: nothing outlives the process)")
    add(
        "--cache-memory-bytes", type=num_bytes, default=cache.memory_bytes, metavar="N",
        help="keep private copies of the cache's files up to this much; what is beyond, large --warm directories for "
        f"instance, is mapped and shared with other servers (default: {spelled(cache.memory_bytes)})",
    )  # fmt: skip
    add("--warm", type=Path, action="append", metavar="DIR", help="draft from what `ssd-cache build` wrote; repeatable")
    add(
        "--redis", metavar="URL",
        help=f"learn from other servers, and they from this one (default: ${URL_VARIABLE}, not in the process list)",
    )  # fmt: skip
    add(
        "--no-publish", action="store_true",
        help="never be the server that publishes the whole cache for those that join; this one still takes what others "
        "published",
    )  # fmt: skip
    add(
        "--publish-to", metavar="URL",
        help="keep what is published here, s3://bucket/ssd or file:///srv/ssd for instance; without --redis new "
        "servers begin with it, and that is all they share (default: in Redis)",
    )  # fmt: skip
    add(
        "--namespace",
        default="default",
        metavar="NAME",
        help="what this server's cache is called (default: %(default)s)",
    )


def cache_options_of(found: argparse.Namespace, environment: Mapping[str, str]) -> CacheOptions:
    """What was asked for; raises ConfigError."""
    return CacheOptions(
        namespace=found.namespace,
        warm_directories=tuple(found.warm or ()),
        publishes=not found.no_publish,
        publish_to=found.publish_to,
        config=CacheConfig(
            index=IndexConfig(
                capacity_tokens=found.cache_tokens,
                rebuild_interval_s=found.rebuild_interval,
                eviction=found.cache_eviction,
            ),
            directory=found.cache_dir,
            memory_bytes=found.cache_memory_bytes,
            redis_url=found.redis or environment.get(URL_VARIABLE) or None,
        ),
    )
