"""Concurrent clients that verify every answer, and notes: texts with a number, found again as they lie in a cache."""

from __future__ import annotations

import http.client
import json
import random
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.faults.history import History
from benchmarks.processes import Server, headers_of
from ssd.config import CacheConfig, IndexConfig
from ssd.retrieval.cache import CacheSet, SuffixCache
from ssd.retrieval.files import MANIFEST_NAME
from ssd.retrieval.segment import SEPARATOR
from ssd.text.codec import TextCodec

PROMPTS = (
    "import os\n",
    "def read_lines(path):\n",
    "class Connection:\n    def close(self):\n",
    "for name, value in options.items():\n    ",
    "# A queue for several threads\nclass Queue:\n",
    "def test_an_empty_list():\n    assert ",
    "try:\n    import json\nexcept ImportError:\n",
    "SELECT name FROM users WHERE ",
)


@dataclass(frozen=True, slots=True)
class Question:
    """A request's body and what it must be answered with."""

    body: dict[str, Any]
    text: str
    finish_reason: str

    def judge(self, text: str, finish_reason: str) -> str:
        """ "right" or "changed"."""
        return "right" if (text, finish_reason) == (self.text, self.finish_reason) else "changed"


def ask_all(server: Server, num_tokens: int, seeds: Sequence[int]) -> list[Question]:
    """Every prompt greedily and with each seed, answered by a server that does not speculate."""
    questions = []
    for prompt in PROMPTS:
        bodies: list[dict[str, Any]] = [
            {"temperature": 0},
            *({"temperature": 0.8, "top_p": 0.95, "seed": seed} for seed in seeds),
        ]
        for fields in bodies:
            body = {"prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, **fields}
            choice = server.post(body)["choices"][0]
            questions.append(Question(body, choice["text"], choice["finish_reason"]))
    return questions


_NOTE = "# note {} of this log\n"
_MARGIN = 24  # characters of a sequence that may hold a note's number


def note(number: int) -> str:
    """The prompt of a note; no other text begins like it."""
    return _NOTE.format(number)


def number_of(text: str) -> int | None:
    """The number of the note that ``text`` begins with; None for other text."""
    words = text[:_MARGIN].split(" ", 4)
    is_note = len(words) > 3 and words[:2] == ["#", "note"] and words[3].startswith("of") and words[2].isdecimal()
    return int(words[2]) if is_note else None


def sequences(cache: SuffixCache) -> Iterator[npt.NDArray[np.int32]]:
    """The sequences a cache holds."""
    snapshot = cache.snapshot()
    tail = snapshot.ring[np.arange(snapshot.tail_start, snapshot.tail_stop) & (len(snapshot.ring) - 1)]
    text = np.concatenate([*(segment.tokens for segment in snapshot.segments), tail])
    return (part[part != SEPARATOR] for part in np.split(text, np.flatnonzero(text == SEPARATOR) + 1))


def notes_in(cache: SuffixCache, codec: TextCodec) -> list[int]:
    """The number of each note that a cache holds, as often as it does."""
    texts = (
        codec.decode(sequence[:_MARGIN].tolist(), skip_special_tokens=True)
        for sequence in sequences(cache)
        if len(sequence)
    )
    return [number for text in texts if (number := number_of(text)) is not None]


def notes_on_disk(directory: Path, codec: TextCodec, num_tokens: int) -> list[tuple[str, int]]:
    """(namespace, number) of every note in the files of a cache directory, whether a server writes it or not.

    Reads a copy. ``num_tokens`` : the cache's capacity.
    """
    found: list[tuple[str, int]] = []
    with tempfile.TemporaryDirectory(prefix="faults-copy-") as copy:
        for namespace in _copy(directory, Path(copy)):
            config = CacheConfig(directory=Path(copy), index=IndexConfig(capacity_tokens=num_tokens))
            with CacheSet(config, codec.fingerprint, inline=True) as caches:
                found += ((namespace, number) for number in notes_in(caches.get(namespace), codec))
    return found


def _copy(directory: Path, copy: Path) -> Iterable[str]:
    """Copies each namespace as its manifest has it; files of a merge come and go meanwhile."""
    namespaces = [path.parent.name for path in directory.glob(f"*/{MANIFEST_NAME}")]
    for namespace in namespaces:
        for _ in range(50):
            target = copy / namespace
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir()
            manifest = (directory / namespace / MANIFEST_NAME).read_bytes()
            names = [segment["id"] for segment in json.loads(manifest)["manifest"]["segments"]]
            try:
                for name in names:
                    shutil.copyfile(directory / namespace / f"{name}.seg", target / f"{name}.seg")
                (target / MANIFEST_NAME).write_bytes(manifest)
                break
            except FileNotFoundError:
                time.sleep(0.02)
        else:
            raise TimeoutError(f"{namespace} changed faster than it could be copied")
    return namespaces


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
