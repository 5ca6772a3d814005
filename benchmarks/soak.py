"""Does a server stay right and small for hours? Every kind of request from many clients, every answer compared.

``python -m benchmarks.soak [--seconds S] [--clients N] [--questions N] [--out FILE] [--json]``

A real server (bundled model, float32) with three keys, a small cache that fills and turns over, and clients that ask
for completions and chats, greedy and sampled, with several choices, stops, penalties and grammars, whole or streamed,
some with a ``cache_salt``; 15 % of the answers are left before they end. Every other answer is compared, tokens, text
and reason, with the engine called directly without drafts. Meanwhile
the server's memory is read. At the end the server must have ended all requests and close in order.

Ends with a table and, with --json, one JSON line. Exit status 1 where an answer was changed, a request failed,
something was left behind, or the memory of the last quarter was more than 5 % (``--most-growth``) above that of the
second.
"""

from __future__ import annotations

import http.client
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.processes import Server
from benchmarks.run import Option, Run
from benchmarks.workloads import snippets
from ssd.bundled import MODEL_PATH
from ssd.config import DraftConfig, EngineConfig, SamplingParams, StructuredOutput
from ssd.engine import Engine, Request
from ssd.text.codec import TextCodec

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
_PROMPT_CHARACTERS = 160
_REGEX = r"[a-z]{3,8}\([a-z]{1,4}, [0-9]{1,3}\)"
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["add", "remove", "list"]}, "count": {"type": "integer", "maximum": 99}},
    "required": ["name", "count"],
    "additionalProperties": False,
}


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
    prompt: tuple[int, ...]
    sampling: SamplingParams
    answers: tuple[Answer, ...]


class Reference:
    """The engine that knows the answers. Owned by one thread."""

    def __init__(self) -> None:
        self._codec = TextCodec.load(str(MODEL_PATH))
        self._engine = Engine.from_pretrained(
            MODEL_PATH,
            device="cpu",
            dtype="float32",
            codec=self._codec,
            config=EngineConfig(max_num_seqs=8, max_model_len=512, enable_prefix_caching=False, exact="on"),
            draft=DraftConfig(num_speculative_tokens=0),
        )

    def questions(self, number: int, max_tokens: int) -> list[Question]:
        """``number`` questions, of each kind as many."""
        kinds = self._kinds(max_tokens)
        return [self._question(*next(kinds)) for _ in range(number)]

    def close(self) -> None:
        """End the engine."""
        self._engine.close()

    def _kinds(self, max_tokens: int) -> Iterator[tuple[str, str, str, dict[str, Any], StructuredOutput | None, int]]:
        """(kind, path, text, fields of body and sampling, structured output, choices), in turn."""
        sampled = {"temperature": 0.8, "top_p": 0.95}
        for number, text in enumerate(snippets(seed=13)):
            asked, limit = text[-_PROMPT_CHARACTERS:], {"max_tokens": max_tokens}
            greedy = {**limit, "temperature": 0.0}
            seeded = {**limit, **sampled, "seed": number}
            yield "completion, greedy", COMPLETIONS, asked, greedy, None, 1
            yield "completion, sampled", COMPLETIONS, asked, seeded, None, 1
            yield "completion, n=3", COMPLETIONS, asked, seeded, None, 3
            yield "completion, stop", COMPLETIONS, asked, {**greedy, "stop": ("\n\n", "return")}, None, 1
            yield "completion, penalties", COMPLETIONS, asked, {**seeded, "presence_penalty": 0.5}, None, 1
            yield "chat, greedy", CHAT, asked, greedy, None, 1
            yield "chat, n=2", CHAT, asked, seeded, None, 2
            yield "chat, schema", CHAT, asked, greedy, StructuredOutput("json_schema", json.dumps(_SCHEMA)), 1
            yield "completion, regex", COMPLETIONS, asked, seeded, StructuredOutput("regex", _REGEX), 1

    def _question(
        self, kind: str, path: str, text: str, fields: dict[str, Any], output: StructuredOutput | None, n: int
    ) -> Question:
        body: dict[str, Any] = {**fields, "n": n, "return_token_ids": True}
        if path == CHAT:
            body["messages"] = [{"role": "user", "content": text}]
            prompt = self._codec.encode_chat(body["messages"])
        else:
            body["prompt"] = text
            prompt = self._codec.encode_prompt(text)
        if output is not None and output.kind == "json_schema":
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "call", "schema": _SCHEMA}}
        elif output is not None:
            body["structured_outputs"] = {output.kind: output.source}
        sampling = SamplingParams(**fields, structured_output=output)
        return Question(kind, path, body, tuple(prompt), sampling, tuple(self._answers(prompt, sampling, n)))

    def _answers(self, prompt: Sequence[int], sampling: SamplingParams, n: int) -> list[Answer]:
        ids: list[list[int]] = [[] for _ in range(n)]
        texts, reasons = [""] * n, [""] * n
        for index in range(n):
            request = Request(
                request_id=str(index), prompt_token_ids=tuple(prompt), sampling=sampling, choice_index=index,
                namespace=None,
            )  # fmt: skip
            self._engine.submit(request)
        while self._engine.has_work():
            for step in self._engine.step():
                index = int(step.request_id)
                ids[index] += step.token_ids
                texts[index] += step.text
                reasons[index] = str(step.finish_reason) if step.finish_reason is not None else ""
        return [Answer(tuple(ids[i]), texts[i], reasons[i]) for i in range(n)]


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


_KEYS = ("first", "second", "third")
_SERVER = (
    *("--device", "cpu", "--dtype", "float32", "--max-num-seqs", "16", "--max-model-len", "512"),
    *("--cache-tokens", "131072", "--generation-config", "vllm", "--exact", "on"),
)
_MUST_BE_ZERO = (
    "vllm:num_requests_running", "vllm:num_requests_waiting", "ssd:drafter_failures_total", "ssd:failed_passes_total",
    "ssd:integrity_violations_total",
)  # fmt: skip


OPTIONS = {
    "seconds": Option(default=1800.0, least=0),
    "clients": Option(default=32, help="at once"),
    "questions": Option(default=180, help="different ones"),
    "max_tokens": Option(default=32, help="of each answer"),
    "most_growth": Option(default=1.05, metavar="RATIO", help="of memory"),
    "server_option": Option(default=[], metavar="OPTION", help="more of the server's"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Ask, compare, print. Returns the exit status."""
    run = Run("soak", __doc__, argv, OPTIONS, unsaid=("most_growth", "server_option"))
    args = run.args
    reference = Reference()
    questions = reference.questions(args.questions, args.max_tokens)
    run.say(f"{len(questions)} questions answered by the engine called directly")
    tally = Tally()
    with tempfile.TemporaryDirectory(prefix="soak-") as home:
        keys = Path(home) / "keys"
        keys.write_text("\n".join(_KEYS) + "\n")
        keys.chmod(0o600)
        server = Server(Path(home) / "server.log", *_SERVER, "--api-key-file", str(keys), *args.server_option)
        try:
            server.start()
            clients = [Client(server.port, _KEYS, questions, tally, seed) for seed in range(args.clients)]
            memory = _soak(server, clients, tally, args.seconds, run.say)
            left_behind = _left_behind(server)
            closed_in_order = server.terminate()
        finally:
            server.kill()
        log = (Path(home) / "server.log").read_text()
    reference.close()
    result: dict[str, Any] = {
        "answers": tally.counts["right"] + tally.counts["different"],
        "tokens": tally.num_tokens,
        "changed": len(tally.different),
        "left": tally.counts["left"],
        "failed": tally.counts["failed"],
        "kinds": {kind: tally.counts[kind] for kind in dict.fromkeys(question.kind for question in questions)},
        "left_behind": left_behind,
        "closed_in_order": closed_in_order,
        "tracebacks": log.count("Traceback"),
        "memory_mib": memory,
        "growth": round(_growth(memory), 4),
    }
    for name, value in result.items():
        run.say(f"{name:<16} {value if name != 'memory_mib' else (memory[0], memory[-1])}")
    for one in tally.different[:5]:
        run.say(f"changed: {one.question.kind}: {one.text!r}, expected {one.question.answers[one.index]}"[:600])
    for failure in tally.failures:
        run.say(f"failed: {failure}")
    failed = tally.different or result["failed"] or left_behind or result["tracebacks"] or not closed_in_order
    return run.end(**result, is_wrong=bool(failed) or result["growth"] > args.most_growth, indent=1)


def _soak(
    server: Server, clients: Sequence[Client], tally: Tally, seconds: float, say: Callable[[str], None]
) -> list[tuple[int, float]]:
    """(second, MiB) while the clients ask, about 120 times."""
    stopping = threading.Event()
    threads = [threading.Thread(target=client.run, args=(stopping,)) for client in clients]
    began, memory, printed = time.monotonic(), [], 0.0
    for thread in threads:
        thread.start()
    try:
        while (passed := time.monotonic() - began) < seconds:
            memory.append((round(passed), round(server.memory_mib(), 1)))
            if passed - printed >= 60:
                printed = passed
                say(f"{passed:6.0f} s {tally.counts['right']:7,} right {memory[-1][1]:8.1f} MiB")
            time.sleep(min(seconds - passed, max(1.0, seconds / 120)))
    finally:
        stopping.set()
        for thread in threads:
            thread.join()
    return memory


def _growth(memory: Sequence[tuple[int, float]]) -> float:
    """Memory of the last quarter over that of the second, when all has been at work once."""
    quarter = max(1, len(memory) // 4)
    second, last = (
        median(mib for _, mib in part) for part in (memory[quarter : 2 * quarter] or memory, memory[-quarter:])
    )
    return last / second


def _left_behind(server: Server) -> list[str]:
    """Counts that should be 0 when nobody asks any more; what was left early may take a moment to end."""
    found: list[str] = []
    for _ in range(50):
        _, text = server.ask("GET", "/metrics")
        samples = [one for family in text_string_to_metric_families(text.decode()) for one in family.samples]
        found = [f"{one.name} {one.value:g}" for one in samples if one.name in _MUST_BE_ZERO and one.value]
        if not found:
            break
        time.sleep(0.2)
    return found


if __name__ == "__main__":
    sys.exit(main())
