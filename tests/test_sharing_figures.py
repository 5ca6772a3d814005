"""What a replica counts of its sharing: lag, delay, bytes and refusals by reason, of a real server."""

from __future__ import annotations

import time
from contextlib import closing

import pytest
from redis import exceptions as of

from ssd.sharing.connection import connect
from ssd.sharing.stats import INVALID, REASONS, Received, reason_of
from ssd.sharing.stream import FIELD, OversizedReplyError
from tests.redis_server import RedisServer, redis_server
from tests.sharing_replica import KEY, entry, eventually, replica

__all__ = ["redis_server"]  # the fixture


def test_what_is_sent_and_received_is_weighed_by_namespace(redis_server: RedisServer) -> None:
    with replica(redis_server.url) as one, replica(redis_server.url) as two:
        one.append([1, 2, 3])
        eventually(lambda: two.stored() == [[1, 2, 3]])
        for number in range(20):
            one.caches.get("other").append([4, number])
        two.caches.get("other")
        eventually(lambda: two.log.stats().num_received == 21)
        sent, received = one.log.stats().streams, two.log.stats().streams
        assert set(sent) == set(received) == {"default", "other"}
        assert (sent["other"].num_sent, received["other"].num_received) == (20, 20)
        assert sent["other"].num_sent_bytes == received["other"].num_received_bytes > 20 * 35
        assert received["other"].num_sent == 0
        with closing(connect(redis_server.url)) as client:
            client.xadd(KEY, {FIELD: entry(9, sequence_id=b"z" * 16)})
        eventually(lambda: [9] in two.stored())
        eventually(lambda: sum(two.log.stats().delays.counts) >= 1)
        assert two.log.stats().delays.total < 10 * sum(two.log.stats().delays.counts)
        assert received["default"].lag_seconds == 0


def test_lag_grows_while_the_server_is_away_and_is_gone_afterwards(redis_server: RedisServer) -> None:
    def lag() -> float:
        return one.log.stats().streams["default"].lag_seconds

    with replica(redis_server.url) as one:
        one.append([1])
        eventually(lambda: one.log.stats().is_connected and lag() == 0)
        redis_server.kill()
        eventually(lambda: lag() > 0.3)
        eventually(lambda: one.log.stats().refusals["connection"] > 0)
        redis_server.start()
        eventually(lambda: lag() == 0)


def test_refusals_are_counted_by_reason(redis_server: RedisServer) -> None:
    with closing(connect(redis_server.url)) as client, replica(redis_server.url) as one:
        one.append([1])
        eventually(lambda: one.log.stats().num_published == 1)
        client.xadd(KEY, {FIELD: b"junk"})
        client.xadd(KEY, {FIELD: entry(999) + b"x"})
        torn = bytearray(entry(1, 2, 3))
        torn[3] ^= 1
        client.xadd(KEY, {FIELD: bytes(torn)})
        eventually(lambda: one.log.stats().num_invalid == 3)
        counts = one.log.stats().refusals
        assert set(counts) == {*REASONS, *(f"invalid_{kind}" for kind in INVALID)}
        assert counts["invalid_size"] == counts["invalid_damaged"] == counts["invalid_checksum"] == 1
        client.config_set("maxmemory", 1)
        one.append([2])
        eventually(lambda: one.log.stats().refusals["out_of_memory"])
        client.config_set("maxmemory", 0)
        client.delete(KEY)
        client.set(KEY, "a string")
        one.append([3])
        eventually(lambda: one.log.stats().refusals["wrong_type"])
        client.execute_command("ACL", "SETUSER", "default", "-xread", "-xadd")
        client.delete(KEY)
        one.append([4])
        eventually(lambda: one.log.stats().refusals["no_rights"])


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (of.ConnectionError("refused"), "connection"),
        (ConnectionResetError(), "connection"),
        (of.TimeoutError(), "timeout"),
        (of.AuthenticationError("invalid username-password pair"), "authentication"),
        (of.BusyLoadingError("loading"), "busy"),
        (of.ReadOnlyError("You can't write against a read only replica."), "read_only"),
        (of.ClusterDownError("CLUSTERDOWN down"), "cluster_down"),
        (of.ResponseError("MISCONF no disk"), "read_only"),
        (of.ResponseError("WRONGTYPE of key"), "wrong_type"),
        (OversizedReplyError([]), "oversized"),
        (ValueError("?"), "other"),
    ],
)
def test_each_failure_has_one_reason(error: Exception, reason: str) -> None:
    assert reason_of(error) == reason and reason in REASONS


def test_a_clock_that_is_not_told_gives_no_delay(redis_server: RedisServer) -> None:
    with closing(connect(redis_server.url)) as client:
        received = Received()
        received.caught_up()
        assert received.delay_of(b"1-0") is None
        received.set_clock(client)
        delay = received.delay_of(b"%d-0" % int((time.time() - 5) * 1000))
        assert delay is not None and 4.9 < delay < 6
        assert received.delay_of(b"18446744073709551615-1") == 0
        client.execute_command("ACL", "SETUSER", "default", "-time")
        received.set_clock(client)
        assert received.delay_of(b"1-0") is None and not received.is_clock_due
