"""Whom the engine asks for drafts, and what it makes of them before it verifies them."""

from __future__ import annotations

import time
from collections.abc import Sequence as Rows

import numpy as np
import pytest

from ssd.config import DraftConfig, EngineConfig, SamplingParams
from ssd.drafting import Draft, DraftRequest, make_drafter
from ssd.drafting.protocol import EMPTY_DRAFT, Drafter
from ssd.engine import Engine, Request
from ssd.model.loading.load_target import open_target
from tests.fixed_times import measure_asking
from tests.models import VOCAB, tiny_model
from tests.whole_answers import finish_all, tokens_of

MODEL = tiny_model()
PROMPT = (1, 2, 3, 4, 5)


class Knowing:
    """Knows what will be said, and gives it so much of a chance."""

    def __init__(self, said: list[int], chance: float | None) -> None:
        self.said, self.chance = said, chance

    def propose(self, requests: Rows[DraftRequest]) -> list[Draft]:
        drafts = []
        for request in requests:
            at = len(request.context) - len(PROMPT)
            tokens = np.array(self.said[at : at + min(4, request.limit)], np.int32)
            drafts.append(
                Draft(tokens, probabilities=None if self.chance is None else np.full(len(tokens), self.chance))
            )
        return drafts

    def observe(self, request_id: str, draft: Draft, num_accepted: int) -> None:
        assert num_accepted == len(draft.token_ids)

    def finish(self, request_id: str) -> None:
        return


def outputs_of(drafter: Drafter) -> list[list[int]]:
    """Tokens by step."""
    target = open_target(MODEL, num_slots=1, max_length=64)
    engine = Engine(
        target, drafter=drafter, config=EngineConfig(max_num_seqs=1), draft=DraftConfig(num_speculative_tokens=4)
    )
    sampling = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    engine.submit(Request(request_id="a", prompt_token_ids=PROMPT, sampling=sampling))
    steps = []
    while engine.has_work():
        steps.append([token for output in engine.step() for token in output.token_ids])
    return steps


@pytest.mark.parametrize(("chance", "is_sure"), [(0.95, True), (0.8, False), (None, True)])
def test_only_what_is_almost_certain_may_delay_the_first_token(chance: float | None, is_sure: bool) -> None:
    said = [token for step in outputs_of(make_drafter("none", DraftConfig())) for token in step]
    steps = outputs_of(Knowing(said, chance))
    assert [token for step in steps for token in step] == said
    assert len(steps[0]) == (5 if is_sure else 1)
    assert len(steps[1]) == 5, "whoever has seen the first token waits no longer for it"


class Nothing:
    """Never has a draft, and takes its time."""

    def __init__(self) -> None:
        self.num_asked = 0

    def propose(self, requests: Rows[DraftRequest]) -> list[Draft]:
        assert requests
        self.num_asked += len(requests)
        time.sleep(2e-3 * len(requests))
        return [EMPTY_DRAFT] * len(requests)

    def observe(self, request_id: str, draft: Draft, num_accepted: int) -> None:
        assert not len(draft.token_ids) and num_accepted == 0

    def finish(self, request_id: str) -> None:
        return


def test_the_engine_asks_a_slow_drafter_less_and_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    measure_asking(monkeypatch)
    drafter = Nothing()
    texts = []
    for drafts in (DraftConfig(num_speculative_tokens=4), DraftConfig(num_speculative_tokens=0)):
        target = open_target(MODEL, num_slots=4, max_length=64)
        engine = Engine(target, drafter=drafter, config=EngineConfig(max_num_seqs=4), draft=drafts)
        for number in range(4):
            prompt = tuple((7 * number + at) % VOCAB for at in range(5))
            sampling = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
            engine.submit(Request(request_id=str(number), prompt_token_ids=prompt, sampling=sampling))
        texts.append({name: tokens_of(outputs) for name, outputs in finish_all(engine).items()})
    assert texts[0] == texts[1] and all(len(text) == 40 for text in texts[0].values())
    assert 4 * 4 <= drafter.num_asked < 4 * 40


def test_what_was_distrusted_is_tried_again_where_prices_left_no_draft() -> None:
    target = open_target(MODEL, num_slots=1, max_length=64)
    drafts = DraftConfig(num_speculative_tokens=4)
    engine = Engine(target, drafter=make_drafter("ssd", drafts), config=EngineConfig(max_num_seqs=1), draft=drafts)
    shares = engine._proposals._kept_shares
    for _ in range(50):
        shares.observe(1.0, 1.0, 0)
    before = shares.share(1.0)
    sampling = SamplingParams(max_tokens=40, temperature=1.0, seed=1, ignore_eos=True)
    engine.submit(Request(request_id="a", prompt_token_ids=PROMPT, sampling=sampling))
    finish_all(engine)
    assert shares.share(1.0) > before
