"""Our drafter on vLLM's V2 runner, case by case, in the environment of ``make bench-vllm`` and Triton's interpreter.

The bundled model in float32, greedy; 15 to 40 s a case. Outputs are those of the V1 runner without speculation, token
for token, and what is learned is what clients got.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.child import ROOT
from benchmarks.servers import free_port
from benchmarks.vllm.client import VllmEngine, interpreter
from benchmarks.vllm.engines import ENVIRONMENT, METHODS, in_every_process
from ssd.bundled import MODEL_PATH
from ssd.text.codec import TextCodec
from tests.statistics import assert_follows

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (ROOT / ".venv-vllm" / ".ready").exists(), reason="vLLM is not installed: run `make bench-vllm`"
    ),
]

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
        [{"repetition_penalty": 1.2}, {"min_tokens": 12}, {"logprobs": 2}, {"presence_penalty": 0.5}, {}, {}],
        12,
    ),
    "stops": (
        [{"stop": ["\n"]}, {"stop": [":", "self"]}, {"stop": ["("]}, {}, {"stop": [" "], "min_tokens": 5}, {}],
        24,
    ),
    "limits": ([{"max_tokens": count} for count in (1, 2, 5, 6, 17, 24)], 24),
}
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


def open_case(case: Case, **more: Any) -> VllmEngine:
    return VllmEngine(
        MODEL_PATH,
        "ssd",
        batch=BATCH,
        max_model_len=case.length,
        runner="v2",
        switches=list(case.switches),
        options=dict(case.options),
        **more,
    )


@cache
def prompts() -> list[list[int]]:
    codec = TextCodec.load(str(MODEL_PATH))
    return [codec.encode_prompt(text) for text in TEXTS]


@cache
def plainly(length: int) -> dict[str, list[list[int]]]:
    """Outputs of all asks on the V1 runner without speculation."""
    with VllmEngine(MODEL_PATH, "none", batch=BATCH, max_model_len=length) as plain:
        return {name: plain.complete(prompts(), most, sampling)[0] for name, (sampling, most) in ASKS.items()}


@pytest.mark.parametrize("name", CASES)
def test_outputs_are_those_without(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    settings = in_every_process(tmp_path) if "process" in case.switches else {}
    with open_case(case, settings=settings) as engine:
        got = {ask: engine.complete(prompts(), ASKS[ask][1], ASKS[ask][0])[0] for ask in case.asks}
        learned = engine.ask("learned")
        last = engine.shut_down()
    assert got == {ask: plainly(case.length)[ask] for ask in case.asks}
    proposer = last.get("proposer") or {"num_failures": 0}
    assert not proposer["num_failures"]
    if "process" not in case.switches:  # an engine core of its own process is not seen
        told = [prompt + output for ask in case.asks for prompt, output in zip(prompts(), got[ask], strict=True)]
        # The beginning of a text may have been known.
        assert learned and all(any(whole[-len(text) :] == text for whole in told) for text in learned)
        assert proposer["num_stored"] >= len(told) - BATCH and last["num_accepted_tokens"] > 0
        assert last["num_preemptions"] > 0 or name != "preemption"


def test_what_is_learned_of_an_aborted_request_is_what_its_client_got() -> None:
    """Though the device was a step ahead."""
    with open_case(CASES["async"]) as engine:
        said = engine.ask("abort", prompts()[:3], 9)
        engine.complete([prompts()[3]], 2)  # the next step tells the runner
        learned = engine.ask("learned")
    told = Counter(tuple(prompt + output) for prompt, output in zip(prompts(), said, strict=False))
    assert all(said) and Counter(tuple(text) for text in learned if text[:3] != prompts()[3][:3]) == told


def test_the_second_engine_on_a_directory_drafts_from_its_first_step(tmp_path: Path) -> None:
    outputs, steps = [], []
    for _ in range(2):
        with open_case(CASES["async"], settings={"SSD_CACHE_DIR": str(tmp_path)}) as engine:
            outputs.append(engine.complete(prompts()[:3], 24)[0])
            steps.append(engine.shut_down()["num_row_steps"])
    assert outputs[0] == outputs[1] and 2 * steps[1] < steps[0]


def test_vllm_serve_with_the_one_flag_drafts_and_keeps_what_it_heard(tmp_path: Path) -> None:
    codec = TextCodec.load(str(MODEL_PATH))
    want = [codec.decode(output) for output in plainly(LENGTH)["plain"][:2]]
    port, kept = free_port(), tmp_path / "cache"
    environment = {
        **os.environ,
        **ENVIRONMENT,
        **in_every_process(tmp_path),
        "SSD_CACHE_DIR": str(kept),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    }
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [
                str(interpreter()),
                "-m",
                "vllm.entrypoints.cli.main",
                "serve",
                str(MODEL_PATH),
                "--port",
                str(port),
                "--dtype",
                "float32",
                "--max-model-len",
                str(LENGTH),
                "--max-num-seqs",
                "2",
                "--enforce-eager",
                "--shutdown-timeout",
                "20",
                "--speculative-config",
                json.dumps(METHODS["v2"]["ssd"]),
            ],
            cwd=ROOT,
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            for _ in range(600):
                with suppress(OSError):
                    ask(port, "/health")
                    break
                assert process.poll() is None, "it did not start"
                time.sleep(0.5)
            assert [completed(port, text) for text in TEXTS[:2] * 2] == want * 2
            metrics = ask(port, "/metrics").decode().splitlines()
            accepted = [line for line in metrics if line.startswith("vllm:spec_decode_num_accepted_tokens_total")]
            assert sum(float(line.rpartition(" ")[2]) for line in accepted) > 0
            process.send_signal(signal.SIGTERM)
            process.wait(60)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert any(path.is_file() for path in kept.rglob("*"))


def ask(port: int, path: str, body: dict[str, Any] | None = None) -> bytes:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        content: bytes = answer.read()
    return content


def completed(port: int, prompt: str) -> str:
    body = {"model": str(MODEL_PATH), "prompt": prompt, "max_tokens": 24, "temperature": 0}
    text: str = json.loads(ask(port, "/v1/completions", body))["choices"][0]["text"]
    return text


@pytest.mark.parametrize("switch", ["async", "adaptive"])
def test_a_sampled_answer_has_the_law_of_the_model(switch: str, tmp_path: Path) -> None:
    """A random model of 8 tokens: counts of the second and third place beside the exact law."""
    size, count, prompt = 8, 4000, [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    law = np.zeros((size, size))
    pairs = [(a, b) for a in range(size) for b in range(size)]
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, a, b] for a, b in pairs])).logits.double().softmax(-1)
    for (a, b), chances in zip(pairs, logits[:, len(prompt) - 1 :], strict=True):
        law[b] += (chances[0, a] * chances[1, b] * chances[2]).numpy()
    sampling = [{"temperature": 1.0, "seed": seed, "ignore_eos": True} for seed in range(count)]
    options = {"skip_tokenizer_init": True, "speculative_config": {"num_speculative_tokens": 3}}
    with VllmEngine(tmp_path, "ssd", batch=64, max_model_len=64, runner="v2", switches=[switch], options=options) as e:
        outputs, _, counters = e.complete([prompt] * count, 3, sampling)
    assert counters["num_accepted_tokens"] > 0
    found = Counter((b, c) for _, b, c in (map(int, output[:3]) for output in outputs))
    assert_follows(found, {(b, c): float(law[b, c]) for b, c in pairs})
