"""A thousand requests of every kind on eight slots: all end, none is wrong, and nothing is left behind."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from ssd.config import CacheConfig, DraftConfig, EngineConfig, SamplingParams
from ssd.drafting import HybridDrafter
from ssd.drafting.suffix_drafter import SuffixDrafter
from ssd.engine import Engine, FinishReason, Request
from ssd.engine.sequence import Sequence
from ssd.model.draft.drafter import DraftModelDrafter
from ssd.model.loading.load_target import open_target
from ssd.model.runners.slot_runner import SlotRunner
from ssd.retrieval.cache_manager import CacheManager
from tests.models import VOCAB, tiny_model
from tests.reference.scheduling import plain_decode

NUM_REQUESTS = 1000
SLOTS = 8
MAX_LENGTH = 120
EOS = 2


@dataclass(slots=True)
class Asked:
    """One choice, when it arrives, when it is cancelled (never: -1), and what came of it."""

    request: Request
    cancel_after: int
    token_ids: list[int]
    reason: FinishReason | None = None
    num_cached_tokens: int = 0


def traffic(random: np.random.Generator) -> Iterator[list[Asked]]:
    """Groups of choices of one prompt, ``NUM_REQUESTS`` choices in all; many prompts begin alike."""
    stems = [random.integers(3, VOCAB, length).tolist() for length in (12, 40, 70)]
    number = 0
    while number < NUM_REQUESTS:
        stem = stems[int(random.integers(len(stems)))]
        shared = stem[: int(random.integers(len(stem) + 1))]
        prompt = (*shared, *random.integers(3, VOCAB, int(random.integers(1, 30))).tolist())
        max_tokens = int(random.integers(1, min(24, MAX_LENGTH - len(prompt)) + 1))
        temperature = float(random.choice([0.0, 0.0, 1.0]))
        sampling = SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=0.9 if temperature else 1.0,
            seed=int(random.integers(1000)),
        )
        fields: dict[str, Any] = {
            "namespace": [None, "default", "default", "other"][int(random.integers(4))],
            "cache_salt": [None, None, "salt"][int(random.integers(3))],
            "tenant": [None, "a", "b"][int(random.integers(3))],
            "priority": int(random.integers(-2, 3)),
        }
        count = min(int(random.choice([1, 1, 1, 2, 4])), NUM_REQUESTS - number)
        group = []
        for choice in range(count):
            asked = Request(
                request_id=str(number + choice),
                prompt_token_ids=prompt,
                sampling=sampling,
                choice_index=choice,
                **fields,
            )
            cancel_after = int(random.integers(0, 30)) if random.random() < 0.2 else -1
            group.append(Asked(asked, cancel_after, []))
        number += count
        yield group


def run(engine: Engine, random: np.random.Generator) -> dict[str, Asked]:
    """Feed the traffic as the engine steps, in bursts and with pauses in which it becomes idle."""
    all_asked: dict[str, Asked] = {}
    cancel_at: dict[int, list[str]] = {}
    arriving = traffic(random)
    step = 0
    while True:
        for name in cancel_at.pop(step, []):
            engine.cancel(name)
        for output in engine.step():
            asked = all_asked[output.request_id]
            assert asked.reason is None, "an output after the end"
            asked.token_ids += output.token_ids
            asked.reason = output.finish_reason
            asked.num_cached_tokens = output.stats.num_cached_tokens
        if step % 10 == 0:
            assert engine.check() == []
        step += 1
        waits = engine.metrics.num_waiting
        if engine.has_work() and (waits > 20 or random.random() < 0.6):
            continue
        group = next(arriving, None)
        if group is None:
            if not engine.has_work() and not cancel_at:
                return all_asked
            continue
        for asked in group:
            all_asked[asked.request.request_id] = asked
            engine.submit(asked.request)
            if asked.cancel_after >= 0:
                cancel_at.setdefault(step + asked.cancel_after, []).append(asked.request.request_id)


@pytest.mark.slow
@pytest.mark.parametrize("is_asynchronous", [False, True])
def test_a_thousand_requests_leave_nothing_behind_and_are_all_right(
    is_asynchronous: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_model()
    target = open_target(model, num_slots=SLOTS, max_length=MAX_LENGTH, max_draft_tokens=4)
    draft_target = open_target(
        tiny_model(hidden_size=32, num_hidden_layers=1), num_slots=SLOTS, max_length=MAX_LENGTH, max_draft_tokens=7
    )
    assert isinstance(target, SlotRunner)
    target.is_asynchronous = is_asynchronous
    with CacheManager(CacheConfig(), fingerprint="0" * 32, inline=True) as caches:
        suffix, model_drafter = SuffixDrafter(), DraftModelDrafter(draft_target)
        engine = Engine(
            target,
            drafter=HybridDrafter([suffix, model_drafter]),
            caches=caches,
            config=EngineConfig(max_num_seqs=SLOTS, prefill_chunk_tokens=48, scheduling_policy="priority"),
            draft=DraftConfig(num_speculative_tokens=4),
            eos_token_ids=[EOS],
        )
        engine.warm_up()
        threads, kv_bytes = threading.active_count(), kv_cache_bytes(target)
        asked = run(engine, np.random.default_rng(0))

        assert threading.active_count() == threads
        assert kv_cache_bytes(target) == kv_bytes
        assert engine.check() == [] and not engine.has_work()
        assert not model_drafter._last
        assert not suffix._rows
        gc.collect()
        assert not [found for found in gc.get_objects() if type(found) is Sequence]

    metrics = engine.metrics
    assert metrics.drafter_failures == metrics.integrity_violations == 0
    assert sum(metrics.num_requests_finished.values()) == len(asked) == NUM_REQUESTS
    # All that is claimed to work was at work.
    assert metrics.num_preemptions > 10 and metrics.num_accepted_tokens > 100
    assert metrics.prefix_cache_hits > metrics.prefix_cache_queries // 4
    finished, wrong = 0, []
    plain_model = tiny_model()
    known: dict[tuple[object, ...], list[int]] = {}
    for name, one in asked.items():
        request = one.request
        assert one.reason is not None
        if one.reason is FinishReason.CANCELLED:
            continue
        finished += 1
        key = (request.prompt_token_ids, request.sampling, request.choice_index)
        if key not in known:
            known[key] = plain_decode(plain_model, *key, eos=EOS)
        if one.token_ids != known[key]:
            wrong.append(name)
    with capsys.disabled():
        print(
            f"\nsoak: {finished} of {NUM_REQUESTS} finished, {metrics.num_preemptions} preemptions, "
            f"{metrics.prefix_cache_hits} of {metrics.prefix_cache_queries} prompt tokens reused, "
            f"{metrics.num_accepted_tokens} of {metrics.num_draft_tokens} drafted tokens accepted"
        )
    assert finished > NUM_REQUESTS * 0.75 and not wrong, wrong


def kv_cache_bytes(target: SlotRunner) -> int:
    """Bytes that the tensors of the KV cache take."""
    return sum(tensor.nbytes for pair in target.kv_cache._layers.values() for tensor in pair)
