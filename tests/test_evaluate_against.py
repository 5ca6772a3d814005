"""`ssd-cache evaluate --against`: other draft methods on the same log."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from cache_builder.__main__ import main
from cache_builder.evaluation.peers import PEERS
from tests.test_evaluate_command import TOKENIZER, made_log, run_json, write_log

ROOT = Path(__file__).resolve().parents[1]


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
