"""Measure the overhead of HTTP: the same requests to ``ssd-serve`` and to an engine that is called directly.

``python -m benchmarks.http [MODEL] [--rounds N] [--json]``

There are two processes with the same model and options. This process steps its own engine in a loop, and sends requests
to ``ssd-serve`` over keep-alive connections. Rounds alternate between both, and each round begins with the other side.

1. one: one client, one token per answer; the median milliseconds per request;
2. plain and plain-stream: 32 clients, whole and streamed answers; tokens per second.

Speculation is off, because with drafts each side would choose draft lengths by its own cost measurements. The texts of
both sides must be equal. Prints a table of medians over rounds; the last line of stdout is one JSON object.
"""

from __future__ import annotations

import http.client
import json
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.run import Option, Run
from benchmarks.servers import Server, headers_of
from benchmarks.workloads import snippets
from server.command.arguments import parse_arguments
from server.command.start import EngineLoader
from ssd.config import SamplingParams
from ssd.engine import Engine, Request

CLIENTS = 32
OUTPUT_TOKENS = 64
PROMPT_TOKENS = 96


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of traffic, with the number of clients and whether answers are streamed."""

    name: str
    num_clients: int
    output_tokens: int
    streams: bool


KINDS = (
    Kind("one", 1, 1, streams=False),
    Kind("plain", CLIENTS, OUTPUT_TOKENS, streams=False),
    Kind("plain-stream", CLIENTS, OUTPUT_TOKENS, streams=True),
)
Said = tuple[float, list[str]]
"""The figure of one round and the text of each answer. The figure is the median milliseconds per request for one
client, and the tokens per second for several clients."""
_numbers = count()


def direct(engine: Engine, prompts: Sequence[tuple[int, ...]], kind: Kind) -> Said:
    """Run a round on the engine in this process, with as many concurrent requests as there are clients."""
    waiting = list(enumerate(prompts))[::-1]
    sampling = SamplingParams(max_tokens=kind.output_tokens, temperature=0.0, ignore_eos=True)
    texts, each_s = [""] * len(prompts), [0.0] * len(prompts)
    running: dict[str, tuple[int, float]] = {}
    begun = time.perf_counter()
    while waiting or running:
        while waiting and len(running) < kind.num_clients:
            index, prompt = waiting.pop()
            request = Request(
                request_id=str(next(_numbers)), prompt_token_ids=prompt, sampling=sampling, num_speculative_tokens=0
            )
            running[request.request_id] = index, time.perf_counter()
            engine.submit(request)
        for output in engine.step():
            index, since = running[output.request_id]
            texts[index] += output.text
            if output.finish_reason is not None:
                each_s[index] = time.perf_counter() - since
                del running[output.request_id]
    return _figure(time.perf_counter() - begun, each_s, kind), texts


def over_http(port: int, prompts: Sequence[tuple[int, ...]], kind: Kind) -> Said:
    """Run a round over HTTP; each client is a thread with one connection. Raises HTTPException for a failed request."""
    own = threading.local()
    opened = []

    def ask(prompt: tuple[int, ...]) -> tuple[float, str]:
        if not hasattr(own, "connection"):
            own.connection = http.client.HTTPConnection("127.0.0.1", port)
            opened.append(own.connection)
        body = {"prompt": prompt, "max_tokens": kind.output_tokens, "temperature": 0, "ignore_eos": True}
        body |= {"stream": kind.streams, "num_speculative_tokens": 0}
        since = time.perf_counter()
        own.connection.request("POST", "/v1/completions", json.dumps(body), headers_of(None))
        response = own.connection.getresponse()
        content = response.read().decode()
        if response.status != 200:
            raise http.client.HTTPException(f"{response.status}: {content}")
        events = [event.removeprefix("data: ") for event in content.split("\n\n")] if kind.streams else [content]
        answers = [json.loads(event) for event in events if event.startswith("{")]
        said = "".join(choice["text"] for answer in answers for choice in answer["choices"])
        return time.perf_counter() - since, said

    begun = time.perf_counter()
    with ThreadPoolExecutor(kind.num_clients) as clients:
        found = list(clients.map(ask, prompts))
    seconds = time.perf_counter() - begun
    for connection in opened:
        connection.close()
    return _figure(seconds, [each for each, _ in found], kind), [text for _, text in found]


def _figure(seconds: float, each_s: Sequence[float], kind: Kind) -> float:
    return 1e3 * median(each_s) if kind.num_clients == 1 else len(each_s) * kind.output_tokens / seconds


def measure(engine: Engine, port: int, kind: Kind, pool: list[list[tuple[int, ...]]]) -> dict[str, Any]:
    """Run all rounds of one kind of traffic on both sides. Raises ValueError if their texts differ."""
    ours, theirs = list[float](), list[float]()
    for number, prompts in enumerate(pool):
        if number % 2:
            (one, texts), (other, others) = direct(engine, prompts, kind), over_http(port, prompts, kind)
        else:
            (other, others), (one, texts) = over_http(port, prompts, kind), direct(engine, prompts, kind)
        if texts != others:
            raise ValueError(f"{kind.name}: a text over HTTP is not the engine's")
        ours.append(one)
        theirs.append(other)
    is_latency = kind.num_clients == 1
    differences = [http - own if is_latency else http / own - 1 for own, http in zip(ours, theirs, strict=True)]
    return {
        "kind": kind.name,
        "clients": kind.num_clients,
        "unit": "ms" if is_latency else "tokens/s",
        "engine": round(median(ours), 3),
        "http": round(median(theirs), 3),
        "difference": round(median(differences), 4),
        "least": round(min(differences), 4),
        "most": round(max(differences), 4),
    }


OPTIONS = {
    "rounds": Option(default=9, help="number of rounds, each with the server and the engine"),
    "requests": Option(default=64, help="number of requests per round"),
    "kind": Option(default=[kind.name for kind in KINDS], choices=[kind.name for kind in KINDS]),
}
COLUMNS = (
    ("traffic", "{kind}"),
    ("unit", "{unit}"),
    (">engine in the client process", "{engine:,.1f}"),
    (">server over HTTP", "{http:,.1f}"),
    (">difference (ms, or as a share)", "{difference:+.2f}"),
    (">minimum ... maximum of the difference", "{least:+.2f} ... {most:+.2f}"),
)
WORDS = {
    "kind": {
        "one": "1 client, one token per request",
        "plain": f"{CLIENTS} clients, whole answers",
        "plain-stream": f"{CLIENTS} clients, streamed answers",
    }
}
NOTE = (
    "The values are medians of {parameters[rounds]} rounds, in which server and engine were measured alternately. "
    "Speculation was off, and prompts were token ids. Clients, server and engine shared the CPU cores. All texts were "
    "equal. The command is `python -m benchmarks.http`. Measured with the {model} on {date} on {environment[cpu]}, "
    "{environment[cores]} cores."
)


def main(argv: Sequence[str] | None = None) -> int:
    under = ("benchmarks/workloads.py", "ssd", "server")
    run = Run("http", __doc__, argv, OPTIONS, COLUMNS, has_model=True, unsaid=("kind",), under=under)
    args = run.args
    run.parameters |= {"clients": CLIENTS, "prompt_tokens": PROMPT_TOKENS, "output_tokens": OUTPUT_TOKENS}
    options = [str(args.model), "--max-num-seqs", str(CLIENTS), "--max-model-len", "512"]
    options += ["--dtype", args.dtype, "--device", args.device]
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as resources:
        server = Server(Path(scratch) / "server.log", *options)
        resources.callback(server.kill)
        server.start()
        engine = EngineLoader(parse_arguments(options, {}))(resources)
        resources.callback(engine.close)
        engine.warm_up()
        assert engine.codec is not None
        texts = snippets(seed=0)[: args.rounds * args.requests]
        prompts = [tuple(engine.codec.encode_completion(text)[:PROMPT_TOKENS]) for text in texts]
        pool = [prompts[i : i + args.requests] for i in range(0, len(prompts), args.requests)]
        for kind in KINDS:
            if kind.name in args.kind:
                run.row(measure(engine, server.port, kind, pool))
        run.ran_on(engine.target)
    return run.end()


if __name__ == "__main__":
    sys.exit(main())
