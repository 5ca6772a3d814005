"""Clients of a real server that compare every answer, and send *notes*, texts whose presence on disk is checked later.

A note is a text with a unique number. A `History` records the notes sent to the server of one cache directory, and
which of them must still be there: those that were on disk before a fault, and those answered before a regular shutdown.
"""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.servers import Server, headers_of
from benchmarks.workloads import snippets
from cache_builder.opened_cache import open_cache
from ssd.retrieval.files import MANIFEST_NAME
from ssd.retrieval.segment import SEPARATOR, Segment, Tokens
from ssd.text.codec import TextCodec

SERVER_OPTIONS: Final = ("--device", "cpu", "--dtype", "float32", "--batch-invariant", "on")
"""The server options with which an answer depends only on its request, not on other requests or on drafts."""

_PROMPT_CHARACTERS = 160
_REGEX = r"[a-z]{3,8}\([a-z]{1,4}, [0-9]{1,3}\)"
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["add", "remove", "list"]}, "count": {"type": "integer", "maximum": 99}},
    "required": ["name", "count"],
    "additionalProperties": False,
}
_TIMEOUT_S = 300.0
_NOTE = "# note {} of this log\n"
_NOTE_TOKENS = 4
_MARGIN = 24  # tokens and characters at the beginning of a sequence that contain a note's number


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of comparing the notes (numbered test texts) on disk with the expected ones.

    It holds the number of notes that had to be there, and the numbers of those that are missing, stored twice, or
    stored in a wrong namespace.
    """

    num_promised: int
    lost: tuple[int, ...]
    twice: tuple[int, ...]
    elsewhere: tuple[int, ...]


@dataclass(slots=True)
class History:
    """The notes (numbered test texts) that were sent to the server of one cache directory. Thread-safe.

    Attributes:
        sent: The namespace of each note that was sent. Servers that share text share this dictionary.
        acknowledged: The notes whose requests were answered since the server started.
        promised: The notes that must be found on disk.
    """

    sent: dict[int, str] = field(default_factory=dict)
    acknowledged: set[int] = field(default_factory=set)
    promised: set[int] = field(default_factory=set)
    _newest_before_start: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, namespace: str) -> int:
        """Reserve and return the number of a new note that is about to be sent to ``namespace``."""
        with self._lock:
            number = len(self.sent) + 1
            self.sent[number] = namespace
        return number

    def acknowledge(self, number: int) -> None:
        with self._lock:
            if number > self._newest_before_start:
                self.acknowledged.add(number)

    def promise(self, numbers: Iterable[int]) -> None:
        with self._lock:
            self.promised.update(numbers)

    def end_life(self, *, in_order: bool) -> None:
        """Record that the server ended. After a regular shutdown (``in_order``), all answered notes must be on disk."""
        with self._lock:
            if in_order:
                self.promised |= self.acknowledged
            self.acknowledged.clear()
            self._newest_before_start = len(self.sent)

    def check(self, found: Iterable[tuple[str, int]]) -> Verdict:
        """Compare the expected notes with those on disk, given as (namespace, number), and return the result.

        Afterwards, no notes are expected any more.
        """
        counts = Counter(found)
        right = {number for namespace, number in counts if self.sent.get(number) == namespace}
        verdict = Verdict(
            num_promised=len(self.promised),
            lost=tuple(sorted(self.promised - right)),
            twice=tuple(sorted(number for (_, number), count in counts.items() if count > 1)),
            elsewhere=tuple(sorted(number for namespace, number in counts if self.sent.get(number) != namespace)),
        )
        with self._lock:
            self.promised.clear()
        return verdict


def family(size: int) -> list[History]:
    """Create the histories of ``size`` servers that share text, and therefore share the dictionary of sent notes."""
    sent, lock = dict[int, str](), threading.Lock()
    return [History(sent, _lock=lock) for _ in range(size)]


def note(number: int) -> str:
    return _NOTE.format(number)


def number_of(text: str) -> int | None:
    """Return the number of the note (numbered test text) at the beginning of ``text``; None for other text."""
    words = text[:_MARGIN].split(" ", 4)
    is_note = len(words) > 3 and words[:2] == ["#", "note"] and words[3].startswith("of") and words[2].isdecimal()
    return int(words[2]) if is_note else None


def sequences(segments: Sequence[Segment]) -> Iterator[Tokens]:
    """Yield the token sequences stored in segments, int32[n] without separators; the last one may be empty."""
    text = np.concatenate([np.empty(0, np.int32), *(segment.tokens for segment in segments)])
    return (part[part != SEPARATOR] for part in np.split(text, np.flatnonzero(text == SEPARATOR) + 1))


def notes_on_disk(directory: Path, codec: TextCodec) -> list[tuple[str, int]]:
    """Return (namespace, number) of every note (numbered test text) in a cache directory; a server may be writing."""
    found: list[tuple[str, int]] = []
    for path in sorted(path.parent for path in directory.glob(f"*/{MANIFEST_NAME}")):
        for sequence in sequences(open_cache(path, codec).segments):
            text = codec.decode(sequence[:_MARGIN].tolist(), skip_special_tokens=True)
            if (number := number_of(text)) is not None:
                found.append((path.name, number))
    return found


@dataclass(frozen=True, slots=True)
class Answer:
    """The expected output of one choice of a request."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str


@dataclass(frozen=True, slots=True)
class Question:
    """A request, and the expected output of each choice."""

    kind: str
    path: str
    body: Mapping[str, Any]
    answers: tuple[Answer, ...]


def questions(server: Server, number: int, max_tokens: int, key: str | None = None) -> list[Question]:
    """Create requests of all kinds with their expected outputs, the server's answers without drafts."""
    found = []
    for kind, path, body in islice(_requests(max_tokens), number):
        body["return_token_ids"] = True
        plain = {**body, "num_speculative_tokens": 0, "store": False}
        status, content = server.ask("POST", path, json.dumps(plain).encode(), _TIMEOUT_S, key)
        if status != 200:
            raise http.client.HTTPException(f"{kind}: {status}: {content[:300]!r}")
        received = _Received(body.get("n", 1))
        received.add(json.loads(content))
        found.append(Question(kind, path, body, tuple(received.answers())))
    return found


def _requests(max_tokens: int) -> Iterator[tuple[str, str, dict[str, Any]]]:
    schema = {"type": "json_schema", "json_schema": {"name": "call", "schema": _SCHEMA}}
    for number, text in enumerate(snippets(seed=13)):
        greedy: dict[str, Any] = {"max_tokens": max_tokens, "temperature": 0.0}
        seeded = {"max_tokens": max_tokens, "temperature": 0.8, "top_p": 0.95, "seed": number}
        for kind, fields in (
            ("greedy", greedy),
            ("sampled", seeded),
            ("n=3", {**seeded, "n": 3}),
            ("stop", {**greedy, "stop": ["\n\n", "return"]}),
            ("penalties", {**seeded, "presence_penalty": 0.5}),
            ("regex", {**seeded, "structured_outputs": {"regex": _REGEX}}),
        ):
            yield f"completion, {kind}", "/v1/completions", {**fields, "prompt": text[-_PROMPT_CHARACTERS:]}
        messages = [{"role": "user", "content": text[-_PROMPT_CHARACTERS:]}]
        for kind, fields in (
            ("greedy", greedy),
            ("n=2", {**seeded, "n": 2}),
            ("schema", {**greedy, "response_format": schema}),
        ):
            yield f"chat, {kind}", "/v1/chat/completions", {**fields, "messages": messages}


class _Received:
    def __init__(self, n: int) -> None:
        self._ids: list[list[int]] = [[] for _ in range(n)]
        self._texts, self._reasons = [""] * n, [""] * n

    def add(self, body: dict[str, Any]) -> None:
        """Add a whole response or one chunk of a stream. Raises ValueError if it contains an error."""
        if "error" in body:
            raise ValueError(str(body["error"]))
        for choice in body["choices"]:
            part = choice.get("message") or choice.get("delta") or choice
            index = choice["index"]
            self._ids[index] += choice.get("token_ids") or ()
            self._texts[index] += part.get("text") or part.get("content") or ""
            self._reasons[index] = choice.get("finish_reason") or self._reasons[index]

    def answers(self) -> list[Answer]:
        return [Answer(tuple(self._ids[i]), self._texts[i], self._reasons[i]) for i in range(len(self._ids))]


@dataclass(slots=True)
class Load:
    """The clients of one server. They send requests, streamed or not, cancel some of them, and compare all answers.

    Attributes:
        keys: The API keys; each request uses one of them. None sends no key.
        salts: Every fifth request has one of these values of ``cache_salt``.
        history: Records the notes (numbered test texts), which are sent to ``namespace``. None: no notes are sent.
        counts: The number of requests by outcome: "right", "changed" (another answer than expected), "cancelled",
            "noted" (a note was stored), "failed", and "interrupted" (failed because the server was being ended).
        num_tokens: The number of tokens in correct answers.
    """

    server: Server
    questions: Sequence[Question] = ()
    keys: Sequence[str | None] = (None,)
    salts: Sequence[str] = ()
    history: History | None = None
    namespace: str = ""
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    num_tokens: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def running(self, num_clients: int, seed: int | str) -> Iterator[None]:
        """Send requests from ``num_clients`` threads while the ``with`` block runs."""
        stopping = threading.Event()
        clients = [
            threading.Thread(target=self._send_until, args=(stopping, random.Random(f"{seed}-{number}")))
            for number in range(num_clients)
        ]
        for client in clients:
            client.start()
        try:
            yield
        finally:
            stopping.set()
            for client in clients:
                client.join()

    def _send_until(self, stopping: threading.Event, chance: random.Random) -> None:
        history = self.history
        while not stopping.is_set():
            if self.server.is_down:
                time.sleep(0.05)
            elif history is not None and chance.random() < 0.3:
                self._send_note(history, chance)
            else:
                question = chance.choice(self.questions)
                self._count(question.kind, lambda: self._compare(question, chance))  # noqa: B023

    def _send_note(self, history: History, chance: random.Random) -> None:
        number = history.begin(self.namespace)
        body = {"prompt": note(number), "max_tokens": _NOTE_TOKENS, "temperature": 0, "ignore_eos": True}
        key = chance.choice(self.keys)
        if self._count("note", lambda: "noted" if self.server.post(body, key=key) else "failed"):
            history.acknowledge(number)

    def _count(self, kind: str, send: Callable[[], str]) -> bool:
        num_ends = self.server.num_ends
        try:
            outcome, failure = send(), ""
        except (OSError, http.client.HTTPException, ValueError, KeyError, IndexError) as error:
            was_ended = self.server.is_down or self.server.num_ends != num_ends
            outcome, failure = "interrupted" if was_ended else "failed", f"{kind}: {type(error).__name__}: {error}"
        with self._lock:
            self.counts[outcome] += 1
            self.failures += [failure[:600]] if outcome == "failed" else []
        if failure:
            time.sleep(0.05)
        return not failure

    def _compare(self, question: Question, chance: random.Random) -> str:
        body, is_streamed, leaves = dict(question.body), chance.random() < 0.5, chance.random() < 0.15
        if self.salts and chance.random() < 0.2:
            body["cache_salt"] = chance.choice(self.salts)
        if is_streamed:
            body |= {"stream": True, "stream_options": {"include_usage": chance.random() < 0.5}}
        last_event = chance.randint(1, 12) if leaves else None
        received = _Received(len(question.answers))
        with closing(http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=_TIMEOUT_S)) as connection:
            connection.request("POST", question.path, json.dumps(body), headers_of(chance.choice(self.keys)))
            if leaves and not is_streamed:
                time.sleep(chance.random() * 0.3)
                return "cancelled"
            response = connection.getresponse()
            if response.status != 200:
                raise http.client.HTTPException(f"{response.status}: {response.read(300)!r}")
            if not is_streamed:
                received.add(json.loads(response.read()))
                return self._outcome(question, received)
            for number, line in enumerate(line for line in response if line.startswith(b"data: ")):
                if line.strip() == b"data: [DONE]":
                    return self._outcome(question, received)
                received.add(json.loads(line[6:]))
                if number == last_event:
                    return self._outcome(question, received, is_whole=False)
        raise http.client.HTTPException("the stream ended before its end mark")

    def _outcome(self, question: Question, received: _Received, *, is_whole: bool = True) -> str:
        for got, want in zip(received.answers(), question.answers, strict=True):
            if got != want if is_whole else not want.text.startswith(got.text):
                with self._lock:
                    self.failures.append(f"changed: {question.kind}: {got}, expected {want}"[:600])
                return "changed"
        if not is_whole:
            return "cancelled"
        with self._lock:
            self.num_tokens += sum(len(answer.token_ids) for answer in question.answers)
        return "right"
