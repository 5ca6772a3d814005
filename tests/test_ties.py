"""Counting near-ties: what flips is counted once, in its class, and float32 flips only where the margin is tiny."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from benchmarks.exactness import TIE_MARGIN
from benchmarks.ties import EDGES, Reference, decode, main, measure, read_in_batch, read_in_passes
from ssd.model.loading.load_target import open_target
from ssd.model.target import Target
from tests.models import VOCAB, tiny_model
from tests.reference.target import greedy_decode

PROMPTS = [np.random.default_rng(seed).integers(3, VOCAB, 7 + seed).tolist() for seed in range(4)]


def open_tiny(dtype: torch.dtype) -> Target:
    return open_target(tiny_model().to(dtype), num_slots=2, max_length=64, max_draft_tokens=8)


def test_the_reference_is_plain_greedy_decoding_with_its_margins() -> None:
    target = open_tiny(torch.float32)
    tokens, margins = greedy_decode(tiny_model(), PROMPTS[0], 12)
    found = decode(target, PROMPTS[0], 12, ())
    assert found.tokens.tolist() == tokens
    assert np.allclose(found.margins, margins, atol=1e-4)
    assert decode(target, PROMPTS[0], 12, (tokens[3],)).tokens.tolist() == tokens[: tokens.index(tokens[3]) + 1]


def test_a_changed_token_is_a_flip() -> None:
    """Everywhere the reference is told a token that was not chosen, wide passes and batches say so."""
    target = open_tiny(torch.float32)
    true = decode(target, PROMPTS[0], 12, ())
    told = true.tokens.copy()
    told[7] = (told[7] + 1) % VOCAB
    changed = Reference(true.prompt, told, true.margins)
    for chosen in (read_in_passes(target, changed, 4), read_in_batch(target, [changed, true])[0]):
        assert np.flatnonzero(chosen != told)[0] == 7
        assert chosen[:8].tolist() == true.tokens[:8].tolist()
    assert len(read_in_passes(target, true, 5)) == 10  # a narrower rest is not of this width


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_counts_add_up(dtype: torch.dtype) -> None:
    found = measure(open_tiny(dtype), PROMPTS, 16, (), widths=(2, 8), batches=(2,))
    assert found["tokens"] == sum(found["margins"]) == 4 * 16
    assert [(row["kind"], row["size"]) for row in found["passes"]] == [("positions", 2), ("positions", 8), ("rows", 2)]
    for row in found["passes"]:
        assert row["tokens"] == 64
        assert len(row["flips_by_margin"]) == len(EDGES) + 1
        assert sum(row["flips_by_margin"]) == row["flips"]
        if dtype == torch.float32:
            assert row["largest_margin"] < TIE_MARGIN


def test_the_last_line_is_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--prompts", "8", "--max-tokens", "8", "--dtype", "bfloat16"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["benchmark"] == "ties"
    assert [run["dtype"] for run in result["runs"]] == ["bfloat16"]
    assert result["parameters"]["prompts"] == 8
