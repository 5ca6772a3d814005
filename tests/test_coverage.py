"""Every architecture of the table: driven as it says, and token for token what the model's ``generate`` gives."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.exactness import Report, Setting, compare, reference_greedy, run
from ssd.config import SamplingParams
from ssd.model.loading.load_target import open_target
from tests.architectures import ARCHITECTURES, table
from tests.models import VOCAB, tiny_model

MAX_TOKENS = 12
EOS = (2,)
PLAIN = Setting("none", 0, 1)
SPECULATIVE = [Setting("oracle", 5, 2), Setting("random", 3, 3)]


# What transformers has to say about tiny settings, and about kernels that are not installed.
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_engine_says_what_generate_says(name: str) -> None:
    """And says it to the bit, where it is exact, with an all-knowing drafter and a random one in uneven batches."""
    kind = ARCHITECTURES[name].kind
    target = open_target(tiny_model(name), num_slots=4, max_length=64)
    assert type(target) is kind
    random = np.random.default_rng(7)
    prompts = [random.integers(3, VOCAB, length).tolist() for length in (9, 14, 5)]
    sampling = [SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)] * len(prompts)
    report = Report()
    theirs = reference_greedy(target, prompts, MAX_TOKENS, EOS)
    compare(target, prompts, sampling, theirs, PLAIN, eos_token_ids=EOS, report=report)
    expected, _ = run(target, prompts, sampling, None, eos_token_ids=EOS)
    for setting in SPECULATIVE:
        compare(target, prompts, sampling, expected, setting, eos_token_ids=EOS, report=report)
    assert report.passed, (str(report), report.mismatches)
    assert report.acceptance[str(PLAIN)] == 1
    assert (report.acceptance["oracle/k5/b2"] > 2) is kind.can_roll_back


def test_the_table_of_the_documentation_counts_every_architecture() -> None:
    rows = [line.split("|")[2] for line in list(table())[2:]]
    assert sum(int(row.split(":")[0]) for row in rows) == len(ARCHITECTURES)
