"""The promise: speculation never changes a token, nor a bit of a log-probability, whatever a request asks for."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.exactness import (
    Makers,
    OracleDrafter,
    RandomDrafter,
    Report,
    Setting,
    compare,
    covering_settings,
    reference_greedy,
    run,
)
from benchmarks.workloads import snippets
from ssd.bundled import MODEL_PATH
from ssd.config import DraftShape, SamplingParams
from ssd.drafting.protocol import Drafter
from ssd.drafting.suffix_drafter import SuffixDrafter
from ssd.engine import Request
from ssd.model.loading.load_target import load_model, open_target
from ssd.text.codec import TextCodec
from tests.engines import EOS, ask, make_engine, target_of
from tests.models import VOCAB
from tests.trees import BranchingDrafter
from tests.whole_answers import Answer, answers_of

NUM_PROMPTS = 200
MAX_TOKENS = 20
SHARE = 6
SOURCES: Makers = {
    "retrieval": lambda: SuffixDrafter(recycling=False),
    "recycling": lambda: SuffixDrafter(retrieval=False),
}
"""Each of the sources that "ssd" drafts from, alone."""
DRAFTERS = ["ssd", *SOURCES, "random", "oracle"]
SETTINGS = covering_settings(DRAFTERS, [1, 4, 16], [1, 4, 8])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["greedy", "sampled", "coupled"])
def test_speculation_changes_no_token_and_no_log_probability(
    kind: str, dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """200 prompts, every pair of drafter, draft limit and batch size, against the engine without speculation.

    Greedy and in float32, that against transformers' ``generate``.
    """
    codec = TextCodec.load(str(MODEL_PATH))
    model = load_model(MODEL_PATH, dtype=dtype, device="cpu")
    target = open_target(model, num_slots=8, max_length=256, batch_invariant="on")
    prompts = [codec.encode_prompt(text)[-96:] for text in snippets(1)[:NUM_PROMPTS]]
    if kind == "greedy":
        sampling = [SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)] * NUM_PROMPTS
    else:
        sampling = [
            SamplingParams(
                max_tokens=MAX_TOKENS, temperature=0.8, top_p=0.95, seed=index if kind == "sampled" else None
            )
            for index in range(NUM_PROMPTS)
        ]
    expected, _ = run(target, prompts, sampling, None, eos_token_ids=codec.eos_token_ids)
    if kind == "greedy" and dtype == "float32":
        theirs, generated = reference_greedy(target, prompts, MAX_TOKENS, codec.eos_token_ids), Report()
        compare(
            target,
            prompts,
            sampling,
            theirs,
            Setting("none", 0, 1),
            eos_token_ids=codec.eos_token_ids,
            report=generated,
        )
        assert generated.passed, generated.mismatches[:5]
    report = Report()
    for number, setting in enumerate(SETTINGS):
        # Each setting takes a sixth of the prompts in turn, so that every prompt meets several settings.
        part = slice(number % SHARE, None, SHARE)
        compare(
            target,
            prompts[part],
            sampling[part],
            expected[part],
            setting,
            eos_token_ids=codec.eos_token_ids,
            report=report,
            makers=SOURCES,
        )
    with capsys.disabled():
        print(f"\n{kind}, {dtype}: {report} over {len(SETTINGS)} settings")
    assert not report.mismatches, report.mismatches[:5]
    parts = [expected[number % SHARE :: SHARE] for number in range(len(SETTINGS))]
    assert report.num_tokens == sum(len(said.token_ids) for part in parts for said in part)
    assert report.num_logprobs == sum(len(said.token_ids) for part in parts for said in part[::2])
    # Else nothing was tried: what knows the answer is accepted from in every setting, what looks up in one at least.
    lengths = {name: [length for key, length in report.acceptance.items() if key.startswith(name)] for name in DRAFTERS}
    assert min(lengths["oracle"]) > 1.5
    assert all(max(lengths[name]) > 1 for name in ("ssd", *SOURCES))


# -- any request --

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


def said(architecture: str, drafter: Drafter | str, asked: Sequence[Request]) -> list[Answer]:
    shape: DraftShape = "tree" if isinstance(drafter, BranchingDrafter) else "auto"
    engine = make_engine(drafter, target_of(architecture), limit=6, shape=shape)
    found = answers_of(engine, asked)
    assert engine.metrics.drafter_failures == 0
    if isinstance(drafter, BranchingDrafter):
        assert engine.metrics.num_accepted_tokens == sum(accepted for _, accepted in drafter.paths)
        for draft, num_accepted in drafter.paths:
            assert draft.parents is None or (draft.path is not None and len(draft.path) == num_accepted)
    return found


@settings(max_examples=60)
@given(
    st.sampled_from(["llama", "llama", "mistral", "gemma2", "gpt_oss", "gpt2"]),
    st.lists(st.tuples(options, st.lists(SMALL, min_size=1, max_size=12)), min_size=1, max_size=3),
    st.integers(0, 2**32 - 1),
)
def test_no_option_lets_speculation_change_the_output(
    architecture: str, rows: list[tuple[SamplingParams, list[int]]], seed: int
) -> None:
    """Beside a row that is always there; windows are 6 long, gemma2 caps its scores, gpt_oss has sinks."""
    prompts = [(index + 41, *prompt) for index, (_, prompt) in enumerate(rows)]  # no two are the same
    asked = [ask(str(i), prompt, params) for i, (prompt, (params, _)) in enumerate(zip(prompts, rows, strict=True))]
    asked.append(ask("beside", prompts[0], max_tokens=9))
    plain = said(architecture, "none", asked)
    known = {}
    for prompt, answer, (params, _) in zip(prompts, plain, rows, strict=False):
        assert params.ignore_eos or EOS not in answer.token_ids[:-1]
        # The drafter goes on where the output must stop.
        known[prompt] = answer.token_ids if params.ignore_eos else [*answer.token_ids, 7, 7]
    trees = [BranchingDrafter(known, VOCAB, seed=seed, shape=shape) for shape in ("random", "wide", "deep", "same")]
    drafters: list[Drafter | str] = [OracleDrafter(known, VOCAB), RandomDrafter(VOCAB), trees[seed % 4], "ssd"]
    for drafter in (*drafters, SuffixDrafter(retrieval=False)):
        assert said(architecture, drafter, asked) == plain, drafter
