"""The requests of another engine on their way into a namespace: their texts, their ends, what is learned of them."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

from ssd.drafting.rows import Text
from ssd.integrations.settings import IntegrationSettings
from ssd.retrieval.cache import CacheSet, SuffixCache
from ssd.retrieval.segment import Tokens

if TYPE_CHECKING:
    from ssd.text.codec import TextCodec


class StopRules(NamedTuple):
    """Strings that end an output, looked for behind its first ``min_tokens`` tokens."""

    strings: tuple[str, ...]
    min_tokens: int
    skip_special_tokens: bool


def stop_rules_of(params: Any) -> StopRules | None:
    """Of vLLM's sampling parameters; None where no string stops."""
    strings = getattr(params, "stop", None)
    if not strings:
        return None
    given = (strings,) if isinstance(strings, str) else tuple(strings)
    return StopRules(given, params.min_tokens, params.skip_special_tokens)


class Request(Text):
    """What is known of one request.

    ``end`` : tokens that its client got, prompt included, where the engine said so. ``stop`` : what ended it besides.
    """

    __slots__ = ("end", "stop")

    def __init__(self, tokens: Tokens, prompt_length: int, room: int) -> None:
        super().__init__(tokens, prompt_length, room)
        self.end: int | None = None
        self.stop: StopRules | None = None


class RequestTable:
    """The requests of an engine that have not ended, by its ids. One owner."""

    def __init__(self, max_length: int) -> None:
        """``max_length`` : most tokens of a request."""
        self._max_length = max_length
        self._active: dict[str, Request] = {}

    def get(self, name: str) -> Request | None:
        """The request of an id; None where there is none."""
        return self._active.get(name)

    def items(self) -> Iterable[tuple[str, Request]]:
        """Requests that have not ended, by their ids."""
        return self._active.items()

    def begin(self, name: str, tokens: Tokens, prompt_length: int) -> tuple[Request, Request | None]:
        """A request of ``tokens``, int32[n], in place of the one that had the id, which is returned too."""
        before = self._active.pop(name, None)
        request = Request(tokens, min(prompt_length, len(tokens)), self._max_length)
        self._active[name] = request
        return request, before

    def end(self, names: Iterable[str]) -> list[Request]:
        """Forget the requests of these ids and return those that were known."""
        return [request for name in names if (request := self._active.pop(name, None)) is not None]

    def end_all(self) -> list[Request]:
        """Forget everything and return what was active."""
        return self.end(list(self._active))


class Learner:
    """A namespace as ``ssd-serve`` with the same settings would open it (files, warm-up directories, Redis), and the
    requests on their way into it. Holds all that must be closed, and nothing of the engine."""

    def __init__(
        self,
        settings: IntegrationSettings,
        requests: RequestTable,
        codec: TextCodec | None,
        *,
        fingerprint: str,
        vocab_size: int,
    ) -> None:
        """``codec`` : the tokenizer, ``fingerprint`` and ``vocab_size`` are its where there is one.

        Raises ConfigError and CacheError: what is wrong with the settings is to be heard at the start.
        """
        self.requests = requests
        self.end_of_text_ids = frozenset(codec.eos_token_ids if codec else ())
        self._codec = codec
        self.num_learned = 0
        """Requests that were given to the cache."""
        config = settings.cache_config()
        with ExitStack() as opening:
            share = None
            if settings.redis_url is not None:
                from ssd.sharing.redis_log import RedisLog  # needs redis-py, which not everybody has installed

                log = RedisLog(settings.redis_url, fingerprint=fingerprint, vocab_size=vocab_size)
                share = opening.enter_context(log).attach
            caches = opening.enter_context(CacheSet(config, fingerprint, namespace=settings.namespace, on_open=share))
            self.cache: SuffixCache = caches.get()
            for directory in settings.warm_dirs:
                self.cache.add_static_directory(directory)
            self._resources = opening.pop_all()

    def learn(self, ended: Iterable[Request]) -> None:
        """Store each, as far as its client got it. Never raises. O(text)."""
        for request in ended:
            tokens = request.tokens if request.end is None else request.tokens[: request.end]
            # A draft may run on behind an end of text that the target agreed with; nobody got to see that.
            start = min(len(tokens), request.length - request.num_new)
            last = tokens[start:].tolist()
            end = start + next((at + 1 for at, token in enumerate(last) if token in self.end_of_text_ids), len(last))
            if request.stop is not None and self._codec is not None:
                said = tokens[request.prompt_length : end].tolist()
                end = request.prompt_length + before_stop(self._codec, said, request.stop)
            if end <= request.prompt_length:
                continue  # nothing was said
            self.cache.append(tokens[:end], prompt_length=request.prompt_length)
            self.num_learned += 1

    def close(self) -> None:
        """Learn what is in flight, keep everything, and let go of files and connections. May be called twice."""
        self.learn(self.requests.end_all())
        self._resources.close()


def before_stop(codec: TextCodec, tokens: list[int], rules: StopRules) -> int:
    """How many of an output's tokens there are up to the one that completes the first stop string. O(n log n)."""

    def stops(count: int) -> bool:
        text = codec.decode(tokens[:count], skip_special_tokens=rules.skip_special_tokens)
        return any(text.find(string, start) >= 0 for string in rules.strings)

    first = min(rules.min_tokens, len(tokens))
    start = len(codec.decode(tokens[:first], skip_special_tokens=rules.skip_special_tokens))
    return first + bisect.bisect_left(range(first, len(tokens)), True, key=stops)
