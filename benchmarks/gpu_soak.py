"""Thousands of requests of many kinds on one engine, some cancelled midway; then engines opened and closed.

``python -m benchmarks.gpu_soak [MODEL] [--requests N] [--reopened N] [--out FILE]``

What a request is answered must be what the same is answered without speculation. Of every seventh each step cancels one
in five. Memory must not grow from the first quarter on, when all has been at work once, and what an engine took must be
given back when it is closed. A second load has no drafts and only requests whose next pass may begin before what the
last one said is known: a device must have done that, among requests that end at a token, come and are cancelled. The
last line of stdout is one JSON object; status 1 where any of this is not so.
"""

from __future__ import annotations

import gc
import random
import sys
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
"""Bytes on the device after the last engine was closed, beyond what was there after the first: of tensors, and of all
that is in use there, as recorded graphs are no tensors."""

# Of those that are opened again, what the last one leaves behind is compared with what the first one does.
_REOPENED: Final = Option(default=4, least=2, help="times that the engine is opened and closed again")
OPTIONS = {"requests": 2000, "reopened": _REOPENED}

_MIXED: Final[tuple[dict[str, Any], ...]] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "seed": 1},
    {"temperature": 0.0, "repetition_penalty": 1.1},
    {"temperature": 1.0, "seed": 2, "logprobs": 3},
)
_SIMPLE: Final[tuple[dict[str, Any], ...]] = ({"temperature": 0.0}, {"temperature": 1.0, "seed": 2})

Questions = Sequence[tuple[list[int], SamplingParams]]
Answers = dict[int, set[tuple[int, ...]]]
"""All that was said to a question, by its place."""


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    run = Run("gpu_soak", __doc__, argv, OPTIONS, has_model=True)
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
        run.say(f"{drafter}: {load['answers']} answers, {load['distinct']} distinct, {load['changed']} changed; "
                f"{load['cancelled']} cancelled, {load['failed']} failed, {load['unfinished']} unfinished; "
                f"{load['followed']} passes begun ahead; memory over the first quarter's {load['growth']}")  # fmt: skip
        is_wrong |= any(load[name] for name in ("changed", "failed", "unfinished")) or load["growth"] > _MOST_GROWTH
    run.say(f"left behind {left}")
    return run.end(loads=found, left=left, reopened=after, is_wrong=is_wrong)


@contextmanager
def _counting_run_ahead() -> Iterator[list[None]]:
    """Has an item for each pass that began before the tokens that it is over were read."""
    run_ahead, counted = SlotRunner.run_ahead, list[None]()

    def counting(*args: Any) -> Any:
        counted.append(None)
        return run_ahead(*args)

    with patch.object(SlotRunner, "run_ahead", counting):
        yield counted


def soak(engine: Engine, caches: CacheManager, questions: Questions, number: int) -> tuple[Answers, dict[str, Any]]:
    """``number`` requests drawn from the questions, twice as many waiting as there are slots."""
    chance = random.Random(0)
    answers: Answers = defaultdict(set)
    asked: dict[str, int] = {}
    said: dict[str, list[int]] = defaultdict(list)
    held, reasons, num_asked = [device_memory(engine.target.device)], Counter[FinishReason](), 0
    while num_asked < number or asked:
        while num_asked < number and len(asked) < 2 * _SLOTS:
            index = chance.randrange(len(questions))
            engine.submit(requests_of([questions[index][0]], [questions[index][1]], num_asked)[0])
            asked[str(num_asked)] = index
            num_asked += 1
        for output in engine.step():
            name = output.request_id
            said[name] += output.token_ids
            if output.finish_reason is not None:
                reasons[output.finish_reason] += 1
                index, tokens = asked.pop(name), tuple(said.pop(name))
                if output.finish_reason not in (FinishReason.CANCELLED, FinishReason.ERROR):
                    answers[index].add(tokens)
            elif int(name) % _CANCELLED == 0 and chance.random() < _CANCELS:
                engine.cancel(name)
        caches.maintain()
        if 4 * reasons.total() >= number * len(held):
            held.append(device_memory(engine.target.device))
    return answers, {
        "answers": number - reasons[FinishReason.CANCELLED] - reasons[FinishReason.ERROR],
        "distinct": sum(map(len, answers.values())),
        "cancelled": reasons[FinishReason.CANCELLED],
        "failed": reasons[FinishReason.ERROR],
        "unfinished": len(engine.check()),
        "memory": held,
        "growth": round(held[-1]["allocated"] / held[1]["allocated"], 4) if held[1]["allocated"] else 1.0,
    }


def num_changed(plain: Engine, questions: Questions, answers: Answers) -> int:
    """How many of the distinct answers are not what ``plain``, without speculation, says."""
    asked = [questions[index] for index in answers]
    # Whose log-probabilities are asked for waits for each pass.
    waiting = [replace(params, logprobs=params.logprobs or 0) for _, params in asked]
    said = ask(plain, requests_of([prompt for prompt, _ in asked], waiting))
    return sum(
        differs(plain.target, *questions[index], answer, want)
        for index, want in zip(answers, said, strict=True)
        for answer in answers[index]
    )


def _questions(codec: TextCodec, kinds: Sequence[dict[str, Any]], *, stops: bool = False) -> Questions:
    """Prompts with sampling whose answer is always the same: greedy or with a seed. ``stops`` : many end at a token."""
    prompts = [codec.encode_prompt(text)[-(40 + 5 * index) :] for index, text in enumerate(snippets(5)[:60])]
    often = Counter(token for prompt in prompts for token in prompt).most_common(8)
    ends = (often[-1][0],) if stops else ()
    return [
        (prompt, SamplingParams(max_tokens=24, stop_token_ids=ends, **kinds[index % len(kinds)]))
        for index, prompt in enumerate(prompts)
    ]


def device_memory(device: torch.device) -> dict[str, int]:
    """Bytes: held by tensors, and in use on the device by anyone. Zeros on a CPU."""
    if device.type != "cuda":
        return {"allocated": 0, "in_use": 0}
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return {"allocated": torch.cuda.memory_allocated(device), "in_use": total - free}


if __name__ == "__main__":
    sys.exit(main())
