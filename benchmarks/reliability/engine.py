"""Test whether an engine gives correct answers and does not leak memory over thousands of requests and reopenings.

``python -m benchmarks.reliability --question engine [MODEL] [--requests N] [--reopened N] [--out FILE]``

Every answer must equal the answer without speculation. Every seventh request may be cancelled at each step. The device
memory must not grow after the first quarter of the requests, and a closed engine must release its memory. A second load
runs without drafts and only with requests whose next forward pass can begin before the tokens of the previous one are
known; on a GPU this must have happened. The last line of stdout is one JSON object. The exit status is 1 if anything
was wrong.
"""

from __future__ import annotations

import gc
import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final
from unittest.mock import patch

import torch

from benchmarks.exactness import differs
from benchmarks.run import Option, Run
from benchmarks.ways import ask, open_engine, requests_of
from benchmarks.workloads import snippets
from ssd.config import CacheConfig, DraftConfig, EngineConfig, SamplingParams
from ssd.engine import Engine
from ssd.engine.request import FinishReason
from ssd.model.runners.slot_runner import SlotRunner
from ssd.retrieval.cache_manager import CacheManager
from ssd.text.codec import TextCodec

_SLOTS: Final = 16
_CANCELLED: Final = 7
_CANCELS: Final = 0.2
_MOST_GROWTH: Final = 1.01
_MOST_LEFT: Final = {"allocated": 4 << 20, "in_use": 64 << 20}
"""The limits of leaked device memory in bytes, of tensors and in total: how much more may be in use after the last
reopened engine was closed than after the first one.
"""
OPTIONS = {
    "requests": 2000,
    "reopened": Option(default=4, least=2, help="number of times that an engine is opened and closed after the load"),
}
_MIXED: Final[tuple[dict[str, Any], ...]] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "seed": 1},
    {"temperature": 0.0, "repetition_penalty": 1.1},
    {"temperature": 1.0, "seed": 2, "logprobs": 3},
)
_SIMPLE: Final[tuple[dict[str, Any], ...]] = ({"temperature": 0.0}, {"temperature": 1.0, "seed": 2})

Questions = Sequence[tuple[list[int], SamplingParams]]
Answers = dict[int, set[tuple[int, ...]]]
"""The set of different answers to each question, by the question's index."""


def main(argv: Sequence[str] | None = None) -> int:
    run = Run("engine", __doc__, argv, OPTIONS, has_model=True, program="reliability --question engine")
    if run.args.dtype == "auto":
        run.args.dtype = "float32"
    codec, model = run.load()
    draft, config = DraftConfig(num_speculative_tokens=16), EngineConfig(max_num_seqs=_SLOTS)
    loads = {"ssd": _questions(codec, _MIXED), "none": _questions(codec, _SIMPLE, stops=True)}
    found: dict[str, Any] = {}
    after = []
    for drafter in [*loads, *["ssd"] * run.args.reopened]:
        with CacheManager(CacheConfig(), codec.fingerprint, inline=True) as caches, _counting_run_ahead() as followed:
            engine = open_engine(
                model, drafter, slots=_SLOTS, length=512, draft=draft, config=config, codec=codec, caches=caches
            )
            if drafter in loads:
                answers, found[drafter] = soak(engine, caches, loads[drafter], run.args.requests)
                found[drafter]["followed"] = len(followed)
            else:
                list(engine.generate([[5, 6, 7] * 10] * _SLOTS, SamplingParams(max_tokens=8, temperature=0.0)))
            del engine
        gc.collect()  # a target and its recorded steps refer to each other
        if drafter in loads:
            plain = open_engine(model, "none", slots=_SLOTS, length=512, codec=codec)
            found[drafter]["changed"] = num_changed(plain, loads.pop(drafter), answers)
            del plain
            gc.collect()
        if not loads:
            after.append(device_memory(model.device))
    left = {name: after[-1][name] - after[1][name] for name in _MOST_LEFT}
    is_wrong = any(left[name] > most for name, most in _MOST_LEFT.items())
    is_wrong |= model.device.type == "cuda" and not found["none"]["followed"]
    for drafter, load in found.items():
        run.say(f"{drafter}: { ({name: value for name, value in load.items() if name != 'memory'}) }")
        is_wrong |= any(load[name] for name in ("changed", "failed", "unfinished")) or load["growth"] > _MOST_GROWTH
    run.say(f"left behind {left}")
    return run.end(loads=found, left=left, reopened=after, is_wrong=is_wrong)


@contextmanager
def _counting_run_ahead() -> Iterator[list[None]]:
    """Yield a list that gets an item for each pass that is launched before the previous pass's tokens are known."""
    run_ahead, counted = SlotRunner.run_ahead, list[None]()

    def counting(*args: Any) -> Any:
        counted.append(None)
        return run_ahead(*args)

    with patch.object(SlotRunner, "run_ahead", counting):
        yield counted


def soak(engine: Engine, caches: CacheManager, questions: Questions, number: int) -> tuple[Answers, dict[str, Any]]:
    """Run ``number`` random requests, at most twice as many at a time as there are slots; return answers and counts."""
    chance = random.Random(0)
    answers: Answers = defaultdict(set)
    running: dict[str, int] = {}
    outputs: dict[str, list[int]] = defaultdict(list)
    memory, reasons, num_submitted = [device_memory(engine.target.device)], Counter[FinishReason](), 0
    while num_submitted < number or running:
        while num_submitted < number and len(running) < 2 * _SLOTS:
            index = chance.randrange(len(questions))
            engine.submit(requests_of([questions[index][0]], [questions[index][1]], num_submitted)[0])
            running[str(num_submitted)] = index
            num_submitted += 1
        for output in engine.step():
            name = output.request_id
            outputs[name] += output.token_ids
            if output.finish_reason is not None:
                reasons[output.finish_reason] += 1
                index, tokens = running.pop(name), tuple(outputs.pop(name))
                if output.finish_reason not in (FinishReason.CANCELLED, FinishReason.ERROR):
                    answers[index].add(tokens)
            elif int(name) % _CANCELLED == 0 and chance.random() < _CANCELS:
                engine.cancel(name)
        caches.maintain()
        if 4 * reasons.total() >= number * len(memory):
            memory.append(device_memory(engine.target.device))
    return answers, {
        "answers": number - reasons[FinishReason.CANCELLED] - reasons[FinishReason.ERROR],
        "distinct": sum(map(len, answers.values())),
        "cancelled": reasons[FinishReason.CANCELLED],
        "failed": reasons[FinishReason.ERROR],
        "unfinished": len(engine.check()),
        "memory": memory,
        "growth": round(memory[-1]["allocated"] / memory[1]["allocated"], 4) if memory[1]["allocated"] else 1.0,
    }


def num_changed(plain: Engine, questions: Questions, answers: Answers) -> int:
    """Return the number of distinct answers that differ from those of ``plain``, an engine without speculation."""
    asked = [questions[index] for index in answers]
    # Requests with log-probabilities wait for each pass.
    waiting = [replace(params, logprobs=params.logprobs or 0) for _, params in asked]
    expected = ask(plain, requests_of([prompt for prompt, _ in asked], waiting))
    return sum(
        differs(plain.target, *questions[index], answer, want)
        for index, want in zip(answers, expected, strict=True)
        for answer in answers[index]
    )


def _questions(codec: TextCodec, kinds: Sequence[dict[str, Any]], *, stops: bool = False) -> Questions:
    """Return prompts with deterministic sampling parameters; with ``stops``, many outputs end at a stop token."""
    prompts = [codec.encode_prompt(text)[-(40 + 5 * index) :] for index, text in enumerate(snippets(5)[:60])]
    often = Counter(token for prompt in prompts for token in prompt).most_common(8)
    ends = (often[-1][0],) if stops else ()
    return [
        (prompt, SamplingParams(max_tokens=24, stop_token_ids=ends, **kinds[index % len(kinds)]))
        for index, prompt in enumerate(prompts)
    ]


def device_memory(device: torch.device) -> dict[str, int]:
    """Return the bytes allocated for tensors and all bytes in use on a GPU; zeros for a CPU."""
    if device.type != "cuda":
        return {"allocated": 0, "in_use": 0}
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return {"allocated": torch.cuda.memory_allocated(device), "in_use": total - free}
