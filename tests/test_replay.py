"""Replay against a slow reimplementation on a small made trace."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pytest

from benchmarks.replay import main, replay
from benchmarks.traces import Row, TraceTokenizer, read_records, read_rows
from ssd.config import DraftConfig, IndexConfig
from ssd.drafting import DRAFTER_NAMES, make_drafter
from ssd.retrieval.snapshot import SEPARATOR
from tests.reference import drafting as reference


def made_rows(num_rows: int = 12) -> list[tuple[list[int], list[int]]]:
    random = np.random.default_rng(5)
    phrases = [random.integers(1, 30, 6).tolist() for _ in range(5)]
    rows = []
    for _ in range(num_rows):
        picked = [phrases[i] for i in random.integers(0, 5, 6)]
        rows.append(([t for p in picked[:3] for t in p], [*(t for p in picked[3:] for t in p), 0]))
    return rows


def as_rows(rows: list[tuple[list[int], list[int]]]) -> list[Row]:
    return [Row(np.array(context, np.int32), np.array(output, np.int32)) for context, output in rows]


def test_frequency_replay_equals_the_slow_one():
    rows, stored, steps = made_rows(), [], np.zeros(3, np.int64)
    for row in rows:
        snapshot = reference.make_snapshot([stored] if stored else [])
        steps += reference.replay([row], lambda c, s=snapshot: reference.most_frequent(s, c, 10, 4))
        stored += [*row[0], *row[1], SEPARATOR]
    counts = replay(
        as_rows(rows), make_drafter("frequency", DraftConfig()), max_draft=4, index=IndexConfig(dedup_block_tokens=0)
    )
    assert (counts.num_verify_steps, counts.num_drafted_tokens, counts.num_accepted_tokens) == tuple(steps)


def test_prompt_lookup_replay_equals_the_slow_one():
    rows = made_rows()
    steps = reference.replay(rows, lambda c: reference.prompt_lookup(c, 10, 4))
    counts = replay(as_rows(rows), make_drafter("prompt-lookup", DraftConfig()), max_draft=4)
    assert (counts.num_verify_steps, counts.num_drafted_tokens, counts.num_accepted_tokens) == steps


@pytest.fixture
def trace(tmp_path):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    words = {"</s>": 0, **{chr(97 + i): i + 1 for i in range(26)}}
    tokenizer = Tokenizer(WordLevel(words, unk_token="</s>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    records = [
        {"session": "x", "prompt": "a b c", "prompt_is_delta": True, "output": "d e f g"},
        {"session": "x", "prompt": "a b", "prompt_is_delta": True, "output": "c d e f g"},
        {"session": "y", "prompt": "b c", "prompt_is_delta": True, "output": "d e f g a b"},
        {"session": "z", "prompt": "a b c", "prompt_is_delta": False, "output": "d e f g"},
    ]
    with gzip.open(tmp_path / "tiny.jsonl.gz", "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
    return tmp_path


def test_rows_of_a_session_see_its_history(trace):
    rows = list(read_rows(read_records(trace / "tiny.jsonl.gz"), TraceTokenizer(trace / "tokenizer.json")))
    assert [row.context.tolist() for row in rows] == [[1, 2, 3], [1, 2, 3, 4, 5, 6, 7, 0, 1, 2], [2, 3], [1, 2, 3]]
    assert rows[1].output.tolist() == [3, 4, 5, 6, 7, 0]


def run(trace, capsys, *more: str) -> list[dict]:
    drafters = [argument for name in DRAFTER_NAMES for argument in ("--drafter", name)]
    assert main([str(trace / "tiny.jsonl.gz"), "--tokenizer", str(trace), "--max-draft", "4", *drafters, *more]) == 0
    line = capsys.readouterr().out.strip().split("\n")[-1]
    results = json.loads(line)["results"]
    return [{key: value for key, value in r.items() if not key.startswith("propose_us")} for r in results]


def test_two_runs_give_the_same_counts(trace, capsys):
    first = run(trace, capsys)
    assert first == run(trace, capsys)
    by_name = {result["drafter"]: result for result in first}
    assert by_name["none"]["mean_acceptance_length"] == 1.0
    assert by_name["ssd"]["output_tokens"] == 23
    assert by_name["ssd"]["verify_steps"] < by_name["none"]["verify_steps"]


def test_the_row_that_would_exceed_the_limit_is_left_out(trace, capsys):
    assert {result["output_tokens"] for result in run(trace, capsys, "--max-output-tokens", "12")} == {11}


def test_a_missing_trace_is_a_clear_error(trace, capsys):
    assert main([str(trace / "absent"), "--tokenizer", str(trace)]) == 2
    assert "SSD_TRACES" in capsys.readouterr().err
