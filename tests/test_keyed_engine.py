"""Requests of one stream on the bundled model: what was said before comes again in a few passes, token for token."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
from transformers import PreTrainedModel

from benchmarks.workloads import snippets
from ssd.bundled import MODEL_PATH
from ssd.config import CacheConfig, DraftConfig, EngineConfig, SamplingParams
from ssd.drafting.drafter import SuffixDrafter
from ssd.engine import Engine
from ssd.engine.request import Request, RequestStats
from ssd.model.loading.load_target import load_model, open_target
from ssd.retrieval.cache import CacheSet
from ssd.text.codec import TextCodec

SAMPLING = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=48, ignore_eos=True)


@cache
def model() -> PreTrainedModel:
    return load_model(MODEL_PATH, dtype="float32", device="cpu")


@pytest.fixture(params=["chain", "tree"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """It drafts from the table of keyed choices alone."""
    codec = TextCodec.load(str(MODEL_PATH))
    draft = DraftConfig(draft_shape=request.param, retrieval=False, recycling=False)
    target = open_target(model(), num_slots=4, max_length=256, max_draft_tokens=draft.num_speculative_tokens)
    with CacheSet(CacheConfig(), fingerprint=codec.fingerprint, inline=True) as caches:
        yield Engine(
            target,
            drafter=SuffixDrafter(retrieval=False, recycling=False),
            caches=caches,
            draft=draft,
            config=EngineConfig(max_num_seqs=4, coupled_streams=4),
        )


def said(engine: Engine, name: str, prompts: list[list[int]], streams: int) -> tuple[list[list[int]], RequestStats]:
    """What each stream says to each prompt, all at once, and the counts of all together."""
    outputs: dict[str, list[int]] = {}
    total = RequestStats()
    for stream in range(streams):
        for number, prompt in enumerate(prompts):
            request_id = f"{name} {stream} {number}"
            outputs[request_id] = []
            engine.submit(
                Request(request_id=request_id, prompt_token_ids=tuple(prompt), sampling=SAMPLING, noise_stream=stream)
            )
    running = len(outputs)
    while running:
        for output in engine.step():
            outputs[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                running -= 1
                total.num_output_tokens += output.stats.num_output_tokens
                total.num_verify_steps += output.stats.num_verify_steps
    return list(outputs.values()), total


def test_each_stream_says_again_what_it_said_in_a_few_passes(engine: Engine) -> None:
    codec = TextCodec.load(str(MODEL_PATH))
    prompts = [codec.encode_prompt(text)[-64:] for text in snippets(3)[:2]]
    for attempt in range(4):
        outputs, stats = said(engine, str(attempt), prompts, 4)
        if attempt == 0:
            first = outputs
        assert outputs == first
    assert len({tuple(output) for output in first}) == len(first)
    assert stats.num_output_tokens > 8 * stats.num_verify_steps
