"""Concurrent clients that verify every answer."""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager

from benchmarks.faults.history import History
from benchmarks.faults.questions import Question
from benchmarks.faults.store import note
from benchmarks.processes import Server, headers_of

_NOTE_TOKENS = 4


class Load:
    """Clients of one server: completions, streams, streams that are left early, and notes.

    ``counts`` : "right", "changed", "cancelled", "noted"; "failed" where the server ought to have answered, and
    "interrupted" where it was being killed.
    """

    def __init__(
        self, server: Server, questions: Sequence[Question], history: History, namespace: str, key: str | None = None
    ) -> None:
        """``namespace`` : where notes belong; ``key`` : what requests bring."""
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []
        self.history = history
        self._server = server
        self._questions = questions
        self._namespace = namespace
        self._lock = threading.Lock()
        self._key = key
        self._num_outages = 0
        self._is_down = False

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

    def take_note(self) -> int | None:
        """Sends one note; its number if it was acknowledged."""
        number = self.history.begin(self._namespace)
        asked = {"prompt": note(number), "max_tokens": _NOTE_TOKENS, "temperature": 0, "ignore_eos": True}
        if not self._count(lambda: "noted" if self._server.post(asked, key=self._key) else "failed"):
            return None
        self.history.acknowledge(number)
        return number

    def _ask_until(self, stopping: threading.Event, chance: random.Random) -> None:
        while not stopping.is_set():
            if self._is_down:
                time.sleep(0.05)
                continue
            question = chance.choice(self._questions)
            kind = chance.choices(("whole", "stream", "leave", "note"), (4, 3, 1, 3))[0]
            if kind == "note":
                self.take_note()
            elif kind == "whole":
                self._count(lambda: self._whole(question))  # noqa: B023
            else:
                leave_after = chance.randint(1, 6) if kind == "leave" else None
                self._count(lambda: self._stream(question, leave_after))  # noqa: B023

    def _count(self, ask: Callable[[], str]) -> bool:
        with self._lock:
            outages = self._num_outages
        try:
            outcome = ask()
        except (OSError, http.client.HTTPException, ValueError, KeyError, IndexError) as error:
            with self._lock:
                was_ended = self._is_down or self._num_outages != outages
                self.counts["interrupted" if was_ended else "failed"] += 1
                if not was_ended and len(self.failures) < 20:
                    self.failures.append(f"{type(error).__name__}: {error}"[:200])
            time.sleep(0.05)
            return False
        with self._lock:
            self.counts[outcome] += 1
        return True

    def _whole(self, question: Question) -> str:
        choice = self._server.post(question.body, key=self._key)["choices"][0]
        return self._judge(question, choice["text"], choice["finish_reason"])

    def _stream(self, question: Question, leave_after: int | None) -> str:
        text, finish_reason, num_events = "", "", 0
        with closing(http.client.HTTPConnection("127.0.0.1", self._server.port, timeout=60)) as connection:
            body = json.dumps({**question.body, "stream": True})
            connection.request("POST", "/v1/completions", body, headers_of(self._key))
            response = connection.getresponse()
            if response.status != 200:
                raise http.client.HTTPException(f"{response.status}: {response.read(200)!r}")
            for line in response:
                if not line.startswith(b"data: "):
                    continue
                if line == b"data: [DONE]\n":
                    return self._judge(question, text, finish_reason)
                choice = json.loads(line[6:])["choices"][0]
                text += choice["text"]
                finish_reason = choice["finish_reason"] or finish_reason
                num_events += 1
                if num_events == leave_after:
                    return "cancelled" if question.text.startswith(text) else "changed"
        raise http.client.HTTPException("the stream ended before its end mark")

    def _judge(self, question: Question, text: str, finish_reason: str) -> str:
        verdict = question.judge(text, finish_reason)
        if verdict == "changed":
            with self._lock:
                self.failures.append(f"changed: {question.body} answered {text!r}, expected {question.text!r}"[:600])
        return verdict
