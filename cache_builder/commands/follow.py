"""The command ``ssd-cache follow``, which fills a cache from the KV events of running engines."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Final

import xxhash

from cache_builder import Terminated
from cache_builder.commands.options import token_count
from cache_builder.following.block_chains import LEAD_IN_TOKENS
from ssd.bundled import MODEL_PATH
from ssd.config import CacheConfig, IndexConfig
from ssd.errors import ConfigError
from ssd.numbers import format_number

if TYPE_CHECKING:
    from cache_builder.following.block_chains import FollowedText
    from cache_builder.following.follower import FollowCounts, Follower
    from ssd.retrieval.cache_manager import CacheManager
    from ssd.text.codec import TextCodec

_DESCRIPTION = """\
Learn from running vLLM or SGLang engines without changing them: subscribe to the KV events that they publish, and add
the text of all requests to a cache directory or to the Redis stream that servers share.

Start vLLM with
  --kv-events-config '{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557",
                       "replay_endpoint": "tcp://*:5558"}'
and prefix caching, and SGLang with the same --kv-events-config. The engines publish full blocks only, so the last
tokens of each text are missing. All publishers must serve the model of --tokenizer.

The events contain the text of users, and ZeroMQ does not authenticate: bind publishers to a private network.
"""

_PROGRESS_S: Final = 30.0


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.description = _DESCRIPTION
    capacity = IndexConfig().capacity_tokens
    command.add_argument(
        "endpoints",
        nargs="+",
        metavar="tcp://HOST:PORT",
        help="Publisher of KV events: one for each data-parallel rank",
    )
    add_follow_arguments(command)
    command.add_argument(
        "--out", type=Path, metavar="DIR", help="Directory for the caches, one in DIR/NAMESPACE per namespace"
    )
    command.add_argument("--redis", metavar="URL", help="URL of the Redis server that replicas share")
    command.add_argument(
        "--namespace",
        default="default",
        help="Namespace for text of the base model; each LoRA adapter and each cache_salt has a namespace of its own "
        "(default: %(default)s)",
    )
    command.add_argument(
        "--tokenizer",
        default=str(MODEL_PATH),
        metavar="DIR_OR_MODEL",
        help="Directory, hub id or tokenizer.json of the served model's tokenizer (default: that of the small model "
        "included in SSD)",
    )
    command.add_argument(
        "--cache-tokens",
        type=token_count,
        default=capacity,
        metavar="N",
        help=f"Capacity of each namespace in tokens; the oldest text is evicted (default: {format_number(capacity)})",
    )
    command.add_argument("--metrics-port", type=int, metavar="PORT", help="Serve Prometheus metrics on this port")
    command.add_argument("--json", action="store_true", help="Print the summary as one JSON line")


def add_follow_arguments(command: argparse._ActionsContainer, minutes: float | None = None) -> None:
    """Add the options for receiving KV events. ``minutes`` is the default of the option ``--minutes``."""
    default = "run until SIGTERM" if minutes is None else f"{minutes:g}"
    command.add_argument(
        "--minutes",
        type=float,
        default=minutes,
        metavar="M",
        help=f"Stop receiving KV events after M minutes (default: {default})",
    )
    command.add_argument("--topic", default="", help="Topic of the publishers (default: all topics)")
    command.add_argument(
        "--replay-port",
        type=int,
        metavar="PORT",
        help="Port of the first publisher's replay endpoint, from which missed events are fetched. The two ports of "
        "every other publisher must have the same difference (default: missed events are lost)",
    )
    command.add_argument(
        "--idle-seconds",
        type=float,
        default=10.0,
        metavar="S",
        help="Regard a text as finished if it does not grow for S seconds (default: %(default)g)",
    )


def run(options: argparse.Namespace) -> int:
    from ssd.retrieval.cache_manager import CacheManager
    from ssd.text.codec import TextCodec

    if options.out is None and options.redis is None:
        raise ConfigError("nothing would be stored: give --out DIR, --redis URL, or both")
    codec = TextCodec.load(options.tokenizer)
    index = IndexConfig(capacity_tokens=options.cache_tokens)
    config = CacheConfig(index=index, directory=options.out, redis_url=options.redis)
    with ExitStack() as resources:
        attach = None
        if options.redis is not None:
            from ssd.replication.replication_log import ReplicationLog

            log = ReplicationLog(
                options.redis,
                fingerprint=codec.fingerprint,
                vocab_size=codec.vocab_size,
                max_tokens=options.cache_tokens,
            )
            attach = resources.enter_context(log).attach
        caches = resources.enter_context(
            CacheManager(config, codec.fingerprint, namespace=options.namespace, on_open=attach)
        )
        counts = follow(options, codec, lambda text: store_text(caches, text), options.endpoints)
    summary = asdict(counts)
    shown = ", ".join(f"{value:,} {name.replace('_', ' ')}" for name, value in summary.items() if value)
    print(json.dumps(summary) if options.json else f"followed: {shown or 'nothing was received'}")
    return 0


def store_text(caches: CacheManager, text: FollowedText) -> None:
    """Append a text that was received from an engine to the cache of the text's namespace, see `namespace_of`."""
    cache = caches.get(namespace_of(caches.namespace, text.lora, text.cache_salt))
    cache.append(text.tokens, prompt_length=text.prompt_length)


def namespace_of(base: str, lora: str | None, cache_salt: str | None) -> str:
    """Return the cache namespace in which a text is stored, so that drafts never mix adapters or cache salts.

    Text of the base model without ``cache_salt`` is stored in ``base``. Any other text is stored in a namespace whose
    name is a hash, which reveals neither the adapter nor the salt.
    """
    if lora is None and cache_salt is None:
        return base
    return "kv-" + xxhash.xxh3_128_hexdigest(json.dumps([base, lora, cache_salt]).encode())


def follow(
    options: argparse.Namespace,
    codec: TextCodec,
    learn: Callable[[FollowedText], None],
    endpoints: list[str],
    lead_in_tokens: int = LEAD_IN_TOKENS,
) -> FollowCounts:
    """Receive KV events for ``--minutes`` or until a signal, report the progress, and return the counters."""
    from cache_builder.following.follower import Follower

    for name, value in (("--minutes", options.minutes), ("--idle-seconds", options.idle_seconds)):
        if value is not None and not value > 0:
            raise ConfigError(f"{name} must be greater than 0, got {value:g}")
    until = None if options.minutes is None else time.monotonic() + 60 * options.minutes
    follower = Follower(
        endpoints,
        learn,
        vocab_size=codec.vocab_size,
        topic=options.topic,
        replay_port=options.replay_port,
        idle_s=options.idle_seconds,
        lead_in_tokens=lead_in_tokens,
    )
    with follower, _metrics(getattr(options, "metrics_port", None), follower), _until_interrupted():
        follower.run(until, _FollowProgress(endpoints))
    return follower.counts


class _FollowProgress:
    """Prints the number of received texts every 30 seconds, or a hint while no event has arrived."""

    def __init__(self, endpoints: list[str]) -> None:
        self._endpoints, self._began, self._next = endpoints, time.monotonic(), time.monotonic() + _PROGRESS_S
        self._is_silent = True

    def __call__(self, counts: FollowCounts) -> None:
        now = time.monotonic()
        if counts.messages + counts.replayed_messages and self._is_silent:
            self._is_silent = False
            print("ssd-cache: receiving events", file=sys.stderr)
        if now >= self._next:
            self._next = now + _PROGRESS_S
            line = f"{counts.texts:,} texts, {counts.tokens:,} tokens"
            for number, what in (
                (counts.lost_messages, "messages lost"),
                (counts.invalid_events, "events invalid"),
                (counts.orphaned_events, "events dropped because an earlier block is missing"),
            ):
                line += f", {number:,} {what}" if number else ""
            if self._is_silent:
                line = (
                    f"no events from {', '.join(self._endpoints)} for {now - self._began:.0f} s. Check the address, "
                    "and that the engine publishes KV events, with prefix caching on"
                )
            print(f"ssd-cache: {line}", file=sys.stderr)


@contextmanager
def _until_interrupted() -> Iterator[None]:
    try:
        yield
    except (KeyboardInterrupt, Terminated):
        print("ssd-cache: storing the received text", file=sys.stderr)


@contextmanager
def _metrics(port: int | None, follower: Follower) -> Iterator[None]:
    if port is None:
        yield
        return
    try:
        from prometheus_client import CollectorRegistry, start_http_server
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    except ImportError as error:
        raise ConfigError(f"--metrics-port needs prometheus-client: pip install prometheus-client ({error})") from None

    class Collector:
        def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
            for name, value in asdict(follower.counts).items():
                is_gauge = name == "pending_tokens"
                family = GaugeMetricFamily if is_gauge else CounterMetricFamily
                yield family(f"ssd:follow_{name}", f"See ssd-cache follow: {name.replace('_', ' ')}.", value=value)

    registry = CollectorRegistry()
    registry.register(Collector())
    server, thread = start_http_server(port, registry=registry)
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
