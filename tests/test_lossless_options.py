"""Speculation changes no token whatever the request asks for, and no log-probability."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.exactness import OracleDrafter, RandomDrafter
from ssd.config import DraftConfig, EngineConfig, SamplingParams
from ssd.drafting import make_drafter
from ssd.drafting.protocol import Drafter
from ssd.engine import Engine, Request
from ssd.model.loading.load_target import open_target
from tests.models import VOCAB, tiny_model
from tests.whole_answers import Answer, answers_of

EOS = 2
TARGET = open_target(tiny_model(), num_slots=2, max_length=96, max_draft_tokens=6, exact="on")
SMALL = st.integers(3, 40)
options = st.builds(
    SamplingParams,
    max_tokens=st.just(24),
    temperature=st.sampled_from([0.0, 0.0, 0.7, 1.6]),
    top_p=st.sampled_from([1.0, 0.9]),
    top_k=st.sampled_from([0, 20]),
    min_p=st.sampled_from([0.0, 0.05]),
    repetition_penalty=st.sampled_from([1.0, 1.2, 0.8]),
    presence_penalty=st.sampled_from([0.0, 1.0]),
    frequency_penalty=st.sampled_from([0.0, -0.5, 0.8]),
    logit_bias=st.dictionaries(SMALL, st.sampled_from([-100.0, 2.0, 6.0]), max_size=3).map(lambda d: tuple(d.items())),
    seed=st.integers(-(2**63), 2**63 - 1) | st.none(),  # without one: coupled
    stop_token_ids=st.lists(SMALL, max_size=3).map(tuple),
    ignore_eos=st.booleans(),
    min_tokens=st.sampled_from([0, 5]),
    allowed_token_ids=st.none() | st.lists(SMALL, min_size=1, max_size=12, unique=True).map(tuple),
    bad_words=st.lists(st.lists(SMALL, min_size=1, max_size=2).map(tuple), max_size=8).map(tuple),
    logprobs=st.sampled_from([None, 0, 3]),
    prompt_logprobs=st.sampled_from([None, 0, 2]),
)


def outputs_of(drafter: Drafter, prompt: Sequence[int], sampling: SamplingParams, *, k: int) -> Answer:
    draft = DraftConfig(num_speculative_tokens=k)
    config = EngineConfig(coupled_streams=1, coupled_window=2)
    engine = Engine(
        TARGET, drafter=drafter, config=config, draft=draft, eos_token_ids=[EOS], noise_root=lambda: b"of all"
    )
    # A second row, so that rows are of different length.
    pair = (("a", sampling), ("beside", SamplingParams(max_tokens=9, temperature=0.0)))
    return answers_of(
        engine, [Request(request_id=name, prompt_token_ids=tuple(prompt), sampling=params) for name, params in pair]
    )[0]


@settings(max_examples=60)
@given(options, st.lists(SMALL, min_size=1, max_size=12))
def test_no_option_lets_speculation_change_the_output(sampling: SamplingParams, prompt: list[int]) -> None:
    plain = outputs_of(make_drafter("none", DraftConfig()), prompt, sampling, k=0)
    expected = plain.token_ids
    if sampling.ignore_eos:
        known = expected
    else:
        assert EOS not in expected[:-1]
        known = [*expected, 7, 7]  # the drafter goes on where the output must stop
    drafters = [OracleDrafter({tuple(prompt): known}, VOCAB), RandomDrafter(VOCAB), make_drafter("ssd", DraftConfig()),
                make_drafter("ssd", DraftConfig(retrieval=False))]  # fmt: skip
    for drafter in drafters:
        assert outputs_of(drafter, prompt, sampling, k=6) == plain, drafter
