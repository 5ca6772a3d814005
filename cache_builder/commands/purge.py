"""The command ``ssd-cache purge``."""

from __future__ import annotations

import argparse

from cache_builder.commands.options import add_log_of_namespace, find_fingerprints, redis_client, redis_url_from_options
from ssd.sharing.entry import stream_key

_DESCRIPTION = """\
Remove all that Redis holds of a namespace, and see that nothing is left: status 0 if nothing is, 1 if something is.

Servers that have it open, and their directories, keep what they learned, and write new text to the log again. Of a
tenant, DELETE /admin/tenants/NAME/cache removes it everywhere; else stop the servers, delete CACHE_DIR/NAMESPACE on
each machine and purge again. Backups and logs are not touched.
"""


def add(command: argparse.ArgumentParser) -> None:
    command.description = _DESCRIPTION
    add_log_of_namespace(command, "what is to be gone")


def run(options: argparse.Namespace) -> int:
    namespace, num_removed = options.namespace, 0
    with redis_client(redis_url_from_options(options)) as client:
        found = find_fingerprints(client, options)
        # Former versions kept more than the log, under names that begin with the log's.
        patterns = [stream_key(fingerprint, namespace) + "*" for fingerprint in found]
        for key in [key for pattern in patterns for key in client.scan_iter(match=pattern, count=1000)]:
            num_removed += int(client.delete(key))
        left = [key for pattern in patterns for key in client.scan_iter(match=pattern, count=1000)]
    state = f"{len(left)} are" if left else "nothing is"
    print(f"namespace {namespace}: {num_removed} keys removed from Redis, {state} left")
    print(
        "  servers that have it open and their directories hold their text still: DELETE /admin/tenants/NAME/cache for "
        "tenants; else stop the servers and delete CACHE_DIR/NAMESPACE"
    )
    return 1 if left else 0
