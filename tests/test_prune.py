"""`ssd-cache prune`: what logs draft from is kept, and what is kept fits."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_builder.__main__ import main
from cache_builder.commands.prune import (
    BLOCK_TOKENS,
    LEAD_IN_TOKENS,
    accepted_runs,
    choose_half_blocks,
    count_uses,
    prune,
    retained_pieces,
)
from cache_builder.evaluation.costs import flat_curve
from cache_builder.evaluation.evaluate import Plan, replay
from cache_builder.evaluation.log import Log
from cache_builder.opened_cache import open_caches
from ssd.bundled import MODEL_PATH
from ssd.errors import ConfigError
from ssd.retrieval.ring import iter_sequences
from tests.cache_files import read_cache, write_cache

FINGERPRINT = "0" * 32
TOKENIZER = str(MODEL_PATH)


def log_of(texts: list[list[int]]) -> Log:
    """Requests of 10 tokens of prompt each."""
    starts = np.concatenate([[0], np.cumsum([len(text) for text in texts])])
    return Log(np.concatenate([np.array(text, np.int32) for text in texts]), starts, np.full(len(texts), 10))


def made(directory: Path) -> tuple[list[list[int]], Log, Log]:
    """A cache of 60 documents, and two logs whose answers quote the first twelve of them."""
    numbers = np.random.default_rng(5)
    documents = [numbers.integers(10, 30_000, 300).tolist() for _ in range(60)]
    write_cache(directory, documents, fingerprint=FINGERPRINT, segment_tokens=1 << 20)

    def requests(count: int) -> list[list[int]]:
        found = []
        for _ in range(count):
            begin = int(numbers.integers(0, 250))
            quoted = documents[int(numbers.integers(0, 12))][begin : begin + 40]
            found.append(
                [*numbers.integers(10, 30_000, 6).tolist(), *quoted, *numbers.integers(10, 30_000, 6).tolist()]
            )
        return found

    return documents, log_of(requests(150)), log_of(requests(60))


def tokens_per_step(directory: Path, log: Log) -> float:
    plan = Plan(fingerprint=FINGERPRINT, cache="frozen", warm=(directory,))
    found = replay(log, plan, flat_curve(32), "frozen")
    return int(log.output_lengths.sum()) / int(found.num_steps.sum())


def num_tokens(directory: Path) -> int:
    return open_caches([directory])[0].num_tokens


def test_half_of_a_cache_drafts_as_the_whole_where_logs_say_what_is_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, used, other = tmp_path / "whole", tmp_path / "used", tmp_path / "other"
    _, log, held_out = made(whole)
    budget = num_tokens(whole) // 2
    prune(whole, used, budget, accepted_runs(whole, log, FINGERPRINT))
    written, of_use = capsys.readouterr().out.splitlines()
    prune(whole, other, budget, [])
    assert num_tokens(used) <= budget and num_tokens(other) <= budget
    without_separators = [sum(map(len, iter_sequences(open_caches([path])[0].segments))) for path in (used, whole)]
    assert written.startswith("{}: {:,} of {:,} tokens in ".format(used, *without_separators)), "as merge counts"
    kept, used_blocks = re.findall(r"[0-9,]+", of_use)
    assert kept == used_blocks and int(kept) > 30
    before = tokens_per_step(whole, held_out)
    assert tokens_per_step(used, held_out) > 0.9 * before > 1.2 * tokens_per_step(other, held_out)
    with pytest.raises(ConfigError, match="replace it with --force"):
        prune(used, used, 2000, [])
    prune(used, used, 2000, [], force=True)
    assert 1500 < num_tokens(used) <= 2000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "used", "whole"]


def test_all_is_kept_where_there_is_room(tmp_path: Path) -> None:
    documents, _, _ = made(tmp_path / "whole")
    prune(tmp_path / "whole", tmp_path / "out", 1_000_000, [])
    assert read_cache(tmp_path / "out", FINGERPRINT) == documents


def test_what_stands_twice_is_of_use_once(tmp_path: Path) -> None:
    text = np.arange(1, 129, dtype=np.int32)
    write_cache(tmp_path / "twice", [text.tolist()] * 2, fingerprint=FINGERPRINT)
    log = log_of([text[:70].tolist()])
    credits = count_uses(open_caches([tmp_path / "twice"])[0], accepted_runs(tmp_path / "twice", log, FINGERPRINT))
    assert credits[0] > 0
    assert not credits[2:].any()


@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=12),
    st.integers(BLOCK_TOKENS * 2, 3000),
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
)
def test_what_is_kept_fits_and_the_most_used_come_first(lengths: list[int], budget: int, used: list[int]) -> None:
    sequences, at = [], 0
    for length in lengths:
        sequences.append((at, np.arange(at, at + length, dtype=np.int32)))
        at += length + 1
    credits = np.resize(np.array(used, np.int64), -(-at // BLOCK_TOKENS))
    kept = choose_half_blocks(credits, budget)
    pieces = [piece for start, tokens in sequences for piece in retained_pieces(tokens, start, kept)]
    assert sum(len(piece) + 1 for piece in pieces) <= budget
    blocks = kept.reshape(-1, BLOCK_TOKENS // LEAD_IN_TOKENS).all(1)
    if blocks.any() and not blocks.all():
        assert credits[blocks].min() >= credits[~blocks].max()
    flat_kept = {int(token) for piece in pieces for token in piece}
    for start, tokens in sequences:  # every token is there that its half block is kept of, but for crumbs
        expected = {int(token) for token in tokens if kept[token // LEAD_IN_TOKENS]}
        assert flat_kept & set(tokens.tolist()) <= expected
        assert start == tokens[0]


@pytest.mark.parametrize("text", ["", "0", "-3", "4X", "1e6", "9" * 40, "4M tokens", "nan", "20"])
def test_a_budget_is_a_number_of_tokens(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with suppress(SystemExit):
        assert main(["prune", str(tmp_path), f"--budget={text}", "--logs", "log.jsonl", "--force"]) == 2
    assert "--budget" in capsys.readouterr().err.splitlines()[-1]


def test_the_command_prunes_by_logs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log.jsonl"
    with log.open("w") as file:
        for number in range(30):
            answer = f"Sentence {number} is about the number {number * 7919} and what it is good for in practice."
            file.write(json.dumps({"prompt": f"Tell me about {number}.", "completion": answer}) + "\n")
    some = tmp_path / "some.jsonl"
    some.write_text("".join(log.read_text().splitlines(keepends=True)[:5]))
    warm, out = str(tmp_path / "warm"), str(tmp_path / "out")
    assert main(["build", str(log), "--tokenizer", TOKENIZER, "--out", warm, "--quiet"]) == 0
    capsys.readouterr()
    arguments = ["prune", warm, "--budget", "400", "--logs", str(some), "--tokenizer", TOKENIZER, "--out", out]
    assert main(arguments) == 0
    assert "blocks from which drafts came are kept" in capsys.readouterr().out
