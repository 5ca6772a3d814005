"""Removing all that is kept of a namespace, and seeing that nothing is left."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ssd.errors import CacheError
from ssd.retrieval.directory import remove_directory
from ssd.sharing.keys import all_keys, namespace_key, purge_key
from ssd.sharing.published.presence import MEMBER_MS, Answer, answers, demand
from ssd.sharing.published.url_store import Place, url_store

if TYPE_CHECKING:
    import redis

ANSWER_S: Final = MEMBER_MS / 1000 + 10
"""By then a server has answered, or is gone and its key with it."""

_LOOK_S: Final = 0.5
_ROUNDS: Final = 3  # what was on its way when all was removed


@dataclass(frozen=True, slots=True, kw_only=True)
class Purged:
    """``num_removed`` : keys, objects and files. ``left`` : what is there still, a line each."""

    num_removed: int
    num_servers: int
    left: tuple[str, ...]


def purge_redis(client: redis.Redis, fingerprint: str, namespace: str, *, wait_s: float = ANSWER_S) -> Purged:
    """Have servers forget a namespace, then remove its keys. Waits ``wait_s`` at most; raises what redis-py raises."""
    token = demand(client, fingerprint, namespace)
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        if all(answer.token == token for answer in answers(client, fingerprint, namespace)):
            break
        time.sleep(_LOOK_S)
    said = answers(client, fingerprint, namespace)
    num_removed = 0
    for _ in range(_ROUNDS):
        num_removed += sum(_delete(client, key) for key in all_keys(fingerprint, namespace))
        time.sleep(_LOOK_S)
    known = {purge_key(fingerprint, namespace).encode()}
    members = namespace_key(fingerprint, namespace).encode() + b":member:"
    left = [
        f"key {key.decode('utf-8', 'replace')}"
        for key in client.scan_iter(match=namespace_key(fingerprint, namespace) + "*", count=1000)
        if key not in known and not key.startswith(members)
    ]
    return Purged(num_removed=num_removed, num_servers=len(said), left=(*_unmoved(said, token), *left))


def purge_store(place: Place, fingerprint: str, namespace: str) -> Purged:
    """Remove the objects of a namespace. Raises what the store raises."""
    store = url_store(place, fingerprint, namespace)
    num_removed = store.heads.clear() + store.chunks.clear()
    store.heads.clear()  # and the directory, which is empty by now
    try:
        left = place.files.find(f"{place.path}/{fingerprint}/{namespace}")
    except FileNotFoundError:
        left = []
    return Purged(num_removed=num_removed, num_servers=0, left=tuple(f"object {path}" for path in left))


def purge_directories(directories: Sequence[Path], namespace: str) -> Purged:
    """Remove a namespace from cache directories; one that a server writes is left and said to be. Never raises."""
    num_removed, left = 0, []
    for directory in directories:
        path = directory / namespace
        num_before = _num_files(path)
        try:
            remove_directory(path)
        except (OSError, CacheError) as error:
            left.append(f"{path}: {error}")
        found = _num_files(path)
        num_removed += num_before - found
        if found and not (left and left[-1].startswith(f"{path}:")):
            left.append(f"{path}: {found} files that are not ours")
    return Purged(num_removed=num_removed, num_servers=0, left=tuple(left))


def _unmoved(said: Sequence[Answer], token: bytes) -> list[str]:
    silent = sum(answer.token != token for answer in said)
    kept = sum(answer.token == token and not answer.is_gone for answer in said)
    lines = []
    if silent:
        lines.append(f"{silent} servers have it open and have not answered")
    if kept:
        lines.append(f"{kept} servers keep it, as it is their --namespace: stop them, then purge again")
    return lines


def _delete(client: redis.Redis, key: str) -> int:
    count: Any = client.delete(key)
    return int(count)


def _num_files(path: Path) -> int:
    return sum(1 for _ in path.iterdir()) if path.is_dir() else 0
