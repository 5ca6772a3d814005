"""Replay against a slow reimplementation on a small made trace."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.replay import digest
from benchmarks.replay.__main__ import main
from benchmarks.replay.job import CONTENDER_NAMES, OURS, OurDrafter, PeerDrafter, replay_stream, settings_of
from benchmarks.walk import Steps
from cache_builder.evaluation.costs import flat_curve
from cache_builder.evaluation.hindsight import hindsight_steps
from cache_builder.evaluation.log import RecordedOutput
from ssd.config import DraftConfig, IndexConfig
from tests.test_peers import needs_peers


def made_rows(num_rows: int = 12) -> list[tuple[list[int], list[int]]]:
    random = np.random.default_rng(5)
    phrases = [random.integers(1, 30, 6).tolist() for _ in range(5)]
    rows = []
    for _ in range(num_rows):
        picked = [phrases[i] for i in random.integers(0, 5, 6)]
        rows.append(([t for p in picked[:3] for t in p], [*(t for p in picked[3:] for t in p), 0]))
    return rows


def as_rows(rows: list[tuple[list[int], list[int]]]) -> list[RecordedOutput]:
    return [RecordedOutput(np.array(context, np.int32), np.array(output, np.int32)) for context, output in rows]


def figures(steps: Steps) -> tuple[Any, ...]:
    return steps.drafted.tolist(), steps.accepted.tolist()


def test_settings_side_by_side_count_what_each_counts_alone() -> None:
    rows = as_rows(made_rows())
    options: dict[str, Any] = {"draft": DraftConfig(num_speculative_tokens=8), "index": IndexConfig(flush_tokens=64)}
    settings = settings_of(OURS, 8, tree=False, costs=[flat_curve(32), flat_curve(2)])
    with OurDrafter(settings, tree=False, **options) as contender:
        together = [figures(steps) for steps in replay_stream(rows, contender)]
    for setting, alone in zip(settings, together, strict=True):
        with OurDrafter([setting], tree=False, **options) as contender:
            assert figures(replay_stream(rows, contender)[0]) == alone


@needs_peers
@pytest.mark.parametrize("drafter", ["arctic", "vllm-ngram", "prompt-lookup-hf", "llama-cpp"])
def test_settings_of_a_peer_side_by_side_count_what_each_counts_alone(drafter: str) -> None:
    rows = as_rows(made_rows())
    settings = settings_of(drafter, 8, tree=False, costs=[])
    with PeerDrafter(settings) as contender:
        together = [figures(steps) for steps in replay_stream(rows, contender)]
    with PeerDrafter(settings[-1:]) as alone:
        assert figures(replay_stream(rows, alone)[0]) == together[-1]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
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


def run(trace: Path, capsys: pytest.CaptureFixture[str], *more: str) -> list[dict[str, Any]]:
    asked = [str(trace / "tiny.jsonl.gz"), "--tokenizer", str(trace), "--max-draft", "4"]
    assert main([*asked, *more]) == 0
    found = json.loads(capsys.readouterr().out.strip().split("\n")[-1])
    assert found["parameters"]["costs"]["flat 32"] == {"widths": [1.0, 32.0, 64.0], "costs": [1.0, 1.0, 2.0]}
    assert set(found["rows"][0]["speed_up"]) == set(found["parameters"]["costs"])
    return list(found["rows"])


def test_two_runs_give_the_same_counts(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = run(trace, capsys)
    assert first == run(trace, capsys)
    assert [each["setting"] for each in first] == ["priced by flat 32", "priced by measured"]
    for each in first:
        assert each["output_tokens"] == 23 and each["verify_steps"] < 23
        assert each["accepted_per_step"] == pytest.approx(each["mean_acceptance_length"] - 1)
        assert each["speed_up"]["flat 32"] == pytest.approx(each["mean_acceptance_length"])
        assert set(each["speed_up"]) == {"flat 32", "measured"}
    # The row that would exceed the limit is left out.
    assert {result["output_tokens"] for result in run(trace, capsys, "--max-output-tokens", "12")} == {11}


def test_digests_are_the_same_until_a_draft_is_another(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 10_000, trace / "tiny.jsonl.gz", trace / "tokenizer.json"
    lines = digest.digests(*asked)
    assert digest.digests(*asked) == lines
    assert [line.split()[2] for line in lines] == ["chain", "tree", "together", "rows"]
    assert all(int(line.split()[3]) > 0 for line in lines)
    monkeypatch.setattr(digest, "_LIMIT", 1)
    assert not set(digest.digests(*asked)) & set(lines)


def test_a_drafter_of_trees_alone_and_a_run_without_a_tokenizer_are_refused(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [str(trace / "tiny.jsonl.gz"), "--drafter", "sglang"]
    assert main([*asked, "--tokenizer", str(trace)]) == 2 and main([*asked, "--tree"]) == 2
    said = capsys.readouterr().err
    assert "add --tree" in said and "name a tokenizer" in said


@pytest.mark.parametrize("drafter", CONTENDER_NAMES)
def test_settings_have_names_of_their_own_and_stay_within_the_limit(drafter: str) -> None:
    settings = settings_of(drafter, 12, tree=True, costs=[flat_curve(32)])
    assert len({setting.name for setting in settings}) == len(settings)
    most = {"sglang": 11}.get(drafter, 12)  # its default has 12 with the token that they follow
    assert max(setting.limit for setting in settings) == most


# The best choice in hindsight among all earlier text


REQUESTS = st.lists(
    st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=20), st.lists(st.integers(0, 3), max_size=30)),
    max_size=6,
)


def steps_of(requests: list[tuple[list[int], list[int]]], limit: int) -> list[int]:
    texts = [np.array([*prompt, *output], np.int32) for prompt, output in requests]
    steps = hindsight_steps(texts, np.array([len(prompt) for prompt, _ in requests], np.int64), limit)
    assert steps is not None
    return steps.tolist()


@settings(max_examples=200, deadline=None)
@given(REQUESTS, st.integers(0, 9))
def test_it_is_what_trying_every_earlier_place_finds(requests: list[tuple[list[int], list[int]]], limit: int) -> None:
    assert steps_of(requests, limit) == slow_steps(requests, limit)


def slow_steps(requests: list[tuple[list[int], list[int]]], limit: int) -> list[int]:
    """Steps of each request, (prompt, output), where each draft is the best that stands anywhere earlier."""
    text: list[int] = []
    counts = []
    for prompt, output in requests:
        begin, known = len(text) + len(prompt), len(text) + len(prompt) + len(output)
        text += [*prompt, *output, -1]
        steps = 0
        while begin < known:
            drafted = 0
            for place in range(begin - 1):
                if text[place] == text[begin - 1]:
                    size = 0
                    while begin + size < known and text[place + 1 + size] == text[begin + size]:
                        size += 1
                    drafted = max(drafted, size)
            begin += min(drafted, limit, known - 1 - begin) + 1
            steps += 1
        counts.append(steps)
    return counts
