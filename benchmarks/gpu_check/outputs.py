"""Whole outputs on the device: what plain decoding says, faster with use, right for thousands of requests; tests."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import torch
from transformers import PreTrainedModel

from benchmarks.exactness import Report, Setting, compare, covering_settings, differs, reference_greedy, run
from benchmarks.gpu_check.scene import Found, Keep, Scene, device_memory, let_go
from benchmarks.growth import repeat, run_stream, summary
from benchmarks.steps import passes_of
from benchmarks.streams import made_stream
from benchmarks.workloads import MIXED, snippets
from ssd.config import CacheConfig, DraftConfig, EngineConfig, SamplingParams
from ssd.drafting import make_drafter
from ssd.engine import Engine, Request
from ssd.engine.request import FinishReason
from ssd.model.loading.load_target import load_model, open_target
from ssd.model.target import Target
from ssd.model.ways.slot_target import SlotTarget
from ssd.retrieval.cache import CacheSet
from ssd.text.codec import TextCodec

_TYPES = ("float32", "bfloat16", "float16")


def exactness(scene: Scene, keep: Keep) -> Found:
    """Every pair of drafter, draft limit and batch size, greedy and sampled.

    In each type the same bits as without speculation, `settle_exactness` asked for them; float32 against ``generate``.
    """
    return _exactness(scene, scene.model, keep)


def growth(scene: Scene, keep: Keep) -> Found:
    """The same requests twice, then a stream with repeats, both at batch 1, float32, speculation on and off in turn."""
    return _growth(scene, scene.model, "float32", keep)


def growth_real(scene: Scene, keep: Keep) -> Found:
    """The same on a pretrained model in bfloat16, and its outputs in float32 compared. Nothing where there is none."""
    if scene.real is None:
        return {"passed": True, "skipped": "no pretrained model: name its directory with --real"}
    found = _growth(scene, scene.real, "bfloat16", keep)
    found["exactness"] = _exactness(scene, scene.real, lambda _: None, types=("float32",), drafters=("ssd", "random"))
    found["passed"] &= found["exactness"]["passed"]
    return found


def _exactness(
    scene: Scene,
    name: str,
    keep: Keep,
    *,
    types: Sequence[str] = _TYPES,
    drafters: Sequence[str] = ("ssd", "random", "oracle"),
) -> Found:
    sizes, codec = scene.sizes, TextCodec.load(name)
    eos = codec.eos_token_ids
    prompts = [codec.encode_prompt(text)[-160:] for text in snippets(1)[: sizes.prompts]]
    greedy = [SamplingParams(max_tokens=sizes.max_tokens, temperature=0.0)] * len(prompts)
    sampled = [
        SamplingParams(max_tokens=sizes.max_tokens, temperature=0.8, top_p=0.95, seed=i) for i in range(len(prompts))
    ]
    found: Found = {"passed": True}
    for dtype in types:
        model = load_model(name, dtype=dtype, device=scene.device)
        target = open_target(model, num_slots=16, max_length=512, exact="on")
        report, is_long = Report(), dtype == "float32"
        expected, _ = run(target, prompts, greedy, None, eos_token_ids=eos)
        drawn, _ = run(target, prompts, sampled, None, eos_token_ids=eos)
        settings = covering_settings(drafters, [1, 4, 16], [1, 4, 16]) if is_long else [Setting("ssd", 16, 8)]
        if is_long:
            theirs = reference_greedy(target, prompts, sizes.max_tokens, eos)
            compare(target, prompts, greedy, theirs, settings[0], eos_token_ids=eos, report=report)
        for setting in settings:
            compare(target, prompts, greedy, expected, setting, eos_token_ids=eos, report=report)
            compare(target, prompts, sampled, drawn, setting, eos_token_ids=eos, report=report)
        print(f"exactness {dtype}: {report}; settings {', '.join(map(str, settings))}", flush=True)
        found[dtype] = {
            "way": target.way,
            "passes": passes_of(target),
            "exact": str(target.exactness),
            "cost": round(target.exactness.cost, 3),
            "settings": [str(setting) for setting in settings],
            "tokens": report.num_tokens,
            "ties": report.num_ties,
            "mismatches": len(report.mismatches),
            "first_mismatches": report.mismatches[:5],
            "first_differences_per_10k_tokens": round(
                1e4 * (report.num_ties + len(report.mismatches)) / max(1, report.num_tokens), 3
            ),
            "passed": report.passed,
        }
        found["passed"] &= found[dtype]["passed"]
        keep(found)
    return found


def _growth(scene: Scene, name: str, dtype: str, keep: Keep) -> Found:
    sizes, codec = scene.sizes, TextCodec.load(name)
    max_tokens = 96 if scene.device != "cpu" else 8
    model = load_model(name, dtype=dtype, device=scene.device)
    found: Found = {"passed": True, "dtype": dtype}
    found["repeated"] = repeat(model, codec, sizes.repeated, max_tokens, 64)
    keep(found)
    print(f"growth: the same requests again {found['repeated']['speedup_second']}x", flush=True)
    stream = made_stream(MIXED, codec, sizes.requests, seed=0, most_tokens=1024 - max_tokens)
    windows, comparison = run_stream(model, codec, stream, "greedy", max_tokens, 64, window=8, batch=1, length=1024)
    found["stream"] = row = summary(stream, "greedy", windows, comparison)
    if dtype == "float32":
        found["passed"] = not row["mismatches"] and not found["repeated"]["mismatches"]
    print(f"growth: on/off {row['speedup_first']} at first, {row['speedup_last']} at last, "
          f"tokens per step {row['acceptance_length_first']} to {row['acceptance_length_last']}")  # fmt: skip
    return found


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


def kernels(scene: Scene, keep: Keep) -> Found:
    """Warm an engine up on the CPU: it compiles all that a first request could wait for."""
    began = time.perf_counter()
    codec = TextCodec.load(scene.model)
    with CacheSet(CacheConfig(), codec.fingerprint, inline=True) as caches:
        engine = Engine.from_pretrained(
            scene.model,
            device="cpu",
            caches=caches,
            codec=codec,
            config=EngineConfig(max_num_seqs=2, max_model_len=128),
            draft=DraftConfig(num_speculative_tokens=8),
        )
        engine.warm_up()
        list(engine.generate([[5, 6, 7, 8] * 8] * 2))
        caches.flush()
        list(engine.generate([[5, 6, 7, 8] * 8] * 2))
    return {"passed": True, "compiled_s": round(time.perf_counter() - began, 1)}


FILES: Final = (
    "test_triton_attention.py",
    "test_triton_sampling.py",
    "test_static_steps.py",
    "test_pass_noise.py",
    "test_triton_layers.py",
    "test_taps.py",
    "test_take_weights.py",
)
"""Each in a process of its own, all at once: what they wait for is a compiler."""

_TESTS = Path(__file__).parent.parent.parent / "tests"
_KEPT_CHARACTERS = 2000


def suite(scene: Scene, keep: Keep) -> Found:
    """What each file's tests say at their end, and of a file that fails what was said before."""
    # Warnings of versions that the project is not developed with shall fail nothing here.
    options = ("-q", "-p", "no:cacheprovider", "-W", "default")
    # Where there is a device, kernels are compiled, whatever tells the tests so.
    environment = os.environ | ({"TRITON_INTERPRET": "0"} if scene.device != "cpu" else {})
    found: Found = {"passed": True, "files": {}}
    with ExitStack() as stack:
        running = {}
        for name in FILES if scene.device != "cpu" else FILES[3:4]:
            log = stack.enter_context(tempfile.TemporaryFile())
            command = [sys.executable, "-m", "pytest", *options, str(_TESTS / name)]
            running[name] = log, subprocess.Popen(command, cwd=_TESTS.parent, env=environment, stdout=log, stderr=log)
        for name, (log, process) in running.items():
            status = process.wait()
            log.seek(0)
            said = log.read().decode(errors="replace").strip()
            found["files"][name] = said.splitlines()[-1:] if not status else said[-_KEPT_CHARACTERS:]
            found["passed"] &= not status
            print(f"tests {name}: {said.splitlines()[-1:]}", flush=True)
            keep(found)
    return found
