"""The promise: speculation never changes a token, nor a bit of a log-probability.

200 prompts, every pair of drafter, draft limit and batch size.
"""

from __future__ import annotations

import pytest

from benchmarks.exactness import Makers, Report, Setting, compare, covering_settings, reference_greedy, run
from benchmarks.workloads import snippets
from ssd.bundled import MODEL_PATH
from ssd.config import SamplingParams
from ssd.drafting.drafter import SuffixDrafter
from ssd.model.loading.load_target import load_model, open_target
from ssd.text.codec import TextCodec

NUM_PROMPTS = 200
MAX_TOKENS = 20
SHARE = 6
SOURCES: Makers = {
    "retrieval": lambda: SuffixDrafter(recycling=False),
    "recycling": lambda: SuffixDrafter(retrieval=False),
}
"""Each of the sources that "ssd" drafts from, alone."""
DRAFTERS = ["ssd", *SOURCES, "prompt-lookup", "random", "oracle"]
SETTINGS = covering_settings(DRAFTERS, [1, 4, 16], [1, 4, 8])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["greedy", "sampled", "coupled"])
def test_speculation_changes_no_token_and_no_log_probability(
    kind: str, dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Against the engine without speculation; it, greedy and in float32, against transformers' ``generate``."""
    codec = TextCodec.load(str(MODEL_PATH))
    model = load_model(MODEL_PATH, dtype=dtype, device="cpu")
    target = open_target(model, num_slots=8, max_length=256, exact="on")
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
            target, prompts, sampling, theirs, Setting("none", 0, 1), eos_token_ids=codec.eos_token_ids,
            report=generated,
        )  # fmt: skip
        assert generated.passed, generated.mismatches[:5]
    report = Report()
    for number, setting in enumerate(SETTINGS):
        # Each setting takes a sixth of the prompts in turn, so that every prompt meets several settings.
        part = slice(number % SHARE, None, SHARE)
        compare(
            target, prompts[part], sampling[part], expected[part], setting,
            eos_token_ids=codec.eos_token_ids, report=report, makers=SOURCES,
        )  # fmt: skip
    with capsys.disabled():
        print(f"\n{kind}, {dtype}: {report} over {len(SETTINGS)} settings")
    assert not report.mismatches, report.mismatches[:5]
    parts = [expected[number % SHARE :: SHARE] for number in range(len(SETTINGS))]
    assert report.num_tokens == sum(len(said.token_ids) for part in parts for said in part)
    assert report.num_logprobs == sum(len(said.token_ids) for part in parts for said in part[::2])
    # Else nothing was tried: what knows the answer is accepted from in every setting, what looks up in one at least.
    lengths = {name: [length for key, length in report.acceptance.items() if key.startswith(name)] for name in DRAFTERS}
    assert min(lengths["oracle"]) > 1.5
    assert all(max(lengths[name]) > 1 for name in ("ssd", *SOURCES, "prompt-lookup"))
