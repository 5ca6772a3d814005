"""What is done to all rows of a pass in one call is what is done to each alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd.config import CacheConfig, DraftConfig, EngineConfig, SamplingParams
from ssd.drafting import make_drafter
from ssd.drafting.noise import SequenceNoise
from ssd.drafting.protocol import Draft
from ssd.engine import Engine, Request
from ssd.engine.batch import LEFT, Batch, append_said, begin_fed
from ssd.engine.sequence import Sequence
from ssd.model.loading.load_target import open_target
from ssd.model.sampling.target_tokens import noise_of
from ssd.retrieval.cache import CacheSet
from tests.models import tiny_model

IDS = st.integers(0, 5)
SAID = st.lists(IDS, max_size=4)
WIDE = Draft(np.zeros(2, np.int32))


def sequence_of(prompt: list[int], **sampling: Any) -> Sequence:
    seed = sampling.setdefault("seed", 0)
    request = Request(request_id="a", prompt_token_ids=tuple(prompt), sampling=SamplingParams(**sampling))
    noise = SequenceNoise.seeded(seed)
    return Sequence(request, max_length=24, eos_token_ids=(5,), stream=None, noise=noise)


def settings_of(random: np.random.Generator) -> dict[str, Any]:
    return {
        "max_tokens": int(random.integers(1, 12)),
        "temperature": float(random.choice([0.0, 1e-60, 0.7, 1.3])),
        "stop_token_ids": tuple(random.integers(0, 5, int(random.integers(0, 2))).tolist()),
        "ignore_eos": bool(random.integers(0, 2)),
        "top_k": int(random.choice([0, 0, 3])),
        "seed": int(random.integers(0, 1000)),
    }


@given(st.integers(0, 2**32 - 1), st.lists(st.tuples(st.lists(IDS, min_size=1, max_size=9), SAID), max_size=5))
def test_rows_take_what_each_takes_alone(seed: int, rows: list[tuple[list[int], list[int]]]) -> None:
    random = np.random.default_rng(seed)
    asked = [settings_of(random) for _ in rows]
    batch = Batch([sequence_of(prompt, **each) for (prompt, _), each in zip(rows, asked, strict=True)])
    said = np.zeros((len(rows), 4), np.int64)
    for row, (_, tokens) in zip(said, rows, strict=True):
        row[: len(tokens)] = tokens
    append_said(batch.address, said, np.array([len(tokens) for _, tokens in rows], np.int64))
    for b, ((prompt, tokens), each) in enumerate(zip(rows, asked, strict=True)):
        alone = sequence_of(prompt, **each)
        is_left = not tokens or alone.take(tokens, None).finish_reason is not None
        found = batch.sequences[b]
        assert batch.taken[b] == (LEFT if is_left else len(tokens))
        assert found.context.tolist() == (prompt if is_left else [*prompt, *tokens])
        assert found.stats.num_output_tokens == (0 if is_left else len(tokens))


@given(st.integers(0, 2**32 - 1), st.lists(st.lists(IDS, min_size=1, max_size=9), min_size=1, max_size=5))
def test_noise_of_all_rows_is_that_of_each(seed: int, prompts: list[list[int]]) -> None:
    random = np.random.default_rng(seed)
    batch = Batch([sequence_of(prompt, **settings_of(random)) for prompt in prompts])
    fed, before, lengths = np.zeros((len(prompts), 3), np.int64), np.zeros(len(prompts), np.int32), batch.lengths
    begin_fed(batch.address, fed, before, lengths)
    assert fed[:, 0].tolist() == [prompt[-1] for prompt in prompts]
    assert before.tolist() == [prompt[-2] if len(prompt) > 1 else -1 for prompt in prompts]
    if not batch.chooses_by_position:
        return
    found, expected = batch.noise(lengths, 3), noise_of([s.sampling_row(WIDE) for s in batch.sequences], 3)
    drawn = found.temperatures > 0
    if expected is None:
        assert not drawn.any()
        return
    assert found.temperatures.tolist() == expected.temperatures.tolist()
    # Keys of positions past a row's own are meaningless, and so are those of rows that draw nothing.
    assert (found.keys == expected.keys)[drawn].all()


@pytest.mark.parametrize("runs_beside_host", [False, True])
@settings(max_examples=3)
@given(seed=st.integers(0, 2**32 - 1))
def test_counts_of_requests_and_of_outputs_add_up(runs_beside_host: bool, seed: int) -> None:
    random = np.random.default_rng(seed)
    target = open_target(tiny_model(), num_slots=3, max_length=64, max_draft_tokens=4)
    target.runs_beside_host = runs_beside_host
    draft = DraftConfig(num_speculative_tokens=4)
    with CacheSet(CacheConfig(), fingerprint="0" * 32, inline=True) as caches:
        config = EngineConfig(max_num_seqs=3)
        engine = Engine(target, drafter=make_drafter("ssd", draft), caches=caches, config=config, draft=draft)
        prompts = random.integers(3, 50, (3, 9))
        for number in range(6):
            sampling = SamplingParams(max_tokens=int(random.integers(3, 30)), temperature=0.0, ignore_eos=True)
            prompt = tuple(prompts[number % 3].tolist())
            engine.submit(Request(request_id=str(number), prompt_token_ids=prompt, sampling=sampling, keeps_steps=True))
        outputs = []
        while engine.has_work():
            outputs += engine.step()
    metrics, ended = engine.metrics, [output.stats for output in outputs if output.finish_reason is not None]
    drafts = [output.draft for output in outputs if output.draft is not None]
    assert metrics.num_accepted_tokens > 0
    for drafted, accepted in (
        (metrics.num_draft_tokens, metrics.num_accepted_tokens),
        (sum(each.num_drafted for each in drafts), sum(each.num_accepted for each in drafts)),
        (sum(stats.num_draft_tokens for stats in ended), sum(sum(s.accepted_by_source.values()) for s in ended)),
        tuple(np.sum([step for stats in ended for step in stats.steps or ()], axis=0).tolist()),
        (sum(c.num_draft_tokens for c in metrics.by_source.values()), sum(metrics.accepted_per_position)),
    ):
        assert (drafted, accepted) == (metrics.num_draft_tokens, metrics.num_accepted_tokens)
    assert metrics.num_verify_steps == len(drafts) == sum(stats.num_verify_steps for stats in ended)
    assert metrics.generation_tokens == sum(len(output.token_ids) for output in outputs)
