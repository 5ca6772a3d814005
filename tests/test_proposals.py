"""What the engine makes of drafts before it verifies them."""

from __future__ import annotations

from collections.abc import Sequence as Rows

import numpy as np
import pytest

from ssd.config import DraftConfig, EngineConfig, SamplingParams
from ssd.drafting import Draft, DraftRequest, make_drafter
from ssd.drafting.protocol import Drafter
from ssd.drafting.source import OneByOne
from ssd.engine import Engine, Request
from ssd.model.loading.load_target import open_target
from tests.models import VOCAB, tiny_model

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


class Wrong(Knowing):
    """Is certain of what will not be said; nothing of it is verified once that has cost too much."""

    def propose(self, requests: Rows[DraftRequest]) -> list[Draft]:
        drafts = super().propose(requests)
        return [Draft((draft.token_ids + 1) % VOCAB, probabilities=draft.probabilities) for draft in drafts]

    def observe(self, request_id: str, draft: Draft, num_accepted: int) -> None:
        assert num_accepted == 0


def test_what_is_always_wrong_is_verified_a_few_times_only_and_what_is_right_again_later() -> None:
    target = open_target(MODEL, num_slots=1, max_length=128)
    said, drafted = list[list[int]](), list[int]()
    for kind in (None, Wrong, Knowing):
        drafter: Drafter = make_drafter("none", DraftConfig()) if kind is None else kind(said[0], 0.9)
        if kind is not Knowing:
            engine = Engine(
                target,
                drafter=drafter,
                config=EngineConfig(max_num_seqs=1),
                draft=DraftConfig(num_speculative_tokens=4),
            )
            engine.calibrate()
        else:
            engine._proposals._drafter = drafter
            engine._proposals._asked = OneByOne(drafter)
        before = engine.metrics.num_draft_tokens
        sampling = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
        engine.submit(Request(request_id=str(len(said)), prompt_token_ids=PROMPT, sampling=sampling))
        tokens = list[int]()
        while engine.has_work():
            tokens += [token for output in engine.step() for token in output.token_ids]
        said.append(tokens)
        drafted.append(engine.metrics.num_draft_tokens - before)
    assert said[1] == said[2] == said[0]
    assert 0 < drafted[1] < 15 * 4, "a few drafts of four tokens"
    assert drafted[2] > 50, "those of the same temperature that come true"
