"""Thousands of requests of many kinds on one engine, every seventh cancelled; then engines opened and closed.

``python -m benchmarks.gpu_check.soak [MODEL] [--requests N] [--reopened N] [--out FILE]``

What a request is answered must always be the same. Memory must not grow from the first quarter on, when all has been at
work once, and what an engine took must be given back when it is closed. The last line of stdout is one JSON object;
status 1 where any of this is not so.
"""

from __future__ import annotations

import gc
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, Final

import torch
from transformers import PreTrainedModel

from benchmarks.exactness import differs
from benchmarks.run import Option, Run
from benchmarks.ways import open_engine
from benchmarks.workloads import snippets
from ssd.config import CacheConfig, DraftConfig, EngineConfig, SamplingParams
from ssd.engine import Engine, Request
from ssd.engine.request import FinishReason
from ssd.model.ways.slot_target import SlotTarget
from ssd.retrieval.cache import CacheSet
from ssd.text.codec import TextCodec

_SLOTS: Final = 16
_QUESTIONS: Final = 60
_CANCELLED: Final = 7
_MOST_GROWTH: Final = 1.01
_MOST_LEFT: Final = {"allocated": 4 << 20, "in_use": 64 << 20}
"""Bytes on the device after the last engine was closed, beyond what was there after the first: of tensors, and of all
that is in use there, as recorded graphs are no tensors."""

OPTIONS = {"requests": 2000, "reopened": Option(default=4, help="times that the engine is opened and closed again")}


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    run = Run("gpu_soak", __doc__, argv, OPTIONS, has_model=True, program="gpu_check.soak")
    if run.args.dtype == "auto":
        run.args.dtype = "float32"
    codec, model = run.load()
    with CacheSet(CacheConfig(), codec.fingerprint, inline=True) as caches:
        found = soak(_open(model, codec, caches), caches, _questions(codec), run.args.requests)
    after = []
    for _ in range(run.args.reopened):
        with CacheSet(CacheConfig(), codec.fingerprint, inline=True) as caches:
            engine = _open(model, codec, caches)
            list(engine.generate([[5, 6, 7] * 10] * _SLOTS, SamplingParams(max_tokens=8, temperature=0.0)))
            del engine
        gc.collect()  # a target and its recorded steps refer to each other
        if model.device.type == "cuda":
            torch.cuda.empty_cache()
        after.append(device_memory(model.device))
    left = {name: after[-1][name] - after[0][name] for name in _MOST_LEFT}
    run.say(f"{found['answers']} answers, {found['changed']} changed, {found['unfinished']} unfinished, memory over "
            f"that of the first quarter {found['growth']}, left behind {left}")  # fmt: skip
    is_wrong = found["changed"] or found["unfinished"] or found["growth"] > _MOST_GROWTH
    is_wrong = is_wrong or any(left[name] > most for name, most in _MOST_LEFT.items())
    return run.end(**found, left=left, reopened=after, is_wrong=bool(is_wrong))


def _open(model: PreTrainedModel, codec: TextCodec, caches: CacheSet) -> Engine:
    draft, config = DraftConfig(num_speculative_tokens=16), EngineConfig(max_num_seqs=_SLOTS)
    return open_engine(model, "ssd", slots=_SLOTS, length=512, draft=draft, config=config, codec=codec, caches=caches)


def soak(
    engine: Engine, caches: CacheSet, questions: Sequence[tuple[list[int], SamplingParams]], number: int
) -> dict[str, Any]:
    """``number`` requests drawn from the questions, twice as many waiting as there are slots."""
    chance = random.Random(0)
    answers: dict[int, set[tuple[int, ...]]] = defaultdict(set)
    counts: Counter[str] = Counter()
    asked: dict[str, int] = {}
    said: dict[str, list[int]] = {}
    to_cancel: dict[str, int] = {}
    num_asked = num_ended = num_steps = 0
    memory = [_memory(engine, 0)]
    while num_ended < number:
        while num_asked < number and len(asked) < 2 * _SLOTS:
            name, index = str(num_asked), chance.randrange(len(questions))
            prompt, sampling = questions[index]
            engine.submit(Request(request_id=name, prompt_token_ids=tuple(prompt), sampling=sampling))
            asked[name], said[name] = index, []
            if num_asked % _CANCELLED == _CANCELLED - 1:
                to_cancel[name] = num_steps + chance.randrange(12)
            num_asked += 1
        for name in [name for name, step in to_cancel.items() if step <= num_steps]:
            engine.cancel(name)
            del to_cancel[name]
        for output in engine.step():
            said[output.request_id] += output.token_ids
            if output.finish_reason is None:
                continue
            name, num_ended = output.request_id, num_ended + 1
            index, tokens = asked.pop(name), tuple(said.pop(name))
            to_cancel.pop(name, None)
            if output.finish_reason is FinishReason.CANCELLED:
                counts["cancelled"] += 1
            elif output.finish_reason is FinishReason.ERROR:
                counts["changed"] += 1
            else:
                counts["answers"] += 1
                answers[index].add(tokens)
        num_steps += 1
        if num_steps % 32 == 0:
            caches.maintain()
        if 4 * num_ended >= number * len(memory):
            memory.append(_memory(engine, num_ended))
    engine.step()  # the last cancellations
    violations = engine.check()
    for index, different in answers.items():  # now that every slot is free
        right, *others = sorted(different)
        counts["changed"] += sum(differs(engine.target, *questions[index], other, right) for other in others)
    held = [each["allocated"] for each in memory]
    return {
        "steps": num_steps,
        **{name: counts[name] for name in ("answers", "cancelled", "changed")},
        "unfinished": len(asked) + len(violations),
        "memory": memory,
        "growth": round(held[-1] / held[1], 4) if held[1] else 1.0,
    }


def _questions(codec: TextCodec) -> list[tuple[list[int], SamplingParams]]:
    """Prompts with sampling whose answer is always the same: greedy or with a seed."""
    found = []
    for index, text in enumerate(snippets(5)[:_QUESTIONS]):
        kinds = (
            SamplingParams(max_tokens=24, temperature=0.0),
            SamplingParams(max_tokens=24, temperature=0.8, seed=index),
            SamplingParams(max_tokens=24, temperature=0.8, top_p=0.9, top_k=50, seed=index),
            SamplingParams(max_tokens=40, temperature=0.0, repetition_penalty=1.1),
            SamplingParams(max_tokens=24, temperature=1.0, seed=index, logprobs=3),
        )
        found.append((codec.encode_prompt(text)[-(40 + 5 * index) :], kinds[index % len(kinds)]))
    return found


def device_memory(device: torch.device) -> dict[str, int]:
    """Bytes: held by tensors, taken from the device by torch, in use on the device by anyone. Zeros on a CPU."""
    if device.type != "cuda":
        return {"allocated": 0, "reserved": 0, "in_use": 0}
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return {
        "allocated": torch.cuda.memory_allocated(device),
        "reserved": torch.cuda.memory_reserved(device),
        "in_use": total - free,
    }


def _memory(engine: Engine, num_ended: int) -> dict[str, Any]:
    steps = engine.target.steps if isinstance(engine.target, SlotTarget) else None
    recorded = 0 if steps is None else steps.num_recorded
    return {"requests": num_ended, **device_memory(engine.target.device), "recorded": recorded}


if __name__ == "__main__":
    sys.exit(main())
