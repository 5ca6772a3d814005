"""``ssd-cache purge``."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from cache_builder.commands.options import add_store_arguments
from ssd.errors import SSDError
from ssd.retrieval.files import check_fingerprint, check_namespace
from ssd.sharing.connection import URL_VARIABLE

_DESCRIPTION = """\
Remove all that is kept of a namespace, and see that nothing is left: status 0 where nothing is, 1 where something is.

Servers that have it open are told and forget it; the command waits until each has said so. Then the stream, the
published text and the lease are removed from Redis, the objects from the store, the files from the directories. A
server's own --namespace is not forgotten while it runs: stop it first. Directories of servers that do not have the
namespace open are to be named, on each machine. Backups and logs are not touched.
"""


def add(command: argparse.ArgumentParser) -> None:
    """Its arguments."""
    command.description = _DESCRIPTION
    add_store_arguments(command)
    command.add_argument("--namespace", required=True, help="what is to be gone")
    command.add_argument(
        "--directory", type=Path, action="append", default=[], metavar="DIR", help="a server's --cache-dir; repeatable"
    )
    command.add_argument("--fingerprint", metavar="HEX", help="of one tokenizer only (default: of all there are)")


def run(options: argparse.Namespace) -> int:
    from ssd.sharing.connection import connect
    from ssd.sharing.published.commands import (
        Purged,
        find_fingerprints,
        purge_directories,
        purge_redis,
        purge_store,
        store_errors,
    )
    from ssd.sharing.published.store import open_place

    namespace = check_namespace(options.namespace)
    redis_url = options.redis or (None if options.store or options.directory else os.environ.get(URL_VARIABLE)) or None
    if redis_url is None and options.store is None and not options.directory:
        raise SSDError("nothing is named to be looked through: give --redis URL, --store URL or --directory DIR")
    fingerprints = (
        [check_fingerprint(options.fingerprint)]
        if options.fingerprint
        else find_fingerprints(redis_url, options.store, namespace)
    )
    found: list[tuple[str, Purged]] = []
    with store_errors(redis_url, options.store):
        if redis_url is not None:
            client = connect(redis_url)
            for fingerprint in fingerprints:
                found.append((f"Redis, tokenizer {fingerprint}", purge_redis(client, fingerprint, namespace)))
            client.close()
        if options.store is not None:
            place = open_place(options.store)
            for fingerprint in fingerprints:
                found.append((f"store, tokenizer {fingerprint}", purge_store(place, fingerprint, namespace)))
    if options.directory:
        found.append(("directories", purge_directories(options.directory, namespace)))
    if not fingerprints and (redis_url is not None or options.store is not None):
        print("nothing is there of it in Redis or in the store")
    for where, purged in found:
        servers = f", {purged.num_servers} servers were told" if where.startswith("Redis") else ""
        print(f"{where}: {purged.num_removed} removed{servers}, {len(purged.left)} left")
        for line in purged.left:
            print(f"  {line}")
    num_left = sum(len(purged.left) for _, purged in found)
    print(f"namespace {namespace}: {'nothing is left' if not num_left else f'{num_left} things are left'}")
    return 1 if num_left else 0
