"""``ssd-serve doctor``: in at most 25 lines, whether a server with the same options would draft on this machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.redis_server import RedisServer, redis_server
from tests.server.test_process import ROOT
from tests.waiting import START_S

__all__ = ["redis_server"]  # a fixture

SMALL = ("--device", "cpu", "--max-num-seqs", "2", "--max-model-len", "256")


def doctor(*arguments: str) -> tuple[int, dict[str, tuple[str, str]], str]:
    """The exit status, the verdict and the text of each check by its name, and the last line."""
    command = [sys.executable, "-m", "server", "doctor", *SMALL, *arguments]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=START_S, check=False)
    *lines, last = run.stdout.splitlines()
    assert len(lines) < 25, run.stdout
    return run.returncode, {line[6:22].strip(): (line[:4].strip(), line[23:]) for line in lines}, last


def test_a_machine_that_drafts_passes_all_checks(redis_server: RedisServer, tmp_path: Path) -> None:
    status, found, last = doctor("--cache-dir", str(tmp_path / "new" / "cache"), "--redis", redis_server.url)
    assert status == 0 and last == "a server with these options drafts", found
    assert {verdict for verdict, _ in found.values()} == {"ok"}
    assert not (tmp_path / "new").exists(), "it leaves nothing behind"
    assert found.keys() >= {
        "versions",
        "CPU",
        "threads",
        "cache dir",
        "Redis",
        "model",
        "kernels",
        "batch invariance",
        "speculation",
        "pass times",
        "draft cost",
        "a repeat",
    }


def test_what_fails_is_named_and_the_other_checks_are_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    status, found, last = doctor(
        "--cache-dir", str(tmp_path / "file"), "--redis", "redis://127.0.0.1:9", "--num-speculative-tokens", "0"
    )
    failed = {name for name, (verdict, _) in found.items() if verdict == "FAIL"}
    assert status == 1 and last == "3 of the checks failed"
    assert failed == {"cache dir", "Redis", "speculation"}
    assert "cannot be written" in found["cache dir"][1] and "disabled" in found["speculation"][1]
