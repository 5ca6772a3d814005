"""The command ``ssd-cache purge``, which deletes a namespace from Redis."""

from __future__ import annotations

import argparse

from cache_builder.commands.options import add_log_of_namespace, find_fingerprints, redis_client, redis_url_from_options
from ssd.replication.entry import stream_key

_DESCRIPTION = """\
Delete a namespace from Redis, and verify that nothing is left. The exit status is 1 if something is left.

Servers that have the namespace open keep their own caches and directories, and write new text to the stream again. To
delete a tenant's cache everywhere, use DELETE /admin/tenants/NAME/cache. Otherwise stop the servers, delete
CACHE_DIR/NAMESPACE on each machine, and purge again. Backups and logs are not changed.
"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.description = _DESCRIPTION
    add_log_of_namespace(command, "Namespace whose text is deleted from Redis")


def run(options: argparse.Namespace) -> int:
    namespace, num_removed = options.namespace, 0
    with redis_client(redis_url_from_options(options)) as client:
        found = find_fingerprints(client, options)
        # Former versions stored further keys that begin with the stream's name.
        patterns = [stream_key(fingerprint, namespace) + "*" for fingerprint in found]
        for key in [key for pattern in patterns for key in client.scan_iter(match=pattern, count=1000)]:
            num_removed += int(client.delete(key))
        left = [key for pattern in patterns for key in client.scan_iter(match=pattern, count=1000)]
    state = f"{len(left)} are" if left else "nothing is"
    print(f"namespace {namespace}: {num_removed} keys removed from Redis, {state} left")
    print(
        "  running servers and cache directories still contain the text: use DELETE /admin/tenants/NAME/cache for "
        "tenants, else stop the servers and delete CACHE_DIR/NAMESPACE"
    )
    return 1 if left else 0
