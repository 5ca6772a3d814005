"""Clients that ask at random, whole or streamed, leave some answers early, and compare every other one."""

from __future__ import annotations

import http.client
import json
import random
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from benchmarks.soak.questions import Question

_TIMEOUT_S = 300.0
_KEPT_REASONS = 20


@dataclass(slots=True)
class Judged:
    """Answers that differ from the right ones, to be looked at by whoever owns the reference."""

    question: Question
    index: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str


@dataclass(slots=True)
class Tally:
    """What became of all requests. ``counts`` : "right", "left", "failed", and the requests of each kind."""

    counts: Counter[str] = field(default_factory=Counter)
    different: list[Judged] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    num_tokens: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, question: Question, outcome: str, different: Sequence[Judged] = (), failure: str = "") -> None:
        """One request has ended."""
        with self._lock:
            self.counts[outcome] += 1
            self.counts[question.kind] += 1
            self.different += different
            if outcome == "right":
                self.num_tokens += sum(len(answer.token_ids) for answer in question.answers)
            if failure and len(self.failures) < _KEPT_REASONS:
                self.failures.append(failure)


class Client:
    """One of many; ``run`` is its thread."""

    def __init__(self, port: int, keys: Sequence[str], questions: Sequence[Question], tally: Tally, seed: int) -> None:
        self._port, self._keys, self._questions, self._tally = port, keys, questions, tally
        self._chance = random.Random(seed)

    def run(self, stopping: threading.Event) -> None:
        """Ask until told to stop."""
        while not stopping.is_set():
            question = self._chance.choice(self._questions)
            try:
                outcome, different = self._ask(question)
                self._tally.add(question, outcome, different)
            except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
                failure = f"{question.kind}: {type(error).__name__}: {error}"[:300]
                self._tally.add(question, "failed", failure=failure)
                stopping.wait(0.1)

    def _ask(self, question: Question) -> tuple[str, list[Judged]]:
        chance = self._chance
        body = dict(question.body)
        if chance.random() < 0.2:
            body["cache_salt"] = chance.choice(("a", "b"))
        streamed, leaves = chance.random() < 0.5, chance.random() < 0.15
        headers = {"content-type": "application/json", "authorization": f"Bearer {chance.choice(self._keys)}"}
        if streamed:
            body |= {"stream": True, "stream_options": {"include_usage": chance.random() < 0.5}}
        with closing(http.client.HTTPConnection("127.0.0.1", self._port, timeout=_TIMEOUT_S)) as connection:
            connection.request("POST", question.path, json.dumps(body), headers)
            if leaves and not streamed:
                threading.Event().wait(chance.random() * 0.3)
                return "left", []
            response = connection.getresponse()
            if response.status != 200:
                raise http.client.HTTPException(f"{response.status}: {response.read(300)!r}")
            found = _Found(len(question.answers))
            if not streamed:
                found.add(json.loads(response.read()))
                return self._judge(question, found)
            last_event = chance.randint(1, 12) if leaves else None
            for number, line in enumerate(line for line in response if line.startswith(b"data: ")):
                if line.strip() == b"data: [DONE]":
                    return self._judge(question, found)
                found.add(json.loads(line[6:]))
                if number == last_event:
                    return "left", []
        raise http.client.HTTPException("the stream ended before its end mark")

    def _judge(self, question: Question, found: _Found) -> tuple[str, list[Judged]]:
        different = [
            Judged(question, index, tuple(found.token_ids[index]), found.texts[index], found.reasons[index])
            for index, want in enumerate(question.answers)
            if (tuple(found.token_ids[index]), found.texts[index], found.reasons[index])
            != (want.token_ids, want.text, want.finish_reason)
        ]
        return ("different" if different else "right"), different


class _Found:
    """What the choices of a request have said."""

    def __init__(self, n: int) -> None:
        self.token_ids: list[list[int]] = [[] for _ in range(n)]
        self.texts, self.reasons = [""] * n, [""] * n

    def add(self, body: dict[str, Any]) -> None:
        """A whole answer, or a chunk of one. Raises ValueError for an error."""
        if "error" in body:
            raise ValueError(str(body["error"]))
        for choice in body["choices"]:
            index = choice["index"]
            said = choice.get("message") or choice.get("delta") or choice
            self.token_ids[index] += choice.get("token_ids") or ()
            self.texts[index] += said.get("text") or said.get("content") or ""
            self.reasons[index] = choice.get("finish_reason") or self.reasons[index]
