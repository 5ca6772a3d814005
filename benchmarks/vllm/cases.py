"""Our drafter on vLLM's V2 runner, case by case, against no speculation. ``python -m benchmarks.vllm.cases``

The bundled model in float32, greedy, in Triton's interpreter: 15 to 40 s a case. Outputs are those of the V1 runner
without speculation, token for token, and what is learned is what clients got. Prints a table; the last line of stdout
is one JSON object. Status 1 where something differs.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from benchmarks.environment import describe
from benchmarks.run import Option, Run
from benchmarks.vllm.client import ROOT, VllmEngine, interpreter, versions
from benchmarks.vllm.engines import ENVIRONMENT, METHODS
from benchmarks.vllm.interpreter import in_every_process
from ssd.bundled import MODEL_PATH
from ssd.text.codec import TextCodec

LENGTH, BATCH = 512, 4
TEXTS = (
    "def main(argv):\n    parser = ",
    "import os\nimport sys\n\ndef walk(",
    "class Reader:\n    def __init__(self",
    "def read_lines(path):\n    with open(",
    "for name in names:\n    if name.startswith(",
    "import os\nimport sys\n\ndef walk(",
)
ASKS: dict[str, tuple[list[dict[str, Any]], int]] = {
    "plain": ([], 24),
    "again": ([], 24),
    "grammars": ([{}, {"regex": "[a-z ]{4,40}"}] * 3, 24),
    "penalties": (
        [{"repetition_penalty": 1.2}, {"min_tokens": 12}, {"logprobs": 2}, {"presence_penalty": 0.5}, {}, {}], 12,
    ),
    "stops": (
        [{"stop": ["\n"]}, {"stop": [":", "self"]}, {"stop": ["("]}, {}, {"stop": [" "], "min_tokens": 5}, {}], 24,
    ),
    "limits": ([{"max_tokens": count} for count in (1, 2, 5, 6, 17, 24)], 24),
}  # fmt: skip
"""What is asked of an engine: sampling parameters of each prompt, and most tokens."""


class Case(NamedTuple):
    """An engine, and what it is asked, one after the other."""

    switches: tuple[str, ...] = ()
    options: Mapping[str, Any] = MappingProxyType({})
    asks: tuple[str, ...] = ("plain", "again")
    length: int = LENGTH


_WIDTHS = {"speculative_config": {"num_speculative_tokens_per_batch_size": [[1, 2, 5], [3, 4, 2]]}}
CASES = {
    "sync": Case(asks=("plain", "again", "grammars", "penalties")),
    "async": Case(("async",), asks=("plain", "again", "grammars", "stops", "limits")),
    "chunks": Case(("async",), {"max_num_batched_tokens": 32, "enable_chunked_prefill": True}),
    "preemption": Case(("async",), {"num_gpu_blocks_override": 5, "block_size": 32}, length=64),
    "longest context": Case(length=40),
    "longest, async": Case(("async",), length=40),
    "width by batch": Case(options=_WIDTHS),
    "adaptive": Case(("adaptive",)),
    "adaptive, async": Case(("adaptive", "async")),
    "core process": Case(("process",)),
    "two ranks": Case(("process",), {"tensor_parallel_size": 2}),
}


NAMES = (*CASES, "aborts", "restart", "serve")
OPTIONS: dict[str, Any] = {
    "cases": Option(default=list(NAMES), choices=NAMES, metavar="NAME", help="of these"),
    "prompts": Option(default=len(TEXTS), help="so many of the requests only"),
}
COLUMNS = (
    ("case", "{case}"), (">accepted", "{accepted}"), (">drafted", "{drafted}"), (">learned", "{learned}"),
    (">preempted", "{preempted}"), ("equal", "{equal}"),
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run them and compare. Returns the exit status: 1 where outputs differ, or what was learned is another text."""
    this = Run("vllm_cases", __doc__, argv, OPTIONS, COLUMNS, unsaid=("cases",), program="vllm.cases")
    prompts, special = _prompts()[: this.args.prompts], {"aborts": aborts, "restart": restart, "serve": serve}
    for name in this.args.cases:
        this.row({"case": name, **(special[name]() if name in special else run(CASES[name], prompts))})
    is_wrong = not all(row["equal"] for row in this.rows)
    return this.end(environment={**describe(), "vllm": versions()}, results=this.rows, is_wrong=is_wrong)


def _engine(case: Case, runner: str = "v2", method: str = "ssd", **more: Any) -> VllmEngine:
    if runner == "v1":
        return VllmEngine(MODEL_PATH, method, batch=BATCH, max_model_len=case.length)
    return VllmEngine(MODEL_PATH, method, batch=BATCH, max_model_len=case.length, runner=runner,
                      switches=list(case.switches), options=dict(case.options), **more)  # fmt: skip


@cache
def _prompts() -> list[list[int]]:
    codec = TextCodec.load(str(MODEL_PATH))
    return [codec.encode_prompt(text) for text in TEXTS]


@cache
def _plainly(length: int) -> dict[str, list[list[int]]]:
    """Outputs of all asks on the V1 runner without speculation."""
    prompts = _prompts()
    with _engine(Case(length=length), "v1", "none") as plain:
        return {name: plain.complete(prompts, most, sampling)[0] for name, (sampling, most) in ASKS.items()}


def run(case: Case, prompts: list[list[int]]) -> dict[str, Any]:
    """All that a case asks."""
    with tempfile.TemporaryDirectory() as folder:
        settings = in_every_process(Path(folder)) if "process" in case.switches else {}
        with _engine(case, settings=settings) as engine:
            got = {
                name: engine.complete(prompts, ASKS[name][1], ASKS[name][0][: len(prompts)])[0] for name in case.asks
            }
            learned = engine.learned()
            last = engine.close()
    want = _plainly(case.length)
    differ = [name for name in case.asks if got[name] != want[name][: len(prompts)]]
    told = [prompt + output for name in case.asks for prompt, output in zip(prompts, got[name], strict=True)]
    row = _row(not differ, last, learned)
    if learned:  # an engine core of its own process does not say
        row["equal"] &= all(_is_of(text, told) for text in learned) and row["ended"] >= len(told) - BATCH
    return {**row, "differ": differ}


def _row(is_equal: bool, last: dict[str, Any], learned: list[list[int]]) -> dict[str, Any]:
    failures = last["proposer"]["num_failures"] if last.get("proposer") else 0
    if not last["num_row_steps"]:  # an engine core of its own process is not seen
        last = {**last, "num_accepted_tokens": "-", "num_draft_tokens": "-", "num_preemptions": "-"}
    return {"equal": is_equal and not failures, "accepted": last["num_accepted_tokens"],
            "drafted": last["num_draft_tokens"], "learned": len(learned), "preempted": last["num_preemptions"],
            "row_steps": last["num_row_steps"], "failures": failures,
            "ended": last["proposer"]["num_learned"] if last.get("proposer") else 0}  # fmt: skip


def _is_of(text: list[int], told: list[list[int]]) -> bool:
    """Whether a text is one that a client was told, to its last token; its beginning may have been known."""
    return any(whole[-len(text) :] == text for whole in told)


def aborts() -> dict[str, Any]:
    """What is learned of an aborted request is what its client got, while the device was a step ahead."""
    prompts = _prompts()
    with _engine(CASES["async"]) as engine:
        said = engine.abort(prompts[:3], 9)
        engine.complete([prompts[3]], 2)  # the next step tells the runner
        learned = engine.learned()
        last = engine.close()
    told = Counter(tuple(prompt + output) for prompt, output in zip(prompts, said, strict=False))
    found = Counter(tuple(text) for text in learned if text[:3] != prompts[3][:3])
    return _row(all(said) and found == told, last, learned)


def restart() -> dict[str, Any]:
    """The second engine on a directory drafts from its first step."""
    with tempfile.TemporaryDirectory() as folder:
        outputs, lasts = [], []
        for _ in range(2):
            with _engine(CASES["async"], settings={"SSD_CACHE_DIR": folder}) as engine:
                outputs.append(engine.complete(_prompts()[:3], 24)[0])
                lasts.append(engine.close())
    is_warm = 2 * lasts[1]["num_row_steps"] < lasts[0]["num_row_steps"]
    return _row(outputs[0] == outputs[1] and is_warm, lasts[1], [])


def serve() -> dict[str, Any]:
    """``vllm serve`` with the one flag, asked twice, stopped, and what it kept."""
    codec = TextCodec.load(str(MODEL_PATH))
    want = [codec.decode(output) for output in _plainly(LENGTH)["plain"][:2]]
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        cache = Path(folder, "cache")
        environment = {**os.environ, **ENVIRONMENT, **in_every_process(Path(folder)), "SSD_CACHE_DIR": str(cache)}
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
        log = None if os.environ.get("SSD_VLLM_LOG") else subprocess.DEVNULL
        process = subprocess.Popen(
            [str(interpreter()), "-m", "vllm.entrypoints.cli.main", "serve", str(MODEL_PATH), "--port", str(port),
             "--dtype", "float32", "--max-model-len", str(LENGTH), "--max-num-seqs", "2", "--enforce-eager",
             "--shutdown-timeout", "20", "--speculative-config", json.dumps(METHODS["v2"]["ssd"])],
            cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
        try:
            _await(process, port)
            said = [_complete(port, text) for text in TEXTS[:2] * 2]
            drafted = _metric(port, "vllm:spec_decode_num_draft_tokens_total")
            accepted = _metric(port, "vllm:spec_decode_num_accepted_tokens_total")
            process.send_signal(signal.SIGTERM)
            process.wait(60)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        kept = sum(1 for _ in cache.rglob("*") if _.is_file())
    return {"equal": said == want * 2 and accepted > 0 and kept > 0, "accepted": accepted, "drafted": drafted,
            "learned": f"{kept} files", "preempted": 0, "row_steps": 0, "failures": 0, "ended": 0}  # fmt: skip


def _await(process: subprocess.Popen[bytes], port: int) -> None:
    for _ in range(600):
        with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
            return
        if process.poll() is not None:
            break
        time.sleep(0.5)
    raise SystemExit("vllm serve did not start; SSD_VLLM_LOG=1 shows its log")


def _complete(port: int, prompt: str) -> str:
    body = json.dumps({"model": str(MODEL_PATH), "prompt": prompt, "max_tokens": 24, "temperature": 0}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        text: str = json.load(answer)["choices"][0]["text"]
    return text


def _metric(port: int, name: str) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return int(sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name)))


if __name__ == "__main__":
    sys.exit(main())
