"""The promise: speculation never changes a token. 200 prompts, every pair of drafter, draft limit and batch size."""

from __future__ import annotations

import pytest

from benchmarks.exactness import Makers, Report, compare, covering_settings, reference_greedy, run
from benchmarks.workloads import snippets
from ssd.bundled import MODEL_PATH
from ssd.config import SamplingParams
from ssd.drafting.suffix.drafter import SuffixDrafter
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
DRAFTERS = ["ssd", *SOURCES, "frequency", "prompt-lookup", "random", "oracle"]
SETTINGS = covering_settings(DRAFTERS, [1, 4, 16], [1, 4, 8])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["greedy", "sampled", "coupled"])
def test_speculation_changes_no_token(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Greedy against transformers' ``generate``; by a seed or coupled against the engine without speculation."""
    codec = TextCodec.load(str(MODEL_PATH))
    target = open_target(load_model(MODEL_PATH, dtype="float32", device="cpu"), num_slots=8, max_length=256)
    prompts = [codec.encode_prompt(text)[-96:] for text in snippets(1)[:NUM_PROMPTS]]
    if kind == "greedy":
        sampling = [SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)] * NUM_PROMPTS
        expected = reference_greedy(target, prompts, MAX_TOKENS, codec.eos_token_ids)
    else:
        sampling = [
            SamplingParams(
                max_tokens=MAX_TOKENS, temperature=0.8, top_p=0.95, seed=index if kind == "sampled" else None
            )
            for index in range(NUM_PROMPTS)
        ]
        expected, _ = run(target, prompts, sampling, None, eos_token_ids=codec.eos_token_ids)
    report = Report()
    for number, setting in enumerate(SETTINGS):
        # Each setting takes a sixth of the prompts in turn, so that every prompt meets several settings.
        part = slice(number % SHARE, None, SHARE)
        compare(
            target, prompts[part], sampling[part], expected[part], setting,
            eos_token_ids=codec.eos_token_ids, report=report, makers=SOURCES,
        )  # fmt: skip
    with capsys.disabled():
        print(f"\n{kind}: {report} over {len(SETTINGS)} settings")
    assert report.passed, report.mismatches[:5]
    assert report.num_tokens == sum(
        len(tokens) for number in range(len(SETTINGS)) for tokens in expected[number % SHARE :: SHARE]
    )
    # Else nothing was tried: what knows the answer is accepted from in every setting, what looks up in one at least.
    lengths = {name: [length for key, length in report.acceptance.items() if key.startswith(name)] for name in DRAFTERS}
    assert min(lengths["oracle"]) > 1.5
    assert all(max(lengths[name]) > 1 for name in ("ssd", *SOURCES, "frequency", "prompt-lookup"))
