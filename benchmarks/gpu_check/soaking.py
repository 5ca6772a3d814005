"""Thousands of requests, some cancelled: is every answer what it was, and is the device's memory what it was?"""

from __future__ import annotations

import random
import time
from collections import Counter, defaultdict
from typing import Any, Final

import torch
from transformers import PreTrainedModel

from benchmarks.exactness import differs
from benchmarks.gpu_check.memory import device_memory, let_go
from benchmarks.gpu_check.scene import Found, Keep, Scene
from benchmarks.workloads import snippets
from ssd.config import CacheConfig, DraftConfig, EngineConfig, SamplingParams
from ssd.drafting import make_drafter
from ssd.engine import Engine, Request
from ssd.engine.request import FinishReason
from ssd.model.loading.load_target import load_model, open_target
from ssd.model.target import Target
from ssd.model.ways.slot_target import SlotTarget
from ssd.retrieval.cache import CacheSet
from ssd.text.codec import TextCodec

_SLOTS: Final = 16
_MAX_LENGTH: Final = 512
_QUESTIONS: Final = 60
_CANCELLED: Final = 7
"""Each so-manieth is cancelled at some step."""
_MOST_GROWTH: Final = 1.01
"""Of memory between the first quarter, when all has been at work once, and the end."""
_MOST_LEFT_BYTES: Final = 4 << 20
"""On the device after the last engine was closed, beyond what was there after the first."""
_MOST_LEFT_IN_USE: Final = 64 << 20
"""The same of all that is in use there: recorded graphs are no tensors."""


def soak(scene: Scene, keep: Keep) -> Found:
    """Requests of many kinds, and then engines opened and closed; see the fields for what must be."""
    codec = TextCodec.load(scene.model)
    model = load_model(scene.model, dtype="float32", device=scene.device)
    found: Found = {"passed": True}
    found |= _soak(scene, model, codec)
    found["passed"] = not found["changed"] and not found["unfinished"] and found["growth"] <= _MOST_GROWTH
    print(
        f"soak: {found['answers']} answers, {found['changed']} changed, "
        f"{found['cancelled']} cancelled, memory over that of the first quarter {found['growth']}",
        flush=True,
    )
    keep(found)
    found["reopened"] = _reopen(scene, model, codec)
    found["passed"] &= found["reopened"]["left_bytes"] <= _MOST_LEFT_BYTES
    found["passed"] &= found["reopened"]["left_in_use"] <= _MOST_LEFT_IN_USE
    left = found["reopened"]["left_bytes"], found["reopened"]["left_in_use"]
    print(
        f"reopened {scene.sizes.reopened} times: {left[0]} bytes of tensors, {left[1]} of all more than after the first"
    )
    return found


def _open(model: PreTrainedModel, codec: TextCodec, caches: CacheSet) -> Engine:
    draft = DraftConfig(num_speculative_tokens=16)
    target = open_target(
        model, num_slots=_SLOTS, max_length=_MAX_LENGTH, max_draft_tokens=draft.num_speculative_tokens, keeps_top=True
    )
    return Engine(
        target,
        drafter=make_drafter("ssd", draft),
        codec=codec,
        caches=caches,
        config=EngineConfig(max_num_seqs=_SLOTS),
        draft=draft,
    )


def _soak(scene: Scene, model: PreTrainedModel, codec: TextCodec) -> Found:
    number = scene.sizes.soak_requests
    chance = random.Random(0)
    questions = _questions(codec)
    answers: dict[int, set[tuple[int, ...]]] = defaultdict(set)
    counts: Counter[str] = Counter()
    memory: list[dict[str, Any]] = []
    with CacheSet(CacheConfig(), codec.fingerprint, inline=True) as caches:
        engine = _open(model, codec, caches)
        engine.warm_up()
        asked: dict[str, int] = {}
        said: dict[str, list[int]] = {}
        to_cancel: dict[str, int] = {}
        began, num_asked, num_ended, num_steps = time.perf_counter(), 0, 0, 0
        memory.append(_memory(engine.target, 0))
        while num_ended < number:
            while num_asked < number and len(asked) < 2 * _SLOTS:
                name, index = f"{num_asked}", chance.randrange(len(questions))
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
                memory.append(_memory(engine.target, num_ended))
        engine.step()  # the last cancellations
        violations = engine.check()
        for index, different in answers.items():  # now that every slot is free
            right, *others = sorted(different)
            for other in others:
                counts["changed"] += differs(engine.target, *questions[index], other, right)
    held = [each["allocated"] for each in memory]
    return {
        "requests": number,
        "steps": num_steps,
        "soak_s": round(time.perf_counter() - began, 1),
        "answers": counts["answers"],
        "cancelled": counts["cancelled"],
        "changed": counts["changed"],
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


def _reopen(scene: Scene, model: PreTrainedModel, codec: TextCodec) -> Found:
    """Device memory after each of several engines was opened, used and closed."""
    after = []
    for _ in range(scene.sizes.reopened):
        with CacheSet(CacheConfig(), codec.fingerprint, inline=True) as caches:
            engine = _open(model, codec, caches)
            engine.warm_up()
            list(engine.generate([[5, 6, 7] * 10] * _SLOTS, SamplingParams(max_tokens=8, temperature=0.0)))
            del engine
        let_go(torch.device(scene.device))
        after.append(device_memory(torch.device(scene.device)))
    left, left_in_use = (after[-1][name] - after[0][name] for name in ("allocated", "in_use"))
    return {"after": after, "left_bytes": left, "left_in_use": left_in_use}


def _memory(target: Target, num_ended: int) -> dict[str, Any]:
    steps = target.steps if isinstance(target, SlotTarget) else None
    return {
        "requests": num_ended,
        **device_memory(target.device),
        "recorded": 0 if steps is None else steps.num_recorded,
    }
