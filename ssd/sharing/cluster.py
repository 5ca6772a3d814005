"""A client of a cluster that asks the node which serves a key. Needs redis-py, so only ``connect`` imports it.

redis-py has one as well; it repeats and waits on its own, reads the map of slots when it is made, asks the server where
the keys of an XREAD stand each time, and builds whatever map a node describes. This one does only what sharing needs:
commands, pipelines and transactions whose keys have one hash tag, no attempt of its own but to go where it is sent, and
a map that is checked (``slots``). It is read before the first command, and after a failure or a redirection before the
next one, from any node that answers.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import redis
from redis.client import Pipeline
from redis.exceptions import (
    AskError,
    ClusterDownError,
    ClusterError,
    MasterDownError,
    MovedError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from ssd.sharing.addresses import Host
from ssd.sharing.one_server import OneServer
from ssd.sharing.sentinels import read_host
from ssd.sharing.slots import NUM_SLOTS, read_slots, slot_of, slot_of_key

_MOST_REDIRECTIONS = 5
_MOST_NODES = 1000
_LOOK_AGAIN_S = 0.1
_LOOK_FOR_S = 2.0
_LOST = (RedisConnectionError, RedisTimeoutError, OSError, ClusterDownError, MasterDownError)

_POLL_MS = 200
"""With streams of several slots one read waits for the busiest of them this long, then all are looked at again."""

_TOGETHER = 8
"""Reads of one node that are sent at once: their replies are in memory together."""


class ClusterClient(redis.Redis):
    """Commands go to the node of their first key; those without one to any. Safe from any thread."""

    def __init__(self, hosts: tuple[Host, ...], options: dict[str, Any]) -> None:
        """``hosts`` : some nodes. ``options`` : of a connection to any of them."""
        self._hosts = hosts
        self._options = options
        self._lock = threading.RLock()
        self._nodes: dict[Host, redis.Redis] = {}
        self._owners: list[Host | None] = [None] * NUM_SLOTS
        self._is_stale = True
        self._may_look_at = 0.0
        self._lost: Host | None = None
        self._turn: list[Any] = []
        super().__init__(connection_pool=self._node(hosts[0]).connection_pool)

    def execute_command(self, *args: Any, **options: Any) -> Any:
        """What the node of the command's key answers, at most five redirections later."""
        slot = slot_of(args)
        host = random.choice(self._masters()) if slot is None else self._owner(slot)
        is_asked = False
        for _ in range(_MOST_REDIRECTIONS):
            try:
                return self._asked(host, args, options) if is_asked else self._said(host, args, options)
            except AskError as error:  # MovedError is one
                host, is_asked = self._redirected(error, host), not isinstance(error, MovedError)
            except _LOST:
                self._lose(host)
                raise
        raise ClusterError(f"sent from node to node more than {_MOST_REDIRECTIONS} times")

    def pipeline(self, transaction: bool = True, shard_hint: Any = None) -> ClusterPipeline:
        """One for commands whose keys have one hash tag."""
        return ClusterPipeline(self, transaction)

    def xread(  # type: ignore[override]
        self, streams: Mapping[Any, Any], count: int | None = None, block: int | None = None
    ) -> Any:
        """As of one server, but for streams of several nodes: some of what is there, or one of them is waited for.

        A server reads streams of one slot at once. So those of several slots are looked at a few at a time, on their
        nodes, until one has something; where none has, the one that had something last is waited for, 0.2 s at most.
        Nothing is lost by an error: ids are not moved by a read.
        """
        if len({slot_of_key(key) for key in streams}) <= 1:
            return super().xread(dict(streams), count=count, block=block)
        turn = {key: number for number, key in enumerate(self._turn)}
        keys = sorted(streams, key=lambda key: turn.get(key, -1))
        by_node: dict[Host, list[Any]] = {}
        for key in keys:  # those that were served last stand last
            by_node.setdefault(self._owner(slot_of_key(key)), []).append(key)
        for host, keys_here in by_node.items():
            for start in range(0, len(keys_here), _TOGETHER):
                found = self._read_some(
                    host, {key: streams[key] for key in keys_here[start : start + _TOGETHER]}, count
                )
                if found:
                    served = [key for key, _ in found]
                    self._turn = [key for key in keys if _encoded(key) not in served]
                    self._turn += [key for key in keys if _encoded(key) in served]
                    return found
        if block is None:
            return []
        busiest = keys[-1]
        return super().xread({busiest: streams[busiest]}, count=count, block=max(1, min(block, _POLL_MS)))

    def scan_iter(self, *args: Any, **options: Any) -> Iterator[Any]:
        """Keys of all nodes."""
        for _, node in self.masters():
            yield from node.scan_iter(*args, **options)

    def masters(self) -> list[tuple[Host, redis.Redis]]:
        """A client for each node that serves slots, to be asked and not closed."""
        return [(host, self._node(host)) for host in sorted(self._masters())]

    def node_of(self, key: str) -> redis.Redis:
        """A client of the node that serves ``key`` now, not to be closed."""
        return self._node(self._owner(slot_of_key(key)))

    def close(self) -> None:
        """Give all connections back."""
        with self._lock:
            nodes, self._nodes = list(self._nodes.values()), {}
        for node in nodes:
            node.close()

    def _read_some(self, host: Host, streams: Mapping[Any, Any], count: int | None) -> list[Any]:
        pipeline = self._node(host).pipeline(transaction=False)
        for key, last_id in streams.items():
            pipeline.xread({key: last_id}, count=count)
        try:
            answers: list[Any] = pipeline.execute(raise_on_error=False)
        except _LOST:
            self._lose(host)
            raise
        for answer in answers:
            if isinstance(answer, AskError):
                self._redirected(answer, host)
            if isinstance(answer, _LOST):
                self._lose(host)
            if isinstance(answer, Exception):
                raise answer
        return [stream for answer in answers for stream in answer or ()]

    def _said(self, host: Host, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        return self._node(host).execute_command(*args, **options)  # type: ignore[no-untyped-call]

    def _asked(self, host: Host, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """The one command that a node takes for a slot which is on its way there."""
        pipeline = self._node(host).pipeline(transaction=False)
        pipeline.execute_command("ASKING")  # type: ignore[no-untyped-call]
        pipeline.execute_command(*args, **options)  # type: ignore[no-untyped-call]
        return pipeline.execute()[-1]

    def _redirected(self, error: AskError, host: Host) -> Host:
        """Where ``host`` sends a command."""
        target = read_host((error.host or host[0]).encode(), error.port)
        if isinstance(error, MovedError):
            with self._lock:
                if 0 <= error.slot_id < NUM_SLOTS:
                    self._owners[error.slot_id] = target
                self._is_stale = True
        return target

    def _lose(self, host: Host) -> None:
        with self._lock:
            self._is_stale, self._lost = True, host

    def _node(self, host: Host) -> redis.Redis:
        with self._lock:
            if host not in self._nodes:
                if len(self._nodes) >= _MOST_NODES:
                    raise ClusterError(f"more than {_MOST_NODES} nodes")
                pool = redis.ConnectionPool(**self._options | {"host": host[0], "port": host[1]})
                self._nodes[host] = OneServer.from_pool(pool)
            return self._nodes[host]

    def _owner(self, slot: int) -> Host:
        self._look()
        owner = self._owners[slot]
        if owner is None:
            self._is_stale = True
            raise ClusterDownError("no node of the cluster serves this key")
        return owner

    def _masters(self) -> list[Host]:
        self._look()
        return list({owner for owner in self._owners if owner is not None}) or list(self._hosts)

    def _look(self) -> None:
        """Read the map again where it may be old; an old one is kept where no node answers."""
        with self._lock:
            if not self._is_stale or time.monotonic() < self._may_look_at:
                return
            known = [owner for owner in {*self._owners, *self._hosts} if owner is not None]
            random.shuffle(known)
            known.sort(key=lambda host: host == self._lost)
            deadline = time.monotonic() + _LOOK_FOR_S
            reason: Exception | None = None
            for host in known:
                try:
                    self._owners = read_slots(self._said(host, ("CLUSTER", "SLOTS"), {}), host)
                    self._is_stale = False
                except Exception as error:  # nonsense raises whatever it likes
                    reason = error
                if not self._is_stale or time.monotonic() > deadline:
                    break
            self._may_look_at = time.monotonic() + _LOOK_AGAIN_S
            if self._is_stale and reason is not None and not any(self._owners):
                raise reason
            used = {*self._owners, *self._hosts}
            for host in [host for host in self._nodes if host not in used]:
                self._nodes.pop(host).close()


class ClusterPipeline(Pipeline):
    """A pipeline of redis-py on the node of its first key."""

    def __init__(self, cluster: ClusterClient, transaction: bool) -> None:
        super().__init__(cluster.connection_pool, cluster.response_callbacks, transaction, None)
        self._cluster = cluster
        self._host: Host | None = None
        self._is_transaction = transaction

    def execute_command(self, *args: Any, **options: Any) -> Any:
        """Queue a command, or run it where a key is watched; the first one with a key chooses the node."""
        slot = slot_of(args) if self._host is None and args[0] not in self.UNWATCH_COMMANDS else None
        if slot is not None:
            self._host = self._cluster._owner(slot)
            self.connection_pool = self._cluster._node(self._host).connection_pool
        host = self._host
        try:
            return super().execute_command(*args, **options)  # type: ignore[no-untyped-call]
        except (AskError, *_LOST) as error:
            self._note(host, error)
            raise

    def execute(self, raise_on_error: bool = True) -> list[Any]:
        """Answers in order. Of a pipeline that is no transaction, what has moved is asked for where it is now."""
        commands, host = list(self.command_stack), self._host
        if self._is_transaction or self.explicit_transaction:
            try:
                return super().execute(raise_on_error)
            except (AskError, *_LOST) as error:
                self._note(host, error)
                raise
        try:
            answers = super().execute(raise_on_error=False)
        except _LOST as error:
            self._note(host, error)
            raise
        for index, answer in enumerate(answers):
            if isinstance(answer, AskError):
                self._note(host, answer)
                answers[index] = self._again(*commands[index])
            elif isinstance(answer, _LOST):
                self._note(host, answer)
        for answer in answers:
            if raise_on_error and isinstance(answer, Exception):
                raise answer
        return answers

    def reset(self) -> None:  # type: ignore[override]
        """Begin anew, perhaps on another node."""
        super().reset()
        self._host = None

    def _again(self, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        try:
            return self._cluster.execute_command(*args, **options)
        except ResponseError as error:
            return error

    def _note(self, host: Host | None, error: Exception) -> None:
        if host is None:
            return
        if isinstance(error, AskError):
            self._cluster._redirected(error, host)
        else:
            self._cluster._lose(host)


def _encoded(key: str | bytes) -> bytes:
    return key.encode() if isinstance(key, str) else key
