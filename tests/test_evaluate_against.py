"""`ssd-cache evaluate --against`: other draft methods on the same log."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from cache_builder.__main__ import main
from cache_builder.evaluation.peers import PEERS, Peer, replay_peer
from tests.test_evaluate_command import TOKENIZER, log_of, made_log, run_json, write_log

ROOT = Path(__file__).resolve().parents[1]


class Known(Peer):
    """Drafts the next three tokens of an output, the last of them wrong."""

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        self._texts, self._number, self._output = texts, -1, list[int]()
        self.finished = list[list[int]]()

    def start(self, prompt: np.ndarray) -> None:
        self._number += 1
        self._output = []

    def propose(self, context: np.ndarray) -> Sequence[int]:
        done = len(self._output)
        assert context[len(context) - done :].tolist() == self._output
        return [*self._texts[self._number][done : done + 2], 999]

    def extend(self, token_ids: np.ndarray) -> None:
        self._output += token_ids.tolist()

    def finish(self) -> None:
        self.finished.append(self._output)


def test_a_step_emits_what_the_draft_and_the_output_agree_on_and_one_token_more() -> None:
    outputs = [[1, 2, 3, 4, 5, 6, 7], [8], [9, 10, 11]]
    log = log_of(*[([50, 51], output) for output in outputs], ([], [1, 2, 3]))
    peer, told = Known(outputs), list[int]()
    found = replay_peer(log, peer, told.append)
    assert found.num_steps.tolist() == [3, 1, 1] and found.num_accepted.tolist() == [4, 0, 2]
    assert found.drafted.tolist() == [3, 3, 2, 2, 3] and peer.finished == outputs and told == [7, 1, 3]


def test_the_report_compares_with_prompt_lookup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = str(write_log(tmp_path / "log.jsonl", 40))
    found = run_json(capsys, log, "--against", "lookup")
    trees, chains, default, best = found["against"]
    assert [row["method"] for row in found["against"]] == ["ssd", "ssd", "lookup", "lookup"]
    assert trees["tokens_per_step"] == found["tokens_per_step"] >= chains["tokens_per_step"] > 1
    assert 1 < default["tokens_per_step"] < trees["tokens_per_step"] and best["speedup"] >= default["speedup"]
    assert main(["evaluate", log, "--tokenizer", TOKENIZER, "--against", "lookup"]) == 0
    assert "compared with other draft methods" in capsys.readouterr().out


def test_a_package_that_is_missing_is_named_before_the_log_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("llguidance")  # the test environment, which has neither
    assert main(["evaluate", "no such file", "--tokenizer", TOKENIZER, "--against", "suffix"]) == 2
    assert "pip install arctic-inference" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / ".venv-vllm").is_dir(), reason="vLLM is not installed: run `make bench-vllm`")
def test_all_methods_run_in_vllm_s_environment(tmp_path: Path) -> None:
    log = made_log()
    path = tmp_path / "log.jsonl"
    with path.open("w") as out:
        for number in range(len(log)):
            row = log.row(number)
            out.write(json.dumps({"token_ids": row.text().tolist(), "prompt_length": len(row.context)}) + "\n")
    command = [str(ROOT / ".venv-vllm/bin/python"), "-m", "cache_builder", "evaluate", str(path), "--json"]
    done = subprocess.run([*command, "--against", *PEERS], cwd=ROOT, capture_output=True, text=True, check=True)
    rows = json.loads(done.stdout)["against"]
    assert [row["method"] for row in rows] == ["ssd", "ssd", *(name for name in PEERS for _ in range(2))]
    figures = {(row["method"], row["setting"].partition(":")[0]): row["tokens_per_step"] for row in rows}
    assert all(found > 1 for found in figures.values())
    assert figures["suffix", "default"] > figures["lookup", "default"]
