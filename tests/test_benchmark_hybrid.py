"""The replay of two drafters beside each other: what it reads, what it adds up, that nothing is known beforehand."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.hybrid.command import main
from benchmarks.hybrid.costs import draft_seconds, pass_seconds
from benchmarks.hybrid.decoders import OtherAlone, Place, decoders, right_path
from benchmarks.hybrid.drafters import OTHER_TOKENS, OurDrafter, RecordedDrafter
from benchmarks.hybrid.recordings import MOST_TOKEN, Recording, read_recordings
from benchmarks.hybrid.replaying import replay
from ssd.drafting.drafter import NO_SNAPSHOT
from ssd.drafting.protocol import Draft, DraftRequest
from ssd.errors import ConfigError

Record = dict[str, Any]


def a_record(seed: int, length: int = 60) -> Record:
    """Half of the output is said in the prompt, half is new; the other drafter is right for up to seven tokens."""
    random = np.random.default_rng(seed)
    known = random.integers(10, 40, length // 2).tolist()
    new = random.integers(50, 200, length - len(known)).tolist()
    lengths = [int(each) for each in random.integers(1, 9, length)]
    return {
        "id": f"r{seed}",
        "prompt_token_ids": [1, *known, 2],
        "output_token_ids": [*known, *new],
        "emitted": {"eagle": lengths, "blind": [1] * length},
    }


def write(path: Path, records: list[Any]) -> Path:
    text = "".join(json.dumps(record) + "\n" for record in records)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> Record:
    assert main([*arguments, "--json"]) == 0
    result: Record = json.loads(capsys.readouterr().out.splitlines()[-1])
    return result


def test_the_command_prints_every_speed_up_and_the_same_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "own.jsonl.gz", [a_record(seed) for seed in range(12)])
    first = run(capsys, str(path), "--max-requests", "8", "--max-draft", "16")
    assert first["benchmark"] == "hybrid"
    (result,) = first["results"]
    assert result["file"] == "own.jsonl.gz" and result["requests"] == 8
    assert 0.0 <= result["other_asked_share"] <= 1.0 and result["tokens_per_step"] >= 1.0
    ways = ("other_alone", "ours_alone", "both", "oracle", "oracle_tree")
    assert all(result[way] > 1.0 for way in ways)
    assert result["oracle_tree"] > max(result["ours_alone"], result["other_alone"])
    assert run(capsys, str(path), "--max-requests", "8", "--max-draft", "16")["results"] == first["results"]
    main([str(path), "--max-requests", "1"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:2] == ["file", "requests"] and lines[1].split()[0] == "own.jsonl.gz"


def test_another_drafter_that_is_never_right_costs_little_and_is_hardly_asked(tmp_path: Path) -> None:
    path = write(tmp_path / "own.jsonl", [a_record(seed, 200) for seed in range(10)])
    ways = {name: make() for name, make in decoders(16).items() if name in ("ours_alone", "both")}
    result = replay(read_recordings(path, "blind"), ways)
    assert result["other_asked_share"] < 0.15
    assert result["both"] > 0.93 * result["ours_alone"]


def test_the_other_alone_is_a_sum_that_can_be_done_by_hand() -> None:
    recording = Recording(
        np.array([7, 8], np.int32), np.arange(9, dtype=np.int32), np.array([9, 1, 1, 1, 1, 1, 1, 2, 1])
    )
    result = replay([recording], {"other_alone": OtherAlone(), "both": OtherAlone()})
    plain = sum(pass_seconds(1, position) for position in range(3, 11))
    # Six tokens with a draft of five; then, of two that are left, one with a draft of one, and the last with none.
    taken = pass_seconds(6, 3) + draft_seconds(5) + pass_seconds(2, 9) + draft_seconds(1) + pass_seconds(1, 10)
    assert result["other_alone"] == pytest.approx(plain / taken)
    assert result["tokens_per_step"] == pytest.approx(8 / 3)


def test_recorded_drafts_have_the_right_tokens_and_behind_them_none_that_could_be() -> None:
    recording = Recording(np.array([7], np.int32), np.arange(20, 30, dtype=np.int32), np.array([3] * 10))
    other = RecordedDrafter()
    other.begin(recording)
    text = np.concatenate([recording.prompt, recording.output])
    place = Place("a", recording, text, NO_SNAPSHOT, known=2)
    draft = other.propose([DraftRequest("a", text[: place.position], 1, None, 10)])[0]
    assert draft.token_ids.tolist() == [22, 23, 24 + MOST_TOKEN, 25 + MOST_TOKEN, 26 + MOST_TOKEN]
    assert len(draft.token_ids) == OTHER_TOKENS and draft.probabilities is None
    assert right_path(draft, place) == [0, 1]
    assert right_path(Draft(np.array([1, 22, 23, 9], np.int32), parents=np.array([-1, -1, 1, 2], np.int32)), place) == [
        1,
        2,
    ]


def test_what_is_carried_on_does_not_depend_on_whether_the_other_was_right() -> None:
    text = np.array([5, 6, 7, 8, 9, 3, 5, 6, 7], np.int32)
    wrong = text.copy()
    wrong[-2:] += MOST_TOKEN
    drafts = [
        OurDrafter().propose([DraftRequest("a", context, 1, None, 4, prices=np.array([0.01]), tree=True)])[0]
        for context in (text, wrong)
    ]
    assert drafts[0].token_ids.tolist() == drafts[1].token_ids.tolist() and len(drafts[0].token_ids)


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ("{", "line 1"),
        ("[]", "expected a JSON object"),
        ({"emitted": 3}, '"emitted" must be an object'),
        ({**a_record(0), "emitted": {"ngram": [1]}}, "--other: ngram"),
        ({**a_record(0), "output_token_ids": [1, 2]}, "2 output tokens"),
        ({**a_record(0), "prompt_token_ids": []}, "0 prompt tokens"),
        ({**a_record(0), "prompt_token_ids": [1.5]}, "prompt_token_ids"),
        ({**a_record(0), "prompt_token_ids": [True]}, "prompt_token_ids"),
        ({**a_record(0), "output_token_ids": [-1] * 60}, "output_token_ids"),
        ({**a_record(0), "emitted": {"eagle": [0] * 60}}, "emitted"),
    ],
)
def test_a_file_of_another_schema_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], record: Any, words: str
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(record if isinstance(record, str) else json.dumps(record))
    assert main([str(path)]) == 2
    error = capsys.readouterr().err
    assert words in error and error.startswith("error: bad.jsonl, line 1") and error.count("\n") == 1


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    torn = tmp_path / "torn.jsonl.gz"
    torn.write_bytes(gzip.compress(b"{}\n" * 1000)[:-20])
    empty = write(tmp_path / "empty.jsonl", [])
    for path in (tmp_path / "missing.jsonl", torn, empty, tmp_path):
        with pytest.raises(ConfigError, match=path.name):
            read_recordings(path, "eagle")
    assert main([str(empty), "--max-draft", "0"]) == 2
