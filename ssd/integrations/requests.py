"""Which request is a row of the batch? By its id where the engine tells it, by its text where it does not."""

from __future__ import annotations

import bisect
import itertools
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from ssd.drafting.rows import Text
from ssd.integrations.settings import IntegrationSettings
from ssd.retrieval.cache import CacheSet, SuffixCache
from ssd.retrieval.segment import Tokens

if TYPE_CHECKING:
    from ssd.text.codec import TextCodec

_TAIL_TOKENS = 64
"""By these and its length a text that has moved is looked for."""
_MAX_ENDED = 4096
"""Ended requests of which a digest is kept: one that was only preempted comes back with the same text."""


class Row(NamedTuple):
    """One row of a batch.

    ``tokens`` : int32[n], its text so far, the last ``num_new`` of this step; 0 while the prompt is still computed.
    """

    number: int
    tokens: Tokens
    num_new: int


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
    """What is known of one request: its text, how much of it is stored, and when it was last in a row.

    ``end`` : tokens that its client got, prompt included, where the engine said so. ``stop`` : what ended it besides.
    """

    __slots__ = ("end", "last_seen", "num_learned", "stop")

    def __init__(self, name: str, room: int, prompt_length: int) -> None:
        super().__init__(name, prompt_length, room)
        self.num_learned = self.last_seen = 0
        self.end: int | None = None
        self.stop: StopRules | None = None

    def begins(self, tokens: Tokens) -> bool:
        """Whether ``tokens`` goes on where this request is. O(n), at the speed of memory."""
        return self.length <= len(tokens) and bool(np.array_equal(self.tokens, tokens[: self.length]))


Tail = tuple[int, bytes]
Digest = tuple[int, int]


class RequestTable:
    """The requests of one batch as it changes. Every row gets a request of its own. One owner.

    Two ways to tell requests apart; a table may change from one to the other::

        by_id        the engine names its rows and says when a request has ended
        by_text      a row continues the request whose text it begins with;
                     a request that was in no row for ``patience`` calls has ended

    By text: rows are compacted and swapped, and a row may be reused at once. So a row is first compared with the
    request it held before, by length and last 64 tokens; where that fails, all of its text is compared with the
    requests that are left. Equal requests are interchangeable and kept apart by count. A row that goes on exactly where
    an ended request stopped is that request: it had been preempted. O(1) a row while rows stay in place, O(text) where
    they move.
    """

    def __init__(self, patience: int = 4) -> None:
        self._patience = patience
        self._active: dict[str, Request] = {}
        self._ended: OrderedDict[Digest, int] = OrderedDict()  # of the whole text; length of the prompt
        self._by_row: dict[int, str] = {}
        self._names = itertools.count()
        self._num_calls = 0

    def __len__(self) -> int:
        """Requests that have not ended."""
        return len(self._active)

    def get(self, name: str) -> Request | None:
        """The request of a name; None once it has ended."""
        return self._active.get(name)

    def items(self) -> Iterable[tuple[str, Request]]:
        """Requests that have not ended, by their names."""
        return self._active.items()

    def begin(self, name: str, tokens: Tokens, prompt_length: int) -> tuple[Request, Request | None]:
        """A request of ``tokens``, int32[n], in place of the one that had the name, which is returned too."""
        before = self._active.pop(name, None)
        request = self._add(name, len(tokens), prompt_length)
        request.take_over(tokens, 0)
        return request, before

    def by_id(self, rows: Sequence[Row], names: Sequence[str], prompt_lengths: Sequence[int]) -> list[Request | None]:
        """The request of each row, made where its name is new. Rows that are still prefilling may have none.

        ``names`` and ``prompt_lengths`` : of each row.
        """
        self._num_calls += 1
        found: list[Request | None] = []
        for row, name, prompt_length in zip(rows, names, prompt_lengths, strict=True):
            request = self._active.get(name)
            if request is None and row.num_new > 0:
                request = self._add(name, 2 * len(row.tokens), min(prompt_length, len(row.tokens)))
            found.append(request)
            if request is not None:
                self._seen(name, request, row)
        return found

    def by_text(self, rows: Sequence[Row]) -> tuple[list[Request | None], list[Request]]:
        """The request of each row, and the requests that are taken to have ended."""
        self._num_calls += 1
        left = dict(self._active)
        names: list[str | None] = [self._in_place(row, left) for row in rows]
        if None in names:
            self._find_moved(rows, names, left)
        found: list[Request | None] = []
        self._by_row.clear()
        for row, known in zip(rows, names, strict=True):
            name = self._added(row) if known is None and row.num_new > 0 else known
            found.append(None if name is None else self._active[name])
            if name is not None:
                self._seen(name, self._active[name], row)
        late = [late for late, r in self._active.items() if self._num_calls - r.last_seen >= self._patience]
        ended = self.end(late)
        for request in ended:
            self._ended[_digest(request.tokens)] = request.prompt_length
        while len(self._ended) > _MAX_ENDED:
            self._ended.popitem(last=False)
        return found, ended

    def end(self, names: Iterable[str]) -> list[Request]:
        """Forget the requests of these names and return those that were known."""
        return [request for name in names if (request := self._active.pop(name, None)) is not None]

    def end_all(self) -> list[Request]:
        """Forget everything and return what was active."""
        return self.end(list(self._active))

    def _in_place(self, row: Row, left: dict[str, Request]) -> str | None:
        name = self._by_row.get(row.number)
        if name is None or name not in left or not left[name].goes_on(row.tokens, row.num_new):
            return None
        del left[name]
        return name

    def _find_moved(self, rows: Sequence[Row], names: list[str | None], left: dict[str, Request]) -> None:
        """First rows that went on by exactly this step, then those for which steps were left out."""
        by_tail: dict[Tail, list[str]] = {}
        for name, request in left.items():
            by_tail.setdefault(_tail(request.tokens), []).append(name)

        def claim(length: int, row: Row) -> str | None:
            candidates = by_tail.get(_tail(row.tokens[:length]), [])
            for place, name in enumerate(candidates):
                if left[name].begins(row.tokens):
                    del left[name]
                    return candidates.pop(place)
            return None

        # Rows that are still prefilling last: their text may be the beginning of another's that is running.
        for at in sorted(range(len(rows)), key=lambda at: rows[at].num_new == 0):
            if names[at] is None:
                names[at] = claim(len(rows[at].tokens) - rows[at].num_new, rows[at])
        lengths = sorted({request.length for request in left.values()}, reverse=True)
        for at, row in enumerate(rows):
            if names[at] is None and row.num_new > 0:
                skipped = (length for length in lengths if length < len(row.tokens) - row.num_new)
                names[at] = next((moved for length in skipped if (moved := claim(length, row)) is not None), None)

    def _added(self, row: Row) -> str:
        """A request that is new, or that was taken to have ended when it had only been preempted."""
        name = f"row {next(self._names)}"
        known = len(row.tokens) - row.num_new
        prompt_length = self._ended.pop(_digest(row.tokens[:known]), None) if self._ended else None
        request = self._add(name, 2 * len(row.tokens), known if prompt_length is None else prompt_length)
        if prompt_length is not None:
            request.num_learned = known
        return name

    def _add(self, name: str, room: int, prompt_length: int) -> Request:
        request = self._active[name] = Request(f"{name}/{next(self._names)}", room, prompt_length)
        return request

    def _seen(self, name: str, request: Request, row: Row) -> None:
        request.last_seen = self._num_calls
        self._by_row[row.number] = name


def _tail(tokens: Tokens) -> Tail:
    """Length and last tokens: equal for equal texts, rarely for others."""
    return len(tokens), tokens[-_TAIL_TOKENS:].tobytes()


def _digest(tokens: Tokens) -> Digest:
    """Names a whole text."""
    return len(tokens), xxhash.xxh3_128_intdigest(tokens.data)


class OpenNamespace:
    """A namespace as ``ssd-serve`` with the same settings would open it: files, warm-up directories and Redis."""

    def __init__(self, settings: IntegrationSettings, *, fingerprint: str, vocab_size: int) -> None:
        """``fingerprint`` and ``vocab_size`` : the tokenizer's, ``TextCodec`` has both.

        Raises ConfigError and CacheError: what is wrong with the settings is to be heard at the start.
        """
        config = settings.cache_config()
        self._lead_in_tokens = config.index.lead_in_tokens
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

    def learn(self, token_ids: Sequence[int] | npt.NDArray[np.int32], *, prompt_length: int, num_known: int) -> None:
        """Store a completed sequence. Never raises. O(n).

        ``num_known`` : so many of its tokens were stored by an earlier call for the same sequence; the rest is stored
        with a lead-in of the cache's length, so that it can be matched.
        """
        if num_known >= len(token_ids):
            return
        if num_known > 0:
            self.cache.append(token_ids[max(0, num_known - self._lead_in_tokens) :])
        else:
            self.cache.append(token_ids, prompt_length=prompt_length)

    def close(self) -> None:
        """Keep everything and let go of files and connections. May be called twice."""
        self._resources.close()


class Learner:
    """A namespace and the requests on their way into it. Holds all that must be closed, and nothing of the engine."""

    def __init__(self, namespace: OpenNamespace, requests: RequestTable, codec: TextCodec | None) -> None:
        self.namespace = namespace
        self.requests = requests
        self.end_of_text_ids = frozenset(codec.eos_token_ids if codec else ())
        self._codec = codec
        self.num_learned = 0
        """Requests that were given to the cache."""

    def learn(self, ended: Iterable[Request]) -> None:
        """Store what is new of each, as far as its client got it. Never raises. O(text)."""
        for request in ended:
            tokens = request.tokens if request.end is None else request.tokens[: request.end]
            # A draft may run on behind an end of text that the target agreed with; nobody got to see that.
            start = min(len(tokens), max(request.num_learned, request.length - request.num_new))
            last = tokens[start:].tolist()
            end = start + next((at + 1 for at, token in enumerate(last) if token in self.end_of_text_ids), len(last))
            if request.stop is not None and self._codec is not None:
                said = tokens[request.prompt_length : end].tolist()
                end = request.prompt_length + before_stop(self._codec, said, request.stop)
            if end <= request.prompt_length:
                continue  # nothing was said
            self.namespace.learn(tokens[:end], prompt_length=request.prompt_length, num_known=request.num_learned)
            self.num_learned += 1

    def close(self) -> None:
        """Learn what is in flight, keep everything, and let go of files and connections. May be called twice."""
        self.learn(self.requests.end_all())
        self.namespace.close()


def before_stop(codec: TextCodec, tokens: list[int], rules: StopRules) -> int:
    """How many of an output's tokens there are up to the one that completes the first stop string. O(n log n)."""

    def stops(count: int) -> bool:
        text = codec.decode(tokens[:count], skip_special_tokens=rules.skip_special_tokens)
        return any(text.find(string, start) >= 0 for string in rules.strings)

    first = min(rules.min_tokens, len(tokens))
    start = len(codec.decode(tokens[:first], skip_special_tokens=rules.skip_special_tokens))
    return first + bisect.bisect_left(range(first, len(tokens)), True, key=stops)
