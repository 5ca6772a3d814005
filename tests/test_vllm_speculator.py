"""The speculator for vLLM's V2 runner on hand-made states: against its slow twin, and what it learns."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.vllm.states import HandMadeRunner, LateEvent, Scripted, vllm_config
from ssd.bundled import MODEL_PATH
from ssd.errors import ConfigError
from ssd.integrations import vllm_plugin
from ssd.integrations.requests import StopRules, before_stop
from ssd.integrations.vllm import SuffixProposer
from ssd.integrations.vllm_plugin import Hook, missing
from ssd.integrations.vllm_v2 import Speculator
from ssd.text.codec import TextCodec
from tests.redis_server import RedisServer, redis_server
from tests.reference.speculator import Said, SlowSpeculator
from tests.vllm_batch import vllm_config as v1_config
from tests.waiting import wait_until

__all__ = ["redis_server"]

WIDTH, LENGTH, REQUESTS, VOCAB_SIZE = 4, 96, 6, 4096
CPU = torch.device("cpu")


def made(lag: int = 0, **ssd_settings: Any) -> tuple[HandMadeRunner, Speculator]:
    """A runner and its speculator."""
    runner = HandMadeRunner(max_num_reqs=REQUESTS, max_model_len=LENGTH, width=WIDTH, lag=lag)
    config = vllm_config(
        str(MODEL_PATH), width=WIDTH, max_num_reqs=REQUESTS, max_model_len=LENGTH, vocab_size=VOCAB_SIZE,
        rebuild_interval_s=3600, **ssd_settings,
    )  # fmt: skip
    runner.speculator = Speculator(config, CPU, runner.states, lambda: LateEvent(runner))
    return runner, runner.speculator


def learned_by(speculator: Speculator) -> list[tuple[int, ...]]:
    """Fills while the speculator learns."""
    sequences: list[tuple[int, ...]] = []
    assert speculator._core is not None
    cache = speculator._core.learner.namespace.cache
    cache.add_listener(lambda pieces: sequences.extend(tuple(piece.tolist()) for piece in pieces))
    return sequences


def scripted(seed: int, *, num_prompt: int = 10, num_output: int = 200, max_tokens: int = 12) -> Scripted:
    """Tokens that do not repeat."""
    tokens = np.random.default_rng(seed).integers(1, VOCAB_SIZE, num_prompt + num_output).tolist()
    return Scripted(tokens[:num_prompt], tokens[num_prompt:], max_tokens)


def repetitive(random: np.random.Generator) -> Scripted:
    """Tokens of one of three phrases over and over, some of them changed; now and then an end of text."""
    phrase = np.random.default_rng(int(random.integers(3))).integers(0, 40, 7)
    tokens = np.tile(phrase, 40)
    changed = random.random(len(tokens)) < 0.1
    tokens[changed] = random.integers(0, 40, changed.sum())
    cut = int(random.integers(1, 20))
    return Scripted(tokens[:cut].tolist(), tokens[cut:].tolist(), int(random.integers(1, 60)))


def client_text(request: Scripted) -> tuple[int, ...]:
    return tuple(request.text[: request.client_length])


@settings(max_examples=12)
@given(st.integers(0, 2**32), st.integers(0, 3), st.data())
def test_drafts_and_chances_are_those_of_the_twin(seed: int, lag: int, data: st.DataObject) -> None:
    random = np.random.default_rng(seed)
    runner, fast = made(lag)
    core = fast._core
    assert core is not None
    learned = learned_by(fast)
    slow = SlowSpeculator(
        width=WIDTH, max_length=LENGTH, vocab_size=VOCAB_SIZE, ends=sorted(core.learner.end_of_text_ids), lag=lag
    )
    stays: dict[str, str] = {}  # the twin's name of a stay in the slots
    away: dict[str, Scripted] = {}
    truth: Counter[tuple[int, ...]] = Counter()
    for number in range(data.draw(st.integers(5, 30), label="steps")):
        over = [name for name, r in runner.requests.items() if len(r.said) >= r.max_tokens and random.random() < 0.7]
        over += [name for name, r in runner.requests.items() if len(r.text) > LENGTH - 8 and name not in over]
        if over:
            truth.update(client_text(runner.requests[name]) for name in over)
            runner.end(over)
            for name in over:
                slow.end(stays.pop(name))
        if runner.requests and random.random() < 0.15:
            name = str(random.choice(list(runner.requests)))
            away[name] = runner.preempt(name)
        room = REQUESTS - len(runner.requests)
        coming = {name: away.pop(name) for name in list(away)[:room] if random.random() < 0.5}
        while len(runner.requests) + len(coming) < REQUESTS and random.random() < 0.4:
            coming[f"{number}-{len(coming)}"] = repetitive(random)
        if coming:
            runner.begin(coming)
            for name, request in coming.items():
                if name in stays:
                    slow.end(stays[name])
                stays[name] = f"{name} {number}"
                slow.begin(stays[name], request.text, len(request.prompt))
        names = [name for name in random.permutation(sorted(runner.requests)).tolist() if random.random() < 0.9]
        if not names:
            continue
        waiting = {name for name in names if random.random() < 0.2}
        before = {name: len(runner.requests[name].said) for name in names}
        snapshot = core.learner.namespace.cache.snapshot()
        got = runner.step(names, waiting)
        said = [Said(stays[name], runner.requests[name].said[before[name] :]) for name in names]
        texts = {stays[name]: runner.requests[name].text for name in names}
        # What ended and had not arrived is learned within the step, before it drafts: look again.
        snapshot = core.learner.namespace.cache.snapshot()
        want = slow.step(said, [bool(new) for _, new in said], texts, snapshot)
        chances = fast.draft_token_confidence_probs[: len(names)]
        for row, (draft, estimates) in enumerate(want):
            last = int(runner.last_sampled[runner.requests[names[row]].slot, 0])
            assert got[row].tolist() == draft + [last] * (WIDTH - len(draft))
            padded = np.array(estimates + [0.0] * (WIDTH - len(draft)))
            np.testing.assert_allclose(chances[row].numpy(), padded, rtol=1e-6)
    truth.update(tuple(request.text) for request in runner.requests.values())
    fast.close()
    assert fast.stats().num_failures == 0
    assert {text for text in learned if len(text) > 1} <= {text for text in truth} | {
        tuple(r.text) for r in away.values()
    }
