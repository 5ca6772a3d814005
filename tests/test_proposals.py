"""What the engine makes of drafts before it verifies them."""

from __future__ import annotations

from collections.abc import Sequence as Rows

import numpy as np
import pytest

from ssd.config import DraftConfig, EngineConfig, SamplingParams
from ssd.drafting import Draft, DraftRequest, make_drafter
from ssd.drafting.protocol import Drafter
from ssd.engine import Engine, Request
from ssd.model.loading.load_target import open_target
from tests.models import tiny_model

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
