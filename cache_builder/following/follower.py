"""Follows running engines: receives their KV events, joins them to texts, and passes each text to a function."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from cache_builder.following.block_chains import LEAD_IN_TOKENS, BlockChains, FollowedText
from cache_builder.following.kv_events import AllCleared, InvalidEvents, decode_batch
from cache_builder.following.subscriber import EventSubscriber

_TICK_S = 0.5


@dataclass(slots=True)
class FollowCounts:
    """The counters of a `Follower`."""

    messages: int = 0
    """The number of messages received from publishers."""
    lost_messages: int = 0
    """The number of messages that were lost and could not be fetched again."""
    replayed_messages: int = 0
    """The number of messages that were fetched again from a publisher's replay endpoint."""
    invalid_events: int = 0
    """The number of events and messages that were malformed, or had token ids outside the vocabulary."""
    repeated_blocks: int = 0
    """The number of received blocks that were already in memory."""
    orphaned_events: int = 0
    """The number of events that were dropped because their parent block was not received, or is no longer in memory."""
    texts: int = 0
    """The number of calls of the function to which a `Follower` passes texts. A long text is passed in several parts.
    """
    tokens: int = 0
    """The number of tokens in all texts that a `Follower` has passed to its callback. Each part of a long text
    repeats tokens of the part before it, and the repeated tokens are counted again.
    """
    pending_tokens: int = 0
    """The number of tokens now in memory, in blocks that later blocks may continue."""


class Follower:
    """Receives the KV events of running engines and passes the text of their requests to a function.

    Must be used by one thread, as a context manager.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        learn: Callable[[FollowedText], None],
        *,
        vocab_size: int,
        topic: str = "",
        replay_port: int | None = None,
        idle_s: float = 10.0,
        max_pending_tokens: int = 8 << 20,
        lead_in_tokens: int = LEAD_IN_TOKENS,
    ) -> None:
        """Subscribe to publishers, see `EventSubscriber`.

        Args:
            endpoints: ``tcp://HOST:PORT`` of each publisher.
            learn: Called with each text, and for a long text with each new part, see `FollowedText`.
            vocab_size: The tokenizer's vocabulary size. Events with other token ids are counted and dropped.
            topic: The topic of the publishers; all topics by default.
            replay_port: The port of the first publisher's replay endpoint.
            idle_s: The number of seconds without a new block after which a text is regarded as finished.
            max_pending_tokens: The maximum number of tokens in memory, in texts that later blocks may continue.
            lead_in_tokens: The maximum number of tokens by which the parts of a long text overlap.

        Raises:
            ConfigError: An endpoint is invalid, or a package is missing.
        """
        self._subscriber = EventSubscriber(endpoints, topic=topic, replay_port=replay_port)
        self._chains = BlockChains(max_tokens=max_pending_tokens, idle_s=idle_s, lead_in_tokens=lead_in_tokens)
        self._learn, self._vocab_size = learn, vocab_size
        self._num_invalid = self._num_texts = self._num_tokens = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Close the connections, and pass the unfinished texts to the callback ``learn``."""
        self._subscriber.close()
        self._learn_texts(self._chains.close())

    def run(self, until: float | None = None, on_tick: Callable[[FollowCounts], None] = lambda _: None) -> None:
        """Receive events until ``time.monotonic()`` reaches ``until``; None receives events forever.

        ``on_tick`` is called with the counters twice a second.
        """
        next_tick = time.monotonic()
        while until is None or time.monotonic() < until:
            for message in self._subscriber.receive(_TICK_S):
                if message.is_restart:
                    self._learn_texts(self._chains.close(message.publisher))
                self._read(message.publisher, message.payload)
            now = time.monotonic()
            self._learn_texts(self._chains.finished(now))
            if now >= next_tick:
                on_tick(self.counts)
                next_tick = now + _TICK_S

    @property
    def counts(self) -> FollowCounts:
        subscriber, chains = self._subscriber, self._chains
        return FollowCounts(
            messages=subscriber.num_messages,
            lost_messages=subscriber.num_lost,
            replayed_messages=subscriber.num_replayed,
            invalid_events=self._num_invalid + subscriber.num_malformed,
            repeated_blocks=chains.num_repeated,
            orphaned_events=chains.num_orphans,
            texts=self._num_texts,
            tokens=self._num_tokens,
            pending_tokens=chains.num_tokens,
        )

    def _read(self, publisher: str, payload: bytes) -> None:
        try:
            events, num_invalid = decode_batch(payload, self._vocab_size)
        except InvalidEvents:
            self._num_invalid += 1
            return
        self._num_invalid += num_invalid
        for event in events:
            if isinstance(event, AllCleared):
                self._learn_texts(self._chains.close(publisher))
            else:
                self._learn_texts(self._chains.store(publisher, event, time.monotonic()))

    def _learn_texts(self, texts: Iterable[FollowedText]) -> None:
        for text in texts:
            self._num_texts += 1
            self._num_tokens += len(text.tokens)
            self._learn(text)
