"""Concurrent clients that ask for every kind of answer and verify each, and send notes: texts with a number."""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

from benchmarks.history import History, note
from benchmarks.processes import Server, headers_of
from benchmarks.workloads import snippets

SERVER_OPTIONS: Final = ("--device", "cpu", "--dtype", "float32", "--batch-invariant", "on")
"""With which what a server says depends on the request alone."""

_PROMPT_CHARACTERS = 160
_REGEX = r"[a-z]{3,8}\([a-z]{1,4}, [0-9]{1,3}\)"
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["add", "remove", "list"]}, "count": {"type": "integer", "maximum": 99}},
    "required": ["name", "count"],
    "additionalProperties": False,
}


_TIMEOUT_S = 300.0
_KEPT_FAILURES = 20
_NOTE_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Answer:
    """What one choice must be."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str


@dataclass(frozen=True, slots=True)
class Question:
    """A request, and the answer of every choice."""

    kind: str
    path: str
    body: Mapping[str, Any]
    answers: tuple[Answer, ...]


def questions(server: Server, number: int, max_tokens: int, key: str | None = None) -> list[Question]:
    """So many, of each kind as many, answered one after the other without drafts. Raises HTTPException."""
    found = []
    for kind, path, body in islice(_kinds(max_tokens), number):
        body["return_token_ids"] = True
        asked = {**body, "num_speculative_tokens": 0, "store": False}
        status, content = server.ask("POST", path, json.dumps(asked).encode(), _TIMEOUT_S, key)
        if status != 200:
            raise http.client.HTTPException(f"{kind}: {status}: {content[:300]!r}")
        said = _Found(body.get("n", 1))
        said.add(json.loads(content))
        found.append(Question(kind, path, body, tuple(said.answers())))
    return found


def _kinds(max_tokens: int) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(kind, path, body), in turn."""
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
            ("greedy", greedy), ("n=2", {**seeded, "n": 2}), ("schema", {**greedy, "response_format": schema}),
        ):  # fmt: skip
            yield f"chat, {kind}", "/v1/chat/completions", {**fields, "messages": messages}


class _Found:
    """What the choices of a request have said."""

    def __init__(self, n: int) -> None:
        self._ids: list[list[int]] = [[] for _ in range(n)]
        self._texts, self._reasons = [""] * n, [""] * n

    def add(self, body: dict[str, Any]) -> None:
        """A whole answer, or a chunk of one. Raises ValueError for an error."""
        if "error" in body:
            raise ValueError(str(body["error"]))
        for choice in body["choices"]:
            said = choice.get("message") or choice.get("delta") or choice
            text = said.get("text") or said.get("content") or ""
            index = choice["index"]
            self._ids[index] += choice.get("token_ids") or ()
            self._texts[index] += text
            self._reasons[index] = choice.get("finish_reason") or self._reasons[index]

    def answers(self) -> list[Answer]:
        """Of every choice."""
        return [Answer(tuple(self._ids[i]), self._texts[i], self._reasons[i]) for i in range(len(self._ids))]


@dataclass(slots=True)
class Load:
    """Clients of one server: answers whole and streamed, some left before they end, and notes.

    ``keys`` : of each request one; None sends none. ``salts`` : every fifth request has one of these. ``history`` :
    gets notes, which are sent to ``namespace``.
    ``counts`` : "right", "changed", "cancelled", "noted", "failed" where the server ought to have answered, and
    "interrupted" where it was being killed. ``num_tokens`` : of right answers.
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
    _num_outages: int = 0
    _is_down: bool = False

    @contextmanager
    def running(self, num_clients: int, seed: int | str) -> Iterator[None]:
        """Asks on ``num_clients`` threads meanwhile."""
        stopping = threading.Event()
        clients = [
            threading.Thread(target=self._ask_until, args=(stopping, random.Random(f"{seed}-{number}")))
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

    @contextmanager
    def outage(self) -> Iterator[None]:
        """The server is ended on purpose meanwhile: what is under way may fail."""
        with self._lock:
            self._num_outages += 1
            self._is_down = True
        try:
            yield
        finally:
            self._is_down = False

    def _ask_until(self, stopping: threading.Event, chance: random.Random) -> None:
        history = self.history
        while not stopping.is_set():
            if self._is_down:
                time.sleep(0.05)
            elif history is not None and chance.random() < 0.3:
                self._take_note(history, chance)
            else:
                question = chance.choice(self.questions)
                self._count(question.kind, lambda: self._ask(question, chance))  # noqa: B023

    def _take_note(self, history: History, chance: random.Random) -> None:
        number = history.begin(self.namespace)
        asked = {"prompt": note(number), "max_tokens": _NOTE_TOKENS, "temperature": 0, "ignore_eos": True}
        key = chance.choice(self.keys)
        if self._count("note", lambda: "noted" if self.server.post(asked, key=key) else "failed"):
            history.acknowledge(number)

    def _count(self, kind: str, ask: Callable[[], str]) -> bool:
        """Whether it was answered, however."""
        with self._lock:
            outages = self._num_outages
        try:
            outcome, failure = ask(), ""
        except (OSError, http.client.HTTPException, ValueError, KeyError, IndexError) as error:
            was_ended = self._is_down or self._num_outages != outages
            outcome, failure = "interrupted" if was_ended else "failed", f"{kind}: {type(error).__name__}: {error}"
        with self._lock:
            self.counts[outcome] += 1
        if outcome == "failed":
            self._note_failure(failure)
        if failure:
            time.sleep(0.05)
        return not failure

    def _note_failure(self, failure: str) -> None:
        with self._lock:
            if len(self.failures) < _KEPT_FAILURES:
                self.failures.append(failure[:600])

    def _ask(self, question: Question, chance: random.Random) -> str:
        body, is_streamed, leaves = dict(question.body), chance.random() < 0.5, chance.random() < 0.15
        if self.salts and chance.random() < 0.2:
            body["cache_salt"] = chance.choice(self.salts)
        if is_streamed:
            body |= {"stream": True, "stream_options": {"include_usage": chance.random() < 0.5}}
        last_event = chance.randint(1, 12) if leaves else None
        found = _Found(len(question.answers))
        with closing(http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=_TIMEOUT_S)) as connection:
            connection.request("POST", question.path, json.dumps(body), headers_of(chance.choice(self.keys)))
            if leaves and not is_streamed:
                time.sleep(chance.random() * 0.3)
                return "cancelled"
            response = connection.getresponse()
            if response.status != 200:
                raise http.client.HTTPException(f"{response.status}: {response.read(300)!r}")
            if not is_streamed:
                found.add(json.loads(response.read()))
                return self._judged(question, found)
            for number, line in enumerate(line for line in response if line.startswith(b"data: ")):
                if line.strip() == b"data: [DONE]":
                    return self._judged(question, found)
                found.add(json.loads(line[6:]))
                if number == last_event:
                    return self._judged(question, found, is_whole=False)
        raise http.client.HTTPException("the stream ended before its end mark")

    def _judged(self, question: Question, found: _Found, *, is_whole: bool = True) -> str:
        for got, want in zip(found.answers(), question.answers, strict=True):
            if got != want if is_whole else not want.text.startswith(got.text):
                self._note_failure(f"changed: {question.kind}: {got}, expected {want}")
                return "changed"
        if not is_whole:
            return "cancelled"
        with self._lock:
            self.num_tokens += sum(len(answer.token_ids) for answer in question.answers)
        return "right"
